// SPDX-License-Identifier: Apache-2.0
// Which of a GPU's ways to copy takes which pieces. Plain functions: testable with no GPU.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "copy_queue.h"

namespace tiledattn {

enum class CopyMethod {
  each,    ///< a call of the runtime for each piece
  batch,   ///< one call for all: cudaMemcpyBatchAsync
  kernel,  ///< a kernel that reads host memory
};

/// From this size on pieces are not small: they go in a batch, and nothing is measured. The copy
/// engine is as fast as a kernel, and takes no room from attention.
constexpr std::int64_t kLongPieceBytes = std::int64_t{32} << 10;

/// With fewer small pieces it does not matter how.
constexpr std::size_t kManySmallPieces = 8;

/// The fastest method for small pieces of some sizes.
class CopyRates {
 public:
  /// Sizes that are measured; others count as the nearest of these.
  static constexpr std::array<std::int64_t, 2> kSizes = {4 << 10, 16 << 10};

  CopyMethod best(std::int64_t mean_bytes) const;
  void set(std::size_t size_index, CopyMethod method) { best_[size_index] = method; }

 private:
  std::array<CopyMethod, kSizes.size()> best_{};
};

/// Can the kernel copy it? Pinned bytes at addresses that are multiples of 4.
bool kernel_can_copy(const CopyPiece& piece);

/// Pieces by method.
struct CopyPlan {
  std::vector<CopyPiece> each, batch, kernel;
};

/// Every piece by one method. Only small pieces go by the kernel: it counts its work by the
/// longest.
CopyPlan plan_copies(const std::vector<CopyPiece>& pieces, const CopyRates& rates);

}  // namespace tiledattn
