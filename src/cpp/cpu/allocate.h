// SPDX-License-Identifier: Apache-2.0
// Memory that the CPU backend asks for: where there is none, the error says how much it was.
#pragma once

#include <cstddef>
#include <cstdint>
#include <new>
#include <stdexcept>
#include <string>
#include <vector>

#include "tiledattn/error.h"

namespace tiledattn::cpu {

[[noreturn]] inline void throw_no_memory(const std::string& bytes) {
  throw MemoryError("cpu: could not allocate " + bytes + " bytes");
}

/// Runs `ask`, which asks for `bytes` bytes.
template <typename Ask>
void allocate(std::size_t bytes, Ask&& ask) {
  try {
    ask();
  } catch (const std::bad_alloc&) {
    throw_no_memory(std::to_string(bytes));
  } catch (const std::length_error&) {  // more than a vector can hold
    throw_no_memory(std::to_string(bytes));
  }
}

/// Makes room for `count` elements.
template <typename T>
void reserve(std::vector<T>& elements, std::int64_t count) {
  const auto size = static_cast<std::size_t>(count);
  allocate(size * sizeof(T), [&] { elements.reserve(size); });
}

}  // namespace tiledattn::cpu
