// SPDX-License-Identifier: Apache-2.0
#include "scalar_arg.h"

#include "tiledattn/error.h"

namespace nb = nanobind;

namespace tiledattn::binding {

namespace {

[[noreturn]] void refuse_type(nb::handle value, const char* name, const char* expected) {
  throw TypeError(std::string(name) + ": expected " + expected + ", got " + type_name_of(value));
}

/// A str as UTF-8; what that has no bytes for, halves of surrogate pairs, as "\\udc80".
std::string utf8_of(nb::handle text) {
  Py_ssize_t size = 0;
  const char* const utf8 = PyUnicode_AsUTF8AndSize(text.ptr(), &size);
  if (utf8) return {utf8, static_cast<std::size_t>(size)};
  PyErr_Clear();
  PyObject* const encoded = PyUnicode_AsEncodedString(text.ptr(), "utf-8", "backslashreplace");
  if (!encoded) throw nb::python_error();
  const nb::bytes bytes = nb::steal<nb::bytes>(encoded);
  return {bytes.c_str(), bytes.size()};
}

}  // namespace

std::string text_of(nb::handle value) { return utf8_of(nb::str(value)); }

std::string type_name_of(nb::handle object) {
  const nb::handle type = object.type();
  const std::string name = text_of(type.attr("__name__"));
  const std::string module = text_of(type.attr("__module__"));
  return module == "builtins" ? name : module + "." + name;
}

bool is_bool(nb::handle value) {
  if (PyBool_Check(value.ptr())) return true;
  // What most calls bring, before a type's name, which takes longer than all else here.
  if (PyFloat_CheckExact(value.ptr()) || PyLong_CheckExact(value.ptr())) return false;
  const std::string type = type_name_of(value);
  return type == "numpy.bool" || type == "numpy.bool_";
}

bool bool_arg(nb::handle value, const char* name) {
  if (!is_bool(value)) refuse_type(value, name, "True or False");
  return PyObject_IsTrue(value.ptr()) == 1;
}

std::int64_t integer_arg(nb::handle value, const char* name) {
  if (PyBool_Check(value.ptr()) || !PyIndex_Check(value.ptr())) refuse_type(value, name, "an int");
  const nb::object number = nb::steal(PyNumber_Index(value.ptr()));
  if (!number.is_valid()) {
    PyErr_Clear();  // an array of several elements has __index__ too
    refuse_type(value, name, "an int");
  }
  int overflow = 0;
  const long long result = PyLong_AsLongLongAndOverflow(number.ptr(), &overflow);
  if (overflow != 0)
    throw ValueError(std::string(name) + ": got " + text_of(number) + "; expected a 64-bit number");
  return result;
}

std::optional<std::int64_t> optional_integer_arg(nb::handle value, const char* name) {
  if (value.is_none()) return std::nullopt;
  return integer_arg(value, name);
}

double number_arg(nb::handle value, const char* name) {
  if (is_bool(value)) refuse_type(value, name, "a number");
  const double result = PyFloat_AsDouble(value.ptr());
  if (result == -1.0 && PyErr_Occurred()) {
    const bool too_large = PyErr_ExceptionMatches(PyExc_OverflowError) != 0;
    PyErr_Clear();
    if (too_large) throw ValueError(std::string(name) + ": got an int beyond the range of a float");
    refuse_type(value, name, "a number");
  }
  return result;
}

std::optional<double> optional_number_arg(nb::handle value, const char* name) {
  if (value.is_none()) return std::nullopt;
  return number_arg(value, name);
}

std::string text_arg(nb::handle value, const char* name) {
  if (!PyUnicode_Check(value.ptr())) refuse_type(value, name, "a str");
  return utf8_of(value);
}

std::vector<std::int64_t> integers_arg(nb::list values, const char* name) {
  std::vector<std::int64_t> integers;
  integers.reserve(nb::len(values));
  for (const nb::handle value : values) integers.push_back(integer_arg(value, name));
  return integers;
}

Window window_arg(nb::handle value) {
  const bool is_pair =
      (PyTuple_Check(value.ptr()) || PyList_Check(value.ptr())) && nb::len(value) == 2;
  if (!is_pair) {
    const bool is_sequence = PyTuple_Check(value.ptr()) || PyList_Check(value.ptr());
    if (!is_sequence) refuse_type(value, "window", "(left, right), each None or an int");
    throw ValueError("window: got " + std::to_string(nb::len(value)) +
                     " entries; expected (left, right), each None or an int");
  }
  const nb::object left = value[0];
  const nb::object right = value[1];
  return {optional_integer_arg(left, "window"), optional_integer_arg(right, "window")};
}

Device device_arg(nb::handle value) {
  if (value.is_none()) return default_device();
  if (!PyUnicode_Check(value.ptr()) && PyNumber_Check(value.ptr()))
    refuse_type(value, "device", "a str, such as \"cuda:1\", or a framework's device");
  return parse_device(text_of(value));
}

}  // namespace tiledattn::binding
