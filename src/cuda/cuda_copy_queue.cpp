// SPDX-License-Identifier: Apache-2.0
#include "cuda_copy_queue.h"

#include <vector>

#include "copy/copy_methods.h"
#include "copy/copy_pieces.h"
#include "cuda_check.h"
#include "device_guard.h"
#include "memory.h"

namespace tiledattn::cuda {

namespace {

class CudaEvent final : public StreamEvent {
 public:
  CudaEvent(int device, bool timed) : device_(device) {
    check(cudaEventCreateWithFlags(&event_, timed ? cudaEventDefault : cudaEventDisableTiming),
          "cudaEventCreateWithFlags");
  }
  ~CudaEvent() override {
    try {
      const DeviceGuard guard(device_);
      (void)cudaEventDestroy(event_);
    } catch (...) {  // the driver has gone before us
    }
  }
  CudaEvent(const CudaEvent&) = delete;
  CudaEvent& operator=(const CudaEvent&) = delete;
  cudaEvent_t native() const { return event_; }

 private:
  int device_;
  cudaEvent_t event_ = nullptr;
};

cudaEvent_t native(const StreamEvent& event) {
  return static_cast<const CudaEvent&>(event).native();
}

cudaStream_t native(const Stream& stream) { return static_cast<cudaStream_t>(stream.handle); }

class CudaCopyQueue final : public CopyQueue {
 public:
  explicit CudaCopyQueue(int device)
      : device_(device), rates_(copy_rates(device)), stream_{make_stream()} {}
  ~CudaCopyQueue() override {
    try {
      const DeviceGuard guard(device_);
      (void)cudaStreamSynchronize(native(stream_));
      (void)cudaStreamDestroy(native(stream_));
    } catch (...) {  // the driver has gone before us
    }
  }

  const Stream& stream() const override { return stream_; }
  bool immediate() const override { return false; }

  std::unique_ptr<StreamEvent> make_event(bool timed) const override {
    const DeviceGuard guard(device_);
    return std::make_unique<CudaEvent>(device_, timed);
  }

  void record(StreamEvent& event, const Stream& stream) const override {
    const DeviceGuard guard(device_);
    check(cudaEventRecord(native(event), native(stream)), "cudaEventRecord");
  }

  void order(const Stream& waiting, const StreamEvent& event) const override {
    const DeviceGuard guard(device_);
    check(cudaStreamWaitEvent(native(waiting), native(event), 0), "cudaStreamWaitEvent");
  }

  bool passed(const StreamEvent& event) const override {
    const cudaError_t status = cudaEventQuery(native(event));
    if (status == cudaErrorNotReady) {
      (void)cudaGetLastError();
      return false;
    }
    check(status, "cudaEventQuery");
    return true;
  }

  void wait(const StreamEvent& event) const override {
    check(cudaEventSynchronize(native(event)), "cudaEventSynchronize");
  }

  double seconds(const StreamEvent& from, const StreamEvent& to) const override {
    float milliseconds = 0;
    check(cudaEventElapsedTime(&milliseconds, native(from), native(to)), "cudaEventElapsedTime");
    return static_cast<double>(milliseconds) * 1e-3;
  }

  void copy(const std::vector<CopyPiece>& pieces) const override {
    const DeviceGuard guard(device_);
    const CopyPlan plan = plan_copies(pieces, rates_);
    copy_all(CopyMethod::kernel, plan.kernel);
    if (!copy_all(CopyMethod::batch, plan.batch)) copy_all(CopyMethod::each, plan.batch);
    copy_all(CopyMethod::each, plan.each);
  }

  void write(void* to, const void* from, std::int64_t bytes, const Stream& stream) const override {
    const DeviceGuard guard(device_);
    launch_write_words(to, from, bytes, native(stream));
  }

  void poison(void* data, std::int64_t bytes) const override {
    const DeviceGuard guard(device_);
    check(cudaMemsetAsync(data, 0xff, static_cast<std::size_t>(bytes), native(stream_)),
          "cudaMemsetAsync");
  }

  std::shared_ptr<void> allocate_host(std::int64_t bytes) const override {
    return allocate_mapped_memory(device_, bytes);
  }

 private:
  static cudaStream_t make_stream() {
    cudaStream_t stream = nullptr;
    check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
    return stream;
  }

  bool copy_all(CopyMethod method, const std::vector<CopyPiece>& pieces) const {
    return copy_by(method, pieces.data(), pieces.size(), native(stream_));
  }

  int device_;
  const CopyRates& rates_;
  Stream stream_;  // last: nothing that throws comes after it
};

}  // namespace

std::unique_ptr<CopyQueue> make_copy_queue(int device) {
  return std::make_unique<CudaCopyQueue>(device);
}

}  // namespace tiledattn::cuda
