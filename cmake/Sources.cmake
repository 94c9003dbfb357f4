# SPDX-License-Identifier: Apache-2.0
#
# Every source file of the library. Lists and not patterns: what is built is what is written here, so a stray file changes
# nothing silently and a forgotten one is an error.

# tiledattn_core. no_cuda.cpp stands in for tiledattn_cuda where CUDA is off; of cpu/kernels_* only those of the processor
# are compiled.
set(tiledattn_core_sources
    src/cpp/attention.cpp
    src/cpp/backends.cpp
    src/cpp/c_api.cpp
    src/cpp/check_quantized.cpp
    src/cpp/check_tensor.cpp
    src/cpp/checks.cpp
    src/cpp/checks_one_shot.cpp
    src/cpp/checks_tiled.cpp
    src/cpp/cpu/attend.cpp
    src/cpp/cpu/backend_cpu.cpp
    src/cpp/cpu/isa.cpp
    src/cpp/cpu/kernels_avx2.cpp
    src/cpp/cpu/kernels_avx512.cpp
    src/cpp/cpu/kernels_avx512bf16.cpp
    src/cpp/cpu/kernels_neon.cpp
    src/cpp/cpu/kernels_scalar.cpp
    src/cpp/cpu/num_cpus.cpp
    src/cpp/cpu/pool.cpp
    src/cpp/cpu/rows.cpp
    src/cpp/no_cuda.cpp
    src/cpp/one_shot.cpp
    src/cpp/plan.cpp
    src/cpp/state.cpp
    src/cpp/stream/block_leases.cpp
    src/cpp/stream/block_runs.cpp
    src/cpp/stream/host_copy_queue.cpp
    src/cpp/stream/pool_source.cpp
    src/cpp/stream/read_threads.cpp
    src/cpp/stream/stream_plan.cpp
    src/cpp/stream/streaming_attention.cpp
    src/cpp/stream/tile_fetcher.cpp
    src/cpp/stream/tile_source.cpp
    src/cpp/stream/tile_table.cpp
    src/cpp/tensor.cpp
    src/cpp/workspace.cpp)

# tiledattn_cuda
set(tiledattn_cuda_sources
    src/cuda/attend.cpp
    src/cuda/backend_cuda.cpp
    src/cuda/capability.cpp
    src/cuda/capture.cpp
    src/cuda/common/shared_limit.cpp
    src/cuda/common/tensor_map.cpp
    src/cuda/cuda_copy_queue.cpp
    src/cuda/decode/decode_combine.cu
    src/cuda/decode/decode_sm90.cpp
    src/cuda/decode/inst/decode_plain_bf16.cu
    src/cuda/decode/inst/decode_plain_f16.cu
    src/cuda/decode/inst/decode_plain_f32.cu
    src/cuda/decode/inst/decode_plain_f8.cu
    src/cuda/decode/inst/decode_plain_i8.cu
    src/cuda/decode/inst/decode_sm90_bf16_d128.cu
    src/cuda/decode/inst/decode_sm90_bf16_d192.cu
    src/cuda/decode/inst/decode_sm90_bf16_d256.cu
    src/cuda/decode/inst/decode_sm90_bf16_d64.cu
    src/cuda/decode/inst/decode_sm90_f16_d128.cu
    src/cuda/decode/inst/decode_sm90_f16_d192.cu
    src/cuda/decode/inst/decode_sm90_f16_d256.cu
    src/cuda/decode/inst/decode_sm90_f16_d64.cu
    src/cuda/devices.cpp
    src/cuda/fault_log.cpp
    src/cuda/memory.cpp
    src/cuda/pin_host.cpp
    src/cuda/merge/merge.cu
    src/cuda/portable/inst/portable_bf16_d128.cu
    src/cuda/portable/inst/portable_bf16_d192.cu
    src/cuda/portable/inst/portable_bf16_d256.cu
    src/cuda/portable/inst/portable_bf16_d64.cu
    src/cuda/portable/inst/portable_bf16_d96.cu
    src/cuda/portable/inst/portable_f16_d128.cu
    src/cuda/portable/inst/portable_f16_d192.cu
    src/cuda/portable/inst/portable_f16_d256.cu
    src/cuda/portable/inst/portable_f16_d64.cu
    src/cuda/portable/inst/portable_f16_d96.cu
    src/cuda/portable/portable.cpp
    src/cuda/prefill/inst/prefill_plain_bf16.cu
    src/cuda/prefill/inst/prefill_plain_f16.cu
    src/cuda/prefill/inst/prefill_plain_f32.cu
    src/cuda/prefill/inst/prefill_plain_f8.cu
    src/cuda/prefill/inst/prefill_plain_i8.cu
    src/cuda/prefill/inst/prefill_sm90_bf16_d128.cu
    src/cuda/prefill/inst/prefill_sm90_bf16_d128_general.cu
    src/cuda/prefill/inst/prefill_sm90_bf16_d128_short.cu
    src/cuda/prefill/inst/prefill_sm90_bf16_d128_wide.cu
    src/cuda/prefill/inst/prefill_sm90_bf16_d192.cu
    src/cuda/prefill/inst/prefill_sm90_bf16_d256.cu
    src/cuda/prefill/inst/prefill_sm90_bf16_d256_general.cu
    src/cuda/prefill/inst/prefill_sm90_bf16_d64.cu
    src/cuda/prefill/inst/prefill_sm90_bf16_d64_general.cu
    src/cuda/prefill/inst/prefill_sm90_bf16_d64_short.cu
    src/cuda/prefill/inst/prefill_sm90_bf16_d96.cu
    src/cuda/prefill/inst/prefill_sm90_f16_d128.cu
    src/cuda/prefill/inst/prefill_sm90_f16_d128_general.cu
    src/cuda/prefill/inst/prefill_sm90_f16_d128_short.cu
    src/cuda/prefill/inst/prefill_sm90_f16_d128_wide.cu
    src/cuda/prefill/inst/prefill_sm90_f16_d192.cu
    src/cuda/prefill/inst/prefill_sm90_f16_d256.cu
    src/cuda/prefill/inst/prefill_sm90_f16_d256_general.cu
    src/cuda/prefill/inst/prefill_sm90_f16_d64.cu
    src/cuda/prefill/inst/prefill_sm90_f16_d64_general.cu
    src/cuda/prefill/inst/prefill_sm90_f16_d64_short.cu
    src/cuda/prefill/inst/prefill_sm90_f16_d96.cu
    src/cuda/prefill/prefill_sm90.cpp
    src/cuda/prefill/row_tiles.cu
    src/cuda/validate/validate.cu
    src/cuda/write_kv/write_kv.cu)

# _core
set(tiledattn_python_sources
    src/cpp/python/array_type.cpp
    src/cpp/python/array_view.cpp
    src/cpp/python/bind_attention.cpp
    src/cpp/python/bind_build.cpp
    src/cpp/python/bind_jax.cpp
    src/cpp/python/bind_one_shot.cpp
    src/cpp/python/bind_state.cpp
    src/cpp/python/bind_streaming.cpp
    src/cpp/python/bind_tile_source.cpp
    src/cpp/python/capsule.cpp
    src/cpp/python/exceptions.cpp
    src/cpp/python/module.cpp
    src/cpp/python/python_source.cpp
    src/cpp/python/result_arrays.cpp
    src/cpp/python/scalar_arg.cpp
    src/cpp/python/stream_arg.cpp
    src/cpp/python/tensor_arg.cpp
    src/cpp/python/xla_call.cpp)

file(GLOB_RECURSE present RELATIVE ${CMAKE_CURRENT_SOURCE_DIR} CONFIGURE_DEPENDS src/*.cpp src/*.cu)
list(REMOVE_ITEM present ${tiledattn_core_sources} ${tiledattn_cuda_sources} ${tiledattn_python_sources})
if(present)
  message(FATAL_ERROR "cmake/Sources.cmake does not name ${present}")
endif()
