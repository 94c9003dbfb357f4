// SPDX-License-Identifier: Apache-2.0
#include "capsule.h"

#include <cstring>

#include "scalar_arg.h"
#include "tiledattn/error.h"

namespace nb = nanobind;

namespace tiledattn::binding {

namespace {

constexpr const char* kPlain = "dltensor";
constexpr const char* kVersioned = "dltensor_versioned";
constexpr const char* kUsedPlain = "used_dltensor";
constexpr const char* kUsedVersioned = "used_dltensor_versioned";

/// The pointer in `capsule` if it has this name; from then on the capsule is called `used`.
void* take(nb::handle capsule, const char* name, const char* used) {
  if (PyCapsule_IsValid(capsule.ptr(), name) == 0) return nullptr;
  void* pointer = PyCapsule_GetPointer(capsule.ptr(), name);
  if (PyCapsule_SetName(capsule.ptr(), used) != 0) throw nb::python_error();
  return pointer;
}

}  // namespace

ManagedArray::ManagedArray(nb::handle capsule, const char* name) {
  if (!PyCapsule_CheckExact(capsule.ptr())) {
    throw TypeError(std::string(name) + ": its __dlpack__ gave " + type_name_of(capsule) +
                    "; expected a capsule");
  }
  plain_ = static_cast<dlpack::Managed*>(take(capsule, kPlain, kUsedPlain));
  if (plain_) return;
  versioned_ = static_cast<dlpack::ManagedVersioned*>(take(capsule, kVersioned, kUsedVersioned));
  if (!versioned_) {
    const char* label = PyCapsule_GetName(capsule.ptr());
    PyErr_Clear();
    const std::string found = label ? label : "no name";
    if (found == kUsedPlain || found == kUsedVersioned) {
      throw ValueError(std::string(name) +
                       ": this DLPack capsule was used before; a capsule can be read only once");
    }
    throw TypeError(std::string(name) + ": got a capsule with the name '" + found +
                    "'; expected a DLPack capsule, '" + kPlain + "' or '" + kVersioned + "'");
  }
  if (versioned_->version.major != 1) {
    const std::string version =
        std::to_string(versioned_->version.major) + "." + std::to_string(versioned_->version.minor);
    // The destructor doesn't run for an object whose constructor throws.
    if (versioned_->deleter) versioned_->deleter(versioned_);
    versioned_ = nullptr;
    throw TypeError(std::string(name) + ": a capsule of DLPack " + version +
                    "; version 1 is supported");
  }
}

ManagedArray::~ManagedArray() {
  if (plain_ && plain_->deleter) plain_->deleter(plain_);
  if (versioned_ && versioned_->deleter) versioned_->deleter(versioned_);
}

Device device_of(dlpack::Device device, const char* name) {
  switch (device.type) {
    case dlpack::kCpu:
    case dlpack::kCudaHost:
      return {DeviceKind::cpu, 0};
    case dlpack::kCuda:
    case dlpack::kCudaManaged:
      return {DeviceKind::cuda, device.id};
    default:
      throw ValueError(std::string(name) + ": is on a device of DLPack type " +
                       std::to_string(device.type) +
                       "; expected an array on the CPU or on a CUDA GPU");
  }
}

Tensor tensor_of(const dlpack::Array& array, const char* name) {
  Tensor tensor;
  tensor.device = device_of(array.device, name);
  if (array.ndim > Tensor::kMaxRank) {
    throw ValueError(std::string(name) + ": has " + std::to_string(array.ndim) +
                     " dimensions; at most " + std::to_string(Tensor::kMaxRank) + " are supported");
  }
  if (array.dtype.lanes != 1) {
    throw TypeError(std::string(name) + ": elements are vectors of " +
                    std::to_string(array.dtype.lanes) + " numbers; expected plain numbers");
  }
  tensor.dtype = static_cast<DType>(array.dtype.code * 256 + array.dtype.bits);
  tensor.rank = array.ndim;
  std::uint64_t c_order = 1;  // unsigned, to overflow quietly: the core refuses such a shape
  for (int i = array.ndim - 1; i >= 0; --i) {
    tensor.shape[i] = array.shape[i];
    tensor.strides[i] = array.strides ? array.strides[i] : static_cast<std::int64_t>(c_order);
    c_order *= static_cast<std::uint64_t>(array.shape[i]);
  }
  if (array.data != nullptr) {
    tensor.data = static_cast<char*>(array.data) + array.byte_offset;
  } else if (tensor.size() != 0) {
    throw ValueError(std::string(name) + ": has shape " + shape_to_string(tensor) +
                     " but no memory (a fake or meta tensor); expected an array with data");
  }
  return tensor;
}

}  // namespace tiledattn::binding
