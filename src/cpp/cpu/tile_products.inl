// SPDX-License-Identifier: Apache-2.0
// The product with V by registers that hold tiles (TileProduct<T>). One operand has rows in the
// lanes and the other one dimension of the sum in them: of q K that is how q's panels and K lie,
// but here weights have to be transposed. Included by products.inl.
namespace {

/// Adds to o what the panel's rows take from V. Keys that stand in a tile beside those that the
/// panel sees have weight 0 there, which does not silence a NaN in their V.
template <typename T>
TILEDATTN_INLINE void add_tile_values(const BlockArgs& a, const Panel& panel, const KeyRows& rows,
                                      const float* factor, PanelScores& scores) {
  using Tile = TileProduct<T>;
  constexpr int kKeys = 2 * Tile::kUnits, kMostUnits = kBlockKeys / 2;
  static_assert(Tile::kSize == kPanel && kBlockKeys % kKeys == 0);
  const int begin = panel.key_begin / kKeys * kKeys;
  const int end = (panel.key_end + kKeys - 1) / kKeys * kKeys;
  const auto clear = [&](int key) {
    for (int lane = 0; lane < kPanel; lane += kLanes) store(scores[key] + lane, Vec{});
  };
  for (int j = begin; j < panel.key_begin; ++j) clear(j);
  for (int j = panel.key_end; j < end; ++j) clear(j);

  alignas(64) float weights[kPanel][kMostUnits];
  for (int lane = 0; lane < kPanel; lane += kLanes) {
    for (int j = begin; j < end; j += kKeys)
      Tile::pair_transposed(scores[j] + lane, kPanel, weights[lane] + (j - begin) / 2, kMostUnits);
  }
  alignas(64) float sums[kPanel][kPanel];
  const float* v = rows.v[begin / 2];
  for (int column = 0; column < a.head_dim_v; column += kPanel, v += rows.v_panel) {
    Tile::multiply(weights[0], kMostUnits, v, kPanel, (end - begin) / 2, sums[0], kPanel);
    float* o = a.o + panel.first * a.o_stride + column;
    for (int r = 0; r < panel.count; ++r, o += a.o_stride) {
      for (int d = 0; d < kPanel; d += kLanes)
        store(o + d, fma(load(o + d), broadcast(factor[r]), load(sums[r] + d)));
    }
  }
}

}  // namespace
