// SPDX-License-Identifier: Apache-2.0
// Shapes of a block of threads. A tile of query rows is cut among the row warps, 16 kRowBlocks rows
// each; a tile of keys among the key warps.
#pragma once

namespace tiledattn::cuda {

/// Up to 16 rows: the warps share the rows and cut the keys.
template <int kDim_>
struct PortableNarrow {
  static constexpr int kDim = kDim_;
  static constexpr int kRowWarps = 1;
  static constexpr int kKeyWarps = 4;
  static constexpr int kRowBlocks = 1;
  static constexpr int kKeys = 64;
  static constexpr int kSlots = kDim <= 192 ? 3 : 2;  ///< shared memory of sm_86 and sm_120: 99 KB
  static constexpr bool kKeepQ = true;
  static constexpr int kMinBlocks = kDim <= 64 ? 5 : kDim <= 128 ? 4 : 2;
};

/// 64 rows, a warp for every 16.
template <int kDim_>
struct PortableMiddle {
  static constexpr int kDim = kDim_;
  static constexpr int kRowWarps = 4;
  static constexpr int kKeyWarps = 1;
  static constexpr int kRowBlocks = 1;
  static constexpr int kKeys = 64;
  static constexpr int kSlots = 2;
  static constexpr bool kKeepQ = true;
  static constexpr int kMinBlocks = kDim <= 64 ? 4 : kDim <= 128 ? 3 : 2;
};

/// 128 rows, a warp for every 32: each K and V that is read from shared memory is used twice.
template <int kDim_>
struct PortableWide {
  static constexpr int kDim = kDim_;
  static constexpr int kRowWarps = 4;
  static constexpr int kKeyWarps = 1;
  static constexpr int kRowBlocks = 2;
  static constexpr int kKeys = 64;
  static constexpr int kSlots = 2;
  static constexpr bool kKeepQ = false;  // registers are scarce
  static constexpr int kMinBlocks = kDim <= 64 ? 3 : 2;
};

/// What follows from a shape.
template <typename Shape>
struct PortableConfig : Shape {
  static constexpr int kWarps = Shape::kRowWarps * Shape::kKeyWarps;
  static constexpr int kThreads = kWarps * 32;
  static constexpr int kWarpRows = Shape::kRowBlocks * 16;
  static constexpr int kRows = Shape::kRowWarps * kWarpRows;
  static constexpr int kWarpKeys = Shape::kKeys / Shape::kKeyWarps;
  /// Elements between rows in shared memory: 16 bytes more than a row, so that eight rows of
  /// ldmatrix lie in different banks.
  static constexpr int kPitch = Shape::kDim + 8;
  // A row is copied by kLanes threads, kPieces times 16 bytes each.
  static constexpr int kLanes = Shape::kDim / 8 % 32 == 0   ? 32
                                : Shape::kDim / 8 % 16 == 0 ? 16
                                : Shape::kDim / 8 % 8 == 0  ? 8
                                                            : 4;
  static constexpr int kPieces = Shape::kDim / 8 / kLanes;
  static constexpr int kCopyRows = kThreads / kLanes;  ///< rows copied at a time
  /// Queries that are held in registers may pass through the last slot, which is filled last.
  static constexpr bool kOwnQ = !Shape::kKeepQ || kRows > Shape::kKeys;

  static_assert(kRows <= kThreads && Shape::kKeys <= kThreads);
  static_assert(Shape::kKeys % kCopyRows == 0);
  static_assert(kRows % kCopyRows == 0 || kRows < kCopyRows);
  static_assert(Shape::kSlots == 2 || Shape::kSlots == 3);
  // Results leave through the slots: as elements, or 16 rows of each warp at a time as float32.
  static_assert(kRows <= Shape::kSlots * Shape::kKeys);
  static_assert(kWarps * 16 * 2 <= Shape::kSlots * Shape::kKeys);
};

}  // namespace tiledattn::cuda
