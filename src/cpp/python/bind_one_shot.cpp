// SPDX-License-Identifier: Apache-2.0
// The calls without an object: convert, release the GIL, call.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <memory>

#include "bindings.h"
#include "gil.h"
#include "result_arrays.h"
#include "scalar_arg.h"
#include "scale_arg.h"
#include "score_arg.h"
#include "tensor_arg.h"
#include "tiledattn/error.h"
#include "tiledattn/one_shot.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace tiledattn::binding {

namespace {

Layout layout_arg(nb::handle value) {
  const std::string layout = text_arg(value, "layout");
  if (layout == "bshd") return Layout::bshd;
  if (layout == "bhsd") return Layout::bhsd;
  throw ValueError("layout: got \"" + layout + "\"; expected \"bshd\" or \"bhsd\"");
}

nb::any bound_flash_attention(nb::handle q, nb::handle k, nb::handle v, nb::handle causal,
                              nb::handle softmax_scale, nb::handle window, nb::handle softcap,
                              nb::handle sinks, nb::handle layout, nb::handle cu_seqlens_q,
                              nb::handle cu_seqlens_k, nb::handle max_seqlen_q,
                              nb::handle max_seqlen_k, nb::handle out, nb::handle lse,
                              nb::handle return_lse, nb::handle check, Workspace* workspace,
                              nb::handle stream) {
  TensorArgs args(stream);
  FlashArgs call;
  call.q = args.input(q, "q");
  call.k = args.input(k, "k");
  call.v = args.input(v, "v");
  call.layout = layout_arg(layout);
  call.causal = bool_arg(causal, "causal");
  call.cu_seqlens_q = args.optional_input(cu_seqlens_q, "cu_seqlens_q");
  call.cu_seqlens_k = args.optional_input(cu_seqlens_k, "cu_seqlens_k");
  call.max_seqlen_q = optional_integer_arg(max_seqlen_q, "max_seqlen_q");
  call.max_seqlen_k = optional_integer_arg(max_seqlen_k, "max_seqlen_k");
  call.score = score_arg(args, softmax_scale, softcap, window, sinks);
  call.check = bool_arg(check, "check");
  call.workspace = workspace;
  const ResultArrays results(args, attention_result_like(call.q, call.v), out, lse,
                             bool_arg(return_lse, "return_lse"), args.framework());
  call.out = results.out();
  call.lse = results.lse();
  const Stream launch = args.launch_stream();
  {
    const GilReleased unlocked;
    flash_attention(call, launch);
  }
  args.mark_written();
  return results.value();
}

nb::any bound_paged_attention(nb::handle q, nb::handle k_pool, nb::handle v_pool,
                              nb::handle block_table, nb::handle seq_lens, nb::handle causal,
                              nb::handle softmax_scale, nb::handle window, nb::handle softcap,
                              nb::handle sinks, nb::handle k_scale, nb::handle v_scale,
                              nb::handle cu_seqlens_q, nb::handle max_seqlen_q, nb::handle out,
                              nb::handle lse, nb::handle return_lse, nb::handle early_start,
                              nb::handle check, Workspace* workspace, nb::handle stream) {
  TensorArgs args(stream);
  PagedArgs call;
  call.q = args.input(q, "q");
  call.k_pool = args.input(k_pool, "k_pool");
  call.v_pool = args.input(v_pool, "v_pool");
  call.block_table = args.input(block_table, "block_table");
  call.seq_lens = args.input(seq_lens, "seq_lens");
  call.k_scale = optional_scale_arg(args, k_scale, "k_scale");
  call.v_scale = optional_scale_arg(args, v_scale, "v_scale");
  call.causal = bool_arg(causal, "causal");
  call.cu_seqlens_q = args.optional_input(cu_seqlens_q, "cu_seqlens_q");
  call.max_seqlen_q = optional_integer_arg(max_seqlen_q, "max_seqlen_q");
  call.score = score_arg(args, softmax_scale, softcap, window, sinks);
  call.early_start = bool_arg(early_start, "early_start");
  call.check = bool_arg(check, "check");
  call.workspace = workspace;
  const ResultArrays results(args, attention_result_like(call.q, call.v_pool), out, lse,
                             bool_arg(return_lse, "return_lse"), args.framework());
  call.out = results.out();
  call.lse = results.lse();
  const Stream launch = args.launch_stream();
  {
    const GilReleased unlocked;
    paged_attention(call, launch);
  }
  args.mark_written();
  return results.value();
}

nb::any bound_merge_attention(nb::handle out_a, nb::handle lse_a, nb::handle out_b,
                              nb::handle lse_b, nb::handle lse_base, nb::handle out, nb::handle lse,
                              nb::handle stream) {
  TensorArgs args(stream);
  const Tensor a = args.input(out_a, "out_a");
  const Tensor a_lse = args.input(lse_a, "lse_a");
  const Tensor b = args.input(out_b, "out_b");
  const Tensor b_lse = args.input(lse_b, "lse_b");
  const double base = number_arg(lse_base, "lse_base");
  const ResultArrays results(args, a, out, lse, true, args.framework());
  const Stream launch = args.launch_stream();
  {
    const GilReleased unlocked;
    merge_attention(a, a_lse, b, b_lse, results.out(), results.lse().value_or(Tensor{}), base,
                    launch);
  }
  args.mark_written();
  return results.value();
}

void bound_write_kv(nb::handle k, nb::handle v, nb::handle k_pool, nb::handle v_pool,
                    nb::handle slot_mapping, nb::handle k_scale, nb::handle v_scale,
                    nb::handle check, nb::handle stream) {
  TensorArgs args(stream);
  WriteKvArgs call;
  call.k = args.input(k, "k");
  call.v = args.input(v, "v");
  call.k_pool = args.output(k_pool, "k_pool");
  call.v_pool = args.output(v_pool, "v_pool");
  call.slot_mapping = args.input(slot_mapping, "slot_mapping");
  call.k_scale = optional_scale_arg(args, k_scale, "k_scale");
  call.v_scale = optional_scale_arg(args, v_scale, "v_scale");
  call.check = bool_arg(check, "check");
  const Stream launch = args.launch_stream();
  {
    const GilReleased unlocked;
    write_kv(call, launch);
  }
  args.mark_written();
}

}  // namespace

void bind_one_shot(nb::module_& m) {
  nb::class_<Workspace>(m, "Workspace")
      .def(
          "__init__",
          [](Workspace* self, nb::handle device, nb::handle nbytes) {
            const Device where = device_arg(device);
            const std::int64_t bytes =
                optional_integer_arg(nbytes, "nbytes").value_or(Workspace::kDefaultBytes);
            new (self) Workspace(where, bytes);
          },
          "device"_a.none(), "nbytes"_a.none(),
          nb::sig("def __init__(self, device: object, nbytes: int | None) -> None"))
      .def_prop_ro("device", [](const Workspace& self) { return to_string(self.device()); })
      .def_prop_ro("nbytes", &Workspace::bytes);

  m.def("flash_attention", bound_flash_attention, "q"_a.none(), "k"_a.none(), "v"_a.none(),
        "causal"_a.none(), "softmax_scale"_a.none(), "window"_a.none(), "softcap"_a.none(),
        "sinks"_a.none(), "layout"_a.none(), "cu_seqlens_q"_a.none(), "cu_seqlens_k"_a.none(),
        "max_seqlen_q"_a.none(), "max_seqlen_k"_a.none(), "out"_a.none(), "lse"_a.none(),
        "return_lse"_a.none(), "check"_a.none(), "workspace"_a.none(), "stream"_a.none());
  m.def("paged_attention", bound_paged_attention, "q"_a.none(), "k_pool"_a.none(),
        "v_pool"_a.none(), "block_table"_a.none(), "seq_lens"_a.none(), "causal"_a.none(),
        "softmax_scale"_a.none(), "window"_a.none(), "softcap"_a.none(), "sinks"_a.none(),
        "k_scale"_a.none(), "v_scale"_a.none(), "cu_seqlens_q"_a.none(), "max_seqlen_q"_a.none(),
        "out"_a.none(), "lse"_a.none(), "return_lse"_a.none(), "early_start"_a.none(),
        "check"_a.none(), "workspace"_a.none(), "stream"_a.none());
  m.def("merge_attention", bound_merge_attention, "out_a"_a.none(), "lse_a"_a.none(),
        "out_b"_a.none(), "lse_b"_a.none(), "lse_base"_a.none(), "out"_a.none(), "lse"_a.none(),
        "stream"_a.none());
  m.def("write_kv", bound_write_kv, "k"_a.none(), "v"_a.none(), "k_pool"_a.none(),
        "v_pool"_a.none(), "slot_mapping"_a.none(), "k_scale"_a.none(), "v_scale"_a.none(),
        "check"_a.none(), "stream"_a.none());
}

}  // namespace tiledattn::binding
