// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <utility>

#include "cuda_check.h"

namespace tiledattn::cuda {

/// Makes a device current and puts the former one back at the end of the scope. Where a thread has
/// chosen no device yet, the former one is device 0, and putting it back makes the driver open it:
/// a process that must not touch device 0 hides it (CUDA_VISIBLE_DEVICES) or chooses its own first.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) {
    check(cudaGetDevice(&former_), "cudaGetDevice");
    changed_ = former_ != device;
    if (changed_) check(cudaSetDevice(device), "cudaSetDevice(" + std::to_string(device) + ")");
    outer_ = std::exchange(innermost, device);
  }
  ~DeviceGuard() {
    innermost = outer_;
    if (changed_) (void)cudaSetDevice(former_);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

  /// The device of this thread's innermost guard, for all that runs under one: the runtime would
  /// take longer to say it than all else that most callers do.
  static int current() { return innermost; }

 private:
  inline static thread_local int innermost = -1;  ///< -1: no guard

  int former_ = 0;
  int outer_ = -1;
  bool changed_ = false;
};

/// Lets this thread call functions such as cudaMalloc while some stream is being captured.
class RelaxedCaptureMode {
 public:
  RelaxedCaptureMode() {
    check(cudaThreadExchangeStreamCaptureMode(&mode_), "cudaThreadExchangeStreamCaptureMode");
  }
  ~RelaxedCaptureMode() { (void)cudaThreadExchangeStreamCaptureMode(&mode_); }
  RelaxedCaptureMode(const RelaxedCaptureMode&) = delete;
  RelaxedCaptureMode& operator=(const RelaxedCaptureMode&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

}  // namespace tiledattn::cuda
