// SPDX-License-Identifier: Apache-2.0
// Where memory cannot be freed at once (a graph's destructor may call no CUDA function, and a
// driver may refuse during a capture), it goes on a list that the next allocation frees.
#include "memory.h"

#include <cstring>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "cuda_check.h"
#include "device_guard.h"

namespace tiledattn::cuda {

namespace {

thread_local bool no_cuda_calls = false;

struct Block {
  void* address;
  int device;
  bool mapped;  ///< host memory
};

struct WaitingBlocks {
  std::mutex mutex;
  std::vector<Block> blocks;
};

/// Never destroyed: buffers of static objects are freed when the process ends, in an unknown order.
WaitingBlocks& waiting_blocks() {
  static WaitingBlocks& waiting = *new WaitingBlocks;
  return waiting;
}

bool try_to_free(const Block& block) noexcept {
  try {
    const RelaxedCaptureMode relaxed;
    const DeviceGuard guard(block.device);
    check(block.mapped ? cudaFreeHost(block.address) : cudaFree(block.address), "cudaFree");
    return true;
  } catch (...) {
    return false;
  }
}

void free_or_wait(const Block& block) noexcept {
  if (!no_cuda_calls && try_to_free(block)) return;
  try {
    WaitingBlocks& waiting = waiting_blocks();
    const std::lock_guard<std::mutex> lock(waiting.mutex);
    waiting.blocks.push_back(block);
  } catch (...) {
    // No memory for the list's entry: the block is lost, which is better than ending the process.
  }
}

void free_waiting_blocks() {
  WaitingBlocks& waiting = waiting_blocks();
  std::vector<Block> blocks;
  {
    const std::lock_guard<std::mutex> lock(waiting.mutex);
    blocks.swap(waiting.blocks);
  }
  for (const Block& block : blocks) free_or_wait(block);
}

std::shared_ptr<void> own(const Block& block) {
  return std::shared_ptr<void>(block.address, [block](void*) { free_or_wait(block); });
}

/// Waits, on a stream of its own: others may be capturing.
void fill_with_zeros(void* address, std::int64_t bytes) {
  if (bytes <= 0) return;
  cudaStream_t stream = nullptr;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
  cudaError_t status = cudaMemsetAsync(address, 0, static_cast<std::size_t>(bytes), stream);
  const char* call = "cudaMemsetAsync";
  if (status == cudaSuccess) {
    call = "cudaStreamSynchronize";
    status = cudaStreamSynchronize(stream);
  }
  (void)cudaStreamDestroy(stream);
  check(status, call);
}

[[noreturn]] void throw_no_memory(const std::string& what, std::int64_t bytes, int device,
                                  cudaError_t status) {
  throw MemoryError("cuda:" + std::to_string(device) + ": " + std::to_string(bytes) + " bytes of " +
                    what + " could not be allocated (" + describe(status) + ")");
}

}  // namespace

NoCudaCalls::NoCudaCalls() : former_(std::exchange(no_cuda_calls, true)) {}
NoCudaCalls::~NoCudaCalls() { no_cuda_calls = former_; }

std::shared_ptr<void> allocate_device_memory(int device, std::int64_t bytes) {
  free_waiting_blocks();
  const RelaxedCaptureMode relaxed;
  const DeviceGuard guard(device);
  void* address = nullptr;
  const cudaError_t status = cudaMalloc(&address, bytes > 0 ? static_cast<std::size_t>(bytes) : 1);
  if (status == cudaErrorMemoryAllocation) {
    (void)cudaGetLastError();
    throw_no_memory("device memory", bytes, device, status);
  }
  check(status, "cudaMalloc");
  std::shared_ptr<void> memory = own({address, device, false});
  fill_with_zeros(address, bytes);
  return memory;
}

std::shared_ptr<void> allocate_mapped_memory(int device, std::int64_t bytes) {
  free_waiting_blocks();
  const RelaxedCaptureMode relaxed;
  const DeviceGuard guard(device);
  void* address = nullptr;
  const cudaError_t status = cudaHostAlloc(&address, static_cast<std::size_t>(bytes),
                                           cudaHostAllocMapped | cudaHostAllocPortable);
  if (status == cudaErrorMemoryAllocation) {
    (void)cudaGetLastError();
    throw_no_memory("pinned host memory", bytes, device, status);
  }
  check(status, "cudaHostAlloc");
  std::memset(address, 0, static_cast<std::size_t>(bytes));
  return own({address, device, true});
}

}  // namespace tiledattn::cuda
