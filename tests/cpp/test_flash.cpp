// SPDX-License-Identifier: Apache-2.0
// flash_attention: layouts, masks, numbers, sizes and packed sequences against the reference.
#include "reference.h"

using namespace tiledattn;
using namespace test;

namespace {

struct Case {
  const char* name;
  DType dtype = DType::float32;
  std::int64_t batch = 2;
  std::int64_t q_len = 7;
  std::int64_t kv_len = 7;
  std::int64_t num_q_heads = 4;
  std::int64_t num_kv_heads = 2;
  std::int64_t head_dim = 16;
  std::int64_t head_dim_v = 16;
  Rules rules = {};
};

Rules causal() { return {.causal = true}; }

const std::vector<Case>& cases() {
  static const std::vector<Case> all = {
      {.name = "float32"},
      {.name = "float16", .dtype = DType::float16},
      {.name = "bfloat16", .dtype = DType::bfloat16},
      {.name = "causal", .rules = causal()},
      {.name = "causal, one token", .q_len = 1, .rules = causal()},
      {.name = "causal, fewer queries", .q_len = 2, .kv_len = 5, .rules = causal()},
      {.name = "causal, more queries", .q_len = 9, .kv_len = 5, .rules = causal()},
      {.name = "causal, many rows", .batch = 1, .q_len = 150, .kv_len = 150, .rules = causal()},
      {.name = "fp16 causal d64",
       .dtype = DType::float16,
       .q_len = 130,
       .kv_len = 130,
       .head_dim = 64,
       .head_dim_v = 64,
       .rules = causal()},
      {.name = "bf16 d128",
       .dtype = DType::bfloat16,
       .batch = 1,
       .q_len = 70,
       .kv_len = 300,
       .head_dim = 128,
       .head_dim_v = 128},
      {.name = "no key", .kv_len = 0},
      {.name = "window", .q_len = 40, .kv_len = 40, .rules = {.left = 5, .right = 2}},
      {.name = "window 0, 0", .q_len = 20, .kv_len = 20, .rules = {.left = 0, .right = 0}},
      {.name = "left window, causal",
       .batch = 1,
       .q_len = 640,
       .kv_len = 640,
       .num_q_heads = 1,
       .num_kv_heads = 1,
       .head_dim = 4,
       .head_dim_v = 4,
       .rules = {.left = 10, .causal = true}},
      {.name = "window wider than all", .q_len = 30, .kv_len = 30, .rules = {.left = 1000}},
      {.name = "right window alone", .q_len = 30, .kv_len = 50, .rules = {.right = 3}},
      {.name = "window over no key", .q_len = 40, .kv_len = 10, .rules = {.left = 3, .right = 1}},
      {.name = "scale", .rules = {.softmax_scale = 0.01}},
      {.name = "large scale", .rules = {.softmax_scale = 3.0}},
      {.name = "negative scale", .q_len = 20, .rules = {.softmax_scale = -0.5}},
      {.name = "softcap", .rules = {.softmax_scale = 2.0, .softcap = 1.5}},
      {.name = "softcap, causal, many rows",
       .q_len = 50,
       .kv_len = 50,
       .rules = {.softcap = 1.0, .causal = true}},
      {.name = "ratio 7",
       .q_len = 40,
       .kv_len = 97,
       .num_q_heads = 28,
       .num_kv_heads = 4,
       .rules = causal()},
      {.name = "ratio 71", .num_q_heads = 71, .num_kv_heads = 1},
      {.name = "head_dim 1", .q_len = 33, .head_dim = 1, .head_dim_v = 1},
      {.name = "head_dim 20, 56", .q_len = 33, .head_dim = 20, .head_dim_v = 56},
      {.name = "head_dim 96, 80",
       .dtype = DType::bfloat16,
       .q_len = 33,
       .head_dim = 96,
       .head_dim_v = 80},
      {.name = "head_dim 256",
       .dtype = DType::float16,
       .q_len = 33,
       .kv_len = 65,
       .head_dim = 256,
       .head_dim_v = 256},
      {.name = "one key", .q_len = 18, .kv_len = 1},
  };
  return all;
}

Rules sinks_of(const std::vector<float>& values) {
  Rules rules;
  rules.sinks = Host({static_cast<std::int64_t>(values.size())});
  rules.sinks->values = values;
  return rules;
}

/// Numbers of a case on the host, [B, S, H, D].
struct Inputs {
  Host q, k, v;
  explicit Inputs(const Case& c, std::uint64_t seed = 3) {
    Random random(seed);
    q = rounded(random.normal({c.batch, c.q_len, c.num_q_heads, c.head_dim}), c.dtype);
    k = rounded(random.normal({c.batch, c.kv_len, c.num_kv_heads, c.head_dim}), c.dtype);
    v = rounded(random.normal({c.batch, c.kv_len, c.num_kv_heads, c.head_dim_v}), c.dtype);
  }
};

/// A view with two dimensions exchanged.
Tensor exchanged(Tensor tensor, int a, int b) {
  std::swap(tensor.shape[a], tensor.shape[b]);
  std::swap(tensor.strides[a], tensor.strides[b]);
  return tensor;
}

struct Output {
  Host out, lse;
};

/// One call with contiguous arrays.
Output run(const Case& c, const Inputs& in, Device device, DType out_dtype) {
  Array sinks;
  const Array q(in.q, c.dtype, device), k(in.k, c.dtype, device), v(in.v, c.dtype, device);
  Shape shape = in.q.shape;
  shape[3] = c.head_dim_v;
  const Array out(Host(shape, 1e30f), out_dtype, device);
  const Array lse(Host({shape[0], shape[1], shape[2]}, 1e30f), DType::float32, device);
  FlashArgs args;
  args.q = q;
  args.k = k;
  args.v = v;
  args.out = out;
  args.lse = lse.tensor();
  args.causal = c.rules.causal;
  args.score = c.rules.options(device, sinks);
  args.score.window = {c.rules.left, c.rules.right};
  args.check = true;
  flash_attention(args);
  return {download(out), download(lse)};
}

void check_case(const Case& c, Device device) {
  context = std::string(c.name) + " on " + to_string(device);
  const Inputs in(c);
  const Result want = attend_batch(in.q, in.k, in.v, c.rules);
  const Output got = run(c, in, device, c.dtype);
  CHECK_RESULT(got.out, want.out, c.dtype);
  CHECK_LSE(got.lse, want.lse);
}

}  // namespace

DEVICE_TEST(flash_matches_the_reference) {
  for (const Case& c : cases()) {
    check_case(c, device);
    const Inputs in(c);
    CHECK_RESULT(run(c, in, device, DType::float32).out,
                 attend_batch(in.q, in.k, in.v, c.rules).out, c.dtype);
  }
}

DEVICE_TEST(sinks_take_weight_and_enter_lse) {
  Case c{.name = "sinks", .rules = sinks_of({0, -3, 6, 40})};
  check_case(c, device);
  c.name = "sinks, many rows";
  c.q_len = c.kv_len = 40;
  c.rules.causal = true;
  check_case(c, device);
  c.name = "sinks alone";
  c.kv_len = 0;
  check_case(c, device);
}

DEVICE_TEST(every_small_length) {
  for (std::int64_t length = 1; length <= 70; length += length < 20 ? 1 : 7) {
    Case c{.name = "small", .dtype = length % 2 ? DType::float16 : DType::float32, .batch = 3};
    c.q_len = c.kv_len = length;
    c.rules.causal = length % 3 != 0;
    check_case(c, device);
    c.q_len = 1 + length % 5;
    check_case(c, device);
  }
}

DEVICE_TEST(heads_before_sequence) {
  for (const std::int64_t q_len : {3, 40}) {
    Case c{.name = "bhsd", .q_len = q_len, .kv_len = 21, .head_dim_v = 24};
    c.rules.causal = true;
    const Inputs in(c);
    const Array q(in.q, layout_of(in.q.shape, c.dtype, device, {0, 2, 1, 3}), 0);
    const Array k(in.k, layout_of(in.k.shape, c.dtype, device, {0, 2, 1, 3}), 0);
    const Array v(in.v, layout_of(in.v.shape, c.dtype, device, {0, 2, 1, 3}), 0);
    const Array out(Host({c.batch, c.num_q_heads, q_len, c.head_dim_v}), c.dtype, device);
    const Array lse(Host({c.batch, c.num_q_heads, q_len}), DType::float32, device);
    FlashArgs args;
    args.q = exchanged(q, 1, 2);
    args.k = exchanged(k, 1, 2);
    args.v = exchanged(v, 1, 2);
    args.out = out;
    args.lse = lse.tensor();
    args.layout = Layout::bhsd;
    args.causal = true;
    flash_attention(args);
    const Result want = attend_batch(in.q, in.k, in.v, c.rules);
    CHECK_RESULT(download(exchanged(out, 1, 2)), want.out, c.dtype);
    CHECK_LSE(download(exchanged(lse, 1, 2)), want.lse);
  }
}

DEVICE_TEST(batch_and_heads_in_one_dimension) {
  // [batch * heads, seq, dim] is [batch * heads, seq, 1, dim] without copying.
  Case c{.name = "flat",
         .dtype = DType::float16,
         .batch = 6,
         .q_len = 33,
         .kv_len = 33,
         .num_q_heads = 1,
         .num_kv_heads = 1,
         .head_dim = 64,
         .head_dim_v = 64};
  c.rules.causal = true;
  const Inputs in(c);
  const auto flat = [&](const Host& host) {
    Host three = host;
    three.shape = {host.shape[0], host.shape[1], host.shape[3]};
    return Array(three, c.dtype, device);
  };
  const auto with_one_head = [](Tensor tensor) {
    tensor.rank = 4;
    tensor.shape[3] = tensor.shape[2];
    tensor.strides[3] = 1;
    tensor.shape[2] = 1;
    return tensor;
  };
  const Array q = flat(in.q), k = flat(in.k), v = flat(in.v);
  const Array out(Host({6, 33, 64}), c.dtype, device);
  const Array lse(Host({6, 33, 1}), DType::float32, device);
  FlashArgs args;
  args.q = with_one_head(q);
  args.k = with_one_head(k);
  args.v = with_one_head(v);
  args.out = with_one_head(out);
  args.lse = lse.tensor();
  args.causal = true;
  flash_attention(args);
  const Result want = attend_batch(in.q, in.k, in.v, c.rules);
  CHECK_RESULT(download(out), want.out, c.dtype);
  CHECK_LSE(download(lse), want.lse);
}

DEVICE_TEST(packed_sequences) {
  const std::vector<std::int64_t> q_starts{0, 3, 3, 24, 25}, k_starts{0, 5, 9, 30, 30};
  for (const DType index : {DType::int32, DType::int64}) {
    for (const bool is_causal : {false, true}) {
      Random random(8);
      Rules rules = sinks_of({1, 2, -1, 0});
      rules.causal = is_causal;
      // Two rows lie after the last sequence.
      const Host q = random.normal({27, 4, 16}), k = random.normal({31, 2, 16}),
                 v = random.normal({31, 2, 8});
      const Array q_array(q, DType::float32, device), k_array(k, DType::float32, device);
      const Array v_array(v, DType::float32, device),
          out(Host({27, 4, 8}, 5), DType::float32, device);
      const Array lse(Host({27, 4}, 5), DType::float32, device);
      const Array cu_q = indices({5}, q_starts, device, index);
      const Array cu_k = indices({5}, k_starts, device, index);
      Array sinks;
      FlashArgs args;
      args.q = q_array;
      args.k = k_array;
      args.v = v_array;
      args.out = out;
      args.lse = lse.tensor();
      args.cu_seqlens_q = cu_q.tensor();
      args.cu_seqlens_k = cu_k.tensor();
      args.causal = is_causal;
      args.score = rules.options(device, sinks);
      args.check = true;
      flash_attention(args);
      Result want;
      for (std::size_t b = 0; b < 4; ++b) {
        want.append(attend(rows(q, q_starts[b], q_starts[b + 1]),
                           rows(k, k_starts[b], k_starts[b + 1]),
                           rows(v, k_starts[b], k_starts[b + 1]), rules));
      }
      want.append(attend(rows(q, 25, 27), rows(k, 0, 0), rows(v, 0, 0), rules));
      CHECK_RESULT(download(out), want.out, DType::float32);
      CHECK_LSE(download(lse), want.lse);
    }
  }
}

/// cu_seqlens are judged where there is nothing to attend as well: no rows of q, or no sequences.
DEVICE_TEST(packed_calls_with_nothing_to_do) {
  struct Starts {
    std::int64_t num_rows;
    std::vector<std::int64_t> q, k;
    std::vector<std::string> wrong;  ///< nothing where they are right
  };
  for (const Starts& starts :
       {Starts{0, {0, 0, 0}, {0, 4, 9}, {}}, Starts{0, {0}, {0}, {}}, Starts{3, {0}, {0}, {}},
        Starts{0, {0, 1, 0}, {0, 4, 9}, {"cu_seqlens_q", "entry 1", "value 1", "0 to 0"}},
        Starts{0, {0, 0, 0}, {0, 4, 10}, {"cu_seqlens_k", "entry 2", "value 10", "4 to 9"}},
        Starts{0, {0, 0, 0}, {1, 4, 9}, {"cu_seqlens_k", "entry 0", "value 1", "0 to 0"}},
        Starts{0, {2}, {0}, {"cu_seqlens_q", "entry 0", "value 2", "0 to 0"}},
        Starts{0, {0}, {-1}, {"cu_seqlens_k", "entry 0", "value -1", "0 to 0"}},
        Starts{3, {2}, {0}, {"cu_seqlens_q", "entry 0", "value 2", "0 to 0"}},
        Starts{3, {0}, {5}, {"cu_seqlens_k", "entry 0", "value 5", "0 to 0"}}}) {
    const std::string where = context;
    context += ", " + std::to_string(starts.num_rows) + " rows, " +
               std::to_string(starts.q.size() - 1) + " sequences";
    const auto entries = static_cast<std::int64_t>(starts.q.size());
    const Array q(Host({starts.num_rows, 4, 8}, 1), DType::float32, device);
    const Array k(Host({9, 2, 8}, 1), DType::float32, device);
    const Array out(Host({starts.num_rows, 4, 8}, 7), DType::float32, device);
    const Array lse(Host({starts.num_rows, 4}, 7), DType::float32, device);
    const Array cu_q = indices({entries}, starts.q, device);
    const Array cu_k = indices({entries}, starts.k, device);
    FlashArgs args;
    args.q = q;
    args.k = args.v = k;
    args.out = out;
    args.lse = lse.tensor();
    args.cu_seqlens_q = cu_q.tensor();
    args.cu_seqlens_k = cu_k.tensor();
    args.check = true;
    if (starts.wrong.empty()) {
      flash_attention(args);
      for (const float value : download(out).values) CHECK(value == 0);
      for (const float value : download(lse).values) CHECK(value == -kInf);
    } else {
      check_throws<ValueError>(__FILE__, __LINE__, [&] { flash_attention(args); }, starts.wrong);
      for (const float value : download(out).values) {
        CHECK(device.is_cpu() ? value == 7 : std::isnan(value));
      }
    }
    CHECK(out.tensor().size() == starts.num_rows * 32);
    context = where;
  }
}

DEVICE_TEST(zero_sizes_are_right) {
  for (const Case& c : {Case{.name = "no batch", .batch = 0}, Case{.name = "no query", .q_len = 0},
                        Case{.name = "no heads", .num_q_heads = 0, .num_kv_heads = 0}}) {
    context = c.name;
    const Output got = run(c, Inputs(c), device, c.dtype);
    CHECK(got.out.size() == 0 && got.lse.size() == 0);
  }
}

DEVICE_TEST(views_into_one_array_and_strided_out) {
  for (const DType dtype : {DType::float32, DType::float16, DType::bfloat16}) {
    for (const std::int64_t q_len : {2, 50}) {
      // q, k and v are heads of one array, as a fused projection leaves them.
      Random random(4);
      const std::int64_t head_dim = 24;
      const Host qkv = rounded(random.normal({2, q_len, 8, head_dim}), dtype);
      const Array all(qkv, layout_of(qkv.shape, dtype, device, {}, 1), 1);
      const auto heads = [&](Tensor view, std::int64_t first, std::int64_t count) {
        view.data = static_cast<char*>(view.data) + first * view.strides[2] * item_bytes(dtype);
        view.shape[2] = count;
        return view;
      };
      const Host guarded({2, q_len, 4, head_dim}, 3);
      const Array out(guarded, layout_of(guarded.shape, dtype, device, {2, 0, 1, 3}, 5), 3);
      FlashArgs args;
      args.q = heads(all, 0, 4);
      args.k = heads(all, 4, 2);
      args.v = heads(all, 6, 2);
      args.out = out;
      args.check = true;
      flash_attention(args);
      const Result want =
          attend_batch(download(args.q), download(args.k), download(args.v), Rules{});
      CHECK_RESULT(download(out), want.out, dtype);
      // The padding around `out` still holds its NaN.
      Tensor padding = out;
      padding.data = static_cast<char*>(padding.data) + head_dim * item_bytes(dtype);
      padding.shape[3] = 1;
      --padding.shape[2];  // the very last padding lies outside the memory
      for (const float value : download(padding).values) CHECK(std::isnan(value));
    }
  }
}

DEVICE_TEST(masked_keys_do_not_reach_the_result) {
  // Keys that no query of the call sees hold NaN; a key that some queries see holds NaN in K alone.
  for (const std::int64_t q_len : {4, 40}) {
    Case c{.name = "masked", .batch = 1, .q_len = q_len, .kv_len = q_len + 20};
    c.rules.left = 8;
    c.rules.causal = true;
    Inputs in(c);
    const Output clean = run(c, in, device, c.dtype);
    for (std::int64_t j = 0; j < 12; ++j) {
      for (std::int64_t i = 0; i < 2 * 16; ++i) {
        in.k[j * 32 + i] = kNan;
        in.v[j * 32 + i] = kInf;
      }
    }
    CHECK(same_bits(clean.out, run(c, in, device, c.dtype).out));
    const std::int64_t last = c.kv_len - 1;  // only the last query sees it
    for (std::int64_t i = 0; i < 2 * 16; ++i) in.k[last * 32 + i] = kNan;
    const Output got = run(c, in, device, c.dtype);
    const std::int64_t row = 4 * 16;
    for (std::int64_t i = 0; i < (q_len - 1) * row; ++i) CHECK(got.out[i] == clean.out[i]);
    for (std::int64_t i = (q_len - 1) * row; i < q_len * row; ++i) CHECK(std::isnan(got.out[i]));
  }
}

DEVICE_TEST(extreme_scores) {
  for (const std::int64_t q_len : {1, 20}) {
    // Scores of 1e30 and -1e30: plain softmax of them, without a sentinel in the way.
    Case c{.name = "extreme",
           .batch = 1,
           .q_len = q_len,
           .kv_len = 3,
           .num_q_heads = 1,
           .num_kv_heads = 1,
           .head_dim = 1,
           .head_dim_v = 1};
    c.rules.softmax_scale = 1;
    Inputs in(c);
    in.v.values = {1, 2, 4};
    std::fill(in.q.values.begin(), in.q.values.end(), 1.0f);
    struct Row {
      std::vector<float> scores;
      float out, lse;
    };
    for (const Row& row :
         {Row{{1e30f, -1e30f, 1e30f}, 2.5f, 1e30f}, Row{{-1e30f, -1e30f, -1e30f}, 7.0f / 3, -1e30f},
          Row{{-7e4f, -6.5e4f, -7e4f}, 2, -6.5e4f}, Row{{-kInf, 3, -kInf}, 2, 3},
          Row{{-kInf, -kInf, -kInf}, 0, -kInf}, Row{{kInf, 3, 0}, kNan, kNan},
          Row{{1, kNan, 0}, kNan, kNan}}) {
      in.k.values = row.scores;
      const Output got = run(c, in, device, c.dtype);
      for (const float out : got.out.values) CHECK_CLOSE(out, row.out, 1e-5);
      for (const float lse : got.lse.values) {
        CHECK_CLOSE(lse, row.lse, 1e-3 + 1e-5 * std::fabs(row.lse));
      }
    }
    // The largest product of bfloat16 numbers that one rounding too many turns into NaN.
    c.dtype = DType::bfloat16;
    c.rules.softmax_scale = 0.25;
    in.q.values.assign(static_cast<std::size_t>(q_len), 133120.0f);
    in.k.values.assign(3, 133120.0f);
    const Output got = run(c, in, device, DType::float32);
    for (const float out : got.out.values) CHECK_CLOSE(out, 7.0 / 3, 1e-2);
    for (const float lse : got.lse.values) CHECK(std::isfinite(lse));
    // Softcap of huge scores is the cap.
    c.dtype = DType::float32;
    c.rules.softmax_scale = 1;
    c.rules.softcap = 50;
    in.q.values.assign(static_cast<std::size_t>(q_len), 1.0f);
    in.k.values = {10000, -10000, 4400};
    const Output capped = run(c, in, device, c.dtype);
    for (const float out : capped.out.values) CHECK_CLOSE(out, 2.5, 1e-5);
    for (const float lse : capped.lse.values) CHECK_CLOSE(lse, 50 + std::log(2.0), 1e-3);
  }
}

DEVICE_TEST(accumulation_is_float32) {
  // 2048 equal keys with V = 64 in float16: the sum before normalising is 131072.
  for (const std::int64_t q_len : {1, 20}) {
    Case c{.name = "large V", .dtype = DType::float16, .batch = 1, .q_len = q_len, .kv_len = 2048};
    Inputs in(c);
    std::fill(in.k.values.begin(), in.k.values.end(), 0.0f);
    std::fill(in.v.values.begin(), in.v.values.end(), 64.0f);
    for (const float out : run(c, in, device, c.dtype).out.values) CHECK(out == 64);
  }
}

DEVICE_TEST(same_inputs_give_the_same_bits) {
  for (const std::int64_t q_len : {1, 5, 60}) {
    Case c{.name = "bits", .dtype = DType::bfloat16, .batch = 3, .q_len = q_len, .kv_len = 900};
    const Inputs in(c);
    const Output all = run(c, in, device, c.dtype);
    CHECK(same_bits(all.out, run(c, in, device, c.dtype).out));
    // Alone, a sequence gives the same bits as in company.
    Case one = c;
    one.batch = 1;
    Inputs alone = in;
    alone.q = rows(in.q, 2, 3);
    alone.k = rows(in.k, 2, 3);
    alone.v = rows(in.v, 2, 3);
    const Output single = run(one, alone, device, c.dtype);
    CHECK(same_bits(single.out, rows(all.out, 2, 3)));
    CHECK(same_bits(single.lse, rows(all.lse, 2, 3)));
  }
}

DEVICE_TEST(lengths_around_65536) {
  for (const std::int64_t kv_len : {65536, 65537, 65600}) {
    Case c{.name = "long",
           .batch = 1,
           .q_len = 1,
           .kv_len = kv_len,
           .num_q_heads = 1,
           .num_kv_heads = 1};
    check_case(c, device);
  }
}
