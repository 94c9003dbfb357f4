// SPDX-License-Identifier: Apache-2.0
// Streams and CUDA graphs: what is being captured, what a graph keeps alive, order between two
// streams.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>

namespace tiledattn::cuda {

/// The legacy default stream, by either of its handles.
bool is_legacy(cudaStream_t stream);
bool same_stream(cudaStream_t a, cudaStream_t b);

/// A number that names the capture that `stream` is in; 0 outside.
std::uint64_t capture_id(cudaStream_t stream);

/// A number that no other stream has or had, also not one that was at the same address before.
/// Never 0.
std::uint64_t stream_id(cudaStream_t stream);

/// Keeps `owner` alive as long as the graph that `stream` is capturing into. Nothing to do outside
/// a capture.
void retain_in_capture(cudaStream_t stream, std::shared_ptr<void> owner);

/// Work put on `waiting` from now on starts after what is on `on`, another stream, now. Does
/// nothing when either is capturing.
void order_streams(int device, cudaStream_t waiting, cudaStream_t on);

}  // namespace tiledattn::cuda
