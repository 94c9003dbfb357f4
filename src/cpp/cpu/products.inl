// SPDX-License-Identifier: Apache-2.0
// Attention of many rows over one block of keys as two matrix products, both from registers:
//
//   scores^T = K q^T    kProductRows keys by a panel of rows
//   o       += P V      kProductRows rows by a panel of columns
//
// With the rows in the lanes no sum over lanes is needed, and the softmax of a panel is a walk down
// its columns. Only q is transposed, once for all blocks. K and V are copied, and widened where
// they are not float32, each element once for all rows: key_rows.inl. Where bfloat16 is multiplied
// in pairs (Product<T>), two keys of V are interleaved and weights are rounded to bfloat16.
// Registers that hold tiles (TileProduct<T>) take the products over whole: tile_products.inl.
// Included by skeleton.inl.
#include "kernels.h"
#include "key_rows.inl"

namespace {

using PanelScores = float[kBlockKeys][kPanel];

/// Rows first .. first + count - 1 of the block, at most a panel of them, and the keys that any of
/// them sees.
struct Panel {
  int first;
  int count;
  int key_begin;
  int key_end;
  bool masked;  ///< some row does not see all of these keys
};

/// The unit at `p`, which need not be aligned.
TILEDATTN_INLINE Vec broadcast_unit(const float* p) {
  float unit;
  __builtin_memcpy(&unit, p, sizeof unit);
  return broadcast(unit);
}

/// Units of head_dim that are summed up one after another: their sums are then added, which keeps
/// the error of a long row near that of a short one. Of products of one sign, 24 lose least up to
/// 256 elements. Beside the rounding of bfloat16 it does not count.
template <typename T>
constexpr int kSummedInTurn = kPairs<T> ? 128 : 24;

/// One by one, as everything that is done with these sums: GCC clears an array as a whole by a
/// string instruction, and then has it in memory before and after the loop.
template <int Count>
TILEDATTN_INLINE void clear_sums(Vec* sums) {
#pragma GCC unroll 16
  for (int i = 0; i < Count; ++i) sums[i] = Vec{};
}

/// What units begin .. end - 1 of a few keys add to the scores before scale of a panel of rows.
template <typename T, int Keys>
TILEDATTN_INLINE void add_scores(const float* const* k, const float* q, int begin, int end,
                                 float (*scores)[kPanel]) {
  constexpr int kSums = Keys * kProductVectors;
  Vec sums[kSums];
  clear_sums<kSums>(sums);
  q += static_cast<int64_t>(begin) * kPanel;
#pragma GCC unroll 1
  for (int d = begin; d < end; ++d, q += kPanel) {
    Vec x[kProductVectors];
    for (int i = 0; i < kProductVectors; ++i) x[i] = load(q + i * kLanes);
    for (int key = 0; key < Keys; ++key) {
      const Vec y = broadcast_unit(k[key] + d);
      for (int i = 0; i < kProductVectors; ++i) {
        Vec& sum = sums[key * kProductVectors + i];
        sum = Product<T>::multiply_add(x[i], y, sum);
      }
    }
  }
  // Rows of scores are as long as a panel.
#pragma GCC unroll 16
  for (int i = 0; i < kSums; ++i) {
    float* const score = scores[0] + i * kLanes;
    store(score, begin == 0 ? sums[i] : load(score) + sums[i]);
  }
}

/// Scores before scale of 1 to Most keys and a panel of rows.
template <typename T, int Most>
void score_keys(int keys, const float* const* k, const float* q, int units,
                float (*scores)[kPanel]) {
  if (keys < Most) {
    if constexpr (Most > 1) score_keys<T, Most - 1>(keys, k, q, units, scores);
    return;
  }
  for (int d = 0; d < units; d += kSummedInTurn<T>) {
    const int end = d + kSummedInTurn<T> < units ? d + kSummedInTurn<T> : units;
    add_scores<T, Most>(k, q, d, end, scores);
  }
}

/// Keys to be scored at once when `left` are left: the last two times share what is left.
TILEDATTN_INLINE int keys_at_once(int left) {
  if (left >= 2 * kProductRows) return kProductRows;
  return left > kProductRows ? (left + 1) / 2 : left;
}

TILEDATTN_INLINE Vec load_numbers(const int* p) {
  VecInt v;
  __builtin_memcpy(&v, p, sizeof v);
  return __builtin_convertvector(v, Vec);
}

/// Scale, softcap and mask of the scores of kLanes rows; returns the largest of each. A NaN counts
/// for nothing here: its weight makes l NaN.
TILEDATTN_INLINE Vec finish_panel_scores(const BlockArgs& a, const Panel& panel, int row,
                                         float* scores) {
  const Vec begin = load_numbers(a.row_begin + row), end = load_numbers(a.row_end + row);
  Vec top = broadcast(-kInfinity);
  if (a.k_scale == nullptr && !(a.softcap > 0.0f) && !panel.masked) {  // most blocks
    // Each of the largest waits for the one before it: four series of them wait less.
    Vec tops[4] = {top, top, top, top};
    const auto scale = [&](int j, Vec& largest) {
      const Vec s = load(scores + j * kPanel) * a.softmax_scale;
      store(scores + j * kPanel, s);
      largest = larger(s, largest);
    };
    int j = panel.key_begin;
    for (; j + 4 <= panel.key_end; j += 4)
      for (int i = 0; i < 4; ++i) scale(j + i, tops[i]);
    for (; j < panel.key_end; ++j) scale(j, tops[0]);
    return larger(larger(tops[0], tops[1]), larger(tops[2], tops[3]));
  }
  for (int j = panel.key_begin; j < panel.key_end; ++j) {
    Vec s = load(scores + j * kPanel) * a.softmax_scale;
    if (a.k_scale != nullptr) s *= a.k_scale[j];
    if (a.softcap > 0.0f) s = a.softcap * tanh(s / a.softcap);
    if (panel.masked) {
      const Vec key = broadcast(static_cast<float>(j));
      s = select((key >= begin) & (key < end), s, broadcast(-kInfinity));
    }
    store(scores + j * kPanel, s);
    top = larger(s, top);
  }
  return top;
}

/// Scores of a panel to weights, with the scales of V in them; moves m and l on. Leaves in `factor`
/// that of what o holds.
TILEDATTN_INLINE void weigh_panel(const BlockArgs& a, const Panel& panel, PanelScores& scores,
                                  float* factor) {
  for (int lane = 0; lane < kPanel; lane += kLanes) {
    const int row = panel.first + lane;
    const Vec top = finish_panel_scores(a, panel, row, scores[0] + lane);
    const Vec m = load(a.m + row);
    const Vec new_m = select(top > m, top, m);
    // With no key but those of score -inf so far, any finite base gives them weight 0.
    const Vec base = select(new_m == broadcast(-kInfinity), Vec{}, new_m);
    Vec total = {};
    for (int j = panel.key_begin; j < panel.key_end; ++j) {
      const Vec weight = exp_negative(load(scores[j] + lane) - base);
      store(scores[j] + lane, a.v_scale == nullptr ? weight : weight * a.v_scale[j]);
      total += weight;
    }
    const Vec of_old = exp_negative(m - base);
    store(factor + lane, of_old);
    store(a.m + row, new_m);
    store(a.l + row, load(a.l + row) * of_old + total);
  }
}

/// Rows of the V that a panel sees, and the weights that go with them.
struct Values {
  int begin;  ///< of the first row in `scores`
  int count;
  const float* v[kBlockKeys];
};

/// The weights of the keys of a panel as units of two keys: unit row j / 2 takes the place of a row
/// that has been read.
template <typename T>
TILEDATTN_INLINE void pair_weights(const Panel& panel, PanelScores& scores) {
  for (int lane = 0; lane < kPanel; lane += kLanes) {
    for (int j = panel.key_begin / 2 * 2; j < panel.key_end; j += 2) {
      const Vec first = j < panel.key_begin ? Vec{} : load(scores[j] + lane);
      const Vec second = j + 1 < panel.key_end ? load(scores[j + 1] + lane) : Vec{};
      store(scores[j / 2] + lane, Product<T>::pair(first, second));
    }
  }
}

/// A unit row with one key of the two gone, as row `j` of the copies: a weight of zero does not
/// silence NaN.
TILEDATTN_INLINE const float* without_key(const float* row, bool second, const Copies& to, int j) {
  const VecBits kept = VecBits{} + (second ? 0x0000ffffu : 0xffff0000u);
  for (int d = 0; d < to.padded; d += kLanes) {
    const Vec pairs = load(row + (to.at(j, d) - to.row(j)));
    store(to.at(j, d), (Vec)((VecBits)pairs & kept));
  }
  return to.row(j);
}

template <typename T>
TILEDATTN_INLINE void values_of_panel(const BlockArgs& a, const Panel& panel, const KeyRows& rows,
                                      Values& values) {
  if constexpr (!kPairs<T>) {
    values.begin = panel.key_begin;
    values.count = panel.key_end - panel.key_begin;
    for (int i = 0; i < values.count; ++i) values.v[i] = rows.v[values.begin + i];
  } else {
    values.begin = panel.key_begin / 2;
    values.count = (panel.key_end + 1) / 2 - values.begin;
    for (int i = 0; i < values.count; ++i) values.v[i] = rows.v[values.begin + i];
    // Half of the room for rows of V is free.
    const Copies copies = copies_of_v(a);
    constexpr int kSpare = kBlockKeys / 2;
    if (panel.key_begin % 2 != 0) values.v[0] = without_key(values.v[0], false, copies, kSpare);
    const float*& last = values.v[values.count - 1];
    if (panel.key_end % 2 != 0 && panel.key_end < a.num_keys)
      last = without_key(last, true, copies, kSpare + 1);
  }
}

/// What a few rows take from a panel of columns of V: weights, factor and o of the first row.
struct ValueArgs {
  const float* weights;  ///< kPanel floats from row of V to row of V
  const float* const* v;
  int64_t v_offset;  ///< of the panel of columns
  int count;         ///< of rows of V
  const float* factor;
  float* o;  ///< at the panel of columns
  int64_t o_stride;
};

template <typename T, int Rows>
void add_value_panel(const ValueArgs& a) {
  constexpr int kSums = Rows * kProductVectors;
  Vec sums[kSums];
  clear_sums<kSums>(sums);
  const float* weights = a.weights;
#pragma GCC unroll 1
  for (int j = 0; j < a.count; ++j, weights += kPanel) {
    const float* row = a.v[j] + a.v_offset;
    Vec x[kProductVectors];
    for (int i = 0; i < kProductVectors; ++i) x[i] = load(row + i * kLanes);
    for (int r = 0; r < Rows; ++r) {
      const Vec weight = broadcast(weights[r]);
      for (int i = 0; i < kProductVectors; ++i) {
        Vec& sum = sums[r * kProductVectors + i];
        sum = Product<T>::multiply_add(x[i], weight, sum);
      }
    }
  }
  const float* const factor = a.factor;
  float* o = a.o;
  const int64_t o_stride = a.o_stride;
#pragma GCC unroll 16
  for (int i = 0; i < kSums; ++i) {
    const int r = i / kProductVectors;
    float* const to = o + r * o_stride + i % kProductVectors * kLanes;
    store(to, fma(load(to), broadcast(factor[r]), sums[i]));
  }
}

/// The same for 1 to Most rows.
template <typename T, int Most>
void add_value_rows(int rows, const ValueArgs& a) {
  if (rows == Most) return add_value_panel<T, Most>(a);
  if constexpr (Most > 1) add_value_rows<T, Most - 1>(rows, a);
}

Panel panel_at(const BlockArgs& a, int first) {
  const int left = a.num_rows - first;
  Panel panel{first, left < kPanel ? left : kPanel, a.num_keys, 0, false};
  for (int r = first; r < first + panel.count; ++r) {
    if (a.row_begin[r] >= a.row_end[r]) continue;
    if (a.row_begin[r] < panel.key_begin) panel.key_begin = a.row_begin[r];
    if (a.row_end[r] > panel.key_end) panel.key_end = a.row_end[r];
  }
  for (int r = first; r < first + panel.count; ++r)
    panel.masked |= a.row_begin[r] > panel.key_begin || a.row_end[r] < panel.key_end;
  return panel;
}

/// Keys of the next block, fetched into L2 as in skeleton.inl: every panel fetches a share of them.
struct Fetch {
  int share;
  int next = 0;
  int end = 0;
};

/// Some keys, with `keys` of those of the block.
template <typename T>
TILEDATTN_INLINE void fetch_some(const BlockArgs& a, int keys, Fetch& fetch) {
  const int most = (keys * fetch.share + kBlockKeys - 1) / kBlockKeys;
  for (int i = 0; i < most && fetch.next < fetch.end; ++i, ++fetch.next) {
    prefetch_row(a.next_k[fetch.next], a.head_dim * static_cast<int>(sizeof(T)));
    prefetch_row(a.next_v[fetch.next], a.head_dim_v * static_cast<int>(sizeof(T)));
  }
}

/// What the rows of a panel take from V.
template <typename T>
TILEDATTN_INLINE void add_panel_values(const BlockArgs& a, const Panel& panel, const KeyRows& rows,
                                       const float* factor, PanelScores& scores) {
  if constexpr (kPairs<T>) pair_weights<T>(panel, scores);
  Values values;
  values_of_panel<T>(a, panel, rows, values);
  ValueArgs args{};
  args.v = values.v;
  args.count = values.count;
  args.o_stride = a.o_stride;
  for (int column = 0; column < a.head_dim_v; column += kPanel, args.v_offset += rows.v_panel) {
    for (int r = 0; r < panel.count; r += kProductRows) {
      args.weights = scores[values.begin] + r;
      args.factor = factor + r;
      args.o = a.o + (panel.first + r) * a.o_stride + column;
      const int left = panel.count - r;
      add_value_rows<T, kProductRows>(left < kProductRows ? left : kProductRows, args);
    }
  }
}

}  // namespace

#include "tile_products.inl"

namespace {

template <typename T>
void attend_panel(const BlockArgs& a, const Panel& panel, const KeyRows& rows, Fetch& fetch) {
  alignas(64) PanelScores scores;
  alignas(64) float factor[kPanel];
  const int units = units_of<T>(a.head_dim);
  const float* q = a.q_panels + static_cast<int64_t>(panel.first) * units;
  int keys = kPanel;
  for (int j = kTiles<T> ? panel.key_begin / kPanel * kPanel : panel.key_begin; j < panel.key_end;
       j += keys) {
    if constexpr (!kTiles<T>) keys = keys_at_once(panel.key_end - j);
    fetch_some<T>(a, keys, fetch);
    if constexpr (kTiles<T>) {
      TileProduct<T>::multiply(rows.k[j], units, q, kPanel, units, scores[j], kPanel);
    } else {
      score_keys<T, kProductRows>(keys, rows.k + j, q, units, scores + j);
    }
  }
  weigh_panel(a, panel, scores, factor);
  if constexpr (kTiles<T>) {
    add_tile_values<T>(a, panel, rows, factor, scores);
  } else {
    add_panel_values<T>(a, panel, rows, factor, scores);
  }
}

template <typename T>
void attend_products(const BlockArgs& a) {
  [[maybe_unused]] const typename TileProduct<T>::Registers registers;
  KeyRows rows;
  make_key_rows<T>(a, rows);
  const int num_panels = (a.num_rows + kPanel - 1) / kPanel;
  Fetch fetch{(a.num_next_keys + num_panels - 1) / num_panels};
  for (int first = 0; first < a.num_rows; first += kPanel) {
    const Panel panel = panel_at(a, first);
    if (panel.key_begin >= panel.key_end) continue;
    fetch.end =
        fetch.end + fetch.share < a.num_next_keys ? fetch.end + fetch.share : a.num_next_keys;
    attend_panel<T>(a, panel, rows, fetch);
  }
}

}  // namespace
