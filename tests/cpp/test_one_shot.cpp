// SPDX-License-Identifier: Apache-2.0
// merge_attention, write_kv, supports, build_info.
#include "paged_cache.h"

using namespace tiledattn;
using namespace test;

namespace {

struct Part {
  Array out, lse;
};

/// Attention of q over keys begin .. end - 1 on a device.
Part attend_part(const Host& q, const Host& k, const Host& v, std::int64_t begin, std::int64_t end,
                 DType dtype, Device device) {
  const Host k_rows = rows(k, begin, end), v_rows = rows(v, begin, end);
  const auto batch_of_one = [&](const Host& host) {
    Host four = host;
    four.shape.insert(four.shape.begin(), 1);
    return Array(four, dtype, device);
  };
  const Array q_array = batch_of_one(q), k_array = batch_of_one(k_rows),
              v_array = batch_of_one(v_rows);
  Part part{Array(Host({1, q.shape[0], q.shape[1], v.shape[2]}), dtype, device),
            Array(Host({1, q.shape[0], q.shape[1]}), DType::float32, device)};
  FlashArgs args;
  args.q = q_array;
  args.k = k_array;
  args.v = v_array;
  args.out = part.out;
  args.lse = part.lse.tensor();
  args.check = true;
  flash_attention(args);
  return part;
}

Array like(const Array& array) {
  const Tensor& t = array.tensor();
  return Array(Host(Shape(t.shape, t.shape + t.rank), 1e30f), t.dtype, t.device);
}

}  // namespace

DEVICE_TEST(merged_parts_are_the_whole) {
  for (const DType dtype : {DType::float32, DType::float16, DType::bfloat16}) {
    for (const double base : {std::exp(1.0), 2.0, 10.0}) {
      Random random(6);
      const Host q = rounded(random.normal({5, 4, 16}), dtype);
      const Host k = rounded(random.normal({40, 2, 16}), dtype);
      const Host v = rounded(random.normal({40, 2, 24}), dtype);
      Part a = attend_part(q, k, v, 0, 11, dtype, device);
      Part b = attend_part(q, k, v, 11, 40, dtype, device);
      for (Part* part : {&a, &b}) {  // as another library would give them
        Host lse = download(part->lse);
        for (float& value : lse.values) value = static_cast<float>(value / std::log(base));
        part->lse = Array(lse, DType::float32, device);
      }
      const Array out = like(a.out), lse = like(a.lse);
      merge_attention(a.out, a.lse, b.out, b.lse, out, lse, base);
      const Result want = attend(q, k, v, Rules{});
      CHECK_RESULT(download(out), want.out, dtype);
      Host natural = download(lse);
      for (float& value : natural.values) value = static_cast<float>(value * std::log(base));
      CHECK_LSE(natural, want.lse);
      // In place.
      merge_attention(a.out, a.lse, b.out, b.lse, a.out, a.lse, base);
      CHECK(same_bits(download(out), download(a.out)));
      CHECK(same_bits(download(lse), download(a.lse)));
    }
  }
}

DEVICE_TEST(merging_with_nothing_changes_no_bit) {
  Random random(6);
  const Host q = random.normal({3, 2, 8}), k = random.normal({9, 1, 8}),
             v = random.normal({9, 1, 8});
  for (const double base : {std::exp(1.0), 2.0}) {
    const Part full = attend_part(q, k, v, 0, 9, DType::float32, device);
    const Part empty = attend_part(q, k, v, 4, 4, DType::float32, device);
    for (const float value : download(empty.lse).values) CHECK(value == -kInf);
    const Array out = like(full.out), lse = like(full.lse);
    merge_attention(full.out, full.lse, empty.out, empty.lse, out, lse, base);
    CHECK(same_bits(download(out), download(full.out)));
    CHECK(same_bits(download(lse), download(full.lse)));
    merge_attention(empty.out, empty.lse, full.out, full.lse, out, lse, base);
    CHECK(same_bits(download(out), download(full.out)));
    CHECK(same_bits(download(lse), download(full.lse)));
    merge_attention(empty.out, empty.lse, empty.out, empty.lse, out, lse, base);
    for (const float value : download(out).values) CHECK(value == 0);
    for (const float value : download(lse).values) CHECK(value == -kInf);
  }
}

DEVICE_TEST(merging_one_and_two_dimensional_results) {
  const auto vector = [&](std::vector<float> values, Shape shape) {
    Host host(std::move(shape));
    host.values = std::move(values);
    return Array(host, DType::float32, device);
  };
  // One row: weights 3/4 and 1/4.
  const Array a = vector({4, 8}, {2}), b = vector({0, 4}, {2}), out = vector({9, 9}, {2});
  const Array lse_a = vector({std::log(3.0f)}, {}), lse_b = vector({0}, {}), lse = vector({9}, {});
  merge_attention(a, lse_a, b, lse_b, out, lse, std::exp(1.0));
  const Host got = download(out);
  CHECK_CLOSE(got[0], 3, 1e-5);
  CHECK_CLOSE(got[1], 7, 1e-5);
  CHECK_CLOSE(download(lse)[0], std::log(4.0), 1e-5);
  const Array rows_a = vector({4, 8, 1, 2}, {2, 2}), rows_b = vector({0, 4, 3, 4}, {2, 2});
  const Array rows_out = vector({9, 9, 9, 9}, {2, 2});
  const Array two_a = vector({std::log(3.0f), 5}, {2}), two_b = vector({0, 5}, {2});
  const Array two = vector({9, 9}, {2});
  merge_attention(rows_a, two_a, rows_b, two_b, rows_out, two, std::exp(1.0));
  const Host pair = download(rows_out);
  CHECK_CLOSE(pair[1], 7, 1e-5);
  CHECK_CLOSE(pair[2], 2, 1e-5);
  CHECK_CLOSE(pair[3], 3, 1e-5);
  CHECK_CLOSE(download(two)[1], 5 + std::log(2.0), 1e-5);
}

DEVICE_TEST(tokens_land_in_their_slots) {
  for (const DType dtype : {DType::float32, DType::float16, DType::bfloat16}) {
    for (const DType index : {DType::int32, DType::int64}) {
      Random random(9);
      const Host k = rounded(random.normal({4, 2, 12}), dtype);
      const Host v = rounded(random.normal({4, 2, 20}), dtype);
      const Host k_before({3, 4, 2, 12}, 1), v_before({3, 4, 2, 20}, 2);
      // K from a padded array; heads outside tokens in K's pool.
      const Array k_array(k, layout_of(k.shape, dtype, device, {1, 0, 2}, 3), 1);
      const Array v_array(v, dtype, device);
      const Array k_pool(k_before, layout_of(k_before.shape, dtype, device, {0, 2, 1, 3}, 1), 1);
      const Array v_pool(v_before, dtype, device);
      const std::vector<std::int64_t> slots{5, -1, 11, 0};
      const Array mapping = indices({4}, slots, device, index);
      WriteKvArgs args;
      args.k = k_array;
      args.v = v_array;
      args.k_pool = k_pool;
      args.v_pool = v_pool;
      args.slot_mapping = mapping;
      args.check = true;
      write_kv(args);
      Host k_want = k_before, v_want = v_before;
      for (std::size_t i = 0; i < slots.size(); ++i) {
        if (slots[i] < 0) continue;
        const auto token = static_cast<std::ptrdiff_t>(i);
        std::copy_n(k.values.begin() + token * 24, 24, k_want.values.begin() + slots[i] * 24);
        std::copy_n(v.values.begin() + token * 40, 40, v_want.values.begin() + slots[i] * 40);
      }
      CHECK(same_bits(download(k_pool), k_want));
      CHECK(same_bits(download(v_pool), v_want));
    }
  }
}

DEVICE_TEST(a_cache_written_token_by_token_is_read_back) {
  Random random(12);
  const std::vector<std::int64_t> lengths{13, 6};
  const PagedCache cache(random, lengths, {});
  const Array k_pool(Host(cache.k.shape, kNan), DType::float32, device);
  const Array v_pool(Host(cache.v.shape, kNan), DType::float32, device);
  for (std::int64_t j = 0; j < 13; ++j) {
    Host k({2, 2, 16}), v({2, 2, 16});
    std::vector<std::int64_t> slots;
    for (std::size_t b = 0; b < 2; ++b) {
      const auto at = static_cast<std::ptrdiff_t>(b) * 32;
      if (j >= lengths[b]) {
        slots.push_back(-1);
        continue;
      }
      slots.push_back(cache.slot(b, j));
      std::copy_n(cache.k.values.begin() + slots[b] * 32, 32, k.values.begin() + at);
      std::copy_n(cache.v.values.begin() + slots[b] * 32, 32, v.values.begin() + at);
    }
    const Array k_array(k, DType::float32, device), v_array(v, DType::float32, device);
    const Array mapping = indices({2}, slots, device);
    WriteKvArgs args;
    args.k = k_array;
    args.v = v_array;
    args.k_pool = k_pool;
    args.v_pool = v_pool;
    args.slot_mapping = mapping;
    args.check = true;
    write_kv(args);
  }
  const Array whole(cache.k, DType::float32, device);
  CHECK(same_bits(download(k_pool), download(whole)));
  const Host q = random.normal({2, 1, 4, 16});
  const Array q_array(q, DType::float32, device), out(Host(q.shape), DType::float32, device);
  const Array table = cache.block_table(device), seq_lens = indices({2}, lengths, device);
  PagedArgs args;
  args.q = q_array;
  args.k_pool = k_pool;
  args.v_pool = v_pool;
  args.block_table = table;
  args.seq_lens = seq_lens;
  args.out = out;
  args.check = true;
  paged_attention(args);
  CHECK_RESULT(download(out), cache.reference(q, Rules{}).out, DType::float32);
}

DEVICE_TEST(a_bad_slot_is_found) {
  const Array k(Host({3, 2, 8}, 1), DType::float32, device),
      pool(Host({2, 4, 2, 8}), DType::float32, device);
  const Array other(Host({2, 4, 2, 8}), DType::float32, device);
  const Array mapping = indices({3}, {2, 8, 5}, device);
  WriteKvArgs args;
  args.k = args.v = k;
  args.k_pool = pool;
  args.v_pool = other;
  args.slot_mapping = mapping;
  args.check = true;
  CHECK_THROWS(IndexError, write_kv(args), "slot_mapping", "token 1", "8", "7");
  const Host got = download(pool);
  for (std::int64_t slot = 0; slot < 8; ++slot) {
    // The CPU writes nothing; a GPU all but the bad token.
    const float want = !device.is_cpu() && (slot == 2 || slot == 5) ? 1.0f : 0.0f;
    CHECK(got[slot * 16] == want && got[slot * 16 + 15] == want);
  }
}

DEVICE_TEST(supports_says_which_kernel_or_why_not) {
  SupportQuery query;
  query.device = device;
  query.num_q_heads = 32;
  query.num_kv_heads = 8;
  for (const auto operation :
       {SupportQuery::Operation::flash_attention, SupportQuery::Operation::paged_attention,
        SupportQuery::Operation::tiled_attention}) {
    query.operation = operation;
    const Support yes = supports(query);
    CHECK(yes.supported && yes.reason.empty());
    CHECK(yes.kernel.rfind(device.is_cpu() ? "cpu_" : "cuda_", 0) == 0);
  }
  query.head_dim = 300;
  Support no = supports(query);
  CHECK(!no.supported && no.kernel.empty());
  CHECK(no.reason.find("head_dim") != std::string::npos &&
        no.reason.find("300") != std::string::npos);
  query.head_dim = 128;
  query.num_kv_heads = 5;
  CHECK(!supports(query).supported);
  query.num_kv_heads = 8;
  query.dtype = DType::int32;
  CHECK(supports(query).reason.find("int32") != std::string::npos);
  query.dtype = DType::bfloat16;
  query.device = {DeviceKind::cuda, 77};
  CHECK(supports(query).reason.find("cuda:77") != std::string::npos);
}

TEST(the_build_describes_itself) {
  const BuildInfo info = build_info();
  CHECK(!info.version.empty() && info.version.find('.') != std::string::npos);
  CHECK(!info.cpu_isa.empty());
  CHECK(info.num_cuda_devices >= 0);
  CHECK((info.num_cuda_devices == 0) == !info.no_cuda.empty());
  CHECK((info.num_cuda_devices > 0) == (default_device().kind == DeviceKind::cuda));
  check(kCpu);  // there is nothing to wait for
  CHECK_THROWS(ValueError, check({DeviceKind::cuda, 99}), "device", "cuda:99");
}
