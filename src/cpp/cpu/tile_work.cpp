// SPDX-License-Identifier: Apache-2.0
#include "cpu/tile_work.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "cpu/convert.h"
#include "cpu/isa.h"

namespace tiledattn::cpu {
namespace {

static_assert(kMostElements == kMaxHeadDim);

/// From this many rows on, two matrix products cost less than groups of rows.
constexpr std::int64_t kMinProductRows = 12;
/// Keys of a block of decode. The first block of a tile comes without having been fetched, so that
/// with larger ones short sequences wait longer.
constexpr std::int64_t kDecodeBlockKeys = 64;
/// Keys of a segment of prefill. Summed block by block for longer, equal values lose more to
/// rounding than the bound for float32 allows.
constexpr std::int64_t kPrefillSegmentKeys = 4096;

void advance_all(const void* const* from, int count, std::int64_t bytes, const void** to) {
  for (int j = 0; j < count; ++j) to[j] = static_cast<const char*>(from[j]) + bytes;
}

const float* scale_address(const ScaleView& scale, KeyPlace place, std::int64_t kv_head) {
  return scale.data + place.block * scale.block_stride + place.token * scale.token_stride +
         kv_head * scale.head_stride;
}

/// A scale meets sums here, not elements: an infinite one would make an infinity of what is NaN.
float finite_or_nan(float scale) { return scale + (scale - scale); }

/// The scales at the addresses.
void gather(const void* const* from, int count, float* to) {
  for (int j = 0; j < count; ++j) to[j] = finite_or_nan(*static_cast<const float*>(from[j]));
}

/// Elements d .. d + kSide - 1 of kSide rows, which become columns.
constexpr int kSide = 4;
void transpose(const float* const* rows, std::int64_t d, float* to, std::int64_t stride) {
  typedef float Four __attribute__((vector_size(kSide * sizeof(float))));
  Four row[kSide];
  for (int i = 0; i < kSide; ++i) std::memcpy(&row[i], rows[i] + d, sizeof row[i]);
  const Four low[] = {__builtin_shufflevector(row[0], row[1], 0, 4, 1, 5),
                      __builtin_shufflevector(row[2], row[3], 0, 4, 1, 5)};
  const Four high[] = {__builtin_shufflevector(row[0], row[1], 2, 6, 3, 7),
                       __builtin_shufflevector(row[2], row[3], 2, 6, 3, 7)};
  const Four columns[] = {__builtin_shufflevector(low[0], low[1], 0, 1, 4, 5),
                          __builtin_shufflevector(low[0], low[1], 2, 3, 6, 7),
                          __builtin_shufflevector(high[0], high[1], 0, 1, 4, 5),
                          __builtin_shufflevector(high[0], high[1], 2, 3, 6, 7)};
  for (int i = 0; i < kSide; ++i) std::memcpy(to + i * stride, &columns[i], sizeof columns[i]);
}

/// A factor of scores in two parts, of which kernels apply one after the other: as one, a factor
/// beyond float would make NaN of a score of 0.
struct ScoreFactor {
  float first;
  float second = 1.0f;  ///< a power of two

  explicit ScoreFactor(double factor) : first(static_cast<float>(factor)) {
    constexpr int kLargestExponent = std::numeric_limits<float>::max_exponent - 2;
    if (!std::isfinite(factor) || std::isfinite(first)) return;
    const int exponent = std::ilogb(factor) - kLargestExponent;
    first = static_cast<float>(std::ldexp(factor, -exponent));
    second = std::ldexp(1.0f, exponent);
  }
};

}  // namespace

/// Addresses of one block of keys of one KV head, as kernels want them; of the scales where each
/// key has its own.
struct TileWork::KeyBlock {
  KeyRange keys;
  const void* k[kBlockKeys];
  const void* v[kBlockKeys];
  const void* k_scale[kBlockKeys];
  const void* v_scale[kBlockKeys];
  int size() const { return static_cast<int>(keys.end - keys.begin); }
  int entries() const { return (size() + kGroupKeys - 1) / kGroupKeys * kGroupKeys; }
};

TileWork::TileWork(const AttentionProblem& problem, const Plan& plan)
    : p_(problem), plan_(plan), kernels_(kernels()) {}

/// The keys that some query token of the sequence sees; segments are cut from them.
KeyRange TileWork::sequence_keys(const Sequence& s) const {
  return visible_keys(p_, s, 0, s.q_len - 1);
}

std::int64_t TileWork::segments_of(const Sequence& s) const {
  const KeyRange keys = sequence_keys(s);
  const std::int64_t num_keys = keys.end - keys.begin;
  if (plan_.kernel == Kernel::cpu_decode) return num_segments(num_keys, plan_.cut);
  return std::max<std::int64_t>(num_keys + kPrefillSegmentKeys - 1, 0) / kPrefillSegmentKeys;
}

KeyRange TileWork::segment_of(const Sequence& s, std::int64_t index) const {
  const KeyRange keys = sequence_keys(s);
  if (plan_.kernel == Kernel::cpu_decode) return segment_range(keys, index, plan_.cut);
  const std::int64_t begin = keys.begin + index * kPrefillSegmentKeys;
  return {begin, std::min(begin + kPrefillSegmentKeys, keys.end)};
}

KeysAhead TileWork::first_keys(const Tile& t, std::int64_t segment, std::int64_t end) const {
  if (segment == end) return {};
  const KeyRange keys = segment_of(t.sequence, segment);
  return {&t, {keys.begin, std::min(keys.begin + block_keys(), keys.end)}};
}

Workbench& TileWork::reserve_bench(const Tile& t) const {
  Workbench& bench = Workbench::of_this_thread();
  bench.reserve(num_rows(t), p_.head_dim, p_.head_dim_v);
  return bench;
}

Workbench& TileWork::prepare(const Tile& t) const {
  Workbench& bench = reserve_bench(t);
  const std::int64_t rows = num_rows(t);
  const bool keep_type = keeps_bfloat16(t);
  const std::int64_t item = keep_type ? 2 : 4;
  const std::int64_t stride = padded(p_.head_dim);
  for (std::int64_t r = 0; r < rows; ++r) {
    const std::int64_t offset = t.sequence.index * p_.q.seq_stride +
                                (t.sequence.q_begin + token_of(t, r)) * p_.q.token_stride +
                                head_of(t, r) * p_.q.head_stride;
    const void* from = advance(p_.q.data, offset, p_.q.dtype);
    char* to = reinterpret_cast<char*>(bench.q) + r * stride * item;
    if (keep_type) {
      std::memcpy(to, from, static_cast<std::size_t>(p_.head_dim * item));
    } else {
      load_row(from, p_.q.dtype, p_.head_dim, reinterpret_cast<float*>(to));
    }
    std::memset(to + p_.head_dim * item, 0,
                static_cast<std::size_t>((stride - p_.head_dim) * item));
  }
  if (by_products(t)) make_panels(t, bench);
  return bench;
}

/// Rows side by side in the lanes: worth a transposed q where a tile has many. Products of bfloat16
/// round weights, which decode does not; and in a row of a few elements that cancel nothing would
/// hide it.
bool TileWork::by_products(const Tile& t) const {
  constexpr std::int64_t kFewestElements = 8;
  const bool precise = plan_.kernel == Kernel::cpu_decode || p_.head_dim_v < kFewestElements;
  if (by_pairs() && precise) return false;
  return t.num_kv_heads == 1 && num_rows(t) >= kMinProductRows;
}

/// Packed q stays bfloat16 where kernels multiply it with K as bfloat16, which holds bytes exactly
/// too. Products of many rows have bytes as float32.
bool TileWork::keeps_bfloat16(const Tile& t) const {
  if (p_.q.dtype != DType::bfloat16 || !kernels_.packs_bfloat16) return false;
  return !p_.quantized() || !by_products(t);
}

Element TileWork::element(const Tile& t) const {
  const Element element = element_of(p_.kv_dtype);
  if (!keeps_bfloat16(t)) return element;
  if (element == Element::int8) return Element::int8_by_bfloat16;
  if (element == Element::float8) return Element::float8_by_bfloat16;
  return element;
}

/// Floats that a row of q takes in a panel: two bfloat16 elements have the room of one.
std::int64_t TileWork::query_units() const {
  if (!by_pairs()) return p_.head_dim;
  const std::int64_t step = 2 * kernels_.pair_units;
  return (p_.head_dim + step - 1) / step * kernels_.pair_units;
}

/// The tile's packed q once more, with panels of rows side by side.
void TileWork::make_panels(const Tile& t, const Workbench& bench) const {
  static constexpr float kNoRow[kMaxHeadDim] = {};
  const std::int64_t rows = num_rows(t), panel = kernels_.panel_rows, units = query_units();
  const std::int64_t stride = padded(p_.head_dim) / (by_pairs() ? 2 : 1);
  for (std::int64_t row = 0; row < (rows + panel - 1) / panel * panel; row += kSide) {
    const float* from[kSide];
    for (int i = 0; i < kSide; ++i)
      from[i] = row + i < rows ? bench.q + (row + i) * stride : kNoRow;
    float* const to = bench.q_panels + row / panel * panel * units + row % panel;
    std::int64_t d = 0;
    for (; d + kSide <= units; d += kSide) transpose(from, d, to + d * panel, panel);
    for (; d < units; ++d)
      for (int i = 0; i < kSide; ++i) to[d * panel + i] = from[i][d];
  }
}

void TileWork::fold_segment(const Tile& t, std::int64_t segment, const KeysAhead& then,
                            const Workbench& bench) const {
  for (std::int64_t r = 0; r < num_rows(t); ++r) clear_row(bench.partial_row(r), bench.o_stride);
  const KeyRange of_tile = visible_keys(p_, t.sequence, t.first, t.last);
  KeyRange keys = segment_of(t.sequence, segment);
  keys = {std::max(keys.begin, of_tile.begin), std::min(keys.end, of_tile.end)};

  // Two in turn: while one head's keys of a block are folded in, those of the next head or block
  // are fetched.
  KeyBlock blocks[2];
  int turn = 0;
  const std::int64_t step = block_keys();
  for (std::int64_t key = keys.begin; key < keys.end; key += step) {
    if (key == keys.begin) locate(t, {key, std::min(key + step, keys.end)}, blocks[turn]);
    const KeyRange following{key + step, std::min(key + 2 * step, keys.end)};
    for (std::int64_t head = 0; head < t.num_kv_heads; ++head, turn = 1 - turn) {
      KeyBlock* next = &blocks[1 - turn];
      if (head + 1 < t.num_kv_heads) {
        next_head(blocks[turn], *next);
      } else if (!following.empty()) {
        locate(t, following, *next);
      } else if (!then.keys.empty()) {
        locate(*then.tile, then.keys, *next);
      } else {
        next = nullptr;
      }
      fold_block(t, head * head_rows(t), blocks[turn], next, bench);
    }
  }
  for (std::int64_t r = 0; r < num_rows(t); ++r) {
    const Row row = bench.partial_row(r);
    if (p_.quantized()) {
      const double scale = head_scale(p_.v_scale, t.kv_head + r / head_rows(t));
      for (std::int64_t d = 0; d < p_.head_dim_v; ++d)
        row.o[d] = static_cast<float>(row.o[d] * scale);
    }
    // Kernels leave a NaN score out of m; l and o have it.
    if (std::isnan(*row.l) && *row.m != std::numeric_limits<float>::infinity()) *row.m = *row.l;
    // Its weights were 0, but 0 times an Inf that another row sees is NaN. Merged into others the
    // row would be nothing, so it must be nothing alone.
    if (is_empty(row)) clear_row(row, p_.head_dim_v);
  }
}

/// The same keys of the KV head after that of `block`.
void TileWork::next_head(const KeyBlock& block, KeyBlock& next) const {
  next.keys = block.keys;
  const std::int64_t item = item_bytes(p_.kv_dtype);
  constexpr std::int64_t kScale = sizeof(float);
  const int count = block.entries();
  advance_all(block.k, count, p_.k.head_stride * item, next.k);
  advance_all(block.v, count, p_.v.head_stride * item, next.v);
  if (p_.k_scale.by_key)
    advance_all(block.k_scale, count, p_.k_scale.head_stride * kScale, next.k_scale);
  if (p_.v_scale.by_key)
    advance_all(block.v_scale, count, p_.v_scale.head_stride * kScale, next.v_scale);
}

std::int64_t TileWork::block_keys() const {
  return plan_.kernel == Kernel::cpu_decode ? kDecodeBlockKeys : kBlockKeys;
}

/// What all keys of a KV head have in common: their scale, unless each key has its own, and the
/// unit in which kernels see elements. The product may leave the range of float.
double TileWork::head_scale(const ScaleView& scale, std::int64_t kv_head) const {
  if (!p_.quantized()) return 1.0;
  const double unit = p_.kv_dtype == DType::float8_e4m3fn ? kFloat8Unit : 1.0;
  return scale.by_key ? unit : unit * finite_or_nan(scale.at(0, 0, kv_head));
}

/// The keys of the tile's first KV head. A division and a table entry for each of them would cost a
/// quarter of decode, so only a run of keys at one stride has them: a block of the cache.
void TileWork::locate(const Tile& t, KeyRange keys, KeyBlock& block) const {
  block.keys = keys;
  const int count = block.size();
  const std::int64_t item = item_bytes(p_.kv_dtype);
  constexpr std::int64_t kScale = sizeof(float);
  for (int j = 0, end = 0; j < count; j = end) {
    const KeyPlace place = key_place(p_, t.sequence, keys.begin + j);
    const std::int64_t run = p_.table.given() ? p_.block_size - place.token : count;
    end = static_cast<int>(std::min<std::int64_t>(j + run, count));
    const auto fill = [&](const void** to, const void* first, std::int64_t stride) {
      for (int i = j; i < end; ++i) to[i] = static_cast<const char*>(first) + (i - j) * stride;
    };
    const std::int64_t k = pool_offset(p_.k, place, t.kv_head);
    const std::int64_t v = pool_offset(p_.v, place, t.kv_head);
    fill(block.k, advance(p_.k.data, k, p_.kv_dtype), p_.k.token_stride * item);
    fill(block.v, advance(p_.v.data, v, p_.kv_dtype), p_.v.token_stride * item);
    if (p_.k_scale.by_key)
      fill(block.k_scale, scale_address(p_.k_scale, place, t.kv_head),
           p_.k_scale.token_stride * kScale);
    if (p_.v_scale.by_key)
      fill(block.v_scale, scale_address(p_.v_scale, place, t.kv_head),
           p_.v_scale.token_stride * kScale);
  }
  for (int j = count; j < block.entries(); ++j) {  // the rest of the last group
    block.k[j] = block.k[count - 1];
    block.v[j] = block.v[count - 1];
    if (p_.k_scale.by_key) block.k_scale[j] = block.k_scale[count - 1];
    if (p_.v_scale.by_key) block.v_scale[j] = block.v_scale[count - 1];
  }
}

/// One KV head's keys into its rows, of which `first_row` is the first.
void TileWork::fold_block(const Tile& t, std::int64_t first_row, const KeyBlock& block,
                          const KeyBlock* next, const Workbench& bench) const {
  // A few rows at a time, so that their key bounds fit a small array; whole groups and panels.
  constexpr int kRows = 2 * kRowPadding;
  static_assert(kRows % kGroupRows == 0);
  int row_begin[kRows] = {}, row_end[kRows] = {};
  float k_scale[kBlockKeys], v_scale[kBlockKeys];
  const std::int64_t end_row = first_row + head_rows(t);
  const std::int64_t q_item = keeps_bfloat16(t) ? 2 : 4;

  BlockArgs args{};
  args.num_keys = block.size();
  args.head_dim = static_cast<int>(p_.head_dim);
  args.head_dim_v = static_cast<int>(p_.head_dim_v);
  args.q_stride = padded(p_.head_dim);
  args.k = block.k;
  args.v = block.v;
  args.row_begin = row_begin;
  args.row_end = row_end;
  const ScoreFactor factor(p_.softmax_scale *
                           head_scale(p_.k_scale, t.kv_head + first_row / head_rows(t)));
  args.softmax_scale = factor.first;
  args.softcap = p_.softcap;
  if (p_.k_scale.by_key) {
    gather(block.k_scale, block.entries(), k_scale);
    if (factor.second != 1.0f) {
      for (int j = 0; j < block.entries(); ++j) k_scale[j] *= factor.second;
    }
    args.k_scale = k_scale;
  } else if (factor.second != 1.0f) {
    std::fill_n(k_scale, block.entries(), factor.second);
    args.k_scale = k_scale;
  }
  if (p_.v_scale.by_key) {
    gather(block.v_scale, block.entries(), v_scale);
    args.v_scale = v_scale;
  }
  args.o_stride = bench.o_stride;
  args.widened = bench.widened;
  for (std::int64_t first = first_row; first < end_row; first += kRows) {
    args.num_rows = static_cast<int>(std::min<std::int64_t>(kRows, end_row - first));
    for (int r = 0; r < args.num_rows; ++r) {
      const KeyRange seen = visible_keys(p_, t.sequence, token_of(t, first + r));
      const std::int64_t size = args.num_keys;
      row_begin[r] =
          static_cast<int>(std::clamp<std::int64_t>(seen.begin - block.keys.begin, 0, size));
      row_end[r] = static_cast<int>(std::clamp<std::int64_t>(seen.end - block.keys.begin, 0, size));
    }
    args.next_k = next ? next->k : nullptr;
    args.next_v = next ? next->v : nullptr;
    args.num_next_keys = next && first == first_row ? next->size() : 0;
    if (by_products(t)) args.q_panels = bench.q_panels + first * query_units();
    args.q = reinterpret_cast<const char*>(bench.q) + first * args.q_stride * q_item;
    const Row row = bench.partial_row(first);
    args.m = row.m;
    args.l = row.l;
    args.o = row.o;
    kernels_.attend_block[static_cast<int>(element(t))](args);
  }
}

void TileWork::finish(const Tile& t, const Workbench& bench) const {
  for (std::int64_t r = 0; r < num_rows(t); ++r) {
    const std::int64_t token = token_of(t, r);
    const std::int64_t head = head_of(t, r);
    Row result = bench.total_row(r);
    if (p_.state.m != nullptr) {
      const Row state =
          state_row(p_.state, t.sequence.index, token, head, p_.num_q_heads, p_.head_dim_v);
      if (p_.state.fresh) {
        copy_row(result, state, p_.head_dim_v);
      } else {
        merge_row(state, result, p_.head_dim_v);
      }
      result = state;
    }
    if (p_.out.data != nullptr) {
      write_result(p_.out, p_.sinks, t.sequence.index, t.sequence.q_begin + token, head, result,
                   p_.head_dim_v);
    }
  }
}

}  // namespace tiledattn::cpu
