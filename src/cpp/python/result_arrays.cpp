// SPDX-License-Identifier: Apache-2.0
#include "result_arrays.h"

#include <nanobind/stl/string.h>

#include <string>

#include "array_view.h"
#include "lazy.h"

namespace nb = nanobind;

namespace tiledattn::binding {

namespace {

/// Can `like` be made at all? Where not, the core's checks refuse q before they look at out.
bool can_make(const Tensor& like) {
  const bool is_known =
      like.dtype == DType::float32 || like.dtype == DType::float16 || like.dtype == DType::bfloat16;
  return is_known && like.rank > 0;
}

nb::object empty_array(Framework framework, const Tensor& like) {
  static Lazy function;
  const nb::handle empty =
      function.get([] { return nb::module_::import_("tiledattn._arrays").attr("empty"); });
  nb::list shape;
  for (int i = 0; i < like.rank; ++i) shape.append(like.shape[i]);
  return empty(to_string(framework), nb::tuple(shape), tiledattn::to_string(like.dtype),
               tiledattn::to_string(like.device));
}

nb::object finished(const nb::object& object, bool to_jax) {
  return to_jax ? nb::module_::import_("tiledattn._arrays").attr("to_jax")(object) : object;
}

}  // namespace

ResultArrays::ResultArrays(TensorArgs& args, const Tensor& like, nb::handle out, nb::handle lse,
                           bool wants_lse, Framework framework) {
  const bool is_jax = framework == Framework::jax;
  bool has_out = true;
  if (!out.is_none()) {
    out_ = args.output(out, "out");
    out_object_ = nb::borrow(out);
  } else if (can_make(like)) {
    out_ = make(args, like, "out", framework, out_object_);
    out_to_jax_ = is_jax;
  } else {
    out_ = like;
    out_.data = nullptr;
    has_out = false;
  }
  if (!lse.is_none()) {
    lse_ = args.output(lse, "lse");
    lse_object_ = nb::borrow(lse);
  } else if (wants_lse && has_out && out_.rank > 0) {
    Tensor lse_like = out_;
    --lse_like.rank;
    lse_like.dtype = DType::float32;
    lse_ = make(args, lse_like, "lse", framework, lse_object_);
    lse_to_jax_ = is_jax;
  }
}

Tensor ResultArrays::make(TensorArgs& args, const Tensor& like, const char* name,
                          Framework framework, nb::object& object) {
  if (framework == Framework::other && !like.device.is_cpu()) {
    ArrayView view = ArrayView::make(like, args.chosen_stream());
    const Tensor tensor = view.tensor();
    object = nb::cast(std::move(view));
    return tensor;
  }
  const bool is_numpy = framework == Framework::other || framework == Framework::jax;
  object = empty_array(is_numpy ? Framework::numpy : framework, like);
  return args.new_output(object, name);
}

nb::any ResultArrays::value() const {
  nb::object out = finished(out_object_, out_to_jax_);
  if (!lse_) return nb::borrow<nb::any>(out);
  return nb::borrow<nb::any>(nb::make_tuple(out, finished(lse_object_, lse_to_jax_)));
}

Tensor attention_result_like(const Tensor& q, const Tensor& v) {
  Tensor like = q;
  if (q.rank > 0 && v.rank > 0) like.shape[q.rank - 1] = v.shape[v.rank - 1];
  return like;
}

}  // namespace tiledattn::binding
