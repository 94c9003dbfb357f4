// SPDX-License-Identifier: Apache-2.0
// Attention on the CPU: which thread works on what, and in what order partial results are merged.
// A unit of work is a tile: some query tokens of one sequence with the query heads of one KV head,
// or of several that lie side by side in memory. What is done with one is tile_work.cpp.
//
// The keys of a sequence come in segments (of decode: plan.h). A tile folds each segment into an
// empty partial result and merges the partials in the order of keys. It does that alone ("walk"),
// or, where decode has fewer tiles than the threads need, every segment is a task of its own that
// leaves its partials in scratch, to be merged afterwards ("split"). Both make the same partials
// and merge them in the same order: the same bits.
#include "cpu/attend.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <utility>
#include <vector>

#include "checks.h"
#include "cpu/allocate.h"
#include "cpu/pool.h"
#include "cpu/rows.h"
#include "cpu/tile_work.h"
#include "tiledattn/one_shot.h"

namespace tiledattn::cpu {
namespace {

/// Rows that walk over the keys together, when a sequence has many: enough to use each K and V load
/// often, few enough that their q and o stay in the L2 cache.
constexpr std::int64_t kDecodeRows = 64;
constexpr std::int64_t kPrefillRows = 128;
/// Below this many tiles for each thread, segments are spread over the threads.
constexpr std::int64_t kTilesPerThread = 4;
/// Segments that a thread takes in a row, where they are spread: at most so many, and of those that
/// are left no more than this part of an even share.
constexpr std::int64_t kMostInARow = 8;
constexpr std::int64_t kPartOfShare = 4;

/// One problem, cut into tiles that the threads share.
class Attention {
 public:
  Attention(const AttentionProblem& problem, const Plan& plan, void* scratch)
      : p_(problem), plan_(plan), scratch_(static_cast<float*>(scratch)), work_(problem, plan) {}

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

  void run_sequences(std::int64_t first, std::int64_t last) const;
  std::vector<Tile> make_tiles(std::int64_t first, std::int64_t last) const;
  bool worth_splitting(const std::vector<Tile>& tiles) const;
  void walk(const std::vector<Tile>& tiles, std::int64_t index) const;
  static void split(const Attention* steps, const std::vector<std::vector<Tile>>& tiles,
                    std::int64_t first);
  void merge(const Tile& t, std::int64_t first, const Workbench& bench) const;
  Row scratch_row(const Tile& t, std::int64_t row, std::int64_t segment,
                  std::int64_t first_seq) const;

  const AttentionProblem& p_;
  const Plan& plan_;
  float* const scratch_;
  const TileWork work_;
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
  parallel_for(static_cast<std::int64_t>(tiles.size()), [&](std::int64_t i) { walk(tiles, i); });
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

void Attention::walk(const std::vector<Tile>& tiles, std::int64_t index) const {
  const Tile& t = tiles[static_cast<std::size_t>(index)];
  // Where all threads take as long, this is the thread's next tile.
  const auto following = static_cast<std::size_t>(index + get_num_threads());
  KeysAhead ahead;
  if (following < tiles.size())
    ahead = work_.first_keys(tiles[following], 0, work_.segments_of(tiles[following].sequence));
  Workbench& bench = work_.prepare(t);
  const std::int64_t rows = work_.num_rows(t);
  const std::int64_t segments = work_.segments_of(t.sequence);
  if (segments == 0) {
    for (std::int64_t r = 0; r < rows; ++r) clear_row(bench.total_row(r), p_.head_dim_v);
  }
  for (std::int64_t segment = 0; segment < segments; ++segment) {
    const bool last = segment + 1 == segments;
    work_.fold_segment(t, segment, last ? ahead : work_.first_keys(t, segment + 1, segments),
                       bench);
    if (segment == 0) {  // what a merge into nothing would copy
      std::swap(bench.partial, bench.total);
      continue;
    }
    for (std::int64_t r = 0; r < rows; ++r)
      merge_row(bench.total_row(r), bench.partial_row(r), p_.head_dim_v);
  }
  work_.finish(t, bench);
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
    for (std::size_t step = 0; step < steps.size(); ++step) steps[step].walk(tiles[step], i);
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
      const std::int64_t segments = steps[step].work_.segments_of(tiles[step][tile].sequence);
      chains[tile].left[step] = segments;
      count += segments;
    }
  }
  // Segments in a row wait for the first keys of but one of them. Towards the end parts get
  // smaller, so that the threads end together.
  reserve(parts, count);
  for (std::size_t step = 0; step < num_steps; ++step) {
    for (std::size_t tile = 0; tile < num_tiles; ++tile) {
      const std::int64_t segments = chains[tile].left[step];
      for (std::int64_t i = 0, end = 0; i < segments; i = end) {
        end = std::min(i + std::clamp<std::int64_t>(count / (kPartOfShare * get_num_threads()), 1,
                                                    kMostInARow),
                       segments);
        count -= end - i;
        parts.push_back({step, tile, i, end});
      }
    }
  }
  const auto merge_what_is_done = [&](std::size_t tile) {
    Chain& chain = chains[tile];
    const std::lock_guard<std::mutex> lock(chain.mutex);
    for (; chain.merged < num_steps && chain.left[chain.merged] == 0; ++chain.merged) {
      const Attention& step = steps[chain.merged];
      const Tile& t = tiles[chain.merged][tile];
      step.merge(t, first, step.work_.reserve_bench(t));
    }
  };
  parallel_for(static_cast<std::int64_t>(parts.size()), [&](std::int64_t i) {
    const Part& part = parts[static_cast<std::size_t>(i)];
    const Attention& step = steps[part.step];
    const Tile& t = tiles[part.step][part.tile];
    const Workbench& bench = step.work_.prepare(t);
    for (std::int64_t segment = part.begin; segment < part.end; ++segment) {
      step.work_.fold_segment(t, segment, step.work_.first_keys(t, segment + 1, part.end), bench);
      for (std::int64_t r = 0; r < step.work_.num_rows(t); ++r) {
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
  for (std::int64_t r = 0; r < work_.num_rows(t); ++r) {
    clear_row(bench.total_row(r), p_.head_dim_v);
    for (std::int64_t segment = 0; segment < work_.segments_of(t.sequence); ++segment) {
      merge_row(bench.total_row(r), scratch_row(t, r, segment, first), p_.head_dim_v);
    }
  }
  work_.finish(t, bench);
}

/// Row `row` of a tile in the partial results: m, l, o adjacent; all rows of a sequence and segment
/// adjacent.
Row Attention::scratch_row(const Tile& t, std::int64_t row, std::int64_t segment,
                           std::int64_t first_seq) const {
  const std::int64_t row_floats = partial_row_bytes(p_.head_dim_v) / 4;
  float* at =
      scratch_ + (t.sequence.index - first_seq) * (plan_.sequence_bytes / 4) +
      ((segment * p_.q_len + work_.token_of(t, row)) * p_.num_q_heads + work_.head_of(t, row)) *
          row_floats;
  return {at, at + 1, at + 2};
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
