// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>

#include "tiledattn/options.h"
#include "tiledattn/tensor.h"

namespace tiledattn {

/// An array that a call writes, for the check that the call does not read the same memory. Only
/// what certainly overlaps is refused: arrays that lie between each other's elements, such as
/// slices of a fused q, k and v, are not told apart from those that meet somewhere.
class Written {
 public:
  Written(const char* argument, const Tensor& tensor);

  /// Throws ValueError where `tensor`, if there is one, shares memory with this array.
  void check_apart(const char* other, const Tensor& tensor) const;
  void check_apart(const char* other, const std::optional<Tensor>& tensor) const;
  void check_apart(const char* other, const std::optional<KvScale>& scale) const;
  /// As check_apart(); but `tensor` may be this very array, element for element.
  void check_apart_or_same(const char* other, const Tensor& tensor) const;

 private:
  /// The bytes from the lowest element to the end of the highest.
  struct Extent {
    std::uintptr_t begin = 0;
    std::uintptr_t end = 0;
    std::uintptr_t item = 0;  ///< bytes of an element
    bool dense = false;       ///< elements fill it

    explicit Extent(const Tensor& tensor);
    bool meets(std::uintptr_t from, std::uintptr_t to) const { return from < end && begin < to; }
    /// Certainly: dense memory holds the lowest or the highest element of the other.
    bool holds_an_end_of(const Extent& other) const;
  };

  const char* argument_;
  const Tensor& tensor_;
  Extent extent_;
};

/// Calls check(Written) for out and, where there is one, lse, which also must lie apart.
template <typename Check>
void check_results_apart(const Tensor& out, const std::optional<Tensor>& lse, Check&& check) {
  const Written written("out", out);
  written.check_apart("lse", lse);
  check(written);
  if (lse) check(Written("lse", *lse));
}

}  // namespace tiledattn
