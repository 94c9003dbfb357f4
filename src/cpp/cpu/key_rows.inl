// SPDX-License-Identifier: Apache-2.0
// Rows of one block of keys as the products of many rows read them: widened, interleaved or copied,
// each element once for all rows of q. K then lies in rows one after another and V in panels of
// columns, so that what an inner loop goes through is one piece of memory: rows at the stride of a
// tensor fall on a few sets of the caches. Included by products.inl.
namespace {

using tiledattn::cpu::kRowPadding;

constexpr int kPanel = kProductVectors * kLanes;  ///< rows or columns side by side in registers
static_assert(kRowPadding % kPanel == 0);

/// Whether products are of pairs of elements.
template <typename T>
constexpr bool kPairs = Product<T>::kElements == 2;

/// Whether products are of tiles.
template <typename T>
constexpr bool kTiles = TileProduct<T>::kExists;

/// Units in a row of `size` elements, for tiles with those that fill it up.
template <typename T>
constexpr int units_of(int size) {
  constexpr int kUnits = TileProduct<T>::kUnits;
  return kPairs<T> ? (size + 2 * kUnits - 1) / (2 * kUnits) * kUnits : size;
}

/// Rows of units that the products read: one of K for each key of the block, one of V for each key
/// or pair of keys.
struct KeyRows {
  const float* k[kBlockKeys];
  const float* v[kBlockKeys];
  int64_t v_panel;  ///< floats from panel to panel of a row of V
};

/// Rows of `padded` units that are made here.
struct Copies {
  float* first;
  int padded;
  int row_stride;
  int panel_stride;  ///< from panel to panel of a row

  float* row(int j) const { return first + j * row_stride; }
  float* at(int j, int d) const { return row(j) + d / kPanel * panel_stride + d % kPanel; }
  void clear(int j, int d) const {  // from d on
    for (; d < padded; d += kLanes) store(at(j, d), Vec{});
  }
};

TILEDATTN_INLINE Copies copies_of_k(const BlockArgs& a) {
  const int size = static_cast<int>(a.q_stride);
  return {a.widened, size, size, kPanel};
}

TILEDATTN_INLINE Copies copies_of_v(const BlockArgs& a) {
  const int size = static_cast<int>(a.o_stride);
  return {a.widened + kBlockKeys * a.q_stride, size, kPanel, kBlockKeys * kPanel};
}

/// Rows of num_keys keys as float32, zero from `size` on.
template <typename T>
TILEDATTN_INLINE void widen_rows(const void* const* from, int num_keys, int size, const Copies& to,
                                 const float** rows) {
  for (int j = 0; j < num_keys; ++j) {
    const T* row = static_cast<const T*>(from[j]);
    int d = 0;
    for (; d + kLanes <= size; d += kLanes) store(to.at(j, d), load(row + d));
    if (d < size) store(to.at(j, d), load_first(row + d, size - d));
    to.clear(j, (size + kLanes - 1) / kLanes * kLanes);
    rows[j] = to.row(j);
  }
}

/// Units of two keys each, zero from `size` on. With one key its partner is zero, and so are the
/// rows that fill up a tile.
template <typename T>
TILEDATTN_INLINE void interleave_rows(const void* const* from, int num_keys, int size,
                                      const Copies& to, const float** rows) {
  static constexpr T kZeros[kLanes] = {};
  for (int j = 0; j < num_keys; j += 2) {
    const T* first = static_cast<const T*>(from[j]);
    const T* second = j + 1 < num_keys ? static_cast<const T*>(from[j + 1]) : nullptr;
    int d = 0;
    for (; d + kLanes <= size; d += kLanes)
      store(to.at(j / 2, d), Product<T>::pair(first + d, second ? second + d : kZeros));
    if (d < size) {
      T ends[2][kLanes] = {};
      __builtin_memcpy(ends[0], first + d, static_cast<unsigned>(size - d) * sizeof(T));
      if (second)
        __builtin_memcpy(ends[1], second + d, static_cast<unsigned>(size - d) * sizeof(T));
      store(to.at(j / 2, d), Product<T>::pair(ends[0], ends[1]));
    }
    to.clear(j / 2, (size + kLanes - 1) / kLanes * kLanes);
    rows[j / 2] = to.row(j / 2);
  }
  for (int i = (num_keys + 1) / 2; i % TileProduct<T>::kUnits != 0; ++i) to.clear(i, 0);
}

/// Rows of K with zeros after them up to `units`.
template <typename T>
TILEDATTN_INLINE void pair_rows(const void* const* from, int num_keys, int size, int units,
                                float* to, const float** rows) {
  const unsigned bytes = static_cast<unsigned>(size) * sizeof(T);
  for (int j = 0; j < num_keys; ++j, to += units) {
    __builtin_memcpy(to, from[j], bytes);
    __builtin_memset(reinterpret_cast<char*>(to) + bytes, 0,
                     static_cast<unsigned>(units) * sizeof(float) - bytes);
    rows[j] = to;
  }
}

TILEDATTN_INLINE void use_in_place(const void* const* from, int num_keys, const float** rows) {
  for (int j = 0; j < num_keys; ++j) rows[j] = static_cast<const float*>(from[j]);
}

/// One panel of rows of q reads each row of K and V once: no more often than a copy would.
TILEDATTN_INLINE bool reads_once(const BlockArgs& a) { return a.num_rows <= kPanel; }

template <typename T>
TILEDATTN_INLINE void make_key_rows(const BlockArgs& a, KeyRows& rows) {
  const Copies v = copies_of_v(a);
  rows.v_panel = v.panel_stride;
  if constexpr (kPairs<T>) {
    if (reads_once(a) && a.head_dim % 2 == 0 && !kTiles<T>) {
      use_in_place(a.k, a.num_keys, rows.k);
    } else {
      pair_rows<T>(a.k, a.num_keys, a.head_dim, units_of<T>(a.head_dim), a.widened, rows.k);
    }
    interleave_rows<T>(a.v, a.num_keys, a.head_dim_v, v, rows.v);
  } else {
    widen_rows<T>(a.k, a.num_keys, a.head_dim, copies_of_k(a), rows.k);
    widen_rows<T>(a.v, a.num_keys, a.head_dim_v, v, rows.v);
  }
}

/// Columns beyond head_dim_v are computed too, so V is copied where it has no whole panels.
template <>
TILEDATTN_INLINE void make_key_rows<float>(const BlockArgs& a, KeyRows& rows) {
  const Copies v = copies_of_v(a);
  if (reads_once(a)) {
    use_in_place(a.k, a.num_keys, rows.k);
  } else {
    widen_rows<float>(a.k, a.num_keys, a.head_dim, copies_of_k(a), rows.k);
  }
  if (reads_once(a) && a.head_dim_v % kPanel == 0) {
    use_in_place(a.v, a.num_keys, rows.v);
    rows.v_panel = kPanel;
  } else {
    widen_rows<float>(a.v, a.num_keys, a.head_dim_v, v, rows.v);
    rows.v_panel = v.panel_stride;
  }
}

}  // namespace
