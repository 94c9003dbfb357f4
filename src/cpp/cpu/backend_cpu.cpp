// SPDX-License-Identifier: Apache-2.0
// The CPU as a backend: memory, and the launches that are simple loops over rows. Attention itself
// is attend.cpp.
#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <string>

#include "backend.h"
#include "checks.h"
#include "cpu/allocate.h"
#include "cpu/attend.h"
#include "cpu/convert.h"
#include "cpu/isa.h"
#include "cpu/pool.h"
#include "cpu/rows.h"
#include "tiledattn/error.h"
#include "tiledattn/one_shot.h"

namespace tiledattn {
namespace {

using cpu::parallel_for;
using cpu::Row;

constexpr float kInfinity = std::numeric_limits<float>::infinity();

/// Calls f(row) for all rows, some at a time on each thread.
template <typename F>
void for_each_row(std::int64_t num_rows, const F& f) {
  constexpr std::int64_t kRowsPerTask = 64;
  parallel_for((num_rows + kRowsPerTask - 1) / kRowsPerTask, [&](std::int64_t task) {
    const std::int64_t end = std::min((task + 1) * kRowsPerTask, num_rows);
    for (std::int64_t row = task * kRowsPerTask; row < end; ++row) f(row);
  });
}

Row row_at(const StateView& state, std::int64_t row, std::int64_t head_dim_v) {
  return {state.m + row, state.l + row, state.o + row * head_dim_v};
}

/// Output row, as float32, and its lse of a result at (i, j, k).
struct ResultRow {
  const void* out;
  float lse;
};

ResultRow result_at(const OutputView& view, std::int64_t i, std::int64_t j, std::int64_t k) {
  return {cpu::advance(static_cast<const void*>(view.data), view.row_offset(i, j, k), view.dtype),
          view.lse[view.lse_offset(i, j, k)]};
}

/// One row of merge_attention, `scale` * lse being the natural logarithm; returns the lse.
float merge_results(const MergeAttentionProblem& p, const ResultRow& a, const ResultRow& b,
                    void* out) {
  constexpr std::int64_t kPart = 256;  // elements at a time: these rows may have any length
  const auto convert = [&](const void* from, double weight, float* to, std::int64_t first,
                           std::int64_t count) {
    float row[kPart];
    cpu::load_row(cpu::advance(from, first, p.out.dtype), p.out.dtype, count, row);
    for (std::int64_t d = 0; d < count; ++d)
      to[d] += static_cast<float>(weight * static_cast<double>(row[d]));
  };
  if (a.lse == -kInfinity || b.lse == -kInfinity) {
    const ResultRow& full = a.lse == -kInfinity ? b : a;
    const auto bytes = static_cast<std::size_t>(p.head_dim_v * item_bytes(p.out.dtype));
    if (full.lse == -kInfinity) {
      std::memset(out, 0, bytes);
    } else {
      std::memmove(out, full.out, bytes);
    }
    return full.lse;
  }
  const double scale = static_cast<double>(p.lse_scale);
  const double lse_a = static_cast<double>(a.lse) * scale;
  const double lse_b = static_cast<double>(b.lse) * scale;
  const double top = std::max(lse_a, lse_b);
  const double weight_a = std::exp(lse_a - top);
  const double weight_b = std::exp(lse_b - top);
  const double total = weight_a + weight_b;
  for (std::int64_t first = 0; first < p.head_dim_v; first += kPart) {
    const std::int64_t count = std::min(kPart, p.head_dim_v - first);
    float sum[kPart] = {};
    convert(a.out, weight_a / total, sum, first, count);
    convert(b.out, weight_b / total, sum, first, count);
    cpu::store_row(sum, count, p.out.dtype, cpu::advance(out, first, p.out.dtype));
  }
  return static_cast<float>((top + std::log(total)) / scale);
}

/// A row of any length into a quantised one.
void quantize(const void* from, DType from_dtype, std::int64_t count, float scale, DType to_dtype,
              void* to) {
  constexpr std::int64_t kPart = 256;  // elements at a time
  for (std::int64_t first = 0; first < count; first += kPart) {
    const std::int64_t size = std::min(kPart, count - first);
    float part[kPart];
    cpu::load_row(cpu::advance(from, first, from_dtype), from_dtype, size, part);
    cpu::quantize_row(part, size, to_dtype, scale, cpu::advance(to, first, to_dtype));
  }
}

class CpuBackend final : public Backend {
 public:
  int device_count() const override { return 1; }
  std::string why_unavailable() const override { return ""; }
  std::string device_name(int) const override { return "CPU (" + cpu_isa() + ")"; }
  int compute_capability(int) const override { return 0; }
  std::string build_description() const override { return cpu_isa(); }

  std::shared_ptr<void> allocate(int, std::int64_t bytes) const override {
    // Reading through huge pages is up to twice as fast as through small ones.
    constexpr std::int64_t kHugePage = std::int64_t{2} << 20;
    const bool large = bytes >= 2 * kHugePage;
    const std::int64_t alignment = large ? kHugePage : 256;
    constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max() - kHugePage;
    void* memory = nullptr;
    if (bytes >= 0 && bytes <= kMost) {
      const std::int64_t rounded =
          std::max(bytes + alignment - 1, alignment) / alignment * alignment;
      memory = std::aligned_alloc(static_cast<std::size_t>(alignment),
                                  static_cast<std::size_t>(rounded));
#if defined(MADV_HUGEPAGE)
      if (memory != nullptr && large)
        madvise(memory, static_cast<std::size_t>(rounded), MADV_HUGEPAGE);
#endif
    }
    if (memory == nullptr) cpu::throw_no_memory(std::to_string(bytes));
    return {memory, std::free};
  }

  void copy(void* to, Device, const void* from, Device, std::int64_t bytes,
            const Stream&) const override {
    if (bytes > 0) std::memmove(to, from, static_cast<std::size_t>(bytes));
  }
  std::shared_ptr<FaultLog> make_fault_log(int) const override { return nullptr; }
  std::shared_ptr<void> pin_host(void*, std::int64_t) const override { return nullptr; }
  std::unique_ptr<CopyQueue> make_copy_queue(int) const override { return make_host_copy_queue(); }

  void synchronize(int, const Stream&) const override {}
  void synchronize_device(int) const override {}
  void order(int, const Stream&, const Stream&) const override {}
  std::uint64_t capture_id(int, const Stream&) const override { return 0; }
  std::uint64_t stream_id(int, const Stream&) const override { return 0; }
  void retain_in_capture(int, const Stream&, std::shared_ptr<void>) const override {}

  void attend(const AttentionProblem& problem, const Plan& plan, void* scratch, int,
              const Stream&) const override {
    cpu::attend(problem, plan, scratch);
  }

  void attend_in_turn(const std::vector<AttentionStep>& steps, void* scratch, int,
                      const Stream&) const override {
    cpu::attend_in_turn(steps, scratch);
  }

  void finalize(const FinalizeProblem& p, int, const Stream&) const override {
    const std::int64_t seq_rows = p.q_len * p.num_q_heads;
    for_each_row(p.num_seqs * seq_rows, [&](std::int64_t row) {
      const std::int64_t seq = row / seq_rows;
      const std::int64_t token = row % seq_rows / p.num_q_heads;
      const std::int64_t head = row % p.num_q_heads;
      const Row state = cpu::state_row(p.state, seq, token, head, p.num_q_heads, p.head_dim_v);
      cpu::write_result(p.out, p.sinks, seq, token, head, state, p.head_dim_v);
    });
  }

  void reset_state(const StateView& state, std::int64_t rows, std::int64_t head_dim_v, int,
                   const Stream&) const override {
    for_each_row(rows, [&](std::int64_t row) {
      cpu::clear_row(row_at(state, row, head_dim_v), head_dim_v);
    });
  }

  void merge_states(const MergeStatesProblem& p, int, const Stream&) const override {
    for_each_row(p.num_rows, [&](std::int64_t row) {
      cpu::merge_row(row_at(p.into, row, p.head_dim_v), row_at(p.from, row, p.head_dim_v),
                     p.head_dim_v);
    });
  }

  void merge_attention(const MergeAttentionProblem& p, int, const Stream&) const override {
    for_each_row(p.shape[0] * p.shape[1] * p.shape[2], [&](std::int64_t row) {
      const std::int64_t i = row / (p.shape[1] * p.shape[2]);
      const std::int64_t j = row / p.shape[2] % p.shape[1];
      const std::int64_t k = row % p.shape[2];
      const OutputView& out = p.out;
      void* const to = cpu::advance(out.data, out.row_offset(i, j, k), out.dtype);
      out.lse[out.lse_offset(i, j, k)] =
          merge_results(p, result_at(p.a, i, j, k), result_at(p.b, i, j, k), to);
    });
  }

  void write_kv(const WriteKvProblem& p, int, const Stream&) const override {
    for (std::int64_t token = 0; token < p.num_tokens; ++token) {
      const Fault fault = check_slot(p, token);
      if (fault.found()) throw_fault(fault);
    }
    // One task for each head of K and of V: where a slot is named twice, the last token stays,
    // whatever the threads.
    parallel_for(2 * p.num_kv_heads, [&](std::int64_t task) {
      const std::int64_t head = task / 2;
      const bool is_k = task % 2 == 0;
      const PoolView& from = is_k ? p.k : p.v;
      const PoolView& pool = is_k ? p.k_pool : p.v_pool;
      const ScaleView& scale = is_k ? p.k_scale : p.v_scale;
      const std::int64_t dim = is_k ? p.head_dim : p.head_dim_v;
      for (std::int64_t token = 0; token < p.num_tokens; ++token) {
        const std::int64_t slot = p.slot_mapping.at(token);
        if (slot < 0) continue;
        const KeyPlace place{slot / p.block_size, slot % p.block_size};
        const void* const source =
            cpu::advance(from.data, pool_offset(from, {0, token}, head), p.dtype);
        void* const target = cpu::advance(const_cast<void*>(pool.data),
                                          pool_offset(pool, place, head), p.pool_dtype);
        if (is_quantized(p.pool_dtype)) {
          quantize(source, p.dtype, dim, scale.at(place.block, place.token, head), p.pool_dtype,
                   target);
        } else {
          std::memcpy(target, source, static_cast<std::size_t>(dim * item_bytes(p.dtype)));
        }
      }
    });
  }
};

}  // namespace

const Backend& cpu_backend() {
  static const CpuBackend backend;
  return backend;
}

}  // namespace tiledattn
