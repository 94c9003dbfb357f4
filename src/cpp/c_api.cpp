// SPDX-License-Identifier: Apache-2.0
// The C interface: calls the C++ one and turns exceptions into codes.
#include "tiledattn/c_api.h"

#include <cmath>
#include <cstdio>
#include <string>
#include <utility>
#include <vector>

#include "c_api_convert.h"
#include "c_api_guard.h"
#include "tiledattn/tiledattn.h"

namespace tiledattn {

using c_api::guarded;

namespace {

// A fixed buffer: writing the message of a failed allocation must not allocate.
thread_local char last_error[2048] = "";

template <std::size_t N>
void copy_text(const std::string& from, char (&to)[N]) {
  std::snprintf(to, N, "%s", from.c_str());
}

tiledattn_pool_strides from_strides(const PoolStrides& strides) {
  return {strides.block, strides.token, strides.kv_head};
}

/// The text that `make` gives once, kept for the life of the process; "" when it throws.
template <typename Make>
const char* lasting_text(std::string& storage, Make&& make) {
  const tiledattn_status status = guarded([&] {
    if (storage.empty()) storage = make();
  });
  return status == TILEDATTN_OK ? storage.c_str() : "";
}

}  // namespace

tiledattn_status c_api::failed(tiledattn_status status, const char* message) noexcept {
  std::snprintf(last_error, sizeof last_error, "%s", message);
  return status;
}

}  // namespace tiledattn

using namespace tiledattn;
using namespace tiledattn::c_api;

const char* tiledattn_last_error(void) { return last_error; }

tiledattn_tensor tiledattn_make_tensor(void* data, std::int32_t dtype, tiledattn_device device,
                                       std::int32_t rank, const std::int64_t* shape) {
  tiledattn_tensor tensor = {};
  tensor.data = data;
  tensor.dtype = dtype;
  tensor.device = device;
  tensor.rank = rank;  // a bad one is refused by the call that gets the tensor
  std::int64_t stride = 1;
  for (int i = rank < TILEDATTN_MAX_RANK ? rank - 1 : TILEDATTN_MAX_RANK - 1; i >= 0; --i) {
    tensor.shape[i] = shape[i];
    tensor.strides[i] = stride;
    stride *= shape[i];
  }
  return tensor;
}

tiledattn_device tiledattn_default_device(void) {
  tiledattn_device device = {};
  guarded([&] { device = from_device(default_device()); });
  return device;
}

tiledattn_status tiledattn_get_sizes(const tiledattn_dims* dims, tiledattn_sizes* sizes) {
  return guarded([&] {
    const TiledAttentionDims d = to_dims(dims);
    required(sizes, "sizes") = {d.gqa_ratio(), d.m_bytes(),      d.l_bytes(),
                                d.o_bytes(),   d.output_bytes(), d.state_bytes()};
  });
}

tiledattn_status tiledattn_paged_strides(const tiledattn_dims* dims,
                                         tiledattn_pool_strides* strides) {
  return guarded(
      [&] { required(strides, "strides") = from_strides(to_dims(dims).paged_strides()); });
}

tiledattn_status tiledattn_scratch_pool_strides(const tiledattn_dims* dims,
                                                tiledattn_pool_strides* strides) {
  return guarded(
      [&] { required(strides, "strides") = from_strides(to_dims(dims).scratch_pool_strides()); });
}

tiledattn_status tiledattn_create(const tiledattn_dims* dims, const tiledattn_device* device,
                                  const tiledattn_options* options,
                                  tiledattn_attention** attention) {
  return guarded([&] {
    tiledattn_attention*& result = required(attention, "attention");
    result = new tiledattn_attention{TiledAttention(
        to_dims(dims), to_device(device), options ? to_options(*options) : ScoreOptions{})};
  });
}

void tiledattn_destroy(tiledattn_attention* attention) { delete attention; }

tiledattn_status tiledattn_begin_step(tiledattn_attention* attention, std::int64_t num_seqs,
                                      void* stream) {
  return guarded(
      [&] { required(attention, "attention").object.begin_step(num_seqs, to_stream(stream)); });
}

tiledattn_status tiledattn_step_tile(tiledattn_attention* attention,
                                     const tiledattn_tile_args* tile, void* stream) {
  return guarded([&] {
    const tiledattn_tile_args& args = required(tile, "tile");
    required(attention, "attention")
        .object.step_tile(to_tile(args), to_stream(stream), args.check != 0);
  });
}

tiledattn_status tiledattn_finalize(tiledattn_attention* attention, const tiledattn_tensor* out,
                                    const tiledattn_tensor* lse, void* stream) {
  return guarded([&] {
    required(attention, "attention")
        .object.finalize(to_tensor(out, "out"), to_optional_tensor(lse, "lse"), to_stream(stream));
  });
}

tiledattn_status tiledattn_check(tiledattn_attention* attention) {
  return guarded([&] { required(attention, "attention").object.check(); });
}

tiledattn_status tiledattn_view_state(tiledattn_attention* attention, tiledattn_tensor* m,
                                      tiledattn_tensor* l, tiledattn_tensor* o) {
  return guarded([&] {
    TiledAttention& object = required(attention, "attention").object;
    from_tensor(object.m(), m);
    from_tensor(object.l(), l);
    from_tensor(object.o(), o);
  });
}

tiledattn_status tiledattn_state_create(const tiledattn_state_shape* shape,
                                        const tiledattn_device* device, void* stream,
                                        tiledattn_state** state) {
  return guarded([&] {
    const tiledattn_state_shape& sizes = required(shape, "shape");
    tiledattn_state*& result = required(state, "state");
    result = new tiledattn_state{State::empty(to_device(device), sizes.num_seqs,
                                              sizes.q_len ? sizes.q_len : 1, sizes.num_q_heads,
                                              sizes.head_dim_v, to_stream(stream))};
  });
}

void tiledattn_state_destroy(tiledattn_state* state) { delete state; }

tiledattn_status tiledattn_save_state(tiledattn_attention* attention, void* stream,
                                      tiledattn_state** state) {
  return guarded([&] {
    tiledattn_state*& result = required(state, "state");
    result = new tiledattn_state{required(attention, "attention").object.state(to_stream(stream))};
  });
}

tiledattn_status tiledattn_load_state(tiledattn_attention* attention, const tiledattn_state* state,
                                      void* stream) {
  return guarded([&] {
    required(attention, "attention")
        .object.load_state(required(state, "state").object, to_stream(stream));
  });
}

tiledattn_status tiledattn_state_to(const tiledattn_state* state, tiledattn_device device,
                                    tiledattn_state** copy) {
  return guarded([&] {
    tiledattn_state*& result = required(copy, "copy");
    result = new tiledattn_state{required(state, "state").object.to(to_device(device, "device"))};
  });
}

tiledattn_status tiledattn_merge_states(const tiledattn_state* const* states,
                                        std::size_t num_states, void* stream,
                                        tiledattn_state** merged) {
  return guarded([&] {
    tiledattn_state*& result = required(merged, "merged");
    std::vector<const State*> parts;
    for (std::size_t i = 0; i < num_states; ++i) {
      const std::string argument = "states[" + std::to_string(i) + "]";
      parts.push_back(&required((&required(states, "states"))[i], argument.c_str()).object);
    }
    result = new tiledattn_state{merge_states(parts, to_stream(stream))};
  });
}

tiledattn_status tiledattn_state_view(const tiledattn_state* state, tiledattn_tensor* m,
                                      tiledattn_tensor* l, tiledattn_tensor* o) {
  return guarded([&] {
    const State& object = required(state, "state").object;
    from_tensor(object.m(), m);
    from_tensor(object.l(), l);
    from_tensor(object.o(), o);
  });
}

tiledattn_status tiledattn_state_finalize(const tiledattn_state* state, const tiledattn_tensor* out,
                                          const tiledattn_tensor* lse,
                                          const tiledattn_tensor* sinks, void* stream) {
  return guarded([&] {
    required(state, "state")
        .object.finalize(to_tensor(out, "out"), to_optional_tensor(lse, "lse"),
                         to_optional_tensor(sinks, "sinks"), to_stream(stream));
  });
}

tiledattn_status tiledattn_workspace_create(tiledattn_device device, std::int64_t bytes,
                                            tiledattn_workspace** workspace) {
  return guarded([&] {
    tiledattn_workspace*& result = required(workspace, "workspace");
    result = new tiledattn_workspace{
        Workspace(to_device(device, "device"), bytes ? bytes : Workspace::kDefaultBytes)};
  });
}

void tiledattn_workspace_destroy(tiledattn_workspace* workspace) { delete workspace; }

tiledattn_status tiledattn_flash_attention(const tiledattn_flash_args* args, void* stream) {
  return guarded([&] { flash_attention(to_flash(required(args, "args")), to_stream(stream)); });
}

tiledattn_status tiledattn_paged_attention(const tiledattn_paged_args* args, void* stream) {
  return guarded([&] { paged_attention(to_paged(required(args, "args")), to_stream(stream)); });
}

tiledattn_status tiledattn_merge_attention(const tiledattn_merge_args* args, void* stream) {
  return guarded([&] {
    const tiledattn_merge_args& from = required(args, "args");
    merge_attention(to_tensor(from.out_a, "out_a"), to_tensor(from.lse_a, "lse_a"),
                    to_tensor(from.out_b, "out_b"), to_tensor(from.lse_b, "lse_b"),
                    to_tensor(from.out, "out"), to_tensor(from.lse, "lse"),
                    from.lse_base == 0 ? std::exp(1.0) : from.lse_base, to_stream(stream));
  });
}

tiledattn_status tiledattn_write_kv(const tiledattn_write_kv_args* args, void* stream) {
  return guarded([&] {
    const tiledattn_write_kv_args& from = required(args, "args");
    WriteKvArgs write;
    write.k = to_tensor(from.k, "k");
    write.v = to_tensor(from.v, "v");
    write.k_pool = to_tensor(from.k_pool, "k_pool");
    write.v_pool = to_tensor(from.v_pool, "v_pool");
    write.slot_mapping = to_tensor(from.slot_mapping, "slot_mapping");
    write.k_scale = to_scale(from.k_scale, "k_scale");
    write.v_scale = to_scale(from.v_scale, "v_scale");
    write.check = from.check != 0;
    write_kv(write, to_stream(stream));
  });
}

tiledattn_status tiledattn_check_device(tiledattn_device device) {
  return guarded([&] { check(to_device(device, "device")); });
}

tiledattn_status tiledattn_supports(const tiledattn_support_query* query,
                                    tiledattn_support* support) {
  return guarded([&] {
    tiledattn_support& result = required(support, "support");
    const Support answer = supports(to_query(required(query, "query")));
    result.supported = answer.supported;
    copy_text(answer.kernel, result.kernel);
    copy_text(answer.reason, result.reason);
  });
}

const char* tiledattn_version(void) {
  thread_local std::string text;
  return lasting_text(text, [] { return build_info().version; });
}

const char* tiledattn_cpu_isa(void) {
  thread_local std::string text;
  return lasting_text(text, [] { return build_info().cpu_isa; });
}

std::int32_t tiledattn_cuda_device_count(void) {
  std::int32_t count = 0;
  guarded([&] { count = build_info().num_cuda_devices; });
  return count;
}

const char* tiledattn_why_no_cuda(void) {
  thread_local std::string text;
  return lasting_text(text, [] { return build_info().no_cuda; });
}

tiledattn_status tiledattn_set_num_threads(std::int32_t num_threads) {
  return guarded([&] { set_num_threads(num_threads); });
}

std::int32_t tiledattn_get_num_threads(void) {
  std::int32_t count = 0;
  guarded([&] { count = get_num_threads(); });
  return count;
}
