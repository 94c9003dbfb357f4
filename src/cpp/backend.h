// SPDX-License-Identifier: Apache-2.0
// What a backend supplies: memory, streams and the launches. One for the CPU, one for CUDA; callers
// know only this.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "copy_queue.h"
#include "plan.h"
#include "problem.h"
#include "tiledattn/tensor.h"

namespace tiledattn {

/// Device-found faults of one object or one device. The CPU finds faults before it writes anything
/// and needs none.
class FaultLog {
 public:
  virtual ~FaultLog() = default;
  /// What problems carry to the kernels.
  virtual FaultRecord* device_record() = 0;
  /// The fault that a kernel has recorded so far, which is thereby cleared; nothing found
  /// otherwise. Does not wait.
  virtual Fault take() = 0;
};

/// All functions throw CudaError or MemoryError, leave the current device as it was, and launch on
/// `stream` without waiting unless they say so. Problems are right as far as the host can see; what
/// only the device can see is checked by check_sequence, check_block and check_slot: on the CPU
/// before anything is written (throw_fault of checks.h), on a GPU into problem.faults, with NaN as
/// that sequence's output, lse and state.
class Backend {
 public:
  virtual ~Backend() = default;

  // Devices.
  virtual int device_count() const = 0;
  /// Why device_count() is 0; "" otherwise.
  virtual std::string why_unavailable() const = 0;
  /// "NVIDIA H200 (sm_90)".
  virtual std::string device_name(int index) const = 0;
  /// 90 for compute capability 9.0: which kernels plans may choose. 0 on the CPU, and where the
  /// environment asks for the plain kernels; 80 where it asks for the portable one.
  virtual int compute_capability(int index) const = 0;
  /// What the build holds: "13.0 for sm_80, sm_90a"; the CPU's instruction set.
  virtual std::string build_description() const = 0;

  // Memory.
  /// At least `bytes` bytes, 256-byte aligned, on a GPU zero; freeing is safe at any time, also in
  /// a capture or from a graph.
  virtual std::shared_ptr<void> allocate(int index, std::int64_t bytes) const = 0;
  /// Copy bytes; either side may be on the CPU or on another device of this backend. Waits when one
  /// side is host memory.
  virtual void copy(void* to, Device to_device, const void* from, Device from_device,
                    std::int64_t bytes, const Stream& stream) const = 0;
  virtual std::shared_ptr<FaultLog> make_fault_log(int index) const = 0;  ///< null on the CPU
  /// Pin host memory of the caller for as long as the result lives; null where that is so already,
  /// or means nothing. MemoryError or CudaError when it cannot be pinned.
  virtual std::shared_ptr<void> pin_host(void* data, std::int64_t bytes) const = 0;
  virtual std::unique_ptr<CopyQueue> make_copy_queue(int index) const = 0;

  // Streams. On the CPU: nothing to do, capture id 0.
  virtual void synchronize(int index, const Stream& stream) const = 0;
  virtual void synchronize_device(int index) const = 0;
  /// Work put on `waiting` from now on starts after what is on `on` now. Does nothing when either
  /// is capturing.
  virtual void order(int index, const Stream& waiting, const Stream& on) const = 0;
  /// A number that names the capture that `stream` is in; 0 outside.
  virtual std::uint64_t capture_id(int index, const Stream& stream) const = 0;
  /// A number that no other stream has or had, also not one that was at the same address before. 0
  /// for the legacy default stream.
  virtual std::uint64_t stream_id(int index, const Stream& stream) const = 0;
  /// Does nothing outside a capture. Keep `owner` alive as long as the graph that `stream` is
  /// capturing into, and what is made from it.
  virtual void retain_in_capture(int index, const Stream& stream,
                                 std::shared_ptr<void> owner) const = 0;

  // Launches.
  virtual void attend(const AttentionProblem& problem, const Plan& plan, void* scratch, int index,
                      const Stream& stream) const = 0;
  /// One after the other, as far as results go: tiles of one step: a q of the same sizes, and the
  /// same state.
  virtual void attend_in_turn(const std::vector<AttentionStep>& steps, void* scratch, int index,
                              const Stream& stream) const {
    for (const AttentionStep& step : steps) attend(step.problem, step.plan, scratch, index, stream);
  }
  virtual void finalize(const FinalizeProblem& problem, int index, const Stream& stream) const = 0;
  /// Make `rows` rows of a state empty: (-inf, 0, 0).
  virtual void reset_state(const StateView& state, std::int64_t rows, std::int64_t head_dim_v,
                           int index, const Stream& stream) const = 0;
  virtual void merge_states(const MergeStatesProblem& problem, int index,
                            const Stream& stream) const = 0;
  virtual void merge_attention(const MergeAttentionProblem& problem, int index,
                               const Stream& stream) const = 0;
  virtual void write_kv(const WriteKvProblem& problem, int index, const Stream& stream) const = 0;
};

/// The backends of this build. cuda_backend() is null when it has no CUDA kernels.
const Backend& cpu_backend();
const Backend* cuda_backend();

/// Why no GPU can be used; "" when one can.
std::string why_no_cuda();

/// The backend of a device. ValueError when there is no such device, saying why.
const Backend& backend_for(Device device);

/// Instruction sets of the CPU backend that this machine has, best first, and the one in use.
std::vector<std::string> cpu_isas();
std::string cpu_isa();

}  // namespace tiledattn
