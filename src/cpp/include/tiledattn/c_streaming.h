/* SPDX-License-Identifier: Apache-2.0
 *
 * Streaming from C: attention over KV in host memory, on another GPU or in a source of your own,
 * that is fetched while it is attended to. The conventions are those of c_api.h.
 */
#ifndef TILEDATTN_C_STREAMING_H
#define TILEDATTN_C_STREAMING_H

#include "tiledattn/c_api.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- Sources ---- */

/* KV blocks that streaming attention fetches. What is being fetched keeps its source: a handle can
 * be destroyed at any time. Any number of threads may use one. */
typedef struct tiledattn_source tiledattn_source;

/* KV blocks in arrays, in host memory or on a GPU. They are attended to where they are when that is
 * the device of attention; a GPU fetches from host memory, which is pinned at its first use. */
typedef struct tiledattn_pool_args {
  const tiledattn_tensor* k_pool; /* [num_blocks, block_size, num_kv_heads, head_dim] */
  const tiledattn_tensor* v_pool; /* [num_blocks, block_size, num_kv_heads, head_dim_v] */
  const char* name;               /* what errors call it; NULL: "pool" */
  int32_t pin;                    /* tiledattn_choice, default yes: pin host memory */
  const double* k_scale;          /* of quantised pools; NULL: not given */
  const double* v_scale;
} tiledattn_pool_args;

/* The arrays need to live as long as the source is used. */
TILEDATTN_API tiledattn_status tiledattn_pool_source_create(const tiledattn_pool_args* args,
                                                            tiledattn_source** source);

/* Order inside K and inside V of a block: [num_kv_heads, block_size, head_dim] or tokens before
 * heads. */
typedef enum tiledattn_block_layout { TILEDATTN_HND = 0, TILEDATTN_NHD = 1 } tiledattn_block_layout;

/* Blocks of K then V, without gaps. */
typedef struct tiledattn_geometry {
  int64_t num_blocks;
  int64_t block_size; /* tokens in a block */
  int64_t num_kv_heads;
  int64_t head_dim;
  int64_t head_dim_v;    /* 0 means head_dim */
  int32_t dtype;         /* tiledattn_dtype: that of q, TILEDATTN_FLOAT8_E4M3FN or TILEDATTN_INT8 */
  int32_t layout;        /* tiledattn_block_layout */
  const double* k_scale; /* of quantised blocks; NULL: not given */
  const double* v_scale;
} tiledattn_geometry;

/* A source of your own. Threads of the library call the functions, several at once. They may call
 * this library, but for the attend, prefetch and discard of the streaming that called them, which
 * give TILEDATTN_VALUE_ERROR there. */
typedef struct tiledattn_source_calls {
  const char* name; /* what errors call it; NULL: "source" */
  void* user;       /* given to each function */
  /* Fill `bytes` bytes at `data` with `count` blocks, one after the other. Returns the number of
   * bytes that were filled: fewer than `bytes`, or a negative number, is an error of the tile. */
  int64_t (*read)(void* user, const int64_t* blocks, int64_t count, void* data, int64_t bytes);
  /* Keep blocks as they are until unpin is called with the same ones; not 0: one is not there. NULL
   * for both: blocks never change. */
  int32_t (*pin)(void* user, const int64_t* blocks, int64_t count);
  void (*unpin)(void* user, const int64_t* blocks, int64_t count);
  /* Called once, when nothing uses the source any more. May be NULL. */
  void (*destroy)(void* user);
} tiledattn_source_calls;

TILEDATTN_API tiledattn_status tiledattn_read_source_create(const tiledattn_geometry* geometry,
                                                            const tiledattn_source_calls* calls,
                                                            tiledattn_source** source);
/* NULL is allowed. */
TILEDATTN_API void tiledattn_source_destroy(tiledattn_source* source);

/* Take blocks of a pool out of use, but for those that are being fetched. `evicted` has room for
 * `count` ids and gets those that were taken: their memory is yours, attention to them is refused.
 */
TILEDATTN_API tiledattn_status tiledattn_source_evict(tiledattn_source* source,
                                                      const int64_t* blocks, int64_t count,
                                                      int64_t* evicted, int64_t* num_evicted);
/* Put evicted blocks, with new contents, back into use. */
TILEDATTN_API tiledattn_status tiledattn_source_restore(tiledattn_source* source,
                                                        const int64_t* blocks, int64_t count);

/* ---- Sequences ---- */

/* Blocks of one source that hold keys of one sequence, in the order of the sequence. */
typedef struct tiledattn_kv_part {
  const tiledattn_source* source;
  const int64_t* blocks; /* [num_blocks], on the host */
  int64_t num_blocks;
  int64_t position; /* of the first slot of the first block */
} tiledattn_kv_part;

/* The keys of one sequence: its parts in the order of keys. Keys from `length` on do not count, and
 * keys that no part holds are left out. */
typedef struct tiledattn_sequence {
  int64_t length;
  const tiledattn_kv_part* parts; /* [num_parts] */
  int64_t num_parts;
} tiledattn_sequence;

/* ---- Attention ---- */

typedef struct tiledattn_stream_options {
  int64_t scratch_bytes;  /* on the device, for fetched tiles; 0: 24 MiB */
  int64_t num_slots;      /* parts of the scratch, one launch each; 0: 3 */
  int64_t num_readers;    /* threads that call `read`; 0: 4 */
  int32_t poison_scratch; /* not 0: fill each slot with NaN before it is used; for tests */
} tiledattn_stream_options;

/* Folds tiles of dims.tile_capacity blocks of each sequence, in the order of keys: the bits of the
 * same tiles given to tiledattn_step_tile. Calls of several threads run one after the other. */
typedef struct tiledattn_streaming tiledattn_streaming;

/* NULL for `device`, `options` and `stream_options`: the defaults. */
TILEDATTN_API tiledattn_status tiledattn_streaming_create(
    const tiledattn_dims* dims, const tiledattn_device* device, const tiledattn_options* options,
    const tiledattn_stream_options* stream_options, tiledattn_streaming** streaming);
/* Waits for the reads and copies under way. NULL is allowed. */
TILEDATTN_API void tiledattn_streaming_destroy(tiledattn_streaming* streaming);

typedef struct tiledattn_attend_args {
  const tiledattn_tensor* q; /* [B, num_q_heads, head_dim] or [B, q_len, num_q_heads, head_dim] */
  const tiledattn_sequence* sequences; /* [num_seqs] */
  int64_t num_seqs;                    /* B */
  const tiledattn_state* state;        /* go on from here; NULL: from the empty state */
  /* [num_seqs], on the host: position of the first query token, which sees keys at or before it;
   * NULL: length - q_len. */
  const int64_t* q_positions;
  const tiledattn_tensor* out; /* written only when every tile is in */
  const tiledattn_tensor* lse; /* or NULL */
  int32_t partial;             /* not 0: a failed tile does not end the call */
} tiledattn_attend_args;

typedef struct tiledattn_attend_result {
  tiledattn_state* state; /* of all tiles that are in; the caller's, to be destroyed */
  int64_t num_missing;    /* tiles that are not; with `partial` alone it can be other than 0 */
} tiledattn_attend_result;

/* Fold all tiles of the sequences and write the result. Returns when the sources are no longer
 * read. `result` may be NULL, but not with `partial`. TILEDATTN_TILE_ERROR: a tile could not be
 * had; out, lse and state are unchanged, and tiledattn_streaming_missing has the details. */
TILEDATTN_API tiledattn_status tiledattn_streaming_attend(tiledattn_streaming* streaming,
                                                          const tiledattn_attend_args* args,
                                                          tiledattn_attend_result* result,
                                                          void* stream);

/* A tile that could not be had. To go on, attend with the state to `num_blocks` blocks from
 * `position` on, in another source. */
typedef struct tiledattn_missing_tile {
  int64_t sequence;
  int64_t position; /* of its first key */
  int64_t num_blocks;
  int64_t wanted_bytes;
  int64_t got_bytes; /* -1: the source failed with an error */
  char message[512]; /* names the source */
} tiledattn_missing_tile;

/* Tile `index` of those that the last attend with TILEDATTN_OK or TILEDATTN_TILE_ERROR could not
 * have; TILEDATTN_INDEX_ERROR past the last. */
TILEDATTN_API tiledattn_status tiledattn_streaming_missing(const tiledattn_streaming* streaming,
                                                           int64_t index,
                                                           tiledattn_missing_tile* tile);

/* Begin to fetch for a later attend to equal sequences, with this q_len (0 means 1) and these
 * q_positions. The blocks must have their contents now. `begun`, which may be NULL, gets 0 when too
 * many wait already. */
TILEDATTN_API tiledattn_status tiledattn_streaming_prefetch(tiledattn_streaming* streaming,
                                                            const tiledattn_sequence* sequences,
                                                            int64_t num_seqs, int64_t q_len,
                                                            const int64_t* q_positions,
                                                            int32_t* begun);
/* Drop what was prefetched. Waits for the reads and copies under way. */
TILEDATTN_API tiledattn_status tiledattn_streaming_discard(tiledattn_streaming* streaming);
/* End the attend that another thread is in, with TILEDATTN_CANCELLED. `running`, which may be NULL,
 * gets 0 when there is none, or when its tiles are all in: then it ends as if nothing had been
 * said. May be called by any thread. */
TILEDATTN_API tiledattn_status tiledattn_streaming_cancel(tiledattn_streaming* streaming,
                                                          int32_t* running);

/* ---- Statistics ---- */

typedef struct tiledattn_tier_stats {
  int64_t tiles;
  int64_t bytes;
  double seconds; /* of copying or reading, summed over threads */
} tiledattn_tier_stats;

/* Since the handle was made or its statistics were reset. */
typedef struct tiledattn_stream_stats {
  int64_t calls;
  int64_t launches;
  int64_t failed_tiles;
  int64_t prefetched_launches;
  int64_t dropped_launches;
  double seconds;       /* inside attend */
  double stall_seconds; /* of these, waiting */
  tiledattn_tier_stats device;
  tiledattn_tier_stats pinned;
  tiledattn_tier_stats host;
  tiledattn_tier_stats remote;
  tiledattn_tier_stats link; /* copies into GPU memory, from whichever tier; one launch in fifteen
                                is timed, and the others count as equally fast */
} tiledattn_stream_stats;

TILEDATTN_API tiledattn_status tiledattn_streaming_stats(const tiledattn_streaming* streaming,
                                                         tiledattn_stream_stats* stats);
TILEDATTN_API tiledattn_status tiledattn_streaming_reset_stats(tiledattn_streaming* streaming);
/* Bytes of all buffers on the device. */
TILEDATTN_API int64_t tiledattn_streaming_nbytes(const tiledattn_streaming* streaming);

#ifdef __cplusplus
}
#endif

#endif /* TILEDATTN_C_STREAMING_H */
