// SPDX-License-Identifier: Apache-2.0
// AMX with BF16, beside AVX-512 with BF16: eight registers of 16 rows of 16 units, and their
// products. Each sum goes over 16 units at a time, the first elements of all of them apart from the
// second ones.
#pragma once

#include "vec_avx512bf16.h"

namespace {

/// As LDTILECFG reads it.
struct alignas(64) TileConfiguration {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

constexpr TileConfiguration kWholeTiles{};

template <>
struct TileProduct<BFloat16> {
  static constexpr bool kExists = true;
  static constexpr int kSize = 32;
  static constexpr int kUnits = 16;

  /// Tile registers are this thread's from here on, and given up at the end: a thread that has them
  /// in use takes longer to be switched.
  struct Registers {
    Registers() { _tile_loadconfig(&kWholeTiles); }
    ~Registers() { _tile_release(); }
    Registers(const Registers&) = delete;
    Registers& operator=(const Registers&) = delete;
  };

  static void multiply(const float* a, int64_t a_stride, const float* b, int64_t b_stride,
                       int units, float* c, int64_t c_stride) {
    constexpr int64_t kItem = sizeof(float);
    // GCC does not know that loads of tiles read memory.
    __asm__ volatile("" ::: "memory");
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int i = 0; i < units; i += kUnits, a += kUnits, b += kUnits * b_stride) {
      _tile_loadd(6, b, b_stride * kItem);
      _tile_loadd(4, a, a_stride * kItem);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, b + 16, b_stride * kItem);
      _tile_dpbf16ps(1, 4, 7);
      _tile_loadd(5, a + 16 * a_stride, a_stride * kItem);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, c, c_stride * kItem);
    _tile_stored(1, c + 16, c_stride * kItem);
    _tile_stored(2, c + 16 * c_stride, c_stride * kItem);
    _tile_stored(3, c + 16 * c_stride + 16, c_stride * kItem);
  }

  static void pair_transposed(const float* from, int64_t from_stride, float* to,
                              int64_t to_stride) {
    // Vector i has the elements of rows i and i + 8, or 16 more: transposed by pairs of elements,
    // by two pairs and by four, a quarter of a vector holds four units of one column.
    __m512i v[kUnits], w[kUnits];
    for (int i = 0; i < kUnits; ++i) {
      const float* row = from + (i + i / 8 * 8) * from_stride;
      v[i] = (__m512i)_mm512_cvtne2ps_pbh(load(row + 8 * from_stride), load(row));
    }
    for (int i = 0; i < kUnits; i += 2) {
      w[i] = _mm512_unpacklo_epi16(v[i], v[i + 1]);      // columns 0..3 and 8..11
      w[i + 1] = _mm512_unpackhi_epi16(v[i], v[i + 1]);  // columns 4..7 and 12..15
    }
    for (int i = 0; i < kUnits; i += 4) {
      for (int half = 0; half < 2; ++half) {
        v[i + 2 * half] = _mm512_unpacklo_epi32(w[i + half], w[i + 2 + half]);
        v[i + 2 * half + 1] = _mm512_unpackhi_epi32(w[i + half], w[i + 2 + half]);
      }
    }
    for (int i = 0; i < kUnits; i += 8) {
      for (int j = 0; j < 4; ++j) {
        w[i + 2 * j] = _mm512_unpacklo_epi64(v[i + j], v[i + 4 + j]);
        w[i + 2 * j + 1] = _mm512_unpackhi_epi64(v[i + j], v[i + 4 + j]);
      }
    }
    for (int column = 0; column < 8; ++column) {
      // Quarters: column and column + 8 of the first eight rows, then of the next ones.
      const __m512i first = w[column], last = w[column + 8];
      _mm512_storeu_si512(to + column * to_stride, _mm512_shuffle_i64x2(first, last, 0x88));
      _mm512_storeu_si512(to + (column + 8) * to_stride, _mm512_shuffle_i64x2(first, last, 0xdd));
    }
  }
};

}  // namespace
