// SPDX-License-Identifier: Apache-2.0
// TiledAttention: results against the reference, and what may not change a bit.
#include <memory>
#include <utility>

#include "tiled_case.h"

using namespace tiledattn;
using namespace test;

DEVICE_TEST(tiles_match_the_reference) {
  for (const Case& c : cases()) {
    context = std::string(c.name) + " on " + to_string(device);
    Setup s(c, device);
    s.step();
    const Result want = s.cache.reference(s.q, c.rules, c.positions);
    const Array out = s.out(c.dtype), lse = s.lse(), out32 = s.out(DType::float32);
    s.attention.finalize(out, lse);
    CHECK_RESULT(download(out), want.out, c.dtype);
    CHECK_LSE(download(lse), want.lse);
    s.attention.finalize(out32);
    CHECK_RESULT(download(out32), want.out, c.dtype);
  }
}

DEVICE_TEST(the_state_is_in_natural_units) {
  for (const Case& c : cases()) {
    context = std::string(c.name) + " on " + to_string(device);
    Setup s(c, device);
    s.step();
    const Result want = s.cache.reference(s.q, c.rules, c.positions);
    const std::vector<Host> state = state_of(s.attention);
    for (std::size_t row = 0; row < want.m.size(); ++row) {
      CHECK_CLOSE(state[0].values[row], want.m[row], 1e-3 + 1e-5 * std::fabs(want.m[row]));
      CHECK_CLOSE(state[1].values[row], want.l[row], 2e-3 * want.l[row]);
    }
    CHECK_RESULT(state[2], want.o, c.dtype);
  }
}

DEVICE_TEST(the_last_tile_can_finalize) {
  for (const Case& c : cases()) {
    context = std::string(c.name) + " on " + to_string(device);
    Setup s(c, device);
    s.attention.begin_step(s.cache.num_seqs());
    const Array out = s.out(c.dtype), lse = s.lse();
    std::int64_t first = 0;
    for (std::size_t i = 0; i < s.walk.cuts.size(); ++i) {
      const Tile tile(s.cache, first, s.walk.cuts[i], c.q_len, device, s.walk);
      TileArgs args = tile.args(s.q_array, s.k_pool, s.v_pool, s.walk);
      if (i + 1 == s.walk.cuts.size()) {
        args.out = out.tensor();
        args.lse = lse.tensor();
      }
      s.attention.step_tile(args, {}, true);
      first += s.walk.cuts[i];
    }
    const Result want = s.cache.reference(s.q, c.rules, c.positions);
    CHECK_RESULT(download(out), want.out, c.dtype);
    CHECK_LSE(download(lse), want.lse);
    // The state holds the last tile too.
    const Array again = s.out(c.dtype);
    s.attention.finalize(again);
    CHECK_RESULT(download(again), want.out, c.dtype);
  }
}

namespace {

/// All tiles of a case in one call, upon what the state holds; the last one with `out`, if given.
void add_together(Setup& s, const Array* out = nullptr) {
  std::vector<std::unique_ptr<Tile>> tiles;
  std::vector<TileArgs> args;
  const std::int64_t q_len = s.q_array.tensor().rank == 4 ? s.q_array.tensor().shape[1] : 1;
  std::int64_t first = 0;
  for (const std::int64_t count : s.walk.cuts) {
    tiles.push_back(
        std::make_unique<Tile>(s.cache, first, count, q_len, s.attention.device(), s.walk));
    args.push_back(tiles.back()->args(s.q_array, s.k_pool, s.v_pool, s.walk));
    first += count;
  }
  if (out) args.back().out = *out;
  s.attention.step_tiles(args);
  backend_for(s.attention.device()).synchronize(s.attention.device().index, {});
}

/// The same from an empty state.
void step_together(Setup& s) {
  s.attention.begin_step(s.cache.num_seqs());
  add_together(s);
}

}  // namespace

DEVICE_TEST(tiles_together_give_the_bits_of_one_after_the_other) {
  const int num_threads = get_num_threads();
  for (const Case& c : cases()) {
    context = std::string(c.name) + " on " + to_string(device);
    Setup s(c, device);
    s.step();
    const std::vector<Host> want = state_of(s.attention);
    for (const int threads : {1, 3, 8}) {
      set_num_threads(threads);
      step_together(s);
      CHECK(same_bits(state_of(s.attention), want));
    }
    set_num_threads(num_threads);
  }
}

TEST(of_tiles_together_none_is_folded_where_one_is_wrong) {
  Setup s({.name = "wrong", .tile = 3, .lengths = {90, 41}}, kCpu);
  s.step();
  const std::vector<Host> before = state_of(s.attention);
  const std::int64_t right = std::exchange(s.cache.tables[0].back(), 1 << 28);
  CHECK_THROWS(IndexError, step_together(s), "block");
  s.attention.finalize(s.out(DType::float32));  // an empty state can be read
  s.cache.tables[0].back() = right;
  step_together(s);
  CHECK(same_bits(state_of(s.attention), before));
}

TEST(of_tiles_that_go_one_by_one_none_is_folded_where_one_is_wrong) {
  Setup s({.name = "wrong", .tile = 3, .lengths = {90, 41}}, kCpu);
  s.step();
  const std::vector<Host> before = state_of(s.attention);
  const Array out = s.out(DType::float32);
  const std::int64_t right = std::exchange(s.cache.tables[0].back(), 1 << 28);
  CHECK_THROWS(IndexError, add_together(s, &out), "block");
  CHECK(same_bits(state_of(s.attention), before));
  s.cache.tables[0].back() = right;
  add_together(s, &out);
}

DEVICE_TEST(any_cut_gives_the_same_result) {
  Random random(5);
  for (int round = 0; round < 12; ++round) {
    Case c = kPlain;
    c.tile = 7;
    c.q_len = 1 + round % 3;
    c.positions = round % 2 == 1;
    if (c.positions) c.rules = windowed(round);
    for (std::int64_t& length : c.lengths) length = random.below(40);
    Setup s(c, device);
    s.walk.cuts.clear();
    for (std::int64_t covered = 0; covered < s.cache.max_blocks();) {
      s.walk.cuts.push_back(random.below(8));  // 0: a tile without columns
      covered += s.walk.cuts.back();
    }
    s.walk.spare_columns = round % 2;
    s.walk.index_type = round % 2 ? DType::int64 : DType::int32;
    s.step();
    const Array out = s.out(c.dtype), lse = s.lse();
    s.attention.finalize(out, lse);
    const Result want = s.cache.reference(s.q, c.rules, c.positions);
    CHECK_RESULT(download(out), want.out, c.dtype);
    CHECK_LSE(download(lse), want.lse);
  }
}

DEVICE_TEST(both_standard_pool_layouts) {
  for (const DType dtype : {DType::float32, DType::bfloat16}) {
    Case c = kPlain;
    c.dtype = dtype;
    Setup s(c, device);
    const TiledAttentionDims& dims = s.attention.dims();
    const PoolStrides paged = dims.paged_strides();
    CHECK(paged.block == s.k_pool.tensor().strides[0]);
    CHECK(paged.token == s.k_pool.tensor().strides[1]);
    CHECK(paged.kv_head == s.k_pool.tensor().strides[2]);

    // [slot, K|V, num_kv_heads, block_size, head_dim]: K and V are views of one array.
    const PoolStrides scratch = dims.scratch_pool_strides();
    const std::int64_t num_slots = s.cache.k.shape[0];
    Host both({num_slots, 2, c.num_kv_heads, c.block_size, c.head_dim});
    for (std::int64_t slot = 0; slot < num_slots; ++slot) {
      for (std::int64_t head = 0; head < c.num_kv_heads; ++head) {
        for (std::int64_t token = 0; token < c.block_size; ++token) {
          for (std::int64_t d = 0; d < c.head_dim; ++d) {
            const std::int64_t from = s.cache.k.at({slot, token, head, d});
            both[both.at({slot, 0, head, token, d})] = s.cache.k[from];
            both[both.at({slot, 1, head, token, d})] = s.cache.v[from];
          }
        }
      }
    }
    const Array pool(both, dtype, device);
    Tensor k_view = s.k_pool;
    k_view.data = pool.tensor().data;
    k_view.strides[0] = scratch.block;
    k_view.strides[1] = scratch.token;
    k_view.strides[2] = scratch.kv_head;
    Tensor v_view = k_view;
    v_view.data = static_cast<char*>(k_view.data) + pool.tensor().strides[1] * item_bytes(dtype);
    CHECK(scratch.block == pool.tensor().strides[0]);
    CHECK(scratch.kv_head == pool.tensor().strides[2]);
    CHECK(scratch.token == pool.tensor().strides[3]);
    s.attention.begin_step(s.cache.num_seqs());
    step_through(s.attention, s.cache, s.q_array, k_view, v_view, s.walk);
    const Array out = s.out(dtype);
    s.attention.finalize(out);
    CHECK_RESULT(download(out), s.cache.reference(s.q, c.rules, c.positions).out, dtype);
  }
}

DEVICE_TEST(odd_strides_and_addresses) {
  for (const DType dtype : {DType::float32, DType::float16}) {
    Case c = kPlain;
    c.dtype = dtype;
    c.head_dim = c.head_dim_v = 20;
    Setup s(c, device);
    // Heads outside tokens, rows 3 elements apart, 1 to 3 elements into the memory.
    const Array q(s.q, layout_of(s.q.shape, dtype, device, {2, 0, 1, 3}, 3), 1);
    const Array k(s.cache.k, layout_of(s.cache.k.shape, dtype, device, {2, 0, 1, 3}, 1), 3);
    const Array v(s.cache.v, layout_of(s.cache.v.shape, dtype, device, {1, 2, 0, 3}, 5), 1);
    const Array out(Host(s.q.shape), layout_of(s.q.shape, dtype, device, {1, 2, 0, 3}, 2), 1);
    const Shape rows{s.q.shape[0], s.q.shape[1], s.q.shape[2]};
    const Array lse(Host(rows), layout_of(rows, DType::float32, device, {2, 1, 0}, 1), 1);
    s.attention.begin_step(s.cache.num_seqs());
    step_through(s.attention, s.cache, q, k, v, s.walk);
    s.attention.finalize(out, lse);
    const Result want = s.cache.reference(s.q, c.rules, c.positions);
    CHECK_RESULT(download(out), want.out, dtype);
    CHECK_LSE(download(lse), want.lse);
  }
}

DEVICE_TEST(one_number_or_none_for_the_valid_slots) {
  Case c = kPlain;
  c.lengths = {7, 11, 3};  // 3 slots of each last block
  Setup s(c, device);
  s.attention.begin_step(3);
  const Walk walk{.cuts = {3}};
  const Tile tile(s.cache, 0, 3, 1, device, walk);
  TileArgs args = tile.args(s.q_array, s.k_pool, s.v_pool, walk);
  args.last_block_valid_slots.reset();
  args.last_block_valid_slots_all = 3;
  s.attention.step_tile(args);
  const Array out = s.out(c.dtype);
  s.attention.finalize(out);
  CHECK_RESULT(download(out), s.cache.reference(s.q, c.rules, c.positions).out, c.dtype);

  Case full = kPlain;
  full.lengths = {8, 12, 4};
  Setup f(full, device);
  f.attention.begin_step(3);
  args = tile.args(f.q_array, f.k_pool, f.v_pool, walk);
  const Tile whole(f.cache, 0, 3, 1, device, walk);
  args = whole.args(f.q_array, f.k_pool, f.v_pool, walk);
  args.last_block_valid_slots.reset();
  f.attention.step_tile(args);
  const Array out_full = f.out(full.dtype);
  f.attention.finalize(out_full);
  CHECK_RESULT(download(out_full), f.cache.reference(f.q, full.rules).out, full.dtype);
}

DEVICE_TEST(company_and_sizes_change_no_bit) {
  for (const DType dtype : {DType::float32, DType::bfloat16}) {
    Case c = kPlain;
    c.dtype = dtype;
    c.tile = 30;
    c.block_size = 16;
    c.lengths = {700, 33, 480};
    Setup s(c, device);
    s.step();
    const std::vector<Host> together = state_of(s.attention);
    for (std::size_t b = 0; b < c.lengths.size(); ++b) {
      // Alone, in an object for more, with a wider table and other physical blocks.
      PagedCache alone = s.cache;
      alone.lengths = {s.cache.lengths[b]};
      alone.tables = {s.cache.tables[b]};
      const std::int64_t num_blocks = alone.k.shape[0];
      const std::int64_t block = alone.k.size() / num_blocks;
      const std::vector<std::int64_t> to = s.random.permutation(num_blocks);
      for (std::int64_t i = 0; i < num_blocks; ++i) {
        const std::int64_t moved = to[static_cast<std::size_t>(i)] * block;
        std::copy_n(s.cache.k.values.begin() + i * block, block, alone.k.values.begin() + moved);
        std::copy_n(s.cache.v.values.begin() + i * block, block, alone.v.values.begin() + moved);
      }
      for (std::int64_t& id : alone.tables[0]) id = to[static_cast<std::size_t>(id)];
      TiledAttentionDims dims = c.dims();
      dims.max_seqs = 9;
      dims.tile_capacity = 100;
      TiledAttention attention(dims, device);
      const Array q(rows(s.q, static_cast<std::int64_t>(b), static_cast<std::int64_t>(b) + 1),
                    dtype, device);
      const Array k_pool(alone.k, dtype, device), v_pool(alone.v, dtype, device);
      Walk walk = s.walk;
      walk.spare_columns = 60;
      attention.begin_step(1);
      step_through(attention, alone, q, k_pool, v_pool, walk);
      const std::vector<Host> state = state_of(attention);
      for (std::size_t i = 0; i < 3; ++i) {
        CHECK(test::same_bits(element(state[i], 0),
                              element(together[i], static_cast<std::int64_t>(b))));
      }
    }
  }
}

DEVICE_TEST(a_nan_in_use_shows_in_its_rows_alone) {
  Setup s(kPlain, device);
  const std::int64_t token = kPlain.num_kv_heads * kPlain.head_dim;
  const Result want = s.cache.reference(s.q, kPlain.rules);
  s.cache.k[s.cache.slot(3, 17) * token] = kNan;  // KV head 0 of sequence 3
  s.k_pool = Array(s.cache.k, kPlain.dtype, device);
  s.step();
  const Array out = s.out(DType::float32), lse = s.lse();
  s.attention.finalize(out, lse);
  const Host got = download(out), got_lse = download(lse);
  for (std::int64_t b = 0; b < 5; ++b) {
    for (std::int64_t head = 0; head < kPlain.num_q_heads; ++head) {
      const bool poisoned = b == 3 && head < kPlain.num_q_heads / kPlain.num_kv_heads;
      const std::int64_t row = b * kPlain.num_q_heads + head;
      for (std::int64_t d = 0; d < kPlain.head_dim_v; ++d) {
        const std::int64_t at = row * kPlain.head_dim_v + d;
        CHECK_CLOSE(got[at], poisoned ? kNan : want.out[static_cast<std::size_t>(at)], 1e-4);
      }
      CHECK_CLOSE(got_lse[row], poisoned ? kNan : want.lse[static_cast<std::size_t>(row)], 1e-3);
    }
  }
}
