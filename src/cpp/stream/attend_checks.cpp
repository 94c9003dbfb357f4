// SPDX-License-Identifier: Apache-2.0
// q, out and lse are checked as the calls that will get them check them: step_tile and finalize.
#include "stream/attend_checks.h"

#include <optional>

#include "check_apart.h"
#include "check_tensor.h"
#include "checks.h"
#include "stream/block_runs.h"
#include "stream/tile_table.h"

namespace tiledattn {

namespace {

/// A tile of no blocks, with the arrays of a round that are given. `somewhere` is what they point
/// to: no element is ever read.
TileArgs empty_tile(const TiledAttentionDims& dims, Device device, const Tensor& q,
                    std::int64_t num_seqs, void* somewhere) {
  char* const planes[2] = {static_cast<char*>(somewhere), nullptr};
  const TileSizes sizes{
      1, dims.block_size, dims.num_kv_heads, dims.head_dim, dims.value_dim(), DType::float32};
  const TilePools pools =
      pools_at(TileGeometry::packed(sizes, BlockLayout::nhd), planes, 0, device);
  TileArgs tile;
  tile.q = q;
  tile.k_pool = pools.k;
  tile.v_pool = pools.v;
  tile.k_pool.dtype = tile.v_pool.dtype = q.dtype;
  TileTable table;
  table.device = somewhere;
  table.num_seqs = num_seqs;
  table.give(tile, 0, device, false);
  return tile;
}

/// Results may not overwrite what is read.
void check_apart_from_sources(const Written& written, const StreamSequences& sequences) {
  const TileSource* checked = nullptr;
  for (const auto& sequence : sequences) {
    for (const KvPart& part : sequence->parts) {
      if (part.source.get() == checked) continue;  // most parts have the source of the last
      checked = part.source.get();
      const std::optional<TilePools> of_source = part.source->pools();
      if (!of_source) continue;
      written.check_apart("the pools of sequences", of_source->k);
      written.check_apart("the pools of sequences", of_source->v);
    }
  }
}

/// Returns the query tokens of a sequence.
std::int64_t check_arrays(const TiledAttentionDims& dims, Device device, const AttendArgs& args) {
  const auto num_seqs = static_cast<std::int64_t>(args.sequences.size());
  if ((args.q.rank == 3 || args.q.rank == 4) && args.q.shape[0] != num_seqs) {
    refuse("q", std::to_string(args.q.shape[0]) + " sequences",
           std::to_string(num_seqs) + " like sequences");
  }
  std::int64_t somewhere = 0;
  const TileArgs tile = empty_tile(dims, device, args.q, num_seqs, &somewhere);
  const AttentionProblem problem =
      check_step_tile(dims, {}, device, {num_seqs, false, 0, DType::float32}, tile);
  const bool has_tokens = args.q.rank == 4;
  check_finalize(dims, device, {num_seqs, true, problem.q_len, problem.q.dtype, has_tokens},
                 args.out, args.lse);
  check_results_apart(args.out, args.lse, [&](const Written& written) {
    written.check_apart_or_same("q", args.q);
    check_apart_from_sources(written, args.sequences);
  });
  return problem.q_len;
}

void check_dtype(const KvPart& part, DType dtype) {
  const DType got = part.source->describe().sizes.dtype;
  if (got == dtype || is_quantized(got)) return;
  throw TypeError("sequences: source '" + part.source->name() + "' holds " + to_string(got) +
                  "; expected " + to_string(dtype) + " like q, or float8_e4m3fn or int8");
}

}  // namespace

StreamRequest check_attend(const TiledAttentionDims& dims, Device device, const AttendArgs& args) {
  check_sequences(args.sequences, dims);
  const std::int64_t q_len = check_arrays(dims, device, args);
  for (const auto& sequence : args.sequences) {
    for (const KvPart& part : sequence->parts) check_dtype(part, args.q.dtype);
  }
  const auto num_seqs = static_cast<std::int64_t>(args.sequences.size());
  if (args.state && args.state->num_seqs() != num_seqs) {
    refuse("state", std::to_string(args.state->num_seqs()) + " sequences",
           std::to_string(num_seqs) + " like sequences");
  }
  return {args.sequences, q_len, check_q_positions(args.sequences, q_len, args.q_positions)};
}

}  // namespace tiledattn
