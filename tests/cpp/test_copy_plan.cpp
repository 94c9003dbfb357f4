// SPDX-License-Identifier: Apache-2.0
// Which method copies which piece. Nothing is copied, so addresses are made up.
#include "copy_plan.h"

#include <algorithm>

#include "check.h"

using namespace tiledattn;

namespace {

constexpr std::int64_t kKiB = 1024;

/// All lie side by side from 1 MiB on, and go to where they lie.
struct Pieces {
  std::vector<CopyPiece> list;

  Pieces& add(std::size_t count, std::int64_t bytes, CopyFrom from = CopyFrom::pinned,
              std::int64_t offset = 0) {
    for (std::size_t i = 0; i < count; ++i) {
      char* const at = reinterpret_cast<char*>(next + offset);
      list.push_back({at, at, bytes, from});
      next += (offset + bytes + 15) / 16 * 16;
    }
    return *this;
  }

  std::int64_t next = std::int64_t{1} << 20;
};

/// `small` up to 8 KiB on average, `larger` from there on.
CopyRates rates(CopyMethod small, CopyMethod larger) {
  CopyRates made;
  made.set(0, small);
  made.set(1, larger);
  return made;
}

CopyRates always(CopyMethod method) { return rates(method, method); }

struct Counts {
  std::size_t each, batch, kernel;
  friend bool operator==(const Counts&, const Counts&) = default;
};

Counts counts(const CopyPlan& plan) {
  return {plan.each.size(), plan.batch.size(), plan.kernel.size()};
}

Counts counts(const Pieces& pieces, const CopyRates& known) {
  return counts(plan_copies(pieces.list, known));
}

constexpr CopyMethod kAll[] = {CopyMethod::each, CopyMethod::batch, CopyMethod::kernel};

}  // namespace

TEST(no_piece_and_one_piece) {
  for (const CopyMethod method : kAll) {
    CHECK(counts(Pieces(), always(method)) == Counts{});
    CHECK((counts(Pieces().add(1, 4 * kKiB), always(method)) == Counts{1, 0, 0}));
    CHECK((counts(Pieces().add(1, 4096 * kKiB), always(method)) == Counts{1, 0, 0}));
  }
}

TEST(many_small_pieces_go_the_way_that_is_best_for_their_mean_size) {
  const CopyRates known = rates(CopyMethod::kernel, CopyMethod::each);
  CHECK((counts(Pieces().add(100, 2 * kKiB), known) == Counts{0, 0, 100}));
  CHECK((counts(Pieces().add(100, 16 * kKiB), known) == Counts{100, 0, 0}));
  CHECK((counts(Pieces().add(50, 2 * kKiB).add(50, 30 * kKiB), known) == Counts{100, 0, 0}));
  CHECK((counts(Pieces().add(90, 2 * kKiB).add(10, 30 * kKiB), known) == Counts{0, 0, 100}));
}

TEST(few_small_pieces_go_in_a_batch) {
  for (const CopyMethod method : kAll) {
    const std::size_t few = kManySmallPieces - 1;
    CHECK((counts(Pieces().add(few, 2 * kKiB), always(method)) == Counts{0, few, 0}));
    CHECK((counts(Pieces().add(few, kKiB).add(50, 64 * kKiB), always(method)) ==
           Counts{0, few + 50, 0}));
  }
}

TEST(long_pieces_go_in_a_batch) {
  for (const CopyMethod method : kAll)
    CHECK((counts(Pieces().add(100, kLongPieceBytes), always(method)) == Counts{0, 100, 0}));
}

TEST(the_kernel_takes_the_small_ones_of_a_mixed_list) {
  const CopyRates known = always(CopyMethod::kernel);
  const Pieces one = Pieces().add(50, kKiB).add(1, 65536 * kKiB).add(50, kKiB);
  CHECK((counts(one, known) == Counts{1, 0, 100}));
  // However many long ones there are: they do not count for the mean.
  const Pieces many = Pieces().add(20, kKiB).add(500, 256 * kKiB).add(3, kLongPieceBytes - 4);
  const CopyPlan plan = plan_copies(many.list, rates(CopyMethod::kernel, CopyMethod::batch));
  CHECK((counts(plan) == Counts{0, 500, 23}));
  for (const CopyPiece& piece : plan.kernel) CHECK(piece.bytes < kLongPieceBytes);
}

TEST(the_kernel_takes_pinned_words_of_4_bytes) {
  Pieces pieces;
  pieces.add(10, kKiB).add(10, kKiB + 2).add(10, kKiB, CopyFrom::pinned, 2).add(10, kKiB + 4);
  pieces.add(10, kKiB, CopyFrom::device);
  const CopyPlan plan = plan_copies(pieces.list, always(CopyMethod::kernel));
  CHECK((counts(plan) == Counts{0, 30, 20}));
  for (const CopyPiece& piece : plan.kernel) CHECK(kernel_can_copy(piece));
  CHECK((counts(pieces, always(CopyMethod::batch)) == Counts{0, 50, 0}));
}

TEST(pageable_memory_is_copied_piece_by_piece) {
  for (const CopyMethod method : kAll) {
    const Pieces pieces = Pieces().add(20, kKiB, CopyFrom::pageable).add(5, 64 * kKiB);
    CHECK((counts(pieces, always(method)) == Counts{20, 5, 0}));
  }
  // Nor do they count as small ones.
  const Pieces pieces = Pieces().add(100, kKiB, CopyFrom::pageable).add(2, kKiB);
  CHECK((counts(pieces, always(CopyMethod::kernel)) == Counts{100, 2, 0}));
}

TEST(every_piece_is_copied_once) {
  Pieces pieces;
  pieces.add(9, kKiB).add(3, 64 * kKiB).add(4, kKiB, CopyFrom::pageable);
  pieces.add(5, kKiB, CopyFrom::pinned, 1).add(2, 64 * kKiB, CopyFrom::device);
  for (const CopyMethod method : kAll) {
    const CopyPlan plan = plan_copies(pieces.list, always(method));
    std::vector<const void*> planned, given;
    for (const auto* part : {&plan.each, &plan.batch, &plan.kernel})
      for (const CopyPiece& piece : *part) planned.push_back(piece.from);
    for (const CopyPiece& piece : pieces.list) given.push_back(piece.from);
    std::sort(planned.begin(), planned.end());
    CHECK(planned == given);
  }
}
