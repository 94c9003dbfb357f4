// SPDX-License-Identifier: Apache-2.0
// The C interface to streaming: sources made of functions, sequences out of structs.
#include "tiledattn/c_streaming.h"

#include <algorithm>
#include <cstdio>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "c_api_convert.h"
#include "c_api_guard.h"

struct tiledattn_source {
  std::shared_ptr<tiledattn::TileSource> object;
};
struct tiledattn_streaming {
  tiledattn::StreamingAttention object;
  mutable std::mutex mutex;                   // of what follows: `object` has a lock of its own
  std::vector<tiledattn::TileError> missing;  // of the last attend

  void set_missing(std::vector<tiledattn::TileError> tiles) {
    const std::lock_guard<std::mutex> lock(mutex);
    missing.swap(tiles);
  }
};

using namespace tiledattn;
using namespace tiledattn::c_api;

namespace {

/// A source whose functions are the caller's.
class CallsSource final : public TileSource {
 public:
  CallsSource(const TileGeometry& geometry, const tiledattn_source_calls& calls)
      : geometry_(geometry), calls_(calls), name_(calls.name ? calls.name : "source") {}
  ~CallsSource() override {
    if (calls_.destroy) calls_.destroy(calls_.user);
  }

  std::string name() const override { return name_; }
  TileGeometry describe() const override { return geometry_; }

  Lease pin(const std::int64_t* blocks, std::int64_t count) override {
    if (!calls_.pin) return nullptr;
    auto held = std::make_shared<Held>();
    held->blocks.assign(blocks, blocks + count);
    const std::int32_t status = calls_.pin(calls_.user, blocks, count);
    if (status != 0) throw Error("pin returned " + std::to_string(status));
    held->calls = &calls_;
    return held;
  }

  std::int64_t read(const TileRead& request) override {
    const std::int64_t filled =
        calls_.read(calls_.user, request.blocks, request.count, request.data, request.bytes);
    if (filled < 0) throw Error("read returned " + std::to_string(filled));
    return filled;
  }

 private:
  struct Held {
    std::vector<std::int64_t> blocks;
    const tiledattn_source_calls* calls = nullptr;  // null: not pinned yet
    ~Held() {
      if (calls) calls->unpin(calls->user, blocks.data(), static_cast<std::int64_t>(blocks.size()));
    }
  };

  TileGeometry geometry_;
  tiledattn_source_calls calls_;
  std::string name_;
};

TileScales to_scales(const double* k, const double* v) {
  return {optional_value(k), optional_value(v)};
}

TileGeometry to_geometry(const tiledattn_geometry& from) {
  if (from.layout != TILEDATTN_HND && from.layout != TILEDATTN_NHD)
    throw_unknown("layout", "value", from.layout, "TILEDATTN_HND (0) or TILEDATTN_NHD (1)");
  const TileSizes sizes{from.num_blocks,
                        from.block_size,
                        from.num_kv_heads,
                        from.head_dim,
                        from.head_dim_v,
                        to_dtype(from.dtype, "dtype"),
                        to_scales(from.k_scale, from.v_scale)};
  return TileGeometry::packed(sizes,
                              from.layout == TILEDATTN_HND ? BlockLayout::hnd : BlockLayout::nhd);
}

/// `count` numbers at `pointer`, which may be NULL when there are none.
template <typename T>
void check_array(const T* pointer, std::int64_t count, const std::string& argument) {
  if (count < 0)
    throw ValueError(argument + ": the count is " + std::to_string(count) + "; expected 0 or more");
  if (count > 0) required(pointer, argument.c_str());
}

StreamSequences to_sequences(const tiledattn_sequence* sequences, std::int64_t num_seqs) {
  check_array(sequences, num_seqs, "sequences");
  StreamSequences all;
  for (std::int64_t b = 0; b < num_seqs; ++b) {
    const tiledattn_sequence& from = sequences[b];
    const std::string name = "sequences[" + std::to_string(b) + "]";
    check_array(from.parts, from.num_parts, name + ".parts");
    auto sequence = std::make_shared<StreamSequence>();
    sequence->length = from.length;
    for (std::int64_t i = 0; i < from.num_parts; ++i) {
      const tiledattn_kv_part& part = from.parts[i];
      const std::string part_name = name + ".parts[" + std::to_string(i) + "]";
      check_array(part.blocks, part.num_blocks, part_name + ".blocks");
      sequence->parts.push_back({required(part.source, (part_name + ".source").c_str()).object,
                                 {part.blocks, part.blocks + part.num_blocks},
                                 part.position});
    }
    all.push_back(std::move(sequence));
  }
  return all;
}

std::vector<std::int64_t> to_positions(const std::int64_t* positions, std::int64_t num_seqs) {
  if (!positions) return {};
  return {positions, positions + num_seqs};
}

PoolSource& pool_of(tiledattn_source* source) {
  auto* const pool = dynamic_cast<PoolSource*>(required(source, "source").object.get());
  if (!pool) throw TypeError("source: has blocks of its own; expected one made of pools");
  return *pool;
}

tiledattn_tier_stats from_tier(const TierStats& tier) {
  return {tier.tiles, tier.bytes, tier.seconds};
}

}  // namespace

tiledattn_status tiledattn_pool_source_create(const tiledattn_pool_args* args,
                                              tiledattn_source** source) {
  return guarded([&] {
    const tiledattn_pool_args& from = required(args, "args");
    tiledattn_source*& result = required(source, "source");
    const Tensor k_pool = to_tensor(from.k_pool, "k_pool");
    const Tensor v_pool = to_tensor(from.v_pool, "v_pool");
    result = new tiledattn_source{std::make_shared<PoolSource>(
        k_pool, v_pool, nullptr, from.name ? from.name : "pool", to_bool(from.pin, true, "pin"),
        to_scales(from.k_scale, from.v_scale))};
  });
}

tiledattn_status tiledattn_read_source_create(const tiledattn_geometry* geometry,
                                              const tiledattn_source_calls* calls,
                                              tiledattn_source** source) {
  return guarded([&] {
    const tiledattn_source_calls& functions = required(calls, "calls");
    if (!functions.read) throw ValueError("calls: read is NULL, but is required");
    if (!functions.pin != !functions.unpin)
      throw ValueError("calls: one of pin and unpin is NULL; expected both or none");
    const TileGeometry blocks = to_geometry(required(geometry, "geometry"));
    tiledattn_source*& result = required(source, "source");
    auto handle = std::make_unique<tiledattn_source>();
    handle->object = std::make_shared<CallsSource>(blocks, functions);
    result = handle.release();
  });
}

void tiledattn_source_destroy(tiledattn_source* source) { delete source; }

tiledattn_status tiledattn_source_evict(tiledattn_source* source, const std::int64_t* blocks,
                                        std::int64_t count, std::int64_t* evicted,
                                        std::int64_t* num_evicted) {
  return guarded([&] {
    PoolSource& pool = pool_of(source);
    check_array(blocks, count, "blocks");
    check_array(evicted, count, "evicted");
    std::int64_t& taken = required(num_evicted, "num_evicted");
    const std::vector<std::int64_t> ids = pool.evict(blocks, count);
    std::copy(ids.begin(), ids.end(), evicted);
    taken = static_cast<std::int64_t>(ids.size());
  });
}

tiledattn_status tiledattn_source_restore(tiledattn_source* source, const std::int64_t* blocks,
                                          std::int64_t count) {
  return guarded([&] {
    PoolSource& pool = pool_of(source);
    check_array(blocks, count, "blocks");
    pool.restore(blocks, count);
  });
}

tiledattn_status tiledattn_streaming_create(const tiledattn_dims* dims,
                                            const tiledattn_device* device,
                                            const tiledattn_options* options,
                                            const tiledattn_stream_options* stream_options,
                                            tiledattn_streaming** streaming) {
  return guarded([&] {
    StreamOptions stream;
    if (stream_options) {
      if (stream_options->scratch_bytes) stream.scratch_bytes = stream_options->scratch_bytes;
      if (stream_options->num_slots) stream.num_slots = stream_options->num_slots;
      if (stream_options->num_readers) stream.num_readers = stream_options->num_readers;
      stream.poison_scratch = stream_options->poison_scratch != 0;
    }
    tiledattn_streaming*& result = required(streaming, "streaming");
    result = new tiledattn_streaming{
        StreamingAttention(to_dims(dims), to_device(device),
                           options ? to_options(*options) : ScoreOptions{}, stream),
        {},
        {}};
  });
}

void tiledattn_streaming_destroy(tiledattn_streaming* streaming) { delete streaming; }

tiledattn_status tiledattn_streaming_attend(tiledattn_streaming* streaming,
                                            const tiledattn_attend_args* args,
                                            tiledattn_attend_result* result, void* stream) {
  return guarded([&] {
    tiledattn_streaming& self = required(streaming, "streaming");
    const tiledattn_attend_args& from = required(args, "args");
    AttendArgs call;
    call.q = to_tensor(from.q, "q");
    call.sequences = to_sequences(from.sequences, from.num_seqs);
    call.state = from.state ? &from.state->object : nullptr;
    call.q_positions = to_positions(from.q_positions, from.num_seqs);
    call.out = to_tensor(from.out, "out");
    call.lse = to_optional_tensor(from.lse, "lse");
    call.on_error = from.partial ? OnTileError::partial : OnTileError::raise;
    call.return_state = result != nullptr;
    if (from.partial) required(result, "result");
    try {
      AttendResult attended = self.object.attend(call, to_stream(stream));
      const auto num_missing = static_cast<std::int64_t>(attended.errors.size());
      self.set_missing(std::move(attended.errors));
      if (!result) return;
      result->num_missing = num_missing;
      result->state = new tiledattn_state{std::move(*attended.state)};
    } catch (const TileError& error) {
      self.set_missing({error});
      throw;
    }
  });
}

tiledattn_status tiledattn_streaming_missing(const tiledattn_streaming* streaming,
                                             std::int64_t index, tiledattn_missing_tile* tile) {
  return guarded([&] {
    const tiledattn_streaming& self = required(streaming, "streaming");
    tiledattn_missing_tile& to = required(tile, "tile");
    const std::lock_guard<std::mutex> lock(self.mutex);
    const std::vector<TileError>& missing = self.missing;
    if (index < 0 || index >= static_cast<std::int64_t>(missing.size())) {
      throw IndexError("index: got " + std::to_string(index) + "; the last attend misses " +
                       std::to_string(missing.size()) + " tiles");
    }
    const TileError& error = missing[static_cast<std::size_t>(index)];
    const TileError::Details& details = error.details();
    to.sequence = details.sequence;
    to.position = details.position;
    to.num_blocks = details.num_blocks;
    to.wanted_bytes = details.wanted_bytes;
    to.got_bytes = details.got_bytes.value_or(-1);
    std::snprintf(to.message, sizeof to.message, "%s", error.what());
  });
}

tiledattn_status tiledattn_streaming_prefetch(tiledattn_streaming* streaming,
                                              const tiledattn_sequence* sequences,
                                              std::int64_t num_seqs, std::int64_t q_len,
                                              const std::int64_t* q_positions,
                                              std::int32_t* begun) {
  return guarded([&] {
    // In this order: it also checks num_seqs, which the positions are then read by.
    const auto wanted = to_sequences(sequences, num_seqs);
    const auto positions = to_positions(q_positions, num_seqs);
    const bool accepted =
        required(streaming, "streaming").object.prefetch(wanted, q_len ? q_len : 1, positions);
    if (begun) *begun = accepted;
  });
}

tiledattn_status tiledattn_streaming_discard(tiledattn_streaming* streaming) {
  return guarded([&] { required(streaming, "streaming").object.discard(); });
}

tiledattn_status tiledattn_streaming_cancel(tiledattn_streaming* streaming, std::int32_t* running) {
  return guarded([&] {
    const bool was_running = required(streaming, "streaming").object.cancel();
    if (running) *running = was_running;
  });
}

tiledattn_status tiledattn_streaming_stats(const tiledattn_streaming* streaming,
                                           tiledattn_stream_stats* stats) {
  return guarded([&] {
    const StreamStats from = required(streaming, "streaming").object.stats();
    tiledattn_stream_stats& to = required(stats, "stats");
    const auto tier = [&](Residency residency) {
      return from_tier(from.tiers[static_cast<int>(residency)]);
    };
    to = {from.calls,
          from.launches,
          from.failed_tiles,
          from.prefetched_launches,
          from.dropped_launches,
          from.seconds,
          from.stall_seconds,
          tier(Residency::device),
          tier(Residency::pinned),
          tier(Residency::host),
          tier(Residency::remote),
          from_tier(from.link)};
  });
}

tiledattn_status tiledattn_streaming_reset_stats(tiledattn_streaming* streaming) {
  return guarded([&] { required(streaming, "streaming").object.reset_stats(); });
}

std::int64_t tiledattn_streaming_nbytes(const tiledattn_streaming* streaming) {
  std::int64_t bytes = 0;
  guarded([&] { bytes = required(streaming, "streaming").object.nbytes(); });
  return bytes;
}
