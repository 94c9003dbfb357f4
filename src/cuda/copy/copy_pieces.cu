// SPDX-License-Identifier: Apache-2.0
// A warp copies a unit of a piece at a time: four loads of 16 bytes by each lane are on their way
// together. The link needs some 100 KB under way, and attention most of the GPU: so few blocks.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "common/launch.cuh"
#include "copy/copy_pieces.h"

namespace tiledattn::cuda {

namespace {

constexpr int kWarp = 32;
constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;
constexpr std::int64_t kBlocks = 24;
constexpr int kLoads = 4;
constexpr std::int64_t kUnitBytes = kLoads * kWarp * static_cast<std::int64_t>(sizeof(uint4));

/// Arguments of a kernel: 4 KiB for every driver, 32 KiB from that of CUDA 12.1 on.
constexpr int kArgumentBytes = 4096;
constexpr int kLargeArgumentBytes = 32764;

struct Piece {
  char* to;
  const char* from;
  std::int64_t bytes;
};

template <int kBytes>
struct PieceList {
  static constexpr int kCapacity = (kBytes - 16) / static_cast<int>(sizeof(Piece));
  int count;
  int units_per_piece;  // of the longest
  Piece pieces[kCapacity];
};

template <int kBytes>
struct Words {
  static constexpr int kCapacity = (kBytes - 16) / 8;
  unsigned long long* to;
  int count;
  unsigned long long words[kCapacity];
};

/// Up to kUnitBytes, in elements of one type.
template <typename Element>
__device__ void copy_unit(char* to, const char* from, std::int64_t bytes) {
  constexpr int kSteps = static_cast<int>(kUnitBytes / (kWarp * sizeof(Element)));
  const int count = static_cast<int>(bytes / static_cast<std::int64_t>(sizeof(Element)));
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const auto* const source = reinterpret_cast<const Element*>(from);
  auto* const target = reinterpret_cast<Element*>(to);
  Element values[kSteps];
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const int i = step * kWarp + lane;
    if (i < count) values[step] = __ldcs(source + i);
  }
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const int i = step * kWarp + lane;
    if (i < count) target[i] = values[step];
  }
}

template <int kBytes>
__global__ void __launch_bounds__(kThreads)
    copy_pieces(const __grid_constant__ PieceList<kBytes> list) {
  const int units = list.count * list.units_per_piece;
  const int warps = static_cast<int>(gridDim.x) * kWarps;
  const int first = static_cast<int>(blockIdx.x) * kWarps + static_cast<int>(threadIdx.x) / kWarp;
  for (int unit = first; unit < units; unit += warps) {
    const Piece& piece = list.pieces[unit / list.units_per_piece];
    const std::int64_t begin = unit % list.units_per_piece * kUnitBytes;
    if (begin >= piece.bytes) continue;
    const std::int64_t bytes = piece.bytes - begin < kUnitBytes ? piece.bytes - begin : kUnitBytes;
    const auto bits = reinterpret_cast<std::uintptr_t>(piece.to) |
                      reinterpret_cast<std::uintptr_t>(piece.from) |
                      static_cast<std::uintptr_t>(piece.bytes);
    if (bits % sizeof(uint4) == 0) {
      copy_unit<uint4>(piece.to + begin, piece.from + begin, bytes);
    } else {
      copy_unit<unsigned>(piece.to + begin, piece.from + begin, bytes);
    }
  }
}

template <int kBytes>
__global__ void __launch_bounds__(kThreads)
    write_words(const __grid_constant__ Words<kBytes> words) {
  for (int i = static_cast<int>(threadIdx.x); i < words.count; i += kThreads)
    words.to[i] = words.words[i];
}

/// Some pieces of the list, as many as fit; returns how many.
template <int kBytes>
std::size_t launch_some(const CopyPiece* pieces, std::size_t count, cudaStream_t stream) {
  using List = PieceList<kBytes>;
  List list;
  list.count = static_cast<int>(std::min<std::size_t>(count, List::kCapacity));
  std::int64_t longest = 1;
  for (int i = 0; i < list.count; ++i) {
    list.pieces[i] = {static_cast<char*>(pieces[i].to), static_cast<const char*>(pieces[i].from),
                      pieces[i].bytes};
    longest = std::max(longest, pieces[i].bytes);
  }
  list.units_per_piece = static_cast<int>((longest + kUnitBytes - 1) / kUnitBytes);
  const std::int64_t units = std::int64_t{list.count} * list.units_per_piece;
  launch(copy_pieces<kBytes>, "copy_pieces",
         {.blocks = std::min(kBlocks, (units + kWarps - 1) / kWarps), .threads = kThreads}, list,
         stream);
  return static_cast<std::size_t>(list.count);
}

/// Some bytes, as many as fit; returns how many.
template <int kBytes>
std::int64_t write_some(char* to, const char* from, std::int64_t bytes, cudaStream_t stream) {
  Words<kBytes> words;
  words.to = reinterpret_cast<unsigned long long*>(to);
  words.count = static_cast<int>(std::min<std::int64_t>(bytes / 8, Words<kBytes>::kCapacity));
  const std::int64_t here = std::int64_t{words.count} * 8;
  std::memcpy(words.words, from, static_cast<std::size_t>(here));
  launch(write_words<kBytes>, "write_words", {.blocks = 1, .threads = kThreads}, words, stream);
  return here;
}

bool takes_large_arguments() {
  static const bool takes = [] {
    int version = 0;
    check(cudaDriverGetVersion(&version), "cudaDriverGetVersion");
    return version >= 12010;
  }();
  return takes;
}

}  // namespace

void launch_copy_pieces(const CopyPiece* pieces, std::size_t count, cudaStream_t stream) {
  constexpr auto kFew = static_cast<std::size_t>(PieceList<kArgumentBytes>::kCapacity);
  while (count > 0) {
    const std::size_t done = count > kFew && takes_large_arguments()
                                 ? launch_some<kLargeArgumentBytes>(pieces, count, stream)
                                 : launch_some<kArgumentBytes>(pieces, count, stream);
    pieces += done;
    count -= done;
  }
}

void launch_write_words(void* to, const void* from, std::int64_t bytes, cudaStream_t stream) {
  auto* target = static_cast<char*>(to);
  const auto* source = static_cast<const char*>(from);
  while (bytes > 0) {
    const bool few = bytes <= Words<kArgumentBytes>::kCapacity * 8;
    const std::int64_t done = !few && takes_large_arguments()
                                  ? write_some<kLargeArgumentBytes>(target, source, bytes, stream)
                                  : write_some<kArgumentBytes>(target, source, bytes, stream);
    target += done;
    source += done;
    bytes -= done;
  }
}

}  // namespace tiledattn::cuda
