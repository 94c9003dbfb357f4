/* SPDX-License-Identifier: Apache-2.0
 * Streaming from C: sources of pools and of functions, tiles that fail, cancelling, eviction,
 * threads. */
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "c_check.h"
#include "tiledattn/c_streaming.h"

enum {
  kSeqs = 2,
  kHeads = 2,
  kDim = 8,
  kBlockSize = 4,
  kBlocks = 8,
  kTile = 2,
  kBlockFloats = kHeads * kBlockSize * kDim, /* of K, or of V */
  kOutSize = kSeqs * kHeads * kDim
};

/* Block b is K then V, each [kHeads, kBlockSize, kDim]. */
static float cache[kBlocks][2][kBlockFloats];
static float q[kOutSize];
static const int64_t tables[kSeqs][4] = {{5, 0, 3, 1}, {6, 2, -1, -1}};
static const int64_t lengths[kSeqs] = {14, 7};
static const int64_t num_blocks[kSeqs] = {4, 2};
static const tiledattn_device kCpu = {TILEDATTN_CPU, 0};

static void reference(double* out) {
  int b, h, j, d;
  for (b = 0; b < kSeqs; ++b) {
    for (h = 0; h < kHeads; ++h) {
      double sum = 0;
      double* row = out + (b * kHeads + h) * kDim;
      for (d = 0; d < kDim; ++d) row[d] = 0;
      for (j = 0; j < lengths[b]; ++j) {
        float (*block)[kBlockFloats] = cache[tables[b][j / kBlockSize]];
        const int at = (h * kBlockSize + j % kBlockSize) * kDim;
        double score = 0, weight;
        for (d = 0; d < kDim; ++d)
          score += (double)q[(b * kHeads + h) * kDim + d] * block[0][at + d];
        weight = exp(score / sqrt((double)kDim));
        sum += weight;
        for (d = 0; d < kDim; ++d) row[d] += weight * block[1][at + d];
      }
      for (d = 0; d < kDim; ++d) row[d] /= sum;
    }
  }
}

/* A source whose blocks are read one by one, and what is to go wrong there. */
typedef struct Reads {
  int64_t bad_block;  /* -1: none */
  int64_t bad_result; /* what read returns for a tile that holds it */
  int pinned, unpinned, destroyed, refuse_pins;
  tiledattn_streaming* to_cancel;
  tiledattn_streaming* to_discard; /* which read cannot do */
  int refused;
} Reads;

static int64_t read_blocks(void* user, const int64_t* blocks, int64_t count, void* data,
                           int64_t bytes) {
  Reads* reads = user;
  int64_t i;
  if (reads->to_discard && blocks[0] == tables[0][0] && /* in one thread */
      tiledattn_streaming_discard(reads->to_discard) == TILEDATTN_VALUE_ERROR)
    reads->refused = 1;
  if (reads->to_cancel) tiledattn_streaming_cancel(reads->to_cancel, NULL);
  for (i = 0; i < count; ++i) {
    if (blocks[i] == reads->bad_block) return reads->bad_result;
    memcpy((char*)data + (size_t)i * sizeof cache[0], cache[blocks[i]], sizeof cache[0]);
  }
  return bytes;
}

static int32_t pin_blocks(void* user, const int64_t* blocks, int64_t count) {
  Reads* reads = user;
  (void)blocks;
  if (reads->refuse_pins) return 3;
  reads->pinned += (int)count;
  return 0;
}

static void unpin_blocks(void* user, const int64_t* blocks, int64_t count) {
  (void)blocks;
  ((Reads*)user)->unpinned += (int)count;
}

static void destroy_reads(void* user) { ++((Reads*)user)->destroyed; }

static tiledattn_source* make_reads(Reads* reads) {
  tiledattn_geometry geometry = {0};
  tiledattn_source_calls calls = {0};
  tiledattn_source* source = NULL;
  const Reads none = {-1, 0, 0, 0, 0, 0, NULL, NULL, 0};
  *reads = none;
  geometry.num_blocks = kBlocks;
  geometry.block_size = kBlockSize;
  geometry.num_kv_heads = kHeads;
  geometry.head_dim = kDim;
  geometry.dtype = TILEDATTN_FLOAT32;
  calls.name = "mine";
  calls.user = reads;
  calls.read = read_blocks;
  calls.pin = pin_blocks;
  calls.unpin = unpin_blocks;
  calls.destroy = destroy_reads;
  CHECK_OK(tiledattn_read_source_create(&geometry, &calls, &source));
  return source;
}

static tiledattn_tensor pool(int part) {
  const int64_t shape[4] = {kBlocks, kBlockSize, kHeads, kDim};
  tiledattn_tensor tensor =
      tiledattn_make_tensor(cache[0][part], TILEDATTN_FLOAT32, kCpu, 4, shape);
  tensor.strides[0] = 2 * kBlockFloats;
  tensor.strides[1] = kDim;
  tensor.strides[2] = kBlockSize * kDim;
  return tensor;
}

static tiledattn_source* make_pools(void) {
  const tiledattn_tensor k = pool(0), v = pool(1);
  tiledattn_pool_args args = {0};
  tiledattn_source* source = NULL;
  args.k_pool = &k;
  args.v_pool = &v;
  CHECK_OK(tiledattn_pool_source_create(&args, &source));
  return source;
}

static tiledattn_dims make_dims(void) {
  tiledattn_dims dims = {0};
  dims.max_seqs = kSeqs;
  dims.num_q_heads = kHeads;
  dims.num_kv_heads = kHeads;
  dims.head_dim = kDim;
  dims.block_size = kBlockSize;
  dims.tile_capacity = kTile;
  return dims;
}

static tiledattn_streaming* make_streaming(void) {
  const tiledattn_dims dims = make_dims();
  tiledattn_stream_options options = {0};
  tiledattn_streaming* streaming = NULL;
  options.scratch_bytes = 1 << 16;
  options.poison_scratch = 1;
  CHECK_OK(tiledattn_streaming_create(&dims, &kCpu, NULL, &options, &streaming));
  return streaming;
}

/* The sequences above, all of one source. */
typedef struct Sequences {
  tiledattn_kv_part parts[kSeqs];
  tiledattn_sequence all[kSeqs];
} Sequences;

static void make_sequences(const tiledattn_source* source, Sequences* to) {
  int b;
  for (b = 0; b < kSeqs; ++b) {
    const tiledattn_kv_part part = {source, tables[b], num_blocks[b], 0};
    to->parts[b] = part;
    to->all[b].length = lengths[b];
    to->all[b].parts = &to->parts[b];
    to->all[b].num_parts = 1;
  }
}

/* One call; out is filled with 7 before it. */
static tiledattn_status attend(tiledattn_streaming* streaming, const tiledattn_sequence* sequences,
                               const tiledattn_state* state, int partial,
                               tiledattn_attend_result* result, float* out) {
  const int64_t shape[3] = {kSeqs, kHeads, kDim};
  const tiledattn_tensor q_tensor = tiledattn_make_tensor(q, TILEDATTN_FLOAT32, kCpu, 3, shape);
  const tiledattn_tensor to = tiledattn_make_tensor(out, TILEDATTN_FLOAT32, kCpu, 3, shape);
  tiledattn_attend_args args = {0};
  int i;
  for (i = 0; i < kOutSize; ++i) out[i] = 7;
  args.q = &q_tensor;
  args.sequences = sequences;
  args.num_seqs = kSeqs;
  args.state = state;
  args.out = &to;
  args.partial = partial;
  return tiledattn_streaming_attend(streaming, &args, result, NULL);
}

static int untouched(const float* out) {
  int i;
  for (i = 0; i < kOutSize; ++i) {
    if (out[i] != 7) return 0;
  }
  return 1;
}

/* The same tiles through tiledattn_step_tile. */
static void by_hand(float* out) {
  const int64_t table_shape[2] = {kSeqs, kTile}, seqs[1] = {kSeqs},
                shape[3] = {kSeqs, kHeads, kDim};
  const tiledattn_dims dims = make_dims();
  const tiledattn_tensor k = pool(0), v = pool(1);
  tiledattn_attention* attention = NULL;
  tiledattn_tile_args tile = {0};
  const tiledattn_tensor q_tensor = tiledattn_make_tensor(q, TILEDATTN_FLOAT32, kCpu, 3, shape);
  const tiledattn_tensor to = tiledattn_make_tensor(out, TILEDATTN_FLOAT32, kCpu, 3, shape);
  int first, b, i;
  CHECK_OK(tiledattn_create(&dims, &kCpu, NULL, &attention));
  CHECK_OK(tiledattn_begin_step(attention, kSeqs, NULL));
  for (first = 0; first < 4; first += kTile) {
    int64_t blocks[kSeqs][kTile], counts[kSeqs], slots[kSeqs];
    const tiledattn_tensor blocks_tensor =
        tiledattn_make_tensor(blocks, TILEDATTN_INT64, kCpu, 2, table_shape);
    const tiledattn_tensor counts_tensor =
        tiledattn_make_tensor(counts, TILEDATTN_INT64, kCpu, 1, seqs);
    const tiledattn_tensor slots_tensor =
        tiledattn_make_tensor(slots, TILEDATTN_INT64, kCpu, 1, seqs);
    for (b = 0; b < kSeqs; ++b) {
      const int64_t left = lengths[b] - (first + kTile - 1) * kBlockSize;
      counts[b] = num_blocks[b] > first ? kTile : 0;
      slots[b] = left < kBlockSize ? left : kBlockSize;
      if (counts[b] == 0) slots[b] = 0;
      for (i = 0; i < kTile; ++i) blocks[b][i] = tables[b][first + i];
    }
    tile.q = &q_tensor;
    tile.k_pool = &k;
    tile.v_pool = &v;
    tile.tile_blocks = &blocks_tensor;
    tile.tile_block_counts = &counts_tensor;
    tile.last_block_valid_slots = &slots_tensor;
    CHECK_OK(tiledattn_step_tile(attention, &tile, NULL));
  }
  CHECK_OK(tiledattn_finalize(attention, &to, NULL, NULL));
  tiledattn_destroy(attention);
}

static void test_results(void) {
  static double want[kOutSize];
  static float got[kOutSize], tiles[kOutSize];
  Reads reads;
  Sequences sequences;
  int kind, i;
  reference(want);
  by_hand(tiles);
  for (kind = 0; kind < 2; ++kind) {
    tiledattn_source* source = kind ? make_reads(&reads) : make_pools();
    tiledattn_streaming* streaming = make_streaming();
    make_sequences(source, &sequences);
    for (i = 0; i < 2; ++i) {
      CHECK_OK(attend(streaming, sequences.all, NULL, 0, NULL, got));
      CHECK(memcmp(got, tiles, sizeof got) == 0);
    }
    for (i = 0; i < kOutSize; ++i) CHECK(fabs(got[i] - want[i]) < 1e-5);
    CHECK(tiledattn_streaming_nbytes(streaming) >= 1 << 15);
    tiledattn_streaming_destroy(streaming);
    tiledattn_source_destroy(source);
  }
  CHECK(reads.pinned == 12 && reads.unpinned == 12);
  CHECK(reads.destroyed == 1);
}

static void test_failed_tiles(void) {
  static float got[kOutSize], tiles[kOutSize];
  Reads reads;
  Sequences sequences;
  tiledattn_missing_tile missing;
  tiledattn_attend_result result = {0}, rest = {0};
  tiledattn_source* const source = make_reads(&reads);
  tiledattn_source* const other = make_pools();
  tiledattn_streaming* const streaming = make_streaming();
  tiledattn_kv_part left;
  tiledattn_sequence remaining[kSeqs] = {{14, NULL, 0}, {7, NULL, 0}};
  by_hand(tiles);
  make_sequences(source, &sequences);

  reads.bad_block = 3;
  reads.bad_result = -5;
  CHECK_ERROR(attend(streaming, sequences.all, NULL, 0, NULL, got), TILEDATTN_TILE_ERROR, "mine",
              "read returned -5");
  CHECK(untouched(got));
  CHECK_OK(tiledattn_streaming_missing(streaming, 0, &missing));
  CHECK(missing.sequence == 0 && missing.position == 8 && missing.num_blocks == 2);
  CHECK_ERROR(tiledattn_streaming_missing(streaming, 1, &missing), TILEDATTN_INDEX_ERROR, "index",
              "1");

  reads.bad_result = 17;
  CHECK_OK(attend(streaming, sequences.all, NULL, 1, &result, got));
  CHECK(untouched(got));
  CHECK(result.num_missing == 1 && result.state != NULL);
  CHECK_OK(tiledattn_streaming_missing(streaming, 0, &missing));
  CHECK(missing.wanted_bytes == 2 * (int64_t)sizeof cache[0] && missing.got_bytes == 17);
  CHECK(strstr(missing.message, "got 17") != NULL);

  left.source = other;
  left.blocks = tables[missing.sequence] + missing.position / kBlockSize;
  left.num_blocks = missing.num_blocks;
  left.position = missing.position;
  remaining[0].parts = &left;
  remaining[0].num_parts = 1;
  CHECK_OK(attend(streaming, remaining, result.state, 1, &rest, got));
  CHECK(rest.num_missing == 0);
  CHECK(memcmp(got, tiles, sizeof got) == 0);
  tiledattn_state_destroy(result.state);
  tiledattn_state_destroy(rest.state);

  reads.refuse_pins = 1;
  CHECK_ERROR(attend(streaming, sequences.all, NULL, 0, NULL, got), TILEDATTN_TILE_ERROR, "mine",
              "pin returned 3");
  reads.refuse_pins = 0;
  reads.bad_block = -1;
  CHECK_OK(attend(streaming, sequences.all, NULL, 0, NULL, got));
  CHECK(memcmp(got, tiles, sizeof got) == 0);
  tiledattn_streaming_destroy(streaming);
  tiledattn_source_destroy(source);
  tiledattn_source_destroy(other);
  CHECK(reads.pinned == reads.unpinned && reads.destroyed == 1);
}

static void test_ahead_and_cancel(void) {
  static float got[kOutSize], tiles[kOutSize];
  Reads reads;
  Sequences sequences;
  tiledattn_stream_stats stats;
  int32_t yes = -1;
  tiledattn_source* source = make_reads(&reads);
  tiledattn_streaming* const streaming = make_streaming();
  by_hand(tiles);
  make_sequences(source, &sequences);
  CHECK_OK(tiledattn_streaming_prefetch(streaming, sequences.all, kSeqs, 0, NULL, &yes));
  CHECK(yes == 1);
  CHECK_OK(attend(streaming, sequences.all, NULL, 0, NULL, got));
  CHECK(memcmp(got, tiles, sizeof got) == 0);
  CHECK_OK(tiledattn_streaming_stats(streaming, &stats));
  CHECK(stats.calls == 1 && stats.prefetched_launches > 0 && stats.dropped_launches == 0);
  CHECK(stats.remote.bytes == 6 * (int64_t)sizeof cache[0] && stats.host.bytes == 0);
  CHECK(stats.link.bytes == 0 && stats.seconds > 0);
  CHECK_OK(tiledattn_streaming_cancel(streaming, &yes));
  CHECK(yes == 0);
  reads.to_cancel = streaming;
  CHECK_ERROR(attend(streaming, sequences.all, NULL, 0, NULL, got), TILEDATTN_CANCELLED,
              "cancelled", "unchanged");
  CHECK(untouched(got));
  reads.to_cancel = NULL;
  reads.to_discard = streaming;
  CHECK_OK(attend(streaming, sequences.all, NULL, 0, NULL, got));
  CHECK(memcmp(got, tiles, sizeof got) == 0);
  CHECK(reads.refused);
  reads.to_discard = NULL;
  CHECK_OK(tiledattn_streaming_prefetch(streaming, sequences.all, kSeqs, 1, NULL, NULL));
  tiledattn_source_destroy(source); /* what is prefetched keeps the source */
  CHECK(reads.destroyed == 0);
  CHECK_OK(tiledattn_streaming_discard(streaming));
  CHECK(reads.destroyed == 1);
  CHECK_OK(tiledattn_streaming_reset_stats(streaming));
  CHECK_OK(tiledattn_streaming_stats(streaming, &stats));
  CHECK(stats.calls == 0 && stats.dropped_launches == 0);
  tiledattn_streaming_destroy(streaming);
}

static void test_eviction(void) {
  static float got[kOutSize], tiles[kOutSize];
  Reads reads;
  Sequences sequences;
  int64_t evicted[2] = {-1, -1}, count = -1;
  const int64_t some[2] = {3, 7};
  tiledattn_source* const source = make_pools();
  tiledattn_source* const own = make_reads(&reads);
  tiledattn_streaming* const streaming = make_streaming();
  by_hand(tiles);
  make_sequences(source, &sequences);
  CHECK_OK(tiledattn_source_evict(source, some, 2, evicted, &count));
  CHECK(count == 2 && evicted[0] == 3 && evicted[1] == 7);
  CHECK_ERROR(attend(streaming, sequences.all, NULL, 0, NULL, got), TILEDATTN_TILE_ERROR, "pool",
              "evicted");
  CHECK_OK(tiledattn_source_evict(source, some, 2, evicted, &count));
  CHECK(count == 0);
  CHECK_OK(tiledattn_source_restore(source, some, 2));
  CHECK_OK(attend(streaming, sequences.all, NULL, 0, NULL, got));
  CHECK(memcmp(got, tiles, sizeof got) == 0);
  CHECK_ERROR(tiledattn_source_evict(own, some, 2, evicted, &count), TILEDATTN_TYPE_ERROR, "source",
              "pools");
  CHECK_ERROR(tiledattn_source_restore(source, some, -1), TILEDATTN_VALUE_ERROR, "blocks", "-1");
  tiledattn_streaming_destroy(streaming);
  tiledattn_source_destroy(source);
  tiledattn_source_destroy(own);
}

/* What one thread does with a handle that others use too. */
typedef struct Sharer {
  tiledattn_streaming* streaming;
  const Sequences* sequences;
  int wrong;
} Sharer;

static void* share(void* user) {
  Sharer* self = user;
  float got[kOutSize];
  tiledattn_missing_tile missing;
  int i;
  for (i = 0; i < 100; ++i) {
    tiledattn_attend_result result = {0};
    if (attend(self->streaming, self->sequences->all, NULL, 1, &result, got) != TILEDATTN_OK ||
        result.num_missing != 1 || !untouched(got))
      ++self->wrong;
    tiledattn_state_destroy(result.state);
    if (tiledattn_streaming_missing(self->streaming, 0, &missing) != TILEDATTN_OK ||
        missing.position != 8)
      ++self->wrong;
  }
  return NULL;
}

static void test_threads_share_a_handle(void) {
  enum { kThreads = 4 };
  Reads reads;
  Sequences sequences;
  Sharer sharers[kThreads];
  pthread_t threads[kThreads];
  int i;
  tiledattn_source* const source = make_reads(&reads);
  tiledattn_streaming* const streaming = make_streaming();
  make_sequences(source, &sequences);
  reads.bad_block = 3;
  for (i = 0; i < kThreads; ++i) {
    const Sharer sharer = {streaming, &sequences, 0};
    sharers[i] = sharer;
    CHECK(pthread_create(&threads[i], NULL, share, &sharers[i]) == 0);
  }
  for (i = 0; i < kThreads; ++i) {
    CHECK(pthread_join(threads[i], NULL) == 0);
    CHECK(sharers[i].wrong == 0);
  }
  tiledattn_streaming_destroy(streaming);
  tiledattn_source_destroy(source);
}

static void test_wrong_calls(void) {
  static float got[kOutSize];
  Reads reads;
  Sequences sequences;
  tiledattn_geometry geometry = {0};
  tiledattn_source_calls calls = {0};
  tiledattn_pool_args pools = {0};
  tiledattn_source* none = NULL;
  tiledattn_source* const source = make_reads(&reads);
  tiledattn_streaming* const streaming = make_streaming();
  const tiledattn_dims dims = make_dims();
  tiledattn_stream_options options = {0};
  tiledattn_streaming* other = NULL;
  make_sequences(source, &sequences);
  CHECK_ERROR(tiledattn_read_source_create(&geometry, &calls, &none), TILEDATTN_VALUE_ERROR, "read",
              "NULL");
  calls.read = read_blocks;
  CHECK_ERROR(tiledattn_read_source_create(&geometry, &calls, &none), TILEDATTN_VALUE_ERROR,
              "num_blocks", "0");
  geometry.num_blocks = geometry.block_size = geometry.num_kv_heads = geometry.head_dim = 8;
  CHECK_ERROR(tiledattn_read_source_create(&geometry, &calls, &none), TILEDATTN_TYPE_ERROR, "dtype",
              "float32");
  geometry.dtype = TILEDATTN_FLOAT32;
  geometry.layout = 5;
  CHECK_ERROR(tiledattn_read_source_create(&geometry, &calls, &none), TILEDATTN_VALUE_ERROR,
              "layout", "5");
  calls.pin = pin_blocks;
  CHECK_ERROR(tiledattn_read_source_create(&geometry, &calls, &none), TILEDATTN_VALUE_ERROR,
              "unpin", "both");
  CHECK_ERROR(tiledattn_pool_source_create(&pools, &none), TILEDATTN_VALUE_ERROR, "k_pool", "NULL");
  options.num_slots = 1;
  CHECK_ERROR(tiledattn_streaming_create(&dims, &kCpu, NULL, &options, &other),
              TILEDATTN_VALUE_ERROR, "num_slots", "1");
  CHECK_ERROR(attend(streaming, NULL, NULL, 0, NULL, got), TILEDATTN_VALUE_ERROR, "sequences",
              "NULL");
  CHECK_ERROR(attend(streaming, sequences.all, NULL, 1, NULL, got), TILEDATTN_VALUE_ERROR, "result",
              "NULL");
  sequences.parts[1].source = NULL;
  CHECK_ERROR(attend(streaming, sequences.all, NULL, 0, NULL, got), TILEDATTN_VALUE_ERROR,
              "sequences[1].parts[0].source", "NULL");
  sequences.parts[1].source = source;
  sequences.parts[1].num_blocks = -1;
  CHECK_ERROR(attend(streaming, sequences.all, NULL, 0, NULL, got), TILEDATTN_VALUE_ERROR,
              "sequences[1].parts[0].blocks", "-1");
  const int64_t positions[kSeqs] = {0};
  CHECK_ERROR(tiledattn_streaming_prefetch(streaming, sequences.all, -1, 1, positions, NULL),
              TILEDATTN_VALUE_ERROR, "sequences", "-1");
  CHECK_ERROR(tiledattn_streaming_discard(NULL), TILEDATTN_VALUE_ERROR, "streaming", "NULL");
  CHECK(untouched(got) && reads.pinned == 0 && none == NULL && other == NULL);
  tiledattn_streaming_destroy(streaming);
  tiledattn_streaming_destroy(NULL);
  tiledattn_source_destroy(source);
  tiledattn_source_destroy(NULL);
}

int main(void) {
  fill(q, sizeof q / sizeof *q, 1);
  fill(cache[0][0], sizeof cache / sizeof(float), 2);
  test_results();
  test_failed_tiles();
  test_ahead_and_cancel();
  test_eviction();
  test_threads_share_a_handle();
  test_wrong_calls();
  printf("%d checks, %d failures\n", num_checks, num_failures);
  return num_failures == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
