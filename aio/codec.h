#pragma once

#include <cstddef>
#include <cstdint>

namespace nvme_offload {

// fp32 values in fewer bits, and back: what nvme_offload/optimizer_states does with torch's operations, to the same bits, in one pass over memory.
//
// *threads*: that may work on it, the caller's among them.

/// Rounds *master* into *working*, and keeps in *low* what that lacks. See nvme_offload/optimizer_states/split.py.
void split(const std::uint32_t* master, std::uint16_t* working, std::uint16_t* low, std::size_t count, unsigned threads);

/// The *master* that *working* and *low* were split from.
void join(const std::uint16_t* working, const std::uint16_t* low, std::uint32_t* master, std::size_t count, unsigned threads);

/// The same where the lowest 8 bits of *master* are zero: they are not kept.
void split(const std::uint32_t* master, std::uint16_t* working, std::uint8_t* low, std::size_t count, unsigned threads);
void join(const std::uint16_t* working, const std::uint8_t* low, std::uint32_t* master, std::size_t count, unsigned threads);

constexpr std::size_t kBlock = 256;  // values that share an exponent

/// What rounding draws on: for the value at i table[i % kBlock] * factors[i / kBlock] + summands[i / kBlock], without what overflows.
struct Randoms {
  const std::uint32_t* table;
  const std::uint32_t* factors;
  const std::uint32_t* summands;
};

/// Rounds *values*, fp32 patterns, in place to their upper 24 bits. See nvme_offload/optimizer_states/eight_bit.py.
void round_to_24(std::uint32_t* values, std::size_t count, Randoms randoms, unsigned threads);

/// Rounds *values* into *codes*, with one of *exponents* for every block. See nvme_offload/optimizer_states/eight_bit.py.
void encode(const float* values, std::uint8_t* codes, std::uint8_t* exponents, std::size_t count, bool is_signed, Randoms randoms, unsigned threads);

/// The *values* of *codes*.
void decode(const std::uint8_t* codes, const std::uint8_t* exponents, float* values, std::size_t count, bool is_signed, unsigned threads);

}  // namespace nvme_offload
