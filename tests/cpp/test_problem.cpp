// SPDX-License-Identifier: Apache-2.0
// The pure functions of problem.h: what a sequence is, which keys it sees, what is wrong with it.
#include "problem.h"

#include <vector>

#include "check.h"

using namespace tiledattn;

namespace {

IndexView vector_of(const std::vector<std::int64_t>& numbers) {
  return {numbers.data(), 1, 0, true};
}

void check_fault(const Fault& fault, FaultArgument argument, std::int64_t sequence,
                 std::int64_t column, std::int64_t value, std::int64_t minimum,
                 std::int64_t maximum) {
  CHECK(fault.found());
  CHECK(fault.argument == argument);
  CHECK_CLOSE(static_cast<double>(fault.sequence), static_cast<double>(sequence), 0);
  CHECK_CLOSE(static_cast<double>(fault.column), static_cast<double>(column), 0);
  CHECK_CLOSE(static_cast<double>(fault.value), static_cast<double>(value), 0);
  CHECK_CLOSE(static_cast<double>(fault.minimum), static_cast<double>(minimum), 0);
  CHECK_CLOSE(static_cast<double>(fault.maximum), static_cast<double>(maximum), 0);
}

void check_range(const KeyRange& range, std::int64_t begin, std::int64_t end) {
  CHECK_CLOSE(static_cast<double>(range.begin), static_cast<double>(begin), 0);
  CHECK_CLOSE(static_cast<double>(range.end), static_cast<double>(end), 0);
}

/// Two sequences of tiles: blocks of 4 slots, rows of 3 table entries.
struct Tiles {
  std::vector<std::int64_t> table{5, 2, 7, 1, 0, 9};
  std::vector<std::int64_t> counts{3, 1};
  std::vector<std::int64_t> slots{2, 4};
  AttentionProblem problem;

  Tiles() {
    problem.num_seqs = 2;
    problem.q_len = 1;
    problem.total_q = 2;
    problem.num_q_heads = 4;
    problem.num_kv_heads = 2;
    problem.key_source = KeySource::tiles;
    problem.table = {table.data(), 3, 1, true};
    problem.table_width = 3;
    problem.block_size = 4;
    problem.num_blocks = 10;
    problem.counts = vector_of(counts);
    problem.valid_slots_all = 4;
  }
};

}  // namespace

TEST(index_view_reads_both_widths_through_strides) {
  const std::vector<std::int64_t> wide{1, -2, (std::int64_t{1} << 40), 4, 5, 6};
  const std::vector<std::int32_t> narrow{1, -2, 3, 4, 5, 6};
  const IndexView rows{wide.data(), 3, 1, true};
  CHECK(rows.at(0, 2) == std::int64_t{1} << 40);
  CHECK(rows.at(1, 1) == 5);
  const IndexView columns{narrow.data(), 1, 2, false};
  CHECK(columns.at(1) == -2);
  CHECK(columns.at(1, 2) == 6);
  CHECK(columns.given());
  CHECK(!IndexView{}.given());
}

TEST(sequence_of_tiles) {
  Tiles tiles;
  Sequence s = sequence_at(tiles.problem, 0);
  CHECK(s.kv_len == 12);  // every slot of the last block counts
  CHECK(s.q_len == 1);
  CHECK(s.q_begin == 0);
  tiles.problem.valid_slots = vector_of(tiles.slots);
  CHECK(sequence_at(tiles.problem, 0).kv_len == 10);
  CHECK(sequence_at(tiles.problem, 1).kv_len == 4);
  tiles.problem.valid_slots = {};
  tiles.problem.valid_slots_all = 0;
  CHECK(sequence_at(tiles.problem, 0).kv_len == 8);
  CHECK(sequence_at(tiles.problem, 1).kv_len == 0);
  tiles.counts = {0, 1};
  tiles.problem.counts = vector_of(tiles.counts);
  tiles.problem.valid_slots_all = 4;
  CHECK(sequence_at(tiles.problem, 0).kv_len == 0);
}

TEST(positions_of_tiles_are_relative_to_the_tile) {
  Tiles tiles;
  const std::vector<std::int64_t> kv_positions{100, 8};
  const std::vector<std::int64_t> q_positions{105, 3};
  tiles.problem.kv_positions = vector_of(kv_positions);
  tiles.problem.q_positions = vector_of(q_positions);
  tiles.problem.causal = true;
  const Sequence s = sequence_at(tiles.problem, 0);
  CHECK(s.position == 5);
  check_range(visible_keys(tiles.problem, s, 0), 0, 6);
  // The whole tile lies after the query.
  const Sequence later = sequence_at(tiles.problem, 1);
  CHECK(later.position == -5);
  CHECK(visible_keys(tiles.problem, later, 0).empty());
}

TEST(sequence_of_a_paged_cache) {
  AttentionProblem p;
  const std::vector<std::int64_t> lengths{7, 0};
  p.num_seqs = 2;
  p.q_len = 3;
  p.key_source = KeySource::paged;
  p.seq_lens = vector_of(lengths);
  p.causal = true;
  const Sequence s = sequence_at(p, 0);
  CHECK(s.kv_len == 7);
  CHECK(s.position == 4);  // the last of three tokens is at position 6
  check_range(visible_keys(p, s, 0), 0, 5);
  check_range(visible_keys(p, s, 2), 0, 7);
  check_range(visible_keys(p, s, 0, 2), 0, 7);
  CHECK(visible_keys(p, sequence_at(p, 1), 0).empty());
  CHECK(visible_keys(p, sequence_at(p, 1), 2).empty());
}

TEST(packed_sequences_and_the_rows_after_the_last) {
  AttentionProblem p;
  const std::vector<std::int64_t> cu_q{0, 2, 2, 5};
  const std::vector<std::int64_t> cu_k{0, 4, 9, 9};
  p.num_seqs = 3;
  p.key_source = KeySource::packed;
  p.cu_seqlens_q = vector_of(cu_q);
  p.cu_seqlens_k = vector_of(cu_k);
  p.total_q = 6;
  p.total_k = 9;
  CHECK(sequence_at(p, 0).q_len == 2);
  CHECK(sequence_at(p, 1).q_len == 0);
  CHECK(sequence_at(p, 1).kv_begin == 4);
  CHECK(sequence_at(p, 1).kv_len == 5);
  CHECK(sequence_at(p, 2).q_begin == 2);
  CHECK(sequence_at(p, 2).q_len == 3);
  CHECK(sequence_at(p, 2).kv_len == 0);
  const Sequence rest = sequence_at(p, 3);
  CHECK(rest.q_begin == 5);
  CHECK(rest.q_len == 1);
  CHECK(visible_keys(p, rest, 0).empty());
}

TEST(causal_is_aligned_at_the_end) {
  AttentionProblem p;
  p.num_seqs = 1;
  p.q_len = 5;
  p.dense_kv_len = 2;
  p.causal = true;
  const Sequence s = sequence_at(p, 0);
  for (std::int64_t i = 0; i < 3; ++i) CHECK(visible_keys(p, s, i).empty());
  check_range(visible_keys(p, s, 3), 0, 1);
  check_range(visible_keys(p, s, 4), 0, 2);
}

TEST(window_sides_are_inclusive) {
  AttentionProblem p;
  p.num_seqs = 1;
  p.q_len = 10;
  p.dense_kv_len = 10;
  p.window_left = 2;
  p.window_right = 1;
  const Sequence s = sequence_at(p, 0);
  check_range(visible_keys(p, s, 0), 0, 2);
  check_range(visible_keys(p, s, 5), 3, 7);
  check_range(visible_keys(p, s, 9), 7, 10);
  check_range(visible_keys(p, s, 4, 6), 2, 8);
  p.causal = true;  // the nearer bound holds
  check_range(visible_keys(p, s, 5), 3, 6);
  p.window_left = 0;
  check_range(visible_keys(p, s, 5), 5, 6);
  p.window_left = p.window_right = kNoWindow;
  p.causal = false;
  check_range(visible_keys(p, s, 0), 0, 10);
}

TEST(every_token_sees_what_the_rule_says) {
  AttentionProblem p;
  p.num_seqs = 1;
  for (p.q_len = 1; p.q_len < 8; ++p.q_len) {
    for (p.dense_kv_len = 0; p.dense_kv_len < 8; ++p.dense_kv_len) {
      for (p.window_left = 0; p.window_left < 3; ++p.window_left) {
        p.causal = p.dense_kv_len % 2 == 0;
        p.window_right = p.q_len % 3;
        const Sequence s = sequence_at(p, 0);
        for (std::int64_t i = 0; i < p.q_len; ++i) {
          const KeyRange range = visible_keys(p, s, i);
          const std::int64_t position = i + p.dense_kv_len - p.q_len;
          for (std::int64_t j = 0; j < p.dense_kv_len; ++j) {
            const bool sees = j >= position - p.window_left && j <= position + p.window_right &&
                              (!p.causal || j <= position);
            CHECK((j >= range.begin && j < range.end) == sees);
          }
        }
      }
    }
  }
}

TEST(offsets_are_64_bit) {
  AttentionProblem p;
  const std::vector<std::int32_t> table{0, 1'100'000};
  p.table = {table.data(), 2, 1, false};
  p.block_size = 16;
  const PoolView pool{nullptr, 16'384, 1'024, 128};
  const Sequence s;
  CHECK(key_offset(p, pool, s, 16 + 3, 2) == std::int64_t{1'100'000} * 16'384 + 3 * 1'024 + 256);
  p.table = {};
  Sequence dense;
  dense.index = 70'000;
  const PoolView wide{nullptr, std::int64_t{1} << 33, 128, 64};
  CHECK(key_offset(p, wide, dense, 5, 1) == (std::int64_t{70'000} << 33) + 5 * 128 + 64);
}

TEST(faults_of_tiles) {
  Tiles tiles;
  AttentionProblem& p = tiles.problem;
  CHECK(!check_sequence(p, 0).found());
  tiles.counts = {4, -1};
  p.counts = vector_of(tiles.counts);
  check_fault(check_sequence(p, 0), FaultArgument::tile_block_counts, 0, -1, 4, 0, 3);
  check_fault(check_sequence(p, 1), FaultArgument::tile_block_counts, 1, -1, -1, 0, 3);
  tiles.counts = {1, 0};
  tiles.slots = {5, 5};
  p.counts = vector_of(tiles.counts);
  p.valid_slots = vector_of(tiles.slots);
  check_fault(check_sequence(p, 0), FaultArgument::last_block_valid_slots, 0, -1, 5, 0, 4);
  CHECK(!check_sequence(p, 1).found());  // no block, so no last block
  p.valid_slots = {};
  const std::vector<std::int64_t> good{0, 0};
  const std::vector<std::int64_t> bad{-1, kMaxPosition + 1};
  p.kv_positions = vector_of(bad);
  p.q_positions = vector_of(good);
  check_fault(check_sequence(p, 0), FaultArgument::kv_positions, 0, -1, -1, 0, kMaxPosition);
  p.kv_positions = vector_of(good);
  p.q_positions = vector_of(bad);
  check_fault(check_sequence(p, 1), FaultArgument::q_positions, 1, -1, kMaxPosition + 1, 0,
              kMaxPosition);
}

TEST(faults_of_lengths) {
  AttentionProblem p;
  const std::vector<std::int64_t> lengths{13, -1, 12};
  p.num_seqs = 3;
  p.q_len = 1;
  p.key_source = KeySource::paged;
  p.seq_lens = vector_of(lengths);
  p.table_width = 3;
  p.block_size = 4;
  check_fault(check_sequence(p, 0), FaultArgument::seq_lens, 0, -1, 13, 0, 12);
  check_fault(check_sequence(p, 1), FaultArgument::seq_lens, 1, -1, -1, 0, 12);
  CHECK(!check_sequence(p, 2).found());
}

TEST(faults_of_packed_offsets) {
  AttentionProblem p;
  const std::vector<std::int64_t> good{0, 2, 6};
  const std::vector<std::int64_t> late{1, 2, 6};
  const std::vector<std::int64_t> falling{0, 4, 3};
  const std::vector<std::int64_t> over{0, 2, 7};
  p.num_seqs = 2;
  p.key_source = KeySource::packed;
  p.total_q = p.total_k = 6;
  p.cu_seqlens_q = vector_of(good);
  p.cu_seqlens_k = vector_of(good);
  CHECK(!check_sequence(p, 0).found());
  CHECK(!check_sequence(p, 1).found());
  p.cu_seqlens_q = vector_of(late);
  check_fault(check_sequence(p, 0), FaultArgument::cu_seqlens_q, 0, -1, 1, 0, 0);
  p.cu_seqlens_q = vector_of(falling);
  check_fault(check_sequence(p, 1), FaultArgument::cu_seqlens_q, 2, -1, 3, 4, 6);
  p.cu_seqlens_q = vector_of(good);
  p.cu_seqlens_k = vector_of(over);
  check_fault(check_sequence(p, 1), FaultArgument::cu_seqlens_k, 2, -1, 7, 2, 6);
}

TEST(only_columns_that_are_read_are_checked) {
  Tiles tiles;
  AttentionProblem& p = tiles.problem;
  check_range(table_columns(p, sequence_at(p, 0)), 0, 3);
  check_range(table_columns(p, sequence_at(p, 1)), 0, 1);
  p.window_left = 4;
  p.window_right = 0;
  check_range(table_columns(p, sequence_at(p, 0)), 1, 3);  // keys 7 .. 11
  p.window_left = kNoWindow;
  p.valid_slots_all = 0;
  check_range(table_columns(p, sequence_at(p, 0)), 0, 2);
  check_range(table_columns(p, sequence_at(p, 1)), 0, 0);
  p.q_len = 0;
  check_range(table_columns(p, sequence_at(p, 0)), 0, 0);
}

TEST(faults_of_block_ids) {
  Tiles tiles;
  AttentionProblem& p = tiles.problem;
  tiles.table = {5, 10, 7, -1, 0, 9};
  const Sequence first = sequence_at(p, 0);
  CHECK(!check_block(p, first, 0).found());
  check_fault(check_block(p, first, 1), FaultArgument::tile_blocks, 0, 1, 10, 0, 9);
  check_fault(check_block(p, sequence_at(p, 1), 0), FaultArgument::tile_blocks, 1, 0, -1, 0, 9);
  p.key_source = KeySource::paged;
  const std::vector<std::int64_t> lengths{12, 4};
  p.seq_lens = vector_of(lengths);
  check_fault(check_block(p, first, 1), FaultArgument::block_table, 0, 1, 10, 0, 9);
}

TEST(faults_of_slots) {
  WriteKvProblem p;
  const std::vector<std::int64_t> slots{0, 39, 40, -5};
  p.num_tokens = 4;
  p.num_blocks = 10;
  p.block_size = 4;
  p.slot_mapping = vector_of(slots);
  CHECK(!check_slot(p, 0).found());
  CHECK(!check_slot(p, 1).found());
  check_fault(check_slot(p, 2), FaultArgument::slot_mapping, 2, -1, 40, 0, 39);
  CHECK(!check_slot(p, 3).found());
}
