// SPDX-License-Identifier: Apache-2.0
// Every refusal of every argument of the calls without an object.
#include "check_tensor.h"
#include "refusals.h"

using namespace tiledattn;
using namespace test;

TEST(flash_attention_refusals) {
  using R = Refusal<FlashArgs>;
  const Array q(Host({2, 3, 4, 8}, 1), DType::float32, kCpu);
  const Array k(Host({2, 5, 2, 8}, 1), DType::float32, kCpu);
  const Array v(Host({2, 5, 2, 6}, 1), DType::float32, kCpu);
  const Array out(Host({2, 3, 4, 6}, 7), DType::float32, kCpu);
  const Array lse(Host({2, 3, 4}, 7), DType::float32, kCpu);
  const Array sinks(Host({4}, 1), DType::float32, kCpu);
  const Array cu = indices({3}, {0, 1, 2}, kCpu);
  Workspace tiny(kCpu, 64);
  FlashArgs right;
  right.q = q;
  right.k = k;
  right.v = v;
  right.out = out;
  right.lse = lse.tensor();
  const std::vector<R> refusals = {
      {R::kType, [](auto& a) { a.q.dtype = DType::int32; }, {"q", "int32", "float16"}},
      {R::kType, [](auto& a) { a.q.dtype = kFloat64; }, {"q", "float64", "float32"}},
      {R::kType, [](auto& a) { a.k.dtype = kBool; }, {"k", "bool", "bfloat16"}},
      {R::kType, [](auto& a) { a.k.dtype = DType::float16; }, {"k", "float16", "float32"}},
      {R::kType, [](auto& a) { a.v.dtype = DType::bfloat16; }, {"v", "bfloat16", "float32"}},
      {R::kType, [](auto& a) { a.v.dtype = DType::int64; }, {"v", "int64", "float16"}},
      {R::kType, [](auto& a) { a.out.dtype = DType::float16; }, {"out", "float16", "float32"}},
      {R::kType, [](auto& a) { a.lse->dtype = DType::float16; }, {"lse", "float16", "float32"}},
      {R::kValue, [](auto& a) { a.q = flattened(a.q); }, {"q", "[2, 3, 4]", "head_dim"}},
      {R::kValue, [](auto& a) { a.k = flattened(a.k); }, {"k", "[2, 5, 2]", "head_dim"}},
      {R::kValue, [](auto& a) { a.v = flattened(a.v); }, {"v", "[2, 5, 2]", "head_dim"}},
      {R::kValue, [](auto& a) { a.k = shortened(a.k); }, {"k", "[1, 5, 2, 8]", "batch=2"}},
      {R::kValue, [](auto& a) { a.v = with_size(a.v, 1, 4); }, {"v", "[2, 4, 2, 6]", "5"}},
      {R::kValue, [](auto& a) { a.v = with_size(a.v, 2, 1); }, {"v", "[2, 5, 1, 6]", "2"}},
      {R::kValue, [](auto& a) { a.k = with_size(a.k, 3, 7); }, {"k", "[2, 5, 2, 7]", "8"}},
      {R::kValue,
       [](auto& a) { a.k = with_size(a.k, 2, 3), a.v = with_size(a.v, 2, 3); },
       {"q", "4", "3", "multiple"}},
      {R::kValue,
       [](auto& a) { a.q = with_size(a.q, 3, 257), a.k = with_size(a.k, 3, 257); },
       {"q", "257", "256"}},
      {R::kValue, [](auto& a) { a.v = with_size(a.v, 3, 300); }, {"v", "300", "256"}},
      {R::kValue, [](auto& a) { a.q = with_stride(a.q, 3, 2); }, {"q", "stride 2", "stride 1"}},
      {R::kValue, [](auto& a) { a.k = with_stride(a.k, 3, 0); }, {"k", "stride 0", "stride 1"}},
      {R::kValue, [](auto& a) { a.v = with_stride(a.v, 3, -1); }, {"v", "stride -1", "stride 1"}},
      {R::kValue, [](auto& a) { a.out = with_stride(a.out, 3, 2); }, {"out", "2", "stride 1"}},
      {R::kValue,
       [](auto& a) { a.out = with_stride(a.out, 0, 0); },
       {"out", "stride 0", "must not"}},
      {R::kValue,
       [](auto& a) { a.out = with_stride(a.out, 2, 5); },
       {"out", "stride 5", "overlap"}},
      {R::kValue,
       [](auto& a) { a.lse = with_stride(*a.lse, 1, 0); },
       {"lse", "stride 0", "must not"}},
      {R::kValue, [](auto& a) { a.q = misaligned(a.q); }, {"q", "address", "4-byte"}},
      {R::kValue, [](auto& a) { a.k = misaligned(a.k); }, {"k", "address", "4-byte"}},
      {R::kValue, [](auto& a) { a.out = misaligned(a.out); }, {"out", "address", "4-byte"}},
      {R::kValue,
       [](auto& a) { a.out = with_size(a.out, 3, 5); },
       {"out", "[2, 3, 4, 5]", "[2, 3, 4, 6]"}},
      {R::kValue,
       [](auto& a) { a.out = shortened(a.out); },
       {"out", "[1, 3, 4, 6]", "[2, 3, 4, 6]"}},
      {R::kValue, [](auto& a) { a.lse = shortened(*a.lse); }, {"lse", "[1, 3, 4]", "[2, 3, 4]"}},
      {R::kValue, [](auto& a) { a.lse = flattened(*a.lse); }, {"lse", "[2, 3]", "[2, 3, 4]"}},
      {R::kValue,
       [](auto& a) { a.out = without_tokens(a.out); },
       {"out", "[2, 4, 6]", "[2, 3, 4, 6]"}},
      {R::kValue, [](auto& a) { a.k = on(a.k, kGpu); }, {"k", "cuda:0", "cpu"}},
      {R::kValue, [](auto& a) { a.v = on(a.v, kGpu); }, {"v", "cuda:0", "cpu"}},
      {R::kValue, [](auto& a) { a.out = on(a.out, kGpu); }, {"out", "cuda:0", "cpu"}},
      {R::kValue, [](auto& a) { a.lse = on(*a.lse, kGpu); }, {"lse", "cuda:0", "cpu"}},
      {R::kValue, [](auto& a) { a.q = on(a.q, kGpu); }, {"cpu", "q is on cuda:0"}},
      {R::kValue,
       [](auto& a) { a.score.softmax_scale = kNan; },
       {"softmax_scale", "nan", "finite"}},
      {R::kValue,
       [](auto& a) { a.score.softmax_scale = kInf; },
       {"softmax_scale", "inf", "finite"}},
      {R::kValue, [](auto& a) { a.score.softcap = -1; }, {"softcap", "-1", ">= 0"}},
      {R::kValue, [](auto& a) { a.score.softcap = kNan; }, {"softcap", "nan", ">= 0"}},
      {R::kValue, [](auto& a) { a.score.softcap = 1e-60; }, {"softcap", "1e-60", "float32"}},
      {R::kValue, [](auto& a) { a.q.shape[0] = -2; }, {"q", "-2", "sizes >= 0"}},
      {R::kValue, [](auto& a) { a.q.data = nullptr; }, {"q", "no data"}},
      {R::kValue, [](auto& a) { a.score.window.left = -1; }, {"window", "left", "-1", ">= 0"}},
      {R::kValue, [](auto& a) { a.score.window.right = -9; }, {"window", "right", "-9", ">= 0"}},
      {R::kType,
       [&](auto& a) { a.score.sinks = of_type(sinks, DType::bfloat16); },
       {"sinks", "bfloat16", "float32"}},
      {R::kValue, [&](auto& a) { a.score.sinks = shortened(sinks); }, {"sinks", "[3]", "4"}},
      {R::kValue, [&](auto& a) { a.score.sinks = on(sinks, kGpu); }, {"sinks", "cuda:0", "cpu"}},
      {R::kValue, [&](auto& a) { a.score.sinks = misaligned(sinks); }, {"sinks", "4-byte"}},
      {R::kValue, [&](auto& a) { a.cu_seqlens_q = cu.tensor(); }, {"cu_seqlens_k", "None", "both"}},
      {R::kValue, [&](auto& a) { a.cu_seqlens_k = cu.tensor(); }, {"cu_seqlens_q", "None", "both"}},
      {R::kValue,
       [&](auto& a) { a.cu_seqlens_q = a.cu_seqlens_k = cu.tensor(); },
       {"q", "[2, 3, 4, 8]", "total"}},
      {R::kValue, [](auto& a) { a.max_seqlen_q = -1; }, {"max_seqlen_q", "-1", "0 or more"}},
      {R::kValue, [](auto& a) { a.max_seqlen_k = -2; }, {"max_seqlen_k", "-2", "0 or more"}},
      {R::kValue, [&](auto& a) { a.workspace = &tiny; }, {"workspace", "64", "at least"}},
      {R::kValue, [](auto& a) { a.layout = Layout::bhsd; }, {"q", "3 query heads", "5 KV heads"}},
  };
  check_refusals<FlashArgs>(right, [](const FlashArgs& a) { flash_attention(a); }, refusals, out);
}

TEST(packed_flash_attention_refusals) {
  using R = Refusal<FlashArgs>;
  const Array q(Host({6, 4, 8}, 1), DType::float32, kCpu);
  const Array k(Host({9, 2, 8}, 1), DType::float32, kCpu);
  const Array out(Host({6, 4, 8}, 7), DType::float32, kCpu);
  FlashArgs right;
  right.q = q;
  right.k = right.v = k;
  right.out = out;
  right.cu_seqlens_q = numbers({0, 2, 6});
  right.cu_seqlens_k = numbers({0, 4, 9});
  const std::vector<R> refusals = {
      {R::kType,
       [](auto& a) { a.cu_seqlens_q->dtype = kUint32; },
       {"cu_seqlens_q", "uint32", "int32"}},
      {R::kType,
       [](auto& a) { a.cu_seqlens_k->dtype = DType::float32; },
       {"cu_seqlens_k", "float32", "int64"}},
      {R::kValue,
       [](auto& a) { a.cu_seqlens_q = on(*a.cu_seqlens_q, kGpu); },
       {"cu_seqlens_q", "cuda:0", "cpu"}},
      {R::kValue,
       [](auto& a) { a.cu_seqlens_k = numbers({0, 9}); },
       {"cu_seqlens_k", "[2]", "num_seqs + 1=3"}},
      {R::kValue,
       [](auto& a) { a.cu_seqlens_q = with_size(*a.cu_seqlens_q, 0, 0); },
       {"cu_seqlens_q", "no entries", "num_seqs + 1"}},
      {R::kValue, [](auto& a) { a.k = flattened(a.k); }, {"k", "[9, 2]", "total"}},
      {R::kValue,
       [](auto& a) { a.out = with_tokens(a.out); },
       {"out", "[6, 1, 4, 8]", "[6, 4, 8]"}},
      {R::kValue, [](auto& a) { a.v = shortened(a.v); }, {"v", "[8, 2, 8]", "total_k=9"}},
      {R::kValue,
       [](auto& a) { a.cu_seqlens_q = numbers({1, 2, 6}); },
       {"cu_seqlens_q", "entry 0", "value 1", "0 to 0"}},
      {R::kValue,
       [](auto& a) { a.cu_seqlens_q = numbers({0, 2, 7}); },
       {"cu_seqlens_q", "entry 2", "value 7", "2 to 6"}},
      {R::kValue,
       [](auto& a) { a.cu_seqlens_q = numbers({0, -2, 6}); },
       {"cu_seqlens_q", "entry 1", "value -2", "0 to 6"}},
      {R::kValue,
       [](auto& a) { a.cu_seqlens_k = numbers({0, 5, 4}); },
       {"cu_seqlens_k", "entry 2", "value 4", "5 to 9"}},
      {R::kValue,
       [](auto& a) { a.cu_seqlens_k = numbers({0, 4, 10}); },
       {"cu_seqlens_k", "entry 2", "value 10", "4 to 9"}},
  };
  check_refusals<FlashArgs>(right, [](const FlashArgs& a) { flash_attention(a); }, refusals, out);
}

TEST(paged_attention_refusals) {
  using R = Refusal<PagedArgs>;
  const Array q(Host({2, 3, 4, 8}, 1), DType::float32, kCpu);
  const Array k_pool(Host({5, 4, 2, 8}, 1), DType::float32, kCpu);
  const Array v_pool(Host({5, 4, 2, 6}, 1), DType::float32, kCpu);
  const Array out(Host({2, 3, 4, 6}, 7), DType::float32, kCpu);
  const Array lse(Host({2, 3, 4}, 7), DType::float32, kCpu);
  PagedArgs right;
  right.q = q;
  right.k_pool = k_pool;
  right.v_pool = v_pool;
  right.block_table = numbers({1, 3, 0, 4, 2, 0}, {2, 3});
  right.seq_lens = numbers({5, 9});
  right.out = out;
  right.lse = lse.tensor();
  std::vector<R> refusals = {
      {R::kType, [](auto& a) { a.q.dtype = kBool; }, {"q", "bool", "float32"}},
      {R::kType, [](auto& a) { a.k_pool.dtype = kUint32; }, {"k_pool", "uint32", "int8"}},
      {R::kType, [](auto& a) { a.v_pool.dtype = kUint32; }, {"v_pool", "uint32", "float32"}},
      {R::kType,
       [](auto& a) { a.k_pool.dtype = DType::float16; },
       {"k_pool", "float16", "float32 like q"}},
      {R::kType,
       [](auto& a) { a.v_pool.dtype = DType::float16; },
       {"v_pool", "float16", "float32 like q"}},
      {R::kType,
       [](auto& a) { a.block_table.dtype = kUint32; },
       {"block_table", "uint32", "int32 or int64"}},
      {R::kType,
       [](auto& a) { a.seq_lens.dtype = DType::float32; },
       {"seq_lens", "float32", "int32 or int64"}},
      {R::kType, [](auto& a) { a.out.dtype = DType::int32; }, {"out", "int32", "float32"}},
      {R::kType, [](auto& a) { a.lse->dtype = kFloat64; }, {"lse", "float64", "float32"}},
      {R::kValue, [](auto& a) { a.q = flattened(flattened(a.q)); }, {"q", "[2, 3]", "num_q_heads"}},
      {R::kValue,
       [](auto& a) { a.k_pool = flattened(a.k_pool); },
       {"k_pool", "[5, 4, 2]", "block_size"}},
      {R::kValue,
       [](auto& a) { a.v_pool = flattened(a.v_pool); },
       {"v_pool", "[5, 4, 2]", "block_size"}},
      {R::kValue,
       [](auto& a) { a.k_pool = with_size(a.k_pool, 3, 7); },
       {"k_pool", "[5, 4, 2, 7]", "head_dim=8"}},
      {R::kValue,
       [](auto& a) { a.v_pool = with_size(a.v_pool, 0, 4); },
       {"v_pool", "[4, 4, 2, 6]", "num_blocks=5"}},
      {R::kValue,
       [](auto& a) { a.v_pool = with_size(a.v_pool, 1, 3); },
       {"v_pool", "[5, 3, 2, 6]", "block_size=4"}},
      {R::kValue,
       [](auto& a) { a.v_pool = with_size(a.v_pool, 2, 1); },
       {"v_pool", "[5, 4, 1, 6]", "num_kv_heads=2"}},
      {R::kValue,
       [](auto& a) {
         a.k_pool = with_size(a.k_pool, 1, 0);
         a.v_pool = with_size(a.v_pool, 1, 0);
       },
       {"k_pool", "[5, 0, 2, 8]", "block_size of 1 or more"}},
      {R::kValue,
       [](auto& a) { a.block_table = numbers({1, 3, 0}, {1, 3}); },
       {"block_table", "[1, 3]", "num_seqs=2"}},
      {R::kValue,
       [](auto& a) { a.block_table = flattened(a.block_table); },
       {"block_table", "[2]", "max_blocks"}},
      {R::kValue, [](auto& a) { a.seq_lens = numbers({5}); }, {"seq_lens", "[1]", "num_seqs=2"}},
      {R::kValue,
       [](auto& a) { a.k_pool = with_stride(a.k_pool, 3, 4); },
       {"k_pool", "stride 4", "stride 1"}},
      {R::kValue,
       [](auto& a) { a.v_pool = misaligned(a.v_pool); },
       {"v_pool", "address", "4-byte"}},
      {R::kValue, [](auto& a) { a.k_pool = on(a.k_pool, kGpu); }, {"k_pool", "cuda:0", "cpu"}},
      {R::kValue, [](auto& a) { a.v_pool = on(a.v_pool, kGpu); }, {"v_pool", "cuda:0", "cpu"}},
      {R::kValue,
       [](auto& a) { a.block_table = on(a.block_table, kGpu); },
       {"block_table", "cuda:0", "cpu"}},
      {R::kValue,
       [](auto& a) { a.seq_lens = on(a.seq_lens, kGpu); },
       {"seq_lens", "cuda:0", "cpu"}},
      {R::kValue,
       [](auto& a) { a.out = shortened(a.out); },
       {"out", "[1, 3, 4, 6]", "[2, 3, 4, 6]"}},
      {R::kValue, [](auto& a) { a.lse = flattened(*a.lse); }, {"lse", "[2, 3]", "[2, 3, 4]"}},
      {R::kValue,
       [](auto& a) { a.out = without_tokens(with_size(a.out, 1, 1)); },
       {"out", "[2, 4, 6]", "[2, 3, 4, 6]"}},
      {R::kValue,
       [](auto& a) {  // q of one token as [B, 1, Hq, D]
         a.q = with_size(a.q, 1, 1);
         a.out = without_tokens(a.out);
         a.lse.reset();
       },
       {"out", "[2, 4, 6]", "[2, 1, 4, 6]"}},
      {R::kValue,
       [](auto& a) {  // and as [B, Hq, D]
         a.q = without_tokens(a.q);
         a.out = with_size(a.out, 1, 1);
         a.lse.reset();
       },
       {"out", "[2, 1, 4, 6]", "[2, 4, 6]"}},
      {R::kValue,
       [](auto& a) { a.cu_seqlens_q = numbers({0, 2}); },
       {"q", "[2, 3, 4, 8]", "total_q"}},
      {R::kValue, [](auto& a) { a.max_seqlen_q = -1; }, {"max_seqlen_q", "-1", "0 or more"}},
      {R::kValue, [](auto& a) { a.score.softcap = kInf; }, {"softcap", "inf", "finite"}},
      {R::kValue,
       [](auto& a) { a.seq_lens = numbers({5, 13}); },
       {"seq_lens", "sequence 1", "13", "0 to 12"}},
      {R::kValue,
       [](auto& a) { a.seq_lens = numbers({5, -1}); },
       {"seq_lens", "sequence 1", "-1", "0 to 12"}},
      {R::kIndex,
       [](auto& a) { a.block_table = numbers({1, 3, 0, 4, 2, 5}, {2, 3}); },
       {"block_table", "sequence 1", "column 2", "block id 5", "0 to 4"}},
      {R::kIndex,
       [](auto& a) { a.block_table = numbers({1, -1, 0, 4, 2, 0}, {2, 3}); },
       {"block_table", "sequence 0", "column 1", "block id -1", "0 to 4"}},
  };
  add_scale_refusals(refusals);
  check_refusals<PagedArgs>(right, [](const PagedArgs& a) { paged_attention(a); }, refusals, out);
}

TEST(ragged_paged_attention_refusals) {
  using R = Refusal<PagedArgs>;
  const Array q(Host({5, 4, 8}, 1), DType::float32, kCpu);
  const Array pool(Host({5, 4, 2, 8}, 1), DType::float32, kCpu);
  const Array out(Host({5, 4, 8}, 7), DType::float32, kCpu);
  PagedArgs right;
  right.q = q;
  right.k_pool = right.v_pool = pool;
  right.block_table = numbers({1, 3, 0, 4, 2, 0}, {2, 3});
  right.seq_lens = numbers({5, 9});
  right.cu_seqlens_q = numbers({0, 2, 5});
  right.out = out;
  const std::vector<R> refusals = {
      {R::kType,
       [](auto& a) { a.cu_seqlens_q->dtype = kUint32; },
       {"cu_seqlens_q", "uint32", "int32 or int64"}},
      {R::kValue,
       [](auto& a) { a.cu_seqlens_q = numbers({0, 2, 3, 5}); },
       {"block_table", "[2, 3]", "num_seqs=3"}},
      {R::kValue,
       [](auto& a) { a.cu_seqlens_q = numbers({0, 3, 2}); },
       {"cu_seqlens_q", "entry 2", "value 2", "3 to 5"}},
      {R::kValue,
       [](auto& a) { a.cu_seqlens_q = numbers({0, 3, 6}); },
       {"cu_seqlens_q", "entry 2", "value 6", "3 to 5"}},
  };
  check_refusals<PagedArgs>(right, [](const PagedArgs& a) { paged_attention(a); }, refusals, out);
}

TEST(merge_attention_refusals) {
  struct Args {
    Tensor out_a, lse_a, out_b, lse_b, out, lse;
    double base = 2;
  };
  using R = Refusal<Args>;
  const Array a(Host({2, 3, 8}, 1), DType::float32, kCpu),
      b(Host({2, 3, 8}, 2), DType::float32, kCpu);
  const Array lse_a(Host({2, 3}), DType::float32, kCpu), lse_b(Host({2, 3}), DType::float32, kCpu);
  const Array out(Host({2, 3, 8}, 7), DType::float32, kCpu);
  const Array lse(Host({2, 3}, 7), DType::float32, kCpu);
  const Args right{a, lse_a, b, lse_b, out, lse};
  const std::vector<R> refusals = {
      {R::kType, [](auto& x) { x.out_a.dtype = DType::int32; }, {"out_a", "int32", "float32"}},
      {R::kType, [](auto& x) { x.out_b.dtype = DType::float16; }, {"out_b", "float16", "float32"}},
      {R::kType, [](auto& x) { x.out.dtype = DType::float16; }, {"out", "float16", "float32"}},
      {R::kType, [](auto& x) { x.lse_a.dtype = DType::float16; }, {"lse_a", "float16", "float32"}},
      {R::kType, [](auto& x) { x.lse_b.dtype = kFloat64; }, {"lse_b", "float64", "float32"}},
      {R::kType, [](auto& x) { x.lse.dtype = kFloat64; }, {"lse", "float64", "float32"}},
      {R::kValue,
       [](auto& x) { x.out_b = shortened(x.out_b); },
       {"out_b", "[1, 3, 8]", "[2, 3, 8]"}},
      {R::kValue,
       [](auto& x) { x.out = with_size(x.out, 1, 2); },
       {"out", "[2, 2, 8]", "[2, 3, 8]"}},
      {R::kValue, [](auto& x) { x.lse_a = shortened(x.lse_a); }, {"lse_a", "[1, 3]", "[2, 3]"}},
      {R::kValue, [](auto& x) { x.lse_b = flattened(x.lse_b); }, {"lse_b", "[2]", "[2, 3]"}},
      {R::kValue, [](auto& x) { x.lse = with_size(x.lse, 1, 4); }, {"lse", "[2, 4]", "[2, 3]"}},
      {R::kValue, [](auto& x) { x.out_b = on(x.out_b, kGpu); }, {"out_b", "cuda:0", "cpu"}},
      {R::kValue, [](auto& x) { x.lse_b = on(x.lse_b, kGpu); }, {"lse_b", "cuda:0", "cpu"}},
      {R::kValue,
       [](auto& x) { x.out = with_stride(x.out, 0, 8); },
       {"out", "stride 8", "overlap"}},
      {R::kValue,
       [](auto& x) { x.out_a = with_stride(x.out_a, 2, 2); },
       {"out_a", "stride 2", "1"}},
      {R::kValue, [](auto& x) { x.base = 1; }, {"lse_base", "1", "over 1"}},
      {R::kValue, [](auto& x) { x.base = 0.5; }, {"lse_base", "0.5", "over 1"}},
      {R::kValue, [](auto& x) { x.base = 0; }, {"lse_base", "0", "over 1"}},
      {R::kValue, [](auto& x) { x.base = -2; }, {"lse_base", "-2", "over 1"}},
      {R::kValue, [](auto& x) { x.base = kNan; }, {"lse_base", "nan", "over 1"}},
      {R::kValue, [](auto& x) { x.base = kInf; }, {"lse_base", "inf", "finite"}},
  };
  check_refusals<Args>(
      right,
      [](const Args& x) {
        merge_attention(x.out_a, x.lse_a, x.out_b, x.lse_b, x.out, x.lse, x.base);
      },
      refusals, out);
}

TEST(write_kv_refusals) {
  using R = Refusal<WriteKvArgs>;
  const Array k(Host({3, 2, 8}, 1), DType::float32, kCpu);
  const Array v(Host({3, 2, 6}, 2), DType::float32, kCpu);
  const Array k_pool(Host({5, 4, 2, 8}, 7), DType::float32, kCpu);
  const Array v_pool(Host({5, 4, 2, 6}, 7), DType::float32, kCpu);
  WriteKvArgs right;
  right.k = k;
  right.v = v;
  right.k_pool = k_pool;
  right.v_pool = v_pool;
  right.slot_mapping = numbers({0, 19, -1});
  std::vector<R> refusals = {
      {R::kType, [](auto& a) { a.k.dtype = DType::int32; }, {"k", "int32", "float32"}},
      {R::kType, [](auto& a) { a.v.dtype = DType::float16; }, {"v", "float16", "float32"}},
      {R::kType,
       [](auto& a) { a.k_pool.dtype = DType::float16; },
       {"k_pool", "float16", "float32"}},
      {R::kType, [](auto& a) { a.v_pool.dtype = kFloat64; }, {"v_pool", "float64", "float32"}},
      {R::kType,
       [](auto& a) { a.slot_mapping.dtype = kUint32; },
       {"slot_mapping", "uint32", "int32"}},
      {R::kValue, [](auto& a) { a.k = flattened(a.k); }, {"k", "[3, 2]", "head_dim"}},
      {R::kValue, [](auto& a) { a.v = shortened(a.v); }, {"v", "[2, 2, 6]", "tokens=3"}},
      {R::kValue,
       [](auto& a) { a.v = with_size(a.v, 1, 1); },
       {"v", "[3, 1, 6]", "num_kv_heads=2"}},
      {R::kValue,
       [](auto& a) { a.k_pool = with_size(a.k_pool, 3, 7); },
       {"k_pool", "[5, 4, 2, 7]", "8"}},
      {R::kValue, [](auto& a) { a.v_pool = shortened(a.v_pool); }, {"v_pool", "[4, 4, 2, 6]", "5"}},
      {R::kValue,
       [](auto& a) { a.k_pool = flattened(a.k_pool); },
       {"k_pool", "[5, 4, 2]", "block_size"}},
      {R::kValue,
       [](auto& a) { a.slot_mapping = numbers({1, 2}); },
       {"slot_mapping", "[2]", "tokens=3"}},
      {R::kValue, [](auto& a) { a.v = on(a.v, kGpu); }, {"v", "cuda:0", "cpu"}},
      {R::kValue, [](auto& a) { a.k_pool = on(a.k_pool, kGpu); }, {"k_pool", "cuda:0", "cpu"}},
      {R::kValue,
       [](auto& a) { a.slot_mapping = on(a.slot_mapping, kGpu); },
       {"slot_mapping", "cuda:0", "cpu"}},
      {R::kValue, [](auto& a) { a.k = with_stride(a.k, 2, 2); }, {"k", "stride 2", "stride 1"}},
      {R::kValue,
       [](auto& a) { a.k_pool = with_stride(a.k_pool, 0, 0); },
       {"k_pool", "0", "must not"}},
      {R::kIndex,
       [](auto& a) { a.slot_mapping = numbers({0, 1, 20}); },
       {"slot_mapping", "token 2", "slot 20", "0 to 19"}},
  };
  add_scale_refusals(refusals);
  check_refusals<WriteKvArgs>(right, [](const WriteKvArgs& a) { write_kv(a); }, refusals, k_pool);
}

namespace {

/// Each array of a call, moved to an odd address, spread beyond 64 bits, or without memory: refused
/// by its name.
template <typename Args>
void check_memory_refusals(
    const Args& right, const std::function<void(const Args&)>& call,
    const std::vector<std::pair<const char*, std::function<Tensor&(Args&)>>>& arrays,
    const Tensor& out) {
  std::vector<Refusal<Args>> refusals;
  for (const auto& [name, array] : arrays) {
    const auto spoil = [&refusals, &name = name, &array = array](auto change, std::string what,
                                                                 std::string wanted) {
      refusals.push_back({Refusal<Args>::kValue,
                          [array, change](Args& args) { array(args) = change(array(args)); },
                          {std::string(name) + ":", what, wanted}});
    };
    spoil([](Tensor t) { return misaligned(t); }, "address that is not a multiple", "aligned copy");
    spoil([](Tensor t) { return far_apart(t); }, "strides [4611686018427387904", "less than 4e18");
    spoil([](Tensor t) { return with_stride(t, 0, INT64_MIN); }, "strides [-9223372036854775808",
          "less than 4e18");
    spoil([](Tensor t) { return with_size(t, 0, INT64_MAX); }, "shape [9223372036854775807", "");
    spoil(
        [](Tensor t) {
          t.data = nullptr;
          return t;
        },
        "no data", "an array with memory");
  }
  check_refusals<Args>(right, call, refusals, out);
}

}  // namespace

TEST(memory_that_no_offset_reaches_is_refused) {
  using Flash = FlashArgs;
  const Array q(Host({6, 4, 8}, 1), DType::float32, kCpu);
  const Array k(Host({9, 2, 8}, 1), DType::float32, kCpu);
  const Array out(Host({6, 4, 8}, 7), DType::float32, kCpu);
  const Array lse(Host({6, 4}, 7), DType::float32, kCpu);
  Flash flash;
  flash.q = q;
  flash.k = flash.v = k;
  flash.out = out;
  flash.lse = lse.tensor();
  flash.cu_seqlens_q = numbers({0, 2, 6});
  flash.cu_seqlens_k = numbers({0, 4, 9});
  check_memory_refusals<Flash>(
      flash, [](const Flash& a) { flash_attention(a); },
      {{"q", [](Flash& a) -> Tensor& { return a.q; }},
       {"k", [](Flash& a) -> Tensor& { return a.k; }},
       {"v", [](Flash& a) -> Tensor& { return a.v; }},
       {"out", [](Flash& a) -> Tensor& { return a.out; }},
       {"lse", [](Flash& a) -> Tensor& { return *a.lse; }},
       {"cu_seqlens_q", [](Flash& a) -> Tensor& { return *a.cu_seqlens_q; }},
       {"cu_seqlens_k", [](Flash& a) -> Tensor& { return *a.cu_seqlens_k; }}},
      out);

  using Paged = PagedArgs;
  const Array pool(Host({5, 4, 2, 8}, 1), DType::float32, kCpu);
  const Array paged_out(Host({6, 4, 8}, 7), DType::float32, kCpu);
  Paged paged;
  paged.q = q;
  paged.k_pool = paged.v_pool = pool;
  paged.block_table = numbers({1, 3, 0, 4, 2, 0}, {2, 3});
  paged.seq_lens = numbers({5, 9});
  paged.cu_seqlens_q = numbers({0, 2, 6});
  paged.out = paged_out;
  check_memory_refusals<Paged>(
      paged, [](const Paged& a) { paged_attention(a); },
      {{"k_pool", [](Paged& a) -> Tensor& { return a.k_pool; }},
       {"v_pool", [](Paged& a) -> Tensor& { return a.v_pool; }},
       {"block_table", [](Paged& a) -> Tensor& { return a.block_table; }},
       {"seq_lens", [](Paged& a) -> Tensor& { return a.seq_lens; }},
       {"cu_seqlens_q", [](Paged& a) -> Tensor& { return *a.cu_seqlens_q; }}},
      paged_out);

  using Write = WriteKvArgs;
  const Array kv(Host({3, 2, 8}, 1), DType::float32, kCpu);
  const Array k_pool(Host({5, 4, 2, 8}, 7), DType::float32, kCpu);
  const Array v_pool(Host({5, 4, 2, 8}, 7), DType::float32, kCpu);
  Write write;
  write.k = write.v = kv;
  write.k_pool = k_pool;
  write.v_pool = v_pool;
  write.slot_mapping = numbers({0, 19, -1});
  check_memory_refusals<Write>(
      write, [](const Write& a) { write_kv(a); },
      {{"k", [](Write& a) -> Tensor& { return a.k; }},
       {"v", [](Write& a) -> Tensor& { return a.v; }},
       {"k_pool", [](Write& a) -> Tensor& { return a.k_pool; }},
       {"v_pool", [](Write& a) -> Tensor& { return a.v_pool; }},
       {"slot_mapping", [](Write& a) -> Tensor& { return a.slot_mapping; }}},
      k_pool);

  struct Merge {
    Tensor out_a, lse_a, out_b, lse_b, out, lse;
  };
  const Array a(Host({2, 3, 8}, 1), DType::float32, kCpu);
  const Array lse_a(Host({2, 3}), DType::float32, kCpu);
  const Array merged(Host({2, 3, 8}, 7), DType::float32, kCpu);
  const Array merged_lse(Host({2, 3}, 7), DType::float32, kCpu);
  const Merge merge{a, lse_a, a, lse_a, merged, merged_lse};
  check_memory_refusals<Merge>(
      merge,
      [](const Merge& x) { merge_attention(x.out_a, x.lse_a, x.out_b, x.lse_b, x.out, x.lse, 2); },
      {{"out_a", [](Merge& x) -> Tensor& { return x.out_a; }},
       {"lse_a", [](Merge& x) -> Tensor& { return x.lse_a; }},
       {"out_b", [](Merge& x) -> Tensor& { return x.out_b; }},
       {"lse_b", [](Merge& x) -> Tensor& { return x.lse_b; }},
       {"out", [](Merge& x) -> Tensor& { return x.out; }},
       {"lse", [](Merge& x) -> Tensor& { return x.lse; }}},
      merged);
}

TEST(sizes_whose_product_no_array_has_are_refused) {
  const Array q(Host({1, 1, 1, 8}, 1), DType::float32, kCpu);
  const Array out(Host({1, 1, 1, 8}, 7), DType::float32, kCpu);
  FlashArgs args;
  args.q = args.k = args.v = q;
  args.out = out;
  for (Tensor* wide : {&args.q, &args.k, &args.v}) {
    const Tensor before = *wide;
    for (const int axis : {0, 1}) {
      wide->shape[axis] = std::int64_t{1} << 32;  // the product of all is 0 modulo 2^64
      wide->strides[axis] = 0;
    }
    CHECK_THROWS(ValueError, flash_attention(args), "shape [4294967296, 4294967296, 1, 8]",
                 "less than 4e18 elements");
    CHECK(wide->size() == INT64_MAX);
    wide->shape[2] = 0;
    CHECK(wide->size() == 0);
    CHECK_THROWS(ValueError, flash_attention(args), "shape [4294967296, 4294967296, 0, 8]",
                 "less than 4e18 elements");
    *wide = before;
  }
  args.out.rank = Tensor::kMaxRank + 3;
  CHECK_THROWS(ValueError, flash_attention(args), "out", "9 dimensions", "0 to 6");
  for (const float value : download(out).values) CHECK(value == 7);
}

TEST(numbers_as_text) {
  CHECK(number_to_string(2) == "2");
  CHECK(number_to_string(-0.5) == "-0.5");
  CHECK(number_to_string(0.1) == "0.1");
  CHECK(number_to_string(1e-60) == "1e-60");
  CHECK(number_to_string(1 + 1e-15) == "1.000000000000001");
  CHECK(number_to_string(static_cast<double>(kInf)) == "inf");
  CHECK(number_to_string(std::nan("")) == "nan");
}

TEST(names_and_devices_as_text) {
  CHECK(to_string(DType::bfloat16) == "bfloat16");
  CHECK(to_string(DType::float8_e4m3fn) == "float8_e4m3fn");
  CHECK(to_string(kUint32) == "uint32");
  CHECK(to_string(kBool) == "bool");
  CHECK(to_string(Device{DeviceKind::cuda, 3}) == "cuda:3");
  CHECK(parse_device("cpu") == kCpu);
  CHECK(parse_device("cuda") == kGpu);
  CHECK(parse_device("cuda:2") == (Device{DeviceKind::cuda, 2}));
  for (const char* text : {"", "gpu", "cuda:", "cuda:-1", "cuda:1x", "cpu:0", "CUDA"}) {
    CHECK_THROWS(ValueError, parse_device(text), "device", std::string("\"") + text + "\"");
  }
  CHECK(shape_to_string(make_tensor(nullptr, DType::float32, kCpu, {4, 32, 128})) ==
        "[4, 32, 128]");
  CHECK(item_bytes(DType::bfloat16) == 2 && item_bytes(DType::int64) == 8);
  CHECK_THROWS(ValueError, make_tensor(nullptr, DType::float32, kCpu, {1, 1, 1, 1, 1, 1, 1}), "6");
}
