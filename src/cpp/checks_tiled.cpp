// SPDX-License-Identifier: Apache-2.0
// Checks of TiledAttention: dims, step_tile, finalize.
#include <string>

#include "check_apart.h"
#include "check_quantized.h"
#include "check_tensor.h"
#include "checks.h"

namespace tiledattn {

namespace {

constexpr const char* kOwner = "this TiledAttention";

void check_size(const char* field, std::int64_t size) {
  if (size < 1) refuse(std::string("dims.") + field, std::to_string(size), "1 or more");
}

/// q or out as (sequence, token, head): a missing token dimension is one token.
struct TokenStrides {
  std::int64_t seq, token, head;
};

TokenStrides token_strides(const Tensor& tensor, bool has_tokens) {
  if (has_tokens) return {tensor.strides[0], tensor.strides[1], tensor.strides[2]};
  return {tensor.strides[0], 0, tensor.strides[1]};
}

const char* owner_of(const StepShape& step) { return step.of_state ? "this State" : kOwner; }

void check_batch(const char* argument, const Tensor& tensor, const StepShape& step) {
  if (tensor.rank > 0 && tensor.shape[0] == step.num_seqs) return;
  const std::string got =
      tensor.rank > 0 ? std::to_string(tensor.shape[0]) + " sequences" : "a scalar";
  const std::string of = step.of_state ? "this State" : "begin_step";
  const char* hint = step.num_seqs == 0 && !step.of_state ? " (call begin_step first)" : "";
  refuse(argument, got, std::to_string(step.num_seqs) + ", the num_seqs of " + of + hint);
}

/// out [B, Hq, Dv], or [B, q_len, Hq, Dv] where q has tokens, and lse, as a view.
OutputView check_result(const TiledAttentionDims& dims, Device device, const StepShape& step,
                        const Tensor& out, const std::optional<Tensor>& lse) {
  check_sizes("out", out);
  check_batch("out", out, step);
  if (step.has_tokens) {
    check_shape("out", out,
                {{"num_seqs", step.num_seqs},
                 {"q_len", step.q_len},
                 {"num_q_heads", dims.num_q_heads},
                 {"head_dim_v", dims.value_dim()}});
  } else {
    check_shape("out", out,
                {{"num_seqs", step.num_seqs},
                 {"num_q_heads", dims.num_q_heads},
                 {"head_dim_v", dims.value_dim()}});
  }
  check_output(out, step.dtype, device, owner_of(step));
  const TokenStrides strides = token_strides(out, step.has_tokens);
  OutputView view{out.data, out.dtype, strides.seq, strides.token, strides.head, nullptr, 0, 0, 0};
  if (lse) {
    check_lse(*lse, out, device, owner_of(step));
    const TokenStrides lse_strides = token_strides(*lse, step.has_tokens);
    view.lse = static_cast<float*>(lse->data);
    view.lse_seq_stride = lse_strides.seq;
    view.lse_token_stride = lse_strides.token;
    view.lse_head_stride = lse_strides.head;
  }
  return view;
}

void check_pools(AttentionProblem& p, const TiledAttentionDims& dims, Device device,
                 const TileArgs& tile) {
  const Tensor& k = tile.k_pool;
  const Tensor& v = tile.v_pool;
  check_pool_dtypes(k, v, p.q.dtype, "q");
  check_device("k_pool", k, device, kOwner);
  check_device("v_pool", v, device, kOwner);
  check_shape("k_pool", k,
              {{"num_blocks", kAnySize},
               {"block_size", dims.block_size},
               {"num_kv_heads", dims.num_kv_heads},
               {"head_dim", dims.head_dim}});
  check_shape("v_pool", v,
              {{"num_blocks", k.shape[0]},
               {"block_size", dims.block_size},
               {"num_kv_heads", dims.num_kv_heads},
               {"head_dim_v", dims.value_dim()}});
  check_layout("k_pool", k);
  check_layout("v_pool", v);
  p.k = pool_view(k);
  p.v = pool_view(v);
  p.kv_dtype = k.dtype;
  p.k_scale = check_scale("k_scale", tile.k_scale, k, kOwner);
  p.v_scale = check_scale("v_scale", tile.v_scale, v, kOwner);
  p.num_blocks = k.shape[0];
  p.block_size = dims.block_size;
}

void check_tile_table(AttentionProblem& p, const TiledAttentionDims& dims, Device device,
                      const TileArgs& tile) {
  p.key_source = KeySource::tiles;
  p.early_start = tile.early_start;
  p.table = check_index("tile_blocks", tile.tile_blocks, device, kOwner,
                        {{"num_seqs", p.num_seqs}, {"blocks of the tile", kAnySize}});
  p.table_width = tile.tile_blocks.shape[1];
  if (p.table_width > dims.tile_capacity) {
    refuse("tile_blocks", std::to_string(p.table_width) + " columns",
           "at most dims.tile_capacity = " + std::to_string(dims.tile_capacity));
  }
  p.counts = check_index("tile_block_counts", tile.tile_block_counts, device, kOwner,
                         {{"num_seqs", p.num_seqs}});
  p.valid_slots_all = dims.block_size;
  if (tile.last_block_valid_slots) {
    p.valid_slots = check_index("last_block_valid_slots", *tile.last_block_valid_slots, device,
                                kOwner, {{"num_seqs", p.num_seqs}});
  } else if (tile.last_block_valid_slots_all) {
    p.valid_slots_all = *tile.last_block_valid_slots_all;
    if (p.valid_slots_all < 0 || p.valid_slots_all > dims.block_size) {
      refuse("last_block_valid_slots", std::to_string(p.valid_slots_all),
             "0 to dims.block_size = " + std::to_string(dims.block_size));
    }
  }
}

void check_positions(AttentionProblem& p, const ScoreOptions& options, Device device,
                     const TileArgs& tile) {
  if (tile.kv_positions.has_value() != tile.q_positions.has_value()) {
    refuse(tile.kv_positions ? "q_positions" : "kv_positions", "None",
           "both kv_positions and q_positions, or neither");
  }
  if (tile.kv_positions) {
    p.kv_positions =
        check_index("kv_positions", *tile.kv_positions, device, kOwner, {{"num_seqs", p.num_seqs}});
    p.q_positions =
        check_index("q_positions", *tile.q_positions, device, kOwner, {{"num_seqs", p.num_seqs}});
    p.causal = true;
  } else if (options.window.bounded()) {
    refuse("kv_positions", "None",
           "kv_positions and q_positions, since this TiledAttention has a window");
  }
}

}  // namespace

TiledAttentionDims TiledAttentionDims::validated() const {
  TiledAttentionDims dims = *this;
  dims.head_dim_v = value_dim();
  check_size("max_seqs", max_seqs);
  check_size("num_q_heads", num_q_heads);
  check_size("num_kv_heads", num_kv_heads);
  check_size("head_dim", head_dim);
  check_size("block_size", block_size);
  check_size("tile_capacity", tile_capacity);
  check_size("max_q_len", max_q_len);
  check_size("head_dim_v", dims.head_dim_v);
  check_head_dim("dims.head_dim", head_dim);
  check_head_dim("dims.head_dim_v", dims.head_dim_v);
  if (num_q_heads % num_kv_heads != 0) {
    refuse("dims.num_q_heads", std::to_string(num_q_heads),
           "a multiple of num_kv_heads = " + std::to_string(num_kv_heads));
  }
  // Byte counts and key counts are 64-bit; sizes whose products leave that range are refused before
  // they wrap.
  const double limit = 4e18;
  const double state = static_cast<double>(max_seqs) * static_cast<double>(max_q_len) *
                       static_cast<double>(num_q_heads) *
                       (static_cast<double>(dims.head_dim_v) + 2) * 4;
  const double keys = static_cast<double>(block_size) * static_cast<double>(tile_capacity);
  const double block = 2.0 * static_cast<double>(block_size) * static_cast<double>(num_kv_heads) *
                       static_cast<double>(head_dim);
  if (block > limit) {
    refuse("dims.block_size", std::to_string(block_size), "blocks of less than 4e18 elements");
  }
  if (state > limit)
    refuse("dims", "a state of " + number_to_string(state) + " bytes", "less than 4e18 bytes");
  if (keys > static_cast<double>(kMaxPosition)) {
    refuse("dims.tile_capacity",
           std::to_string(tile_capacity) + " blocks of " + std::to_string(block_size) + " slots",
           "at most 2^60 slots in a tile");
  }
  return dims;
}

PoolStrides TiledAttentionDims::paged_strides() const {
  return {block_size * num_kv_heads * head_dim, num_kv_heads * head_dim, head_dim};
}

PoolStrides TiledAttentionDims::scratch_pool_strides() const {
  return {2 * num_kv_heads * block_size * head_dim, head_dim, block_size * head_dim};
}

AttentionProblem check_step_tile(const TiledAttentionDims& dims, const ScoreOptions& options,
                                 Device device, const StepShape& step, const TileArgs& tile) {
  const Tensor& q = tile.q;
  check_attention_dtype("q", q);
  check_device("q", q, device, kOwner);
  check_batch("q", q, step);
  const bool has_tokens = q.rank == 4;
  const std::int64_t q_len = has_tokens ? q.shape[1] : 1;
  if (has_tokens) {
    check_shape("q", q,
                {{"num_seqs", step.num_seqs},
                 {"q_len", kAnySize},
                 {"num_q_heads", dims.num_q_heads},
                 {"head_dim", dims.head_dim}});
  } else {
    check_shape("q", q,
                {{"num_seqs", step.num_seqs},
                 {"num_q_heads", dims.num_q_heads},
                 {"head_dim", dims.head_dim}});
  }
  if (q_len > dims.max_q_len) {
    refuse("q", std::to_string(q_len) + " query tokens",
           "at most dims.max_q_len = " + std::to_string(dims.max_q_len));
  }
  if (step.fixed) {
    if (q_len != step.q_len) {
      refuse("q", std::to_string(q_len) + " query tokens",
             std::to_string(step.q_len) + " as in this step's first tile");
    }
    if (q.dtype != step.dtype) {
      throw TypeError("q: dtype is " + to_string(q.dtype) + "; expected " + to_string(step.dtype) +
                      " as in this step's first tile");
    }
  }
  check_layout("q", q);

  AttentionProblem p;
  p.num_seqs = step.num_seqs;
  p.q_len = q_len;
  p.total_q = step.num_seqs * q_len;
  p.num_q_heads = dims.num_q_heads;
  p.num_kv_heads = dims.num_kv_heads;
  p.head_dim = dims.head_dim;
  p.head_dim_v = dims.value_dim();
  const TokenStrides strides = token_strides(q, has_tokens);
  p.q = {q.data, q.dtype, strides.seq, strides.token, strides.head};
  check_pools(p, dims, device, tile);
  check_tile_table(p, dims, device, tile);
  check_positions(p, options, device, tile);
  set_score(p, options);
  if (tile.out) {
    p.out = check_result(dims, device, {p.num_seqs, true, q_len, q.dtype, has_tokens}, *tile.out,
                         tile.lse);
    check_results_apart(*tile.out, tile.lse, [&](const Written& written) {
      written.check_apart_or_same("q", q);
      written.check_apart("k_pool", tile.k_pool);
      written.check_apart("v_pool", tile.v_pool);
      written.check_apart("tile_blocks", tile.tile_blocks);
      written.check_apart("tile_block_counts", tile.tile_block_counts);
      written.check_apart("last_block_valid_slots", tile.last_block_valid_slots);
      written.check_apart("kv_positions", tile.kv_positions);
      written.check_apart("q_positions", tile.q_positions);
      written.check_apart("k_scale", tile.k_scale);
      written.check_apart("v_scale", tile.v_scale);
      written.check_apart("sinks", options.sinks);
    });
  } else if (tile.lse) {
    refuse("lse", "an array without out",
           "out as well: lse is written with the result of the last tile");
  }
  return p;
}

FinalizeProblem check_finalize(const TiledAttentionDims& dims, Device device, const StepShape& step,
                               const Tensor& out, const std::optional<Tensor>& lse) {
  // Before the step's first tile any number of tokens up to max_q_len can be asked for; each row is
  // empty.
  StepShape shape = step;
  shape.has_tokens = step.has_tokens || step.q_len != 1;
  if (!step.fixed) {
    shape.has_tokens = out.rank == 4;
    shape.q_len = shape.has_tokens ? out.shape[1] : 1;
    shape.dtype = out.dtype;
    check_attention_dtype("out", out);
    if (shape.q_len > dims.max_q_len) {
      refuse("out", std::to_string(shape.q_len) + " query tokens",
             "at most dims.max_q_len = " + std::to_string(dims.max_q_len));
    }
  }
  FinalizeProblem p;
  p.num_seqs = shape.num_seqs;
  p.q_len = shape.q_len;
  p.num_q_heads = dims.num_q_heads;
  p.head_dim_v = dims.value_dim();
  p.out = check_result(dims, device, shape, out, lse);
  return p;
}

}  // namespace tiledattn
