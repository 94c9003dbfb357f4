// SPDX-License-Identifier: Apache-2.0
// Tensor-core products of one warp (sm_80 and later): 16 x 16 times 16 x 8 of 16-bit elements,
// float32 sums.
//
// Fragments, with g = lane / 4 and t = lane % 4. A: rows g and g + 8, columns 2t, 2t + 1 and those
// + 8. B: rows 2t, 2t + 1 and those + 8, column g. C: rows g (c[0], c[1]) and g + 8 (c[2], c[3]),
// columns 2t and 2t + 1.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace tiledattn::cuda {

struct FragmentA {
  std::uint32_t part[4];
};
struct FragmentB {
  std::uint32_t part[2];
};

/// Four 8 x 8 matrices; lane 8 i + r gives the shared-memory address of row r of matrix i.
__device__ __forceinline__ FragmentA load_matrices(std::uint32_t address) {
  FragmentA a;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(a.part[0]), "=r"(a.part[1]), "=r"(a.part[2]), "=r"(a.part[3])
               : "r"(address)
               : "memory");
  return a;
}

/// Each matrix transposed.
__device__ __forceinline__ FragmentA load_matrices_transposed(std::uint32_t address) {
  FragmentA a;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(a.part[0]), "=r"(a.part[1]), "=r"(a.part[2]), "=r"(a.part[3])
               : "r"(address)
               : "memory");
  return a;
}

/// An 8 x 8 matrix in registers, transposed.
__device__ __forceinline__ std::uint32_t transpose_matrix(std::uint32_t part) {
  std::uint32_t transposed;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(part));
  return transposed;
}

/// c += a b, elements of type T.
template <typename T>
__device__ __forceinline__ void multiply_add(float (&c)[4], const FragmentA& a,
                                             const FragmentB& b) {
  if constexpr (std::is_same_v<T, __half>) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a.part[0]), "r"(a.part[1]), "r"(a.part[2]), "r"(a.part[3]), "r"(b.part[0]),
          "r"(b.part[1]));
  } else {
    static_assert(std::is_same_v<T, __nv_bfloat16>);
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a.part[0]), "r"(a.part[1]), "r"(a.part[2]), "r"(a.part[3]), "r"(b.part[0]),
          "r"(b.part[1]));
  }
}

/// Two elements in one register, `low` in the lower half.
template <typename T>
__device__ __forceinline__ std::uint32_t pack(float low, float high) {
  std::uint32_t bits;
  if constexpr (std::is_same_v<T, __half>) {
    const __half2 pair = __floats2half2_rn(low, high);
    __builtin_memcpy(&bits, &pair, sizeof(bits));
  } else {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    __builtin_memcpy(&bits, &pair, sizeof(bits));
  }
  return bits;
}

}  // namespace tiledattn::cuda
