#include "codec.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "codec_blocks.h"
#include "parallel.h"

namespace nvme_offload {
namespace {

constexpr float kRange = 1.0F / (1 << 30);  // the least unsigned code over its block's maximum
constexpr float kNegligibleRatio = 64;      // of exp_avg below a denominator
constexpr std::size_t kFewOfBlock = kBlock / 16;  // may be below the least code

INLINE void round_part(std::uint32_t* values, std::size_t count, const std::uint32_t* table,
                       const std::uint32_t* factors, const std::uint32_t* summands) {
  for (std::size_t begin = 0; begin < count; begin += kBlock, ++factors, ++summands) {
    round_block(values + begin, std::min(kBlock, count - begin), table, *factors, *summands);
  }
}

INLINE void encode_part(const float* values, std::uint8_t* codes, std::uint8_t* exponents,
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

INLINE void decode_part(const std::uint8_t* codes, const std::uint8_t* exponents, float* values,
                        std::size_t count, bool is_signed) {
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

INLINE void mark_far_part(const float* values, const float* first, std::uint8_t* far,
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
    split_into(master + begin, working + begin, low + begin, end - begin);
  });
}

void join(const std::uint16_t* working, const std::uint16_t* low, std::uint32_t* master,
          std::size_t count, unsigned threads) {
  parallel_for(count, threads, [=](std::size_t begin, std::size_t end) {
    join_from(working + begin, low + begin, master + begin, end - begin);
  });
}

void split(const std::uint32_t* master, std::uint16_t* working, std::uint8_t* low,
           std::size_t count, unsigned threads) {
  parallel_for(count, threads, [=](std::size_t begin, std::size_t end) {
    split_into(master + begin, working + begin, low + begin, end - begin);
  });
}

void join(const std::uint16_t* working, const std::uint8_t* low, std::uint32_t* master,
          std::size_t count, unsigned threads) {
  parallel_for(count, threads, [=](std::size_t begin, std::size_t end) {
    join_from(working + begin, low + begin, master + begin, end - begin);
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
