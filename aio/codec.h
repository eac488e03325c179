#pragma once

#include <cstddef>
#include <cstdint>

namespace nvme_offload {

// fp32 values packed into fewer bits, and back: bit-identical to the torch operations in
// nvme_offload/optimizer_states, in one pass over memory.
//
// *threads*: the most threads to use, including the caller's.

/// Rounds *master* to *working*, with the remainder in *low*. See
/// nvme_offload/optimizer_states/split.py.
void split(const std::uint32_t* master, std::uint16_t* working, std::uint16_t* low,
           std::size_t count, unsigned threads);

/// Restores the *master* that was split into *working* and *low*.
void join(const std::uint16_t* working, const std::uint16_t* low, std::uint32_t* master,
          std::size_t count, unsigned threads);

/// The same where the lowest 8 bits of *master* are zero, so that they need not be stored.
void split(const std::uint32_t* master, std::uint16_t* working, std::uint8_t* low,
           std::size_t count, unsigned threads);
void join(const std::uint16_t* working, const std::uint8_t* low, std::uint32_t* master,
          std::size_t count, unsigned threads);

constexpr std::size_t kBlock = 256;  // values that share an exponent

/// Random bits for stochastic rounding: the value at i uses table[i % kBlock] * factors[i / kBlock]
/// + summands[i / kBlock], modulo 2**32.
struct Randoms {
  const std::uint32_t* table;
  const std::uint32_t* factors;
  const std::uint32_t* summands;
};

/// Rounds *values*, fp32 bit patterns, in place to their upper 24 bits. See
/// nvme_offload/optimizer_states/eight_bit.py.
void round_to_24(std::uint32_t* values, std::size_t count, Randoms randoms, unsigned threads);

/// Rounds *values* to *codes*, with one exponent per block. See
/// nvme_offload/optimizer_states/eight_bit.py.
void encode(const float* values, std::uint8_t* codes, std::uint8_t* exponents, std::size_t count,
            bool is_signed, Randoms randoms, unsigned threads);

/// Restores *values* from *codes*.
void decode(const std::uint8_t* codes, const std::uint8_t* exponents, float* values,
            std::size_t count, bool is_signed, unsigned threads);

/// Sets the byte of each block of second moments, *values*, for which codes are too few, to 1.
/// *first*: the first moments, or null. See nvme_offload/optimizer_states/widening.py.
void mark_far(const float* values, const float* first, std::uint8_t* far, std::size_t count,
              double eps, unsigned threads);

}  // namespace nvme_offload
