// SPDX-License-Identifier: Apache-2.0
// Structs of the C interface into those of the C++ one, and handles.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "tiledattn/c_api.h"
#include "tiledattn/tiledattn.h"

struct tiledattn_attention {
  tiledattn::TiledAttention object;
};
struct tiledattn_state {
  tiledattn::State object;
};
struct tiledattn_workspace {
  tiledattn::Workspace object;
};

namespace tiledattn::c_api {

/// What a pointer argument points to.
template <typename T>
T& required(T* pointer, const char* argument) {
  if (!pointer) throw ValueError(std::string(argument) + ": is NULL, but is required");
  return *pointer;
}

template <typename T>
std::optional<T> optional_value(const T* pointer) {
  return pointer ? std::optional<T>(*pointer) : std::nullopt;
}

[[noreturn]] inline void throw_unknown(const char* argument, const char* member, std::int64_t got,
                                       const char* wanted) {
  throw ValueError(std::string(argument) + ": " + member + " is " + std::to_string(got) +
                   ", but must be " + wanted);
}

inline Device to_device(const tiledattn_device& device, const char* argument) {
  if (device.kind != TILEDATTN_CPU && device.kind != TILEDATTN_CUDA) {
    throw_unknown(argument, "device kind", device.kind, "TILEDATTN_CPU (0) or TILEDATTN_CUDA (1)");
  }
  return {device.kind == TILEDATTN_CPU ? DeviceKind::cpu : DeviceKind::cuda, device.index};
}

inline Device to_device(const tiledattn_device* device) {
  return device ? to_device(*device, "device") : default_device();
}

inline tiledattn_device from_device(Device device) {
  return {device.is_cpu() ? TILEDATTN_CPU : TILEDATTN_CUDA, device.index};
}

inline DType to_dtype(std::int32_t dtype, const char* argument) {
  if (dtype < 0 || dtype > 0xffff) {
    throw TypeError(std::string(argument) + ": dtype is " + std::to_string(dtype) +
                    ", but must be one of tiledattn_dtype");
  }
  return static_cast<DType>(dtype);
}

inline Tensor to_tensor(const tiledattn_tensor* pointer, const char* argument) {
  const tiledattn_tensor& from = required(pointer, argument);
  if (from.rank < 0 || from.rank > TILEDATTN_MAX_RANK) {
    throw_unknown(argument, "rank", from.rank, "0 .. 6");
  }
  Tensor tensor;
  tensor.data = from.data;
  tensor.dtype = to_dtype(from.dtype, argument);
  tensor.device = to_device(from.device, argument);
  tensor.rank = from.rank;
  for (int i = 0; i < from.rank; ++i) {
    if (from.shape[i] < 0) throw_unknown(argument, "a size in shape", from.shape[i], "0 or more");
    tensor.shape[i] = from.shape[i];
    tensor.strides[i] = from.strides[i];
  }
  if (!tensor.data && tensor.size() > 0) {
    throw ValueError(std::string(argument) + ": data is NULL, but the shape is " +
                     shape_to_string(tensor));
  }
  return tensor;
}

inline std::optional<Tensor> to_optional_tensor(const tiledattn_tensor* pointer,
                                                const char* argument) {
  return pointer ? std::optional<Tensor>(to_tensor(pointer, argument)) : std::nullopt;
}

inline std::optional<KvScale> to_scale(const tiledattn_scale& from, const char* argument) {
  if (from.number && from.array)
    throw ValueError(std::string(argument) + ": has a number and an array; expected one of them");
  if (from.number) return *from.number;
  if (from.array) return to_tensor(from.array, argument);
  return std::nullopt;
}

inline void from_tensor(const Tensor& from, tiledattn_tensor* to) {
  if (!to) return;
  *to = {};
  to->data = from.data;
  to->dtype = static_cast<std::int32_t>(from.dtype);
  to->rank = from.rank;
  to->device = from_device(from.device);
  for (int i = 0; i < from.rank; ++i) {
    to->shape[i] = from.shape[i];
    to->strides[i] = from.strides[i];
  }
}

inline TiledAttentionDims to_dims(const tiledattn_dims* pointer) {
  const tiledattn_dims& from = required(pointer, "dims");
  TiledAttentionDims dims;
  dims.max_seqs = from.max_seqs;
  dims.num_q_heads = from.num_q_heads;
  dims.num_kv_heads = from.num_kv_heads;
  dims.head_dim = from.head_dim;
  dims.block_size = from.block_size;
  dims.tile_capacity = from.tile_capacity;
  dims.max_q_len = from.max_q_len ? from.max_q_len : 1;
  dims.head_dim_v = from.head_dim_v;
  return dims.validated();
}

inline ScoreOptions to_options(const tiledattn_options& from) {
  ScoreOptions options;
  options.softmax_scale = optional_value(from.softmax_scale);
  options.softcap = from.softcap;
  options.window.left = optional_value(from.window_left);
  options.window.right = optional_value(from.window_right);
  options.sinks = to_optional_tensor(from.sinks, "sinks");
  return options;
}

inline bool to_bool(std::int32_t choice, bool by_default, const char* argument) {
  switch (choice) {
    case TILEDATTN_DEFAULT:
      return by_default;
    case TILEDATTN_YES:
      return true;
    case TILEDATTN_NO:
      return false;
    default:
      throw_unknown(argument, "value", choice,
                    "TILEDATTN_DEFAULT (0), TILEDATTN_YES (1) or TILEDATTN_NO (2)");
  }
}

inline Stream to_stream(void* handle) { return Stream{handle}; }

inline TileArgs to_tile(const tiledattn_tile_args& from) {
  TileArgs tile;
  tile.q = to_tensor(from.q, "q");
  tile.k_pool = to_tensor(from.k_pool, "k_pool");
  tile.v_pool = to_tensor(from.v_pool, "v_pool");
  tile.tile_blocks = to_tensor(from.tile_blocks, "tile_blocks");
  tile.tile_block_counts = to_tensor(from.tile_block_counts, "tile_block_counts");
  tile.last_block_valid_slots =
      to_optional_tensor(from.last_block_valid_slots, "last_block_valid_slots");
  tile.last_block_valid_slots_all = optional_value(from.last_block_valid_slots_all);
  tile.kv_positions = to_optional_tensor(from.kv_positions, "kv_positions");
  tile.q_positions = to_optional_tensor(from.q_positions, "q_positions");
  tile.k_scale = to_scale(from.k_scale, "k_scale");
  tile.v_scale = to_scale(from.v_scale, "v_scale");
  tile.out = to_optional_tensor(from.out, "out");
  tile.lse = to_optional_tensor(from.lse, "lse");
  tile.early_start = from.early_start != 0;
  return tile;
}

inline FlashArgs to_flash(const tiledattn_flash_args& from) {
  FlashArgs args;
  args.q = to_tensor(from.q, "q");
  args.k = to_tensor(from.k, "k");
  args.v = to_tensor(from.v, "v");
  args.out = to_tensor(from.out, "out");
  args.lse = to_optional_tensor(from.lse, "lse");
  if (from.layout != TILEDATTN_BSHD && from.layout != TILEDATTN_BHSD) {
    throw_unknown("layout", "value", from.layout, "TILEDATTN_BSHD (0) or TILEDATTN_BHSD (1)");
  }
  args.layout = from.layout == TILEDATTN_BSHD ? Layout::bshd : Layout::bhsd;
  args.causal = to_bool(from.causal, false, "causal");
  args.cu_seqlens_q = to_optional_tensor(from.cu_seqlens_q, "cu_seqlens_q");
  args.cu_seqlens_k = to_optional_tensor(from.cu_seqlens_k, "cu_seqlens_k");
  args.max_seqlen_q = optional_value(from.max_seqlen_q);
  args.max_seqlen_k = optional_value(from.max_seqlen_k);
  args.score = to_options(from.options);
  args.check = from.check != 0;
  args.workspace = from.workspace ? &from.workspace->object : nullptr;
  return args;
}

inline PagedArgs to_paged(const tiledattn_paged_args& from) {
  PagedArgs args;
  args.q = to_tensor(from.q, "q");
  args.k_pool = to_tensor(from.k_pool, "k_pool");
  args.v_pool = to_tensor(from.v_pool, "v_pool");
  args.block_table = to_tensor(from.block_table, "block_table");
  args.seq_lens = to_tensor(from.seq_lens, "seq_lens");
  args.out = to_tensor(from.out, "out");
  args.lse = to_optional_tensor(from.lse, "lse");
  args.k_scale = to_scale(from.k_scale, "k_scale");
  args.v_scale = to_scale(from.v_scale, "v_scale");
  args.early_start = from.early_start != 0;
  args.causal = to_bool(from.causal, true, "causal");
  args.cu_seqlens_q = to_optional_tensor(from.cu_seqlens_q, "cu_seqlens_q");
  args.max_seqlen_q = optional_value(from.max_seqlen_q);
  args.score = to_options(from.options);
  args.check = from.check != 0;
  args.workspace = from.workspace ? &from.workspace->object : nullptr;
  return args;
}

inline SupportQuery to_query(const tiledattn_support_query& from) {
  SupportQuery query;
  switch (from.operation) {
    case TILEDATTN_FLASH_ATTENTION:
      query.operation = SupportQuery::Operation::flash_attention;
      break;
    case TILEDATTN_PAGED_ATTENTION:
      query.operation = SupportQuery::Operation::paged_attention;
      break;
    case TILEDATTN_TILED_ATTENTION:
      query.operation = SupportQuery::Operation::tiled_attention;
      break;
    default:
      throw_unknown("operation", "value", from.operation, "0 .. 2 of tiledattn_operation");
  }
  query.device = to_device(from.device, "device");
  if (from.dtype) query.dtype = to_dtype(from.dtype, "dtype");
  if (from.kv_dtype) query.kv_dtype = to_dtype(from.kv_dtype, "kv_dtype");
  if (from.num_q_heads) query.num_q_heads = from.num_q_heads;
  if (from.num_kv_heads) query.num_kv_heads = from.num_kv_heads;
  if (from.head_dim) query.head_dim = from.head_dim;
  query.head_dim_v = from.head_dim_v;
  if (from.block_size) query.block_size = from.block_size;
  if (from.q_len) query.q_len = from.q_len;
  return query;
}

}  // namespace tiledattn::c_api
