// SPDX-License-Identifier: Apache-2.0
#include "tensor_arg.h"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>

#include <string>
#include <utility>

#include "backend.h"
#include "lazy.h"
#include "scalar_arg.h"
#include "stream_arg.h"
#include "tiledattn/error.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace tiledattn::binding {

namespace {

/// The text of a framework's refusal. Running out of memory and interrupts stay what they are.
std::string message_of(const nb::python_error& error) {
  const bool is_refusal = error.matches(PyExc_Exception) && !error.matches(PyExc_MemoryError);
  if (!is_refusal) throw error;
  return text_of(error.value());
}

[[noreturn]] void refuse_export(const nb::python_error& error, nb::handle array, const char* name) {
  const std::string message = message_of(error);
  throw TypeError(std::string(name) + ": the memory of this " + type_name_of(array) +
                  " cannot be read: " + message);
}

/// A lazily negated tensor would be read with the wrong sign: no array interface tells of it.
void refuse_negated(nb::handle tensor, const char* name) {
  static Lazy method;  // called without looking it up in each tensor
  const nb::handle is_neg =
      method.get([] { return nb::module_::import_("torch").attr("Tensor").attr("is_neg"); });
  if (is_neg(tensor).ptr() != Py_True) return;
  throw ValueError(std::string(name) + ": is a lazily negated tensor; pass its resolve_neg()");
}

/// Results carry no gradient, so an input that expects one is refused.
void refuse_gradient(nb::handle tensor, const char* name) {
  static LazyName requires_grad("requires_grad");
  if (tensor.attr(requires_grad.get()).ptr() != Py_True) return;
  if (nb::module_::import_("torch").attr("is_grad_enabled")().ptr() != Py_True) return;
  throw ValueError(std::string(name) +
                   ": requires grad, and the library computes the forward pass only; call it under "
                   "torch.no_grad() or "
                   "pass a detached tensor");
}

nb::handle forward_ad() {
  static Lazy module;
  return module.get([] { return nb::module_::import_("torch.autograd.forward_ad"); });
}

/// Is a dual level of torch entered? Read from the module's dictionary, since every call comes
/// here.
bool is_in_dual_level() {
  static Lazy variables;
  static LazyName name("_current_level");
  const nb::handle level = PyDict_GetItemWithError(
      variables.get([] { return nb::object(forward_ad().attr("__dict__")); }).ptr(),
      name.get().ptr());
  return !level || !PyLong_Check(level.ptr()) || PyLong_AsLong(level.ptr()) >= 0;
}

/// Nor do they carry a tangent, which a tensor that does not require grad can have in a dual level.
void refuse_tangent(nb::handle tensor, const char* name) {
  if (forward_ad().attr("unpack_dual")(tensor).attr("tangent").is_none()) return;
  throw ValueError(std::string(name) +
                   ": has a tangent of forward-mode AD, and the library computes the forward pass "
                   "only; pass its primal, without a tangent");
}

/// `array.__dlpack__(...)`, with the newest version that the producer knows.
nb::object export_capsule(nb::handle array, std::optional<std::int64_t> stream, ArrayType& type) {
  static Lazy newest;
  const nb::handle max_version = newest.get([] { return nb::make_tuple(1, 1); });
  const nb::object method = array.attr("__dlpack__");
  if (!type.unversioned) {
    try {
      return stream ? method("stream"_a = *stream, "max_version"_a = max_version)
                    : method("max_version"_a = max_version);
    } catch (const nb::python_error& error) {
      if (!error.matches(PyExc_TypeError)) throw;
    }
  }
  nb::object capsule = stream ? method("stream"_a = *stream) : method();
  type.unversioned = true;
  return capsule;
}

Device dlpack_device(nb::handle array, const char* name) {
  const nb::object said = array.attr("__dlpack_device__")();
  std::pair<nb::object, nb::object> pair;
  std::pair<std::int32_t, std::int32_t> numbers;
  if (!nb::try_cast(said, pair, false) || !nb::try_cast(pair.first, numbers.first) ||
      !nb::try_cast(pair.second, numbers.second)) {
    throw TypeError(std::string(name) + ": its __dlpack_device__() gave " + nb::repr(said).c_str() +
                    "; expected a pair of numbers (type, index)");
  }
  const dlpack::Device device{numbers.first, numbers.second};
  return device_of(device, name);
}

bool same(Stream a, Stream b) { return a.handle == b.handle; }

}  // namespace

TensorArgs::TensorArgs(nb::handle stream, std::optional<Stream> otherwise)
    : given_(stream_arg(stream)), chosen_(given_ ? given_ : otherwise) {}

std::optional<Tensor> TensorArgs::optional_input(nb::handle array, const char* name) {
  if (array.is_none()) return std::nullopt;
  return input(array, name);
}

Tensor TensorArgs::output(nb::handle array, const char* name) {
  const Tensor tensor = convert(array, name, true);
  if (array_type(array.type()).framework == Framework::torch) torch_outputs_.push_back(array);
  return tensor;
}

void TensorArgs::mark_written() const {
  if (torch_outputs_.empty()) return;
  static Lazy function;
  const nb::handle increment_version = function.get(
      [] { return nb::module_::import_("torch.autograd.graph").attr("increment_version"); });
  for (const nb::handle tensor : torch_outputs_) increment_version(tensor);
}

Tensor TensorArgs::convert(nb::handle array, const char* name, bool writable) {
  ArrayType& type = array_type(array.type());
  if (!framework_) framework_ = type.framework;
  if (type.framework == Framework::torch) {
    refuse_gradient(array, name);
    if (!in_dual_level_) in_dual_level_ = is_in_dual_level();
    if (*in_dual_level_) refuse_tangent(array, name);
    refuse_negated(array, name);
  }
  Tensor tensor;
  if (type.api) {
    tensor = convert_quickly(array, name, *type.api);
  } else if (type.is_capsule) {
    tensor = consume(array, name, writable);
  } else if (!type.has_dlpack) {
    const std::string got = type_name_of(array);
    const bool is_traced = got.starts_with("jax.") || got.starts_with("jaxlib.");
    throw TypeError(
        std::string(name) +
        ": expected an array (NumPy, torch, CuPy, JAX or anything with __dlpack__), got " + got +
        (is_traced ? "; functions that JAX traces (jit, vmap) take those of tiledattn.jax" : ""));
  } else if (type.framework == Framework::numpy) {
    tensor = convert_numpy(array, name, writable, type);
  } else {
    tensor = convert_through_dlpack(array, name, writable, type);
  }
  if (!device_) device_ = tensor.device;
  return tensor;
}

Tensor TensorArgs::convert_quickly(nb::handle array, const char* name,
                                   const dlpack::ExchangeApi& api) {
  dlpack::Array described;
  if (api.describe(array.ptr(), &described) != 0) refuse_export(nb::python_error(), array, name);
  const Tensor tensor = tensor_of(described, name);
  // The stream of a framework on a device is the same for all arrays of a call.
  const bool is_asked = asked_ == &api && device_ == tensor.device;
  if (!tensor.device.is_cpu() && !is_asked) {
    void* producer = nullptr;
    if (api.current_stream(described.device.type, described.device.id, &producer) != 0)
      throw nb::python_error();
    came_from(tensor.device, stream_of(reinterpret_cast<std::uintptr_t>(producer)));
    if (!device_ || device_ == tensor.device) asked_ = &api;
  }
  return tensor;
}

Tensor TensorArgs::convert_numpy(nb::handle array, const char* name, bool writable,
                                 ArrayType& type) {
  if (type.is_masked) {
    throw TypeError(std::string(name) +
                    ": is a masked array, whose mask would be ignored; expected a plain array");
  }
  const NumpyDtype dtype = numpy_dtype(array.attr("dtype"));
  const nb::object exported =
      dtype.is_foreign ? array.attr("view")(nb::handle(dtype.bits)) : nb::borrow(array);
  Tensor tensor;
  try {
    tensor = consume(export_capsule(exported, std::nullopt, type), name, writable);
  } catch (const nb::python_error& error) {
    // NumPy before 2.1 cannot export read-only arrays through DLPack; the buffer protocol can.
    nb::ndarray<nb::ro> buffer;
    const bool is_old = !writable && error.matches(PyExc_BufferError);
    if (!is_old || !nb::try_cast<nb::ndarray<nb::ro>>(exported, buffer, false)) {
      if (writable && !nb::cast<bool>(array.attr("flags").attr("writeable"))) {
        throw ValueError(std::string(name) + ": is read-only; it is written to");
      }
      refuse_export(error, array, name);
    }
    dlpack::Array described{const_cast<void*>(buffer.data()),
                            {dlpack::kCpu, 0},
                            static_cast<std::int32_t>(buffer.ndim()),
                            {buffer.dtype().code, buffer.dtype().bits, buffer.dtype().lanes},
                            const_cast<std::int64_t*>(buffer.shape_ptr()),
                            const_cast<std::int64_t*>(buffer.stride_ptr()),
                            0};
    tensor = tensor_of(described, name);
    held_buffers_.push_back(std::move(buffer));
  }
  if (dtype.is_foreign) tensor.dtype = dtype.dtype;
  return tensor;
}

Tensor TensorArgs::convert_through_dlpack(nb::handle array, const char* name, bool writable,
                                          ArrayType& type) {
  if (type.framework == Framework::jax && writable) {
    throw ValueError(std::string(name) +
                     ": is a JAX array, which is immutable; leave it out to get a new array");
  }
  nb::object capsule;
  Device device;
  try {
    device = dlpack_device(array, name);
    std::optional<std::int64_t> stream;
    if (!device.is_cpu()) {
      if (type.framework == Framework::jax) {
        throw TypeError(
            std::string(name) + ": is a JAX array on " + tiledattn::to_string(device) +
            ", whose stream is not public; use the function of the same name in tiledattn.jax");
      }
      if (type.framework == Framework::other) {
        // The producer makes the stream that we name wait for its own work.
        if (!chosen_) chosen_ = Stream{};
        stream = static_cast<std::int64_t>(dlpack_handle(*chosen_));
      } else {
        // Their own ordering would break a graph capture, so it is switched off and left to
        // launch_stream.
        const bool is_cupy = type.framework == Framework::cupy;
        came_from(device,
                  is_cupy ? current_cupy_stream(device.index) : current_torch_stream(device.index));
        stream = -1;
      }
    }
    // torch's own __dlpack__ refuses what refuse_gradient has let pass under no_grad.
    const bool is_torch = type.framework == Framework::torch;
    const nb::object exported = is_torch ? array.attr("detach")() : nb::borrow(array);
    capsule = export_capsule(exported, stream, type);
  } catch (const nb::python_error& error) {
    refuse_export(error, array, name);
  }
  const Tensor tensor = consume(capsule, name, writable);
  if (tensor.device != device) {
    throw ValueError(std::string(name) + ": its __dlpack_device__() says " +
                     tiledattn::to_string(device) + ", but its capsule is of an array on " +
                     tiledattn::to_string(tensor.device));
  }
  return tensor;
}

Tensor TensorArgs::consume(nb::handle capsule, const char* name, bool writable) {
  ManagedArray managed(capsule, name);
  const Tensor tensor = tensor_of(managed.array(), name);
  if (writable && managed.read_only())
    throw ValueError(std::string(name) + ": is read-only; it is written to");
  if (held_.empty()) held_.reserve(12);
  held_.push_back(std::move(managed));
  return tensor;
}

void TensorArgs::came_from(Device device, Stream producer) {
  if (!chosen_) chosen_ = producer;
  // An array on another device than the first is refused later; its stream is of no use here.
  if (device_ && *device_ != device) return;
  if (same(producer, *chosen_)) return;
  for (const Stream& known : producers_) {
    if (same(known, producer)) return;
  }
  producers_.push_back(producer);
}

Stream TensorArgs::launch_stream() {
  if (!device_ || device_->is_cpu()) {
    if (given_)
      throw ValueError("stream: got a stream, but the arrays are on the CPU; expected None");
    return {};
  }
  if (!producers_.empty()) {
    const Backend& backend = backend_for(*device_);
    for (const Stream& producer : producers_)
      backend.order(device_->index, chosen_stream(), producer);
  }
  return chosen_stream();
}

}  // namespace tiledattn::binding
