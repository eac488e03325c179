#pragma once

// The loops of the codec over one block. Each is compiled for the instruction set of its caller.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "codec.h"
#include "vectors.h"

namespace nvme_offload {

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
constexpr std::uint32_t top_octave(bool is_signed) { return is_signed ? 0 : 15; }

template <typename To, typename From>
INLINE To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

/// *Low*: the 16 bits below the bfloat16, or their upper 8 where the others are zero.
template <typename Low>
INLINE void split_into(const std::uint32_t* __restrict master, std::uint16_t* __restrict working,
                       Low* __restrict low, std::size_t count) {
  std::uint32_t largest = 0;
  for (std::size_t i = 0; i < count; ++i) {
    working[i] = static_cast<std::uint16_t>((master[i] + 0x8000) >> 16);
    low[i] = static_cast<Low>(master[i] >> (16 - 8 * sizeof(Low)));
    largest = std::max(largest, master[i] & kMagnitude);
  }
  if (largest <= kInfinity) return;
  for (std::size_t i = 0; i < count; ++i) {  // a NaN stays a NaN
    const std::uint32_t upper = master[i] >> 16;
    const std::uint32_t quiet = (upper & 0x7f) == 0 ? upper | 0x40 : upper;
    if ((master[i] & kMagnitude) > kInfinity) working[i] = static_cast<std::uint16_t>(quiet);
  }
}

template <typename Low>
INLINE void join_from(const std::uint16_t* __restrict working, const Low* __restrict low,
                      std::uint32_t* __restrict master, std::size_t count) {
  constexpr unsigned shift = 16 - 8 * sizeof(Low);
  std::uint32_t largest = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint32_t upper = static_cast<std::uint32_t>(working[i]) << 16;
    // signed: the weight is above the master where it was rounded up
    const auto lower = static_cast<std::make_signed_t<Low>>(low[i]);
    master[i] = upper + (static_cast<std::uint32_t>(lower) << shift);
    largest = std::max(largest, upper & kMagnitude);
  }
  if (largest <= kInfinity) return;
  for (std::size_t i = 0; i < count; ++i) {  // a NaN was not rounded
    const std::uint32_t upper = static_cast<std::uint32_t>(working[i]) << 16;
    if ((upper & kMagnitude) > kInfinity)
      master[i] = upper | static_cast<std::uint32_t>(low[i]) << shift;
  }
}

/// Rounds *values*, fp32 bit patterns, in place to their upper 24 bits.
INLINE void round_block(std::uint32_t* __restrict values, std::size_t count,
                        const std::uint32_t* __restrict table, std::uint32_t factor,
                        std::uint32_t summand) {
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint32_t bits = values[i];
    const std::uint32_t random = (table[i] * factor + summand) >> 24;
    const bool is_finite = (bits & kMagnitude) < kInfinity;
    const std::uint32_t quiet =
        (bits & kMagnitude) > kInfinity ? bits | 0x400000 : bits;  // a NaN stays a NaN
    values[i] = (is_finite ? bits + random : quiet) & ~0xffU;
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
  // With this scale, the code is the lowest bits of the fp32 bit pattern without its dropped bits.
  constexpr std::uint32_t octaves = is_signed ? 0 : 16;
  constexpr std::uint32_t zero = kCodeZero + octaves * kOctave;
  static_assert(zero >> kDropped << (is_signed ? 25 : 24) == 0);
  const auto scale = bits_as<float>((254 + top_octave(is_signed) + octaves - exponent) * kOctave);
  summand ^= 0x80000000;  // and so the sums
  for (std::size_t i = 0; i < kBlock; ++i) {
    const auto bits = bits_as<std::uint32_t>(values[i]);
    const std::uint32_t random = (table[i] * factor + summand) >> (32 - kDropped);
    const std::uint32_t magnitude = bits & kMagnitude;
    const float scaled = bits_as<float>(magnitude) * scale;
    // Signed: logarithmic steps above the smallest normal, even steps below it, whichever is
    // larger. Unsigned: only zero is below it.
    const float even = scaled * 0.5F + bits_as<float>(zero);
    const std::uint32_t least = magnitude != 0 ? zero + kOctave : zero;
    const std::uint32_t held_up =
        std::max(bits_as<std::uint32_t>(scaled), is_signed ? bits_as<std::uint32_t>(even) : least);
    const std::uint32_t cut = (held_up + random) >> kDropped;
    codes[i] = static_cast<std::uint8_t>(is_signed ? (cut & 0x7f) | (bits >> 24 & 0x80) : cut);
  }
  return static_cast<std::uint8_t>(exponent);
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
    const std::uint32_t sign = is_signed ? code << 24 & 0x80000000 : 0;
    values[i] = bits_as<float>(std::min(bits, even) | infinity | sign) * scale;
  }
}

}  // namespace nvme_offload
