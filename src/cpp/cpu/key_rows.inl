// SPDX-License-Identifier: Apache-2.0
// Rows of one block of keys as the products of many rows read them: as they lie where that will do,
// else widened, interleaved or copied, each element once for all rows of q. Included by
// products.inl.
namespace {

using tiledattn::cpu::kRowPadding;

constexpr int kPanel = kProductVectors * kLanes;  ///< rows or columns side by side in registers
static_assert(kRowPadding % kPanel == 0);

/// Keys are scored kProductRows at a time; what stands after the last one is not used.
constexpr int kScoredKeys = kBlockKeys + kProductRows;

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
  const float* k[kScoredKeys];
  const float* v[kBlockKeys];
};

/// Rows of num_keys keys as float32, `padded` elements long and zero from `size` on.
template <typename T>
TILEDATTN_INLINE void widen_rows(const void* const* from, int num_keys, int size, int padded,
                                 float* to, const float** rows) {
  for (int j = 0; j < num_keys; ++j, to += padded) {
    const T* row = static_cast<const T*>(from[j]);
    int d = 0;
    for (; d + kLanes <= size; d += kLanes) store(to + d, load(row + d));
    if (d < size) store(to + d, load_first(row + d, size - d));
    for (d = (size + kLanes - 1) / kLanes * kLanes; d < padded; d += kLanes) store(to + d, Vec{});
    rows[j] = to;
  }
}

/// Units of two keys each of `padded` columns, zero from `size` on. With one key its partner is
/// zero, and so are the rows that fill up a tile.
template <typename T>
TILEDATTN_INLINE void interleave_rows(const void* const* from, int num_keys, int size, int padded,
                                      float* to, const float** rows) {
  static constexpr T kZeros[kLanes] = {};
  for (int j = 0; j < num_keys; j += 2, to += padded) {
    const T* first = static_cast<const T*>(from[j]);
    const T* second = j + 1 < num_keys ? static_cast<const T*>(from[j + 1]) : nullptr;
    int d = 0;
    for (; d + kLanes <= size; d += kLanes)
      store(to + d, Product<T>::pair(first + d, second ? second + d : kZeros));
    if (d < size) {
      T ends[2][kLanes] = {};
      __builtin_memcpy(ends[0], first + d, static_cast<unsigned>(size - d) * sizeof(T));
      if (second)
        __builtin_memcpy(ends[1], second + d, static_cast<unsigned>(size - d) * sizeof(T));
      store(to + d, Product<T>::pair(ends[0], ends[1]));
    }
    for (d = (size + kLanes - 1) / kLanes * kLanes; d < padded; d += kLanes) store(to + d, Vec{});
    rows[j / 2] = to;
  }
  for (int i = (num_keys + 1) / 2; i % TileProduct<T>::kUnits != 0; ++i)
    for (int d = 0; d < padded; d += kLanes, to += kLanes) store(to, Vec{});
}

/// Rows of K as they lie, or copies that zeros fill up to `units`: where the last pair is half of
/// one, and for tiles, whose rows lie at one stride.
template <typename T>
TILEDATTN_INLINE void pair_rows(const void* const* from, int num_keys, int size, int units,
                                float* to, const float** rows) {
  for (int j = 0; j < num_keys; ++j, to += units) {
    rows[j] = static_cast<const float*>(from[j]);
    if (size % 2 == 0 && !kTiles<T>) continue;
    const unsigned bytes = static_cast<unsigned>(size) * sizeof(T);
    __builtin_memcpy(to, from[j], bytes);
    __builtin_memset(reinterpret_cast<char*>(to) + bytes, 0,
                     static_cast<unsigned>(units) * sizeof(float) - bytes);
    rows[j] = to;
  }
}

template <typename T>
TILEDATTN_INLINE void make_key_rows(const BlockArgs& a, KeyRows& rows) {
  const int k_size = static_cast<int>(a.q_stride), v_size = static_cast<int>(a.o_stride);
  float* const v = a.widened + kBlockKeys * k_size;
  if constexpr (kPairs<T>) {
    pair_rows<T>(a.k, a.num_keys, a.head_dim, units_of<T>(a.head_dim), a.widened, rows.k);
    interleave_rows<T>(a.v, a.num_keys, a.head_dim_v, v_size, v, rows.v);
    return;
  }
  widen_rows<T>(a.k, a.num_keys, a.head_dim, k_size, a.widened, rows.k);
  widen_rows<T>(a.v, a.num_keys, a.head_dim_v, v_size, v, rows.v);
}

/// Columns beyond head_dim_v are computed too, so V is copied where it has no whole panels.
template <>
TILEDATTN_INLINE void make_key_rows<float>(const BlockArgs& a, KeyRows& rows) {
  for (int j = 0; j < a.num_keys; ++j) {
    rows.k[j] = static_cast<const float*>(a.k[j]);
    rows.v[j] = static_cast<const float*>(a.v[j]);
  }
  if (a.head_dim_v % kPanel != 0)
    widen_rows<float>(a.v, a.num_keys, a.head_dim_v, static_cast<int>(a.o_stride), a.widened,
                      rows.v);
}

}  // namespace
