# SPDX-License-Identifier: Apache-2.0
#
# src/cpp/cpu/kernels_<isa>.cpp: one file for each instruction set, chosen at run time. Each is compiled with the flags
# of its set, and nothing else is: the rest of the library must run on any CPU of the platform.
#
# Never -ffast-math: it folds the range reduction of exp2 and breaks NaN and infinity. The first two flags only drop errno
# and floating-point traps, without which the compiler vectorises. The third leaves fused operations to the source: a
# product that is rounded once here and twice there would make a score differ from itself. Kernels throw nothing: without
# the last one a destructor would bring a weak symbol of the C++ runtime.
set(kernel_flags -fno-math-errno -fno-trapping-math -ffp-contract=off -fno-exceptions)

set(kernel_flags_scalar "")
set(kernel_flags_avx2 -mavx2 -mfma -mf16c)
set(kernel_flags_avx512 ${kernel_flags_avx2} -mavx512f -mavx512bw -mavx512dq -mavx512vl)
set(kernel_flags_avx512bf16 ${kernel_flags_avx512} -mavx512bf16 -mavx512vbmi)
set(kernel_flags_amxbf16 ${kernel_flags_avx512bf16} -mamx-tile -mamx-bf16)
set(kernel_flags_neon "")
set(kernel_flags_neonbf16 -march=armv8.2-a+bf16)

if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
  set(kernel_isas scalar avx2 avx512 avx512bf16 amxbf16)
elseif(CMAKE_SYSTEM_PROCESSOR MATCHES "^(aarch64|arm64|ARM64)$")
  set(kernel_isas scalar neon neonbf16)
else()
  set(kernel_isas scalar)
endif()

# Takes the kernel files of other processors out of the list named `sources` and sets the flags of those that stay.
function(tiledattn_select_kernel_sources sources)
  set(selected "")
  foreach(source IN LISTS ${sources})
    if(source MATCHES "/kernels_([a-z0-9]+)\\.cpp$")
      set(isa "${CMAKE_MATCH_1}")
      if(NOT DEFINED kernel_flags_${isa})
        message(FATAL_ERROR "${source}: cmake/KernelSources.cmake has no flags for '${isa}'")
      endif()
      if(NOT isa IN_LIST kernel_isas)
        continue()
      endif()
      set_property(SOURCE "${source}" APPEND PROPERTY COMPILE_OPTIONS ${kernel_flags} ${kernel_flags_${isa}})
    endif()
    list(APPEND selected "${source}")
  endforeach()
  set(${sources} "${selected}" PARENT_SCOPE)
endfunction()
