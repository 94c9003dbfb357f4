// SPDX-License-Identifier: Apache-2.0
#include "array_view.h"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>

#include <utility>

#include "backend.h"
#include "bindings.h"
#include "dlpack_abi.h"
#include "gil.h"
#include "scalar_arg.h"
#include "stream_arg.h"
#include "tiledattn/error.h"
#include "tiledattn/workspace.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace tiledattn::binding {

namespace {

std::pair<std::int32_t, std::int32_t> dlpack_device(Device device) {
  return {device.is_cpu() ? dlpack::kCpu : dlpack::kCuda, device.index};
}

/// Shape, strides and owner of an exported array.
struct Exported {
  Tensor tensor;
  std::shared_ptr<void> owner;
};

dlpack::Array describe(Exported& exported) {
  Tensor& tensor = exported.tensor;
  const auto code = static_cast<std::uint16_t>(tensor.dtype);
  const auto [type, id] = dlpack_device(tensor.device);
  return {tensor.data,
          {type, id},
          tensor.rank,
          {static_cast<std::uint8_t>(code >> 8), static_cast<std::uint8_t>(code), 1},
          tensor.shape,
          tensor.strides,
          0};
}

template <typename ManagedType>
void delete_managed(ManagedType* managed) {
  delete static_cast<Exported*>(managed->context);
  delete managed;
}

/// Frees what a capsule holds that nobody took.
template <typename ManagedType>
void drop_capsule(PyObject* capsule) {
  const char* name = PyCapsule_GetName(capsule);
  const bool unused = name != nullptr && std::string(name).rfind("dltensor", 0) == 0;
  if (!unused) return;
  auto* managed = static_cast<ManagedType*>(PyCapsule_GetPointer(capsule, name));
  managed->deleter(managed);
}

template <typename ManagedType>
nb::object make_capsule(std::unique_ptr<ManagedType> managed, std::unique_ptr<Exported> exported,
                        const char* name) {
  managed->array = describe(*exported);
  managed->deleter = delete_managed<ManagedType>;
  managed->context = exported.get();
  nb::object capsule = nb::steal(PyCapsule_New(managed.get(), name, drop_capsule<ManagedType>));
  if (!capsule.is_valid()) throw nb::python_error();
  managed.release();
  exported.release();
  return capsule;
}

nb::object export_tensor(const Tensor& tensor, std::shared_ptr<void> owner, bool versioned,
                         bool copied) {
  auto exported = std::make_unique<Exported>(Exported{tensor, std::move(owner)});
  if (!versioned) {
    return make_capsule(std::make_unique<dlpack::Managed>(), std::move(exported), "dltensor");
  }
  auto managed = std::make_unique<dlpack::ManagedVersioned>();
  managed->version = {1, 1};
  managed->flags = copied ? dlpack::kCopied : 0;
  return make_capsule(std::move(managed), std::move(exported), "dltensor_versioned");
}

/// Two integers.
std::pair<std::int64_t, std::int64_t> pair_arg(nb::handle value, const char* name,
                                               const char* expected) {
  const bool is_sequence = PyTuple_Check(value.ptr()) || PyList_Check(value.ptr());
  if (!is_sequence || nb::len(value) != 2) {
    throw TypeError(std::string(name) + ": expected None or " + expected + ", got " +
                    text_of(nb::repr(value)));
  }
  const nb::object first = value[0];
  const nb::object second = value[1];
  return {integer_arg(first, name), integer_arg(second, name)};
}

/// The consumer's stream; nothing when it wants no ordering.
std::optional<Stream> consumer_stream(nb::handle stream, Device device) {
  if (device.is_cpu()) {
    if (!stream.is_none()) throw ValueError("stream: the array is on the CPU; expected None");
    return std::nullopt;
  }
  if (stream.is_none()) return Stream{};
  const std::int64_t handle = integer_arg(stream, "stream");
  if (handle == -1) return std::nullopt;
  if (handle < 1) {
    throw ValueError(
        "stream: got " + std::to_string(handle) +
        "; expected None, -1 (no ordering), 1 (the legacy default stream), 2 or a stream handle");
  }
  return stream_of(static_cast<std::uintptr_t>(handle));
}

Device wanted_device(nb::handle dl_device, Device own) {
  if (dl_device.is_none()) return own;
  const auto [type, index] = pair_arg(dl_device, "dl_device", "(device type, device id)");
  if (type == dlpack::kCpu) return {DeviceKind::cpu, 0};
  if (std::pair<std::int64_t, std::int64_t>(dlpack_device(own)) == std::pair(type, index)) {
    return own;
  }
  throw nb::buffer_error(
      ("dl_device: expected the device of the array, " + to_string(own) + ", or the CPU").c_str());
}

nb::typed<nb::tuple, std::int64_t, nb::ellipsis> shape_tuple(const Tensor& tensor) {
  nb::list shape;
  for (int i = 0; i < tensor.rank; ++i) shape.append(tensor.shape[i]);
  return nb::borrow<nb::typed<nb::tuple, std::int64_t, nb::ellipsis>>(nb::tuple(shape));
}

}  // namespace

ArrayView ArrayView::make(const Tensor& shape, Stream stream) {
  const Buffer buffer(shape.device, shape.size() * item_bytes(shape.dtype));
  // A capture may be all that is left of it when the graph runs.
  if (!shape.device.is_cpu())
    backend_for(shape.device).retain_in_capture(shape.device.index, stream, buffer.owner());
  Tensor tensor = shape;
  tensor.data = buffer.data();
  std::int64_t stride = 1;
  for (int i = tensor.rank - 1; i >= 0; --i) {
    tensor.strides[i] = stride;
    stride *= tensor.shape[i];
  }
  return ArrayView(tensor, buffer.owner(), [stream] { return stream; });
}

ArrayView ArrayView::copied_to(Device device, Stream stream) const {
  Tensor shape = tensor_;
  shape.device = device;
  ArrayView copy = make(shape, stream);
  const Backend& backend = backend_for(device.is_cpu() ? tensor_.device : device);
  if (!tensor_.device.is_cpu()) backend.retain_in_capture(tensor_.device.index, stream, owner_);
  if (nbytes() > 0)
    backend.copy(copy.tensor_.data, device, tensor_.data, tensor_.device, nbytes(), stream);
  return copy;
}

nb::object ArrayView::dlpack(nb::handle stream, nb::handle max_version, nb::handle dl_device,
                             nb::handle copy) const {
  const Device own = tensor_.device;
  const std::optional<Stream> consumer = consumer_stream(stream, own);
  const Device wanted = wanted_device(dl_device, own);
  const bool must_copy = !copy.is_none() && bool_arg(copy, "copy");
  const bool may_copy = copy.is_none() || must_copy;
  if (wanted != own && !may_copy) {
    throw nb::buffer_error(
        ("copy: False, but going from " + to_string(own) + " to the CPU needs a copy").c_str());
  }
  bool versioned = false;
  if (!max_version.is_none()) {
    versioned = pair_arg(max_version, "max_version", "(major, minor)").first >= 1;
  }

  ArrayView source = *this;
  {
    const GilReleased unlocked;
    const Stream ready = settle_();
    if (must_copy || wanted != own) source = copied_to(wanted, ready);
    if (consumer && consumer->handle != ready.handle)
      backend_for(own).order(own.index, *consumer, ready);
  }
  return export_tensor(source.tensor_, source.owner_, versioned, must_copy || wanted != own);
}

nb::object ArrayView::to_numpy(nb::handle self, nb::handle dtype, nb::handle copy) const {
  if (!tensor_.device.is_cpu()) {
    throw TypeError("this array is on " + to_string(tensor_.device) +
                    "; NumPy reads the CPU only: use from_dlpack of a GPU framework");
  }
  nb::object array = nb::module_::import_("numpy").attr("from_dlpack")(self);
  const bool must_copy = !copy.is_none() && bool_arg(copy, "copy");
  const bool may_copy = copy.is_none() || must_copy;
  if (!dtype.is_none()) {
    nb::object cast = array.attr("astype")(dtype, "copy"_a = must_copy);
    if (!may_copy && !cast.is(array))
      throw ValueError("copy: False, but another dtype needs a copy");
    return cast;
  }
  return must_copy ? array.attr("copy")() : array;
}

void bind_array_view(nb::module_& m) {
  nb::class_<ArrayView>(m, "Array", "An array of the library's own, for any consumer of DLPack.")
      .def("__dlpack__", &ArrayView::dlpack, nb::kw_only(), "stream"_a = nb::none(),
           "max_version"_a = nb::none(), "dl_device"_a = nb::none(), "copy"_a = nb::none(),
           nb::sig("def __dlpack__(self, *, stream: int | None = None, max_version: tuple[int, "
                   "int] | None = None, "
                   "dl_device: tuple[int, int] | None = None, copy: bool | None = None) -> object"))
      .def("__dlpack_device__",
           [](const ArrayView& self) { return dlpack_device(self.tensor().device); })
      .def(
          "__array__",
          [](nb::handle self, nb::handle dtype, nb::handle copy) {
            return nb::cast<const ArrayView&>(self).to_numpy(self, dtype, copy);
          },
          "dtype"_a = nb::none(), "copy"_a = nb::none(),
          nb::sig("def __array__(self, dtype: object = None, copy: bool | None = None) -> "
                  "numpy.ndarray"))
      .def("__len__",
           [](const ArrayView& self) {
             if (self.tensor().rank == 0)
               throw TypeError("an array without dimensions has no len()");
             return self.tensor().shape[0];
           })
      .def("__repr__",
           [](const ArrayView& self) {
             const Tensor& t = self.tensor();
             return "<tiledattn array " + shape_to_string(t) + " " + to_string(t.dtype) + " on " +
                    to_string(t.device) + ">";
           })
      .def_prop_ro("shape", [](const ArrayView& self) { return shape_tuple(self.tensor()); })
      .def_prop_ro("ndim", [](const ArrayView& self) { return self.tensor().rank; })
      .def_prop_ro("size", [](const ArrayView& self) { return self.tensor().size(); })
      .def_prop_ro("nbytes", &ArrayView::nbytes)
      .def_prop_ro("dtype", [](const ArrayView& self) { return to_string(self.tensor().dtype); })
      .def_prop_ro("device", [](const ArrayView& self) { return to_string(self.tensor().device); });
}

}  // namespace tiledattn::binding
