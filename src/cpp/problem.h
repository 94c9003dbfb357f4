// SPDX-License-Identifier: Apache-2.0
// Problems: everything a backend needs for one launch, as plain data. checks.cpp makes them from
// arguments; backends read them on the host and inside kernels, so this header holds neither
// containers nor framework types.
//
// What a sequence is (its rows of q, its keys, its position) and what is wrong with it are decided
// by the functions below, once, for the CPU and the GPU.
#pragma once

#include <cstdint>

#include "tiledattn/tensor.h"

#if defined(__CUDACC__)
#define TILEDATTN_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define TILEDATTN_HOST_DEVICE inline
#endif

namespace tiledattn {

/// The largest head_dim and head_dim_v of attention.
constexpr std::int64_t kMaxHeadDim = 256;
/// Positions stay below this, so that sums of two of them and a window fit 64 bits.
constexpr std::int64_t kMaxPosition = std::int64_t{1} << 60;
/// A window side without a bound.
constexpr std::int64_t kNoWindow = std::int64_t{1} << 61;

/// A vector or matrix of int32 or int64, any strides; absent when `data` is null.
struct IndexView {
  const void* data = nullptr;
  std::int64_t row_stride = 0;  ///< elements; the only stride of a vector
  std::int64_t column_stride = 0;
  bool is_int64 = false;

  TILEDATTN_HOST_DEVICE bool given() const { return data != nullptr; }
  TILEDATTN_HOST_DEVICE std::int64_t at(std::int64_t row, std::int64_t column = 0) const {
    const std::int64_t offset = row * row_stride + column * column_stride;
    return is_int64 ? static_cast<const std::int64_t*>(data)[offset]
                    : static_cast<const std::int32_t*>(data)[offset];
  }
};

/// q, indexed (sequence, token, head); elements of the last dimension are adjacent. Packed q has
/// seq_stride 0.
struct QueryView {
  const void* data = nullptr;
  DType dtype = DType::float32;
  std::int64_t seq_stride = 0;
  std::int64_t token_stride = 0;
  std::int64_t head_stride = 0;
};

/// out and lse, indexed (sequence, token, head). Absent when `data` is null; lse may be absent
/// alone.
struct OutputView {
  void* data = nullptr;
  DType dtype = DType::float32;
  std::int64_t seq_stride = 0;
  std::int64_t token_stride = 0;
  std::int64_t head_stride = 0;
  float* lse = nullptr;
  std::int64_t lse_seq_stride = 0;
  std::int64_t lse_token_stride = 0;
  std::int64_t lse_head_stride = 0;

  /// The element of `data` at which a row begins.
  TILEDATTN_HOST_DEVICE std::int64_t row_offset(std::int64_t seq, std::int64_t token,
                                                std::int64_t head) const {
    return seq * seq_stride + token * token_stride + head * head_stride;
  }
  /// The element of `lse` that is a row's.
  TILEDATTN_HOST_DEVICE std::int64_t lse_offset(std::int64_t seq, std::int64_t token,
                                                std::int64_t head) const {
    return seq * lse_seq_stride + token * lse_token_stride + head * lse_head_stride;
  }
};

/// K or V, indexed (block, token, kv head). Dense KV: a block is a whole sequence. Packed KV:
/// block_stride is 0.
struct PoolView {
  const void* data = nullptr;
  std::int64_t block_stride = 0;
  std::int64_t token_stride = 0;
  std::int64_t head_stride = 0;
};

/// The scales of quantised K or V: an element counts as its stored value times the scale of its
/// block, token and KV head.
struct ScaleView {
  const float* data = nullptr;  ///< null: `all` is the scale of every element
  std::int64_t block_stride = 0;
  std::int64_t token_stride = 0;
  std::int64_t head_stride = 0;
  float all = 1.0f;
  bool by_key = false;  ///< the keys of a head may have different scales

  TILEDATTN_HOST_DEVICE float at(std::int64_t block, std::int64_t token,
                                 std::int64_t kv_head) const {
    if (data == nullptr) return all;
    return data[block * block_stride + token * token_stride + kv_head * head_stride];
  }
};

/// The running state (natural units); absent when `m` is null.
struct StateView {
  float* m = nullptr;
  float* l = nullptr;
  float* o = nullptr;           ///< row * head_dim_v + d, not normalised
  std::int64_t q_capacity = 1;  ///< tokens of a sequence that the buffers hold
  bool fresh = false;           ///< attention takes the buffers' contents as empty: (-inf, 0, 0)

  TILEDATTN_HOST_DEVICE std::int64_t row(std::int64_t seq, std::int64_t token, std::int64_t head,
                                         std::int64_t num_q_heads) const {
    return (seq * q_capacity + token) * num_q_heads + head;
  }
};

/// Arguments that only the device can read; names for messages are in checks.cpp.
enum class FaultArgument : std::int32_t {
  none,
  block_table,
  tile_blocks,
  tile_block_counts,
  last_block_valid_slots,
  seq_lens,
  cu_seqlens_q,
  cu_seqlens_k,
  kv_positions,
  q_positions,
  slot_mapping,
};

/// What is wrong with one sequence: `value` at [sequence, column] should lie in minimum .. maximum.
struct Fault {
  FaultArgument argument = FaultArgument::none;
  std::int64_t sequence = 0;
  std::int64_t column = 0;  ///< -1 for vectors
  std::int64_t value = 0;
  std::int64_t minimum = 0;
  std::int64_t maximum = 0;
  TILEDATTN_HOST_DEVICE bool found() const { return argument != FaultArgument::none; }
};

/// The first fault that a device found, in memory that host and device see. A kernel claims it with
/// an atomic compare-and-swap of `claimed` from 0 to 1, writes `fault`, makes that visible to the
/// host, then sets `ready` to 1.
struct FaultRecord {
  std::int32_t claimed;
  std::int32_t ready;
  Fault fault;
};

/// How keys are found. tiles: `table` with `counts` and valid slots; paged: `table` with
/// `seq_lens`; dense: sequence b is block b, `dense_kv_len` keys; packed: `cu_seqlens_k`.
enum class KeySource : std::uint8_t { tiles, paged, dense, packed };

/// Attention of all sequences of one call.
struct AttentionProblem {
  std::int64_t num_seqs = 0;
  std::int64_t q_len = 0;  ///< tokens of each sequence; packed q: a bound on them
  std::int64_t num_q_heads = 0;
  std::int64_t num_kv_heads = 0;
  std::int64_t head_dim = 0;
  std::int64_t head_dim_v = 0;

  QueryView q;
  IndexView cu_seqlens_q;    ///< given: q is packed, `total_q` tokens in all
  std::int64_t total_q = 0;  ///< packed: rows of q; else num_seqs * q_len

  KeySource key_source = KeySource::dense;
  PoolView k;
  PoolView v;
  DType kv_dtype = DType::float32;  ///< of k and v: that of q, or a quantised one
  ScaleView k_scale;                ///< with a quantised kv_dtype
  ScaleView v_scale;
  IndexView table;  ///< [num_seqs, table_width] block ids (tiles, paged)
  std::int64_t table_width = 0;
  std::int64_t block_size = 0;
  std::int64_t num_blocks = 0;
  IndexView counts;  ///< tiles: used entries of each row
  IndexView
      valid_slots;  ///< tiles: slots of the last used block that count; absent: `valid_slots_all`
  std::int64_t valid_slots_all = 0;
  IndexView seq_lens;             ///< paged
  IndexView cu_seqlens_k;         ///< packed
  std::int64_t total_k = 0;       ///< packed
  std::int64_t dense_kv_len = 0;  ///< dense
  IndexView kv_positions;         ///< tiles with positions
  IndexView q_positions;

  bool causal = false;  ///< token i sees no key after its own position
  std::int64_t window_left = kNoWindow;
  std::int64_t window_right = kNoWindow;
  float softmax_scale = 1.0f;
  float softcap = 0.0f;
  const float* sinks =
      nullptr;  ///< [num_q_heads], on the device; enters the result, never the state

  /// The caller's word: all that is read, but for q, the state and the last q_len keys that each
  /// sequence sees, was written before the kernel that runs before this call in its stream began.
  /// GPU only.
  bool early_start = false;

  StateView state;
  OutputView out;
  FaultRecord* faults = nullptr;  ///< device address (GPU only)

  TILEDATTN_HOST_DEVICE std::int64_t gqa_ratio() const { return num_q_heads / num_kv_heads; }
  TILEDATTN_HOST_DEVICE bool packed_q() const { return cu_seqlens_q.given(); }
  TILEDATTN_HOST_DEVICE bool quantized() const { return is_quantized(kv_dtype); }
};

/// One sequence of a problem.
struct Sequence {
  std::int64_t index = 0;
  std::int64_t q_begin =
      0;  ///< first token in q: token i is at seq_stride * index + token_stride * (q_begin + i)
  std::int64_t q_len = 0;
  std::int64_t kv_begin = 0;  ///< packed KV: first key
  std::int64_t kv_len = 0;
  std::int64_t position = 0;  ///< of query token 0, counted so that key j is at position j
};

/// Keys begin .. end - 1.
struct KeyRange {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  TILEDATTN_HOST_DEVICE bool empty() const { return begin >= end; }
};

namespace detail {
TILEDATTN_HOST_DEVICE std::int64_t min64(std::int64_t a, std::int64_t b) { return a < b ? a : b; }
TILEDATTN_HOST_DEVICE std::int64_t max64(std::int64_t a, std::int64_t b) { return a > b ? a : b; }
}  // namespace detail

/// Sequence `b`, whose arguments check_sequence has found right. b == num_seqs with packed q: the
/// rows of q after the last sequence, which see no key.
TILEDATTN_HOST_DEVICE Sequence sequence_at(const AttentionProblem& p, std::int64_t b) {
  Sequence s;
  s.index = b;
  s.q_len = p.q_len;
  if (p.packed_q()) {
    s.q_begin = p.cu_seqlens_q.at(b);
    s.q_len = (b < p.num_seqs ? p.cu_seqlens_q.at(b + 1) : p.total_q) - s.q_begin;
    if (b == p.num_seqs) return s;
  }
  switch (p.key_source) {
    case KeySource::tiles: {
      const std::int64_t count = p.counts.at(b);
      const std::int64_t last = p.valid_slots.given() ? p.valid_slots.at(b) : p.valid_slots_all;
      s.kv_len = count == 0 ? 0 : (count - 1) * p.block_size + last;
      break;
    }
    case KeySource::paged:
      s.kv_len = p.seq_lens.at(b);
      break;
    case KeySource::dense:
      s.kv_len = p.dense_kv_len;
      break;
    case KeySource::packed:
      s.kv_begin = p.cu_seqlens_k.at(b);
      s.kv_len = p.cu_seqlens_k.at(b + 1) - s.kv_begin;
      break;
  }
  s.position =
      p.kv_positions.given() ? p.q_positions.at(b) - p.kv_positions.at(b) : s.kv_len - s.q_len;
  return s;
}

/// The keys that query token `token` of the sequence sees. In a paged cache, tokens from before the
/// sequence began (it is shorter than its query) see none.
TILEDATTN_HOST_DEVICE KeyRange visible_keys(const AttentionProblem& p, const Sequence& s,
                                            std::int64_t token) {
  const std::int64_t position = s.position + token;
  if (p.key_source == KeySource::paged && position < 0) return {0, 0};
  const std::int64_t right = p.causal ? 0 : p.window_right;
  KeyRange range{0, s.kv_len};
  range.begin = detail::max64(range.begin, position - p.window_left);
  range.end = detail::min64(range.end, position + detail::min64(right, p.window_right) + 1);
  return range;
}

/// The keys that some token of first .. last sees: an interval, since both bounds move with the
/// token.
TILEDATTN_HOST_DEVICE KeyRange visible_keys(const AttentionProblem& p, const Sequence& s,
                                            std::int64_t first, std::int64_t last) {
  return {visible_keys(p, s, first).begin, visible_keys(p, s, last).end};
}

/// Where a key is in a pool.
struct KeyPlace {
  std::int64_t block = 0;
  std::int64_t token = 0;
};

/// The place of key `j`.
TILEDATTN_HOST_DEVICE KeyPlace key_place(const AttentionProblem& p, const Sequence& s,
                                         std::int64_t j) {
  if (p.table.given()) return {p.table.at(s.index, j / p.block_size), j % p.block_size};
  return {s.index, s.kv_begin + j};
}

/// The element offset of a KV head of the key at `place`.
TILEDATTN_HOST_DEVICE std::int64_t pool_offset(const PoolView& pool, KeyPlace place,
                                               std::int64_t kv_head) {
  return place.block * pool.block_stride + place.token * pool.token_stride +
         kv_head * pool.head_stride;
}

/// The element offset of key `j` of KV head `kv_head` in K (or V).
TILEDATTN_HOST_DEVICE std::int64_t key_offset(const AttentionProblem& p, const PoolView& pool,
                                              const Sequence& s, std::int64_t j,
                                              std::int64_t kv_head) {
  return pool_offset(pool, key_place(p, s, j), kv_head);
}

namespace detail {
TILEDATTN_HOST_DEVICE Fault out_of_range(FaultArgument argument, std::int64_t b,
                                         std::int64_t column, std::int64_t value,
                                         std::int64_t minimum, std::int64_t maximum) {
  Fault fault;
  if (value < minimum || value > maximum) fault = {argument, b, column, value, minimum, maximum};
  return fault;
}

TILEDATTN_HOST_DEVICE Fault check_cu_seqlens(const IndexView& cu, FaultArgument argument,
                                             std::int64_t b, std::int64_t total) {
  const std::int64_t begin = cu.at(b);
  Fault fault = out_of_range(argument, b, -1, begin, 0, b == 0 ? 0 : total);
  if (!fault.found()) fault = out_of_range(argument, b + 1, -1, cu.at(b + 1), begin, total);
  return fault;
}
}  // namespace detail

/// What is wrong with the lengths, counts, slots and positions of sequence `b`; block ids are
/// check_block's.
TILEDATTN_HOST_DEVICE Fault check_sequence(const AttentionProblem& p, std::int64_t b) {
  Fault fault;
  if (p.packed_q())
    fault = detail::check_cu_seqlens(p.cu_seqlens_q, FaultArgument::cu_seqlens_q, b, p.total_q);
  if (fault.found()) return fault;
  switch (p.key_source) {
    case KeySource::tiles: {
      const std::int64_t count = p.counts.at(b);
      fault =
          detail::out_of_range(FaultArgument::tile_block_counts, b, -1, count, 0, p.table_width);
      if (!fault.found() && count > 0 && p.valid_slots.given()) {
        fault = detail::out_of_range(FaultArgument::last_block_valid_slots, b, -1,
                                     p.valid_slots.at(b), 0, p.block_size);
      }
      break;
    }
    case KeySource::paged:
      fault = detail::out_of_range(FaultArgument::seq_lens, b, -1, p.seq_lens.at(b), 0,
                                   p.table_width * p.block_size);
      break;
    case KeySource::dense:
      break;
    case KeySource::packed:
      fault = detail::check_cu_seqlens(p.cu_seqlens_k, FaultArgument::cu_seqlens_k, b, p.total_k);
      break;
  }
  if (!fault.found() && p.kv_positions.given()) {
    fault = detail::out_of_range(FaultArgument::kv_positions, b, -1, p.kv_positions.at(b), 0,
                                 kMaxPosition);
    if (!fault.found()) {
      fault = detail::out_of_range(FaultArgument::q_positions, b, -1, p.q_positions.at(b), 0,
                                   kMaxPosition);
    }
  }
  return fault;
}

/// What is wrong with the only entry of a cu_seqlens without sequences.
TILEDATTN_HOST_DEVICE Fault check_no_sequences(const AttentionProblem& p) {
  Fault fault;
  if (p.num_seqs > 0) return fault;
  if (p.packed_q()) {
    fault = detail::out_of_range(FaultArgument::cu_seqlens_q, 0, -1, p.cu_seqlens_q.at(0), 0, 0);
  }
  if (!fault.found() && p.key_source == KeySource::packed) {
    fault = detail::out_of_range(FaultArgument::cu_seqlens_k, 0, -1, p.cu_seqlens_k.at(0), 0, 0);
  }
  return fault;
}

/// The columns of the table that sequence `s` reads: those with a key that some query token sees.
TILEDATTN_HOST_DEVICE KeyRange table_columns(const AttentionProblem& p, const Sequence& s) {
  if (!p.table.given() || s.q_len == 0) return {0, 0};
  const KeyRange keys = visible_keys(p, s, 0, s.q_len - 1);
  if (keys.empty()) return {0, 0};
  return {keys.begin / p.block_size, (keys.end - 1) / p.block_size + 1};
}

/// What is wrong with the block id in one column of the table.
TILEDATTN_HOST_DEVICE Fault check_block(const AttentionProblem& p, const Sequence& s,
                                        std::int64_t column) {
  const FaultArgument argument =
      p.key_source == KeySource::tiles ? FaultArgument::tile_blocks : FaultArgument::block_table;
  return detail::out_of_range(argument, s.index, column, p.table.at(s.index, column), 0,
                              p.num_blocks - 1);
}

/// State -> result: out = o / l and lse = m + ln l, with the sink where there is one.
struct FinalizeProblem {
  std::int64_t num_seqs = 0;
  std::int64_t q_len = 0;
  std::int64_t num_q_heads = 0;
  std::int64_t head_dim_v = 0;
  StateView state;
  const float* sinks = nullptr;
  OutputView out;
};

/// Rows of one state folded into another's: `into` = merge(`into`, `from`), rows adjacent in both.
struct MergeStatesProblem {
  std::int64_t num_rows = 0;
  std::int64_t head_dim_v = 0;
  StateView into;
  StateView from;
};

/// Two results over disjoint keys into one; views are indexed by three leading dimensions (missing
/// ones are 1).
struct MergeAttentionProblem {
  std::int64_t shape[3] = {1, 1, 1};
  std::int64_t head_dim_v = 0;
  OutputView a;  ///< read only
  OutputView b;  ///< read only
  OutputView out;
  float lse_scale = 1.0f;  ///< natural logarithm = lse * lse_scale
};

/// Tokens copied into the slots of a pool, or quantised on the way.
struct WriteKvProblem {
  std::int64_t num_tokens = 0;
  std::int64_t num_kv_heads = 0;
  std::int64_t head_dim = 0;
  std::int64_t head_dim_v = 0;
  std::int64_t block_size = 0;
  std::int64_t num_blocks = 0;
  DType dtype = DType::float32;       ///< of k and v
  DType pool_dtype = DType::float32;  ///< of both pools: the same, or a quantised one
  PoolView k;                         ///< source: block_stride 0
  PoolView v;
  PoolView k_pool;  ///< written, although the view says const
  PoolView v_pool;
  ScaleView k_scale;  ///< with a quantised pool_dtype
  ScaleView v_scale;
  IndexView slot_mapping;
  FaultRecord* faults = nullptr;
};

/// What is wrong with the slot of one token. Negative slots skip the token and are right.
TILEDATTN_HOST_DEVICE Fault check_slot(const WriteKvProblem& p, std::int64_t token) {
  Fault fault;
  const std::int64_t slot = p.slot_mapping.at(token);
  const std::int64_t limit = p.num_blocks * p.block_size - 1;
  if (slot > limit) fault = {FaultArgument::slot_mapping, token, -1, slot, 0, limit};
  return fault;
}

}  // namespace tiledattn
