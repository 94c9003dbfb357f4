# SPDX-License-Identifier: Apache-2.0
#
# Flags of all targets, and functions for what only some of them take.
set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_CXX_VISIBILITY_PRESET hidden)
set(CMAKE_CUDA_VISIBILITY_PRESET hidden)
set(CMAKE_VISIBILITY_INLINES_HIDDEN ON)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)

if(TILEDATTN_SANITIZE)
  set(sanitizer_flags -fsanitize=${TILEDATTN_SANITIZE} -fno-omit-frame-pointer)
  if(TILEDATTN_SANITIZE MATCHES "undefined")
    list(APPEND sanitizer_flags -fno-sanitize-recover=undefined)
  endif()
  add_compile_options("$<$<COMPILE_LANGUAGE:CXX>:${sanitizer_flags}>")
  add_link_options(${sanitizer_flags})
endif()

# nvcc hands -Wconversion to code that it generated itself, so the CUDA files go without it.
function(tiledattn_set_warnings target)
  if(MSVC)
    message(FATAL_ERROR "MSVC is not supported yet: the vector code needs GCC or Clang")
  endif()
  target_compile_options(
    ${target} PRIVATE "$<$<COMPILE_LANGUAGE:CXX>:-Wall;-Wextra;-Wconversion>"
                      "$<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=-Wall,-Wextra>")
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
    # GCC 12 gives these two falsely, for `"text" + std::string` and for std::sort of a short array.
    target_compile_options(${target} PRIVATE "$<$<COMPILE_LANGUAGE:CXX>:-Wno-restrict;-Wno-array-bounds>")
  endif()
  if(TILEDATTN_WERROR)
    target_compile_options(${target} PRIVATE "$<$<COMPILE_LANGUAGE:CXX>:-Werror>"
                                             "$<$<COMPILE_LANGUAGE:CUDA>:-Werror=all-warnings>")
  endif()
endfunction()

function(tiledattn_set_cuda_flags target)
  target_compile_options(
    ${target} PRIVATE "$<$<COMPILE_LANGUAGE:CUDA>:--expt-relaxed-constexpr;-Xptxas=--warn-on-spills>")
  if(CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL 13)
    # Makes the module several times smaller; every driver that runs CUDA 13 code unpacks it.
    target_compile_options(${target} PRIVATE "$<$<COMPILE_LANGUAGE:CUDA>:--compress-mode=size>")
  endif()
  if(TILEDATTN_PTXAS_VERBOSE)
    target_compile_options(${target} PRIVATE "$<$<COMPILE_LANGUAGE:CUDA>:-Xptxas=-v>")
  endif()
endfunction()
