// SPDX-License-Identifier: Apache-2.0
// Plans: how keys are cut into segments and how much scratch a call needs.
#include "plan.h"

#include "arrays.h"
#include "check.h"

using namespace tiledattn;

namespace {

AttentionProblem paged(std::int64_t num_seqs, std::int64_t q_len, std::int64_t num_keys) {
  AttentionProblem p;
  p.num_seqs = num_seqs;
  p.q_len = q_len;
  p.total_q = num_seqs * q_len;
  p.num_q_heads = 32;
  p.num_kv_heads = 8;
  p.head_dim = p.head_dim_v = 128;
  p.key_source = KeySource::paged;
  p.block_size = 16;
  p.table_width = (num_keys + 15) / 16;
  return p;
}

/// [batch, tokens, heads, columns], contiguous.
AttentionProblem dense(std::int64_t batch, std::int64_t tokens, std::int64_t head_dim) {
  AttentionProblem p = paged(batch, tokens, 0);
  p.key_source = KeySource::dense;
  p.table_width = p.block_size = 0;
  p.head_dim = p.head_dim_v = head_dim;
  p.dense_kv_len = tokens;
  p.q.dtype = p.out.dtype = DType::bfloat16;
  p.q.head_stride = p.out.head_stride = p.k.head_stride = p.v.head_stride = head_dim;
  p.q.token_stride = p.out.token_stride = p.num_q_heads * head_dim;
  p.k.token_stride = p.v.token_stride = p.num_kv_heads * head_dim;
  p.q.seq_stride = p.out.seq_stride = tokens * p.q.token_stride;
  p.k.block_stride = p.v.block_stride = tokens * p.k.token_stride;
  return p;
}

Kernel kernel_on(int compute_capability, const AttentionProblem& p) {
  return make_plan(p, {DeviceKind::cuda, 0}, Workspace::kDefaultBytes, compute_capability).kernel;
}

constexpr std::int64_t kBytes = Workspace::kDefaultBytes;

}  // namespace

TEST(segments_cover_all_keys_in_order) {
  for (const SegmentCut cut : {SegmentCut{1}, {2}, {3}, {63}, {64}, {5, kPrefillSegmentUnit}}) {
    for (const std::int64_t num_keys :
         {1, 255, 256, 257, 1000, 4096, 16384, 16385, 70001, 1 << 24}) {
      const KeyRange visible{17, 17 + num_keys};
      const std::int64_t count = num_segments(num_keys, cut);
      CHECK(count >= 1 && count <= cut.limit);
      std::int64_t next = visible.begin;
      for (std::int64_t i = 0; i < count; ++i) {
        const KeyRange range = segment_range(visible, i, cut);
        CHECK(range.begin == next);
        CHECK(!range.empty());
        CHECK(range.end - range.begin <= segment_keys(num_keys, cut));
        // The Hopper kernel counts in 32 bits.
        const auto few = static_cast<std::int32_t>(num_keys);
        CHECK(visible.begin + segment_begin(few, static_cast<std::int32_t>(i), cut) == range.begin);
        next = range.end;
      }
      CHECK(next == visible.end);
    }
    CHECK(num_segments(std::int64_t{0}, cut) == 0);
    CHECK(num_segments(std::int64_t{-4}, cut) == 0);
  }
}

TEST(short_segments_are_never_made) {
  const SegmentCut most{kMaxSegments};
  CHECK(segment_keys(std::int64_t{1}, most) == kSegmentKeys);
  CHECK(segment_keys(kSegmentKeys + 1, most) == kSegmentKeys);
  CHECK(num_segments(kSegmentKeys, most) == 1);
  CHECK(num_segments(kSegmentKeys + 1, most) == 2);
  CHECK(num_segments(kSegmentKeys * kMaxSegments + 1, most) <= kMaxSegments);
}

TEST(the_cut_depends_on_the_sequence_alone) {
  // What a sequence is cut into is num_segments(its keys, cut): neither the batch, nor
  // the table's width, nor the workspace may move the limit.
  const std::int64_t limit = make_plan(paged(1, 1, 300), {}, kBytes).cut.limit;
  for (const std::int64_t num_seqs : {1, 2, 64, 1000}) {
    for (const std::int64_t num_keys : {16, 5000, 1 << 22}) {
      for (const std::int64_t bytes : {kBytes, 8 * kBytes}) {
        CHECK(make_plan(paged(num_seqs, 1, num_keys), {}, bytes).cut.limit == limit);
      }
    }
  }
}

TEST(max_segments_bounds_every_sequence) {
  for (const std::int64_t q_len : {1, 4, 16}) {
    for (const std::int64_t width : {16, 256, 272, 4096, 40000, 1 << 20}) {
      const Plan plan = make_plan(paged(3, q_len, width), {}, 16 * kBytes);
      for (std::int64_t num_keys = 0; num_keys <= width; num_keys += 1 + width / 50) {
        CHECK(num_segments(num_keys, plan.cut) <= plan.max_segments);
      }
      CHECK(plan.max_segments <= kMaxSegments);
      CHECK(plan.sequence_bytes <= std::max(kMaxSequenceScratch, q_len * 32 * 130 * 4));
    }
  }
}

TEST(scratch_fits_the_workspace) {
  for (const std::int64_t num_seqs : {1, 7, 100, 5000}) {
    const Plan plan = make_plan(paged(num_seqs, 2, 100'000), {}, kBytes);
    CHECK(plan.seqs_per_launch >= 1 && plan.seqs_per_launch <= num_seqs);
    CHECK(plan.seqs_per_launch * plan.sequence_bytes <= kBytes);
  }
  CHECK_THROWS(ValueError, make_plan(paged(1, 1, 100'000), {}, 1000), "workspace", "1000",
               "at least");
}

TEST(one_segment_needs_no_partial_results) {
  const Plan plan = make_plan(paged(8, 1, 256), {}, 4096);
  CHECK(plan.max_segments == 1);
  CHECK(plan.sequence_bytes == 0);
  CHECK(plan.seqs_per_launch == 8);
}

TEST(a_window_bounds_the_segments) {
  AttentionProblem p = paged(1, 1, 1 << 20);
  p.window_left = 500;
  p.causal = true;
  CHECK(make_plan(p, {}, kBytes).max_segments == 2);  // 501 keys
}

TEST(an_object_reserves_enough_for_each_of_its_calls) {
  for (const std::int64_t max_q_len : {1, 3, 8, 40}) {
    for (const std::int64_t max_keys : {16, 1024, 50'000}) {
      for (const std::int64_t max_seqs : {1, 5}) {
        const std::int64_t bytes = decode_workspace_bytes(max_seqs, max_q_len, 32, 128, max_keys);
        for (std::int64_t q_len = 1; q_len <= max_q_len; ++q_len) {
          for (std::int64_t width = 16; width <= max_keys; width *= 4) {
            AttentionProblem p = paged(max_seqs, q_len, width);
            float m = 0;
            p.key_source = KeySource::tiles;
            p.state.m = &m;
            CHECK(make_plan(p, {}, bytes).seqs_per_launch >= 1);
          }
        }
      }
    }
  }
}

TEST(packed_q_on_a_gpu_needs_room_for_every_sequence) {
  const Device gpu{DeviceKind::cuda, 0};
  const std::int64_t entries[] = {0, 100};
  AttentionProblem p = paged(100, 100, 300);
  p.total_q = 100;
  p.cu_seqlens_q.data = entries;
  p.cu_seqlens_q.is_int64 = true;
  CHECK(make_plan(p, gpu, 256 + 4 * 100).seqs_per_launch == 100);
  CHECK_THROWS(ValueError, make_plan(p, gpu, 256 + 4 * 99), "workspace", "holds 99 sequences",
               "all 100", "4 bytes for each and 256 more");
  // Elsewhere the sequences may go in groups.
  CHECK(make_plan(p, {}, 256 + 4 * 99).seqs_per_launch == 99);
  p.cu_seqlens_q = {};
  CHECK(make_plan(p, gpu, 256 + 4 * 99).seqs_per_launch == 99);
}

TEST(kernels_by_query_length_and_device) {
  const Device gpu{DeviceKind::cuda, 0};
  CHECK(make_plan(paged(1, 1, 100), {}, kBytes).kernel == Kernel::cpu_decode);
  CHECK(make_plan(paged(1, kMaxDecodeTokens, 100), {}, kBytes).kernel == Kernel::cpu_decode);
  CHECK(make_plan(paged(1, kMaxDecodeTokens + 1, 100), {}, kBytes).kernel == Kernel::cpu_prefill);
  CHECK(make_plan(paged(1, 1, 100), gpu, kBytes).kernel == Kernel::cuda_decode_plain);
  CHECK(make_plan(paged(1, 100, 100), gpu, kBytes).kernel == Kernel::cuda_prefill_plain);
  for (const Kernel kernel :
       {Kernel::cpu_decode, Kernel::cpu_prefill, Kernel::cuda_decode_plain,
        Kernel::cuda_prefill_plain, Kernel::cuda_decode_portable, Kernel::cuda_prefill_portable,
        Kernel::cuda_decode_sm90, Kernel::cuda_prefill_sm90}) {
    CHECK(std::string(to_string(kernel)) != "unknown");
  }
}

namespace {

const Device kGpu{DeviceKind::cuda, 0};

/// A problem that suits the Hopper decode kernel.
AttentionProblem paged_for_sm90() {
  AttentionProblem p = paged(3, 1, 1024);
  p.q.dtype = DType::bfloat16;
  p.num_blocks = 100;
  p.q.head_stride = 128;
  p.q.seq_stride = 32 * 128;
  p.k = p.v = {nullptr, 16 * 8 * 128, 8 * 128, 128};
  return p;
}

}  // namespace

TEST(the_hopper_kernel_by_shape) {
  CHECK(kernel_on(90, paged_for_sm90()) == Kernel::cuda_decode_sm90);
  for (const int capability : {80, 89, 100, 120})
    CHECK(kernel_on(capability, paged_for_sm90()) == Kernel::cuda_decode_portable);
  for (const int capability : {0, 75})
    CHECK(kernel_on(capability, paged_for_sm90()) == Kernel::cuda_decode_plain);
  CHECK(make_plan(paged_for_sm90(), {}, kBytes, 90).kernel == Kernel::cpu_decode);

  const auto with = [](auto change) {
    AttentionProblem p = paged_for_sm90();
    change(p);
    return kernel_on(90, p);
  };
  CHECK(with([](auto& p) { p.q_len = 16; }) == Kernel::cuda_decode_sm90);
  CHECK(with([](auto& p) { p.q_len = 17; }) == Kernel::cuda_prefill_portable);
  CHECK(with([](auto& p) { p.block_size = 24; }) == Kernel::cuda_decode_sm90);
  CHECK(with([](auto& p) { p.block_size = 12; }) == Kernel::cuda_decode_portable);
  CHECK(with([](auto& p) { p.q.dtype = DType::float32; }) == Kernel::cuda_decode_plain);
  CHECK(with([](auto& p) { p.head_dim = 100; }) == Kernel::cuda_decode_plain);
  CHECK(with([](auto& p) { p.k.token_stride = 1028; }) == Kernel::cuda_decode_plain);
  CHECK(with([](auto& p) { p.v.head_stride = 0; }) == Kernel::cuda_decode_portable);
  CHECK(with([](auto& p) { p.q.head_stride = 129; }) == Kernel::cuda_decode_plain);
  CHECK(with([](auto& p) { p.softcap = 1e-35f; }) == Kernel::cuda_decode_plain);
  CHECK(with([](auto& p) { p.table_width = std::int64_t{1} << 30; }) == Kernel::cuda_decode_plain);
}

TEST(the_hopper_kernel_over_bytes) {
  const auto with = [](auto change) {
    AttentionProblem p = paged_for_sm90();
    p.kv_dtype = DType::float8_e4m3fn;
    change(p);
    return kernel_on(90, p);
  };
  CHECK(with([](auto&) {}) == Kernel::cuda_decode_sm90);
  CHECK(with([](auto& p) { p.kv_dtype = DType::int8; }) == Kernel::cuda_decode_sm90);
  CHECK(with([](auto& p) { p.q.dtype = DType::float16; }) == Kernel::cuda_decode_sm90);
  CHECK(with([](auto& p) { p.v_scale.by_key = true; }) == Kernel::cuda_decode_sm90);
  CHECK(with([](auto& p) { p.q_len = 17; }) == Kernel::cuda_prefill_plain);
  CHECK(with([](auto& p) { p.q.dtype = DType::float32; }) == Kernel::cuda_decode_plain);
  CHECK(with([](auto& p) { p.block_size = 12; }) == Kernel::cuda_decode_plain);
  // 16 bytes are 16 elements here.
  CHECK(with([](auto& p) { p.k.token_stride = 1032; }) == Kernel::cuda_decode_plain);
  CHECK(with([](auto& p) { p.v.head_stride = 120; }) == Kernel::cuda_decode_plain);
  CHECK(with([](auto& p) { p.v.head_stride = 144; }) == Kernel::cuda_decode_sm90);
  for (const int capability : {0, 75, 80, 89, 100, 120}) {
    AttentionProblem p = paged_for_sm90();
    p.kv_dtype = DType::int8;
    CHECK(kernel_on(capability, p) == Kernel::cuda_decode_plain);
  }
}

TEST(a_chunk_of_bytes_holds_twice_the_keys) {
  AttentionProblem p = paged_for_sm90();
  p.table_width = 200;
  const Plan plan = make_plan(p, kGpu, kBytes, 90);
  p.kv_dtype = DType::float8_e4m3fn;
  p.table_width = 400;
  CHECK(make_plan(p, kGpu, kBytes, 90).max_groups == plan.max_groups);
}

TEST(the_portable_kernel_by_shape) {
  const auto takes = [](auto change) {
    AttentionProblem p = paged_for_sm90();
    change(p);
    const Kernel kernel = kernel_on(80, p);
    CHECK(kernel == Kernel::cuda_decode_portable || kernel == Kernel::cuda_decode_plain);
    return kernel == Kernel::cuda_decode_portable;
  };
  using P = AttentionProblem;
  CHECK(takes([](P& p) { p.block_size = 1; }));
  CHECK(takes([](P& p) { p.head_dim = 8; }));
  CHECK(takes([](P& p) { p.q.dtype = DType::float16; }));
  CHECK(takes([](P& p) { p.k.head_stride = -128; }));
  CHECK(takes([](P& p) { p.out.head_stride = 129; }));  // written an element at a time
  CHECK(!takes([](P& p) { p.kv_dtype = DType::float8_e4m3fn; }));
  CHECK(!takes([](P& p) { p.head_dim_v = 100; }));
  CHECK(!takes([](P& p) { p.q.data = reinterpret_cast<const void*>(8); }));
  CHECK(!takes([](P& p) { p.v.data = reinterpret_cast<const void*>(8); }));
  CHECK(!takes([](P& p) { p.v.block_stride += 4; }));
  CHECK(!takes([](P& p) { p.q.seq_stride += 4; }));
  CHECK(!takes([](P& p) { p.num_seqs = std::int64_t{1} << 24; }));  // too many blocks of the grid
  CHECK(!takes([](P& p) { p.num_blocks = std::int64_t{1} << 31; }));
  // Strides of a single element do not count.
  CHECK(takes([](P& p) { p.num_blocks = 1, p.k.block_stride = 3; }));
  CHECK(takes([](P& p) { p.block_size = 1, p.v.token_stride = 3; }));
}

TEST(any_workspace_that_holds_one_slot_does) {
  AttentionProblem p = paged_for_sm90();
  p.table_width = 10000;
  const Plan plan = make_plan(p, kGpu, kBytes, 90);
  CHECK(plan.num_slots >= 1 && plan.num_slots <= kWorkspaceCounters);
  CHECK(plan.num_slots * plan.slot_bytes <= kBytes);
  CHECK(plan.counters_offset >= kBytes && plan.counters_offset % 256 == 0);
  CHECK(make_plan(p, kGpu, plan.slot_bytes, 90).num_slots == 1);
  CHECK_THROWS(ValueError, make_plan(p, kGpu, plan.slot_bytes - 1, 90), "workspace", "at least");
  for (const std::int64_t bytes : {std::int64_t{1} << 20, kBytes})
    CHECK(make_plan(p, kGpu, bytes, 90).slot_bytes == plan.slot_bytes);
}

TEST(a_workspace_of_the_default_size_has_a_slot_for_each_team_of_an_h200) {
  AttentionProblem p = paged_for_sm90();
  p.num_seqs = 64;
  p.table_width = 8192;
  CHECK(make_plan(p, kGpu, kBytes, 90).num_slots >= 264);
}

TEST(an_object_reserves_a_slot_for_each_of_its_calls) {
  for (const std::int64_t dim : {64, 128, 192, 256}) {
    for (const std::int64_t max_keys : {16, 1024, 50'000}) {
      for (const std::int64_t q_len : {1, 3, 40}) {
        AttentionProblem p = paged_for_sm90();
        float m = 0;
        p.key_source = KeySource::tiles;
        p.state.m = &m;
        p.head_dim = p.head_dim_v = dim;
        p.q_len = q_len;
        p.table_width = max_keys / 16;
        const std::int64_t bytes =
            decode_workspace_bytes(p.num_seqs, q_len, p.num_q_heads, dim, max_keys);
        CHECK(make_plan(p, kGpu, bytes, 90).num_slots >= 1);
      }
    }
  }
}

TEST(packed_q_of_more_row_tiles_than_32_bits_count_is_refused) {
  AttentionProblem p = dense(1, 100, 128);
  const int cu[2] = {0, 0};
  p.key_source = KeySource::packed;
  p.cu_seqlens_q = {cu, 1, 0, false};
  p.total_q = p.q_len = kMaxRowTiles * kFewestTileRows / p.gqa_ratio() / 2;
  CHECK(make_plan(p, kGpu, kBytes).kernel == Kernel::cuda_prefill_plain);
  p.total_q = p.q_len = p.q_len * 2 + kFewestTileRows;
  CHECK_THROWS(ValueError, make_plan(p, kGpu, kBytes), "q: its rows", std::to_string(kMaxRowTiles));
  CHECK(make_plan(p, {}, kBytes).kernel == Kernel::cpu_prefill);
}

TEST(hopper_prefill_where_tma_reaches_every_array) {
  const AttentionProblem good = dense(2, 100, 128);
  CHECK(kernel_on(90, good) == Kernel::cuda_prefill_sm90);
  CHECK(kernel_on(0, good) == Kernel::cuda_prefill_plain);
  CHECK(kernel_on(80, good) == Kernel::cuda_prefill_portable);
  CHECK(kernel_on(100, good) == Kernel::cuda_prefill_portable);
  CHECK(kernel_on(90, dense(2, kMaxDecodeTokens, 128)) != Kernel::cuda_prefill_sm90);
  CHECK(make_plan(good, {}, kBytes, 0).kernel == Kernel::cpu_prefill);

  const auto with = [&](auto&& change) {
    AttentionProblem p = good;
    change(p);
    return kernel_on(90, p);
  };
  const Kernel plain = Kernel::cuda_prefill_plain;
  const Kernel portable = Kernel::cuda_prefill_portable;
  using P = AttentionProblem;
  CHECK(with([](P& p) { p.q.dtype = p.out.dtype = DType::float32; }) == plain);
  CHECK(with([](P& p) { p.head_dim = 100; }) == plain);
  CHECK(with([](P& p) { p.head_dim_v = 4; }) == plain);
  CHECK(with([](P& p) { p.dense_kv_len = 0; }) == portable);
  CHECK(with([](P& p) { p.dense_kv_len = std::int64_t{1} << 29; }) == portable);
  CHECK(with([](P& p) { p.num_q_heads = p.num_kv_heads = std::int64_t{1} << 29; }) == plain);
  CHECK(with([](P& p) { p.num_seqs = std::int64_t{1} << 26; }) == plain);  // too many tiles
  CHECK(with([](P& p) { p.q.token_stride += 4; }) == plain);
  CHECK(with([](P& p) { p.k.head_stride = 0; }) == portable);
  CHECK(with([](P& p) { p.v.block_stride = -p.v.block_stride; }) == portable);
  CHECK(with([](P& p) { p.k.data = reinterpret_cast<const void*>(8); }) == plain);
  CHECK(with([](P& p) { p.out.head_stride = 1; }) == portable);
  CHECK(with([](P& p) { p.key_source = KeySource::paged; }) == portable);
}

TEST(hopper_prefill_of_paged_keys) {
  const auto with = [](auto&& change) {
    AttentionProblem p = paged_for_sm90();
    p.q_len = 100;
    p.total_q = p.num_seqs * p.q_len;
    p.q.token_stride = p.q.seq_stride;
    p.q.seq_stride *= p.q_len;
    p.causal = true;
    change(p);
    return kernel_on(90, p);
  };
  const Kernel portable = Kernel::cuda_prefill_portable;
  using P = AttentionProblem;
  CHECK(with([](P&) {}) == Kernel::cuda_prefill_sm90);
  CHECK(with([](P& p) { p.block_size = 8; }) == Kernel::cuda_prefill_sm90);
  CHECK(with([](P& p) { p.softcap = 5.0f; }) == Kernel::cuda_prefill_sm90);
  CHECK(with([](P& p) { p.block_size = 12; }) == portable);
  CHECK(with([](P& p) { p.causal = false; }) == portable);
  CHECK(with([](P& p) { p.window_left = 100; }) == Kernel::cuda_prefill_sm90);
  CHECK(with([](P& p) { p.num_blocks = 0; }) == portable);
  CHECK(with([](P& p) { p.num_blocks = std::int64_t{1} << 29; }) == portable);
  CHECK(with([](P& p) { p.table_width = std::int64_t{1} << 26; }) == portable);
  CHECK(with([](P& p) { p.k.token_stride = 0; }) == portable);
}

TEST(hopper_prefill_ignores_strides_that_are_never_used) {
  AttentionProblem p = dense(1, 100, 128);
  p.q.seq_stride = p.k.block_stride = p.v.block_stride = p.out.seq_stride = 3;
  CHECK(kernel_on(90, p) == Kernel::cuda_prefill_sm90);
  p.num_kv_heads = 1;
  p.k.head_stride = p.v.head_stride = 0;
  CHECK(kernel_on(90, p) == Kernel::cuda_prefill_sm90);
  // A float32 result does not go through TMA.
  p.out.dtype = DType::float32;
  p.out.token_stride = 4097;
  CHECK(kernel_on(90, p) == Kernel::cuda_prefill_sm90);
}

TEST(prefill_of_few_rows_is_cut_by_what_each_sequence_has) {
  const auto plan_of = [](std::int64_t batch, std::int64_t tokens, std::int64_t num_keys,
                          std::int64_t heads) {
    AttentionProblem p = dense(batch, tokens, 128);
    p.num_q_heads = p.num_kv_heads = heads;
    p.dense_kv_len = num_keys;
    return make_plan(p, kGpu, kBytes, 90);
  };
  const Plan few = plan_of(1, 100, 100'000, 16);
  CHECK(few.kernel == Kernel::cuda_prefill_sm90);
  CHECK(few.cut.limit == 8 && few.max_segments == 8);
  CHECK(few.sequence_bytes == 100 * 16 * 8 * partial_row_bytes(128));
  for (const std::int64_t batch : {2, 64, 1000}) {
    CHECK(plan_of(batch, 100, 100'000, 16).cut.limit == 8);
    CHECK(plan_of(batch, 100, 5000, 16).cut.limit == 8);
  }
  CHECK(plan_of(1, 64, 100'000, 16).cut.limit == 16);  // small tiles, twice as many
  CHECK(plan_of(1, 65, 100'000, 16).cut.limit == 8);
  CHECK(plan_of(1, 100, kPrefillSegmentUnit, 16).max_segments == 1);
  CHECK(plan_of(1, 100, kPrefillSegmentUnit + 1, 16).max_segments == 2);
  CHECK(plan_of(1, 100, 100'000, 65).max_segments == 1);  // tiles enough
  CHECK(plan_of(1, kMaxSplitPrefillTokens + 1, 100'000, 1).max_segments == 1);
  CHECK(plan_of(1, kMaxSplitPrefillTokens, 100'000, 1).max_segments > 1);
  CHECK(plan_of(1, 100, 4000, 16).sequence_bytes == 0);
}

TEST(prefill_in_segments_fits_its_scratch) {
  for (const std::int64_t tokens : {17, 128, 129, 500, 1024}) {
    for (const std::int64_t heads : {1, 8, 32, 64}) {
      for (const std::int64_t num_keys : {4097, 9000, 100'000, 1 << 28}) {
        AttentionProblem p = dense(3, tokens, 256);
        p.num_q_heads = p.num_kv_heads = heads;
        p.dense_kv_len = num_keys;
        const Plan plan = make_plan(p, kGpu, kBytes, 90);
        CHECK(plan.kernel == Kernel::cuda_prefill_sm90);
        CHECK(plan.sequence_bytes <= kMaxSequenceScratch);
        CHECK(num_segments(num_keys, plan.cut) <= plan.max_segments);
        // The kernel counts in 32 bits, combine_segments in 64.
        const auto narrow = static_cast<std::int32_t>(num_keys);
        CHECK(num_segments(narrow, plan.cut) == num_segments(num_keys, plan.cut));
        CHECK(segment_keys(narrow, plan.cut) == segment_keys(num_keys, plan.cut));
        CHECK(plan.seqs_per_launch * plan.sequence_bytes + flags_bytes(plan.seqs_per_launch) <=
              kBytes);
        const std::int64_t least = plan.sequence_bytes + kFlagBytes + kFlagAlignment;
        CHECK(make_plan(p, kGpu, least, 90).seqs_per_launch == 1);
        CHECK_THROWS(ValueError, make_plan(p, kGpu, least - 1, 90), "workspace", "needs at least");
      }
    }
  }
}
