// SPDX-License-Identifier: Apache-2.0
// The calls without an object: check, plan, run.
#include "tiledattn/one_shot.h"

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>

#include "backend.h"
#include "check_quantized.h"
#include "check_tensor.h"
#include "checks.h"
#include "default_workspace.h"
#include "fault.h"

namespace tiledattn {

namespace {

/// What one-shot calls on a device have found; lives as long as the process, so that graphs may
/// write into it.
FaultLog* device_faults(Device device) {
  if (device.is_cpu()) return nullptr;
  struct Known {
    int index = -1;
    FaultLog* log = nullptr;
  };
  thread_local Known last;
  if (last.index == device.index) return last.log;
  static std::mutex mutex;
  static auto& logs = *new std::map<int, std::shared_ptr<FaultLog>>;
  const std::lock_guard<std::mutex> lock(mutex);
  std::shared_ptr<FaultLog>& log = logs[device.index];
  if (!log) log = backend_for(device).make_fault_log(device.index);
  last = {device.index, log.get()};
  return last.log;
}

/// `check=True`: wait for `stream` and throw what the device found.
class CheckedCall {
 public:
  CheckedCall(Device device, Stream stream, bool wait)
      : device_(device), stream_(stream), wait_(wait), faults_(device_faults(device)) {
    raise_fault(faults_);
    if (wait_ && backend_for(device).capture_id(device.index, stream) != 0) {
      refuse("check", "True in a graph capture", "False: a capture cannot wait");
    }
  }
  FaultRecord* record() const { return faults_ ? faults_->device_record() : nullptr; }
  void finish() const {
    if (!wait_) return;
    backend_for(device_).synchronize(device_.index, stream_);
    raise_fault(faults_);
  }

 private:
  Device device_;
  Stream stream_;
  bool wait_;
  FaultLog* faults_;
};

void attend(AttentionProblem& problem, Device device, Stream stream, Workspace* given, bool check) {
  const Backend& backend = backend_for(device);
  const CheckedCall call(device, stream, check);
  if (problem.num_q_heads == 0) return;
  const std::shared_ptr<Workspace> own = given ? nullptr : default_workspace(device, stream);
  Workspace& workspace = given ? *given : *own;
  problem.faults = call.record();
  const Plan plan =
      make_plan(problem, device, workspace.bytes(), backend.compute_capability(device.index));
  {
    // A default workspace stays on its stream, which it must not keep alive for good.
    const std::unique_lock<std::mutex> lock =
        workspace.acquire(given ? stream : Stream{stream.handle});
    if (given && backend.capture_id(device.index, stream) != 0) {
      backend.retain_in_capture(device.index, stream, workspace.buffer().owner());
    }
    backend.attend(problem, plan, workspace.buffer().data(), device.index, stream);
  }
  call.finish();
}

}  // namespace

void flash_attention(const FlashArgs& args, Stream stream) {
  AttentionProblem problem = check_flash_attention(args);
  attend(problem, args.q.device, stream, args.workspace, args.check);
}

void paged_attention(const PagedArgs& args, Stream stream) {
  AttentionProblem problem = check_paged_attention(args);
  attend(problem, args.q.device, stream, args.workspace, args.check);
}

void merge_attention(const Tensor& out_a, const Tensor& lse_a, const Tensor& out_b,
                     const Tensor& lse_b, const Tensor& out, const Tensor& lse, double lse_base,
                     Stream stream) {
  const MergeAttentionProblem problem =
      check_merge_attention(out_a, lse_a, out_b, lse_b, out, lse, lse_base);
  const Backend& backend = backend_for(out_a.device);
  if (problem.shape[0] * problem.shape[1] * problem.shape[2] == 0) return;
  backend.merge_attention(problem, out_a.device.index, stream);
}

void write_kv(const WriteKvArgs& args, Stream stream) {
  WriteKvProblem problem = check_write_kv(args);
  const Device device = args.k.device;
  const Backend& backend = backend_for(device);
  const CheckedCall call(device, stream, args.check);
  problem.faults = call.record();
  if (problem.num_tokens == 0) return;
  backend.write_kv(problem, device.index, stream);
  call.finish();
}

Support supports(const SupportQuery& query) {
  try {
    const bool tiled = query.operation == SupportQuery::Operation::tiled_attention;
    const bool dense = query.operation == SupportQuery::Operation::flash_attention;
    TiledAttentionDims dims;
    dims.max_seqs = dims.tile_capacity = 1;
    dims.max_q_len = query.q_len.value_or(dense ? kMaxDecodeTokens + 1 : 1);
    if (dims.max_q_len < 1) refuse("q_len", std::to_string(dims.max_q_len), "1 or more");
    dims.num_q_heads = query.num_q_heads;
    dims.num_kv_heads = query.num_kv_heads;
    dims.head_dim = query.head_dim;
    dims.head_dim_v = query.head_dim_v;
    dims.block_size = query.block_size;
    dims.validated();
    const Tensor q =
        make_tensor(nullptr, query.dtype, query.device, {1, query.num_q_heads, query.head_dim});
    check_attention_dtype("dtype", q);
    Tensor kv = q;
    kv.dtype = query.kv_dtype.value_or(query.dtype);
    if (dense) {
      check_same_dtype("kv_dtype", kv, q.dtype, "dtype");
    } else {
      check_kv_dtype("kv_dtype", kv.dtype, q.dtype, "dtype");
    }
    const Backend& backend = backend_for(query.device);

    AttentionProblem problem;
    problem.num_seqs = 1;
    problem.num_q_heads = query.num_q_heads;
    problem.num_kv_heads = query.num_kv_heads;
    problem.head_dim = query.head_dim;
    problem.head_dim_v = dims.value_dim();
    problem.q.dtype = problem.out.dtype = query.dtype;
    problem.kv_dtype = kv.dtype;
    // One block of a contiguous cache.
    problem.num_blocks = problem.table_width = 1;
    problem.block_size = query.block_size;
    problem.k = {nullptr, 0, query.num_kv_heads * query.head_dim, query.head_dim};
    problem.v = {nullptr, 0, query.num_kv_heads * problem.head_dim_v, problem.head_dim_v};
    problem.q_len = dims.max_q_len;
    problem.key_source = tiled ? KeySource::tiles : dense ? KeySource::dense : KeySource::paged;
    problem.causal = !dense && !tiled;
    float state = 0.0f;
    if (tiled) problem.state.m = &state;  // there is one: that is all that a plan asks
    problem.total_q = problem.dense_kv_len = problem.q_len;
    problem.q.token_stride = query.num_q_heads * query.head_dim;
    problem.q.head_stride = query.head_dim;
    problem.out.token_stride = query.num_q_heads * problem.head_dim_v;
    problem.out.head_stride = problem.head_dim_v;
    const Plan plan = make_plan(problem, query.device, Workspace::kDefaultBytes,
                                backend.compute_capability(query.device.index));
    return {true, to_string(plan.kernel), ""};
  } catch (const MemoryError&) {
    throw;
  } catch (const Error& error) {
    std::string reason = error.what();
    constexpr std::string_view kDims = "dims.";  // the caller of supports() has none
    if (reason.starts_with(kDims)) reason.erase(0, kDims.size());
    return {false, "", reason};
  }
}

void check(Device device) {
  const Backend& backend = backend_for(device);
  backend.synchronize_device(device.index);
  raise_fault(device_faults(device));
}

BuildInfo build_info() {
  BuildInfo info;
  info.version = TILEDATTN_VERSION;
  info.cpu_isa = cpu_isa();
  info.no_cuda = why_no_cuda();
  if (const Backend* cuda = cuda_backend()) {
    info.cuda = cuda->build_description();
    info.num_cuda_devices = cuda->device_count();
  }
  return info;
}

}  // namespace tiledattn
