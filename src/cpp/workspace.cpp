// SPDX-License-Identifier: Apache-2.0
#include "tiledattn/workspace.h"

#include <map>
#include <tuple>

#include "backend.h"
#include "default_workspace.h"
#include "plan.h"
#include "tiledattn/error.h"

namespace tiledattn {

Buffer::Buffer(Device device, std::int64_t bytes) : bytes_(bytes), device_(device) {
  memory_ = backend_for(device).allocate(device.index, bytes);
}

Workspace::Workspace(Device device, std::int64_t bytes) {
  if (bytes < 1) throw ValueError("nbytes: got " + std::to_string(bytes) + "; expected 1 or more");
  bytes_ = bytes;
  buffer_ = Buffer(device, workspace_counters_offset(bytes) + kWorkspaceCounters * 4);
}

std::unique_lock<std::mutex> Workspace::acquire(Stream stream) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (last_) backend_for(device()).order(device().index, stream, *last_);
  last_ = stream;
  return lock;
}

std::shared_ptr<Workspace> default_workspace(Device device, Stream stream) {
  if (device.is_cpu()) {
    thread_local std::shared_ptr<Workspace> of_thread = std::make_shared<Workspace>(device);
    return of_thread;
  }
  static std::mutex mutex;
  static std::map<std::tuple<int, void*>, std::shared_ptr<Workspace>> of_stream;
  static std::map<std::tuple<int, void*, std::uint64_t>, std::weak_ptr<Workspace>> of_capture;

  const Backend& backend = backend_for(device);
  const std::uint64_t capture = backend.capture_id(device.index, stream);
  const std::lock_guard<std::mutex> lock(mutex);
  if (capture == 0) {
    std::shared_ptr<Workspace>& workspace = of_stream[{device.index, stream.handle}];
    if (!workspace) workspace = std::make_shared<Workspace>(device);
    return workspace;
  }
  // A graph may be replayed beside later calls on the stream it was captured on, so it owns a
  // workspace.
  std::erase_if(of_capture, [](const auto& entry) { return entry.second.expired(); });
  std::weak_ptr<Workspace>& known = of_capture[{device.index, stream.handle, capture}];
  std::shared_ptr<Workspace> workspace = known.lock();
  if (!workspace) {
    workspace = std::make_shared<Workspace>(device);
    known = workspace;
    backend.retain_in_capture(device.index, stream, workspace);
  }
  return workspace;
}

}  // namespace tiledattn
