// SPDX-License-Identifier: Apache-2.0
// Rows of elements to and from float32, on any CPU. Addresses need no alignment.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "cpu/kernels.h"
#include "tiledattn/tensor.h"

namespace tiledattn::cpu {

inline float bfloat16_to_float(std::uint16_t bits) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
}

/// Rounded to nearest, ties to even; NaN stays NaN.
inline std::uint16_t float_to_bfloat16(float x) {
  const auto bits = std::bit_cast<std::uint32_t>(x);
  if ((bits & 0x7fffffff) > 0x7f800000) return static_cast<std::uint16_t>(bits >> 16 | 0x40);
  return static_cast<std::uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline float float16_to_float(std::uint16_t half) {
  const std::uint32_t sign = (half & 0x8000u) << 16;
  const std::uint32_t magnitude = half & 0x7fffu;
  // The exponent moves to its new place and is corrected by a product, which also normalises
  // subnormal halves.
  const std::uint32_t bits =
      magnitude >= 0x7c00
          ? magnitude << 13 | 0x7f800000
          : std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude << 13) * 0x1p112f);
  return std::bit_cast<float>(bits | sign);
}

/// Rounded to nearest, ties to even; infinity from 65520 on.
inline std::uint16_t float_to_float16(float x) {
  const auto bits = std::bit_cast<std::uint32_t>(x);
  const auto sign = static_cast<std::uint16_t>(bits >> 16 & 0x8000);
  const std::uint32_t magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return sign | 0x7e00;
  if (magnitude >= 0x477ff000) return sign | 0x7c00;
  if (magnitude < 0x38800000) {
    // Subnormal: adding 0.5 leaves the rounded multiple of 2^-24 in the low bits.
    const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
    return static_cast<std::uint16_t>(sign | (std::bit_cast<std::uint32_t>(shifted) - 0x3f000000));
  }
  const std::uint32_t rounded = magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1);
  return static_cast<std::uint16_t>(sign | rounded >> 13);
}

/// Rounded to nearest, ties to even; beyond +-448 saturated; NaN stays NaN.
inline std::uint8_t float_to_float8(float x) {
  const auto bits = std::bit_cast<std::uint32_t>(x);
  const auto sign = static_cast<std::uint8_t>(bits >> 24 & 0x80);
  const std::uint32_t magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return sign | 0x7f;
  if (magnitude >= std::bit_cast<std::uint32_t>(448.0f)) return sign | 0x7e;
  if (magnitude < std::bit_cast<std::uint32_t>(0x1p-6f)) {
    // Subnormal: adding 2^14 leaves the rounded multiple of 2^-9 in the low bits.
    const float shifted = std::bit_cast<float>(magnitude) + 0x1p14f;
    return static_cast<std::uint8_t>(
        sign | (std::bit_cast<std::uint32_t>(shifted) - std::bit_cast<std::uint32_t>(0x1p14f)));
  }
  constexpr std::uint32_t kBias = (127 - 7) << 23;
  const std::uint32_t rounded = magnitude - kBias + 0x7ffff + (magnitude >> 20 & 1);
  return static_cast<std::uint8_t>(sign | rounded >> 20);
}

/// Rounded to nearest, ties to even; beyond +-127 saturated; 0 for NaN.
inline std::int8_t float_to_int8(float x) {
  if (x != x) return 0;
  const float limited = x < -127.0f ? -127.0f : x > 127.0f ? 127.0f : x;
  return static_cast<std::int8_t>(std::nearbyint(limited));
}

inline void load_row(const void* from, DType dtype, std::int64_t count, float* to) {
  if (dtype == DType::float32) {
    std::memcpy(to, from, static_cast<std::size_t>(count) * 4);
    return;
  }
  const auto* bytes = static_cast<const char*>(from);
  for (std::int64_t i = 0; i < count; ++i) {
    std::uint16_t bits;
    std::memcpy(&bits, bytes + 2 * i, 2);
    to[i] = dtype == DType::bfloat16 ? bfloat16_to_float(bits) : float16_to_float(bits);
  }
}

inline void store_row(const float* from, std::int64_t count, DType dtype, void* to) {
  if (dtype == DType::float32) {
    std::memcpy(to, from, static_cast<std::size_t>(count) * 4);
    return;
  }
  auto* bytes = static_cast<char*>(to);
  const auto store = [&](auto convert) {
    for (std::int64_t i = 0; i < count; ++i) {
      const std::uint16_t bits = convert(from[i]);
      std::memcpy(bytes + 2 * i, &bits, 2);
    }
  };
  if (dtype == DType::bfloat16) {
    store([](float x) { return float_to_bfloat16(x); });
  } else {
    store([](float x) { return float_to_float16(x); });
  }
}

/// `from` / scale as float8_e4m3fn or int8; a scale of 0 counts every finite element as 0.
inline void quantize_row(const float* from, std::int64_t count, DType dtype, float scale,
                         void* to) {
  auto* bytes = static_cast<std::uint8_t*>(to);
  for (std::int64_t i = 0; i < count; ++i) {
    const float x = scale == 0.0f ? from[i] * 0.0f : from[i] / scale;
    bytes[i] =
        dtype == DType::int8 ? static_cast<std::uint8_t>(float_to_int8(x)) : float_to_float8(x);
  }
}

/// `base` moved by `elements` of `dtype`.
inline const void* advance(const void* base, std::int64_t elements, DType dtype) {
  return static_cast<const char*>(base) + elements * item_bytes(dtype);
}
inline void* advance(void* base, std::int64_t elements, DType dtype) {
  return static_cast<char*>(base) + elements * item_bytes(dtype);
}

inline Element element_of(DType dtype) {
  if (dtype == DType::bfloat16) return Element::bfloat16;
  if (dtype == DType::float16) return Element::float16;
  if (dtype == DType::int8) return Element::int8;
  if (dtype == DType::float8_e4m3fn) return Element::float8;
  return Element::float32;
}

}  // namespace tiledattn::cpu
