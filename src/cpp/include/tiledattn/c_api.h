/* SPDX-License-Identifier: Apache-2.0
 *
 * The C interface (C99), for engines in other languages. It offers what the C++ headers offer;
 * streaming is in c_streaming.h.
 *
 * Conventions
 * - A struct whose bytes are all zero holds the defaults. Optional members are pointers: NULL means
 *   not given.
 * - Arrays are never owned. Structs and what they point to need to live until the call returns; on
 *   a GPU the arrays themselves until the work on the stream has run.
 * - Functions that can fail return a tiledattn_status. After anything but TILEDATTN_OK,
 *   tiledattn_last_error() names the argument, what came and what was wanted; nothing has been
 *   written and handles remain usable.
 * - `stream` is a cudaStream_t; NULL is the legacy default stream. Ignored on the CPU. No call
 *   waits for the device unless it says so.
 * - One handle may be used by one thread at a time; different handles by different threads.
 */
#ifndef TILEDATTN_C_API_H
#define TILEDATTN_C_API_H

#include <stddef.h>
#include <stdint.h>

#include "tiledattn/export.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- Errors ---- */

typedef enum tiledattn_status {
  TILEDATTN_OK = 0,
  TILEDATTN_TYPE_ERROR = 1,     /* a wrong element type or kind of argument */
  TILEDATTN_VALUE_ERROR = 2,    /* a wrong shape, size or value */
  TILEDATTN_INDEX_ERROR = 3,    /* a block id or slot outside the pool */
  TILEDATTN_MEMORY_ERROR = 4,   /* memory could not be had */
  TILEDATTN_CUDA_ERROR = 5,     /* a CUDA call failed */
  TILEDATTN_INTERNAL_ERROR = 6, /* a fault of the library */
  TILEDATTN_TILE_ERROR = 7,     /* streaming: a tile could not be had from its source */
  TILEDATTN_CANCELLED = 8,      /* streaming: another thread ended the call */
} tiledattn_status;

/* The message of this thread's last failed call; "" when none has failed. Valid until the thread's
 * next failing call. */
TILEDATTN_API const char* tiledattn_last_error(void);

/* ---- Arrays ---- */

#define TILEDATTN_MAX_RANK 6

/* Element types, as DLPack's code * 256 + bits. */
typedef enum tiledattn_dtype {
  TILEDATTN_INT8 = 0x0008,
  TILEDATTN_INT32 = 0x0020,
  TILEDATTN_INT64 = 0x0040,
  TILEDATTN_FLOAT16 = 0x0210,
  TILEDATTN_FLOAT32 = 0x0220,
  TILEDATTN_BFLOAT16 = 0x0410,
  TILEDATTN_FLOAT8_E4M3FN = 0x0a08,
} tiledattn_dtype;

typedef enum tiledattn_device_kind { TILEDATTN_CPU = 0, TILEDATTN_CUDA = 1 } tiledattn_device_kind;

typedef struct tiledattn_device {
  int32_t kind;  /* tiledattn_device_kind */
  int32_t index; /* of the GPU; 0 for the CPU */
} tiledattn_device;

/* An array somewhere in memory. Strides count elements; `data` is the address of the first element.
 */
typedef struct tiledattn_tensor {
  void* data;
  int32_t dtype; /* tiledattn_dtype */
  int32_t rank;  /* 1 .. TILEDATTN_MAX_RANK */
  tiledattn_device device;
  int64_t shape[TILEDATTN_MAX_RANK];
  int64_t strides[TILEDATTN_MAX_RANK];
} tiledattn_tensor;

/* A tensor with C-order strides over `data`. `shape` has `rank` numbers. */
TILEDATTN_API tiledattn_tensor tiledattn_make_tensor(void* data, int32_t dtype,
                                                     tiledattn_device device, int32_t rank,
                                                     const int64_t* shape);
/* The best device present: the first GPU that this build can use, else the CPU. */
TILEDATTN_API tiledattn_device tiledattn_default_device(void);

/* ---- Options ---- */

/* How scores are made: scale, softcap (cap * tanh(s / cap)), mask, sink, in this order. */
typedef struct tiledattn_options {
  const double* softmax_scale; /* NULL: 1 / sqrt(head_dim) */
  double softcap;              /* 0 switches it off */
  const int64_t*
      window_left; /* a query at p sees keys p - left .. p + right; NULL: no bound on that side */
  const int64_t* window_right;
  const tiledattn_tensor*
      sinks; /* [num_q_heads] float32: one more logit for each query head, without a value */
} tiledattn_options;

/* The scale of a quantised K or V pool (float8_e4m3fn or int8); both NULL: not given, which means 1
 * for float8_e4m3fn. A stored element counts as itself times its scale. */
typedef struct tiledattn_scale {
  const double* number; /* > 0 */
  /* float32 [num_kv_heads], [num_blocks, num_kv_heads] or [num_blocks, block_size, num_kv_heads],
   * any strides. */
  const tiledattn_tensor* array;
} tiledattn_scale;

/* A yes or no whose default differs from call to call. */
typedef enum tiledattn_choice {
  TILEDATTN_DEFAULT = 0,
  TILEDATTN_YES = 1,
  TILEDATTN_NO = 2
} tiledattn_choice;

/* ---- Tiled decode attention ---- */

typedef struct tiledattn_dims {
  int64_t max_seqs;
  int64_t num_q_heads;
  int64_t num_kv_heads;
  int64_t head_dim;
  int64_t block_size;    /* tokens in a KV block */
  int64_t tile_capacity; /* blocks in a tile */
  int64_t max_q_len;     /* query tokens of each sequence; 0 means 1 */
  int64_t head_dim_v;    /* 0 means head_dim */
} tiledattn_dims;

/* What follows from dims. */
typedef struct tiledattn_sizes {
  int64_t gqa_ratio;
  int64_t m_bytes;
  int64_t l_bytes;
  int64_t o_bytes;
  int64_t output_bytes; /* of a 16-bit output */
  int64_t state_bytes;  /* m, l and o */
} tiledattn_sizes;

/* Strides of a KV pool, in elements. */
typedef struct tiledattn_pool_strides {
  int64_t block;
  int64_t token;
  int64_t kv_head;
} tiledattn_pool_strides;

/* Check dims and give their sizes. */
TILEDATTN_API tiledattn_status tiledattn_get_sizes(const tiledattn_dims* dims,
                                                   tiledattn_sizes* sizes);
/* Strides of a paged pool [num_blocks, block_size, num_kv_heads, head_dim]. */
TILEDATTN_API tiledattn_status tiledattn_paged_strides(const tiledattn_dims* dims,
                                                       tiledattn_pool_strides* strides);
/* Strides of K (or V) in a scratch pool [slot, K|V, num_kv_heads, block_size, head_dim]. */
TILEDATTN_API tiledattn_status tiledattn_scratch_pool_strides(const tiledattn_dims* dims,
                                                              tiledattn_pool_strides* strides);

/* Attention over a KV cache visited tile by tile; the running softmax state stays in the handle's
 * buffers. */
typedef struct tiledattn_attention tiledattn_attention;

/* The KV blocks of one tile. B is the step's num_seqs. */
typedef struct tiledattn_tile_args {
  const tiledattn_tensor* q; /* [B, num_q_heads, head_dim] or [B, q_len, num_q_heads, head_dim] */
  const tiledattn_tensor* k_pool; /* [num_blocks, block_size, num_kv_heads, head_dim] */
  const tiledattn_tensor* v_pool; /* [num_blocks, block_size, num_kv_heads, head_dim_v] */
  /* [B, T'] int32 or int64: block ids, in the order of the sequence. */
  const tiledattn_tensor* tile_blocks;
  /* [B]: how many entries of a row are used. */
  const tiledattn_tensor* tile_block_counts;
  /* Slots of the last used block that count: [B], or one number for every sequence. Both NULL: all
   * slots. */
  const tiledattn_tensor* last_block_valid_slots;
  const int64_t* last_block_valid_slots_all;
  /* [B]: positions of the tile's first slot and of the first query token. Both or none. */
  const tiledattn_tensor* kv_positions;
  const tiledattn_tensor* q_positions;
  /* Given: this is the last tile, and finalize happens in the same call. */
  const tiledattn_tensor* out;
  const tiledattn_tensor* lse; /* with out */
  int32_t check;               /* not 0: wait and report what the device found */
  tiledattn_scale k_scale;     /* of quantised pools */
  tiledattn_scale v_scale;
  int32_t early_start; /* as in tiledattn_paged_args */
} tiledattn_tile_args;

/* `device` NULL: the default device. `options` NULL: the defaults. Sinks are copied. */
TILEDATTN_API tiledattn_status tiledattn_create(const tiledattn_dims* dims,
                                                const tiledattn_device* device,
                                                const tiledattn_options* options,
                                                tiledattn_attention** attention);
/* NULL is allowed. */
TILEDATTN_API void tiledattn_destroy(tiledattn_attention* attention);

/* Start a step over `num_seqs` sequences (0 .. max_seqs) with an empty state. */
TILEDATTN_API tiledattn_status tiledattn_begin_step(tiledattn_attention* attention,
                                                    int64_t num_seqs, void* stream);
/* Fold one tile of KV blocks into the state. */
TILEDATTN_API tiledattn_status tiledattn_step_tile(tiledattn_attention* attention,
                                                   const tiledattn_tile_args* tile, void* stream);
/* Write o / l to `out` and, unless NULL, m + ln l to `lse`. The state is unchanged: more tiles may
 * follow. */
TILEDATTN_API tiledattn_status tiledattn_finalize(tiledattn_attention* attention,
                                                  const tiledattn_tensor* out,
                                                  const tiledattn_tensor* lse, void* stream);
/* Wait for the last call and report what the device found in its block ids, counts, slots and
 * positions. */
TILEDATTN_API tiledattn_status tiledattn_check(tiledattn_attention* attention);

/* The handle's own buffers as tensors, ordered after its last call; any of the three may be NULL.
 * m, l: [max_seqs, num_q_heads] float32 (max_q_len > 1: [max_seqs, max_q_len, num_q_heads]); o:
 * [..., head_dim_v]. */
TILEDATTN_API tiledattn_status tiledattn_view_state(tiledattn_attention* attention,
                                                    tiledattn_tensor* m, tiledattn_tensor* l,
                                                    tiledattn_tensor* o);

/* ---- States that can be kept, moved and merged ---- */

/* A copy of the running state of some sequences. */
typedef struct tiledattn_state tiledattn_state;

typedef struct tiledattn_state_shape {
  int64_t num_seqs;
  int64_t q_len; /* 0 means 1 */
  int64_t num_q_heads;
  int64_t head_dim_v;
} tiledattn_state_shape;

/* An empty state: (-inf, 0, 0) everywhere. `device` NULL: the default device. */
TILEDATTN_API tiledattn_status tiledattn_state_create(const tiledattn_state_shape* shape,
                                                      const tiledattn_device* device, void* stream,
                                                      tiledattn_state** state);
/* NULL is allowed. */
TILEDATTN_API void tiledattn_state_destroy(tiledattn_state* state);
/* A copy of the state of the step's sequences. */
TILEDATTN_API tiledattn_status tiledattn_save_state(tiledattn_attention* attention, void* stream,
                                                    tiledattn_state** state);
/* Start a step from a saved state. */
TILEDATTN_API tiledattn_status tiledattn_load_state(tiledattn_attention* attention,
                                                    const tiledattn_state* state, void* stream);
/* A copy on another device. Waits where either side is host memory. */
TILEDATTN_API tiledattn_status tiledattn_state_to(const tiledattn_state* state,
                                                  tiledattn_device device, tiledattn_state** copy);
/* Combine states over disjoint keys, in the order given. */
TILEDATTN_API tiledattn_status tiledattn_merge_states(const tiledattn_state* const* states,
                                                      size_t num_states, void* stream,
                                                      tiledattn_state** merged);
/* The state's memory; any of the three may be NULL. m, l: [num_seqs, num_q_heads] float32 (q_len >
 * 1: [num_seqs, q_len, num_q_heads]); o: [..., head_dim_v]. */
TILEDATTN_API tiledattn_status tiledattn_state_view(const tiledattn_state* state,
                                                    tiledattn_tensor* m, tiledattn_tensor* l,
                                                    tiledattn_tensor* o);
/* Write o / l to `out` (shaped like o) and m + ln l to `lse` (like m). `lse` and `sinks` may be
 * NULL. */
TILEDATTN_API tiledattn_status tiledattn_state_finalize(const tiledattn_state* state,
                                                        const tiledattn_tensor* out,
                                                        const tiledattn_tensor* lse,
                                                        const tiledattn_tensor* sinks,
                                                        void* stream);

/* ---- Attention in one call ---- */

/* Memory for partial results. Calls that share one run one after the other. */
typedef struct tiledattn_workspace tiledattn_workspace;

/* `bytes` 0: 32 MiB. */
TILEDATTN_API tiledattn_status tiledattn_workspace_create(tiledattn_device device, int64_t bytes,
                                                          tiledattn_workspace** workspace);
/* NULL is allowed. */
TILEDATTN_API void tiledattn_workspace_destroy(tiledattn_workspace* workspace);

/* Order of the dimensions of q, k, v and out: [B, S, H, D] or [B, H, S, D]. */
typedef enum tiledattn_layout { TILEDATTN_BSHD = 0, TILEDATTN_BHSD = 1 } tiledattn_layout;

typedef struct tiledattn_flash_args {
  const tiledattn_tensor* q;   /* [B, Sq, Hq, D]; bhsd: [B, Hq, Sq, D]; packed: [total_q, Hq, D] */
  const tiledattn_tensor* k;   /* [B, Sk, Hk, D]; bhsd: [B, Hk, Sk, D]; packed: [total_k, Hk, D] */
  const tiledattn_tensor* v;   /* like k with head_dim_v */
  const tiledattn_tensor* out; /* like q with head_dim_v; the type of q or float32 */
  const tiledattn_tensor* lse; /* out.shape[:-1] float32 */
  int32_t layout;              /* tiledattn_layout */
  int32_t causal; /* tiledattn_choice, default no. Query i sees key j iff j <= i + Sk - Sq */
  const tiledattn_tensor* cu_seqlens_q; /* [B + 1] int32 or int64: packed; both or none */
  const tiledattn_tensor* cu_seqlens_k;
  const int64_t* max_seqlen_q; /* hints */
  const int64_t* max_seqlen_k;
  tiledattn_options options;
  int32_t check;                  /* not 0: wait and report what the device found */
  tiledattn_workspace* workspace; /* NULL: the device's own */
} tiledattn_flash_args;

typedef struct tiledattn_paged_args {
  const tiledattn_tensor* q; /* [B, Hq, D], [B, Sq, Hq, D], or [total_q, Hq, D] with cu_seqlens_q */
  const tiledattn_tensor* k_pool;      /* [num_blocks, block_size, Hk, D] */
  const tiledattn_tensor* v_pool;      /* [num_blocks, block_size, Hk, head_dim_v] */
  const tiledattn_tensor* block_table; /* [B, max_blocks] int32 or int64 */
  /* [B] int32 or int64; the last query token is at position seq_lens - 1. */
  const tiledattn_tensor* seq_lens;
  const tiledattn_tensor* out;          /* like q with head_dim_v; the type of q or float32 */
  const tiledattn_tensor* lse;          /* out.shape[:-1] float32 */
  int32_t causal;                       /* tiledattn_choice, default yes: among the query tokens */
  const tiledattn_tensor* cu_seqlens_q; /* [B + 1] */
  const int64_t* max_seqlen_q;          /* hint */
  tiledattn_options options;
  int32_t check;                  /* not 0: wait and report what the device found */
  tiledattn_workspace* workspace; /* NULL: the device's own */
  tiledattn_scale k_scale;        /* of quantised pools */
  tiledattn_scale v_scale;
  /* Not 0: the caller's word that all but q and the last q_len keys of each sequence was written
   * before the kernel that runs before this call in its stream began. Decode on Hopper then reads
   * the first keys while that kernel ends; elsewhere it changes nothing. */
  int32_t early_start;
} tiledattn_paged_args;

typedef struct tiledattn_merge_args {
  const tiledattn_tensor* out_a; /* [..., head_dim_v] */
  const tiledattn_tensor* lse_a; /* [...] float32; -inf where a side saw no key */
  const tiledattn_tensor* out_b;
  const tiledattn_tensor* lse_b;
  const tiledattn_tensor* out;
  const tiledattn_tensor* lse;
  double lse_base; /* of the logarithm of all three lse; 0 means e */
} tiledattn_merge_args;

typedef struct tiledattn_write_kv_args {
  const tiledattn_tensor* k;      /* [tokens, Hk, D] */
  const tiledattn_tensor* v;      /* [tokens, Hk, head_dim_v] */
  const tiledattn_tensor* k_pool; /* [num_blocks, block_size, Hk, D] */
  const tiledattn_tensor* v_pool; /* [num_blocks, block_size, Hk, head_dim_v] */
  /* [tokens] int32 or int64: block * block_size + offset; negative: skip. */
  const tiledattn_tensor* slot_mapping;
  int32_t check;           /* not 0: wait and report what the device found */
  tiledattn_scale k_scale; /* of quantised pools */
  tiledattn_scale v_scale;
} tiledattn_write_kv_args;

TILEDATTN_API tiledattn_status tiledattn_flash_attention(const tiledattn_flash_args* args,
                                                         void* stream);
TILEDATTN_API tiledattn_status tiledattn_paged_attention(const tiledattn_paged_args* args,
                                                         void* stream);
/* Combine two results over disjoint keys, made without sinks. */
TILEDATTN_API tiledattn_status tiledattn_merge_attention(const tiledattn_merge_args* args,
                                                         void* stream);
/* Write tokens into the slots of a paged cache. Quantised pools hold value / scale, rounded to
 * nearest even and saturated; NaN stays NaN in float8 and becomes 0 in int8. */
TILEDATTN_API tiledattn_status tiledattn_write_kv(const tiledattn_write_kv_args* args,
                                                  void* stream);
/* Wait for the device and report what it found in the arguments of the calls of this section. */
TILEDATTN_API tiledattn_status tiledattn_check_device(tiledattn_device device);

/* ---- The build and the machine ---- */

typedef enum tiledattn_operation {
  TILEDATTN_FLASH_ATTENTION = 0,
  TILEDATTN_PAGED_ATTENTION = 1,
  TILEDATTN_TILED_ATTENTION = 2,
} tiledattn_operation;

/* One kind of call with its sizes. */
typedef struct tiledattn_support_query {
  int32_t operation; /* tiledattn_operation */
  tiledattn_device device;
  int32_t dtype;        /* of q: tiledattn_dtype; 0 means bfloat16 */
  int64_t num_q_heads;  /* 0 means 1 */
  int64_t num_kv_heads; /* 0 means 1 */
  int64_t head_dim;     /* 0 means 128 */
  int64_t head_dim_v;   /* 0 means head_dim */
  int64_t block_size;   /* 0 means 16 */
  int32_t kv_dtype;     /* of K and V: tiledattn_dtype; 0 means that of q */
  int64_t q_len;        /* query tokens of a sequence; 0: one, or many for flash_attention */
} tiledattn_support_query;

typedef struct tiledattn_support {
  int32_t supported;
  char kernel[64];  /* the kernel that would run */
  char reason[256]; /* why not */
} tiledattn_support;

/* Can this device run this, by which kernel, and if not why. */
TILEDATTN_API tiledattn_status tiledattn_supports(const tiledattn_support_query* query,
                                                  tiledattn_support* support);

TILEDATTN_API const char* tiledattn_version(void);
/* The instruction set of the CPU backend; "" and tiledattn_last_error() when the forced one is not
 * there. */
TILEDATTN_API const char* tiledattn_cpu_isa(void);
/* GPUs that this build can use; 0 without one, and then tiledattn_why_no_cuda() says why. */
TILEDATTN_API int32_t tiledattn_cuda_device_count(void);
TILEDATTN_API const char* tiledattn_why_no_cuda(void);
/* Threads of the CPU backend, the caller's included: 1 to 1024. */
TILEDATTN_API tiledattn_status tiledattn_set_num_threads(int32_t num_threads);
TILEDATTN_API int32_t tiledattn_get_num_threads(void);

#ifdef __cplusplus
}
#endif

#endif /* TILEDATTN_C_API_H */
