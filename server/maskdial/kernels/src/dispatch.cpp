// Which processor.cpp to use on this machine.
#include <cstdlib>
#include <cstring>

#include "processor.h"

#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

extern const Processor processor_scalar;
#if defined(__x86_64__)
extern const Processor processor_avx2, processor_avxvnni, processor_avx512vnni, processor_amx;
#elif defined(__aarch64__)
extern const Processor processor_neon, processor_dotprod;
#endif

namespace {

struct Choice {
  const Processor* processor;
  bool runs;
};

#if defined(__x86_64__)

constexpr bool has(uint32_t flags, int bit) { return (flags >> bit & 1) != 0; }

// Which registers the operating system saves (Intel's manual, volume 1, section 13.3).
uint32_t saved_registers() {
  uint32_t low, high;
  __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return low;
}

// Whether the system lets this process use AMX's tiles, which it has to be asked for (Linux:
// Documentation/arch/x86/xstate.rst).
bool allows_tiles() {
#if defined(__linux__)
  constexpr int kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

// Intel's manual, volume 2, CPUID: leaves 1, 7.0 and 7.1.
struct Features {
  bool avx2 = false, avxvnni = false, avx512vnni = false, amx = false;

  Features() {
    uint32_t a, b, c, d;
    if (__get_cpuid(1, &a, &b, &c, &d) == 0) return;
    const bool fma = has(c, 12), saves = has(c, 27), halves = has(c, 29);
    if (!fma || !saves || !halves) return;
    const uint32_t saved = saved_registers();
    if ((saved & 0x06) != 0x06 || __get_cpuid_count(7, 0, &a, &b, &c, &d) == 0) return;
    avx2 = has(b, 5);
    avx512vnni = (saved & 0xe0) == 0xe0 && has(b, 16) && has(b, 17) && has(b, 30) && has(b, 31) &&
                 has(c, 11);
    amx = avx512vnni && (saved & 0x60000) == 0x60000 && has(d, 24) && has(d, 25) && allows_tiles();
    if (a >= 1 && __get_cpuid_count(7, 1, &a, &b, &c, &d) != 0) avxvnni = avx2 && has(a, 4);
  }
};

#elif defined(__aarch64__)

// Linux: Documentation/arch/arm64/elf_hwcaps.rst, HWCAP_ASIMDDP. Apple's processors all have it.
bool multiplies_bytes() {
#if defined(__linux__)
  return (getauxval(AT_HWCAP) >> 20 & 1) != 0;
#else
  return true;
#endif
}

#endif

}  // namespace

#if defined(__x86_64__)
const bool kHardwarePrefetches = [] {
  uint32_t a, words[3] = {};
  return __get_cpuid(0, &a, &words[0], &words[2], &words[1]) != 0 &&
         std::memcmp(words, "AuthenticAMD", sizeof(words)) == 0;
}();
#else
const bool kHardwarePrefetches = false;
#endif

#if defined(__x86_64__)
const Processor* choose_processor() {
  const Features features;
  const Choice choices[] = {
      {&processor_amx, features.amx},
      {&processor_avx512vnni, features.avx512vnni},
      {&processor_avxvnni, features.avxvnni},
      {&processor_avx2, features.avx2},
      {&processor_scalar, true},
  };
#elif defined(__aarch64__)
const Processor* choose_processor() {
  const Choice choices[] = {
      {&processor_dotprod, multiplies_bytes()},
      {&processor_neon, true},
      {&processor_scalar, true},
  };
#else
const Processor* choose_processor() {
  const Choice choices[] = {{&processor_scalar, true}};
#endif
  const char* wanted = std::getenv("MASKDIAL_KERNELS_ISA");
  for (const Choice& choice : choices) {
    if (!choice.runs) continue;
    if (wanted == nullptr || *wanted == 0 || std::strcmp(wanted, choice.processor->name) == 0) {
      return choice.processor;
    }
  }
  return nullptr;
}
