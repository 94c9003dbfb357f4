// SPDX-License-Identifier: Apache-2.0
// The extension module tiledattn._core: conversions and calls. The public API is the Python package
// around it.
#include <nanobind/nanobind.h>

#include "bindings.h"

NB_MODULE(_core, m) {
  m.doc() = "The compiled part of tiledattn. Use the package; names here may change.";
#ifdef NDEBUG
  // Objects that live until the process ends are the user's business, not a leak to report on
  // stderr.
  nanobind::set_leak_warnings(false);
#endif
  m.attr("version") = TILEDATTN_VERSION;
  tiledattn::binding::bind_exceptions(m);
  tiledattn::binding::bind_array_view(m);
  tiledattn::binding::bind_state(m);
  tiledattn::binding::bind_attention(m);
  tiledattn::binding::bind_one_shot(m);
  tiledattn::binding::bind_tile_source(m);
  tiledattn::binding::bind_streaming(m);
  tiledattn::binding::bind_build(m);
  tiledattn::binding::bind_jax(m);
  tiledattn::binding::bind_scalar(m);
}
