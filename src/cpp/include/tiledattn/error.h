// SPDX-License-Identifier: Apache-2.0
// The errors that the library throws. Each message names the argument, what came and what was
// wanted.
#pragma once

#include <stdexcept>
#include <string>

namespace tiledattn {

/// Base of all errors of the library.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// A wrong element type or kind of argument.
class TypeError : public Error {
 public:
  using Error::Error;
};

/// A wrong shape, size or value.
class ValueError : public Error {
 public:
  using Error::Error;
};

/// A block id outside the pool.
class IndexError : public Error {
 public:
  using Error::Error;
};

/// Memory could not be had; the object that asked is unchanged.
class MemoryError : public Error {
 public:
  using Error::Error;
};

/// A call to the CUDA runtime or driver failed; the message holds the call's name and the driver's
/// text.
class CudaError : public Error {
 public:
  using Error::Error;
};

}  // namespace tiledattn
