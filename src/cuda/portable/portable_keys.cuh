// SPDX-License-Identifier: Apache-2.0
// How q, K and V get into shared memory.
//
// K and V of the tiles of keys are copied in the order of use, K0 V0 K1 V1 ..., into kSlots slots
// in turn. A thread finds where one key lies (block id and token) two tiles ahead, so that nobody
// waits for the table.
#pragma once

#include <cstdint>

#include "common/cp_async.cuh"
#include "portable/portable_shared.cuh"

namespace tiledattn::cuda {

/// Begin to copy rows of `dim` elements, which `from` gives a pointer to. Zeros where that is null,
/// and behind the last element.
template <typename Config, int kRows, typename T, typename From>
__device__ __forceinline__ void copy_rows(T (*to)[Config::kPitch], std::int64_t dim, From&& from) {
  constexpr int kSteps = (kRows + Config::kCopyRows - 1) / Config::kCopyRows;
  constexpr int kBatch = kSteps % 4 == 0 ? 4 : 1;  // look-ups at a time
  const std::uint32_t first = threadIdx.x / Config::kLanes;
  const std::uint32_t column = threadIdx.x % Config::kLanes * 8;
  const std::uint32_t first_to = shared_address(&to[first][column]);
  if (kRows < Config::kCopyRows && first >= kRows) return;
#pragma unroll
  for (int step = 0; step < kSteps; step += kBatch) {
    const T* rows[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) rows[i] = from(first + (step + i) * Config::kCopyRows);
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
#pragma unroll
      for (int piece = 0; piece < Config::kPieces; ++piece) {
        const int right = piece * Config::kLanes * 8;
        const int at = (step + i) * Config::kCopyRows * Config::kPitch + right;
        copy_async(first_to + static_cast<std::uint32_t>(at) * sizeof(T), rows[i] + column + right,
                   rows[i] == nullptr || column + right >= static_cast<std::uint32_t>(dim));
      }
    }
  }
}

template <typename T, typename Config>
class KeyLoader {
 public:
  __device__ KeyLoader(const PortableParams& params, PortableShared<T, Config>& shared)
      : params_(params), shared_(shared) {}

  __device__ __forceinline__ int num_tiles() const {
    const PortableTile& tile = shared_.tile;
    return tile.keys_end <= tile.keys_begin
               ? 0
               : (tile.keys_end - tile.first_key + Config::kKeys - 1) / Config::kKeys;
  }

  /// Begin to find this thread's key of a tile.
  __device__ __forceinline__ void look_up(int tile_index) {
    const AttentionProblem& p = params_.attend.problem;
    const int key = key_of_thread(tile_index);
    block_ = kAbsent;
    if (static_cast<int>(threadIdx.x) >= Config::kKeys || key < shared_.tile.keys_begin ||
        key >= shared_.tile.keys_end)
      return;
    const std::int64_t sequence = shared_.tile.sequence.index;
    block_ = static_cast<int>(p.table.given() ? p.table.at(sequence, params_.block_size.divide(key))
                                              : sequence);
  }

  /// What look_up() has found becomes visible to all behind the next barrier. Absent keys are null.
  __device__ __forceinline__ void store_place(int tile_index) {
    if (static_cast<int>(threadIdx.x) >= Config::kKeys) return;
    const AttentionProblem& p = params_.attend.problem;
    const int key = key_of_thread(tile_index);
    const std::int64_t token = p.table.given() ? std::int64_t{params_.block_size.remainder(key)}
                                               : shared_.tile.sequence.kv_begin + key;
    const auto row = [&](const PoolView& pool) {
      return static_cast<const T*>(pool.data) + block_ * pool.block_stride +
             token * pool.token_stride + shared_.tile.kv_head * pool.head_stride;
    };
    KeyRows rows{nullptr, nullptr};
    if (block_ != kAbsent) rows = {row(p.k), row(p.v)};
    shared_.keys[tile_index % 2][threadIdx.x] = rows;
  }

  /// Begin to copy K or V of a tile into `slot`, zeros for absent keys: a group of its own. Behind
  /// the last tile all are absent.
  template <bool kIsV>
  __device__ __forceinline__ void copy(int tile_index, int slot) {
    const AttentionProblem& p = params_.attend.problem;
    const KeyRows* const keys = shared_.keys[tile_index % 2];
    copy_rows<Config, Config::kKeys>(
        shared_.slots[slot], kIsV ? p.head_dim_v : p.head_dim,
        [&](std::uint32_t row) { return static_cast<const T*>(kIsV ? keys[row].v : keys[row].k); });
    end_copy_group();
  }

 private:
  static constexpr int kAbsent = -1;

  __device__ __forceinline__ int key_of_thread(int tile_index) const {
    return shared_.tile.first_key + tile_index * Config::kKeys + static_cast<int>(threadIdx.x);
  }

  const PortableParams& params_;
  PortableShared<T, Config>& shared_;
  int block_ = kAbsent;  ///< of this thread's key
};

}  // namespace tiledattn::cuda
