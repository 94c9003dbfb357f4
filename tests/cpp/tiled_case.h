// SPDX-License-Identifier: Apache-2.0
// The cases of tiled attention as data, and one of them set up on a device.
#pragma once

#include <utility>

#include "paged_cache.h"

namespace test {

struct Case {
  const char* name;
  DType dtype = DType::float32;
  std::int64_t num_q_heads = 4;
  std::int64_t num_kv_heads = 2;
  std::int64_t head_dim = 16;
  std::int64_t head_dim_v = 16;
  std::int64_t block_size = 4;
  std::int64_t q_len = 1;
  std::int64_t tile = 2;  ///< blocks
  std::vector<std::int64_t> lengths = {9, 0, 1, 23, 16};
  Rules rules = {};
  bool positions = false;

  PagedCache::Sizes sizes() const {
    return {block_size, num_kv_heads, head_dim, head_dim_v, dtype};
  }
  TiledAttentionDims dims() const {
    TiledAttentionDims dims;
    dims.max_seqs = static_cast<std::int64_t>(lengths.size());
    dims.num_q_heads = num_q_heads;
    dims.num_kv_heads = num_kv_heads;
    dims.head_dim = head_dim;
    dims.head_dim_v = head_dim_v;
    dims.block_size = block_size;
    dims.tile_capacity = tile + 1;
    dims.max_q_len = q_len;
    return dims;
  }
  Shape q_shape() const {
    return {static_cast<std::int64_t>(lengths.size()), q_len, num_q_heads, head_dim};
  }
};

inline Rules windowed(std::int64_t left) {
  Rules rules;
  rules.causal = true;
  rules.left = left;
  return rules;
}

inline Rules causal() {
  Rules rules;
  rules.causal = true;
  return rules;
}

inline Rules with_scale(double scale, double softcap = 0) {
  Rules rules;
  rules.softmax_scale = scale;
  rules.softcap = softcap;
  return rules;
}

inline Rules with_sinks(std::vector<float> sinks) {
  Rules rules;
  rules.sinks = Host({static_cast<std::int64_t>(sinks.size())});
  rules.sinks->values = std::move(sinks);
  return rules;
}

inline const std::vector<Case>& cases() {
  static const std::vector<Case> all = {
      {.name = "float32"},
      {.name = "float16", .dtype = DType::float16},
      {.name = "bfloat16", .dtype = DType::bfloat16, .head_dim = 64, .head_dim_v = 64},
      {.name = "one block a tile", .tile = 1},
      {.name = "one tile", .tile = 6},
      {.name = "block of one token", .block_size = 1, .tile = 5},
      {.name = "ratio 7", .num_q_heads = 28, .num_kv_heads = 4},
      {.name = "ratio 71", .num_q_heads = 71, .num_kv_heads = 1},
      {.name = "no sharing", .num_q_heads = 3, .num_kv_heads = 3},
      {.name = "head_dim 1", .head_dim = 1, .head_dim_v = 1},
      {.name = "head_dim 20, head_dim_v 33", .head_dim = 20, .head_dim_v = 33},
      {.name = "head_dim 256", .dtype = DType::bfloat16, .head_dim = 256, .head_dim_v = 256},
      {.name = "head_dim 80 fp16", .dtype = DType::float16, .head_dim = 80, .head_dim_v = 112},
      {.name = "several tokens", .q_len = 3, .rules = causal(), .positions = true},
      {.name = "several tokens see every slot", .q_len = 4},
      {.name = "many tokens",
       .q_len = 19,
       .tile = 3,
       .lengths = {40, 5, 19},
       .rules = causal(),
       .positions = true},
      {.name = "positions", .rules = causal(), .positions = true},
      {.name = "window", .rules = windowed(6), .positions = true},
      {.name = "window of one key", .rules = windowed(0), .positions = true},
      {.name = "scale", .rules = with_scale(0.9)},
      {.name = "negative scale", .rules = with_scale(-0.3)},
      {.name = "zero scale", .rules = with_scale(0)},
      {.name = "softcap", .rules = with_scale(2.0, 3.0)},
      {.name = "sinks", .rules = with_sinks({0.5f, -2.0f, 7.0f, -30.0f})},
      {.name = "long",
       .dtype = DType::bfloat16,
       .num_q_heads = 8,
       .num_kv_heads = 2,
       .head_dim = 128,
       .head_dim_v = 128,
       .block_size = 16,
       .tile = 40,
       .lengths = {1000, 3, 641}},
  };
  return all;
}

/// A case with its arrays on a device, ready to step.
struct Setup {
  Random random{11};
  PagedCache cache;
  Host q;
  Array sinks, q_array, k_pool, v_pool;
  TiledAttention attention;
  Walk walk;

  Setup(const Case& c, Device device)
      : cache(random, c.lengths, c.sizes()),
        q(rounded(random.normal(c.q_shape()), c.dtype)),
        q_array(q, c.dtype, device),
        k_pool(cache.k, c.dtype, device),
        v_pool(cache.v, c.dtype, device),
        attention(c.dims(), device, c.rules.options(device, sinks)) {
    walk.cuts = even_cuts(cache.max_blocks(), c.tile);
    walk.positions = c.positions;
    walk.spare_columns = 1;
  }

  void step() {
    attention.begin_step(cache.num_seqs());
    step_through(attention, cache, q_array, k_pool, v_pool, walk);
  }
  Array out(DType dtype) const {
    Shape shape = q.shape;
    shape.back() = attention.dims().head_dim_v;
    return Array(Host(shape, 1e30f), dtype, attention.device());
  }
  Array lse() const {
    return Array(Host({q.shape[0], q.shape[1], q.shape[2]}, 1e30f), DType::float32,
                 attention.device());
  }
};

inline const Case kPlain = {.name = "plain"};

/// m, l and o of the object, one after the other.
inline std::vector<Host> state_of(TiledAttention& attention) {
  return {download(attention.m()), download(attention.l()), download(attention.o())};
}

inline bool same_bits(const std::vector<Host>& a, const std::vector<Host>& b) {
  bool same = a.size() == b.size();
  for (std::size_t i = 0; same && i < a.size(); ++i) same = test::same_bits(a[i], b[i]);
  return same;
}

inline bool all_nan(const Host& host) {
  return std::all_of(host.values.begin(), host.values.end(), [](float x) { return std::isnan(x); });
}

}  // namespace test
