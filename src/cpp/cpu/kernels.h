// SPDX-License-Identifier: Apache-2.0
// What each instruction set supplies: one function for each element type. Plain data only, and no
// inline function: a kernels_*.cpp that emitted one would hand the linker a copy that other CPUs
// cannot run.
#pragma once

#include <stdint.h>

namespace tiledattn::cpu {

/// Keys that are folded into the running softmax at once, at most.
constexpr int kBlockKeys = 128;
/// Kernels look at whole groups of so many keys.
constexpr int kGroupKeys = 16;
/// Rows that share the loads of K and V. A row is one query head of one token.
constexpr int kGroupRows = 4;
/// Of the largest head_dim and head_dim_v.
constexpr int kMostElements = 256;
/// Packed q and o have rows of a multiple of this many elements, so that kernels use whole vectors
/// on them.
constexpr int kRowPadding = 64;

/// Types of K and V. The last two go with packed q that stayed bfloat16.
enum class Element : int {
  float32,
  float16,
  bfloat16,
  int8,
  float8,
  int8_by_bfloat16,
  float8_by_bfloat16
};
constexpr int kNumElements = 7;
/// Kernels see float8_e4m3fn elements divided by this: their bits then are those of a float16.
constexpr float kFloat8Unit = 256.0f;

/// One block of keys and the rows that it is folded into; all rows belong to one KV head.
struct BlockArgs {
  int num_rows;
  int num_keys;  ///< 1..kBlockKeys
  int head_dim;
  int head_dim_v;

  const void* q;     ///< packed q, zero from head_dim on; float32 unless CpuKernels says otherwise
  int64_t q_stride;  ///< elements
  const float* q_panels;  ///< q as [row / panel_rows][head_dim][panel_rows], zeros for rows that
                          ///< are not there; of bfloat16 q two elements in the place of each float,
                          ///< and zeros up to a multiple of pair_units; null: rows go in groups of
                          ///< kGroupRows
  float* widened;  ///< with q_panels: room for kBlockKeys rows of q_stride and as many of o_stride
  const void* const*
      k;  ///< address of each key's K; entries that fill up the last group repeat the last one
  const void* const* v;
  const void* const* next_k;  ///< the block after this one, to be prefetched
  const void* const* next_v;
  int num_next_keys;

  const int* row_begin;  ///< row r sees keys row_begin[r] .. row_end[r] - 1 of the block
  const int* row_end;

  const float* k_scale;  ///< factor of each key's scores, whole groups; null: none
  const float* v_scale;  ///< factor of each key's V, whole groups; null: none
  float softmax_scale;
  float softcap;  ///< 0: none

  // The running state, natural units. With q_panels m, l and the key ranges have entries for
  // whole panels.
  float* m;
  float* l;
  float* o;
  int64_t o_stride;
};

using AttendBlock = void (*)(const BlockArgs&);

struct CpuKernels {
  const char* name;
  AttendBlock
      attend_block[kNumElements];  ///< by Element; those by bfloat16 null unless packs_bfloat16
  bool packs_bfloat16;             ///< bfloat16 q stays bfloat16
  int panel_rows;                  ///< rows side by side in q_panels; divides kRowPadding
  int pair_units;                  ///< of q_panels; divides kRowPadding / 2
};

extern const CpuKernels kernels_scalar;
extern const CpuKernels kernels_avx2;
extern const CpuKernels kernels_avx512;
extern const CpuKernels kernels_avx512bf16;
extern const CpuKernels kernels_amxbf16;
extern const CpuKernels kernels_neon;
extern const CpuKernels kernels_neonbf16;

}  // namespace tiledattn::cpu
