// SPDX-License-Identifier: Apache-2.0
// The parts of the extension module; each is one file.
#pragma once

#include <nanobind/nanobind.h>

namespace tiledattn::binding {

void bind_exceptions(nanobind::module_& m);
void bind_array_view(nanobind::module_& m);
void bind_state(nanobind::module_& m);
void bind_attention(nanobind::module_& m);
void bind_one_shot(nanobind::module_& m);
void bind_tile_source(nanobind::module_& m);
void bind_streaming(nanobind::module_& m);
void bind_build(nanobind::module_& m);
void bind_jax(nanobind::module_& m);
void bind_scalar(nanobind::module_& m);

}  // namespace tiledattn::binding
