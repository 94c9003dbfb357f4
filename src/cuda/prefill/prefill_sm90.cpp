// SPDX-License-Identifier: Apache-2.0
// Host side of the Hopper prefill kernel: which instance, its tensor maps and its numbers.
//
// Instances are chosen by the head dims, the score options and, where dense, the lengths of each
// sequence: never by the batch, so that a sequence keeps its bits in any company.
#include "prefill/prefill_sm90.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <string>

#include "capability.h"
#include "common/tensor_map.h"
#include "prefill/prefill.h"
#include "tiledattn/error.h"

namespace tiledattn::cuda {

namespace {

/// Under a mask: K and V of the heads that go together, and bounds on how many heads those are.
/// More would not stay in the L2 cache until the last of their tiles are done.
constexpr std::int64_t kSectionBytes = std::int64_t{32} << 20;
constexpr std::int64_t kLeastSectionHeads = 16;
constexpr std::int64_t kMostSectionHeads = 32;
/// Up to these many query tokens, small blocks, several of them on each SM, hide latency best.
constexpr std::int64_t kShortRowsD64 = 128;
constexpr std::int64_t kShortRowsD64Causal = 1024;
constexpr std::int64_t kShortRowsD128 = 64;
/// From these many on, tiles of 192 rows: with more keys each for narrow heads, less reading of K
/// and V for wide ones.
constexpr std::int64_t kLongRowsD64 = 2048;
constexpr std::int64_t kLongRowsD128 = 8192;

/// Rows of q, K, V or out, indexed (sequence, token, head); the columns of a box are one slab.
struct Rows {
  const void* data;
  std::int64_t columns, tokens, heads, seqs;
  std::int64_t token_stride, head_stride, seq_stride;
};

CUtensorMap map_of(const Rows& rows, DType dtype, int box_rows) {
  TensorMapSpec spec;
  spec.data = rows.data;
  spec.dtype = dtype;
  spec.rank = 4;
  spec.sizes = {rows.columns, rows.tokens, rows.heads, rows.seqs};
  spec.strides = {1, rows.token_stride, rows.head_stride, rows.seq_stride};
  spec.box = {64, box_rows, 1, 1};
  return encode_tensor_map(spec);
}

std::int32_t limited(std::int64_t length) {
  return static_cast<std::int32_t>(std::min(length, kMaxPrefillSm90Length));
}

/// Heads whose tiles go together. Full attention reads least with one KV head at a time. Under a
/// mask the longest tiles of several heads must go first, and few heads were slower, even where
/// they read less from memory.
std::int32_t section_heads(const AttentionProblem& p, std::int64_t num_heads) {
  std::int64_t heads = p.gqa_ratio();
  if (p.causal || p.window_left != kNoWindow || p.window_right != kNoWindow) {
    const std::int64_t keys =
        p.key_source == KeySource::paged ? p.table_width * p.block_size : p.dense_kv_len;
    const std::int64_t head_bytes = keys * (p.head_dim + p.head_dim_v) * 2;
    heads = std::max(heads, std::clamp(kSectionBytes / head_bytes * p.gqa_ratio(),
                                       kLeastSectionHeads, kMostSectionHeads));
  }
  return static_cast<std::int32_t>(std::min(heads, num_heads));
}

template <typename Config>
void launch_config(PrefillSm90Params& params, cudaStream_t stream) {
  const AttentionProblem& p = params.attend.problem;
  const bool packed = p.packed_q();
  const std::int64_t seqs = packed ? 1 : p.num_seqs;
  const std::int64_t q_rows = packed ? p.total_q : p.q_len;
  const bool paged = p.key_source == KeySource::paged;
  const std::int64_t key_rows = paged ? p.block_size : packed ? p.total_k : p.dense_kv_len;
  const std::int64_t key_seqs = paged ? p.num_blocks : seqs;
  const DType dtype = p.q.dtype;
  int key_box = Config::kKeys;
  if (params.attend.split() && !Config::kSplits)
    throw Error("plan: the instance for long sequences takes no segments");
  params.clears_values = packed || paged || params.attend.split();
  if (paged) {
    key_box = std::gcd(Config::kKeys, static_cast<int>(p.block_size));
    // A box lies within a block wherever its segment begins, which is at a multiple of the unit.
    if (params.attend.split())
      key_box = std::gcd(key_box, static_cast<int>(params.attend.cut.unit));
    params.page_rows = key_box;
    params.num_blocks = static_cast<std::int32_t>(p.num_blocks);
    params.block_size = Divisor(p.block_size);
  }
  params.q = map_of({p.q.data, p.head_dim, q_rows, p.num_q_heads, seqs, p.q.token_stride,
                     p.q.head_stride, p.q.seq_stride},
                    dtype, Config::kRows);
  params.k = map_of({p.k.data, p.head_dim, key_rows, p.num_kv_heads, key_seqs, p.k.token_stride,
                     p.k.head_stride, p.k.block_stride},
                    dtype, key_box);
  params.v = map_of({p.v.data, p.head_dim_v, key_rows, p.num_kv_heads, key_seqs, p.v.token_stride,
                     p.v.head_stride, p.v.block_stride},
                    dtype, key_box);
  params.out = params.float_output
                   ? params.q  // not used
                   : map_of({p.out.data, p.head_dim_v, q_rows, p.num_q_heads, seqs,
                             p.out.token_stride, p.out.head_stride, p.out.seq_stride},
                            dtype, 64);

  std::int64_t tiles = 0;
  if (packed) {
    launch_count_row_tiles(params.attend, Config::kRows, stream);
    tiles = (q_rows / Config::kRows + params.attend.num_seqs) * p.num_q_heads;
  } else {
    const std::int64_t num_heads = params.attend.num_seqs * p.num_q_heads;
    const std::int64_t tiles_per_head = (q_rows + Config::kRows - 1) / Config::kRows;
    tiles = tiles_per_head * params.attend.max_segments * num_heads;
    params.num_tiles = static_cast<std::int32_t>(tiles);
    params.tiles_per_head = static_cast<std::int32_t>(tiles_per_head);
    params.section_heads = section_heads(p, num_heads);
  }
  launch_prefill_sm90<Config>(
      params, std::min<std::int64_t>(tiles, Config::kBlocks * num_multiprocessors()), stream);
}

template <typename T>
void launch_type(PrefillSm90Params& params, cudaStream_t stream) {
  const AttentionProblem& p = params.attend.problem;
  const bool general =
      params.scores.transform != ScoreTransform::none || p.window_left < kMaxPrefillSm90Length;
  const bool causal = p.causal || p.window_right < kMaxPrefillSm90Length;
  const std::int64_t dim = std::max(p.head_dim, p.head_dim_v);
  // Lengths of packed sequences are known on the device alone.
  const bool dense = !p.packed_q();
  if (dim <= 64) {
    if (general) return launch_config<PrefillSm90D64General<T>>(params, stream);
    if (dense && p.q_len <= (causal ? kShortRowsD64Causal : kShortRowsD64))
      return launch_config<PrefillSm90D64Short<T>>(params, stream);
    if (dense && p.q_len >= kLongRowsD64)
      return launch_config<PrefillSm90D64Long<T>>(params, stream);
    return launch_config<PrefillSm90D64<T>>(params, stream);
  }
  if (dim <= 96 && !general) return launch_config<PrefillSm90D96<T>>(params, stream);
  if (dim <= 128) {
    if (general) return launch_config<PrefillSm90D128General<T>>(params, stream);
    if (dense && p.q_len <= kShortRowsD128)
      return launch_config<PrefillSm90D128Short<T>>(params, stream);
    // Its 80 keys are pieces of at most 16 of a block, too many requests for paged keys.
    if (dense && p.key_source != KeySource::paged && p.q_len >= kLongRowsD128)
      return launch_config<PrefillSm90D128Long<T>>(params, stream);
    return launch_config<PrefillSm90D128<T>>(params, stream);
  }
  if (general) return launch_config<PrefillSm90D256General<T>>(params, stream);
  if (dim <= 192) return launch_config<PrefillSm90D192<T>>(params, stream);
  launch_config<PrefillSm90D256<T>>(params, stream);
}

}  // namespace

void launch_prefill_sm90(const AttendParams& attend, std::int32_t* counters, cudaStream_t stream) {
  const AttentionProblem& p = attend.problem;
  PrefillSm90Params params;
  params.attend = attend;
  params.counters = counters;
  params.num_q_heads = static_cast<std::int32_t>(p.num_q_heads);
  params.gqa_ratio = static_cast<std::int32_t>(p.gqa_ratio());
  params.float_output = p.out.dtype == DType::float32;
  params.scores = score_form(p);
  params.window_left = limited(p.window_left);
  params.window_right = p.causal ? 0 : limited(p.window_right);
  if (p.q.dtype == DType::bfloat16) return launch_type<__nv_bfloat16>(params, stream);
  if (p.q.dtype == DType::float16) return launch_type<__half>(params, stream);
  throw TypeError("q: got " + to_string(p.q.dtype) + "; expected float16 or bfloat16");
}

}  // namespace tiledattn::cuda
