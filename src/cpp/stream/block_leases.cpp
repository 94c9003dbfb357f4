// SPDX-License-Identifier: Apache-2.0
#include "stream/block_leases.h"

#include "tiledattn/error.h"

namespace tiledattn {

namespace {
std::size_t at(std::int64_t block) { return static_cast<std::size_t>(block); }
}  // namespace

void BlockLeases::check(const std::int64_t* blocks, std::int64_t count) const {
  const auto num_blocks = static_cast<std::int64_t>(counts_.size());
  for (std::int64_t i = 0; i < count; ++i) {
    if (blocks[i] >= 0 && blocks[i] < num_blocks) continue;
    throw IndexError("blocks: got block " + std::to_string(blocks[i]) + "; expected 0 to " +
                     std::to_string(num_blocks - 1));
  }
}

void BlockLeases::pin(const std::int64_t* blocks, std::int64_t count) {
  check(blocks, count);
  const std::lock_guard<std::mutex> lock(mutex_);
  for (std::int64_t i = 0; i < count; ++i) {
    if (present_[at(blocks[i])]) continue;
    throw ValueError("block " + std::to_string(blocks[i]) + ", which was evicted");
  }
  for (std::int64_t i = 0; i < count; ++i) ++counts_[at(blocks[i])];
}

void BlockLeases::unpin(const std::int64_t* blocks, std::int64_t count) {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (std::int64_t i = 0; i < count; ++i) --counts_[at(blocks[i])];
}

std::vector<std::int64_t> BlockLeases::evict(const std::int64_t* blocks, std::int64_t count) {
  check(blocks, count);
  std::vector<std::int64_t> evicted;
  evicted.reserve(at(count));
  const std::lock_guard<std::mutex> lock(mutex_);
  for (std::int64_t i = 0; i < count; ++i) {
    const std::size_t block = at(blocks[i]);
    if (!present_[block] || counts_[block] > 0) continue;
    present_[block] = false;
    evicted.push_back(blocks[i]);
  }
  return evicted;
}

void BlockLeases::restore(const std::int64_t* blocks, std::int64_t count) {
  check(blocks, count);
  const std::lock_guard<std::mutex> lock(mutex_);
  for (std::int64_t i = 0; i < count; ++i) present_[at(blocks[i])] = true;
}

}  // namespace tiledattn
