// SPDX-License-Identifier: Apache-2.0
#include "array_type.h"

#include <cstdlib>
#include <deque>
#include <string>
#include <vector>

#include "scalar_arg.h"

namespace nb = nanobind;

namespace tiledattn::binding {

namespace {

// Each entry holds a reference to its key, so that no other object gets the same address. Types and
// dtypes beyond this many (made on the fly by somebody) are looked at anew each time.
constexpr std::size_t kMaxEntries = 64;

/// sys.modules[module].name, without importing anything; an invalid object where it is not there.
nb::object imported(const char* module, const char* name) {
  const nb::dict modules = nb::module_::import_("sys").attr("modules");
  if (!modules.contains(module)) return {};
  return nb::getattr(modules[module], name, nb::object());
}

bool is_subclass_of(nb::handle type, const char* module, const char* name) {
  const nb::object base = imported(module, name);
  if (!base.is_valid()) return false;
  const int answer = PyObject_IsSubclass(type.ptr(), base.ptr());
  if (answer < 0) throw nb::python_error();
  return answer == 1;
}

/// "jaxlib" for a type of jaxlib._jax.
std::string root_module(nb::handle type) {
  const std::string module = text_of(type.attr("__module__"));
  return module.substr(0, module.find('.'));
}

Framework framework_of(nb::handle type) {
  if (is_subclass_of(type, "numpy", "ndarray")) return Framework::numpy;
  if (is_subclass_of(type, "torch", "Tensor")) return Framework::torch;
  if (is_subclass_of(type, "cupy", "ndarray")) return Framework::cupy;
  const std::string root = root_module(type);
  if (root == "jax" || root == "jaxlib") return Framework::jax;
  return Framework::other;
}

const dlpack::ExchangeApi* exchange_api_of(nb::handle type) {
  static const bool disabled = [] {
    const char* value = std::getenv("TILEDATTN_NO_EXCHANGE_API");
    return value != nullptr && std::string(value) == "1";
  }();
  if (disabled) return nullptr;
  const nb::object capsule = nb::getattr(type, "__dlpack_c_exchange_api__", nb::object());
  if (!capsule.is_valid() || PyCapsule_IsValid(capsule.ptr(), "dlpack_exchange_api") == 0)
    return nullptr;
  auto* api = static_cast<const dlpack::ExchangeApi*>(
      PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
  while (api && api->version.major != 1) api = api->previous;
  return api && api->describe && api->current_stream ? api : nullptr;
}

ArrayType look_at(nb::handle type) {
  ArrayType entry;
  entry.is_capsule = type.is(reinterpret_cast<PyObject*>(&PyCapsule_Type));
  if (entry.is_capsule) return entry;
  entry.framework = framework_of(type);
  entry.has_dlpack = nb::hasattr(type, "__dlpack__") && nb::hasattr(type, "__dlpack_device__");
  entry.is_masked =
      entry.framework == Framework::numpy && is_subclass_of(type, "numpy.ma", "MaskedArray");
  entry.api = exchange_api_of(type);
  return entry;
}

PyObject* plain_dtype(const char* name) {
  return nb::module_::import_("numpy").attr("dtype")(name).release().ptr();
}

NumpyDtype look_at_dtype(nb::handle dtype) {
  const std::string name = text_of(dtype.attr("name"));
  if (name == "bfloat16") return {true, DType::bfloat16, plain_dtype("uint16")};
  if (name == "float8_e4m3fn") return {true, DType::float8_e4m3fn, plain_dtype("uint8")};
  return {};
}

template <typename Value>
struct Entry {
  PyObject* key;
  Value value;
};

}  // namespace

const char* to_string(Framework framework) {
  switch (framework) {
    case Framework::numpy:
      return "numpy";
    case Framework::torch:
      return "torch";
    case Framework::cupy:
      return "cupy";
    case Framework::jax:
      return "jax";
    case Framework::other:
      break;
  }
  return "other";
}

ArrayType& array_type(nb::handle type) {
  static nb::ft_mutex mutex;
  static auto& entries = *new std::deque<Entry<ArrayType>>;  // a deque: entries stay where they are
  {
    const nb::ft_lock_guard lock(mutex);
    for (Entry<ArrayType>& entry : entries) {
      if (entry.key == type.ptr()) return entry.value;
    }
  }
  thread_local ArrayType looked_at;
  looked_at = look_at(type);
  const nb::ft_lock_guard lock(mutex);
  if (entries.size() >= kMaxEntries) return looked_at;
  entries.push_back({nb::borrow(type).release().ptr(), looked_at});
  return entries.back().value;
}

NumpyDtype numpy_dtype(nb::handle dtype) {
  static nb::ft_mutex mutex;
  static auto& entries = *new std::vector<Entry<NumpyDtype>>;
  {
    const nb::ft_lock_guard lock(mutex);
    for (const Entry<NumpyDtype>& entry : entries) {
      if (entry.key == dtype.ptr()) return entry.value;
    }
  }
  const NumpyDtype value = look_at_dtype(dtype);
  const nb::ft_lock_guard lock(mutex);
  if (entries.size() < kMaxEntries) entries.push_back({nb::borrow(dtype).release().ptr(), value});
  return value;
}

}  // namespace tiledattn::binding
