// SPDX-License-Identifier: Apache-2.0
// The CUDA backend: each function makes its device current, calls the file that does the work, and
// puts the former device back. Nothing here or elsewhere in this folder touches the driver before
// the first call.
//
// Rules of this folder: device code in .cu and .cuh alone; a folder for each kernel family, with a
// plain C++ header that declares one launch function for each variant; common/ includes nothing
// outside itself but the core's headers, cuda_check.h and device_guard.h.
#include <cuda_runtime_api.h>

#include <string>
#include <utility>

#include "attend.h"
#include "backend.h"
#include "capability.h"
#include "capture.h"
#include "cuda_check.h"
#include "cuda_copy_queue.h"
#include "device_guard.h"
#include "devices.h"
#include "fault_log.h"
#include "gpu_architectures.h"
#include "memory.h"
#include "merge/merge.h"
#include "pin_host.h"
#include "tiledattn/error.h"
#include "write_kv/write_kv.h"

namespace tiledattn {

namespace {

using cuda::check;
using cuda::DeviceGuard;

cudaStream_t native(const Stream& stream) { return static_cast<cudaStream_t>(stream.handle); }

class CudaBackend : public Backend {
 public:
  int device_count() const override { return static_cast<int>(cuda::devices().usable.size()); }
  std::string why_unavailable() const override { return cuda::devices().why_none; }

  std::string device_name(int index) const override {
    const auto& usable = cuda::devices().usable;
    if (index < 0 || index >= static_cast<int>(usable.size())) {
      throw ValueError("device: got cuda:" + std::to_string(index) + "; this machine has " +
                       std::to_string(usable.size()) + " usable CUDA device(s)");
    }
    return usable[static_cast<std::size_t>(index)].name;
  }

  int compute_capability(int index) const override { return cuda::compute_capability(index); }

  std::string build_description() const override {
    return std::to_string(CUDART_VERSION / 1000) + "." +
           std::to_string(CUDART_VERSION % 1000 / 10) + " for " +
           architecture_names(TILEDATTN_CUDA_ARCHITECTURES);
  }

  std::shared_ptr<void> allocate(int index, std::int64_t bytes) const override {
    return cuda::allocate_device_memory(index, bytes);
  }

  void copy(void* to, Device to_device, const void* from, Device from_device, std::int64_t bytes,
            const Stream& stream) const override {
    if (bytes == 0) return;
    const DeviceGuard guard(from_device.is_cpu() ? to_device.index : from_device.index);
    const bool between_gpus =
        !to_device.is_cpu() && !from_device.is_cpu() && to_device.index != from_device.index;
    const auto count = static_cast<std::size_t>(bytes);
    if (between_gpus) {
      check(
          cudaMemcpyPeerAsync(to, to_device.index, from, from_device.index, count, native(stream)),
          "cudaMemcpyPeerAsync");
    } else {
      check(cudaMemcpyAsync(to, from, count, cudaMemcpyDefault, native(stream)), "cudaMemcpyAsync");
    }
    // Later work on the other device is on no stream that could wait for this one.
    if (between_gpus || to_device.is_cpu() || from_device.is_cpu()) {
      check(cudaStreamSynchronize(native(stream)), "cudaStreamSynchronize");
    }
  }

  std::shared_ptr<FaultLog> make_fault_log(int index) const override {
    return cuda::make_fault_log(index);
  }

  std::shared_ptr<void> pin_host(void* data, std::int64_t bytes) const override {
    return cuda::pin_host(data, bytes);
  }

  std::unique_ptr<CopyQueue> make_copy_queue(int index) const override {
    const DeviceGuard guard(index);
    return cuda::make_copy_queue(index);
  }

  void synchronize(int index, const Stream& stream) const override {
    const DeviceGuard guard(index);
    check(cudaStreamSynchronize(native(stream)), "cudaStreamSynchronize");
  }

  void synchronize_device(int index) const override {
    const DeviceGuard guard(index);
    check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  }

  void order(int index, const Stream& waiting, const Stream& on) const override {
    if (cuda::same_stream(native(waiting), native(on))) return;
    const DeviceGuard guard(index);
    cuda::order_streams(index, native(waiting), native(on));
  }

  std::uint64_t capture_id(int index, const Stream& stream) const override {
    if (cuda::is_legacy(native(stream))) return 0;  // which nobody can capture
    const DeviceGuard guard(index);
    return cuda::capture_id(native(stream));
  }

  std::uint64_t stream_id(int index, const Stream& stream) const override {
    if (cuda::is_legacy(native(stream))) return 0;
    const DeviceGuard guard(index);
    return cuda::stream_id(native(stream));
  }

  void retain_in_capture(int index, const Stream& stream,
                         std::shared_ptr<void> owner) const override {
    const DeviceGuard guard(index);
    cuda::retain_in_capture(native(stream), std::move(owner));
  }

  void attend(const AttentionProblem& problem, const Plan& plan, void* scratch, int index,
              const Stream& stream) const override {
    const DeviceGuard guard(index);
    cuda::attend(problem, plan, scratch, native(stream));
  }

  void finalize(const FinalizeProblem& problem, int index, const Stream& stream) const override {
    const DeviceGuard guard(index);
    cuda::launch_finalize(problem, native(stream));
  }

  void reset_state(const StateView& state, std::int64_t rows, std::int64_t head_dim_v, int index,
                   const Stream& stream) const override {
    const DeviceGuard guard(index);
    cuda::launch_reset_state(state, rows, head_dim_v, native(stream));
  }

  void merge_states(const MergeStatesProblem& problem, int index,
                    const Stream& stream) const override {
    const DeviceGuard guard(index);
    cuda::launch_merge_states(problem, native(stream));
  }

  void merge_attention(const MergeAttentionProblem& problem, int index,
                       const Stream& stream) const override {
    const DeviceGuard guard(index);
    cuda::launch_merge_attention(problem, native(stream));
  }

  void write_kv(const WriteKvProblem& problem, int index, const Stream& stream) const override {
    const DeviceGuard guard(index);
    // On a later GPU the code may be that of an older one, which waits for no kernel before it.
    const bool overlaps = compute_capability(index) == 90;
    cuda::launch_write_kv(problem, overlaps, native(stream));
  }
};

}  // namespace

const Backend* cuda_backend() {
  static const CudaBackend backend;
  return &backend;
}

}  // namespace tiledattn
