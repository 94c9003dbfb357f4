// SPDX-License-Identifier: Apache-2.0
#include "fault_log.h"

#include <atomic>
#include <new>
#include <utility>

#include "cuda_check.h"
#include "device_guard.h"
#include "memory.h"

namespace tiledattn::cuda {

namespace {

class MappedFaultLog : public FaultLog {
 public:
  explicit MappedFaultLog(int device)
      : memory_(allocate_mapped_memory(device, sizeof(FaultRecord))),
        record_(new (memory_.get()) FaultRecord()) {
    const DeviceGuard guard(device);
    void* address = nullptr;
    check(cudaHostGetDevicePointer(&address, record_, 0), "cudaHostGetDevicePointer");
    device_record_ = static_cast<FaultRecord*>(address);
  }

  FaultRecord* device_record() override { return device_record_; }

  Fault take() override {
    // `ready` is set last by the device and taken first here, by one of the threads that ask;
    // `claimed` is cleared last, since from then on another kernel may write the record.
    std::atomic_ref<std::int32_t> ready(record_->ready);
    if (ready.load(std::memory_order_relaxed) == 0) return {};
    if (ready.exchange(0, std::memory_order_acq_rel) == 0) return {};
    const Fault fault = record_->fault;
    std::atomic_ref<std::int32_t>(record_->claimed).store(0, std::memory_order_release);
    return fault;
  }

 private:
  std::shared_ptr<void> memory_;
  FaultRecord* record_;
  FaultRecord* device_record_ = nullptr;
};

}  // namespace

std::shared_ptr<FaultLog> make_fault_log(int device) {
  return std::make_shared<MappedFaultLog>(device);
}

}  // namespace tiledattn::cuda
