// SPDX-License-Identifier: Apache-2.0
// Each instruction set of the CPU backend that this machine has, forced through the environment in
// a process of its own.
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>

#include "tiled_case.h"

using namespace tiledattn;
using namespace test;

namespace {

constexpr const char* kVariable = "TILEDATTN_CPU_ISA";

/// Runs this executable's tests named `filter` with the instruction set forced; its exit status.
int run_again(const std::string& isa, const char* filter) {
  std::fflush(nullptr);
  const pid_t child = fork();
  if (child == 0) {
    setenv(kVariable, isa.c_str(), 1);
    execl(program.c_str(), program.c_str(), filter, nullptr);
    _exit(127);
  }
  int status = -1;
  if (child < 0 || waitpid(child, &status, 0) != child) return -1;
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

/// The instruction set that the environment forces on this process, or "".
std::string forced() {
  const char* text = std::getenv(kVariable);
  return text ? text : "";
}

double from_int8(std::uint8_t code) { return static_cast<std::int8_t>(code); }

/// float8_e4m3fn: sign, four bits of exponent with bias 7, three of mantissa, no infinity.
double from_float8(std::uint8_t code) {
  const int exponent = code >> 3 & 15, mantissa = code & 7;
  if ((code & 0x7f) == 0x7f) return std::nan("");
  const double magnitude =
      exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10);
  return code & 0x80 ? -magnitude : magnitude;
}

}  // namespace

TEST(each_instruction_set) {
  if (!forced().empty()) {
    CHECK(build_info().cpu_isa == forced());
    return;
  }
  const std::vector<std::string> isas = cpu_isas();
  CHECK(!isas.empty() && isas.back() == "scalar");
  CHECK(!isas.empty() && build_info().cpu_isa == isas.front());
  for (const std::string& isa : isas) {
    std::printf("-- %s\n", isa.c_str());
    CHECK(run_again(isa, "kernels_") == 0);
  }
  CHECK(run_again("mmx", "unknown_instruction_set") == 0);
}

TEST(unknown_instruction_set) {
  if (forced() != "mmx") {
    CHECK(!cpu_isa().empty());
    return;
  }
  // The message names what was asked for and what there is.
  CHECK_THROWS(ValueError, cpu_isa(), kVariable, "mmx", "scalar");
  CHECK_THROWS(ValueError, build_info(), kVariable, "mmx", "scalar");
}

TEST(kernels_use_the_forced_set) { CHECK(forced().empty() || build_info().cpu_isa == forced()); }

TEST(kernels_decode_every_tail) {
  Random random(17);
  for (const DType dtype : {DType::float32, DType::float16, DType::bfloat16}) {
    for (std::int64_t head_dim = 1; head_dim <= 256; head_dim += head_dim < 40 ? 1 : 27) {
      Case c{.name = "tail", .dtype = dtype, .num_q_heads = 6, .num_kv_heads = 2};
      c.num_q_heads = c.num_kv_heads * (1 + random.below(9));
      c.head_dim = head_dim;
      c.head_dim_v = 1 + random.below(256);
      c.q_len = 1 + random.below(3);
      c.block_size = 1 + random.below(9);
      c.tile = 1 + random.below(5);
      c.lengths = {random.below(40), 1 + random.below(8), 17};
      if (head_dim % 3 == 0) c.rules = with_scale(0.3, 2.0);
      if (head_dim % 5 == 0) c.rules = with_scale(-0.2);
      context = to_string(dtype) + " head_dim " + std::to_string(head_dim);
      Setup s(c, kCpu);
      s.step();
      const Array out = s.out(dtype), lse = s.lse();
      s.attention.finalize(out, lse);
      const Result want = s.cache.reference(s.q, c.rules);
      CHECK_RESULT(download(out), want.out, dtype);
      CHECK_LSE(download(lse), want.lse);
    }
  }
}

TEST(kernels_prefill_every_tail) {
  Random random(18);
  for (const DType dtype : {DType::float32, DType::float16, DType::bfloat16}) {
    for (std::int64_t head_dim = 1; head_dim <= 256; head_dim += head_dim < 20 ? 1 : 33) {
      Rules rules = {.causal = head_dim % 2 == 0};
      if (head_dim % 3 == 0) rules.softcap = 3;
      if (head_dim % 5 == 0) rules.left = random.below(30);
      const std::int64_t q_len = 17 + random.below(50), kv_len = 1 + random.below(90);
      const std::int64_t num_kv_heads = 1 + random.below(2);
      const std::int64_t num_q_heads = num_kv_heads * (1 + random.below(3));
      const Host q = rounded(random.normal({1, q_len, num_q_heads, head_dim}), dtype);
      const Host k = rounded(random.normal({1, kv_len, num_kv_heads, head_dim}), dtype);
      const Host v = rounded(
          random.normal({1, kv_len, num_kv_heads, std::min<std::int64_t>(head_dim + 1, 256)}),
          dtype);
      const Array q_array(q, dtype, kCpu), k_array(k, dtype, kCpu), v_array(v, dtype, kCpu);
      const Array out(Host({1, q_len, num_q_heads, v.shape[3]}), dtype, kCpu);
      const Array lse(Host({1, q_len, num_q_heads}), DType::float32, kCpu);
      Array sinks;
      FlashArgs args;
      args.q = q_array;
      args.k = k_array;
      args.v = v_array;
      args.out = out;
      args.lse = lse.tensor();
      args.causal = rules.causal;
      args.score = rules.options(kCpu, sinks);
      context = to_string(dtype) + " head_dim " + std::to_string(head_dim);
      flash_attention(args);
      const Result want = attend_batch(q, k, v, rules);
      CHECK_RESULT(download(out), want.out, dtype);
      CHECK_LSE(download(lse), want.lse);
    }
  }
}

TEST(kernels_convert_every_half) {
  // Each 16-bit pattern as V under one key: the result is that number, in float32 and in its type.
  for (const DType dtype : {DType::float16, DType::bfloat16}) {
    const std::int64_t num_keys = 256, head_dim = 256;
    Host v({1, num_keys, 1, head_dim});
    for (std::int64_t i = 0; i < v.size(); ++i) {
      const auto pattern = static_cast<std::uint16_t>(i);
      v[i] = dtype == DType::float16 ? from_float16(pattern) : from_bfloat16(pattern);
    }
    v.shape = {num_keys, 1, 1, head_dim};  // 256 sequences of one key
    const Array one(Host({num_keys, 1, 1, 8}), dtype, kCpu), v_array(v, dtype, kCpu);
    for (const DType out_type : {DType::float32, dtype}) {
      const Array out(Host(v.shape), out_type, kCpu);
      FlashArgs args;
      args.q = args.k = one;
      args.v = v_array;
      args.out = out;
      flash_attention(args);
      const Host got = download(out);
      context = to_string(dtype) + " to " + to_string(out_type);
      for (std::int64_t i = 0; i < v.size(); ++i) {
        // 0 is written for any zero; everything else comes out as it went in.
        CHECK(std::isnan(v[i]) ? std::isnan(got[i]) : got[i] == v[i]);
      }
    }
  }
}

TEST(kernels_convert_every_byte) {
  // Each code as all of K and, elsewhere in each row, as V, under one key: the score is the number
  // in K that a head's q picks, and the result is V. Whole steps of 16, 32 and 64 elements leave
  // some, and the last pick is beyond the middle of such a step.
  const std::int64_t codes = 256, heads = 4, head_dim = 247;
  std::vector<std::uint8_t> k(codes * head_dim), v(codes * head_dim);
  Host q({codes, heads, head_dim});
  for (std::int64_t s = 0; s < codes; ++s) {
    for (std::int64_t d = 0; d < head_dim; ++d) {
      k[s * head_dim + d] = static_cast<std::uint8_t>(s);
      v[s * head_dim + d] = static_cast<std::uint8_t>(s + d);
    }
    for (std::int64_t h = 0; h < heads; ++h) q[(s * heads + h) * head_dim + h * 82] = 1;
  }
  std::vector<std::int64_t> blocks(codes);
  for (std::int64_t s = 0; s < codes; ++s) blocks[s] = s;
  const Array table = indices({codes, 1}, blocks, kCpu);
  const Array lens = indices({codes}, std::vector<std::int64_t>(codes, 1), kCpu);
  const Array lse(Host({codes, heads}), DType::float32, kCpu);
  for (const DType kv_dtype : {DType::int8, DType::float8_e4m3fn}) {
    const auto number = kv_dtype == DType::int8 ? from_int8 : from_float8;
    Tensor pool = layout_of({codes, 1, 1, head_dim}, kv_dtype, kCpu);
    PagedArgs args;
    args.k_pool = args.v_pool = pool;
    args.k_pool.data = k.data();
    args.v_pool.data = v.data();
    args.k_scale = args.v_scale = 1.0;
    args.block_table = table;
    args.seq_lens = lens;
    args.score.softmax_scale = 1.0;
    args.lse = lse;
    for (const DType dtype : {DType::float32, DType::float16, DType::bfloat16}) {
      const Array q_array(q, dtype, kCpu), out(Host(q.shape), dtype, kCpu);
      args.q = q_array;
      args.out = out;
      paged_attention(args);
      context = to_string(kv_dtype) + " under " + to_string(dtype);
      const Host got = download(out), scores = download(lse);
      for (std::int64_t row = 0; row < codes * heads; ++row) {
        const double score = number(static_cast<std::uint8_t>(row / heads));
        CHECK(std::isnan(score) ? std::isnan(scores[row]) : scores[row] == score);
        for (std::int64_t d = 0; d < head_dim; ++d) {
          const double want = number(v[row / heads * head_dim + d]);
          const double x = got[row * head_dim + d];
          CHECK(std::isnan(score) || std::isnan(want) ? std::isnan(x) : x == want);
        }
      }
    }
  }
}

TEST(kernels_round_to_nearest_even) {
  for (const DType dtype : {DType::float16, DType::bfloat16}) {
    // The mean of two neighbours lies half-way: it has to go to the even one.
    Host v({1, 2, 1, 256});
    Host want({1, 1, 1, 256});
    for (std::int64_t i = 0; i < 256; ++i) {
      const auto pattern = static_cast<std::uint16_t>(0x3c00 + i);
      const auto even = static_cast<std::uint16_t>(pattern + (pattern & 1));
      const auto number = dtype == DType::float16 ? from_float16 : from_bfloat16;
      v[i] = number(pattern);
      v[256 + i] = number(static_cast<std::uint16_t>(pattern + 1));
      want[i] = number(even);
    }
    const Array q(Host({1, 1, 1, 8}), dtype, kCpu), k(Host({1, 2, 1, 8}), dtype, kCpu);
    const Array v_array(v, dtype, kCpu), out(Host(want.shape), dtype, kCpu);
    FlashArgs args;
    args.q = q;
    args.k = k;
    args.v = v_array;
    args.out = out;
    flash_attention(args);
    CHECK(test::same_bits(download(out), want));
  }
}
