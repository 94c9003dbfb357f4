// SPDX-License-Identifier: Apache-2.0
// The calls as handlers of XLA's foreign function interface; tiledattn/jax.py registers them.
#include <nanobind/nanobind.h>

#include <optional>
#include <string>

#include "bindings.h"
#include "tiledattn/error.h"
#include "tiledattn/one_shot.h"
#include "xla_call.h"

namespace nb = nanobind;

namespace tiledattn::binding {

namespace {

/// Numbers come as arrays without dimensions.
std::optional<KvScale> scale(const XlaCall& call, const char* name, std::int64_t problem) {
  if (const std::optional<Tensor> array = call.optional_operand(name, problem)) return *array;
  return std::nullopt;
}

ScoreOptions score_options(const XlaCall& call, std::int64_t problem) {
  ScoreOptions options;
  options.softmax_scale = call.number("softmax_scale");
  options.softcap = call.number("softcap").value_or(0.0);
  options.window = {call.integer("window_left"), call.integer("window_right")};
  options.sinks = call.optional_operand("sinks", problem);
  return options;
}

struct FlashAttention {
  static void run(const XlaCall& call, std::int64_t problem) {
    FlashArgs args;
    args.q = call.operand("q", problem);
    args.k = call.operand("k", problem);
    args.v = call.operand("v", problem);
    args.out = call.result("out", problem);
    args.lse = call.result("lse", problem);
    args.layout = call.flag("heads_first") ? Layout::bhsd : Layout::bshd;
    args.causal = call.flag("causal");
    args.cu_seqlens_q = call.optional_operand("cu_seqlens_q", problem);
    args.cu_seqlens_k = call.optional_operand("cu_seqlens_k", problem);
    args.max_seqlen_q = call.integer("max_seqlen_q");
    args.max_seqlen_k = call.integer("max_seqlen_k");
    args.score = score_options(call, problem);
    flash_attention(args, call.stream());
  }
};

struct PagedAttention {
  static void run(const XlaCall& call, std::int64_t problem) {
    PagedArgs args;
    args.q = call.operand("q", problem);
    args.k_pool = call.operand("k_pool", problem);
    args.v_pool = call.operand("v_pool", problem);
    args.block_table = call.operand("block_table", problem);
    args.seq_lens = call.operand("seq_lens", problem);
    args.out = call.result("out", problem);
    args.lse = call.result("lse", problem);
    args.k_scale = scale(call, "k_scale", problem);
    args.v_scale = scale(call, "v_scale", problem);
    args.causal = call.flag("causal");
    args.cu_seqlens_q = call.optional_operand("cu_seqlens_q", problem);
    args.max_seqlen_q = call.integer("max_seqlen_q");
    args.score = score_options(call, problem);
    paged_attention(args, call.stream());
  }
};

struct MergeAttention {
  static void run(const XlaCall& call, std::int64_t problem) {
    merge_attention(call.operand("out_a", problem), call.operand("lse_a", problem),
                    call.operand("out_b", problem), call.operand("lse_b", problem),
                    call.result("out", problem), call.result("lse", problem),
                    call.number("lse_base").value_or(0.0), call.stream());
  }
};

struct WriteKv {
  static void run(const XlaCall& call, std::int64_t problem) {
    WriteKvArgs args;
    args.k = call.operand("k", problem);
    args.v = call.operand("v", problem);
    args.k_pool = pool(call, "k_pool", problem);
    args.v_pool = pool(call, "v_pool", problem);
    args.slot_mapping = call.operand("slot_mapping", problem);
    args.k_scale = scale(call, "k_scale", problem);
    args.v_scale = scale(call, "v_scale", problem);
    write_kv(args, call.stream());
  }

  // In place: XLA copies a pool first that its caller keeps. A result of its own would hold
  // nothing.
  static Tensor pool(const XlaCall& call, const char* name, std::int64_t problem) {
    const Tensor result = call.result(name, problem);
    if (result.data != call.operand(name, problem).data)
      throw Error(std::string(name) + ": XLA gave the result other memory than the argument");
    return result;
  }
};

template <typename Operation, DeviceKind kDevice>
xla::Error* handle(xla::CallFrame* frame) {
  if (answer_metadata(*frame)) return nullptr;
  try {
    const XlaCall call(*frame, kDevice);
    for (std::int64_t problem = 0; problem < call.num_problems(); ++problem)
      Operation::run(call, problem);
    return nullptr;
  } catch (...) {
    return xla_error(*frame->api);
  }
}

template <typename Operation>
nb::dict handlers() {
  const auto capsule = [](xla::Handler* handler) {
    return nb::capsule(reinterpret_cast<void*>(handler));
  };
  nb::dict by_platform;
  by_platform["cpu"] = capsule(handle<Operation, DeviceKind::cpu>);
  by_platform["CUDA"] = capsule(handle<Operation, DeviceKind::cuda>);
  return by_platform;
}

}  // namespace

void bind_jax(nb::module_& m) {
  m.def(
      "jax_handlers",
      [] {
        nb::dict all;
        all["flash_attention"] = handlers<FlashAttention>();
        all["paged_attention"] = handlers<PagedAttention>();
        all["merge_attention"] = handlers<MergeAttention>();
        all["write_kv"] = handlers<WriteKv>();
        return all;
      },
      nb::sig("def jax_handlers() -> dict[str, dict[str, object]]"));
}

}  // namespace tiledattn::binding
