// SPDX-License-Identifier: Apache-2.0
#include "capture.h"

#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "cuda_check.h"
#include "memory.h"

namespace tiledattn::cuda {

bool is_legacy(cudaStream_t stream) { return stream == nullptr || stream == cudaStreamLegacy; }

bool same_stream(cudaStream_t a, cudaStream_t b) {
  return a == b || (is_legacy(a) && is_legacy(b));
}

namespace {

struct Capture {
  bool active = false;
  std::uint64_t id = 0;
  cudaGraph_t graph = nullptr;
};

Capture capture_of(cudaStream_t stream) {
  // Nobody can capture it; and the driver answers with an error while another stream is captured.
  if (is_legacy(stream)) return {};
  cudaStreamCaptureStatus state = cudaStreamCaptureStatusNone;
  unsigned long long id = 0;
  Capture capture;
#if CUDART_VERSION >= 13000
  const cudaError_t status =
      cudaStreamGetCaptureInfo(stream, &state, &id, &capture.graph, nullptr, nullptr, nullptr);
#else
  const cudaError_t status =
      cudaStreamGetCaptureInfo_v2(stream, &state, &id, &capture.graph, nullptr, nullptr);
#endif
  check(status, "cudaStreamGetCaptureInfo");
  capture.active = state == cudaStreamCaptureStatusActive;
  capture.id = id;
  return capture;
}

/// Called by the driver, on a thread of its own choice, where no CUDA function may be called.
void release_owner(void* owner) {
  const NoCudaCalls no_cuda_calls;
  delete static_cast<std::shared_ptr<void>*>(owner);
}

/// Events to order streams with. They can be used again at once: a wait refers to the record before
/// it.
class EventPool {
 public:
  cudaEvent_t take(int device) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      std::vector<cudaEvent_t>& events = events_[device];
      if (!events.empty()) {
        const cudaEvent_t event = events.back();
        events.pop_back();
        return event;
      }
    }
    cudaEvent_t event = nullptr;
    check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreateWithFlags");
    return event;
  }
  void put_back(int device, cudaEvent_t event) {
    const std::lock_guard<std::mutex> lock(mutex_);
    events_[device].push_back(event);
  }

 private:
  std::mutex mutex_;
  std::map<int, std::vector<cudaEvent_t>> events_;
};

/// Never destroyed: the driver may be gone before static objects are.
EventPool& event_pool() {
  static EventPool& pool = *new EventPool;
  return pool;
}

}  // namespace

std::uint64_t capture_id(cudaStream_t stream) {
  const Capture capture = capture_of(stream);
  // The driver does not say that no capture is called 0.
  return capture.active ? capture.id + 1 : 0;
}

std::uint64_t stream_id(cudaStream_t stream) {
  unsigned long long id = 0;
  check(cudaStreamGetId(stream, &id), "cudaStreamGetId");
  // As with captures, 0 is left to mean something else.
  return id + 1;
}

void retain_in_capture(cudaStream_t stream, std::shared_ptr<void> owner) {
  const Capture capture = capture_of(stream);
  if (!capture.active) return;
  auto kept = std::make_unique<std::shared_ptr<void>>(std::move(owner));
  cudaUserObject_t object = nullptr;
  check(cudaUserObjectCreate(&object, kept.get(), release_owner, 1, cudaUserObjectNoDestructorSync),
        "cudaUserObjectCreate");
  (void)kept.release();  // the object's from here on
  const cudaError_t status =
      cudaGraphRetainUserObject(capture.graph, object, 1, cudaGraphUserObjectMove);
  if (status != cudaSuccess) (void)cudaUserObjectRelease(object, 1);
  check(status, "cudaGraphRetainUserObject");
}

void order_streams(int device, cudaStream_t waiting, cudaStream_t on) {
  if (capture_of(waiting).active || capture_of(on).active) return;
  const cudaEvent_t event = event_pool().take(device);
  cudaError_t status = cudaEventRecord(event, on);
  const char* call = "cudaEventRecord";
  if (status == cudaSuccess) {
    call = "cudaStreamWaitEvent";
    status = cudaStreamWaitEvent(waiting, event, 0);
  }
  event_pool().put_back(device, event);
  check(status, call);
}

}  // namespace tiledattn::cuda
