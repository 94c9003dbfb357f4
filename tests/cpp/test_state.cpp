// SPDX-License-Identifier: Apache-2.0
// The running state: what calls do to it, and states that are kept, moved and merged.
#include "tiled_case.h"

using namespace tiledattn;
using namespace test;

DEVICE_TEST(a_new_object_is_empty) {
  Setup s(kPlain, device);
  CHECK(s.attention.num_seqs() == 0);
  CHECK(s.attention.q_len() == 0);
  CHECK(!s.attention.dtype().has_value());
  CHECK(s.attention.device() == device);
  const std::vector<Host> state = state_of(s.attention);
  for (const float m : state[0].values) CHECK(m == -kInf);
  for (const float l : state[1].values) CHECK(l == 0);
  for (const float o : state[2].values) CHECK(o == 0);
}

DEVICE_TEST(begin_step_empties_the_state) {
  Case c = kPlain;
  Setup s(c, device);
  s.step();
  const std::vector<Host> first = state_of(s.attention);
  // Half the sequences in the next step: what was there must not come back.
  s.attention.begin_step(2);
  CHECK(s.attention.num_seqs() == 2);
  const std::vector<Host> state = state_of(s.attention);
  for (std::int64_t row = 0; row < 2 * c.num_q_heads; ++row) {
    CHECK(state[0][row] == -kInf);
    CHECK(state[1][row] == 0);
  }
  const Array out(Host({2, c.num_q_heads, c.head_dim_v}, 5), c.dtype, device);
  const Array lse(Host({2, c.num_q_heads}, 5), DType::float32, device);
  s.attention.finalize(out, lse);
  for (const float value : download(out).values) CHECK(value == 0);
  for (const float value : download(lse).values) CHECK(value == -kInf);
  s.step();
  CHECK(same_bits(state_of(s.attention), first));
  // The same without a look at the state in between, which settles it.
  s.attention.begin_step(2);
  s.attention.finalize(out, lse);
  for (const float value : download(out).values) CHECK(value == 0);
  for (const float value : download(lse).values) CHECK(value == -kInf);
  s.step();
  s.attention.begin_step(2);
  const State empty = s.attention.state();
  for (const float m : download(empty.m()).values) CHECK(m == -kInf);
  for (const float o : download(empty.o()).values) CHECK(o == 0);
}

DEVICE_TEST(finalize_leaves_the_state_and_more_tiles_may_follow) {
  Setup s(kPlain, device);
  s.attention.begin_step(s.cache.num_seqs());
  std::int64_t first = 0;
  for (const std::int64_t count : s.walk.cuts) {
    const Tile tile(s.cache, first, count, 1, device, s.walk);
    s.attention.step_tile(tile.args(s.q_array, s.k_pool, s.v_pool, s.walk), {}, true);
    const std::vector<Host> before = state_of(s.attention);
    const Array out = s.out(DType::float32);
    s.attention.finalize(out);
    CHECK(same_bits(before, state_of(s.attention)));
    first += count;
  }
  const Array out = s.out(DType::float32);
  s.attention.finalize(out);
  CHECK_RESULT(download(out), s.cache.reference(s.q, kPlain.rules).out, DType::float32);
}

DEVICE_TEST(a_result_of_a_state_is_refused_by_its_own_name) {
  Setup s(kPlain, device);
  s.step();
  const State state = s.attention.state();
  const Array longer(Host({6, kPlain.num_q_heads, kPlain.head_dim_v}, 0), kPlain.dtype, device);
  CHECK_THROWS(ValueError, state.finalize(longer), "out", "6 sequences",
               "5, the num_seqs of this State");
}

DEVICE_TEST(views_are_live) {
  Setup s(kPlain, device);
  const Tensor m = s.attention.m(), o = s.attention.o();
  s.step();
  CHECK(s.attention.m().data == m.data);
  CHECK(s.attention.o().data == o.data);
  CHECK(test::same_bits(download(m), download(s.attention.m())));
  CHECK(download(m)[0] > -kInf);
  CHECK(m.rank == 2 && m.shape[0] == 5 && m.shape[1] == kPlain.num_q_heads);
  CHECK(o.rank == 3 && o.shape[2] == kPlain.head_dim_v);
  CHECK(s.attention.state_buffer().data() != nullptr);
  CHECK(s.attention.nbytes() >= s.attention.dims().state_bytes());

  Case c = kPlain;
  c.q_len = 3;
  Setup several(c, device);
  CHECK(several.attention.m().rank == 3 && several.attention.m().shape[1] == 3);
  CHECK(several.attention.o().rank == 4 && several.attention.o().shape[3] == c.head_dim_v);
}

DEVICE_TEST(fewer_tokens_than_the_object_holds) {
  Case c = kPlain;
  c.q_len = 2;
  Setup s(c, device);
  TiledAttentionDims dims = c.dims();
  dims.max_q_len = 5;
  TiledAttention wide(dims, device);
  // A step that fills every token, so that what the next one leaves alone is not empty by chance.
  const Array five(s.random.normal({5, 5, c.num_q_heads, c.head_dim}), c.dtype, device);
  wide.begin_step(s.cache.num_seqs());
  step_through(wide, s.cache, five, s.k_pool, s.v_pool, s.walk);
  wide.begin_step(s.cache.num_seqs());
  step_through(wide, s.cache, s.q_array, s.k_pool, s.v_pool, s.walk);
  CHECK(wide.q_len() == 2);
  const Array out = s.out(c.dtype);
  wide.finalize(out);
  CHECK_RESULT(download(out), s.cache.reference(s.q, c.rules, c.positions).out, c.dtype);
  const Host m = download(wide.m());
  CHECK(m[m.at({0, 1, 0})] > -kInf);
  CHECK(m[m.at({0, 2, 0})] == -kInf);
}

DEVICE_TEST(a_state_can_be_kept_and_put_back) {
  for (const std::int64_t q_len : {1, 2}) {
    Case c = kPlain;
    c.q_len = q_len;
    Setup s(c, device);
    s.step();
    const State state = s.attention.state();
    CHECK(state.num_seqs() == s.cache.num_seqs());
    CHECK(state.q_len() == q_len);
    CHECK(state.m().rank == (q_len == 1 ? 2 : 3));
    const std::vector<Host> before = state_of(s.attention);
    const State moved = state.to(kCpu).to(device);

    s.attention.begin_step(1);
    s.attention.load_state(moved);
    CHECK(s.attention.num_seqs() == s.cache.num_seqs());
    CHECK(same_bits(before, state_of(s.attention)));
    const Array a = s.out(DType::float32), b = s.out(DType::float32), lse = s.lse();
    s.attention.finalize(a);
    Tensor out = b, rows = lse;
    if (q_len == 1) {  // shaped like o and m
      out = make_tensor(out.data, out.dtype, device, {out.shape[0], out.shape[2], out.shape[3]});
      rows = make_tensor(rows.data, rows.dtype, device, {rows.shape[0], rows.shape[2]});
    }
    state.finalize(out, rows);
    CHECK(test::same_bits(download(a), download(b)));
    CHECK_LSE(download(lse), s.cache.reference(s.q, c.rules, c.positions).lse);
  }
}

DEVICE_TEST(states_over_disjoint_keys_merge) {
  Case c = kPlain;
  c.tile = 1;
  c.rules = with_sinks({0.5f, -1.0f, 3.0f, 0.0f});
  Setup s(c, device);
  // One object a third of the tiles each; the sink enters once, when the result is made.
  std::vector<State> parts;
  const std::int64_t num_tiles = static_cast<std::int64_t>(s.walk.cuts.size());
  for (std::int64_t part = 0; part < 3; ++part) {
    s.attention.begin_step(s.cache.num_seqs());
    for (std::int64_t i = part * num_tiles / 3; i < (part + 1) * num_tiles / 3; ++i) {
      const Tile tile(s.cache, i, 1, 1, device, s.walk);
      s.attention.step_tile(tile.args(s.q_array, s.k_pool, s.v_pool, s.walk), {}, true);
    }
    parts.push_back(s.attention.state());
  }
  const State merged = merge_states({&parts[0], &parts[1], &parts[2]});
  const Array out(Host({5, c.num_q_heads, c.head_dim_v}), DType::float32, device);
  const Array lse(Host({5, c.num_q_heads}), DType::float32, device);
  merged.finalize(out, lse, s.sinks.tensor());
  const Result want = s.cache.reference(s.q, c.rules, c.positions);
  CHECK_RESULT(download(out), want.out, c.dtype);
  CHECK_LSE(download(lse), want.lse);
}

DEVICE_TEST(merging_with_an_empty_state_changes_no_bit) {
  Setup s(kPlain, device);
  s.step();
  const State full = s.attention.state();
  const State empty = State::empty(device, 5, 1, kPlain.num_q_heads, kPlain.head_dim_v);
  for (const std::vector<const State*>& list :
       {std::vector<const State*>{&full, &empty}, {&empty, &full}, {&empty, &empty, &full}}) {
    const State merged = merge_states(list);
    CHECK(test::same_bits(download(merged.m()), download(full.m())));
    CHECK(test::same_bits(download(merged.l()), download(full.l())));
    CHECK(test::same_bits(download(merged.o()), download(full.o())));
  }
  const State none = merge_states({&empty, &empty});
  for (const float m : download(none.m()).values) CHECK(m == -kInf);
  for (const float l : download(none.l()).values) CHECK(l == 0);
  CHECK(test::same_bits(download(none.o()), download(empty.o())));
}

TEST(a_bad_argument_leaves_the_state_alone_on_the_cpu) {
  Setup s(kPlain, kCpu);
  s.step();
  const std::vector<Host> before = state_of(s.attention);
  const Array out = s.out(DType::float32);
  const Host untouched = download(out);
  struct Bad {
    const char* argument;
    std::int64_t value;
  };
  for (const Bad& bad :
       {Bad{"tile_blocks", 1 << 20}, Bad{"tile_blocks", -1}, Bad{"tile_block_counts", 4},
        Bad{"tile_block_counts", -1}, Bad{"last_block_valid_slots", 5}, Bad{"kv_positions", -1},
        Bad{"q_positions", -3}}) {
    const Walk walk{.cuts = {2}, .positions = true, .spare_columns = 1};
    const Tile tile(s.cache, 0, 2, 1, kCpu, walk);
    TileArgs args = tile.args(s.q_array, s.k_pool, s.v_pool, walk);
    args.out = out.tensor();
    const std::string argument = bad.argument;
    // Sequence 3 is the longest: everything before it is right.
    const Tensor& array = argument == "tile_blocks"              ? args.tile_blocks
                          : argument == "tile_block_counts"      ? args.tile_block_counts
                          : argument == "last_block_valid_slots" ? *args.last_block_valid_slots
                          : argument == "kv_positions"           ? *args.kv_positions
                                                                 : *args.q_positions;
    static_cast<std::int32_t*>(array.data)[3 * array.strides[0]] =
        static_cast<std::int32_t>(bad.value);
    const std::string value = std::to_string(bad.value);
    if (argument == "tile_blocks") {
      CHECK_THROWS(IndexError, s.attention.step_tile(args), argument, "sequence 3", "column 0",
                   value, std::to_string(s.cache.k.shape[0] - 1));
    } else {
      CHECK_THROWS(ValueError, s.attention.step_tile(args), argument, "sequence 3", value);
    }
    CHECK(same_bits(before, state_of(s.attention)));
    CHECK(test::same_bits(untouched, download(out)));
  }
  s.step();
  CHECK(same_bits(before, state_of(s.attention)));
}

DEVICE_TEST(a_gpu_marks_the_bad_sequence_alone) {
  if (device.is_cpu()) {
    Setup s(kPlain, device);
    s.attention.check();  // nothing is found late on the CPU
    CHECK(s.attention.device().is_cpu());
    return;
  }
  Setup s(kPlain, device);
  const Walk walk{.cuts = {6}};
  s.attention.begin_step(5);
  const Tile good(s.cache, 0, 3, 1, device, walk);
  PagedCache broken = s.cache;
  broken.tables[3][1] = 1 << 20;
  const Tile bad(broken, 0, 3, 1, device, walk);
  s.attention.step_tile(bad.args(s.q_array, s.k_pool, s.v_pool, walk));
  CHECK_THROWS(IndexError, s.attention.check(), "tile_blocks", "sequence 3", "column 1", "1048576");
  const Tile rest(s.cache, 3, 3, 1, device, walk);
  s.attention.step_tile(rest.args(s.q_array, s.k_pool, s.v_pool, walk));
  const Array out = s.out(DType::float32), lse = s.lse();
  s.attention.finalize(out, lse);
  s.attention.check();
  const Host got = download(out), got_lse = download(lse);
  const Result want = s.cache.reference(s.q, kPlain.rules);
  const auto row = static_cast<std::size_t>(kPlain.num_q_heads * kPlain.head_dim_v);
  for (std::int64_t b = 0; b < 5; ++b) {
    const auto at = static_cast<std::size_t>(b) * row;
    if (b == 3) {
      CHECK(all_nan(element(got, b)));
      CHECK(all_nan(element(got_lse, b)));
    } else {
      CHECK_RESULT(element(got, b),
                   std::vector<double>(want.out.begin() + static_cast<std::ptrdiff_t>(at),
                                       want.out.begin() + static_cast<std::ptrdiff_t>(at + row)),
                   DType::float32);
    }
  }
  s.step();  // begin_step makes the sequence whole again
  s.attention.finalize(out);
  CHECK_RESULT(download(out), want.out, DType::float32);
}

DEVICE_TEST(an_object_can_be_moved) {
  Setup s(kPlain, device);
  s.attention.begin_step(s.cache.num_seqs());
  const Tensor m = s.attention.m();
  TiledAttention moved(std::move(s.attention));
  CHECK(moved.m().data == m.data);
  step_through(moved, s.cache, s.q_array, s.k_pool, s.v_pool, s.walk);
  TiledAttention assigned(kPlain.dims(), device);
  assigned = std::move(moved);
  const Array out(Host(s.q.shape), DType::float32, device);
  assigned.finalize(out);
  CHECK_RESULT(download(out), s.cache.reference(s.q, kPlain.rules).out, DType::float32);
}

TEST(dims_give_the_sizes_of_the_buffers) {
  TiledAttentionDims dims;
  dims.max_seqs = 4;
  dims.num_q_heads = 32;
  dims.num_kv_heads = 8;
  dims.head_dim = 128;
  dims.block_size = 16;
  dims.tile_capacity = 64;
  dims = dims.validated();
  CHECK(dims.head_dim_v == 128);
  CHECK(dims.gqa_ratio() == 4);
  CHECK(dims.m_bytes() == 4 * 32 * 4);
  CHECK(dims.l_bytes() == 4 * 32 * 4);
  CHECK(dims.o_bytes() == 4 * 32 * 128 * 4);
  CHECK(dims.output_bytes() == 4 * 32 * 128 * 2);
  CHECK(dims.state_bytes() == dims.m_bytes() + dims.l_bytes() + dims.o_bytes());
  const PoolStrides paged = dims.paged_strides();
  CHECK(paged.block == 16 * 8 * 128 && paged.token == 8 * 128 && paged.kv_head == 128);
  const PoolStrides scratch = dims.scratch_pool_strides();
  CHECK(scratch.block == 2 * 8 * 16 * 128 && scratch.token == 128 && scratch.kv_head == 16 * 128);
}
