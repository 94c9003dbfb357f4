// SPDX-License-Identifier: Apache-2.0
#include "check_apart.h"

#include <string>
#include <variant>

#include "tiledattn/error.h"

namespace tiledattn {

Written::Extent::Extent(const Tensor& tensor) {
  if (tensor.size() == 0) return;
  item = static_cast<std::uintptr_t>(item_bytes(tensor.dtype));
  std::uintptr_t below = 0;
  std::uintptr_t above = 1;
  std::uintptr_t distinct = 1;
  for (int i = 0; i < tensor.rank; ++i) {
    const std::int64_t reach = tensor.strides[i] * (tensor.shape[i] - 1);
    (reach < 0 ? below : above) += static_cast<std::uintptr_t>(reach < 0 ? -reach : reach);
    if (tensor.strides[i] != 0) distinct *= static_cast<std::uintptr_t>(tensor.shape[i]);
  }
  const auto first = reinterpret_cast<std::uintptr_t>(tensor.data);
  begin = first - below * item;
  end = first + above * item;
  dense = below + above == distinct;
}

bool Written::Extent::holds_an_end_of(const Extent& other) const {
  return dense &&
         (meets(other.begin, other.begin + other.item) || meets(other.end - other.item, other.end));
}

Written::Written(const char* argument, const Tensor& tensor)
    : argument_(argument), tensor_(tensor), extent_(tensor) {}

void Written::check_apart(const char* other, const Tensor& tensor) const {
  if (tensor.device != tensor_.device) return;
  const Extent extent(tensor);
  if (!extent_.meets(extent.begin, extent.end)) return;
  if (extent_.begin != extent.begin && !extent_.holds_an_end_of(extent) &&
      !extent.holds_an_end_of(extent_)) {
    return;
  }
  throw ValueError(std::string(argument_) + ": shares memory with " + other +
                   "; it is written while " + other + " is in use, and must not");
}

void Written::check_apart(const char* other, const std::optional<Tensor>& tensor) const {
  if (tensor) check_apart(other, *tensor);
}

void Written::check_apart(const char* other, const std::optional<KvScale>& scale) const {
  if (!scale) return;
  if (const Tensor* const tensor = std::get_if<Tensor>(&*scale)) check_apart(other, *tensor);
}

void Written::check_apart_or_same(const char* other, const Tensor& tensor) const {
  bool same =
      tensor.data == tensor_.data && tensor.dtype == tensor_.dtype && tensor.rank == tensor_.rank;
  for (int i = 0; same && i < tensor.rank; ++i) {
    same = tensor.shape[i] == tensor_.shape[i] &&
           (tensor.shape[i] == 1 || tensor.strides[i] == tensor_.strides[i]);
  }
  if (!same) check_apart(other, tensor);
}

}  // namespace tiledattn
