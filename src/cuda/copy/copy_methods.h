// SPDX-License-Identifier: Apache-2.0
// The ways to copy many pieces to the current device, and which of them is the fastest here.
#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <cstddef>
#include <cstdint>

#include "copy_queue.h"

namespace tiledattn::cuda {

enum class CopyMethod {
  each,    ///< a call of the runtime for each piece
  batch,   ///< one call for all: cudaMemcpyBatchAsync
  kernel,  ///< a kernel that reads host memory
};

/// From this mean size on pieces are not small: they go in a batch, and nothing is measured. The
/// copy engine is as fast as a kernel, and takes no room from attention.
constexpr std::int64_t kLongPieceBytes = std::int64_t{32} << 10;

/// Copies pieces from pinned or device memory. False, with nothing done, where the driver does not
/// know how; `each` always works.
bool copy_by(CopyMethod method, const CopyPiece* pieces, std::size_t count, cudaStream_t stream);

/// The fastest method for pieces of some sizes.
class CopyRates {
 public:
  /// Sizes that are measured; others count as the nearest of these.
  static constexpr std::array<std::int64_t, 2> kSizes = {4 << 10, 16 << 10};

  CopyMethod best(std::int64_t mean_bytes) const;
  void set(std::size_t size_index, CopyMethod method) { best_[size_index] = method; }

 private:
  std::array<CopyMethod, kSizes.size()> best_{};
};

/// Of the current device, for the life of the process. Measured by the first call for it, which
/// takes some milliseconds and, meanwhile, some memory there; not for a capture.
const CopyRates& copy_rates(int device);

}  // namespace tiledattn::cuda
