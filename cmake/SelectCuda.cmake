# SPDX-License-Identifier: Apache-2.0
#
# Decides whether the CUDA kernels are built, with which nvcc and for which GPUs. Sets TILEDATTN_HAVE_CUDA.
#
# nvcc: CMAKE_CUDA_COMPILER or $CUDACXX, then the PATH, $CUDA_PATH and /usr/local/cuda, then that of PyPI packages.
# With TILEDATTN_PYPI_NVCC=1 in the environment PyPI's goes before the system's: releases use one known version.
# GPUs: CMAKE_CUDA_ARCHITECTURES or $CUDAARCHS, then the GPUs of this machine, then 80 and 90a.
set(TILEDATTN_HAVE_CUDA OFF)
if(TILEDATTN_CUDA STREQUAL "OFF")
  message(STATUS "tiledattn: CUDA is off, building for the CPU alone")
  return()
endif()

# The packages cuda-toolkit[nvcc,cudart,crt,nvvm,cccl] unpack into site-packages/nvidia/cu13 of the build's Python.
function(tiledattn_find_pypi_nvcc)
  find_package(Python 3.10 QUIET COMPONENTS Interpreter)
  if(NOT Python_EXECUTABLE)
    return()
  endif()
  execute_process(
    COMMAND "${Python_EXECUTABLE}" "${CMAKE_CURRENT_SOURCE_DIR}/cmake/find_pypi_cuda.py"
    OUTPUT_VARIABLE root OUTPUT_STRIP_TRAILING_WHITESPACE RESULT_VARIABLE status)
  if(NOT status EQUAL 0)
    return()
  endif()
  set(CMAKE_CUDA_COMPILER "${root}/bin/nvcc" CACHE FILEPATH "nvcc of the PyPI packages")
  set(CUDAToolkit_ROOT "${root}" CACHE PATH "CUDA tree of the PyPI packages")
  # nvcc 13.0 and 13.1 look for libraries in lib64, which the packages call lib.
  set(ENV{LIBRARY_PATH} "${root}/lib:$ENV{LIBRARY_PATH}")
  # FindCUDAToolkit insists on a shared runtime library without a version in its name. Nothing links this one.
  file(GLOB cudart "${root}/lib/libcudart.so.*")
  set(CUDA_CUDART "${cudart}" CACHE FILEPATH "only to satisfy FindCUDAToolkit")
endfunction()

# The architectures of the GPUs here, e.g. "90a"; empty without a GPU.
function(tiledattn_present_architectures result)
  set(${result} "" PARENT_SCOPE)
  find_program(TILEDATTN_NVIDIA_SMI nvidia-smi)
  mark_as_advanced(TILEDATTN_NVIDIA_SMI)
  if(NOT TILEDATTN_NVIDIA_SMI)
    return()
  endif()
  execute_process(
    COMMAND "${TILEDATTN_NVIDIA_SMI}" --query-gpu=compute_cap --format=csv,noheader
    OUTPUT_VARIABLE output ERROR_QUIET RESULT_VARIABLE status TIMEOUT 30)
  if(NOT status EQUAL 0)
    return()
  endif()
  string(REGEX MATCHALL "[0-9]+\\.[0-9]+" capabilities "${output}")
  list(REMOVE_DUPLICATES capabilities)
  set(found "")
  foreach(capability IN LISTS capabilities)
    string(REPLACE "." "" architecture "${capability}")
    if(architecture STREQUAL "90")
      set(architecture "90a")  # the kernels of Hopper use instructions that only 90a has
    endif()
    list(APPEND found "${architecture}-real")
  endforeach()
  set(${result} "${found}" PARENT_SCOPE)
endfunction()

if(NOT CMAKE_CUDA_COMPILER AND "$ENV{TILEDATTN_PYPI_NVCC}")
  tiledattn_find_pypi_nvcc()
endif()
if(NOT CMAKE_CUDA_COMPILER AND NOT DEFINED ENV{CUDACXX})
  find_program(TILEDATTN_SYSTEM_NVCC nvcc PATHS ENV CUDA_PATH /usr/local/cuda PATH_SUFFIXES bin)
  mark_as_advanced(TILEDATTN_SYSTEM_NVCC)
  if(TILEDATTN_SYSTEM_NVCC)
    set(CMAKE_CUDA_COMPILER "${TILEDATTN_SYSTEM_NVCC}" CACHE FILEPATH "nvcc")
  else()
    tiledattn_find_pypi_nvcc()
  endif()
endif()

if(NOT CMAKE_CUDA_ARCHITECTURES AND NOT DEFINED ENV{CUDAARCHS})
  tiledattn_present_architectures(architectures)
  if(NOT architectures)
    set(architectures 80-real 90a-real)
  endif()
  set(CMAKE_CUDA_ARCHITECTURES "${architectures}" CACHE STRING "GPU architectures")
endif()

include(CheckLanguage)
check_language(CUDA)
if(CMAKE_CUDA_COMPILER)
  enable_language(CUDA)
  # After enable_language, whose compiler check fails where a standard is already asked for. CMake 3.25 has no flag for 20.
  if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)
    set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")
    set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION "-std=c++20")
  endif()
  set(CMAKE_CUDA_STANDARD 20)
  set(CMAKE_CUDA_STANDARD_REQUIRED ON)
  find_package(CUDAToolkit 12.8 REQUIRED)
  set(TILEDATTN_HAVE_CUDA ON)
  list(JOIN CMAKE_CUDA_ARCHITECTURES " " TILEDATTN_CUDA_ARCHITECTURES_TEXT)
  message(STATUS "tiledattn: CUDA ${CMAKE_CUDA_COMPILER_VERSION} (${CMAKE_CUDA_COMPILER}) "
                 "for ${TILEDATTN_CUDA_ARCHITECTURES_TEXT}")
elseif(TILEDATTN_CUDA STREQUAL "ON")
  message(FATAL_ERROR "TILEDATTN_CUDA=ON, but there is no working nvcc: not in CUDACXX, not on the PATH, not in "
                      "CUDA_PATH or /usr/local/cuda, and not among the build's Python packages. "
                      "Set TILEDATTN_PYPI_NVCC=1 to let pip fetch one, or TILEDATTN_CUDA=OFF.")
else()
  message(STATUS "tiledattn: no nvcc found, building for the CPU alone (TILEDATTN_CUDA=AUTO)")
endif()
