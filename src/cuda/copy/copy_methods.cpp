// SPDX-License-Identifier: Apache-2.0
#include "copy/copy_methods.h"

#include <algorithm>
#include <chrono>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "copy/copy_pieces.h"
#include "cuda_check.h"
#include "device_guard.h"
#include "memory.h"

namespace tiledattn::cuda {

namespace {

bool copy_each(const CopyPiece* pieces, std::size_t count, cudaStream_t stream) {
  for (std::size_t i = 0; i < count; ++i) {
    check(cudaMemcpyAsync(pieces[i].to, pieces[i].from, static_cast<std::size_t>(pieces[i].bytes),
                          cudaMemcpyDefault, stream),
          "cudaMemcpyAsync");
  }
  return true;
}

bool copy_batch([[maybe_unused]] const CopyPiece* pieces, [[maybe_unused]] std::size_t count,
                [[maybe_unused]] cudaStream_t stream) {
#if CUDART_VERSION >= 13000
  std::vector<void*> to(count);
  std::vector<const void*> from(count);
  std::vector<std::size_t> bytes(count);
  for (std::size_t i = 0; i < count; ++i) {
    to[i] = pieces[i].to;
    from[i] = pieces[i].from;
    bytes[i] = static_cast<std::size_t>(pieces[i].bytes);
  }
  // In the order of the stream: what the stream has been made to wait for may write the sources.
  cudaMemcpyAttributes attributes{};
  attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
  std::size_t first = 0;
  const cudaError_t status = cudaMemcpyBatchAsync(to.data(), from.data(), bytes.data(), count,
                                                  &attributes, &first, 1, stream);
  if (status == cudaErrorNotSupported || status == cudaErrorCallRequiresNewerDriver) {
    (void)cudaGetLastError();
    return false;
  }
  check(status, "cudaMemcpyBatchAsync");
  return true;
#else
  return false;
#endif
}

bool copy_by_kernel(const CopyPiece* pieces, std::size_t count, cudaStream_t stream) {
  launch_copy_pieces(pieces, count, stream);
  return true;
}

/// Is what was pinned seen by the current device at the host's own address?
bool reads_host_addresses(int device) {
  int same = 0;
  check(cudaDeviceGetAttribute(&same, cudaDevAttrCanUseHostPointerForRegisteredMem, device),
        "cudaDeviceGetAttribute");
  return same != 0;
}

/// A stream that nobody else uses.
class OwnStream {
 public:
  OwnStream() {
    check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
  }
  ~OwnStream() { (void)cudaStreamDestroy(stream_); }
  OwnStream(const OwnStream&) = delete;
  OwnStream& operator=(const OwnStream&) = delete;
  cudaStream_t native() const { return stream_; }

 private:
  cudaStream_t stream_ = nullptr;
};

/// Times each method on pieces of each size.
class Measurement {
 public:
  explicit Measurement(int device)
      : kernel_(reads_host_addresses(device)),
        host_(allocate_mapped_memory(device, kBytes)),
        target_(allocate_device_memory(device, kBytes)) {}

  CopyRates run() const {
    CopyRates rates;
    for (std::size_t i = 0; i < CopyRates::kSizes.size(); ++i)
      rates.set(i, fastest(pieces(CopyRates::kSizes[i])));
    return rates;
  }

 private:
  static constexpr std::int64_t kBytes = std::int64_t{3} << 19;
  static constexpr std::int64_t kMostPieces = 96;
  /// A kernel takes room from attention, so it has to be clearly faster.
  static constexpr double kKernelAdvantage = 1.1;
  static constexpr double kEndless = std::numeric_limits<double>::max();

  /// No two neighbours on both sides.
  std::vector<CopyPiece> pieces(std::int64_t bytes) const {
    const std::int64_t count = std::min(kMostPieces, kBytes / bytes);
    std::vector<CopyPiece> list;
    for (std::int64_t i = 0; i < count; ++i) {
      list.push_back({static_cast<char*>(target_.get()) + i * bytes,
                      static_cast<const char*>(host_.get()) + (count - 1 - i) * bytes, bytes,
                      CopyFrom::pinned});
    }
    return list;
  }

  CopyMethod fastest(const std::vector<CopyPiece>& list) const {
    CopyMethod best = CopyMethod::each;
    double least = seconds(CopyMethod::each, list);
    const double batch = seconds(CopyMethod::batch, list);
    if (batch < least) {
      best = CopyMethod::batch;
      least = batch;
    }
    if (kernel_ && kKernelAdvantage * seconds(CopyMethod::kernel, list) < least)
      best = CopyMethod::kernel;
    return best;
  }

  /// What two thirds of the pieces take beside the first third, so that it does not count how long
  /// the first one is on its way. Endless where the method does not exist.
  double seconds(CopyMethod method, const std::vector<CopyPiece>& list) const {
    const double all = least_seconds(method, list.data(), list.size());
    if (all == kEndless) return all;
    return all - least_seconds(method, list.data(), list.size() / 3);
  }

  /// The least of some times, after one more for what only the first use costs.
  double least_seconds(CopyMethod method, const CopyPiece* list, std::size_t count) const {
    double least = kEndless;
    for (int round = 0; round < 4; ++round) {
      const auto begin = std::chrono::steady_clock::now();
      if (!copy_by(method, list, count, stream_.native())) break;
      check(cudaStreamSynchronize(stream_.native()), "cudaStreamSynchronize");
      const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - begin;
      if (round > 0) least = std::min(least, taken.count());
    }
    return least;
  }

  bool kernel_;
  std::shared_ptr<void> host_, target_;
  OwnStream stream_;
};

}  // namespace

bool copy_by(CopyMethod method, const CopyPiece* pieces, std::size_t count, cudaStream_t stream) {
  if (count == 0) return true;
  switch (method) {
    case CopyMethod::batch:
      return copy_batch(pieces, count, stream);
    case CopyMethod::kernel:
      return copy_by_kernel(pieces, count, stream);
    default:
      return copy_each(pieces, count, stream);
  }
}

const CopyRates& copy_rates(int device) {
  static std::mutex mutex;
  static std::map<int, CopyRates>& known = *new std::map<int, CopyRates>;
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = known.find(device);
  if (found != known.end()) return found->second;
  const RelaxedCaptureMode relaxed;  // another thread may be capturing
  return known[device] = Measurement(device).run();
}

}  // namespace tiledattn::cuda
