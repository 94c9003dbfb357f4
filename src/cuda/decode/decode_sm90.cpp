// SPDX-License-Identifier: Apache-2.0
// The Hopper decode kernel on the host: which instance, which tensor maps, how many teams.
#include "decode/decode_sm90.h"

#include <algorithm>
#include <cstdint>
#include <numeric>

#include "capability.h"
#include "common/tensor_map.h"
#include "decode_cut.h"
#include "tiledattn/error.h"

namespace tiledattn::cuda {

namespace {

constexpr int kTeamsPerBlock = 2;

/// Calls `launch` with the smallest instance for both head dims and the rows that stand together.
template <typename T>
void launch_instance(const DecodeSm90Params& params, std::int64_t dim, std::int64_t rows,
                     cudaStream_t stream) {
  if (dim <= 64) {
    return rows > 8 ? launch_decode_sm90_instance<T, 64, 16>(params, stream)
                    : launch_decode_sm90_instance<T, 64, 8>(params, stream);
  }
  if (dim <= 128) {
    return rows > 8   ? launch_decode_sm90_instance<T, 128, 16>(params, stream)
           : rows > 4 ? launch_decode_sm90_instance<T, 128, 8>(params, stream)
                      : launch_decode_sm90_instance<T, 128, 4>(params, stream);
  }
  if (dim <= 192) return launch_decode_sm90_instance<T, 192, 8>(params, stream);
  return launch_decode_sm90_instance<T, 256, 8>(params, stream);
}

CUtensorMap pool_map(const AttentionProblem& p, const PoolView& pool, std::int64_t dim,
                     std::int64_t num_blocks, std::int64_t block_size, int box_tokens) {
  TensorMapSpec spec;
  spec.data = pool.data;
  spec.dtype = p.kv_dtype;
  spec.rank = 4;
  spec.sizes = {dim, block_size, p.num_kv_heads, num_blocks};
  spec.strides = {1, pool.token_stride, pool.head_stride, pool.block_stride};
  const std::int64_t item = item_bytes(p.kv_dtype);
  spec.swizzle_bytes = decode_box_bytes(std::max(p.head_dim, p.head_dim_v), item);
  spec.box = {spec.swizzle_bytes / static_cast<int>(item), box_tokens, 1, 1};
  return encode_tensor_map(spec);
}

/// Each query token sees every key of its sequence, whatever the lengths.
bool sees_all_keys(const AttentionProblem& p) {
  if (p.window_left != kNoWindow || p.window_right != kNoWindow || p.kv_positions.given())
    return false;
  // Causal by length: the last token sees all. With more tokens than keys some see none.
  return p.q_len == 1 || (!p.causal && p.key_source != KeySource::paged);
}

}  // namespace

void launch_decode_sm90(const AttentionProblem& p, const Plan& plan, void* scratch,
                        cudaStream_t stream) {
  if (p.num_seqs == 0) return;
  const bool dense = p.key_source == KeySource::dense;
  const std::int64_t dim = std::max(p.head_dim, p.head_dim_v);
  const std::int64_t num_blocks = dense ? p.num_seqs : p.num_blocks;
  const std::int64_t block_size = dense ? p.dense_kv_len : p.block_size;
  const int chunk_keys = decode_chunk_keys(dim, item_bytes(p.kv_dtype));

  DecodeSm90Params params;
  params.problem = p;
  // A box stays within a block; past the end of a dense sequence it reads zeros.
  params.box_tokens =
      dense ? chunk_keys : static_cast<int>(std::gcd(block_size, std::int64_t{chunk_keys}));
  params.k_map = pool_map(p, p.k, p.head_dim, num_blocks, block_size, params.box_tokens);
  params.v_map = pool_map(p, p.v, p.head_dim_v, num_blocks, block_size, params.box_tokens);
  // Scales for each block may change with the new keys of their block.
  params.early_start = p.early_start && !p.k_scale.by_key && !p.v_scale.by_key;
  params.num_blocks = static_cast<int>(num_blocks);
  params.block_size = Divisor(block_size);

  const std::int64_t rows = p.q_len * p.gqa_ratio();
  const std::int64_t together = decode_rows_together(rows, dim);
  const std::int64_t row_tiles = (rows + together - 1) / together;
  const std::int64_t heads = p.num_kv_heads * row_tiles;
  params.rows = static_cast<int>(rows);
  params.group = Divisor(p.gqa_ratio());
  params.row_tiles = Divisor(row_tiles);
  params.heads_per_seq = static_cast<int>(heads);
  // Several sequences have their row tiles at work at about the same time.
  constexpr std::int64_t kManyReads = 4;
  params.reads_once = row_tiles < kManyReads || p.num_seqs < kManyReads;
  params.sees_all = sees_all_keys(p);
  params.short_lengths =
      params.sees_all && p.key_source == KeySource::paged && !p.seq_lens.is_int64;
  const std::int64_t max_len = dense ? p.dense_kv_len : p.table_width * p.block_size;
  params.max_len = static_cast<unsigned>(max_len);
  constexpr std::int64_t kFewSeqs = 32;
  params.short_line = static_cast<double>(p.num_seqs) * static_cast<double>(heads) *
                          (static_cast<double>(max_len / chunk_keys) + kDecodeHeadCost + 2) <
                      static_cast<double>(INT32_MAX);
  params.few_seqs = params.short_line && p.num_seqs <= kFewSeqs;
  if (p.softcap > 0.0f) params.inverse_softcap = 1.0f / p.softcap;
  params.max_groups = static_cast<int>(plan.max_groups);
  params.partials = static_cast<float*>(scratch);
  params.counters =
      reinterpret_cast<std::uint32_t*>(static_cast<char*>(scratch) + plan.counters_offset);
  params.slot_for_each_head = p.num_seqs * heads <= plan.num_slots;
  std::int64_t teams = std::int64_t{kTeamsPerBlock} * num_multiprocessors();
  if (!params.slot_for_each_head) teams = std::min(teams, plan.num_slots);
  teams = even_teams(p.num_seqs * heads, std::min(teams, kMaxDecodeTeams));
  params.num_teams = static_cast<int>(teams);
  params.teams = Divisor(teams);

  const std::int64_t most_rows = std::min(rows, together);
  switch (p.kv_dtype) {
    case DType::bfloat16:
      return launch_instance<__nv_bfloat16>(params, dim, most_rows, stream);
    case DType::float16:
      return launch_instance<__half>(params, dim, most_rows, stream);
    case DType::float8_e4m3fn:
      return launch_instance<__nv_fp8_e4m3>(params, dim, most_rows, stream);
    case DType::int8:
      return launch_instance<std::int8_t>(params, dim, most_rows, stream);
    default:
      throw TypeError("k_pool: got " + to_string(p.kv_dtype) + ", which no kernel reads");
  }
}

}  // namespace tiledattn::cuda
