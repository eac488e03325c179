#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__x86_64__) && !defined(NVME_OFFLOAD_SANITIZED)
#include <cpuid.h>
#define NVME_OFFLOAD_HAVE_VECTORS
#endif

#define INLINE inline __attribute__((always_inline))  // compiled for the caller's instruction set

namespace nvme_offload {

/// The instruction sets for which loops over elements are compiled.
enum class Vectors { kBaseline, kAvx2, kAvx512 };

#ifdef NVME_OFFLOAD_HAVE_VECTORS
/// The widest vectors that this processor and kernel have.
///
/// Asks the processor: __builtin_cpu_supports is always false in a library that zig linked, and
/// target_clones need it too. Source: zig's lib/compiler_rt; Intel's manual, volume 1, 13.2
/// to 13.5.
inline Vectors widest_vectors() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (__get_cpuid(1, &eax, &ebx, &ecx, &edx) == 0) return Vectors::kBaseline;
  if ((ecx & bit_OSXSAVE) == 0 || (ecx & bit_FMA) == 0) return Vectors::kBaseline;
  std::uint32_t saved = 0, upper = 0;  // registers that the kernel saves: XCR0
  __asm__("xgetbv" : "=a"(saved), "=d"(upper) : "c"(0));
  if (__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) == 0) return Vectors::kBaseline;
  const auto has = [&](unsigned bits, std::uint32_t registers) {
    return (ebx & bits) == bits && (saved & registers) == registers;
  };
  if (!has(bit_AVX2, 0x6)) return Vectors::kBaseline;
  const unsigned avx512 = bit_AVX512F | bit_AVX512BW | bit_AVX512DQ | bit_AVX512VL;
  return has(avx512, 0xe6) ? Vectors::kAvx512 : Vectors::kAvx2;
}
#else
inline Vectors widest_vectors() { return Vectors::kBaseline; }
#endif

template <typename Work>
using Version = void (*)(const Work&, std::size_t begin, std::size_t end);

template <typename Work>
void call(const Work& work, std::size_t begin, std::size_t end) {
  work(begin, end);
}

#ifdef NVME_OFFLOAD_HAVE_VECTORS
template <typename Work>
__attribute__((target("avx2,fma"), flatten)) void call_avx2(const Work& work, std::size_t begin,
                                                            std::size_t end) {
  work(begin, end);
}

// BW: with AVX512F alone, gcc uses half of a vector where bytes become words.
template <typename Work>
__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma"), flatten)) void call_avx512(
    const Work& work, std::size_t begin, std::size_t end) {
  work(begin, end);
}
#endif

/// Calls *work*(begin, end), compiled for the widest vectors. The functions that *work* calls must
/// be INLINE.
template <typename Work>
Version<Work> widest_version() {
#ifdef NVME_OFFLOAD_HAVE_VECTORS
  static const Vectors vectors = widest_vectors();
  if (vectors == Vectors::kAvx512) return call_avx512<Work>;
  if (vectors == Vectors::kAvx2) return call_avx2<Work>;
#endif
  return call<Work>;
}

}  // namespace nvme_offload
