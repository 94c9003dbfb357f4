// SPDX-License-Identifier: Apache-2.0
// What is done with one tile of attention on the CPU: pack its q, fold a segment of the keys into a
// partial result, write the result. Which thread does so with which tile, and how partials are
// merged, is attend.cpp.
#pragma once

#include <cstdint>

#include "cpu/kernels.h"
#include "cpu/workbench.h"
#include "plan.h"
#include "problem.h"

namespace tiledattn::cpu {

/// Tokens first .. last of a sequence, with the query heads of some KV heads. Rows are ordered by
/// KV head, token, query head.
struct Tile {
  Sequence sequence;
  std::int64_t kv_head = 0;  ///< the first
  std::int64_t num_kv_heads = 1;
  std::int64_t first = 0;
  std::int64_t last = 0;
};

/// Keys that a thread will want next, or would like to have when it may: nothing where `keys` is
/// empty.
struct KeysAhead {
  const Tile* tile = nullptr;
  KeyRange keys;
};

/// Works on any tile of one problem.
class TileWork {
 public:
  TileWork(const AttentionProblem& problem, const Plan& plan);

  std::int64_t num_rows(const Tile& t) const { return head_rows(t) * t.num_kv_heads; }
  std::int64_t token_of(const Tile& t, std::int64_t row) const {
    return t.first + row % head_rows(t) / p_.gqa_ratio();
  }
  std::int64_t head_of(const Tile& t, std::int64_t row) const {
    return (t.kv_head + row / head_rows(t)) * p_.gqa_ratio() + row % p_.gqa_ratio();
  }

  std::int64_t segments_of(const Sequence& s) const;
  /// What is fetched before segment `segment` begins; nothing where that is `end`.
  KeysAhead first_keys(const Tile& t, std::int64_t segment, std::int64_t end) const;

  /// This thread's memory, with room for the tile.
  Workbench& reserve_bench(const Tile& t) const;
  /// Packs the tile's q into this thread's memory.
  Workbench& prepare(const Tile& t) const;
  /// The partial result of one segment of the sequence's keys, of which the tile's tokens may see
  /// only some. `then`: keys to be fetched at its end.
  void fold_segment(const Tile& t, std::int64_t segment, const KeysAhead& then,
                    const Workbench& bench) const;
  /// The tile's result into state and out.
  void finish(const Tile& t, const Workbench& bench) const;

 private:
  struct KeyBlock;

  /// Products of many rows take two elements of bfloat16 at a time.
  bool by_pairs() const { return p_.kv_dtype == DType::bfloat16 && kernels_.packs_bfloat16; }
  std::int64_t query_units() const;
  bool keeps_bfloat16(const Tile& t) const;
  Element element(const Tile& t) const;
  std::int64_t head_rows(const Tile& t) const { return (t.last - t.first + 1) * p_.gqa_ratio(); }
  KeyRange sequence_keys(const Sequence& s) const;
  KeyRange segment_of(const Sequence& s, std::int64_t index) const;
  std::int64_t block_keys() const;

  bool by_products(const Tile& t) const;
  void make_panels(const Tile& t, const Workbench& bench) const;
  void fold_block(const Tile& t, std::int64_t first_row, const KeyBlock& block,
                  const KeyBlock* next, const Workbench& bench) const;
  void locate(const Tile& t, KeyRange keys, KeyBlock& block) const;
  void next_head(const KeyBlock& block, KeyBlock& next) const;
  double head_scale(const ScaleView& scale, std::int64_t kv_head) const;

  const AttentionProblem& p_;
  const Plan& plan_;
  const CpuKernels& kernels_;
};

}  // namespace tiledattn::cpu
