#include "adam.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>

#include "codec.h"
#include "codec_blocks.h"
#include "parallel.h"

namespace nvme_offload {
namespace {

// As nvme_offload/optimizer_states/rounding.py has them.
constexpr std::uint64_t kGolden = 0x9e3779b97f4a7c15;
constexpr std::uint64_t kMultipliers[] = {0x6a5d39eae12657a9, 0x2c1b3c6d9e3779bb};
// VML_HA | VML_FTZDAZ_OFF | VML_ERRMODE_IGNORE, which torch calls MKL with. Source: ATen/cpu/vml.h
constexpr std::int64_t kMklMode = 0x2 | 0x140000 | 0x100;

/// The factor and the summand for the random table of one block.
struct RandomKey {
  std::uint32_t factor;
  std::uint32_t summand;
};

INLINE RandomKey random_key(std::int64_t seed, std::int64_t block) {
  std::uint64_t key =
      static_cast<std::uint64_t>(block) * kGolden + static_cast<std::uint64_t>(seed);
  for (const std::uint64_t multiplier : kMultipliers) key = (key ^ (key >> 29)) * multiplier;
  return {static_cast<std::uint32_t>(key >> 32) | 1, static_cast<std::uint32_t>(key ^ (key >> 32))};
}

INLINE float widened_half(std::uint16_t half) {
  const std::uint32_t magnitude = half & 0x7fffU;
  // exact, also for half's subnormal numbers, which are normal in fp32
  const float finite = bits_as<float>(magnitude << 13) * bits_as<float>((127U + 112) << 23);
  const std::uint32_t bits =
      magnitude < 0x7c00 ? bits_as<std::uint32_t>(finite) : kInfinity | (magnitude & 0x3ff) << 13;
  return bits_as<float>(bits | (half & 0x8000U) << 16);
}

/// To nearest, ties to even. Source: c10/util/Half.h, `fp16_ieee_from_fp32_value`.
INLINE std::uint16_t rounded_to_half(float value) {
  const auto bits = bits_as<std::uint32_t>(value);
  const std::uint32_t doubled = bits << 1;
  const float scaled = (bits_as<float>(bits & kMagnitude) * bits_as<float>((127U + 112) << 23)) *
                       bits_as<float>((127U - 110) << 23);
  const std::uint32_t bias = std::max(doubled & 0xff000000, 0x71000000U);
  const auto base = bits_as<std::uint32_t>(bits_as<float>((bias >> 1) + 0x07800000U) + scaled);
  const std::uint32_t rounded = ((base >> 13) & 0x7c00) + (base & 0xfff);
  const std::uint32_t sign = (bits >> 16) & 0x8000;
  return static_cast<std::uint16_t>(sign | (doubled > 0xff000000 ? 0x7e00 : rounded));
}

/// To nearest, ties to even.
INLINE std::uint16_t rounded_to_bfloat16(float value) {
  const auto bits = bits_as<std::uint32_t>(value);
  return static_cast<std::uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

INLINE void widen(const void* from, Element element, std::size_t begin, std::size_t count,
                  float* __restrict to) {
  if (element == Element::kFloat32) {
    std::memcpy(to, static_cast<const float*>(from) + begin, count * sizeof *to);
    return;
  }
  const std::uint16_t* __restrict halves = static_cast<const std::uint16_t*>(from) + begin;
  if (element == Element::kBFloat16) {
    for (std::size_t i = 0; i < count; ++i)
      to[i] = bits_as<float>(static_cast<std::uint32_t>(halves[i]) << 16);
  } else {
    for (std::size_t i = 0; i < count; ++i) to[i] = widened_half(halves[i]);
  }
}

/// Whether one of *values* is NaN; writes them to *working*.
INLINE bool narrow(const float* __restrict values, std::uint16_t* __restrict working,
                   Element element, std::size_t count) {
  std::uint32_t largest = 0;
  for (std::size_t i = 0; i < count; ++i)
    largest = std::max(largest, bits_as<std::uint32_t>(values[i]) & kMagnitude);
  if (element == Element::kBFloat16) {
    for (std::size_t i = 0; i < count; ++i) working[i] = rounded_to_bfloat16(values[i]);
  } else {
    for (std::size_t i = 0; i < count; ++i) working[i] = rounded_to_half(values[i]);
  }
  return largest > kInfinity;
}

/// A number to divide square roots by, from 2**-27 to 1, and the two parts of its reciprocal.
struct Divisor {
  explicit Divisor(float divisor)
      : value(divisor), high(1 / divisor), low(static_cast<float>(1.0 / divisor - high)) {}

  float value, high, low;
};

/// *root* / *divisor*, with the bits of a division and without the processor's divider, which the
/// square roots and the other division keep busy.
///
/// *near* is one of the two floats around the quotient, so the remainder is exact. *high* is the
/// reciprocal rounded to nearest, so the last sum rounds as the quotient does. Source: P.
/// Markstein, "Computation of elementary functions on the IBM RISC System/6000 processor", 1990.
INLINE float quotient(float root, const Divisor& divisor) {
  const float near = __builtin_fmaf(root, divisor.high, root * divisor.low);
  const float remainder = __builtin_fmaf(-near, divisor.value, root);
  const float rounded = __builtin_fmaf(remainder, divisor.high, near);
  // Infinity and NaN have no remainder. For AVX2, gcc vectorises a choice of bits, not of floats.
  const std::uint32_t is_finite = bits_as<std::uint32_t>(root) < kInfinity ? ~0U : 0;
  return bits_as<float>((bits_as<std::uint32_t>(rounded) & is_finite) |
                        (bits_as<std::uint32_t>(root) & ~is_finite));
}

/// Updates *count* elements of a block. Overwrites *gradient* and *roots*. *is_tail*: the elements
/// come after the last whole vector.
template <AdamFormula formula, bool is_tail>
INLINE void update_part(float* __restrict master, float* __restrict gradient,
                        float* __restrict first, float* __restrict second, float* __restrict roots,
                        std::size_t count, const AdamStep& step, const Divisor& correction) {
  constexpr bool torch = formula == AdamFormula::kTorch;
  if (step.maximize)
    for (std::size_t i = 0; i < count; ++i) gradient[i] = -gradient[i];
  const float decay = step.decay;
  if (step.decays && !step.decoupled) {
    for (std::size_t i = 0; i < count; ++i)
      gradient[i] = __builtin_fmaf(master[i], decay, gradient[i]);
  }
  const float beta1 = step.beta1, beta2 = step.beta2;
  const float weight = step.weight, square_weight = step.square_weight;
  if constexpr (!torch) {
    for (std::size_t i = 0; i < count; ++i)
      first[i] = is_tail ? __builtin_fmaf(first[i], beta1, gradient[i] * weight)
                         : __builtin_fmaf(gradient[i], weight, first[i] * beta1);
  } else if (weight < 0.5F) {  // `lerp` starts from the nearer end
    for (std::size_t i = 0; i < count; ++i)
      first[i] = __builtin_fmaf(weight, gradient[i] - first[i], first[i]);
  } else {
    for (std::size_t i = 0; i < count; ++i)
      first[i] = __builtin_fmaf(weight - 1, gradient[i] - first[i], gradient[i]);
  }
  for (std::size_t i = 0; i < count; ++i) {
    const float g = gradient[i], w = square_weight;
    const float square = torch ? w * g * g : g * g * w;
    second[i] = is_tail ? __builtin_fmaf(second[i], beta2, square)
                : torch ? __builtin_fmaf(w * g, g, second[i] * beta2)
                        : __builtin_fmaf(g * g, w, second[i] * beta2);
  }
  if (step.square_roots != nullptr) {
    step.square_roots(static_cast<int>(count), second, roots, kMklMode);
  } else {
    for (std::size_t i = 0; i < count; ++i) roots[i] = __builtin_sqrtf(second[i]);
  }
  const float eps = step.eps, size = step.step_size;
  const bool decays = step.decays && step.decoupled;
  const float kept = decays ? decay : 1;
  for (std::size_t i = 0; i < count; ++i) {
    if constexpr (torch) {
      master[i] = master[i] * kept + size * first[i] / (quotient(roots[i], correction) + eps);
    } else {
      const float denominator = __builtin_fmaf(roots[i], correction.value, eps);
      const float decayed = decays ? __builtin_fmaf(master[i], decay, master[i]) : master[i];
      master[i] = __builtin_fmaf(first[i] / denominator, size, decayed);
    }
  }
}

template <AdamFormula formula>
INLINE void update(float* master, float* gradient, float* first, float* second, float* roots,
                   std::size_t count, std::size_t tail, const AdamStep& step,
                   const Divisor& correction) {
  const std::size_t whole = count - tail;
  update_part<formula, false>(master, gradient, first, second, roots, whole, step, correction);
  if (tail != 0) {
    update_part<formula, true>(master + whole, gradient + whole, first + whole, second + whole,
                               roots + whole, tail, step, correction);
  }
}

/// The values of block *block*, of *count* elements: in place, or decoded to *room*.
template <bool is_signed>
INLINE float* unpacked(const Moment& moment, std::size_t block, std::size_t count, float* room) {
  if (moment.values != nullptr) return moment.values + block * kBlock;
  const std::uint8_t* codes = moment.codes + block * kBlock;
  std::uint8_t padded[kBlock];
  if (count < kBlock) {
    std::memset(padded, 0, sizeof padded);
    std::memcpy(padded, codes, count);
    codes = padded;
  }
  decode_block<is_signed>(codes, moment.exponents[block], room);
  return room;
}

template <bool is_signed>
INLINE void pack(const Moment& moment, std::size_t block, std::size_t count, float* values,
                 const AdamParameters& parameters) {
  if (moment.values != nullptr) return;
  const RandomKey key =
      random_key(moment.seed, parameters.first_block + static_cast<std::int64_t>(block));
  std::uint8_t* codes = moment.codes + block * kBlock;
  std::uint8_t cut[kBlock];
  if (count < kBlock) std::fill(values + count, values + kBlock, 0.0F);
  moment.exponents[block] = encode_block<is_signed>(values, count < kBlock ? cut : codes,
                                                    parameters.table, key.factor, key.summand);
  if (count < kBlock) std::memcpy(codes, cut, count);
}

/// The values of a block during its update, in the processor's cache.
struct Values {
  alignas(64) float master[kBlock], gradient[kBlock], first[kBlock], second[kBlock], roots[kBlock];
};

/// Updates the block of *count* elements from *begin*; whether a whole master became NaN.
INLINE bool update_block(const AdamParameters& parameters, const AdamStep& step,
                         const Divisor& correction, std::size_t begin, std::size_t count,
                         Values& values) {
  const std::size_t block = begin / kBlock;
  const std::size_t tail = count < kBlock ? step.tail : 0;  // a whole block has whole vectors
  widen(parameters.gradient, parameters.gradient_element, begin, count, values.gradient);
  std::uint16_t* working = parameters.working == nullptr ? nullptr : parameters.working + begin;
  auto* low = static_cast<std::uint8_t*>(parameters.low) + begin * parameters.low_bytes;
  float* master = parameters.master == nullptr ? values.master : parameters.master + begin;
  auto* bits = reinterpret_cast<std::uint32_t*>(values.master);
  if (parameters.low_bytes == 2) {
    join_from(working, reinterpret_cast<std::uint16_t*>(low), bits, count);
  } else if (parameters.low_bytes == 1) {
    join_from(working, low, bits, count);
  }
  float* first = unpacked<true>(parameters.first, block, count, values.first);
  float* second = unpacked<false>(parameters.second, block, count, values.second);
  if (step.formula == AdamFormula::kTorch) {
    update<AdamFormula::kTorch>(master, values.gradient, first, second, values.roots, count, tail,
                                step, correction);
  } else {
    update<AdamFormula::kDeepSpeed>(master, values.gradient, first, second, values.roots, count,
                                    tail, step, correction);
  }
  pack<true>(parameters.first, block, count, first, parameters);
  pack<false>(parameters.second, block, count, second, parameters);
  if (parameters.low_bytes == 2) {
    split_into(bits, working, reinterpret_cast<std::uint16_t*>(low), count);
  } else if (parameters.low_bytes == 1) {
    const RandomKey key = random_key(parameters.master_seed,
                                     parameters.first_block + static_cast<std::int64_t>(block));
    round_block(bits, count, parameters.table, key.factor, key.summand);
    split_into(bits, working, low, count);
  } else if (working != nullptr) {
    return narrow(master, working, parameters.working_element, count);
  }
  return false;
}

/// The blocks from element *begin* to *end*; whether a whole master became NaN.
INLINE bool update_range(const AdamParameters& parameters, const AdamStep& step, std::size_t begin,
                         std::size_t end) {
  Values values;
  const Divisor correction{step.correction};
  bool is_nan = false;
  // A constant count: the compiler leaves out the code for elements after the last whole vector.
  for (; begin + kBlock <= end; begin += kBlock)
    is_nan |= update_block(parameters, step, correction, begin, kBlock, values);
  if (begin < end) is_nan |= update_block(parameters, step, correction, begin, end - begin, values);
  return is_nan;
}

/// MKL computes with one thread in this scope. With more, it starts them for each block.
class OneMklThread {
 public:
  explicit OneMklThread(const AdamStep& step)
      : set_(step.set_mkl_threads), previous_(set_ == nullptr ? 0 : set_(1)) {}
  OneMklThread(const OneMklThread&) = delete;
  OneMklThread& operator=(const OneMklThread&) = delete;
  ~OneMklThread() {
    if (set_ != nullptr) set_(previous_);
  }

 private:
  int (*set_)(int count);
  int previous_;
};

}  // namespace

bool adam(const AdamParameters& parameters, const AdamStep& step, unsigned threads) {
  std::atomic<bool> is_nan{false};
  parallel_for(parameters.count, threads, [&](std::size_t begin, std::size_t end) {
    const OneMklThread one_thread{step};
    if (update_range(parameters, step, begin, end)) is_nan.store(true, std::memory_order_relaxed);
  });
  return is_nan;
}

}  // namespace nvme_offload
