// SPDX-License-Identifier: Apache-2.0
// The results of a call: the caller's arrays, or new ones of the framework of the call's first
// array.
#pragma once

#include <nanobind/nanobind.h>

#include <optional>

#include "array_type.h"
#include "tensor_arg.h"
#include "tiledattn/tensor.h"

namespace tiledattn::binding {

/// `out` and perhaps `lse` of one call.
class ResultArrays {
 public:
  /// `like`: shape, dtype and device of an `out` that is made here. `wants_lse`: make an lse where
  /// none is given.
  ResultArrays(TensorArgs& args, const Tensor& like, nanobind::handle out, nanobind::handle lse,
               bool wants_lse, Framework framework);

  const Tensor& out() const { return out_; }
  const std::optional<Tensor>& lse() const { return lse_; }

  /// What the call returns: out, or (out, lse).
  nanobind::any value() const;

 private:
  Tensor make(TensorArgs& args, const Tensor& like, const char* name, Framework framework,
              nanobind::object& object);

  Tensor out_;
  std::optional<Tensor> lse_;
  nanobind::object out_object_;
  nanobind::object lse_object_;
  bool out_to_jax_ = false;
  bool lse_to_jax_ = false;
};

/// Shape, dtype and device of the result for these q and v (or pools): q.shape[:-1] +
/// (v.shape[-1],).
Tensor attention_result_like(const Tensor& q, const Tensor& v);

}  // namespace tiledattn::binding
