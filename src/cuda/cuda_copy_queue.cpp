// SPDX-License-Identifier: Apache-2.0
#include "cuda_copy_queue.h"

#include <vector>

#include "cuda_check.h"
#include "device_guard.h"
#include "memory.h"

namespace tiledattn::cuda {

namespace {

class CudaEvent final : public StreamEvent {
 public:
  explicit CudaEvent(int device) : device_(device) {
    check(cudaEventCreate(&event_), "cudaEventCreate");
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
  explicit CudaCopyQueue(int device) : device_(device) {
    cudaStream_t stream = nullptr;
    check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
    stream_ = {stream};
  }
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

  std::unique_ptr<StreamEvent> make_event() const override {
    const DeviceGuard guard(device_);
    return std::make_unique<CudaEvent>(device_);
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
    const bool batched = pieces.size() > 1 && copy_batch(pieces);
    for (const CopyPiece& piece : pieces) {
      if (batched && piece.pinned) continue;
      check(cudaMemcpyAsync(piece.to, piece.from, static_cast<std::size_t>(piece.bytes),
                            cudaMemcpyDefault, native(stream_)),
            "cudaMemcpyAsync");
    }
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
  /// All pinned pieces in one call, which is several times as fast for small ones. False where the
  /// driver does not know how.
  bool copy_batch([[maybe_unused]] const std::vector<CopyPiece>& pieces) const {
#if CUDART_VERSION >= 13000
    if (!batches_) return false;
    std::vector<void*> to;
    std::vector<const void*> from;
    std::vector<std::size_t> bytes;
    for (const CopyPiece& piece : pieces) {
      if (!piece.pinned) continue;
      to.push_back(piece.to);
      from.push_back(piece.from);
      bytes.push_back(static_cast<std::size_t>(piece.bytes));
    }
    if (to.empty()) return true;
    // In the order of the stream: what the stream has been made to wait for may write the sources.
    cudaMemcpyAttributes attributes{};
    attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
    std::size_t first = 0;
    const cudaError_t status = cudaMemcpyBatchAsync(to.data(), from.data(), bytes.data(), to.size(),
                                                    &attributes, &first, 1, native(stream_));
    if (status == cudaErrorNotSupported || status == cudaErrorCallRequiresNewerDriver) {
      (void)cudaGetLastError();
      batches_ = false;
      return false;
    }
    check(status, "cudaMemcpyBatchAsync");
    return true;
#else
    return false;
#endif
  }

  int device_;
  Stream stream_;
  mutable bool batches_ = true;  // one thread at a time uses a queue
};

}  // namespace

std::unique_ptr<CopyQueue> make_copy_queue(int device) {
  return std::make_unique<CudaCopyQueue>(device);
}

}  // namespace tiledattn::cuda
