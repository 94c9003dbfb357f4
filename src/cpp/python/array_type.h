// SPDX-License-Identifier: Apache-2.0
// What the library knows about a type of arrays, found out once for each type.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>

#include "dlpack_abi.h"
#include "tiledattn/tensor.h"

namespace tiledattn::binding {

/// Who makes the results of a call: the framework of its first array. `other`: anything else with
/// __dlpack__.
enum class Framework : std::uint8_t { numpy, torch, cupy, jax, other };

const char* to_string(Framework framework);

struct ArrayType {
  Framework framework = Framework::other;
  bool is_capsule = false;   ///< a DLPack capsule itself
  bool has_dlpack = false;   ///< has __dlpack__ and __dlpack_device__
  bool is_masked = false;    ///< a NumPy masked array, whose mask no other library sees
  bool unversioned = false;  ///< its __dlpack__ does not know max_version
  const dlpack::ExchangeApi* api = nullptr;  ///< the quick way in, where the type offers it
};

/// The entry of a type, which may be changed. Good until the next call of this function.
ArrayType& array_type(nanobind::handle type);

/// A NumPy dtype that NumPy cannot export (ml_dtypes): arrays are exported as `bits` and read as
/// `dtype`.
struct NumpyDtype {
  bool is_foreign = false;
  DType dtype = DType::float32;
  PyObject* bits = nullptr;  ///< numpy.dtype("uint16"), kept for good
};

NumpyDtype numpy_dtype(nanobind::handle dtype);

}  // namespace tiledattn::binding
