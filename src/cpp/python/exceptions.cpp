// SPDX-License-Identifier: Apache-2.0
// The library's errors as Python exceptions.
#include <nanobind/nanobind.h>

#include <exception>

#include "bindings.h"
#include "tiledattn/error.h"

namespace nb = nanobind;

namespace tiledattn::binding {

namespace {

void translate(const std::exception_ptr& error, void* /*payload*/) {
  try {
    std::rethrow_exception(error);
  } catch (const TypeError& e) {
    PyErr_SetString(PyExc_TypeError, e.what());
  } catch (const ValueError& e) {
    PyErr_SetString(PyExc_ValueError, e.what());
  } catch (const IndexError& e) {
    PyErr_SetString(PyExc_IndexError, e.what());
  } catch (const MemoryError& e) {
    PyErr_SetString(PyExc_MemoryError, e.what());
  }
}

}  // namespace

void bind_exceptions(nb::module_& m) {
  nb::register_exception_translator(translate);
  const nb::exception<CudaError> cuda_error(m, "CudaError", PyExc_RuntimeError);
  cuda_error.attr("__doc__") =
      "A call to the CUDA runtime or driver failed; the message holds the call's name and the "
      "driver's text.";
}

}  // namespace tiledattn::binding
