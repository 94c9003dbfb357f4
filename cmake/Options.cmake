# SPDX-License-Identifier: Apache-2.0
#
# Every build option of the project.

# A pip build has no -D line: there the environment variable of the same name counts.
set(cuda_default AUTO)
if(DEFINED ENV{TILEDATTN_CUDA})
  set(cuda_default "$ENV{TILEDATTN_CUDA}")
endif()
set(TILEDATTN_CUDA "${cuda_default}"
    CACHE STRING "CUDA kernels: AUTO (where an nvcc is found), ON (fail without one) or OFF")
set_property(CACHE TILEDATTN_CUDA PROPERTY STRINGS AUTO ON OFF)
if(NOT TILEDATTN_CUDA MATCHES "^(AUTO|ON|OFF)$")
  message(FATAL_ERROR "TILEDATTN_CUDA: got \"${TILEDATTN_CUDA}\"; expected AUTO, ON or OFF")
endif()

set(python_default OFF)
if(SKBUILD)
  set(python_default ON)
endif()
option(TILEDATTN_PYTHON "Build the Python extension module" ${python_default})
option(TILEDATTN_NANOBIND_SPLIT
       "Build the module against the nanobind-backend package: one binary for Python 3.10 and later" ON)
option(TILEDATTN_SHARED "Build and install the shared library of the C++ and C API" OFF)
option(TILEDATTN_TESTS "Build the C++ tests for ctest" OFF)
option(TILEDATTN_WERROR "Treat warnings as errors" OFF)
option(TILEDATTN_PTXAS_VERBOSE "Let ptxas print registers and spills of every kernel" OFF)
set(TILEDATTN_SANITIZE "" CACHE STRING "Sanitizers for all C++ code, e.g. address,undefined or thread")

# CMake itself defaults to a build without optimisation.
get_property(multi_config GLOBAL PROPERTY GENERATOR_IS_MULTI_CONFIG)
if(NOT multi_config AND NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "Debug, Release, RelWithDebInfo or MinSizeRel" FORCE)
endif()
