// SPDX-License-Identifier: Apache-2.0
// Division by a number that the host knows, without the device's slow division.
#pragma once

#include <cstdint>

#include "problem.h"

namespace tiledattn::cuda {

/// x / value for 0 <= x < 2^31.
struct Divisor {
  std::uint32_t value = 1;
  std::uint32_t magic = 0;
  std::uint32_t shift = 0;

  Divisor() = default;
  /// `by` from 1 to 2^31 - 1.
  explicit Divisor(std::int64_t by) : value(static_cast<std::uint32_t>(by)) {
    if (value == 1) return;
    std::uint32_t bits = 1;  // 2^bits >= value
    while ((std::uint64_t{1} << bits) < value) ++bits;
    magic = static_cast<std::uint32_t>(((std::uint64_t{1} << (31 + bits)) + value - 1) / value);
    shift = bits - 1;
  }

  TILEDATTN_HOST_DEVICE std::uint32_t divide(std::uint32_t x) const {
    if (value == 1) return x;
#if defined(__CUDA_ARCH__)
    return __umulhi(x, magic) >> shift;
#else
    return static_cast<std::uint32_t>((std::uint64_t{x} * magic) >> 32) >> shift;
#endif
  }
  TILEDATTN_HOST_DEVICE int divide(int x) const {
    return static_cast<int>(divide(static_cast<std::uint32_t>(x)));
  }
  TILEDATTN_HOST_DEVICE int remainder(int x) const {
    return x - divide(x) * static_cast<int>(value);
  }
};

}  // namespace tiledattn::cuda
