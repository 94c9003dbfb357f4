// SPDX-License-Identifier: Apache-2.0
#include "copy_plan.h"

namespace tiledattn {

namespace {

bool is_small(const CopyPiece& piece) {
  return piece.from_memory != CopyFrom::pageable && piece.bytes < kLongPieceBytes;
}

CopyMethod method_of_small(const std::vector<CopyPiece>& pieces, const CopyRates& rates) {
  std::size_t count = 0;
  std::int64_t bytes = 0;
  for (const CopyPiece& piece : pieces) {
    if (!is_small(piece)) continue;
    ++count;
    bytes += piece.bytes;
  }
  if (count < kManySmallPieces) return CopyMethod::batch;
  return rates.best(bytes / static_cast<std::int64_t>(count));
}

CopyMethod method_of(const CopyPiece& piece, CopyMethod of_small) {
  if (piece.from_memory == CopyFrom::pageable) return CopyMethod::each;
  if (!is_small(piece)) return CopyMethod::batch;
  const bool cannot = of_small == CopyMethod::kernel && !kernel_can_copy(piece);
  return cannot ? CopyMethod::batch : of_small;
}

}  // namespace

CopyMethod CopyRates::best(std::int64_t mean_bytes) const {
  std::size_t index = 0;
  // The middle between two sizes, as factors go, is twice the smaller one.
  while (index + 1 < kSizes.size() && mean_bytes >= 2 * kSizes[index]) ++index;
  return best_[index];
}

bool kernel_can_copy(const CopyPiece& piece) {
  const auto bits = reinterpret_cast<std::uintptr_t>(piece.to) |
                    reinterpret_cast<std::uintptr_t>(piece.from) |
                    static_cast<std::uintptr_t>(piece.bytes);
  return piece.from_memory == CopyFrom::pinned && bits % 4 == 0;
}

CopyPlan plan_copies(const std::vector<CopyPiece>& pieces, const CopyRates& rates) {
  CopyPlan plan;
  const CopyMethod of_small = method_of_small(pieces, rates);
  for (const CopyPiece& piece : pieces) {
    switch (method_of(piece, of_small)) {
      case CopyMethod::each:
        plan.each.push_back(piece);
        break;
      case CopyMethod::batch:
        plan.batch.push_back(piece);
        break;
      case CopyMethod::kernel:
        plan.kernel.push_back(piece);
        break;
    }
  }
  // A batch of one is a plain copy.
  if (plan.batch.size() == 1) {
    plan.each.push_back(plan.batch.front());
    plan.batch.clear();
  }
  return plan;
}

}  // namespace tiledattn
