// SPDX-License-Identifier: Apache-2.0
// Every refusal of every argument of TiledAttention and State.
#include "refusals.h"
#include "tiledattn/tile_source.h"

using namespace tiledattn;
using namespace test;

// Sanitizers end the process when an allocation fails, unless told that a test wants just that.
#define TEST_OPTIONS_FUNCTION extern "C" __attribute__((visibility("default"))) const char*
TEST_OPTIONS_FUNCTION __asan_default_options();
TEST_OPTIONS_FUNCTION __tsan_default_options();
const char* __asan_default_options() { return "allocator_may_return_null=1"; }
const char* __tsan_default_options() { return "allocator_may_return_null=1"; }

TEST(step_tile_refusals) {
  using R = Refusal<TileArgs>;
  TiledAttentionDims dims;
  dims.max_seqs = 3;
  dims.num_q_heads = 4;
  dims.num_kv_heads = 2;
  dims.head_dim = 8;
  dims.block_size = 4;
  dims.tile_capacity = 3;
  dims.max_q_len = 2;
  dims.head_dim_v = 6;
  TiledAttention attention(dims, kCpu);
  const Array q(Host({2, 1, 4, 8}, 1), DType::float32, kCpu);
  const Array k_pool(Host({5, 4, 2, 8}, 1), DType::float32, kCpu);
  const Array v_pool(Host({5, 4, 2, 6}, 1), DType::float32, kCpu);
  const Array out(Host({2, 1, 4, 6}, 7), DType::float32, kCpu);
  const Array lse(Host({2, 1, 4}, 7), DType::float32, kCpu);
  TileArgs right;
  right.q = q;
  right.k_pool = k_pool;
  right.v_pool = v_pool;
  right.tile_blocks = numbers({1, 3, 4, 2}, {2, 2});
  right.tile_block_counts = numbers({2, 1});
  right.last_block_valid_slots = numbers({4, 2});
  right.kv_positions = numbers({0, 4});
  right.q_positions = numbers({9, 9});
  right.out = out.tensor();
  right.lse = lse.tensor();
  std::vector<R> refusals = {
      {R::kType, [](auto& a) { a.q.dtype = DType::int64; }, {"q", "int64", "float32"}},
      {R::kType,
       [](auto& a) { a.k_pool.dtype = DType::float16; },
       {"k_pool", "float16", "float32"}},
      {R::kType,
       [](auto& a) { a.v_pool.dtype = DType::float16; },
       {"v_pool", "float16", "float32"}},
      {R::kType,
       [](auto& a) { a.tile_blocks.dtype = kUint32; },
       {"tile_blocks", "uint32", "int32"}},
      {R::kType,
       [](auto& a) { a.tile_block_counts.dtype = kUint32; },
       {"tile_block_counts", "uint32", "int32"}},
      {R::kType,
       [](auto& a) { a.last_block_valid_slots->dtype = kBool; },
       {"last_block_valid_slots", "bool", "int32"}},
      {R::kType,
       [](auto& a) { a.kv_positions->dtype = kFloat64; },
       {"kv_positions", "float64", "int32"}},
      {R::kType,
       [](auto& a) { a.q_positions->dtype = kFloat64; },
       {"q_positions", "float64", "int32"}},
      {R::kType, [](auto& a) { a.out->dtype = DType::bfloat16; }, {"out", "bfloat16", "float32"}},
      {R::kType, [](auto& a) { a.lse->dtype = DType::bfloat16; }, {"lse", "bfloat16", "float32"}},
      {R::kValue, [](auto& a) { a.q = shortened(a.q); }, {"q", "1 sequences", "2", "begin_step"}},
      {R::kValue,
       [](auto& a) { a.q = with_size(a.q, 1, 3); },
       {"q", "3 query tokens", "max_q_len = 2"}},
      {R::kValue,
       [](auto& a) { a.q = with_size(a.q, 2, 3); },
       {"q", "[2, 1, 3, 8]", "num_q_heads=4"}},
      {R::kValue, [](auto& a) { a.q = with_size(a.q, 3, 7); }, {"q", "[2, 1, 4, 7]", "head_dim=8"}},
      {R::kValue, [](auto& a) { a.q = with_stride(a.q, 3, 3); }, {"q", "stride 3", "stride 1"}},
      {R::kValue, [](auto& a) { a.q = misaligned(a.q); }, {"q", "address", "4-byte"}},
      {R::kValue, [](auto& a) { a.q = on(a.q, kGpu); }, {"q", "cuda:0", "cpu"}},
      {R::kValue,
       [](auto& a) { a.k_pool = with_size(a.k_pool, 1, 5); },
       {"k_pool", "[5, 5, 2, 8]", "block_size=4"}},
      {R::kValue,
       [](auto& a) { a.k_pool = with_size(a.k_pool, 2, 4); },
       {"k_pool", "[5, 4, 4, 8]", "num_kv_heads=2"}},
      {R::kValue,
       [](auto& a) { a.v_pool = with_size(a.v_pool, 3, 8); },
       {"v_pool", "[5, 4, 2, 8]", "head_dim_v=6"}},
      {R::kValue,
       [](auto& a) { a.v_pool = shortened(a.v_pool); },
       {"v_pool", "[4, 4, 2, 6]", "num_blocks=5"}},
      {R::kValue, [](auto& a) { a.k_pool = on(a.k_pool, kGpu); }, {"k_pool", "cuda:0", "cpu"}},
      {R::kValue, [](auto& a) { a.v_pool = on(a.v_pool, kGpu); }, {"v_pool", "cuda:0", "cpu"}},
      {R::kValue,
       [](auto& a) { a.tile_blocks = numbers({1, 3, 4, 2, 1, 3, 4, 2}, {2, 4}); },
       {"tile_blocks", "4 columns", "tile_capacity = 3"}},
      {R::kValue,
       [](auto& a) { a.tile_blocks = numbers({1, 3}, {1, 2}); },
       {"tile_blocks", "[1, 2]", "num_seqs=2"}},
      {R::kValue,
       [](auto& a) { a.tile_block_counts = numbers({1}); },
       {"tile_block_counts", "[1]", "num_seqs=2"}},
      {R::kValue,
       [](auto& a) { a.last_block_valid_slots = numbers({1, 2, 3}); },
       {"last_block_valid_slots", "[3]", "num_seqs=2"}},
      {R::kValue,
       [](auto& a) { a.last_block_valid_slots.reset(), a.last_block_valid_slots_all = 5; },
       {"last_block_valid_slots", "5", "block_size = 4"}},
      {R::kValue,
       [](auto& a) { a.last_block_valid_slots.reset(), a.last_block_valid_slots_all = -1; },
       {"last_block_valid_slots", "-1", "block_size = 4"}},
      {R::kValue, [](auto& a) { a.kv_positions.reset(); }, {"kv_positions", "None", "both"}},
      {R::kValue, [](auto& a) { a.q_positions.reset(); }, {"q_positions", "None", "both"}},
      {R::kValue,
       [](auto& a) { a.kv_positions = numbers({0}); },
       {"kv_positions", "[1]", "num_seqs=2"}},
      {R::kValue, [](auto& a) { a.out.reset(); }, {"lse", "without out", "out as well"}},
      {R::kValue,
       [](auto& a) { a.out = shortened(*a.out); },
       {"out", "1 sequences", "2", "begin_step"}},
      {R::kValue,
       [](auto& a) { a.out = with_size(*a.out, 3, 8); },
       {"out", "[2, 1, 4, 8]", "head_dim_v=6"}},
      {R::kValue, [](auto& a) { a.lse = flattened(*a.lse); }, {"lse", "[2, 1]", "[2, 1, 4]"}},
      {R::kValue,
       [](auto& a) { a.out = without_tokens(*a.out); },
       {"out", "[2, 4, 6]", "num_seqs=2, q_len=1, num_q_heads=4, head_dim_v=6"}},
      {R::kValue,
       [](auto& a) { a.q = without_tokens(a.q); },
       {"out", "[2, 1, 4, 6]", "num_seqs=2, num_q_heads=4, head_dim_v=6"}},
      {R::kValue, [](auto& a) { a.out->rank = 9; }, {"out", "9 dimensions", "0 to 6"}},
      {R::kValue,
       [](auto& a) { a.tile_blocks = far_apart(a.tile_blocks); },
       {"tile_blocks", "4e18"}},
      {R::kValue,
       [](auto& a) { a.tile_block_counts = misaligned(a.tile_block_counts); },
       {"tile_block_counts", "address", "4-byte"}},
      {R::kValue,
       [](auto& a) { a.last_block_valid_slots = misaligned(*a.last_block_valid_slots); },
       {"last_block_valid_slots", "address", "4-byte"}},
      {R::kValue,
       [](auto& a) { a.kv_positions = misaligned(*a.kv_positions); },
       {"kv_positions", "address", "4-byte"}},
      {R::kValue,
       [](auto& a) { a.q_positions = far_apart(*a.q_positions); },
       {"q_positions", "4e18"}},
      {R::kValue,
       [](auto& a) { a.tile_block_counts = numbers({2, 3}); },
       {"tile_block_counts", "sequence 1", "3", "0 to 2"}},
      {R::kValue,
       [](auto& a) { a.last_block_valid_slots = numbers({4, 5}); },
       {"last_block_valid_slots", "sequence 1", "5", "0 to 4"}},
      {R::kValue,
       [](auto& a) { a.kv_positions = numbers({0, -4}); },
       {"kv_positions", "sequence 1", "-4", "0 to"}},
      {R::kValue,
       [](auto& a) { a.q_positions = numbers({-1, 9}); },
       {"q_positions", "sequence 0", "-1", "0 to"}},
      {R::kIndex,
       [](auto& a) { a.tile_blocks = numbers({1, 5, 4, 2}, {2, 2}); },
       {"tile_blocks", "sequence 0", "column 1", "block id 5", "0 to 4"}},
  };
  attention.begin_step(2);
  add_scale_refusals(refusals);
  check_refusals<TileArgs>(
      right, [&](const TileArgs& a) { attention.step_tile(a); }, refusals, out);

  // What the first tile fixed.
  context = "later tiles";
  TileArgs later = right;
  later.q = with_size(later.q, 1, 2);
  CHECK_THROWS(ValueError, attention.step_tile(later), "q", "2 query tokens", "1", "first tile");
  later = right;
  for (Tensor* tensor : {&later.q, &later.k_pool, &later.v_pool}) tensor->dtype = DType::float16;
  CHECK_THROWS(TypeError, attention.step_tile(later), "q", "float16", "float32", "first tile");

  // finalize goes by the form of q, which was [B, 1, Hq, D] here.
  const Tensor result = out, result_lse = lse;
  CHECK_THROWS(ValueError, attention.finalize(without_tokens(result)), "out", "[2, 4, 6]",
               "num_seqs=2, q_len=1, num_q_heads=4, head_dim_v=6");
  CHECK_THROWS(ValueError, attention.finalize(result, without_tokens(result_lse)), "lse", "[2, 4]",
               "[2, 1, 4]");
  attention.finalize(result, result_lse);
  context = "q without tokens";
  TileArgs flat = right;
  flat.q = without_tokens(flat.q);
  flat.out.reset();
  flat.lse.reset();
  attention.begin_step(2);
  attention.step_tile(flat);
  CHECK_THROWS(ValueError, attention.finalize(result), "out", "[2, 1, 4, 6]",
               "num_seqs=2, num_q_heads=4, head_dim_v=6");
  attention.finalize(without_tokens(result));
  context = "before begin_step";
  TiledAttention fresh(dims, kCpu);
  CHECK_THROWS(ValueError, fresh.step_tile(right), "q", "2 sequences", "0", "call begin_step");
  CHECK_THROWS(ValueError, fresh.finalize(result), "out", "2 sequences", "0", "call begin_step");

  ScoreOptions options;
  options.window.left = 3;
  TiledAttention windowed(dims, kCpu, options);
  windowed.begin_step(2);
  TileArgs blind = right;
  blind.kv_positions.reset();
  blind.q_positions.reset();
  CHECK_THROWS(ValueError, windowed.step_tile(blind), "kv_positions", "None", "window");
}

TEST(tiled_attention_refusals) {
  TiledAttentionDims dims;
  dims.max_seqs = 3;
  dims.num_q_heads = 4;
  dims.num_kv_heads = 2;
  dims.head_dim = 8;
  dims.block_size = 4;
  dims.tile_capacity = 3;
  struct Bad {
    const char* field;
    std::int64_t TiledAttentionDims::* member;
    std::int64_t value;
    const char* wanted;
  };
  using D = TiledAttentionDims;
  for (const Bad& bad :
       {Bad{"max_seqs", &D::max_seqs, 0, "1 or more"},
        Bad{"num_q_heads", &D::num_q_heads, -1, "1 or more"},
        Bad{"num_kv_heads", &D::num_kv_heads, 0, "1 or more"},
        Bad{"head_dim", &D::head_dim, 0, "1 or more"}, Bad{"head_dim", &D::head_dim, 257, "256"},
        Bad{"head_dim_v", &D::head_dim_v, 300, "256"},
        Bad{"head_dim_v", &D::head_dim_v, -2, "1 or more"},
        Bad{"block_size", &D::block_size, 0, "1 or more"},
        Bad{"tile_capacity", &D::tile_capacity, -7, "1 or more"},
        Bad{"max_q_len", &D::max_q_len, 0, "1 or more"},
        Bad{"num_q_heads", &D::num_q_heads, 5, "num_kv_heads = 2"},
        Bad{"dims", &D::max_seqs, std::int64_t{1} << 62, "4e18"},
        Bad{"tile_capacity", &D::tile_capacity, std::int64_t{1} << 61, "2^60"}}) {
    TiledAttentionDims wrong = dims;
    wrong.*bad.member = bad.value;
    const std::string got = std::string(bad.field) == "dims" ? "bytes" : std::to_string(bad.value);
    CHECK_THROWS(ValueError, wrong.validated(), bad.field, got, bad.wanted);
    CHECK_THROWS(ValueError, TiledAttention(wrong, kCpu), bad.field, got, bad.wanted);
  }
  ScoreOptions options;
  options.softmax_scale = kNan;
  CHECK_THROWS(ValueError, TiledAttention(dims, kCpu, options), "softmax_scale", "nan", "finite");
  options = {};
  options.window.right = -1;
  CHECK_THROWS(ValueError, TiledAttention(dims, kCpu, options), "window", "right", "-1");
  const Array sinks(Host({3}), DType::float32, kCpu);
  options = {};
  options.sinks = sinks.tensor();
  CHECK_THROWS(ValueError, TiledAttention(dims, kCpu, options), "sinks", "[3]", "num_q_heads=4");
  CHECK_THROWS(ValueError, TiledAttention(dims, {DeviceKind::cuda, 99}), "device", "cuda:99");
  CHECK_THROWS(ValueError, TiledAttention(dims, {DeviceKind::cpu, 1}), "device", "cpu:1");

  TiledAttention attention(dims, kCpu);
  CHECK_THROWS(ValueError, attention.begin_step(4), "num_seqs", "4", "max_seqs = 3");
  CHECK_THROWS(ValueError, attention.begin_step(-1), "num_seqs", "-1", "0 to");
  attention.begin_step(2);
  const Array out(Host({2, 4, 8}, 7), DType::float32, kCpu);
  const Array lse(Host({2, 4}, 7), DType::float32, kCpu);
  CHECK_THROWS(ValueError, attention.finalize(shortened(out)), "out", "1 sequences", "2");
  CHECK_THROWS(ValueError, attention.finalize(with_size(out, 2, 7)), "out", "[2, 4, 7]",
               "head_dim_v=8");
  CHECK_THROWS(TypeError, attention.finalize(of_type(out, DType::int32)), "out", "int32",
               "float32");
  CHECK_THROWS(ValueError, attention.finalize(on(out, kGpu)), "out", "cuda:0", "cpu");
  CHECK_THROWS(ValueError, attention.finalize(with_stride(out, 0, 0)), "out", "stride 0");
  CHECK_THROWS(ValueError, attention.finalize(out, shortened(lse)), "lse", "[1, 4]", "[2, 4]");
  CHECK_THROWS(TypeError, attention.finalize(out, of_type(lse, DType::float16)), "lse", "float16",
               "float32");
  for (const float value : download(out).values) CHECK(value == 7);
}

TEST(state_refusals) {
  CHECK_THROWS(ValueError, State::empty(kCpu, -1, 1, 4, 8), "num_seqs", "-1", "0 or more");
  CHECK_THROWS(ValueError, State::empty(kCpu, 1, 0, 4, 8), "q_len", "0", "1 or more");
  CHECK_THROWS(ValueError, State::empty(kCpu, 1, 1, 0, 8), "num_q_heads", "0", "1 or more");
  CHECK_THROWS(ValueError, State::empty(kCpu, 1, 1, 4, 257), "head_dim_v", "257", "256");
  CHECK_THROWS(ValueError, State::empty(kCpu, std::int64_t{1} << 62, 1, 4, 8), "num_seqs", "4e18");
  CHECK_THROWS(ValueError, merge_states({}), "states", "empty", "one");

  const State a = State::empty(kCpu, 2, 1, 4, 8);
  const State b = State::empty(kCpu, 2, 1, 4, 6);
  const State three = State::empty(kCpu, 3, 1, 4, 8);
  CHECK_THROWS(ValueError, merge_states({&a, &b}), "states[1]", "head_dim_v 6", "head_dim_v 8");
  CHECK_THROWS(ValueError, merge_states({&a, &a, &three}), "states[2]", "num_seqs 3", "num_seqs 2");

  TiledAttentionDims dims;
  dims.max_seqs = 2;
  dims.num_q_heads = 4;
  dims.num_kv_heads = 2;
  dims.head_dim = 8;
  dims.block_size = 4;
  dims.tile_capacity = 3;
  TiledAttention attention(dims, kCpu);
  CHECK_THROWS(ValueError, attention.load_state(three), "state", "3 sequences", "max_seqs = 2");
  CHECK_THROWS(ValueError, attention.load_state(b), "state", "head_dim_v 6", "head_dim_v 8");

  const Array out(Host({2, 4, 8}, 7), DType::float32, kCpu);
  const Array lse(Host({2, 4}, 7), DType::float32, kCpu);
  const Array sinks(Host({4}), DType::float32, kCpu);
  CHECK_THROWS(ValueError, a.finalize(shortened(out), lse), "out", "1 sequences", "2");
  CHECK_THROWS(ValueError, a.finalize(out, shortened(lse)), "lse", "[1, 4]", "[2, 4]");
  CHECK_THROWS(ValueError, a.finalize(with_tokens(out)), "out", "[2, 1, 4, 8]", "head_dim_v=8");
  const State tokens = State::empty(kCpu, 1, 2, 4, 8);
  CHECK_THROWS(ValueError, tokens.finalize(shortened(out)), "out", "[1, 4, 8]", "q_len=2");
  CHECK_THROWS(ValueError, a.finalize(out, lse, shortened(sinks)), "sinks", "[3]", "4");
  CHECK_THROWS(TypeError, a.finalize(of_type(out, DType::int32), lse), "out", "int32", "float32");
  for (const float value : download(out).values) CHECK(value == 7);
  CHECK_THROWS(ValueError, Workspace(kCpu, 0), "0", "1 or more");
  CHECK_THROWS(ValueError, Workspace(kCpu, INT64_MAX), "nbytes", "9223372036854775807",
               "at most 9223372036854771456");
  CHECK_THROWS(MemoryError, Workspace(kCpu, 9223372036854771456), "9223372036854775552 bytes");
  CHECK_THROWS(MemoryError, Buffer(kCpu, std::int64_t{1} << 60), "cpu", "1152921504606846976");
  const TileSizes sizes{std::int64_t{1} << 62, 16, 2, 8, 8, DType::float32};
  CHECK_THROWS(ValueError, TileGeometry::packed(sizes, BlockLayout::hnd), "num_blocks",
               "4611686018427387904", "1e18");
}
