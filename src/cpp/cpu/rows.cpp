// SPDX-License-Identifier: Apache-2.0
#include "cpu/rows.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "cpu/convert.h"

namespace tiledattn::cpu {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

/// The larger; NaN when either is.
float larger(float a, float b) { return std::isnan(b) || b > a ? b : a; }

std::size_t row_bytes(std::int64_t head_dim_v) {
  return static_cast<std::size_t>(head_dim_v) * sizeof(float);
}

}  // namespace

bool is_empty(const Row& row) { return *row.m == -kInfinity && *row.l == 0.0f; }

void clear_row(const Row& row, std::int64_t head_dim_v) {
  *row.m = -kInfinity;
  *row.l = 0.0f;
  std::fill_n(row.o, head_dim_v, 0.0f);
}

void copy_row(const Row& from, const Row& into, std::int64_t head_dim_v) {
  *into.m = *from.m;
  *into.l = *from.l;
  std::memcpy(into.o, from.o, row_bytes(head_dim_v));
}

void merge_row(const Row& into, const Row& from, std::int64_t head_dim_v) {
  if (is_empty(from)) return;
  if (is_empty(into)) return copy_row(from, into, head_dim_v);
  const float m = larger(*into.m, *from.m);
  const float keep = std::exp(*into.m - m);
  const float add = std::exp(*from.m - m);
  *into.m = m;
  *into.l = *into.l * keep + *from.l * add;
  for (std::int64_t d = 0; d < head_dim_v; ++d) into.o[d] = into.o[d] * keep + from.o[d] * add;
}

Row state_row(const StateView& state, std::int64_t seq, std::int64_t token, std::int64_t head,
              std::int64_t num_q_heads, std::int64_t head_dim_v) {
  const std::int64_t row = state.row(seq, token, head, num_q_heads);
  return {state.m + row, state.l + row, state.o + row * head_dim_v};
}

void write_result(const OutputView& out, const float* sinks, std::int64_t seq, std::int64_t token,
                  std::int64_t head, const Row& row, std::int64_t head_dim_v) {
  float m = *row.m;
  float l = *row.l;
  float keep = 1.0f;
  if (sinks != nullptr && sinks[head] != -kInfinity) {
    m = larger(m, sinks[head]);
    keep = std::exp(*row.m - m);
    l = l * keep + std::exp(sinks[head] - m);
  }
  float result[kMaxHeadDim];
  void* to = advance(out.data, out.row_offset(seq, token, head), out.dtype);
  if (l == 0.0f) {
    std::fill_n(result, head_dim_v, 0.0f);
  } else {
    for (std::int64_t d = 0; d < head_dim_v; ++d) result[d] = row.o[d] * keep / l;
  }
  store_row(result, head_dim_v, out.dtype, to);
  if (out.lse != nullptr) {
    out.lse[out.lse_offset(seq, token, head)] = l == 0.0f ? -kInfinity : m + std::log(l);
  }
}

}  // namespace tiledattn::cpu
