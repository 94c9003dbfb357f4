// SPDX-License-Identifier: Apache-2.0
// Transfers of whole boxes between global and shared memory (TMA, sm_90), each issued by one
// thread. What a box holds outside its tensor is read as zero and never written.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "common/mbarrier.cuh"

namespace tiledattn::cuda {

/// Where a box begins, innermost first.
struct BoxAt {
  int column;
  int row;
  int head;
  int batch;
};

__device__ __forceinline__ void prefetch_tensor_map(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

/// The box's bytes count towards the barrier's phase.
__device__ __forceinline__ void load_box(void* to, const CUtensorMap& map, const BoxAt& at,
                                         MBarrier& barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(
          static_cast<std::uint32_t>(__cvta_generic_to_shared(to))),
      "l"(&map), "r"(at.column), "r"(at.row), "r"(at.head), "r"(at.batch), "r"(barrier.address())
      : "memory");
}

/// The same for what will not be read again soon: the L2 cache gives it up before anything else.
__device__ __forceinline__ void load_box_once(void* to, const CUtensorMap& map, const BoxAt& at,
                                              MBarrier& barrier) {
  asm volatile(
      "{\n"
      ".reg .b64 policy;\n"
      "createpolicy.fractional.L2::evict_first.b64 policy, 1.0;\n"
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".L2::cache_hint [%0], [%1, {%2, %3, %4, %5}], [%6], policy;\n"
      "}" ::"r"(static_cast<std::uint32_t>(__cvta_generic_to_shared(to))),
      "l"(&map), "r"(at.column), "r"(at.row), "r"(at.head), "r"(at.batch), "r"(barrier.address())
      : "memory");
}

/// Brings the box into the L2 cache.
__device__ __forceinline__ void prefetch_box(const CUtensorMap& map, const BoxAt& at) {
  asm volatile(
      "cp.async.bulk.prefetch.tensor.4d.L2.global.tile [%0, {%1, %2, %3, %4}];" ::"l"(&map),
      "r"(at.column), "r"(at.row), "r"(at.head), "r"(at.batch)
      : "memory");
}

/// Part of the thread's current group of stores.
__device__ __forceinline__ void store_box(const CUtensorMap& map, const BoxAt& at,
                                          const void* from) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%1, %2, %3, %4}], [%5];" ::
          "l"(&map),
      "r"(at.column), "r"(at.row), "r"(at.head), "r"(at.batch),
      "r"(static_cast<std::uint32_t>(__cvta_generic_to_shared(from)))
      : "memory");
}
__device__ __forceinline__ void commit_stores() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
/// Returns once the thread's stores have read shared memory, which may then be overwritten.
__device__ __forceinline__ void wait_for_reads_of_stores() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
/// Returns once the thread's stores are done.
__device__ __forceinline__ void wait_for_stores() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

/// Orders this thread's ordinary accesses to shared memory before later transfers and matrix
/// products.
__device__ __forceinline__ void fence_async_proxy() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

}  // namespace tiledattn::cuda
