// SPDX-License-Identifier: Apache-2.0
// The two matrix products of a warp. Operands come from shared memory, rows kPitch elements apart.
#pragma once

#include <cstdint>

#include "common/mma.cuh"
#include "common/softmax_state.cuh"

namespace tiledattn::cuda {

/// Where this lane reads for load_matrices: 16 rows by 16 columns. As they are, the four matrices
/// are operand A; the first and the third are operand B whose columns are the first 8 rows, the
/// others that of the last 8. Transposed, the first two are operand B whose columns are the first 8
/// columns.
template <int kPitch>
__device__ __forceinline__ std::uint32_t lane_offset() {
  const int lane = lane_index();
  return static_cast<std::uint32_t>((lane % 16 * kPitch + lane / 16 * 8) * 2);
}

/// q of a warp's rows, either held in registers or read from shared memory each time.
template <typename Config>
struct Queries {
  static constexpr int kSteps = Config::kDim / 16;
  FragmentA held[Config::kKeepQ ? Config::kRowBlocks : 1][Config::kKeepQ ? kSteps : 1];
  std::uint32_t address;  ///< of this lane, in the warp's first 16 rows

  __device__ __forceinline__ FragmentA read(int block, int step) const {
    return load_matrices(address +
                         static_cast<std::uint32_t>((block * 16 * Config::kPitch + step * 16) * 2));
  }
  __device__ __forceinline__ void hold() {
    if constexpr (Config::kKeepQ) {
#pragma unroll
      for (int block = 0; block < Config::kRowBlocks; ++block) {
#pragma unroll
        for (int step = 0; step < kSteps; ++step) held[block][step] = read(block, step);
      }
    }
  }
  __device__ __forceinline__ FragmentA get(int block, int step) const {
    if constexpr (Config::kKeepQ) return held[block][step];
    return read(block, step);
  }
};

/// scores = q K^T for the warp's rows and keys. `k` is this lane's address in the warp's first key.
/// between() is called once products are under way.
template <typename T, typename Config, typename Between>
__device__ __forceinline__ void make_dots(
    const Queries<Config>& q, std::uint32_t k, Between&& between,
    float (&scores)[Config::kRowBlocks][Config::kWarpKeys / 8][4]) {
#pragma unroll
  for (int block = 0; block < Config::kRowBlocks; ++block) {
#pragma unroll
    for (int j = 0; j < Config::kWarpKeys / 8; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) scores[block][j][e] = 0.0f;
    }
  }
#pragma unroll
  for (int step = 0; step < Config::kDim / 16; ++step) {
    FragmentA rows[Config::kRowBlocks];
#pragma unroll
    for (int block = 0; block < Config::kRowBlocks; ++block) rows[block] = q.get(block, step);
#pragma unroll
    for (int pair = 0; pair < Config::kWarpKeys / 16; ++pair) {
      const FragmentA keys = load_matrices(
          k + static_cast<std::uint32_t>((pair * 16 * Config::kPitch + step * 16) * 2));
      const FragmentB low{{keys.part[0], keys.part[2]}};
      const FragmentB high{{keys.part[1], keys.part[3]}};
#pragma unroll
      for (int block = 0; block < Config::kRowBlocks; ++block) {
        multiply_add<T>(scores[block][2 * pair], rows[block], low);
        multiply_add<T>(scores[block][2 * pair + 1], rows[block], high);
      }
    }
    if (step == 0) between();
  }
}

/// output += weights V. `v` is this lane's address in the warp's first key.
template <typename T, typename Config, typename Between>
__device__ __forceinline__ void add_values(
    const FragmentA (&weights)[Config::kRowBlocks][Config::kWarpKeys / 16], std::uint32_t v,
    Between&& between, float (&output)[Config::kRowBlocks][Config::kDim / 8][4]) {
  constexpr int kPairs = Config::kDim / 16;
#pragma unroll
  for (int step = 0; step < Config::kWarpKeys / 16; ++step) {
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) {
      const FragmentA values = load_matrices_transposed(
          v + static_cast<std::uint32_t>((step * 16 * Config::kPitch + pair * 16) * 2));
      const FragmentB low{{values.part[0], values.part[1]}};
      const FragmentB high{{values.part[2], values.part[3]}};
#pragma unroll
      for (int block = 0; block < Config::kRowBlocks; ++block) {
        multiply_add<T>(output[block][2 * pair], weights[block][step], low);
        multiply_add<T>(output[block][2 * pair + 1], weights[block][step], high);
      }
      if (step == 0 && pair == kPairs / 4) between();
    }
  }
}

}  // namespace tiledattn::cuda
