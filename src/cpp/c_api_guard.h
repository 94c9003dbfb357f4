// SPDX-License-Identifier: Apache-2.0
// Exceptions into the codes of the C interface.
#pragma once

#include <exception>
#include <new>

#include "tiledattn/c_api.h"
#include "tiledattn/streaming.h"

namespace tiledattn::c_api {

/// Keeps the message for tiledattn_last_error; returns `status`. Allocates nothing.
tiledattn_status failed(tiledattn_status status, const char* message) noexcept;

/// Runs `body`; no exception leaves.
template <typename Body>
tiledattn_status guarded(Body&& body) noexcept {
  try {
    body();
    return TILEDATTN_OK;
  } catch (const TypeError& error) {
    return failed(TILEDATTN_TYPE_ERROR, error.what());
  } catch (const ValueError& error) {
    return failed(TILEDATTN_VALUE_ERROR, error.what());
  } catch (const IndexError& error) {
    return failed(TILEDATTN_INDEX_ERROR, error.what());
  } catch (const MemoryError& error) {
    return failed(TILEDATTN_MEMORY_ERROR, error.what());
  } catch (const CudaError& error) {
    return failed(TILEDATTN_CUDA_ERROR, error.what());
  } catch (const TileError& error) {
    return failed(TILEDATTN_TILE_ERROR, error.what());
  } catch (const CancelledError& error) {
    return failed(TILEDATTN_CANCELLED, error.what());
  } catch (const std::bad_alloc&) {
    return failed(TILEDATTN_MEMORY_ERROR, "out of host memory");
  } catch (const std::exception& error) {
    return failed(TILEDATTN_INTERNAL_ERROR, error.what());
  } catch (...) {
    return failed(TILEDATTN_INTERNAL_ERROR, "an exception of unknown type");
  }
}

}  // namespace tiledattn::c_api
