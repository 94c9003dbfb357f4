// SPDX-License-Identifier: Apache-2.0
// Which blocks of a pool are in use by somebody, and which have been taken out of use.
#pragma once

#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

namespace tiledattn {

/// A lease count and a presence flag for each block. All functions may be called from any thread,
/// and each one happens as a whole or, when it throws, not at all.
class BlockLeases {
 public:
  explicit BlockLeases(std::int64_t num_blocks)
      : counts_(static_cast<std::size_t>(num_blocks), 0),
        present_(static_cast<std::size_t>(num_blocks), true) {}

  /// Throws IndexError for an id out of range and ValueError for a block that was evicted.
  void pin(const std::int64_t* blocks, std::int64_t count);
  void unpin(const std::int64_t* blocks, std::int64_t count);
  /// The blocks that were present and without a lease; they are absent now.
  std::vector<std::int64_t> evict(const std::int64_t* blocks, std::int64_t count);
  void restore(const std::int64_t* blocks, std::int64_t count);

 private:
  void check(const std::int64_t* blocks, std::int64_t count) const;

  std::mutex mutex_;
  std::vector<std::int32_t> counts_;
  std::vector<bool> present_;
};

}  // namespace tiledattn
