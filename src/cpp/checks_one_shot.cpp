// SPDX-License-Identifier: Apache-2.0
// Checks of the calls without an object: flash_attention, paged_attention, merge_attention,
// write_kv.
#include <cmath>
#include <string>

#include "check_apart.h"
#include "check_quantized.h"
#include "check_tensor.h"
#include "checks.h"

namespace tiledattn {

namespace {

/// Where batch, sequence and heads stand in an array of q's kind. Packed arrays have no batch
/// dimension (-1).
struct Axes {
  int batch, seq, head;
  const char* shape;  ///< for messages
};

constexpr Axes kBshd{0, 1, 2, "[batch, seq, heads, head_dim]"};
constexpr Axes kBhsd{0, 2, 1, "[batch, heads, seq, head_dim]"};
constexpr Axes kPacked{-1, 0, 1, "[total, heads, head_dim]"};
constexpr Axes kOneToken{0, -1, 1, "[num_seqs, heads, head_dim]"};

std::int64_t size_along(const Tensor& tensor, int axis) {
  return axis < 0 ? 1 : tensor.shape[axis];
}
std::int64_t stride_along(const Tensor& tensor, int axis) {
  return axis < 0 ? 0 : tensor.strides[axis];
}

QueryView query_view(const Tensor& q, const Axes& axes) {
  return {q.data, q.dtype, stride_along(q, axes.batch), stride_along(q, axes.seq),
          stride_along(q, axes.head)};
}

void check_hint(const char* argument, const std::optional<std::int64_t>& hint) {
  if (hint && *hint < 0) refuse(argument, std::to_string(*hint), "0 or more");
}

void check_workspace(const Workspace* workspace, Device device) {
  if (workspace == nullptr || workspace->device() == device) return;
  throw ValueError("workspace: is on " + to_string(workspace->device()) + ", but q is on " +
                   to_string(device));
}

/// out has q's shape with head_dim_v; lse that of out without its last dimension.
OutputView check_result(const Tensor& q, const Axes& axes, std::int64_t head_dim_v,
                        const Tensor& out, const std::optional<Tensor>& lse) {
  check_sizes("out", out);
  bool same = out.rank == q.rank && out.shape[out.rank - 1] == head_dim_v;
  for (int i = 0; same && i + 1 < q.rank; ++i) same = out.shape[i] == q.shape[i];
  if (!same) {
    Tensor expected = q;
    expected.shape[q.rank - 1] = head_dim_v;
    refuse("out", "shape " + shape_to_string(out),
           shape_to_string(expected) + " (q.shape[:-1] + [head_dim_v])");
  }
  check_output(out, q.dtype, q.device, "q");
  OutputView view;
  view.data = out.data;
  view.dtype = out.dtype;
  view.seq_stride = stride_along(out, axes.batch);
  view.token_stride = stride_along(out, axes.seq);
  view.head_stride = stride_along(out, axes.head);
  if (lse) {
    check_lse(*lse, out, q.device, "q");
    view.lse = static_cast<float*>(lse->data);
    view.lse_seq_stride = stride_along(*lse, axes.batch);
    view.lse_token_stride = stride_along(*lse, axes.seq);
    view.lse_head_stride = stride_along(*lse, axes.head);
  }
  return view;
}

/// Devices of q and of what holds K and V; head counts and dimensions into the problem.
void check_qkv(AttentionProblem& p, const Tensor& q, int q_head_axis, const char* k_name,
               const Tensor& k, const char* v_name, const Tensor& v, int k_head_axis) {
  check_device(k_name, k, q.device, "q");
  check_device(v_name, v, q.device, "q");
  p.num_q_heads = q.shape[q_head_axis];
  p.num_kv_heads = k.shape[k_head_axis];
  p.head_dim = q.shape[q.rank - 1];
  p.head_dim_v = v.shape[v.rank - 1];
  check_head_dim("q", p.head_dim);
  check_head_dim(v_name, p.head_dim_v);
  check_num_heads("q", k_name, p.num_q_heads, p.num_kv_heads);
}

void check_kv_shape(const char* argument, const Tensor& tensor, const Axes& axes,
                    std::int64_t batch, std::int64_t seq, std::int64_t num_kv_heads,
                    std::int64_t head_dim, const char* dim_name) {
  const NamedSize head{"num_kv_heads", num_kv_heads};
  const NamedSize dim{dim_name, head_dim};
  if (axes.batch < 0) {
    check_shape(argument, tensor, {{"total_k", seq}, head, dim});
  } else if (axes.seq < axes.head) {
    check_shape(argument, tensor, {{"batch", batch}, {"seqlen_k", seq}, head, dim});
  } else {
    check_shape(argument, tensor, {{"batch", batch}, head, {"seqlen_k", seq}, dim});
  }
}

IndexView check_cu_seqlens(const char* argument, const Tensor& cu, Device device,
                           std::int64_t entries) {
  const IndexView view = check_index(argument, cu, device, "q", {{"num_seqs + 1", entries}});
  if (cu.shape[0] < 1) refuse(argument, "no entries", "num_seqs + 1 entries, the first of them 0");
  return view;
}

/// Dense: drops sides of the window that keep no key out, so that they cost nothing and give the
/// bits that no window gives. The last query is at the last key. Where lengths are known on the
/// device alone, the host knows only bounds that depend on other sequences, which must not decide.
void drop_idle_window(AttentionProblem& p) {
  if (p.window_left >= p.dense_kv_len - 1) p.window_left = kNoWindow;
  if (p.window_right >= p.q_len - 1) p.window_right = kNoWindow;
}

}  // namespace

AttentionProblem check_flash_attention(const FlashArgs& args) {
  const Tensor& q = args.q;
  check_attention_dtype("q", q);
  check_attention_dtype("k", args.k);
  check_attention_dtype("v", args.v);
  const bool packed = args.cu_seqlens_q.has_value();
  if (packed != args.cu_seqlens_k.has_value()) {
    refuse(packed ? "cu_seqlens_k" : "cu_seqlens_q", "None",
           "both cu_seqlens_q and cu_seqlens_k, or neither");
  }
  const Axes& axes = packed ? kPacked : args.layout == Layout::bhsd ? kBhsd : kBshd;
  const int rank = packed ? 3 : 4;
  check_rank("q", q, rank, axes.shape);
  check_rank("k", args.k, rank, axes.shape);
  check_rank("v", args.v, rank, axes.shape);
  check_hint("max_seqlen_q", args.max_seqlen_q);
  check_hint("max_seqlen_k", args.max_seqlen_k);
  check_workspace(args.workspace, q.device);

  check_same_dtype("k", args.k, q.dtype, "q");
  check_same_dtype("v", args.v, q.dtype, "q");

  AttentionProblem p;
  p.kv_dtype = q.dtype;
  check_qkv(p, q, axes.head, "k", args.k, "v", args.v, axes.head);
  const std::int64_t seqlen_k = size_along(args.k, axes.seq);
  const std::int64_t batch = size_along(q, axes.batch);
  check_kv_shape("k", args.k, axes, batch, seqlen_k, p.num_kv_heads, p.head_dim, "head_dim");
  check_kv_shape("v", args.v, axes, batch, seqlen_k, p.num_kv_heads, p.head_dim_v, "head_dim_v");
  check_layout("q", q);
  check_layout("k", args.k);
  check_layout("v", args.v);
  check_score_options(args.score, q.device, p.num_q_heads);

  p.q = query_view(q, axes);
  p.k = {args.k.data, stride_along(args.k, axes.batch), stride_along(args.k, axes.seq),
         stride_along(args.k, axes.head)};
  p.v = {args.v.data, stride_along(args.v, axes.batch), stride_along(args.v, axes.seq),
         stride_along(args.v, axes.head)};
  if (packed) {
    p.key_source = KeySource::packed;
    p.cu_seqlens_q = check_cu_seqlens("cu_seqlens_q", *args.cu_seqlens_q, q.device, kAnySize);
    p.num_seqs = args.cu_seqlens_q->shape[0] - 1;
    p.cu_seqlens_k = check_cu_seqlens("cu_seqlens_k", *args.cu_seqlens_k, q.device, p.num_seqs + 1);
    p.q_len = p.total_q = q.shape[0];
    p.total_k = args.k.shape[0];
  } else {
    p.key_source = KeySource::dense;
    p.num_seqs = batch;
    p.q_len = size_along(q, axes.seq);
    p.total_q = batch * p.q_len;
    p.dense_kv_len = seqlen_k;
  }
  p.causal = args.causal;
  set_score(p, args.score);
  if (!packed) drop_idle_window(p);
  p.out = check_result(q, axes, p.head_dim_v, args.out, args.lse);
  check_results_apart(args.out, args.lse, [&](const Written& written) {
    written.check_apart_or_same("q", q);
    written.check_apart("k", args.k);
    written.check_apart("v", args.v);
    written.check_apart("cu_seqlens_q", args.cu_seqlens_q);
    written.check_apart("cu_seqlens_k", args.cu_seqlens_k);
    written.check_apart("sinks", args.score.sinks);
  });
  return p;
}

AttentionProblem check_paged_attention(const PagedArgs& args) {
  const Tensor& q = args.q;
  check_attention_dtype("q", q);
  check_pool_dtypes(args.k_pool, args.v_pool, q.dtype, "q");
  const bool packed = args.cu_seqlens_q.has_value();
  if (packed) {
    check_rank("q", q, 3, "[total_q, num_q_heads, head_dim] with cu_seqlens_q");
  } else if (q.rank != 3 && q.rank != 4) {
    refuse("q", "shape " + shape_to_string(q),
           "[num_seqs, num_q_heads, head_dim] or [num_seqs, q_len, num_q_heads, head_dim]");
  }
  const Axes& axes = packed ? kPacked : q.rank == 4 ? kBshd : kOneToken;
  check_rank("k_pool", args.k_pool, 4, "[num_blocks, block_size, num_kv_heads, head_dim]");
  check_rank("v_pool", args.v_pool, 4, "[num_blocks, block_size, num_kv_heads, head_dim_v]");
  check_hint("max_seqlen_q", args.max_seqlen_q);
  check_workspace(args.workspace, q.device);

  AttentionProblem p;
  check_qkv(p, q, axes.head, "k_pool", args.k_pool, "v_pool", args.v_pool, 2);
  p.num_blocks = args.k_pool.shape[0];
  p.block_size = args.k_pool.shape[1];
  if (p.block_size < 1)
    refuse("k_pool", "shape " + shape_to_string(args.k_pool), "a block_size of 1 or more");
  check_shape("k_pool", args.k_pool,
              {{"num_blocks", p.num_blocks},
               {"block_size", p.block_size},
               {"num_kv_heads", p.num_kv_heads},
               {"head_dim", p.head_dim}});
  check_shape("v_pool", args.v_pool,
              {{"num_blocks", p.num_blocks},
               {"block_size", p.block_size},
               {"num_kv_heads", p.num_kv_heads},
               {"head_dim_v", p.head_dim_v}});
  check_layout("q", q);
  check_layout("k_pool", args.k_pool);
  check_layout("v_pool", args.v_pool);
  p.kv_dtype = args.k_pool.dtype;
  p.k_scale = check_scale("k_scale", args.k_scale, args.k_pool, "q");
  p.v_scale = check_scale("v_scale", args.v_scale, args.v_pool, "q");
  check_score_options(args.score, q.device, p.num_q_heads);

  if (packed) {
    p.cu_seqlens_q = check_cu_seqlens("cu_seqlens_q", *args.cu_seqlens_q, q.device, kAnySize);
    p.num_seqs = args.cu_seqlens_q->shape[0] - 1;
    p.q_len = p.total_q = q.shape[0];
  } else {
    p.num_seqs = q.shape[0];
    p.q_len = size_along(q, axes.seq);
    p.total_q = p.num_seqs * p.q_len;
  }
  p.key_source = KeySource::paged;
  p.q = query_view(q, axes);
  p.k = pool_view(args.k_pool);
  p.v = pool_view(args.v_pool);
  p.table = check_index("block_table", args.block_table, q.device, "q",
                        {{"num_seqs", p.num_seqs}, {"max_blocks", kAnySize}});
  p.table_width = args.block_table.shape[1];
  if (static_cast<double>(p.table_width) * static_cast<double>(p.block_size) >
      static_cast<double>(kMaxPosition)) {
    refuse("block_table",
           std::to_string(p.table_width) + " columns of " + std::to_string(p.block_size) + " slots",
           "at most 2^60 slots in a row");
  }
  p.seq_lens = check_index("seq_lens", args.seq_lens, q.device, "q", {{"num_seqs", p.num_seqs}});
  p.causal = args.causal;
  p.early_start = args.early_start;
  set_score(p, args.score);
  p.out = check_result(q, axes, p.head_dim_v, args.out, args.lse);
  check_results_apart(args.out, args.lse, [&](const Written& written) {
    written.check_apart_or_same("q", q);
    written.check_apart("k_pool", args.k_pool);
    written.check_apart("v_pool", args.v_pool);
    written.check_apart("block_table", args.block_table);
    written.check_apart("seq_lens", args.seq_lens);
    written.check_apart("cu_seqlens_q", args.cu_seqlens_q);
    written.check_apart("k_scale", args.k_scale);
    written.check_apart("v_scale", args.v_scale);
    written.check_apart("sinks", args.score.sinks);
  });
  return p;
}

MergeAttentionProblem check_merge_attention(const Tensor& out_a, const Tensor& lse_a,
                                            const Tensor& out_b, const Tensor& lse_b,
                                            const Tensor& out, const Tensor& lse, double lse_base) {
  if (!(lse_base > 1) || !std::isfinite(lse_base)) {
    refuse("lse_base", number_to_string(lse_base), "a finite base over 1, such as math.e or 2");
  }
  check_attention_dtype("out_a", out_a);
  if (out_a.rank < 1 || out_a.rank > 4) {
    refuse("out_a", "shape " + shape_to_string(out_a),
           "1 to 4 dimensions, the last one head_dim_v");
  }
  MergeAttentionProblem p;
  p.head_dim_v = out_a.shape[out_a.rank - 1];

  // One result, its lse beside it, as a view with three leading dimensions.
  const auto view = [&](const char* out_name, const Tensor& result, const char* lse_name,
                        const Tensor& result_lse) {
    check_same_dtype(out_name, result, out_a.dtype, "out_a");
    check_device(out_name, result, out_a.device, "out_a");
    check_layout(out_name, result);
    bool same = result.rank == out_a.rank;
    for (int i = 0; same && i < result.rank; ++i) same = result.shape[i] == out_a.shape[i];
    if (!same)
      refuse(out_name, "shape " + shape_to_string(result), shape_to_string(out_a) + " like out_a");
    check_float32(lse_name, result_lse);
    check_device(lse_name, result_lse, out_a.device, "out_a");
    bool fits = result_lse.rank == out_a.rank - 1;
    for (int i = 0; fits && i < result_lse.rank; ++i) fits = result_lse.shape[i] == out_a.shape[i];
    if (!fits) {
      Tensor expected = out_a;
      --expected.rank;
      refuse(lse_name, "shape " + shape_to_string(result_lse),
             shape_to_string(expected) + " (out_a.shape[:-1])");
    }
    check_memory(lse_name, result_lse);
    std::int64_t strides[3] = {};
    std::int64_t lse_strides[3] = {};
    for (int i = 0; i < result_lse.rank; ++i) {
      const int axis = 3 - result_lse.rank + i;
      strides[axis] = result.strides[i];
      lse_strides[axis] = result_lse.strides[i];
      p.shape[axis] = result.shape[i];
    }
    return OutputView{result.data,    result.dtype,   strides[0],
                      strides[1],     strides[2],     static_cast<float*>(result_lse.data),
                      lse_strides[0], lse_strides[1], lse_strides[2]};
  };
  p.a = view("out_a", out_a, "lse_a", lse_a);
  p.b = view("out_b", out_b, "lse_b", lse_b);
  p.out = view("out", out, "lse", lse);
  check_output(out, out_a.dtype, out_a.device, "out_a");
  check_lse(lse, out, out_a.device, "out_a");
  check_results_apart(out, lse, [&](const Written& written) {
    written.check_apart_or_same("out_a", out_a);
    written.check_apart_or_same("lse_a", lse_a);
    written.check_apart_or_same("out_b", out_b);
    written.check_apart_or_same("lse_b", lse_b);
  });
  p.lse_scale = static_cast<float>(std::log(lse_base));
  return p;
}

WriteKvProblem check_write_kv(const WriteKvArgs& args) {
  check_attention_dtype("k", args.k);
  check_rank("k", args.k, 3, "[tokens, num_kv_heads, head_dim]");
  check_rank("v", args.v, 3, "[tokens, num_kv_heads, head_dim_v]");
  check_rank("k_pool", args.k_pool, 4, "[num_blocks, block_size, num_kv_heads, head_dim]");
  check_rank("v_pool", args.v_pool, 4, "[num_blocks, block_size, num_kv_heads, head_dim_v]");

  WriteKvProblem p;
  p.num_tokens = args.k.shape[0];
  p.num_kv_heads = args.k.shape[1];
  p.head_dim = args.k.shape[2];
  p.head_dim_v = args.v.shape[2];
  p.num_blocks = args.k_pool.shape[0];
  p.block_size = args.k_pool.shape[1];
  p.dtype = args.k.dtype;
  p.pool_dtype = args.k_pool.dtype;
  const NamedSize tokens{"tokens", p.num_tokens};
  const NamedSize heads{"num_kv_heads", p.num_kv_heads};
  const NamedSize blocks{"num_blocks", p.num_blocks};
  const NamedSize block_size{"block_size", p.block_size};
  check_shape("v", args.v, {tokens, heads, {"head_dim_v", kAnySize}});
  check_shape("k_pool", args.k_pool, {blocks, block_size, heads, {"head_dim", p.head_dim}});
  check_shape("v_pool", args.v_pool, {blocks, block_size, heads, {"head_dim_v", p.head_dim_v}});

  check_same_dtype("v", args.v, p.dtype, "k");
  check_pool_dtypes(args.k_pool, args.v_pool, p.dtype, "k");
  check_device("v", args.v, args.k.device, "k");
  check_device("k_pool", args.k_pool, args.k.device, "k");
  check_device("v_pool", args.v_pool, args.k.device, "k");
  check_layout("k", args.k);
  check_layout("v", args.v);
  check_writable_layout("k_pool", args.k_pool);
  check_writable_layout("v_pool", args.v_pool);
  p.slot_mapping = check_index("slot_mapping", args.slot_mapping, args.k.device, "k", {tokens});
  p.k = {args.k.data, 0, args.k.strides[0], args.k.strides[1]};
  p.v = {args.v.data, 0, args.v.strides[0], args.v.strides[1]};
  p.k_pool = pool_view(args.k_pool);
  p.v_pool = pool_view(args.v_pool);
  p.k_scale = check_scale("k_scale", args.k_scale, args.k_pool, "k");
  p.v_scale = check_scale("v_scale", args.v_scale, args.v_pool, "k");
  for (const Written& pool : {Written("k_pool", args.k_pool), Written("v_pool", args.v_pool)}) {
    pool.check_apart("k", args.k);
    pool.check_apart("v", args.v);
    pool.check_apart("slot_mapping", args.slot_mapping);
    pool.check_apart("k_scale", args.k_scale);
    pool.check_apart("v_scale", args.v_scale);
  }
  return p;
}

}  // namespace tiledattn
