#include "codec.h"

#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <future>
#include <limits>
#include <system_error>
#include <vector>

// One version per instruction set; the loader selects. Not with sanitizers: their runtime is not
// ready when the loader resolves symbols.
#if defined(__x86_64__) && defined(__GLIBC__) && __has_attribute(target_clones) && \
    !defined(NVME_OFFLOAD_SANITIZED)
#define MULTIVERSIONED __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define MULTIVERSIONED
#endif
#define INLINE inline __attribute__((always_inline))  // compiled for the caller's instruction set
// clang omits from the object file what only a multiversioned function instantiates and does not
// inline: no containers there.

namespace nvme_offload {
namespace {

constexpr std::size_t kChunk = std::size_t{1} << 16;  // values per unit of work
constexpr std::uint32_t kInfinity = 0x7f800000;
constexpr std::uint32_t kMagnitude = 0x7fffffff;
constexpr std::uint32_t kOctave = 1U << 23;  // the difference of fp32 bit patterns one octave apart
constexpr std::uint32_t kDropped = 20;       // dropped bits of the fp32 mantissa
// subtracted from an fp32 bit pattern before it is cut to a code
constexpr std::uint32_t kCodeZero = (127 - 15) * kOctave;
constexpr float kLeastNormal = 1.0F / (1 << 14);  // smallest normal IEEE half
constexpr std::uint32_t kHalfInfinity = 0xf8;     // the code of infinity
constexpr std::uint32_t kLeastExponent = 32;
constexpr std::uint32_t kNotFinite = 255;
constexpr float kRange = 1.0F / (1 << 30);  // the least unsigned code over its block's maximum
constexpr float kNegligibleRatio = 64;      // of exp_avg below a denominator
constexpr std::size_t kFewOfBlock = kBlock / 16;  // may be below the least code
constexpr std::uint32_t top_octave(bool is_signed) { return is_signed ? 0 : 15; }

template <typename To, typename From>
INLINE To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

/// Calls *work* with begin and end of each chunk of *count* elements, on up to *threads* threads.
///
/// The threads are those of torch's OpenMP runtime. After a parallel loop they spin for
/// milliseconds before they sleep; threads of our own would compete with them, which took twice the
/// time. Not with sanitizers, which do not see OpenMP's synchronisation. Source: GOMP_parallel in
/// libgomp's ABI, which LLVM's and Intel's runtimes provide too; OMP_WAIT_POLICY and GOMP_SPINCOUNT
/// in its manual.
template <typename Work>
void parallel_for(std::size_t count, unsigned threads, const Work& work) {
  struct Loop {
    const Work& work;
    const std::size_t count;
    std::atomic<std::size_t> next{0};

    static void run(void* address) {
      Loop& self = *static_cast<Loop*>(address);
      for (std::size_t begin;
           (begin = self.next.fetch_add(kChunk, std::memory_order_relaxed)) < self.count;) {
        self.work(begin, std::min(begin + kChunk, self.count));
      }
    }
  } loop{work, count};
  const auto most =
      static_cast<unsigned>(std::min<std::size_t>(threads, (count + kChunk - 1) / kChunk));
#ifndef NVME_OFFLOAD_SANITIZED
  using Parallel = void (*)(void (*)(void*), void*, unsigned, unsigned);
  static const auto openmp = reinterpret_cast<Parallel>(::dlsym(RTLD_DEFAULT, "GOMP_parallel"));
  if (openmp != nullptr && most > 1) {
    openmp(Loop::run, &loop, most, 0);
    return;
  }
#endif
  std::vector<std::future<void>> others;
  try {
    while (others.size() + 1 < most)
      others.push_back(std::async(std::launch::async, &Loop::run, &loop));
  } catch (const std::system_error&) {  // no more threads: continue with those that there are
  }
  Loop::run(&loop);
}

/// *Low*: the 16 bits below the bfloat16, or their upper 8 where the others are zero.
template <typename Low>
INLINE void split_into(const std::uint32_t* __restrict master, std::uint16_t* __restrict working,
                       Low* __restrict low, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint32_t bits = master[i];
    const std::uint32_t upper = bits >> 16;
    const std::uint32_t quiet = (upper & 0x7f) == 0 ? upper | 0x40 : upper;
    const bool is_nan = (bits & kMagnitude) > kInfinity;
    working[i] = static_cast<std::uint16_t>(is_nan ? quiet : (bits + 0x8000) >> 16);
    low[i] = static_cast<Low>((bits & 0xffff) >> (16 - 8 * sizeof(Low)));
  }
}

template <typename Low>
INLINE void join_from(const std::uint16_t* __restrict working, const Low* __restrict low,
                      std::uint32_t* __restrict master, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint32_t upper = static_cast<std::uint32_t>(working[i]) << 16;
    const std::uint32_t lower = static_cast<std::uint32_t>(low[i]) << (16 - 8 * sizeof(Low));
    const bool is_nan = (upper & kMagnitude) > kInfinity;
    master[i] = upper + lower - (is_nan || lower < 0x8000 ? 0 : 0x10000);
  }
}

MULTIVERSIONED void split_part(const std::uint32_t* master, std::uint16_t* working,
                               std::uint16_t* low, std::size_t count) {
  split_into(master, working, low, count);
}

MULTIVERSIONED void split_short_part(const std::uint32_t* master, std::uint16_t* working,
                                     std::uint8_t* low, std::size_t count) {
  split_into(master, working, low, count);
}

MULTIVERSIONED void join_part(const std::uint16_t* working, const std::uint16_t* low,
                              std::uint32_t* master, std::size_t count) {
  join_from(working, low, master, count);
}

MULTIVERSIONED void join_short_part(const std::uint16_t* working, const std::uint8_t* low,
                                    std::uint32_t* master, std::size_t count) {
  join_from(working, low, master, count);
}

MULTIVERSIONED void round_part(std::uint32_t* __restrict values, std::size_t count,
                               const std::uint32_t* __restrict table, const std::uint32_t* factors,
                               const std::uint32_t* summands) {
  for (std::size_t begin = 0; begin < count; begin += kBlock, ++factors, ++summands) {
    const std::size_t end = std::min(count, begin + kBlock);
    for (std::size_t i = begin; i < end; ++i) {
      const std::uint32_t bits = values[i];
      const std::uint32_t random = (table[i - begin] * *factors + *summands) >> 24;
      const bool is_finite = (bits & kMagnitude) < kInfinity;
      const std::uint32_t quiet =
          (bits & kMagnitude) > kInfinity ? bits | 0x400000 : bits;  // a NaN stays a NaN
      values[i] = (is_finite ? bits + random : quiet) & ~0xffU;
    }
  }
}

/// The exponent field of the block's largest magnitude after rounding up; kNotFinite for a block
/// with infinities, NaNs or an unexpected sign.
template <bool is_signed>
INLINE std::uint32_t exponent_of(const float* values) {
  std::uint32_t largest = 0;
  std::uint32_t negative = 0;  // in the highest bit
  for (std::size_t i = 0; i < kBlock; ++i) {
    const auto bits = bits_as<std::uint32_t>(values[i]);
    const std::uint32_t magnitude = bits & kMagnitude;
    largest = std::max(largest, magnitude);
    // negated magnitude: the highest bit is set unless it is zero
    negative |= bits & (0U - magnitude);
  }
  const std::uint32_t exponent =
      std::max((largest + (1U << kDropped) - 1) / kOctave, kLeastExponent);
  return exponent >= 254 || (!is_signed && negative > kMagnitude) ? kNotFinite : exponent;
}

template <bool is_signed>
INLINE std::uint8_t encode_block(const float* __restrict values, std::uint8_t* __restrict codes,
                                 const std::uint32_t* __restrict table, std::uint32_t factor,
                                 std::uint32_t summand) {
  const std::uint32_t exponent = exponent_of<is_signed>(values);
  if (exponent == kNotFinite) {
    std::memset(codes, 0, kBlock);
    return kNotFinite;
  }
  const auto scale = bits_as<float>((254 + top_octave(is_signed) - exponent) * kOctave);
  for (std::size_t i = 0; i < kBlock; ++i) {
    const auto bits = bits_as<std::uint32_t>(values[i]);
    const std::uint32_t random = ((table[i] * factor + summand) ^ 0x80000000) >> (32 - kDropped);
    const std::uint32_t magnitude = bits & kMagnitude;
    const float scaled = bits_as<float>(magnitude) * scale;
    // Signed: logarithmic steps above the smallest normal, even steps below it, whichever is
    // larger. Unsigned: only zero is below it.
    const std::uint32_t even = bits_as<std::uint32_t>(scaled + kLeastNormal) - kOctave;
    const std::uint32_t held_up = magnitude != 0 ? bits_as<std::uint32_t>(kLeastNormal) : kCodeZero;
    const std::uint32_t cut =
        (std::max(bits_as<std::uint32_t>(scaled), is_signed ? even : held_up) - kCodeZero +
         random) >>
        kDropped;
    codes[i] = static_cast<std::uint8_t>(is_signed ? cut | (bits >> 31 << 7) : cut);
  }
  return static_cast<std::uint8_t>(exponent);
}

MULTIVERSIONED void encode_part(const float* values, std::uint8_t* codes, std::uint8_t* exponents,
                                std::size_t count, bool is_signed, const std::uint32_t* table,
                                const std::uint32_t* factors, const std::uint32_t* summands) {
  for (; count >= kBlock;
       count -= kBlock, values += kBlock, codes += kBlock, ++factors, ++summands) {
    *exponents++ = is_signed ? encode_block<true>(values, codes, table, *factors, *summands)
                             : encode_block<false>(values, codes, table, *factors, *summands);
  }
  if (count != 0) {
    float padded[kBlock]{};
    std::uint8_t cut[kBlock];
    std::memcpy(padded, values, count * sizeof *padded);
    *exponents = is_signed ? encode_block<true>(padded, cut, table, *factors, *summands)
                           : encode_block<false>(padded, cut, table, *factors, *summands);
    std::memcpy(codes, cut, count);
  }
}

template <bool is_signed>
INLINE void decode_block(const std::uint8_t* __restrict codes, std::uint32_t exponent,
                         float* __restrict values) {
  const std::uint32_t field = std::max(exponent, kLeastExponent) - top_octave(is_signed);
  const auto scale = exponent == kNotFinite ? std::numeric_limits<float>::quiet_NaN()
                                            : bits_as<float>(field * kOctave);
  for (std::size_t i = 0; i < kBlock; ++i) {
    const std::uint32_t code = codes[i];
    const std::uint32_t magnitude = is_signed ? code & 0x7f : code;
    // Widens an IEEE half without relying on the processor's handling of denormals: even steps
    // below the smallest normal.
    const std::uint32_t bits = (magnitude << kDropped) + kCodeZero;
    const auto even = bits_as<std::uint32_t>(bits_as<float>(bits + kOctave) - kLeastNormal);
    const std::uint32_t infinity = magnitude < kHalfInfinity ? 0 : kInfinity;
    const std::uint32_t sign = is_signed ? code >> 7 << 31 : 0;
    values[i] = bits_as<float>(std::min(bits, even) | infinity | sign) * scale;
  }
}

MULTIVERSIONED void decode_part(const std::uint8_t* codes, const std::uint8_t* exponents,
                                float* values, std::size_t count, bool is_signed) {
  for (; count >= kBlock; count -= kBlock, codes += kBlock, values += kBlock, ++exponents) {
    is_signed ? decode_block<true>(codes, *exponents, values)
              : decode_block<false>(codes, *exponents, values);
  }
  if (count != 0) {
    std::uint8_t padded[kBlock]{};
    float whole[kBlock];
    std::memcpy(padded, codes, count);
    is_signed ? decode_block<true>(padded, *exponents, whole)
              : decode_block<false>(padded, *exponents, whole);
    std::memcpy(values, whole, count * sizeof *whole);
  }
}

/// How many of *values* are above zero and below the least code of the block, *least*.
INLINE std::size_t count_below(const float* __restrict values, std::size_t count, float& least) {
  std::int32_t largest = 0;  // as numbers, bit patterns of negative values are below zero
  std::uint32_t magnitude = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const auto bits = bits_as<std::uint32_t>(values[i]);
    largest = std::max(largest, bits_as<std::int32_t>(bits));
    magnitude = std::max(magnitude, bits & kMagnitude);
  }
  if (magnitude > kInfinity) return 0;  // a NaN: nothing is below it
  least = bits_as<float>(largest) * kRange;
  const auto bound = bits_as<std::int32_t>(least);
  std::uint32_t below = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const auto bits = bits_as<std::int32_t>(values[i]);
    below += static_cast<std::uint32_t>(bits > 0) & static_cast<std::uint32_t>(bits < bound);
  }
  return below;
}

/// Whether more than a few of *values*, *count* of a block, are below its least code and matter.
INLINE bool matters(const float* values, const float* first, std::size_t count, float least,
                    float eps) {
  std::size_t found = 0;
  for (std::size_t i = 0; i < count; ++i) {
    if (!(values[i] > 0 && values[i] < least)) continue;
    const float root = std::sqrt(values[i]);
    const float update = first == nullptr ? root * 8 : std::abs(first[i]) * kNegligibleRatio;
    found += update >= root + eps;
  }
  return found > kFewOfBlock;
}

MULTIVERSIONED void mark_far_part(const float* values, const float* first, std::uint8_t* far,
                                  std::size_t count, double eps) {
  for (std::size_t begin = 0; begin < count; begin += kBlock, ++far) {
    const std::size_t size = std::min(kBlock, count - begin);
    float least = 0;
    if (count_below(values + begin, size, least) > kFewOfBlock &&
        std::sqrt(least) > static_cast<float>(eps / 8) &&
        matters(values + begin, first == nullptr ? nullptr : first + begin, size, least,
                static_cast<float>(eps))) {
      *far = 1;
    }
  }
}

}  // namespace

void split(const std::uint32_t* master, std::uint16_t* working, std::uint16_t* low,
           std::size_t count, unsigned threads) {
  parallel_for(count, threads, [=](std::size_t begin, std::size_t end) {
    split_part(master + begin, working + begin, low + begin, end - begin);
  });
}

void join(const std::uint16_t* working, const std::uint16_t* low, std::uint32_t* master,
          std::size_t count, unsigned threads) {
  parallel_for(count, threads, [=](std::size_t begin, std::size_t end) {
    join_part(working + begin, low + begin, master + begin, end - begin);
  });
}

void split(const std::uint32_t* master, std::uint16_t* working, std::uint8_t* low,
           std::size_t count, unsigned threads) {
  parallel_for(count, threads, [=](std::size_t begin, std::size_t end) {
    split_short_part(master + begin, working + begin, low + begin, end - begin);
  });
}

void join(const std::uint16_t* working, const std::uint8_t* low, std::uint32_t* master,
          std::size_t count, unsigned threads) {
  parallel_for(count, threads, [=](std::size_t begin, std::size_t end) {
    join_short_part(working + begin, low + begin, master + begin, end - begin);
  });
}

void round_to_24(std::uint32_t* values, std::size_t count, Randoms randoms, unsigned threads) {
  parallel_for(count, threads, [=](std::size_t begin, std::size_t end) {
    const std::size_t block = begin / kBlock;
    round_part(values + begin, end - begin, randoms.table, randoms.factors + block,
               randoms.summands + block);
  });
}

void encode(const float* values, std::uint8_t* codes, std::uint8_t* exponents, std::size_t count,
            bool is_signed, Randoms randoms, unsigned threads) {
  parallel_for(count, threads, [=](std::size_t begin, std::size_t end) {
    const std::size_t block = begin / kBlock;
    encode_part(values + begin, codes + begin, exponents + block, end - begin, is_signed,
                randoms.table, randoms.factors + block, randoms.summands + block);
  });
}

void decode(const std::uint8_t* codes, const std::uint8_t* exponents, float* values,
            std::size_t count, bool is_signed, unsigned threads) {
  parallel_for(count, threads, [=](std::size_t begin, std::size_t end) {
    decode_part(codes + begin, exponents + begin / kBlock, values + begin, end - begin, is_signed);
  });
}

void mark_far(const float* values, const float* first, std::uint8_t* far, std::size_t count,
              double eps, unsigned threads) {
  parallel_for(count, threads, [=](std::size_t begin, std::size_t end) {
    mark_far_part(values + begin, first == nullptr ? nullptr : first + begin, far + begin / kBlock,
                  end - begin, eps);
  });
}

}  // namespace nvme_offload
