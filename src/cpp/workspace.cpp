// SPDX-License-Identifier: Apache-2.0
#include "tiledattn/workspace.h"

#include <cstdint>
#include <map>
#include <thread>
#include <tuple>

#include "backend.h"
#include "check_tensor.h"
#include "default_workspace.h"
#include "plan.h"
#include "tiledattn/error.h"

namespace tiledattn {

Buffer::Buffer(Device device, std::int64_t bytes) : bytes_(bytes), device_(device) {
  memory_ = backend_for(device).allocate(device.index, bytes);
}

Workspace::Workspace(Device device, std::int64_t bytes) {
  if (bytes < 1) refuse("nbytes", std::to_string(bytes), "1 or more");
  if (bytes > kLargestWorkspace)
    refuse("nbytes", std::to_string(bytes), "at most " + std::to_string(kLargestWorkspace));
  bytes_ = bytes;
  buffer_ = Buffer(device, workspace_counters_offset(bytes) + kWorkspaceCounters * 4);
}

std::unique_lock<std::mutex> Workspace::acquire(const Stream& stream) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (last_) backend_for(device()).order(device().index, stream, *last_);
  last_ = stream;
  return lock;
}

namespace {

/// The default workspace of one stream. Another stream may come to have the same handle later,
/// while work of the first is under way: then `id` differs, and it gets a workspace of its own.
struct StreamWorkspace {
  std::uint64_t id = 0;
  std::shared_ptr<Workspace> workspace;
};

/// The thread's own default stream has the same handle in every thread.
bool is_per_thread(const Stream& stream) {
  return reinterpret_cast<std::uintptr_t>(stream.handle) == 2;
}

}  // namespace

std::shared_ptr<Workspace> default_workspace(Device device, const Stream& stream) {
  if (device.is_cpu()) {
    thread_local std::shared_ptr<Workspace> of_thread = std::make_shared<Workspace>(device);
    return of_thread;
  }
  static std::mutex mutex;
  static std::map<std::tuple<int, void*, std::thread::id>, StreamWorkspace> of_stream;
  static std::map<std::tuple<int, void*, std::uint64_t>, std::weak_ptr<Workspace>> of_capture;

  const Backend& backend = backend_for(device);
  const std::uint64_t capture = backend.capture_id(device.index, stream);
  const std::lock_guard<std::mutex> lock(mutex);
  if (capture == 0) {
    const std::thread::id thread =
        is_per_thread(stream) ? std::this_thread::get_id() : std::thread::id();
    StreamWorkspace& known = of_stream[{device.index, stream.handle, thread}];
    const std::uint64_t id = backend.stream_id(device.index, stream);
    if (!known.workspace || known.id != id) known = {id, std::make_shared<Workspace>(device)};
    return known.workspace;
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
