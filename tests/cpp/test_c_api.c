/* SPDX-License-Identifier: Apache-2.0
 * The C interface from C: results against plain loops, errors as codes and messages. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "c_check.h"

enum {
  kSeqs = 2,
  kQHeads = 4,
  kKvHeads = 2,
  kDim = 8,
  kDimV = 6,
  kBlockSize = 4,
  kBlocks = 8,
  kTableWidth = 3,
  kOutSize = kSeqs * kQHeads * kDimV
};

static float q[kSeqs * kQHeads * kDim];
static float k_pool[kBlocks * kBlockSize * kKvHeads * kDim];
static float v_pool[kBlocks * kBlockSize * kKvHeads * kDimV];
static int32_t table[kSeqs][kTableWidth] = {{5, 0, 3}, {6, 2, -1}};
static int64_t lengths[kSeqs] = {10, 7};
static const tiledattn_device kCpu = {TILEDATTN_CPU, 0};

static tiledattn_tensor tensor(void* data, int32_t dtype, int rank, int64_t a, int64_t b, int64_t c,
                               int64_t d) {
  int64_t shape[4];
  shape[0] = a;
  shape[1] = b;
  shape[2] = c;
  shape[3] = d;
  return tiledattn_make_tensor(data, dtype, kCpu, rank, shape);
}

/* out [kSeqs, kQHeads, kDimV], lse [kSeqs, kQHeads]. */
static void reference(double scale, double* out, double* lse) {
  int b, h, j, d;
  for (b = 0; b < kSeqs; ++b) {
    for (h = 0; h < kQHeads; ++h) {
      double sum = 0;
      double* row = out + (b * kQHeads + h) * kDimV;
      for (d = 0; d < kDimV; ++d) row[d] = 0;
      for (j = 0; j < lengths[b]; ++j) {
        const int slot = table[b][j / kBlockSize] * kBlockSize + j % kBlockSize;
        const int head = slot * kKvHeads + h / (kQHeads / kKvHeads);
        double score = 0, weight;
        for (d = 0; d < kDim; ++d) {
          score += (double)q[(b * kQHeads + h) * kDim + d] * k_pool[head * kDim + d];
        }
        weight = exp(score * scale);
        sum += weight;
        for (d = 0; d < kDimV; ++d) row[d] += weight * v_pool[head * kDimV + d];
      }
      for (d = 0; d < kDimV; ++d) row[d] /= sum;
      lse[b * kQHeads + h] = log(sum);
    }
  }
}

static void check_close(const float* got, const double* want, int count, double bound, int line) {
  int i;
  for (i = 0; i < count; ++i) {
    record(fabs(got[i] - want[i]) <= bound, "a value is off", __FILE__, line);
  }
}

static tiledattn_dims make_dims(void) {
  tiledattn_dims dims = {0};
  dims.max_seqs = kSeqs;
  dims.num_q_heads = kQHeads;
  dims.num_kv_heads = kKvHeads;
  dims.head_dim = kDim;
  dims.head_dim_v = kDimV;
  dims.block_size = kBlockSize;
  dims.tile_capacity = 2;
  return dims;
}

static void test_dims(void) {
  tiledattn_dims dims = make_dims();
  tiledattn_sizes sizes;
  tiledattn_pool_strides strides;
  CHECK_OK(tiledattn_get_sizes(&dims, &sizes));
  CHECK(sizes.gqa_ratio == 2);
  CHECK(sizes.m_bytes == kSeqs * kQHeads * 4);
  CHECK(sizes.o_bytes == kOutSize * 4);
  CHECK(sizes.output_bytes == kOutSize * 2);
  CHECK(sizes.state_bytes == sizes.m_bytes + sizes.l_bytes + sizes.o_bytes);
  CHECK_OK(tiledattn_paged_strides(&dims, &strides));
  CHECK(strides.block == kBlockSize * kKvHeads * kDim && strides.token == kKvHeads * kDim);
  CHECK_OK(tiledattn_scratch_pool_strides(&dims, &strides));
  CHECK(strides.kv_head == kBlockSize * kDim && strides.token == kDim);
  dims.num_q_heads = 5;
  CHECK_ERROR(tiledattn_get_sizes(&dims, &sizes), TILEDATTN_VALUE_ERROR, "num_q_heads", "5");
  CHECK_ERROR(tiledattn_get_sizes(NULL, &sizes), TILEDATTN_VALUE_ERROR, "dims", "NULL");
}

/* Blocks first .. first + 1 of each sequence, out of the tables above. */
typedef struct TileArrays {
  int32_t blocks[kSeqs][2];
  int64_t counts[kSeqs];
  int32_t slots[kSeqs];
} TileArrays;

static TileArrays tile_at(int first) {
  TileArrays tile;
  int b, i;
  for (b = 0; b < kSeqs; ++b) {
    const int num_blocks = (int)((lengths[b] + kBlockSize - 1) / kBlockSize);
    int count = num_blocks - first;
    if (count < 0) count = 0;
    if (count > 2) count = 2;
    for (i = 0; i < 2; ++i) tile.blocks[b][i] = i < count ? table[b][first + i] : -1;
    tile.counts[b] = count;
    tile.slots[b] = kBlockSize;
    if (first + count == num_blocks) {
      tile.slots[b] = (int32_t)(lengths[b] - (num_blocks - 1) * kBlockSize);
    }
  }
  return tile;
}

static tiledattn_status step(tiledattn_attention* attention, TileArrays* arrays,
                             const tiledattn_tensor* out) {
  const tiledattn_tensor q_tensor = tensor(q, TILEDATTN_FLOAT32, 3, kSeqs, kQHeads, kDim, 0);
  const tiledattn_tensor k =
      tensor(k_pool, TILEDATTN_FLOAT32, 4, kBlocks, kBlockSize, kKvHeads, kDim);
  const tiledattn_tensor v =
      tensor(v_pool, TILEDATTN_FLOAT32, 4, kBlocks, kBlockSize, kKvHeads, kDimV);
  const tiledattn_tensor blocks = tensor(arrays->blocks, TILEDATTN_INT32, 2, kSeqs, 2, 0, 0);
  const tiledattn_tensor counts = tensor(arrays->counts, TILEDATTN_INT64, 1, kSeqs, 0, 0, 0);
  const tiledattn_tensor slots = tensor(arrays->slots, TILEDATTN_INT32, 1, kSeqs, 0, 0, 0);
  tiledattn_tile_args args = {0};
  args.q = &q_tensor;
  args.k_pool = &k;
  args.v_pool = &v;
  args.tile_blocks = &blocks;
  args.tile_block_counts = &counts;
  args.last_block_valid_slots = &slots;
  args.out = out;
  args.early_start = 1; /* nothing changes on the CPU */
  return tiledattn_step_tile(attention, &args, NULL);
}

static void test_tiles(const double* want_out, const double* want_lse) {
  const tiledattn_dims dims = make_dims();
  float out[kOutSize], lse[kSeqs * kQHeads], again[kOutSize];
  const tiledattn_tensor out_tensor = tensor(out, TILEDATTN_FLOAT32, 3, kSeqs, kQHeads, kDimV, 0);
  const tiledattn_tensor again_tensor =
      tensor(again, TILEDATTN_FLOAT32, 3, kSeqs, kQHeads, kDimV, 0);
  const tiledattn_tensor lse_tensor = tensor(lse, TILEDATTN_FLOAT32, 2, kSeqs, kQHeads, 0, 0);
  tiledattn_attention* attention = NULL;
  tiledattn_state *first = NULL, *second = NULL, *merged = NULL, *moved = NULL;
  const tiledattn_state* parts[2];
  tiledattn_tensor m, l, o;
  TileArrays a = tile_at(0), b = tile_at(2), bad = tile_at(0);

  CHECK_OK(tiledattn_create(&dims, &kCpu, NULL, &attention));
  CHECK_OK(tiledattn_begin_step(attention, kSeqs, NULL));
  CHECK_OK(step(attention, &a, NULL));
  bad.blocks[1][0] = kBlocks;
  CHECK_ERROR(step(attention, &bad, NULL), TILEDATTN_INDEX_ERROR, "tile_blocks", "sequence 1");
  CHECK_OK(tiledattn_save_state(attention, NULL, &first));
  CHECK_OK(step(attention, &b, &again_tensor));
  CHECK_OK(tiledattn_finalize(attention, &out_tensor, &lse_tensor, NULL));
  check_close(out, want_out, kOutSize, 1e-5, __LINE__);
  check_close(again, want_out, kOutSize, 1e-5, __LINE__);
  check_close(lse, want_lse, kSeqs * kQHeads, 1e-4, __LINE__);
  CHECK_OK(tiledattn_check(attention));

  CHECK_OK(tiledattn_view_state(attention, &m, &l, &o));
  CHECK(m.rank == 2 && m.shape[0] == kSeqs && m.shape[1] == kQHeads);
  CHECK(o.rank == 3 && o.shape[2] == kDimV && o.dtype == TILEDATTN_FLOAT32);
  CHECK(fabs(((float*)m.data)[3] + log(((float*)l.data)[3]) - want_lse[3]) < 1e-4);

  /* The second tile alone, merged with the state after the first. */
  CHECK_OK(tiledattn_begin_step(attention, kSeqs, NULL));
  CHECK_OK(step(attention, &b, NULL));
  CHECK_OK(tiledattn_save_state(attention, NULL, &second));
  parts[0] = first;
  parts[1] = second;
  CHECK_OK(tiledattn_merge_states(parts, 2, NULL, &merged));
  CHECK_OK(tiledattn_state_to(merged, kCpu, &moved));
  memset(out, 0, sizeof out);
  CHECK_OK(tiledattn_state_finalize(moved, &out_tensor, &lse_tensor, NULL, NULL));
  check_close(out, want_out, kOutSize, 1e-5, __LINE__);
  check_close(lse, want_lse, kSeqs * kQHeads, 1e-4, __LINE__);

  /* A state put back goes on where it was. */
  CHECK_OK(tiledattn_load_state(attention, first, NULL));
  CHECK_OK(step(attention, &b, NULL));
  CHECK_OK(tiledattn_finalize(attention, &again_tensor, NULL, NULL));
  check_close(again, want_out, kOutSize, 1e-5, __LINE__);
  CHECK_OK(tiledattn_state_view(first, &m, NULL, NULL));
  CHECK(m.shape[0] == kSeqs);

  parts[1] = NULL;
  tiledattn_state_destroy(merged);
  CHECK_ERROR(tiledattn_merge_states(parts, 2, NULL, &merged), TILEDATTN_VALUE_ERROR, "states[1]",
              "NULL");
  CHECK_ERROR(tiledattn_begin_step(attention, kSeqs + 1, NULL), TILEDATTN_VALUE_ERROR, "num_seqs",
              "3");
  CHECK_ERROR(tiledattn_begin_step(NULL, 1, NULL), TILEDATTN_VALUE_ERROR, "attention", "NULL");
  CHECK_ERROR(tiledattn_finalize(attention, NULL, NULL, NULL), TILEDATTN_VALUE_ERROR, "out",
              "NULL");
  tiledattn_state_destroy(first);
  tiledattn_state_destroy(second);
  tiledattn_state_destroy(moved);
  tiledattn_state_destroy(NULL);
  tiledattn_destroy(attention);
  tiledattn_destroy(NULL);
}

static void test_empty_state(void) {
  const tiledattn_state_shape shape = {2, 0, 3, 4};
  tiledattn_state* state = NULL;
  tiledattn_tensor m, o;
  CHECK_OK(tiledattn_state_create(&shape, &kCpu, NULL, &state));
  CHECK_OK(tiledattn_state_view(state, &m, NULL, &o));
  CHECK(m.rank == 2 && m.shape[1] == 3 && isinf(((float*)m.data)[5]) && ((float*)m.data)[5] < 0);
  CHECK(o.rank == 3 && ((float*)o.data)[23] == 0);
  tiledattn_state_destroy(state);
}

static void test_paged(void) {
  static double want_out[kOutSize], want_lse[kSeqs * kQHeads];
  const double scale = 0.7;
  float out[kOutSize], lse[kSeqs * kQHeads];
  const tiledattn_tensor q_tensor = tensor(q, TILEDATTN_FLOAT32, 3, kSeqs, kQHeads, kDim, 0);
  const tiledattn_tensor k =
      tensor(k_pool, TILEDATTN_FLOAT32, 4, kBlocks, kBlockSize, kKvHeads, kDim);
  const tiledattn_tensor v =
      tensor(v_pool, TILEDATTN_FLOAT32, 4, kBlocks, kBlockSize, kKvHeads, kDimV);
  const tiledattn_tensor table_tensor = tensor(table, TILEDATTN_INT32, 2, kSeqs, kTableWidth, 0, 0);
  const tiledattn_tensor lengths_tensor = tensor(lengths, TILEDATTN_INT64, 1, kSeqs, 0, 0, 0);
  const tiledattn_tensor out_tensor = tensor(out, TILEDATTN_FLOAT32, 3, kSeqs, kQHeads, kDimV, 0);
  const tiledattn_tensor lse_tensor = tensor(lse, TILEDATTN_FLOAT32, 2, kSeqs, kQHeads, 0, 0);
  tiledattn_workspace* workspace = NULL;
  tiledattn_paged_args args = {0};
  tiledattn_tensor wrong;
  const int64_t minus = -1;
  args.q = &q_tensor;
  args.k_pool = &k;
  args.v_pool = &v;
  args.block_table = &table_tensor;
  args.seq_lens = &lengths_tensor;
  args.out = &out_tensor;
  args.lse = &lse_tensor;
  args.options.softmax_scale = &scale;
  CHECK_OK(tiledattn_workspace_create(kCpu, 0, &workspace));
  args.workspace = workspace;
  CHECK_OK(tiledattn_paged_attention(&args, NULL));
  reference(scale, want_out, want_lse);
  check_close(out, want_out, kOutSize, 1e-5, __LINE__);
  check_close(lse, want_lse, kSeqs * kQHeads, 1e-4, __LINE__);
  tiledattn_workspace_destroy(workspace);
  args.workspace = NULL;
  args.causal = TILEDATTN_NO;
  args.early_start = 1; /* nothing changes on the CPU */
  CHECK_OK(tiledattn_paged_attention(&args, NULL));
  check_close(out, want_out, kOutSize, 1e-5, __LINE__);

  /* The two sequences as one query of two tokens: by default token 0 does not see the last key. */
  {
    const tiledattn_tensor two = tensor(q, TILEDATTN_FLOAT32, 4, 1, 2, kQHeads, kDim);
    const tiledattn_tensor two_out = tensor(out, TILEDATTN_FLOAT32, 4, 1, 2, kQHeads, kDimV);
    const tiledattn_tensor one_row = tensor(table, TILEDATTN_INT32, 2, 1, kTableWidth, 0, 0);
    const tiledattn_tensor one_length = tensor(lengths, TILEDATTN_INT64, 1, 1, 0, 0, 0);
    const size_t half = sizeof out / 2;
    float by_default[kOutSize];
    tiledattn_paged_args tokens = {0};
    tokens.q = &two;
    tokens.k_pool = &k;
    tokens.v_pool = &v;
    tokens.block_table = &one_row;
    tokens.seq_lens = &one_length;
    tokens.out = &two_out;
    CHECK_OK(tiledattn_paged_attention(&tokens, NULL));
    memcpy(by_default, out, sizeof out);
    tokens.causal = TILEDATTN_YES;
    CHECK_OK(tiledattn_paged_attention(&tokens, NULL));
    CHECK(memcmp(by_default, out, sizeof out) == 0);
    tokens.causal = TILEDATTN_NO;
    CHECK_OK(tiledattn_paged_attention(&tokens, NULL));
    CHECK(memcmp(by_default, out, half) != 0);
    CHECK(memcmp((char*)by_default + half, (char*)out + half, half) == 0);
  }

  args.causal = 7;
  CHECK_ERROR(tiledattn_paged_attention(&args, NULL), TILEDATTN_VALUE_ERROR, "causal", "7");
  args.causal = TILEDATTN_YES;
  args.options.window_left = &minus;
  CHECK_ERROR(tiledattn_paged_attention(&args, NULL), TILEDATTN_VALUE_ERROR, "window", "-1");
  args.options.window_left = NULL;
  args.k_pool = NULL;
  CHECK_ERROR(tiledattn_paged_attention(&args, NULL), TILEDATTN_VALUE_ERROR, "k_pool", "NULL");
  wrong = k;
  args.k_pool = &wrong;
  wrong.data = NULL;
  CHECK_ERROR(tiledattn_paged_attention(&args, NULL), TILEDATTN_VALUE_ERROR, "k_pool", "NULL");
  wrong = k;
  wrong.rank = 9;
  CHECK_ERROR(tiledattn_paged_attention(&args, NULL), TILEDATTN_VALUE_ERROR, "k_pool", "9");
  wrong = k;
  wrong.shape[0] = -2;
  CHECK_ERROR(tiledattn_paged_attention(&args, NULL), TILEDATTN_VALUE_ERROR, "k_pool", "-2");
  wrong = k;
  wrong.dtype = 70000;
  CHECK_ERROR(tiledattn_paged_attention(&args, NULL), TILEDATTN_TYPE_ERROR, "k_pool", "70000");
  wrong.dtype = TILEDATTN_FLOAT16;
  CHECK_ERROR(tiledattn_paged_attention(&args, NULL), TILEDATTN_TYPE_ERROR, "k_pool", "float16");
  wrong = k;
  wrong.device.kind = 5;
  CHECK_ERROR(tiledattn_paged_attention(&args, NULL), TILEDATTN_VALUE_ERROR, "k_pool", "5");
  args.k_pool = &k;
  CHECK_OK(tiledattn_paged_attention(&args, NULL));
  CHECK_OK(tiledattn_check_device(kCpu));
}

/* Two keys of score 0 in each of two parts: the mean of V and lse = ln 2, merged ln 4. */
static void test_flash_and_merge(void) {
  float query[4] = {0}, keys[8] = {0}, values[4] = {1, 2, 3, 6};
  float out_a[2], out_b[2], lse_a, lse_b, out[2], lse;
  const tiledattn_tensor q_tensor = tensor(query, TILEDATTN_FLOAT32, 4, 1, 1, 1, 4);
  const tiledattn_tensor k = tensor(keys, TILEDATTN_FLOAT32, 4, 1, 2, 1, 4);
  tiledattn_tensor v = tensor(values, TILEDATTN_FLOAT32, 4, 1, 2, 1, 2);
  const tiledattn_tensor a = tensor(out_a, TILEDATTN_FLOAT32, 4, 1, 1, 1, 2);
  const tiledattn_tensor b = tensor(out_b, TILEDATTN_FLOAT32, 4, 1, 1, 1, 2);
  const tiledattn_tensor both = tensor(out, TILEDATTN_FLOAT32, 4, 1, 1, 1, 2);
  const tiledattn_tensor a_lse = tensor(&lse_a, TILEDATTN_FLOAT32, 3, 1, 1, 1, 0);
  const tiledattn_tensor b_lse = tensor(&lse_b, TILEDATTN_FLOAT32, 3, 1, 1, 1, 0);
  const tiledattn_tensor both_lse = tensor(&lse, TILEDATTN_FLOAT32, 3, 1, 1, 1, 0);
  tiledattn_flash_args args = {0};
  tiledattn_merge_args merge = {0};
  args.q = &q_tensor;
  args.k = &k;
  args.v = &v;
  args.out = &a;
  args.lse = &a_lse;
  args.causal = TILEDATTN_YES; /* one query at the last key: it sees both */
  CHECK_OK(tiledattn_flash_attention(&args, NULL));
  CHECK(fabs(out_a[0] - 2) < 1e-6 && fabs(out_a[1] - 4) < 1e-6);
  CHECK(fabs(lse_a - log(2.0)) < 1e-6);
  values[0] = 10;
  args.out = &b;
  args.lse = &b_lse;
  CHECK_OK(tiledattn_flash_attention(&args, NULL));
  merge.out_a = &a;
  merge.lse_a = &a_lse;
  merge.out_b = &b;
  merge.lse_b = &b_lse;
  merge.out = &both;
  merge.lse = &both_lse;
  CHECK_OK(tiledattn_merge_attention(&merge, NULL));
  CHECK(fabs(out[0] - 4.25) < 1e-6 && fabs(lse - log(4.0)) < 1e-6);
  merge.lse_base = -1;
  CHECK_ERROR(tiledattn_merge_attention(&merge, NULL), TILEDATTN_VALUE_ERROR, "lse_base", "-1");
  args.layout = 3;
  CHECK_ERROR(tiledattn_flash_attention(&args, NULL), TILEDATTN_VALUE_ERROR, "layout", "3");
  args.layout = TILEDATTN_BHSD;
  CHECK_ERROR(tiledattn_flash_attention(&args, NULL), TILEDATTN_VALUE_ERROR, "heads", "2");
}

static void test_write_kv(void) {
  float k[2 * kKvHeads * kDim], v[2 * kKvHeads * kDimV];
  float k_slots[8 * kKvHeads * kDim] = {0}, v_slots[8 * kKvHeads * kDimV] = {0};
  int32_t slots[2] = {6, -1};
  const tiledattn_tensor k_tensor = tensor(k, TILEDATTN_FLOAT32, 3, 2, kKvHeads, kDim, 0);
  const tiledattn_tensor v_tensor = tensor(v, TILEDATTN_FLOAT32, 3, 2, kKvHeads, kDimV, 0);
  const tiledattn_tensor k_to = tensor(k_slots, TILEDATTN_FLOAT32, 4, 2, 4, kKvHeads, kDim);
  const tiledattn_tensor v_to = tensor(v_slots, TILEDATTN_FLOAT32, 4, 2, 4, kKvHeads, kDimV);
  const tiledattn_tensor mapping = tensor(slots, TILEDATTN_INT32, 1, 2, 0, 0, 0);
  tiledattn_write_kv_args args = {0};
  fill(k, sizeof k / sizeof *k, 5);
  fill(v, sizeof v / sizeof *v, 6);
  args.k = &k_tensor;
  args.v = &v_tensor;
  args.k_pool = &k_to;
  args.v_pool = &v_to;
  args.slot_mapping = &mapping;
  CHECK_OK(tiledattn_write_kv(&args, NULL));
  CHECK(memcmp(k_slots + 6 * kKvHeads * kDim, k, sizeof k / 2) == 0);
  CHECK(memcmp(v_slots + 6 * kKvHeads * kDimV, v, sizeof v / 2) == 0);
  CHECK(k_slots[0] == 0 && k_slots[7 * kKvHeads * kDim] == 0);
  slots[1] = 8;
  CHECK_ERROR(tiledattn_write_kv(&args, NULL), TILEDATTN_INDEX_ERROR, "slot_mapping", "8");
}

/* One key, written and read: the output is V as it was stored. */
static void test_quantized(void) {
  enum { kHeads = 2, kWidth = 4 };
  const double tenth = 0.1;
  float scales[kHeads] = {0.5f, 2.0f};
  float k[kHeads * kWidth] = {1, 2, 3, 4, 5, 6, 7, 8};
  float v[kHeads * kWidth] = {1, 1.3f, -3, 100, 1, 1.3f, -3, 300};
  const float want[kHeads * kWidth] = {1, 1.5f, -3, 63.5f, 0, 2, -4, 254};
  int8_t k_slots[kHeads * kWidth] = {0}, v_slots[kHeads * kWidth] = {0};
  float out[kHeads * kWidth];
  int32_t zero = 0, one = 1;
  const tiledattn_tensor k_tensor = tensor(k, TILEDATTN_FLOAT32, 3, 1, kHeads, kWidth, 0);
  const tiledattn_tensor v_tensor = tensor(v, TILEDATTN_FLOAT32, 3, 1, kHeads, kWidth, 0);
  const tiledattn_tensor k_to = tensor(k_slots, TILEDATTN_INT8, 4, 1, 1, kHeads, kWidth);
  const tiledattn_tensor v_to = tensor(v_slots, TILEDATTN_INT8, 4, 1, 1, kHeads, kWidth);
  const tiledattn_tensor by_head = tensor(scales, TILEDATTN_FLOAT32, 1, kHeads, 0, 0, 0);
  const tiledattn_tensor mapping = tensor(&zero, TILEDATTN_INT32, 1, 1, 0, 0, 0);
  const tiledattn_tensor blocks = tensor(&zero, TILEDATTN_INT32, 2, 1, 1, 0, 0);
  const tiledattn_tensor length = tensor(&one, TILEDATTN_INT32, 1, 1, 0, 0, 0);
  const tiledattn_tensor result = tensor(out, TILEDATTN_FLOAT32, 3, 1, kHeads, kWidth, 0);
  tiledattn_write_kv_args write = {0};
  tiledattn_paged_args read = {0};
  tiledattn_support_query query = {0};
  tiledattn_support support;
  int i;
  write.k = &k_tensor;
  write.v = &v_tensor;
  write.k_pool = &k_to;
  write.v_pool = &v_to;
  write.slot_mapping = &mapping;
  write.k_scale.number = &tenth;
  CHECK_ERROR(tiledattn_write_kv(&write, NULL), TILEDATTN_VALUE_ERROR, "v_scale", "int8");
  write.v_scale.array = &by_head;
  CHECK_OK(tiledattn_write_kv(&write, NULL));
  CHECK(k_slots[0] == 10 && k_slots[7] == 80);
  read.q = &k_tensor;
  read.k_pool = &k_to;
  read.v_pool = &v_to;
  read.block_table = &blocks;
  read.seq_lens = &length;
  read.out = &result;
  read.k_scale = write.k_scale;
  read.v_scale = write.v_scale;
  CHECK_OK(tiledattn_paged_attention(&read, NULL));
  for (i = 0; i < kHeads * kWidth; ++i) CHECK(out[i] == want[i]);
  read.v_scale.number = &tenth;
  CHECK_ERROR(tiledattn_paged_attention(&read, NULL), TILEDATTN_VALUE_ERROR, "v_scale", "array");
  query.operation = TILEDATTN_TILED_ATTENTION;
  query.kv_dtype = TILEDATTN_INT8;
  CHECK_OK(tiledattn_supports(&query, &support));
  CHECK(support.supported);
  query.operation = TILEDATTN_FLASH_ATTENTION;
  CHECK_OK(tiledattn_supports(&query, &support));
  CHECK(!support.supported && strstr(support.reason, "kv_dtype") != NULL);
}

static void test_machine(void) {
  tiledattn_support_query query = {0};
  tiledattn_support support;
  const tiledattn_device none = {TILEDATTN_CUDA, 99};
  CHECK(strchr(tiledattn_version(), '.') != NULL);
  CHECK(strlen(tiledattn_cpu_isa()) > 0);
  CHECK((tiledattn_cuda_device_count() > 0) == (strlen(tiledattn_why_no_cuda()) == 0));
  CHECK(tiledattn_default_device().kind ==
        (tiledattn_cuda_device_count() > 0 ? TILEDATTN_CUDA : TILEDATTN_CPU));
  CHECK_OK(tiledattn_supports(&query, &support));
  CHECK(support.supported && strncmp(support.kernel, "cpu_", 4) == 0 && support.reason[0] == 0);
  CHECK(strcmp(support.kernel, "cpu_prefill") == 0);
  query.q_len = 1;
  CHECK_OK(tiledattn_supports(&query, &support));
  CHECK(strcmp(support.kernel, "cpu_decode") == 0);
  query.q_len = -1;
  CHECK_OK(tiledattn_supports(&query, &support));
  CHECK(!support.supported && strstr(support.reason, "q_len") != NULL);
  query.q_len = 0;
  query.head_dim = 300;
  CHECK_OK(tiledattn_supports(&query, &support));
  CHECK(!support.supported && strstr(support.reason, "300") != NULL);
  query.operation = 9;
  CHECK_ERROR(tiledattn_supports(&query, &support), TILEDATTN_VALUE_ERROR, "operation", "9");
  CHECK_ERROR(tiledattn_check_device(none), TILEDATTN_VALUE_ERROR, "device", "cuda:99");
  CHECK_OK(tiledattn_set_num_threads(2));
  CHECK(tiledattn_get_num_threads() == 2);
  CHECK_ERROR(tiledattn_set_num_threads(0), TILEDATTN_VALUE_ERROR, "num_threads", "0");
}

int main(void) {
  static double want_out[kOutSize], want_lse[kSeqs * kQHeads];
  CHECK(tiledattn_last_error()[0] == 0);
  fill(q, sizeof q / sizeof *q, 1);
  fill(k_pool, sizeof k_pool / sizeof *k_pool, 2);
  fill(v_pool, sizeof v_pool / sizeof *v_pool, 3);
  reference(1 / sqrt((double)kDim), want_out, want_lse);
  test_dims();
  test_tiles(want_out, want_lse);
  test_empty_state();
  test_paged();
  test_flash_and_merge();
  test_write_kv();
  test_quantized();
  test_machine();
  printf("%d checks, %d failures\n", num_checks, num_failures);
  return num_failures == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
