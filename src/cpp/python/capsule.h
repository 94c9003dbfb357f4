// SPDX-License-Identifier: Apache-2.0
// DLPack capsules: taking what one holds, exactly once.
#pragma once

#include <nanobind/nanobind.h>

#include <string>
#include <utility>

#include "dlpack_abi.h"
#include "tiledattn/tensor.h"

namespace tiledattn::binding {

/// What a capsule held. Its deleter runs once, when this object goes; the GIL is needed there.
class ManagedArray {
 public:
  /// Takes over what `capsule` holds and marks it as used before anything else can fail.
  /// ValueError for a used capsule, TypeError for one of another kind; both name the argument.
  ManagedArray(nanobind::handle capsule, const char* name);
  ~ManagedArray();
  ManagedArray(ManagedArray&& other) noexcept
      : plain_(std::exchange(other.plain_, nullptr)),
        versioned_(std::exchange(other.versioned_, nullptr)) {}
  ManagedArray& operator=(ManagedArray&&) = delete;

  const dlpack::Array& array() const { return versioned_ ? versioned_->array : plain_->array; }
  bool read_only() const { return versioned_ && (versioned_->flags & dlpack::kReadOnly) != 0; }

 private:
  dlpack::Managed* plain_ = nullptr;
  dlpack::ManagedVersioned* versioned_ = nullptr;
};

/// The device of a DLPack producer. Pinned host memory counts as the CPU, managed memory as CUDA;
/// ValueError for others.
Device device_of(dlpack::Device device, const char* name);

/// A view of the same memory; refuses what the library has no word for.
Tensor tensor_of(const dlpack::Array& array, const char* name);

}  // namespace tiledattn::binding
