// SPDX-License-Identifier: Apache-2.0
#include "cpu/isa.h"

#include <cstdint>
#include <cstdlib>
#include <string>
#include <vector>

#include "backend.h"
#include "check_tensor.h"

#if defined(__x86_64__)
#include <cpuid.h>
#ifdef __linux__
#include <sys/syscall.h>
#include <unistd.h>
#endif
#elif defined(__aarch64__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace tiledattn {
namespace {

#if defined(__x86_64__)

struct Registers {
  unsigned a = 0, b = 0, c = 0, d = 0;
};

/// All zero where the CPU does not know the leaf.
Registers cpuid(unsigned leaf, unsigned subleaf) {
  Registers r;
  __get_cpuid_count(leaf, subleaf, &r.a, &r.b, &r.c, &r.d);
  return r;
}

bool has(unsigned value, unsigned bits) { return (value & bits) == bits; }

/// The registers that the operating system saves: bit 1 SSE, 2 AVX, 5..7 AVX-512, 17 and 18 tiles.
unsigned saved_registers() {
  constexpr unsigned kOsXsave = 1u << 27;
  if (!has(cpuid(1, 0).c, kOsXsave)) return 0;
  unsigned low = 0, high = 0;
  __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return low;
}

#ifdef __linux__

constexpr long kTileData = 18;

/// Does this Linux know tile registers, which it gives to a process that asks for them?
bool knows_tiles() {
  constexpr long kGetSupported = 0x1021;
  std::uint64_t supported = 0;
  return syscall(SYS_arch_prctl, kGetSupported, &supported) == 0 && (supported >> kTileData & 1);
}

/// Asks for the registers that the kernels use. With tiles, signal frames have to have room for
/// them. All threads of the process, and the children that it forks, may use them from then on.
bool ask_for_registers(const cpu::CpuKernels& kernels) {
  constexpr long kRequestPermission = 0x1023;
  return &kernels != &cpu::kernels_amxbf16 ||
         syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

#else

bool knows_tiles() { return false; }
bool ask_for_registers(const cpu::CpuKernels&) { return true; }

#endif

/// Best first.
std::vector<const cpu::CpuKernels*> find_available() {
  constexpr unsigned kFma = 1u << 12, kAvx = 1u << 28, kF16c = 1u << 29;
  constexpr unsigned kAvx2 = 1u << 5;
  constexpr unsigned kAvx512 = 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31;  // F, DQ, BW, VL
  constexpr unsigned kVbmi = 1u << 1, kBf16 = 1u << 5;
  constexpr unsigned kAmx = 1u << 22 | 1u << 24;  // BF16, TILE
  const unsigned saved = saved_registers();
  const Registers leaf7 = cpuid(7, 0);
  const bool avx2 =
      has(saved, 0x06) && has(cpuid(1, 0).c, kFma | kAvx | kF16c) && has(leaf7.b, kAvx2);
  const bool avx512 = avx2 && has(saved, 0xe6) && has(leaf7.b, kAvx512);
  const bool avx512bf16 =
      avx512 && has(leaf7.c, kVbmi) && leaf7.a >= 1 && has(cpuid(7, 1).a, kBf16);
  const bool amxbf16 = avx512bf16 && has(saved, 0x600e6) && has(leaf7.d, kAmx) && knows_tiles();

  std::vector<const cpu::CpuKernels*> found;
  if (amxbf16) found.push_back(&cpu::kernels_amxbf16);
  if (avx512bf16) found.push_back(&cpu::kernels_avx512bf16);
  if (avx512) found.push_back(&cpu::kernels_avx512);
  if (avx2) found.push_back(&cpu::kernels_avx2);
  found.push_back(&cpu::kernels_scalar);
  return found;
}

#elif defined(__aarch64__)

/// Best first.
std::vector<const cpu::CpuKernels*> find_available() {
  std::vector<const cpu::CpuKernels*> found;
  if ((getauxval(AT_HWCAP2) & HWCAP2_BF16) != 0) found.push_back(&cpu::kernels_neonbf16);
  found.push_back(&cpu::kernels_neon);
  found.push_back(&cpu::kernels_scalar);
  return found;
}

#else

std::vector<const cpu::CpuKernels*> find_available() { return {&cpu::kernels_scalar}; }

#endif

#if !defined(__x86_64__)
bool ask_for_registers(const cpu::CpuKernels&) { return true; }
#endif

const std::vector<const cpu::CpuKernels*>& available() {
  static const std::vector<const cpu::CpuKernels*> found = find_available();
  return found;
}

/// The one that is forced, else the best that the system lets this process use.
const cpu::CpuKernels& choose() {
  const char* variable = std::getenv("TILEDATTN_CPU_ISA");
  const std::string forced = variable == nullptr ? "" : variable;
  std::string others;
  for (const cpu::CpuKernels* candidate : available()) {
    if (!forced.empty() && forced != candidate->name) {
      others += (others.empty() ? "" : ", ") + std::string(candidate->name);
    } else if (ask_for_registers(*candidate)) {
      return *candidate;
    }
  }
  refuse("TILEDATTN_CPU_ISA", '"' + forced + '"', others + ", which this machine and build have");
}

}  // namespace

const cpu::CpuKernels& cpu::kernels() {
  static const CpuKernels& chosen = choose();
  return chosen;
}

std::vector<std::string> cpu_isas() {
  std::vector<std::string> names;
  for (const cpu::CpuKernels* candidate : available()) names.emplace_back(candidate->name);
  return names;
}

std::string cpu_isa() { return cpu::kernels().name; }

}  // namespace tiledattn
