// SPDX-License-Identifier: Apache-2.0
// Attention in double precision, written for clarity: the judge of every result.
#pragma once

#include <algorithm>
#include <optional>

#include "arrays.h"

namespace test {

/// How the reference makes scores and which keys it shows.
struct Rules {
  std::optional<double> softmax_scale = {};
  double softcap = 0;
  std::optional<std::int64_t> left = {};
  std::optional<std::int64_t> right = {};
  bool causal = false;
  bool paged = false;  // tokens from before the sequence began see nothing
  std::optional<Host> sinks = {};

  /// The same rules for a call; `array` keeps the sinks alive.
  ScoreOptions options(Device device, Array& array) const {
    ScoreOptions options;
    options.softmax_scale = softmax_scale;
    options.softcap = softcap;
    options.window = {left, right};
    if (sinks) {
      array = Array(*sinks, DType::float32, device);
      options.sinks = array.tensor();
    }
    return options;
  }
};

/// Values in double precision, C order.
struct Result {
  std::vector<double> out;  ///< rows x Dv
  std::vector<double> lse;  ///< rows
  std::vector<double> m;    ///< the running state, without the sink
  std::vector<double> l;
  std::vector<double> o;

  void append(const Result& more) {
    out.insert(out.end(), more.out.begin(), more.out.end());
    lse.insert(lse.end(), more.lse.begin(), more.lse.end());
    m.insert(m.end(), more.m.begin(), more.m.end());
    l.insert(l.end(), more.l.begin(), more.l.end());
    o.insert(o.end(), more.o.begin(), more.o.end());
  }
};

/// One sequence: q [Sq, Hq, D], k [Sk, Hk, D], v [Sk, Hk, Dv]. Key j is at position j, query token
/// i at `position` + i; nothing: the last token is at the last key.
inline Result attend(const Host& q, const Host& k, const Host& v, const Rules& rules,
                     std::optional<std::int64_t> position = {}) {
  const std::int64_t q_len = q.shape[0], num_q_heads = q.shape[1], head_dim = q.shape[2];
  const std::int64_t kv_len = k.shape[0], num_kv_heads = k.shape[1], head_dim_v = v.shape[2];
  const std::int64_t first = position.value_or(kv_len - q_len);
  const double scale = rules.softmax_scale.value_or(1 / std::sqrt(static_cast<double>(head_dim)));
  const double infinity = std::numeric_limits<double>::infinity();
  Result result;
  for (std::int64_t i = 0; i < q_len; ++i) {
    for (std::int64_t head = 0; head < num_q_heads; ++head) {
      const std::int64_t kv_head = head / (num_q_heads / num_kv_heads);
      std::vector<std::int64_t> keys;
      std::vector<double> scores;
      double m = -infinity;
      for (std::int64_t j = 0; j < kv_len; ++j) {
        const std::int64_t ahead = j - (first + i);
        if (rules.causal && ahead > 0) continue;
        if (rules.paged && first + i < 0) continue;
        if (rules.right && ahead > *rules.right) continue;
        if (rules.left && -ahead > *rules.left) continue;
        double score = 0;
        for (std::int64_t d = 0; d < head_dim; ++d) {
          score += static_cast<double>(q[q.at({i, head, d})]) * k[k.at({j, kv_head, d})];
        }
        score *= scale;
        if (rules.softcap > 0) score = rules.softcap * std::tanh(score / rules.softcap);
        keys.push_back(j);
        scores.push_back(score);
        m = std::max(m, score);
      }
      double l = 0;
      std::vector<double> o(static_cast<std::size_t>(head_dim_v));
      for (std::size_t n = 0; n < keys.size(); ++n) {
        const double weight = std::exp(scores[n] - m);
        l += weight;
        for (std::int64_t d = 0; d < head_dim_v; ++d) {
          o[static_cast<std::size_t>(d)] += weight * v[v.at({keys[n], kv_head, d})];
        }
      }
      result.m.push_back(m);
      result.l.push_back(l);
      double lse = l > 0 ? m + std::log(l) : -infinity;
      double divisor = l;
      if (rules.sinks) {
        // The sink is one more score, without a value.
        const double sink = (*rules.sinks)[head];
        const double top = std::max(m, sink);
        const double all = (l > 0 ? l * std::exp(m - top) : 0) + std::exp(sink - top);
        lse = top + std::log(all);
        divisor = l > 0 ? all * std::exp(top - m) : 0;
      }
      for (const double value : o) {
        result.o.push_back(value);
        result.out.push_back(divisor > 0 ? value / divisor : 0);
      }
      result.lse.push_back(lse);
    }
  }
  return result;
}

/// Rows begin .. end - 1 of the first dimension.
inline Host rows(const Host& host, std::int64_t begin, std::int64_t end) {
  Host part;
  part.shape = host.shape;
  part.shape[0] = end - begin;
  const std::int64_t row = host.shape[0] > 0 ? host.size() / host.shape[0] : 0;
  part.values.assign(host.values.begin() + begin * row, host.values.begin() + end * row);
  return part;
}

/// Element `i` of the first dimension, which goes.
inline Host element(const Host& host, std::int64_t i) {
  Host part = rows(host, i, i + 1);
  part.shape.erase(part.shape.begin());
  return part;
}

/// A batch: q [B, Sq, Hq, D], k [B, Sk, Hk, D], v [B, Sk, Hk, Dv].
inline Result attend_batch(const Host& q, const Host& k, const Host& v, const Rules& rules) {
  Result result;
  for (std::int64_t b = 0; b < q.shape[0]; ++b) {
    result.append(attend(element(q, b), element(k, b), element(v, b), rules));
  }
  return result;
}

/// The first `length` tokens of a sequence out of a pool [num_blocks, P, H, D].
inline Host gather(const Host& pool, const std::vector<std::int64_t>& blocks, std::int64_t length) {
  const std::int64_t block_size = pool.shape[1];
  const std::int64_t token = pool.shape[2] * pool.shape[3];
  Host sequence({length, pool.shape[2], pool.shape[3]});
  for (std::int64_t j = 0; j < length; ++j) {
    const std::int64_t slot =
        blocks[static_cast<std::size_t>(j / block_size)] * block_size + j % block_size;
    std::copy_n(pool.values.begin() + slot * token, token, sequence.values.begin() + j * token);
  }
  return sequence;
}

/// How far a result may be from the reference: the 2-norm of the error over that of the result.
inline double error_bound(DType dtype) {
  return dtype == DType::float32 ? 1e-5 : dtype == DType::float16 ? 2e-3 : 1e-2;
}

/// `out` and `lse` against the reference, as a whole and row by row; empty rows have to be exact.
inline void check_result(const char* file, int line, const Host& out,
                         const std::vector<double>& want, DType dtype) {
  record(out.values.size() == want.size(), file, line, "another size than the reference");
  if (out.values.size() != want.size() || want.empty()) return;
  const auto dim = static_cast<std::size_t>(out.shape.back());
  double error = 0, norm = 0, worst = 0;
  for (std::size_t row = 0; row < want.size(); row += dim) {
    double row_error = 0, row_norm = 0;
    for (std::size_t d = row; d < row + dim; ++d) {
      const double difference = static_cast<double>(out.values[d]) - want[d];
      row_error += difference * difference;
      row_norm += want[d] * want[d];
    }
    record(row_norm > 0 || row_error == 0, file, line,
           "row " + std::to_string(row / dim) + " is not 0 as it should be");
    if (row_norm > 0) worst = std::max(worst, std::sqrt(row_error / row_norm));
    error += row_error;
    norm += row_norm;
  }
  const double whole = norm > 0 ? std::sqrt(error / norm) : 0;
  const double bound = error_bound(dtype);
  record(whole <= bound, file, line,
         "error " + std::to_string(whole) + " is over " + std::to_string(bound));
  record(
      worst <= 4 * bound, file, line,
      "the worst row's error " + std::to_string(worst) + " is over " + std::to_string(4 * bound));
}

inline void check_lse(const char* file, int line, const Host& lse,
                      const std::vector<double>& want) {
  record(lse.values.size() == want.size(), file, line, "lse of another size than the reference");
  for (std::size_t i = 0; i < std::min(want.size(), lse.values.size()); ++i) {
    record(close(lse.values[i], want[i], 1e-3 + 1e-5 * std::fabs(want[i])), file, line,
           "lse row " + std::to_string(i) + " is " + std::to_string(lse.values[i]) + "; expected " +
               std::to_string(want[i]));
  }
}

}  // namespace test

#define CHECK_RESULT(out, want, dtype) test::check_result(__FILE__, __LINE__, out, want, dtype)
#define CHECK_LSE(lse, want) test::check_lse(__FILE__, __LINE__, lse, want)
