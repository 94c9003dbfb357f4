// SPDX-License-Identifier: Apache-2.0
// Tile sources, and the sequences that are made of their blocks.
#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bindings.h"
#include "gil.h"
#include "python_source.h"
#include "scalar_arg.h"
#include "scale_arg.h"
#include "tensor_arg.h"
#include "tiledattn/streaming.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace tiledattn::binding {

namespace {

using Blocks = std::vector<std::int64_t>;

DType dtype_arg(nb::handle value) {
  const std::string name = text_arg(value, "dtype");
  for (const DType dtype :
       {DType::bfloat16, DType::float16, DType::float32, DType::float8_e4m3fn, DType::int8}) {
    if (name == to_string(dtype)) return dtype;
  }
  throw ValueError("dtype: got '" + name +
                   "'; expected 'bfloat16', 'float16', 'float32', 'float8_e4m3fn' or 'int8'");
}

TileScales scales_arg(nb::handle k_scale, nb::handle v_scale) {
  return {optional_scale_number(k_scale, "k_scale"), optional_scale_number(v_scale, "v_scale")};
}

BlockLayout layout_arg(nb::handle value) {
  const std::string name = text_arg(value, "layout");
  if (name == "nhd") return BlockLayout::nhd;
  if (name == "hnd") return BlockLayout::hnd;
  throw ValueError("layout: got '" + name + "'; expected 'hnd' or 'nhd'");
}

/// What Python calls a TileGeometry: sizes, and the order in a block.
struct PackedGeometry {
  TileSizes sizes;
  BlockLayout layout;
  TileGeometry geometry;
};

void construct_geometry(PackedGeometry* self, nb::handle num_blocks, nb::handle block_size,
                        nb::handle num_kv_heads, nb::handle head_dim, nb::handle head_dim_v,
                        nb::handle dtype, nb::handle layout, nb::handle k_scale,
                        nb::handle v_scale) {
  TileSizes sizes;
  sizes.num_blocks = integer_arg(num_blocks, "num_blocks");
  sizes.block_size = integer_arg(block_size, "block_size");
  sizes.num_kv_heads = integer_arg(num_kv_heads, "num_kv_heads");
  sizes.head_dim = integer_arg(head_dim, "head_dim");
  sizes.head_dim_v = optional_integer_arg(head_dim_v, "head_dim_v").value_or(sizes.head_dim);
  if (sizes.head_dim_v == 0) throw ValueError("head_dim_v: got 0; expected 1 to 256");
  sizes.dtype = dtype_arg(dtype);
  sizes.scales = scales_arg(k_scale, v_scale);
  const BlockLayout order = layout_arg(layout);
  new (self) PackedGeometry{sizes, order, TileGeometry::packed(sizes, order)};
}

/// Keeps the caller's arrays, and with them the memory, alive.
std::shared_ptr<void> keep(nb::handle first, nb::handle second) {
  const nb::object both = nb::make_tuple(first, second);
  return {both.inc_ref().ptr(), [](void* last) {
            if (Py_IsInitialized() == 0) return;
            const nb::gil_scoped_acquire locked;
            Py_DECREF(static_cast<PyObject*>(last));
          }};
}

void refuse_capsule(nb::handle array, const char* name) {
  if (!PyCapsule_CheckExact(array.ptr())) return;
  throw TypeError(std::string(name) +
                  ": is a DLPack capsule, which can be read only once; expected an array");
}

std::shared_ptr<PoolSource> make_pool(nb::handle k_pool, nb::handle v_pool, nb::handle name,
                                      nb::handle pin, nb::handle k_scale, nb::handle v_scale) {
  refuse_capsule(k_pool, "k_pool");
  refuse_capsule(v_pool, "v_pool");
  TensorArgs args{nb::none()};
  const Tensor k = args.input(k_pool, "k_pool");
  const Tensor v = args.input(v_pool, "v_pool");
  return std::make_shared<PoolSource>(k, v, keep(k_pool, v_pool), text_arg(name, "name"),
                                      bool_arg(pin, "pin"), scales_arg(k_scale, v_scale));
}

std::shared_ptr<PoolSource> allocate_pool(const PackedGeometry& geometry, nb::handle name,
                                          nb::handle pin) {
  return PoolSource::allocate(geometry.sizes, geometry.layout, text_arg(name, "name"),
                              bool_arg(pin, "pin"));
}

/// The memory of a pool that allocate() made, [num_blocks, block_bytes].
nb::object pool_bytes(const PoolSource& self) {
  return numpy_bytes(self.owner().get(), self.describe().sizes.num_blocks,
                     self.describe().block_bytes(), self.owner());
}

Blocks evict(PoolSource& self, const Blocks& blocks) {
  const GilReleased unlocked;
  return self.evict(blocks.data(), static_cast<std::int64_t>(blocks.size()));
}

void restore(PoolSource& self, const Blocks& blocks) {
  const GilReleased unlocked;
  self.restore(blocks.data(), static_cast<std::int64_t>(blocks.size()));
}

// A source may hold sequences of its own blocks. Python finds such a cycle by what these two tell
// its garbage collector.

int traverse_source(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  if (nb::inst_ready(self)) Py_VISIT(nb::inst_ptr<PythonSource>(self)->object().ptr());
  return 0;
}

/// Each part has a reference of its own to the Python object of its source.
int traverse_sequence(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  if (!nb::inst_ready(self)) return 0;
  for (const KvPart& part : nb::inst_ptr<StreamSequence>(self)->parts) {
    const nb::object source = nb::find(part.source);
    Py_VISIT(source.ptr());
  }
  return 0;
}

int clear_sequence(PyObject* self) {
  const std::vector<KvPart> parts = std::move(nb::inst_ptr<StreamSequence>(self)->parts);
  return 0;
}

PyType_Slot source_slots[] = {{Py_tp_traverse, reinterpret_cast<void*>(traverse_source)},
                              {0, nullptr}};
PyType_Slot sequence_slots[] = {{Py_tp_traverse, reinterpret_cast<void*>(traverse_sequence)},
                                {Py_tp_clear, reinterpret_cast<void*>(clear_sequence)},
                                {0, nullptr}};

}  // namespace

void bind_tile_source(nb::module_& m) {
  nb::class_<PackedGeometry>(m, "TileGeometry")
      .def("__init__", construct_geometry, "num_blocks"_a.none(), "block_size"_a.none(),
           "num_kv_heads"_a.none(), "head_dim"_a.none(), "head_dim_v"_a.none(), "dtype"_a.none(),
           "layout"_a.none(), "k_scale"_a.none(), "v_scale"_a.none())
      .def_prop_ro("head_dim_v", [](const PackedGeometry& g) { return g.sizes.head_dim_v; })
      .def_prop_ro("block_bytes", [](const PackedGeometry& g) { return g.geometry.block_bytes(); });

  nb::class_<TileSource>(m, "TileSource")
      .def_prop_ro("name", &TileSource::name)
      .def_prop_ro("block_size",
                   [](const TileSource& self) { return self.describe().sizes.block_size; });
  nb::class_<PythonSource, TileSource>(m, "PythonSource", nb::is_weak_referenceable(),
                                       nb::type_slots(source_slots))
      .def(
          "__init__",
          [](PythonSource* self, nb::object object, const PackedGeometry& geometry,
             nb::handle name) {
            new (self) PythonSource(std::move(object), geometry.geometry, text_arg(name, "name"));
          },
          "object"_a, "geometry"_a, "name"_a.none());
  nb::class_<PoolSource, TileSource>(m, "PoolSource")
      .def_static("of", make_pool, "k_pool"_a.none(), "v_pool"_a.none(), "name"_a.none(),
                  "pin"_a.none(), "k_scale"_a.none(), "v_scale"_a.none())
      .def_static("allocate", allocate_pool, "geometry"_a, "name"_a.none(), "pin"_a.none())
      .def("bytes", pool_bytes)
      .def("evict", evict, "blocks"_a)
      .def("restore", restore, "blocks"_a)
      .def_prop_ro("num_blocks",
                   [](const PoolSource& self) { return self.describe().sizes.num_blocks; })
      .def_prop_ro("block_bytes",
                   [](const PoolSource& self) { return self.describe().block_bytes(); })
      .def_prop_ro("residency", [](const PoolSource& self) { return to_string(self.residency()); });

  nb::class_<StreamSequence>(m, "StreamSequence", nb::type_slots(sequence_slots))
      .def(
          "__init__",
          [](StreamSequence* self, nb::handle length) {
            new (self) StreamSequence{integer_arg(length, "length"), {}};
          },
          "length"_a.none())
      .def(
          "add",
          [](StreamSequence& self, std::shared_ptr<TileSource> source, Blocks blocks,
             nb::handle position) {
            self.parts.push_back(
                {std::move(source), std::move(blocks), integer_arg(position, "position")});
          },
          "source"_a, "blocks"_a, "position"_a.none());
}

}  // namespace tiledattn::binding
