// SPDX-License-Identifier: Apache-2.0
// Attention on the CPU. A unit of work is a tile: some query tokens of one sequence with the query
// heads of one KV head, or of several that lie side by side in memory.
//
// The keys of a sequence come in segments (of decode: plan.h). A tile folds each segment into an
// empty partial result and merges the partials in the order of keys. It does that alone ("walk"),
// or, where decode has fewer tiles than the threads need, every segment is a task of its own that
// leaves its partials in scratch, to be merged afterwards ("split"). Both make the same partials
// and merge them in the same order: the same bits.
#include "cpu/attend.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "checks.h"
#include "cpu/allocate.h"
#include "cpu/convert.h"
#include "cpu/isa.h"
#include "cpu/kernels.h"
#include "cpu/pool.h"
#include "cpu/rows.h"
#include "tiledattn/one_shot.h"

namespace tiledattn::cpu {
namespace {

/// Rows that walk over the keys together, when a sequence has many: enough to use each K and V load
/// often, few enough that their q and o stay in the L2 cache.
constexpr std::int64_t kDecodeRows = 64;
constexpr std::int64_t kPrefillRows = 128;
/// From this many rows on, two matrix products cost less than groups of rows.
constexpr std::int64_t kMinProductRows = 12;
/// Below this many tiles for each thread, segments are spread over the threads.
constexpr std::int64_t kTilesPerThread = 4;
/// Segments in a row, where they are spread, and the parts that each thread should find
/// nevertheless.
constexpr std::int64_t kMostInARow = 8;
constexpr std::int64_t kPartsPerThread = 32;
/// Keys of a segment of prefill. Summed block by block for longer, equal values lose more to
/// rounding than the bound for float32 allows.
constexpr std::int64_t kPrefillSegmentKeys = 4096;

std::int64_t padded(std::int64_t size) {
  return (size + kRowPadding - 1) / kRowPadding * kRowPadding;
}

/// Tokens first .. last of a sequence, with the query heads of some KV heads. Rows are ordered by
/// KV head, token, query head.
struct Tile {
  Sequence sequence;
  std::int64_t kv_head = 0;  ///< the first
  std::int64_t num_kv_heads = 1;
  std::int64_t first = 0;
  std::int64_t last = 0;
};

/// Memory of one thread for one tile; kept between calls.
class Workbench {
 public:
  static Workbench& of_this_thread() {
    thread_local Workbench bench;
    return bench;
  }

  void reserve(std::int64_t rows_in_use, std::int64_t head_dim, std::int64_t head_dim_v) {
    const std::int64_t num_rows = padded(rows_in_use);
    const std::int64_t q_floats = num_rows * padded(head_dim);
    const std::int64_t o_floats = num_rows * padded(head_dim_v);
    const std::int64_t widened_floats = kBlockKeys * (padded(head_dim) + padded(head_dim_v));
    const auto floats =
        static_cast<std::size_t>(2 * q_floats + 2 * o_floats + 4 * num_rows + widened_floats) +
        kAlignment / sizeof(float);
    if (floats > size_) {
      allocate(floats * sizeof(float),
               [&] { memory_ = std::make_unique_for_overwrite<float[]>(floats); });
      size_ = floats;
    }
    void* start = memory_.get();
    std::size_t space = size_ * sizeof(float);
    q = static_cast<float*>(std::align(kAlignment, 1, start, space));
    partial = {q + q_floats + 2 * o_floats, q + q_floats + 2 * o_floats + num_rows, q + q_floats};
    total = {partial.l + num_rows, partial.l + 2 * num_rows, q + q_floats + o_floats};
    q_panels = total.l + num_rows;
    widened = q_panels + q_floats;
    o_stride = padded(head_dim_v);
  }

  Row partial_row(std::int64_t r) const {
    return {partial.m + r, partial.l + r, partial.o + r * o_stride};
  }
  Row total_row(std::int64_t r) const { return {total.m + r, total.l + r, total.o + r * o_stride}; }

  float* q = nullptr;  ///< packed q, or bfloat16 elements in the same place
  float* q_panels = nullptr;
  float* widened = nullptr;
  Row partial{};  ///< row 0 of a segment's result
  Row total{};    ///< row 0 of all segments' result
  std::int64_t o_stride = 0;

 private:
  static constexpr std::size_t kAlignment = 64;
  std::unique_ptr<float[]> memory_;
  std::size_t size_ = 0;
};

/// Addresses of one block of keys of one KV head, as kernels want them; of the scales where each
/// key has its own.
struct KeyBlock {
  KeyRange keys;
  const void* k[kBlockKeys];
  const void* v[kBlockKeys];
  const void* k_scale[kBlockKeys];
  const void* v_scale[kBlockKeys];
  int size() const { return static_cast<int>(keys.end - keys.begin); }
};

void advance_all(const void* const (&from)[kBlockKeys], std::int64_t bytes,
                 const void* (&to)[kBlockKeys]) {
  for (int j = 0; j < kBlockKeys; ++j) to[j] = static_cast<const char*>(from[j]) + bytes;
}

const float* scale_address(const ScaleView& scale, KeyPlace place, std::int64_t kv_head) {
  return scale.data + place.block * scale.block_stride + place.token * scale.token_stride +
         kv_head * scale.head_stride;
}

/// A scale meets sums here, not elements: an infinite one would make an infinity of what is NaN.
float finite_or_nan(float scale) { return scale + (scale - scale); }

/// The scales at the addresses.
void gather(const void* const (&from)[kBlockKeys], float (&to)[kBlockKeys]) {
  for (int j = 0; j < kBlockKeys; ++j) to[j] = finite_or_nan(*static_cast<const float*>(from[j]));
}

class Attention {
 public:
  Attention(const AttentionProblem& problem, const Plan& plan, void* scratch)
      : p_(problem), plan_(plan), scratch_(static_cast<float*>(scratch)), kernels_(kernels()) {}

  void check() const;
  void run() const;
  /// All of them, in turn: each of them one piece.
  static void run_in_turn(const std::vector<Attention>& steps);
  /// Can it be one of several, of which `other` is one?
  bool goes_with(const Attention& other) const;

 private:
  std::int64_t tile_rows() const {
    return plan_.kernel == Kernel::cpu_decode ? kDecodeRows : kPrefillRows;
  }
  std::int64_t tokens_per_tile() const {
    // Decode is bound by reading K and V: all its tokens share one pass.
    const std::int64_t least = plan_.kernel == Kernel::cpu_decode ? kMaxDecodeTokens : 1;
    return std::max(least, tile_rows() / p_.gqa_ratio());
  }
  std::int64_t kv_heads_per_tile() const;
  /// Packed q stays bfloat16 where kernels multiply it with K of the same type.
  bool keeps_bfloat16() const { return p_.kv_dtype == DType::bfloat16 && kernels_.packs_bfloat16; }
  /// Floats that a row of q takes in a panel: two bfloat16 elements have the room of one.
  std::int64_t query_units() const {
    return keeps_bfloat16() ? (p_.head_dim + 1) / 2 : p_.head_dim;
  }
  std::int64_t head_rows(const Tile& t) const { return (t.last - t.first + 1) * p_.gqa_ratio(); }
  std::int64_t num_rows(const Tile& t) const { return head_rows(t) * t.num_kv_heads; }
  std::int64_t token_of(const Tile& t, std::int64_t row) const {
    return t.first + row % head_rows(t) / p_.gqa_ratio();
  }
  std::int64_t head_of(const Tile& t, std::int64_t row) const {
    return (t.kv_head + row / head_rows(t)) * p_.gqa_ratio() + row % p_.gqa_ratio();
  }
  KeyRange sequence_keys(const Sequence& s) const;
  std::int64_t segments_of(const Sequence& s) const;
  KeyRange segment_of(const Sequence& s, std::int64_t index) const;
  KeyRange first_keys(const Tile& t, std::int64_t segment, std::int64_t end) const;

  void run_sequences(std::int64_t first, std::int64_t last) const;
  std::vector<Tile> make_tiles(std::int64_t first, std::int64_t last) const;
  bool worth_splitting(const std::vector<Tile>& tiles) const;
  void walk(const Tile& t) const;
  static void split(const Attention* steps, const std::vector<std::vector<Tile>>& tiles,
                    std::int64_t first);
  void merge(const Tile& t, std::int64_t first, const Workbench& bench) const;

  bool by_products(const Tile& t) const;
  Workbench& reserve_bench(const Tile& t) const;
  Workbench& prepare(const Tile& t) const;
  void make_panels(const Tile& t, const Workbench& bench) const;
  void fold_segment(const Tile& t, std::int64_t segment, const KeyRange& then,
                    const Workbench& bench) const;
  void fold_block(const Tile& t, std::int64_t first_row, const KeyBlock& block,
                  const KeyBlock* next, const Workbench& bench) const;
  void locate(const Tile& t, KeyRange keys, KeyBlock& block) const;
  void next_head(const KeyBlock& block, KeyBlock& next) const;
  double head_scale(const ScaleView& scale, std::int64_t kv_head) const;
  Row scratch_row(const Tile& t, std::int64_t row, std::int64_t segment,
                  std::int64_t first_seq) const;
  void finish(const Tile& t, const Workbench& bench) const;

  const AttentionProblem& p_;
  const Plan& plan_;
  float* const scratch_;
  const CpuKernels& kernels_;
};

void Attention::check() const {
  const Fault no_sequences = check_no_sequences(p_);
  if (no_sequences.found()) throw_fault(no_sequences);
  for (std::int64_t b = 0; b < p_.num_seqs; ++b) {
    const Fault fault = check_sequence(p_, b);
    if (fault.found()) throw_fault(fault);
  }
  for (std::int64_t b = 0; b < p_.num_seqs; ++b) {
    const Sequence s = sequence_at(p_, b);
    const KeyRange columns = table_columns(p_, s);
    for (std::int64_t column = columns.begin; column < columns.end; ++column) {
      const Fault fault = check_block(p_, s, column);
      if (fault.found()) throw_fault(fault);
    }
  }
}

/// The keys that some query token of the sequence sees; segments are cut from them.
KeyRange Attention::sequence_keys(const Sequence& s) const {
  return visible_keys(p_, s, 0, s.q_len - 1);
}

std::int64_t Attention::segments_of(const Sequence& s) const {
  const KeyRange keys = sequence_keys(s);
  const std::int64_t num_keys = keys.end - keys.begin;
  if (plan_.kernel == Kernel::cpu_decode) return num_segments(num_keys, plan_.segment_limit);
  return std::max<std::int64_t>(num_keys + kPrefillSegmentKeys - 1, 0) / kPrefillSegmentKeys;
}

KeyRange Attention::segment_of(const Sequence& s, std::int64_t index) const {
  const KeyRange keys = sequence_keys(s);
  if (plan_.kernel == Kernel::cpu_decode) return segment_range(keys, index, plan_.segment_limit);
  const std::int64_t begin = keys.begin + index * kPrefillSegmentKeys;
  return {begin, std::min(begin + kPrefillSegmentKeys, keys.end)};
}

/// What is fetched before segment `segment` begins; nothing where that is `end`.
KeyRange Attention::first_keys(const Tile& t, std::int64_t segment, std::int64_t end) const {
  if (segment == end) return {};
  const KeyRange keys = segment_of(t.sequence, segment);
  return {keys.begin, std::min(keys.begin + kBlockKeys, keys.end)};
}

void Attention::run() const {
  if (p_.num_kv_heads == 0) return;
  // Sequence num_seqs of a packed q: the rows after the last sequence.
  const std::int64_t num_seqs = p_.num_seqs + (p_.packed_q() ? 1 : 0);
  const std::int64_t step = std::max<std::int64_t>(plan_.seqs_per_launch, 1);
  for (std::int64_t first = 0; first < num_seqs; first += step) {
    run_sequences(first, std::min(first + step, num_seqs));
  }
}

void Attention::run_sequences(std::int64_t first, std::int64_t last) const {
  const std::vector<Tile> tiles = make_tiles(first, last);
  if (worth_splitting(tiles)) return split(this, {tiles}, first);
  parallel_for(static_cast<std::int64_t>(tiles.size()),
               [&](std::int64_t i) { walk(tiles[static_cast<std::size_t>(i)]); });
}

/// Where the heads of a token lie side by side, a tile takes several: each page of memory is then
/// gone through once, and not once for each head.
std::int64_t Attention::kv_heads_per_tile() const {
  const bool side_by_side =
      p_.k.head_stride < p_.k.token_stride && p_.v.head_stride < p_.v.token_stride;
  if (plan_.kernel != Kernel::cpu_decode || !side_by_side) return 1;
  const std::int64_t rows = std::max<std::int64_t>(p_.q_len, 1) * p_.gqa_ratio();
  return std::clamp<std::int64_t>(tile_rows() / rows, 1, p_.num_kv_heads);
}

/// Tiles of sequences first .. last - 1. The last tokens come first: under a causal mask they have
/// the most keys.
std::vector<Tile> Attention::make_tiles(std::int64_t first, std::int64_t last) const {
  std::vector<Tile> tiles;
  const std::int64_t tokens = tokens_per_tile();
  const std::int64_t heads = kv_heads_per_tile();
  std::int64_t count = 0;
  for (std::int64_t b = first; b < last; ++b) {
    count +=
        (p_.num_kv_heads + heads - 1) / heads * ((sequence_at(p_, b).q_len + tokens - 1) / tokens);
  }
  reserve(tiles, count);
  for (std::int64_t b = first; b < last; ++b) {
    const Sequence s = sequence_at(p_, b);
    for (std::int64_t kv_head = 0; kv_head < p_.num_kv_heads; kv_head += heads) {
      const std::int64_t num_heads = std::min(heads, p_.num_kv_heads - kv_head);
      for (std::int64_t i = (s.q_len + tokens - 1) / tokens - 1; i >= 0; --i) {
        tiles.push_back(
            {s, kv_head, num_heads, i * tokens, std::min((i + 1) * tokens, s.q_len) - 1});
      }
    }
  }
  return tiles;
}

bool Attention::worth_splitting(const std::vector<Tile>& tiles) const {
  if (scratch_ == nullptr || plan_.max_segments <= 1 || get_num_threads() == 1) return false;
  return static_cast<std::int64_t>(tiles.size()) < kTilesPerThread * get_num_threads();
}

void Attention::walk(const Tile& t) const {
  Workbench& bench = prepare(t);
  const std::int64_t rows = num_rows(t);
  const std::int64_t segments = segments_of(t.sequence);
  if (segments == 0) {
    for (std::int64_t r = 0; r < rows; ++r) clear_row(bench.total_row(r), p_.head_dim_v);
  }
  for (std::int64_t segment = 0; segment < segments; ++segment) {
    fold_segment(t, segment, first_keys(t, segment + 1, segments), bench);
    if (segment == 0) {  // what a merge into nothing would copy
      std::swap(bench.partial, bench.total);
      continue;
    }
    for (std::int64_t r = 0; r < rows; ++r)
      merge_row(bench.total_row(r), bench.partial_row(r), p_.head_dim_v);
  }
  finish(t, bench);
}

bool Attention::goes_with(const Attention& other) const {
  return plan_.kernel == Kernel::cpu_decode && p_.num_kv_heads > 0 && p_.out.data == nullptr &&
         !p_.packed_q() && kv_heads_per_tile() == other.kv_heads_per_tile();
}

void Attention::run_in_turn(const std::vector<Attention>& steps) {
  std::vector<std::vector<Tile>> tiles;
  for (const Attention& step : steps) tiles.push_back(step.make_tiles(0, step.p_.num_seqs));
  if (steps[0].worth_splitting(tiles[0])) return split(steps.data(), tiles, 0);
  parallel_for(static_cast<std::int64_t>(tiles[0].size()), [&](std::int64_t i) {
    for (std::size_t step = 0; step < steps.size(); ++step)
      steps[step].walk(tiles[step][static_cast<std::size_t>(i)]);
  });
}

/// The segments of all tiles of all steps as tasks of one job. Whoever folds the last segment of a
/// tile merges them all, in their order, and so do steps that the tile's later ones waited for.
void Attention::split(const Attention* steps, const std::vector<std::vector<Tile>>& tiles,
                      std::int64_t first) {
  struct Part {
    std::size_t step, tile;
    std::int64_t begin, end;  // segments
  };
  struct Chain {
    std::mutex mutex;
    std::size_t merged = 0;                       // steps
    std::vector<std::atomic<std::int64_t>> left;  // segments of each step
  };
  const std::size_t num_steps = tiles.size(), num_tiles = tiles[0].size();
  std::vector<Chain> chains;
  std::vector<Part> parts;
  allocate(num_tiles * (sizeof(Chain) + num_steps * 8), [&] {
    chains = std::vector<Chain>(num_tiles);
    for (Chain& chain : chains) chain.left = std::vector<std::atomic<std::int64_t>>(num_steps);
  });
  std::int64_t count = 0;
  for (std::size_t step = 0; step < num_steps; ++step) {
    for (std::size_t tile = 0; tile < num_tiles; ++tile) {
      const std::int64_t segments = steps[step].segments_of(tiles[step][tile].sequence);
      chains[tile].left[step] = segments;
      count += segments;
    }
  }
  // Where there are many segments a thread takes some in a row, and less often waits for the first
  // keys of one.
  const std::int64_t in_a_row =
      std::clamp<std::int64_t>(count / (kPartsPerThread * get_num_threads()), 1, kMostInARow);
  reserve(parts, count);
  for (std::size_t step = 0; step < num_steps; ++step) {
    for (std::size_t tile = 0; tile < num_tiles; ++tile) {
      const std::int64_t segments = chains[tile].left[step];
      for (std::int64_t i = 0; i < segments; i += in_a_row)
        parts.push_back({step, tile, i, std::min(i + in_a_row, segments)});
    }
  }
  const auto merge_what_is_done = [&](std::size_t tile) {
    Chain& chain = chains[tile];
    const std::lock_guard<std::mutex> lock(chain.mutex);
    for (; chain.merged < num_steps && chain.left[chain.merged] == 0; ++chain.merged) {
      const Attention& step = steps[chain.merged];
      const Tile& t = tiles[chain.merged][tile];
      step.merge(t, first, step.reserve_bench(t));
    }
  };
  parallel_for(static_cast<std::int64_t>(parts.size()), [&](std::int64_t i) {
    const Part& part = parts[static_cast<std::size_t>(i)];
    const Attention& step = steps[part.step];
    const Tile& t = tiles[part.step][part.tile];
    const Workbench& bench = step.prepare(t);
    for (std::int64_t segment = part.begin; segment < part.end; ++segment) {
      step.fold_segment(t, segment, step.first_keys(t, segment + 1, part.end), bench);
      for (std::int64_t r = 0; r < step.num_rows(t); ++r) {
        copy_row(bench.partial_row(r), step.scratch_row(t, r, segment, first), step.p_.head_dim_v);
      }
    }
    const std::int64_t done = part.end - part.begin;
    if ((chains[part.tile].left[part.step] -= done) == 0) merge_what_is_done(part.tile);
  });
  // Tiles without keys had nobody.
  for (std::size_t tile = 0; tile < num_tiles; ++tile) merge_what_is_done(tile);
}

/// The partial results of all segments in scratch into the tile's result.
void Attention::merge(const Tile& t, std::int64_t first, const Workbench& bench) const {
  for (std::int64_t r = 0; r < num_rows(t); ++r) {
    clear_row(bench.total_row(r), p_.head_dim_v);
    for (std::int64_t segment = 0; segment < segments_of(t.sequence); ++segment) {
      merge_row(bench.total_row(r), scratch_row(t, r, segment, first), p_.head_dim_v);
    }
  }
  finish(t, bench);
}

/// Row `row` of a tile in the partial results: m, l, o adjacent; all rows of a sequence and segment
/// adjacent.
Row Attention::scratch_row(const Tile& t, std::int64_t row, std::int64_t segment,
                           std::int64_t first_seq) const {
  const std::int64_t row_floats = partial_row_bytes(p_.head_dim_v) / 4;
  float* at =
      scratch_ + (t.sequence.index - first_seq) * (plan_.sequence_bytes / 4) +
      ((segment * p_.q_len + token_of(t, row)) * p_.num_q_heads + head_of(t, row)) * row_floats;
  return {at, at + 1, at + 2};
}

/// Rows side by side in the lanes: worth a transposed q where a tile has many. Products of bfloat16
/// round weights, which decode does not.
bool Attention::by_products(const Tile& t) const {
  if (keeps_bfloat16() && plan_.kernel == Kernel::cpu_decode) return false;
  return t.num_kv_heads == 1 && num_rows(t) >= kMinProductRows;
}

/// The tile's packed q once more, with panels of rows side by side.
void Attention::make_panels(const Tile& t, const Workbench& bench) const {
  const std::int64_t rows = num_rows(t), panel = kernels_.panel_rows;
  const std::int64_t stride = padded(p_.head_dim) / (keeps_bfloat16() ? 2 : 1);
  for (std::int64_t first = 0; first < rows; first += panel) {
    float* to = bench.q_panels + first * query_units();
    for (std::int64_t r = 0; r < panel; ++r) {
      const float* from = bench.q + (first + r) * stride;
      for (std::int64_t d = 0; d < query_units(); ++d)
        to[d * panel + r] = first + r < rows ? from[d] : 0.0f;
    }
  }
}

/// This thread's memory, with room for the tile.
Workbench& Attention::reserve_bench(const Tile& t) const {
  Workbench& bench = Workbench::of_this_thread();
  bench.reserve(num_rows(t), p_.head_dim, p_.head_dim_v);
  return bench;
}

/// Packs the tile's q into this thread's memory.
Workbench& Attention::prepare(const Tile& t) const {
  Workbench& bench = reserve_bench(t);
  const std::int64_t rows = num_rows(t);
  const bool keep_type = keeps_bfloat16();
  const std::int64_t item = keep_type ? 2 : 4;
  const std::int64_t stride = padded(p_.head_dim);
  for (std::int64_t r = 0; r < rows; ++r) {
    const std::int64_t offset = t.sequence.index * p_.q.seq_stride +
                                (t.sequence.q_begin + token_of(t, r)) * p_.q.token_stride +
                                head_of(t, r) * p_.q.head_stride;
    const void* from = advance(p_.q.data, offset, p_.q.dtype);
    char* to = reinterpret_cast<char*>(bench.q) + r * stride * item;
    if (keep_type) {
      std::memcpy(to, from, static_cast<std::size_t>(p_.head_dim * item));
    } else {
      load_row(from, p_.q.dtype, p_.head_dim, reinterpret_cast<float*>(to));
    }
    std::memset(to + p_.head_dim * item, 0,
                static_cast<std::size_t>((stride - p_.head_dim) * item));
  }
  if (by_products(t)) make_panels(t, bench);
  return bench;
}

/// The partial result of one segment of the sequence's keys, of which the tile's tokens may see
/// only some. `then`: keys to be fetched at its end.
void Attention::fold_segment(const Tile& t, std::int64_t segment, const KeyRange& then,
                             const Workbench& bench) const {
  for (std::int64_t r = 0; r < num_rows(t); ++r) clear_row(bench.partial_row(r), bench.o_stride);
  const KeyRange of_tile = visible_keys(p_, t.sequence, t.first, t.last);
  KeyRange keys = segment_of(t.sequence, segment);
  keys = {std::max(keys.begin, of_tile.begin), std::min(keys.end, of_tile.end)};

  // Two in turn: while one head's keys of a block are folded in, those of the next head or block
  // are fetched.
  KeyBlock blocks[2];
  int turn = 0;
  for (std::int64_t key = keys.begin; key < keys.end; key += kBlockKeys) {
    if (key == keys.begin) locate(t, {key, std::min(key + kBlockKeys, keys.end)}, blocks[turn]);
    const KeyRange following{key + kBlockKeys, std::min(key + 2 * kBlockKeys, keys.end)};
    for (std::int64_t head = 0; head < t.num_kv_heads; ++head, turn = 1 - turn) {
      KeyBlock* next = &blocks[1 - turn];
      if (head + 1 < t.num_kv_heads) {
        next_head(blocks[turn], *next);
      } else if (!following.empty()) {
        locate(t, following, *next);
      } else if (!then.empty()) {
        locate(t, then, *next);
      } else {
        next = nullptr;
      }
      fold_block(t, head * head_rows(t), blocks[turn], next, bench);
    }
  }
  for (std::int64_t r = 0; r < num_rows(t); ++r) {
    const Row row = bench.partial_row(r);
    if (p_.quantized()) {
      const double scale = head_scale(p_.v_scale, t.kv_head + r / head_rows(t));
      for (std::int64_t d = 0; d < p_.head_dim_v; ++d)
        row.o[d] = static_cast<float>(row.o[d] * scale);
    }
    // Kernels leave a NaN score out of m; l and o have it.
    if (std::isnan(*row.l) && *row.m != std::numeric_limits<float>::infinity()) *row.m = *row.l;
  }
}

/// The same keys of the KV head after that of `block`.
void Attention::next_head(const KeyBlock& block, KeyBlock& next) const {
  next.keys = block.keys;
  const std::int64_t item = item_bytes(p_.kv_dtype);
  constexpr std::int64_t kScale = sizeof(float);
  advance_all(block.k, p_.k.head_stride * item, next.k);
  advance_all(block.v, p_.v.head_stride * item, next.v);
  if (p_.k_scale.by_key) advance_all(block.k_scale, p_.k_scale.head_stride * kScale, next.k_scale);
  if (p_.v_scale.by_key) advance_all(block.v_scale, p_.v_scale.head_stride * kScale, next.v_scale);
}

/// What all keys of a KV head have in common: their scale, unless each key has its own, and the
/// unit in which kernels see elements. The product may leave the range of float.
double Attention::head_scale(const ScaleView& scale, std::int64_t kv_head) const {
  if (!p_.quantized()) return 1.0;
  const double unit = p_.kv_dtype == DType::float8_e4m3fn ? kFloat8Unit : 1.0;
  return scale.by_key ? unit : unit * finite_or_nan(scale.at(0, 0, kv_head));
}

/// The keys of the tile's first KV head.
void Attention::locate(const Tile& t, KeyRange keys, KeyBlock& block) const {
  block.keys = keys;
  const int count = block.size();
  for (int j = 0; j < kBlockKeys; ++j) {
    // Entries after the last key repeat it.
    const KeyPlace place = key_place(p_, t.sequence, keys.begin + std::min(j, count - 1));
    block.k[j] = advance(p_.k.data, pool_offset(p_.k, place, t.kv_head), p_.kv_dtype);
    block.v[j] = advance(p_.v.data, pool_offset(p_.v, place, t.kv_head), p_.kv_dtype);
    if (p_.k_scale.by_key) block.k_scale[j] = scale_address(p_.k_scale, place, t.kv_head);
    if (p_.v_scale.by_key) block.v_scale[j] = scale_address(p_.v_scale, place, t.kv_head);
  }
}

/// One KV head's keys into its rows, of which `first_row` is the first.
void Attention::fold_block(const Tile& t, std::int64_t first_row, const KeyBlock& block,
                           const KeyBlock* next, const Workbench& bench) const {
  // A few rows at a time, so that their key bounds fit a small array; whole groups and panels.
  constexpr int kRows = 2 * kRowPadding;
  static_assert(kRows % kGroupRows == 0);
  int row_begin[kRows] = {}, row_end[kRows] = {};
  float k_scale[kBlockKeys], v_scale[kBlockKeys];
  const std::int64_t end_row = first_row + head_rows(t);
  const std::int64_t q_item = keeps_bfloat16() ? 2 : 4;

  BlockArgs args{};
  args.num_keys = block.size();
  args.head_dim = static_cast<int>(p_.head_dim);
  args.head_dim_v = static_cast<int>(p_.head_dim_v);
  args.q_stride = padded(p_.head_dim);
  args.k = block.k;
  args.v = block.v;
  args.row_begin = row_begin;
  args.row_end = row_end;
  args.softmax_scale = static_cast<float>(
      p_.softmax_scale * head_scale(p_.k_scale, t.kv_head + first_row / head_rows(t)));
  args.softcap = p_.softcap;
  if (p_.k_scale.by_key) {
    gather(block.k_scale, k_scale);
    args.k_scale = k_scale;
  }
  if (p_.v_scale.by_key) {
    gather(block.v_scale, v_scale);
    args.v_scale = v_scale;
  }
  args.o_stride = bench.o_stride;
  args.widened = bench.widened;
  for (std::int64_t first = first_row; first < end_row; first += kRows) {
    args.num_rows = static_cast<int>(std::min<std::int64_t>(kRows, end_row - first));
    for (int r = 0; r < args.num_rows; ++r) {
      const KeyRange seen = visible_keys(p_, t.sequence, token_of(t, first + r));
      const std::int64_t size = args.num_keys;
      row_begin[r] =
          static_cast<int>(std::clamp<std::int64_t>(seen.begin - block.keys.begin, 0, size));
      row_end[r] = static_cast<int>(std::clamp<std::int64_t>(seen.end - block.keys.begin, 0, size));
    }
    args.next_k = next ? next->k : nullptr;
    args.num_next_keys = next && first == first_row ? next->size() : 0;
    if (by_products(t)) args.q_panels = bench.q_panels + first * query_units();
    args.q = reinterpret_cast<const char*>(bench.q) + first * args.q_stride * q_item;
    const Row row = bench.partial_row(first);
    args.m = row.m;
    args.l = row.l;
    args.o = row.o;
    kernels_.attend_block[static_cast<int>(element_of(p_.kv_dtype))](args);
  }
}

/// The tile's result into state and out.
void Attention::finish(const Tile& t, const Workbench& bench) const {
  for (std::int64_t r = 0; r < num_rows(t); ++r) {
    const std::int64_t token = token_of(t, r);
    const std::int64_t head = head_of(t, r);
    Row result = bench.total_row(r);
    if (p_.state.m != nullptr) {
      const Row state =
          state_row(p_.state, t.sequence.index, token, head, p_.num_q_heads, p_.head_dim_v);
      if (p_.state.fresh) {
        copy_row(result, state, p_.head_dim_v);
      } else {
        merge_row(state, result, p_.head_dim_v);
      }
      result = state;
    }
    if (p_.out.data != nullptr) {
      write_result(p_.out, p_.sinks, t.sequence.index, t.sequence.q_begin + token, head, result,
                   p_.head_dim_v);
    }
  }
}

}  // namespace

void attend(const AttentionProblem& problem, const Plan& plan, void* scratch) {
  const Attention attention(problem, plan, scratch);
  attention.check();
  attention.run();
}

void attend_in_turn(const std::vector<AttentionStep>& steps, void* scratch) {
  if (steps.size() == 1) return attend(steps[0].problem, steps[0].plan, scratch);
  // Partial results of all steps at once. The plans have room for those of one.
  std::vector<Plan> plans;
  std::int64_t bytes = 0;
  for (const AttentionStep& step : steps) {
    Plan& plan = plans.emplace_back(step.plan);
    const AttentionProblem& p = step.problem;
    plan.sequence_bytes =
        p.q_len * p.num_q_heads * plan.max_segments * partial_row_bytes(p.head_dim_v);
    bytes += p.num_seqs * plan.sequence_bytes;
  }
  constexpr std::int64_t kMostBytes = std::int64_t{16} << 20;
  bool together = bytes <= kMostBytes;
  std::vector<Attention> all;
  if (together) {
    thread_local std::vector<char> memory;
    allocate(static_cast<std::size_t>(bytes), [&] {
      if (memory.size() < static_cast<std::size_t>(bytes))
        memory.resize(static_cast<std::size_t>(bytes));
    });
    char* at = memory.data();
    for (std::size_t i = 0; i < steps.size(); ++i) {
      all.emplace_back(steps[i].problem, plans[i], at);
      at += steps[i].problem.num_seqs * plans[i].sequence_bytes;
      together = together && all.back().goes_with(all.front());
    }
  }
  for (const AttentionStep& step : steps) Attention(step.problem, step.plan, scratch).check();
  if (together) return Attention::run_in_turn(all);
  for (const AttentionStep& step : steps) Attention(step.problem, step.plan, scratch).run();
}

}  // namespace tiledattn::cpu
