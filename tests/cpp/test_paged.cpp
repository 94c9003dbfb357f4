// SPDX-License-Identifier: Apache-2.0
// paged_attention against the reference: one token, several, ragged; tables, strides, bits.
#include "paged_cache.h"

using namespace tiledattn;
using namespace test;

namespace {

struct Case {
  const char* name;
  DType dtype = DType::float32;
  std::int64_t q_len = 1;
  std::int64_t num_q_heads = 4;
  std::int64_t num_kv_heads = 2;
  std::int64_t head_dim = 16;
  std::int64_t head_dim_v = 16;
  std::int64_t block_size = 4;
  std::vector<std::int64_t> lengths = {9, 0, 1, 23, 16};
  Rules rules = {.causal = true};
  DType index_type = DType::int32;

  PagedCache::Sizes sizes() const {
    return {block_size, num_kv_heads, head_dim, head_dim_v, dtype};
  }
  std::int64_t num_seqs() const { return static_cast<std::int64_t>(lengths.size()); }
};

const std::vector<Case>& cases() {
  static const std::vector<Case> all = {
      {.name = "float32"},
      {.name = "float16", .dtype = DType::float16, .index_type = DType::int64},
      {.name = "bfloat16",
       .dtype = DType::bfloat16,
       .head_dim = 128,
       .head_dim_v = 128,
       .block_size = 16,
       .lengths = {300, 17, 1000}},
      {.name = "block of one token", .block_size = 1},
      {.name = "block of 128", .block_size = 128, .lengths = {64, 1, 127, 129, 128}},
      {.name = "several tokens", .q_len = 3},
      {.name = "several tokens see each other", .q_len = 3, .rules = {}},
      {.name = "many tokens", .q_len = 30, .lengths = {50, 10, 30}},
      {.name = "many tokens, window",
       .q_len = 30,
       .lengths = {50, 10, 30},
       .rules = {.left = 7, .causal = true}},
      {.name = "window", .rules = {.left = 3, .causal = true}},
      {.name = "both sides", .q_len = 5, .rules = {.left = 2, .right = 1}},
      {.name = "softcap and scale", .rules = {.softmax_scale = 1.3, .softcap = 2, .causal = true}},
      {.name = "ratio 16", .num_q_heads = 64, .num_kv_heads = 4},
      {.name = "ratio 7, many tokens",
       .q_len = 20,
       .num_q_heads = 28,
       .num_kv_heads = 4,
       .lengths = {97, 20, 3}},
      {.name = "head_dim 256, small blocks",
       .dtype = DType::bfloat16,
       .head_dim = 256,
       .head_dim_v = 256,
       .block_size = 16,
       .lengths = {200, 31}},
      {.name = "head_dim 3, 7", .q_len = 2, .head_dim = 3, .head_dim_v = 7},
      {.name = "long",
       .num_q_heads = 2,
       .num_kv_heads = 1,
       .head_dim = 8,
       .head_dim_v = 8,
       .block_size = 64,
       .lengths = {70000, 20000}},
  };
  return all;
}

/// A cache and a query on a device, and the call over them.
struct Call {
  PagedCache cache;
  Host q;
  Array q_array, k_pool, v_pool, table, lengths, sinks, out, lse;
  PagedArgs args;

  Call(const Case& c, Device device, std::uint64_t seed = 21) : Call(c, device, Random(seed)) {}
  Call(const Case& c, Device device, Random random)
      : cache(random, c.lengths, c.sizes()),
        q(rounded(random.normal({c.num_seqs(), c.q_len, c.num_q_heads, c.head_dim}), c.dtype)),
        q_array(q, c.dtype, device),
        k_pool(cache.k, c.dtype, device),
        v_pool(cache.v, c.dtype, device),
        table(cache.block_table(device, c.index_type)),
        lengths(indices({c.num_seqs()}, c.lengths, device, c.index_type)),
        out(Host({c.num_seqs(), c.q_len, c.num_q_heads, c.head_dim_v}, 1e30f), c.dtype, device),
        lse(Host({c.num_seqs(), c.q_len, c.num_q_heads}, 1e30f), DType::float32, device) {
    args.q = q_array;
    args.k_pool = k_pool;
    args.v_pool = v_pool;
    args.block_table = table;
    args.seq_lens = lengths;
    args.out = out;
    args.lse = lse.tensor();
    args.causal = c.rules.causal;
    args.score = c.rules.options(device, sinks);
    args.check = true;
  }
};

}  // namespace

DEVICE_TEST(paged_matches_the_reference) {
  for (const Case& c : cases()) {
    context = std::string(c.name) + " on " + to_string(device);
    Call call(c, device);
    paged_attention(call.args);
    Rules rules = c.rules;
    rules.paged = true;
    const Result want = call.cache.reference(call.q, rules);
    CHECK_RESULT(download(call.out), want.out, c.dtype);
    CHECK_LSE(download(call.lse), want.lse);
  }
}

DEVICE_TEST(one_token_without_a_token_dimension) {
  const Case c{.name = "[B, Hq, D]"};
  Call call(c, device);
  paged_attention(call.args);
  const Host out = download(call.out), lse = download(call.lse);
  const Array out3(Host({5, 4, 16}, 5), c.dtype, device),
      lse2(Host({5, 4}, 5), DType::float32, device);
  call.args.q = make_tensor(call.args.q.data, c.dtype, device, {5, 4, 16});
  call.args.out = out3;
  call.args.lse = lse2.tensor();
  paged_attention(call.args);
  CHECK(download(out3).values == out.values);
  CHECK(download(lse2).values == lse.values);
}

DEVICE_TEST(ragged_queries) {
  const std::vector<std::int64_t> starts{0, 1, 1, 14, 40, 43};
  for (const bool is_causal : {true, false}) {
    Case c{.name = "ragged", .lengths = {9, 5, 13, 30, 2}};
    c.rules.causal = is_causal;
    c.rules.paged = true;
    c.rules.sinks = Host({4}, 0.5f);
    Call call(c, device);
    Random random(2);
    const Host q = random.normal({45, 4, 16});  // two rows after the last sequence
    const Array q_array(q, c.dtype, device), out(Host({45, 4, 16}, 5), c.dtype, device);
    const Array lse(Host({45, 4}, 5), DType::float32, device);
    const Array cu = indices({6}, starts, device);
    call.args.q = q_array;
    call.args.out = out;
    call.args.lse = lse.tensor();
    call.args.cu_seqlens_q = cu.tensor();
    call.args.max_seqlen_q = 26;
    paged_attention(call.args);
    Result want;
    for (std::size_t b = 0; b < 5; ++b) {
      want.append(attend(rows(q, starts[b], starts[b + 1]), call.cache.keys(b),
                         call.cache.values(b), c.rules));
    }
    want.append(attend(rows(q, 43, 45), Host({0, 2, 16}), Host({0, 2, 16}), c.rules));
    CHECK_RESULT(download(out), want.out, c.dtype);
    CHECK_LSE(download(lse), want.lse);
  }
}

DEVICE_TEST(table_width_and_workspace_change_no_bit) {
  for (const std::int64_t q_len : {1, 4, 20}) {
    Case c{.name = "bits",
           .dtype = DType::bfloat16,
           .q_len = q_len,
           .block_size = 16,
           .lengths = {900, 256, 257, 30, 1500}};
    Call call(c, device);
    paged_attention(call.args);
    const Host out = download(call.out), lse = download(call.lse);
    const Array wide = call.cache.block_table(device, DType::int64, 500);
    call.args.block_table = wide;
    Workspace small(device, std::int64_t{1} << 20);  // room for few sequences at a time
    call.args.workspace = &small;
    paged_attention(call.args);
    CHECK(same_bits(out, download(call.out)));
    CHECK(same_bits(lse, download(call.lse)));
    // Each sequence alone, as one row of the wide table.
    for (std::int64_t b = 0; b < 5; ++b) {
      PagedArgs one = call.args;
      for (Tensor* tensor : {&one.q, &one.block_table, &one.seq_lens, &one.out, &*one.lse}) {
        tensor->data =
            static_cast<char*>(tensor->data) + b * tensor->strides[0] * item_bytes(tensor->dtype);
        tensor->shape[0] = 1;
      }
      const Array alone(Host({1, q_len, 4, 16}), c.dtype, device);
      one.out = alone;
      paged_attention(one);
      CHECK(same_bits(download(alone), rows(out, b, b + 1)));
    }
  }
}

DEVICE_TEST(tables_with_strides) {
  const Case c{.name = "strided table", .q_len = 2};
  Call call(c, device);
  paged_attention(call.args);
  const Host out = download(call.out);
  // Columns outside rows, and lengths as every second number of a wider array.
  const std::int64_t width = call.cache.max_blocks();
  std::vector<std::int64_t> by_columns(static_cast<std::size_t>(width * 5), -1), spread(10, -1);
  for (std::size_t b = 0; b < 5; ++b) {
    spread[2 * b] = c.lengths[b];
    for (std::size_t i = 0; i < call.cache.tables[b].size(); ++i) {
      by_columns[i * 5 + b] = call.cache.tables[b][i];
    }
  }
  const Array columns = indices({width, 5}, by_columns, device, DType::int64);
  const Array wide = indices({10}, spread, device);
  call.args.block_table = columns;
  std::swap(call.args.block_table.shape[0], call.args.block_table.shape[1]);
  std::swap(call.args.block_table.strides[0], call.args.block_table.strides[1]);
  call.args.seq_lens = wide;
  call.args.seq_lens.shape[0] = 5;
  call.args.seq_lens.strides[0] = 2;
  paged_attention(call.args);
  CHECK(same_bits(out, download(call.out)));
}

DEVICE_TEST(k_and_v_with_strides_of_their_own) {
  for (const std::int64_t q_len : {1, 25}) {
    Case c{.name = "pools",
           .dtype = DType::float16,
           .q_len = q_len,
           .head_dim = 20,
           .head_dim_v = 12,
           .lengths = {40, 25, 31}};
    Call call(c, device);
    const Array k(call.cache.k, layout_of(call.cache.k.shape, c.dtype, device, {2, 0, 1, 3}, 1), 1);
    const Array v(call.cache.v, layout_of(call.cache.v.shape, c.dtype, device, {1, 0, 2, 3}, 7), 3);
    call.args.k_pool = k;
    call.args.v_pool = v;
    paged_attention(call.args);
    CHECK_RESULT(download(call.out), call.cache.reference(call.q, c.rules).out, c.dtype);
  }
}

DEVICE_TEST(lengths_that_end_inside_a_block) {
  // q = 0 and V = 1: the result is 1 for every length, whatever the unused slots hold.
  for (const std::int64_t length : {1, 16, 64, 127, 129, 255, 257}) {
    for (const bool is_causal : {false, true}) {
      Case c{.name = "ones", .block_size = 128, .lengths = {length}};
      c.rules.causal = is_causal;
      Call call(c, device);
      for (float& value : call.cache.v.values) {
        if (!std::isnan(value)) value = 1;
      }
      const Array q(Host({1, 1, 4, 16}), c.dtype, device), v(call.cache.v, c.dtype, device);
      call.args.q = q;
      call.args.v_pool = v;
      paged_attention(call.args);
      for (const float out : download(call.out).values) CHECK(out == 1);
    }
  }
}

DEVICE_TEST(entries_outside_the_window_are_never_read) {
  // The window sees the last 5 keys: block ids before them may be anything, as after eviction.
  Case c{.name = "evicted", .lengths = {23, 40}};
  c.rules.left = 4;
  Call call(c, device);
  paged_attention(call.args);
  const Host want = download(call.out);
  PagedCache evicted = call.cache;
  for (std::size_t b = 0; b < 2; ++b) {
    const auto first = static_cast<std::size_t>((c.lengths[b] - 5) / c.block_size);
    for (std::size_t i = 0; i < first; ++i) evicted.tables[b][i] = -1;
  }
  const Array table = evicted.block_table(device);
  call.args.block_table = table;
  paged_attention(call.args);
  CHECK(same_bits(want, download(call.out)));
}

DEVICE_TEST(zero_sequences_and_an_empty_table) {
  Case none{.name = "no sequence", .lengths = {}};
  Call call(none, device);
  paged_attention(call.args);
  CHECK(download(call.out).size() == 0);
  Case empty{.name = "no block", .lengths = {0, 0}};
  Call two(empty, device);
  CHECK(two.args.block_table.shape[1] == 0);
  paged_attention(two.args);
  for (const float value : download(two.out).values) CHECK(value == 0);
  for (const float value : download(two.lse).values) CHECK(value == -kInf);
}

DEVICE_TEST(arguments_without_query_rows_are_judged) {
  const Array q(Host({0, 4, 8}), DType::float32, device),
      out(Host({0, 4, 8}), DType::float32, device);
  const Array pool(Host({5, 4, 2, 8}, 1), DType::float32, device);
  const Array table = indices({2, 1}, {1, 3}, device), lengths = indices({2}, {4, 2}, device);
  const Array right = indices({3}, {0, 0, 0}, device), wrong = indices({3}, {0, 0, 1}, device);
  const Array too_long = indices({2}, {4, 5}, device);
  PagedArgs args;
  args.q = q;
  args.k_pool = args.v_pool = pool;
  args.block_table = table;
  args.seq_lens = lengths;
  args.cu_seqlens_q = right.tensor();
  args.out = out;
  args.check = true;
  paged_attention(args);
  CHECK(download(out).size() == 0);
  args.cu_seqlens_q = wrong.tensor();
  CHECK_THROWS(ValueError, paged_attention(args), "cu_seqlens_q", "entry 2", "value 1", "0 to 0");
  args.cu_seqlens_q = right.tensor();
  args.seq_lens = too_long;
  CHECK_THROWS(ValueError, paged_attention(args), "seq_lens", "sequence 1", "value 5", "0 to 4");
}

DEVICE_TEST(a_bad_block_is_found_by_device) {
  Case c{.name = "bad block"};
  Call call(c, device);
  paged_attention(call.args);
  const Host good = download(call.out);
  PagedCache broken = call.cache;
  broken.tables[3][2] = 99;
  const Array table = broken.block_table(device);
  call.args.block_table = table;
  CHECK_THROWS(IndexError, paged_attention(call.args), "block_table", "sequence 3", "column 2",
               "99");
  const Host got = download(call.out);
  for (std::int64_t b = 0; b < 5; ++b) {
    if (device.is_cpu() || b != 3) {
      CHECK(same_bits(element(got, b), element(good, b)));
    } else {
      for (const float value : element(got, b).values) CHECK(std::isnan(value));
    }
  }
  check(device);  // what was thrown is done with
  if (device.is_cpu()) return;
  // Without check=True the fault is raised by the next call there.
  call.args.check = false;
  paged_attention(call.args);
  CHECK_THROWS(IndexError, check(device), "block_table", "sequence 3", "column 2");
  call.args.block_table = call.table;
  paged_attention(call.args);
  CHECK(same_bits(good, download(call.out)));
}
