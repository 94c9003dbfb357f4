// SPDX-License-Identifier: Apache-2.0
// Matrix products of a warpgroup (four warps) on sm_90a.
//
// A product is asynchronous: fence, issue, commit, and later wait. Between issue and wait nothing
// may touch its accumulators or its A registers, or ptxas serialises everything and says C75xx
// (scripts/check_ptxas.py fails on it).
//
// Tiles lie in shared memory as TMA writes them with 128-byte swizzle: slabs of 64 16-bit columns,
// each row of a slab 128 bytes long, its 16-byte piece c stored at piece c ^ (row % 8). A slab
// starts at a multiple of 1024 bytes. The same image serves as K-major operand (q, K) and as
// MN-major operand (V).
#pragma once

#include <cstdint>

#include "common/shared_address.cuh"
#include "common/wgmma_instructions.cuh"

namespace tiledattn::cuda {

constexpr unsigned kWarpgroupSize = 128;
/// Rows of the accumulator of one product.
constexpr int kWgmmaRows = 64;
/// Depth of one product.
constexpr int kWgmmaDepth = 16;
constexpr int kSlabColumns = 64;
constexpr int kSlabRowBytes = 128;

__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
/// Waits until at most kPending committed groups are still running.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

/// Bytes between groups of eight rows.
constexpr std::uint32_t kRowGroupBytes = 8 * kSlabRowBytes;

/// A matrix descriptor: its low half holds the address and the leading offset, in units of 16
/// bytes, and moves; its high half, the stride and the swizzle, is the same for all tiles. Kept
/// apart, so that moving is one addition.
struct MatrixDescriptor {
  std::uint32_t low;

  __device__ __forceinline__ MatrixDescriptor moved(int bytes) const {
    return {low + static_cast<std::uint32_t>(bytes >> 4)};
  }
  __device__ __forceinline__ std::uint64_t bits() const {
    constexpr std::uint64_t kSwizzle128 = 1;
    constexpr std::uint64_t kHigh = kSwizzle128 << 62 | std::uint64_t{kRowGroupBytes >> 4} << 32;
    return kHigh | low;
  }
};

/// Rows of q or K: elements along the depth are adjacent. Leading offset unused, 16 by convention.
__device__ __forceinline__ MatrixDescriptor k_major_descriptor(const void* tile) {
  return {(shared_address(tile) & 0x3ffff) >> 4 | 1u << 16};
}

/// Rows of V: elements along N are adjacent; the next 64 columns are `slab_bytes` further on.
__device__ __forceinline__ MatrixDescriptor mn_major_descriptor(const void* tile, int slab_bytes) {
  return {(shared_address(tile) & 0x3ffff) >> 4 | static_cast<std::uint32_t>(slab_bytes >> 4)
                                                      << 16};
}

/// Registers of each thread of a warpgroup, from now on. Every warp of it must call this.
template <int kRegisters>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void give_registers_back() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

/// The value itself. What hangs on it is computed behind this point and not, as loop invariants
/// are, long before, in registers that the loop needs.
__device__ __forceinline__ unsigned computed_here(unsigned value) {
  asm volatile("" : "+r"(value));
  return value;
}

__device__ __forceinline__ MatrixDescriptor computed_here(MatrixDescriptor value) {
  return {computed_here(value.low)};
}

/// Two floats rounded to T, the first in the low half.
__device__ __forceinline__ std::uint32_t pack_pair(float low, float high, const __nv_bfloat16*) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<const std::uint32_t&>(pair);
}
__device__ __forceinline__ std::uint32_t pack_pair(float low, float high, const __half*) {
  const __half2 pair = __floats2half2_rn(low, high);
  return reinterpret_cast<const std::uint32_t&>(pair);
}
template <typename T>
__device__ __forceinline__ std::uint32_t pack_pair(float low, float high) {
  return pack_pair(low, high, static_cast<const T*>(nullptr));
}

/// Four 8 x 8 matrices of 16-bit elements to shared memory; lane i gives the address of row i % 8
/// of matrix i / 8.
__device__ __forceinline__ void store_matrices(std::uint32_t address, std::uint32_t a,
                                               std::uint32_t b, std::uint32_t c, std::uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
               "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
}

}  // namespace tiledattn::cuda
