#pragma once

#include <cstddef>
#include <cstdint>

namespace nvme_offload {

/// Which operations a step of Adam rounds separately, and which it fuses. Each computes
///
///   exp_avg += (1 - beta1) * (gradient - exp_avg)
///   exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * gradient * gradient
///   master += step_size * exp_avg / (sqrt(exp_avg_sq) / correction + eps)
enum class AdamFormula : int { kTorch, kDeepSpeed };  // DeepSpeed: DeepSpeedCPUAdam

/// The constants of one step, as the optimizer rounds them to fp32.
struct AdamStep {
  AdamFormula formula;
  // Elements after the last whole vector, fewer than 16, which are rounded differently.
  std::size_t tail;
  float weight;  // 1 - beta1
  float beta1;
  float beta2;
  float square_weight;  // 1 - beta2
  bool decays;
  bool decoupled;
  // Decoupled: kTorch multiplies masters by it, kDeepSpeed adds their product with it. Otherwise it
  // is the weight decay.
  float decay;
  bool maximize;
  // kTorch divides the root by it, and it is from 2**-27 to 1; kDeepSpeed multiplies.
  float correction;
  float eps;
  float step_size;  // negative
  // MKL's vmsSqrt, which torch's separate operations use and which does not round correctly; null
  // for the processor's square root.
  void (*square_roots)(int count, const float* values, float* roots, std::int64_t mode);
  // MKL's MKL_Set_Num_Threads_Local, which returns the previous number; null without it.
  int (*set_mkl_threads)(int count);
};

enum class Element : int { kFloat32, kBFloat16, kFloat16 };

/// One moment: *values*, or *codes* with one exponent per block and the *seed* to round them by.
struct Moment {
  float* values;
  std::uint8_t* codes;
  std::uint8_t* exponents;
  std::int64_t seed;
};

/// Parameters with their gradient and states, at the start of a block.
struct AdamParameters {
  std::size_t count;
  const void* gradient;
  Element gradient_element;
  float* master;           // null where the 16-bit weights hold its upper half
  std::uint16_t* working;  // 16-bit weights; null where the master is the weight
  Element working_element;
  void* low;           // without a whole master: the bits that the weights lack
  unsigned low_bytes;  // 2, or 1 where masters are rounded to 24 bits by *master_seed*
  std::int64_t master_seed;
  Moment first;
  Moment second;
  const std::uint32_t* table;  // random numbers, one for each place in a block
  std::int64_t first_block;    // the name of the first block, for stochastic rounding
};

/// Unpacks, updates and packs *parameters* in one pass over memory. Gives the same bits as the
/// codec's functions and the optimizer of *step*, called one after another.
///
/// Returns whether a whole master became NaN. torch rounds NaN to 16 bits in several ways, so the
/// caller has to round these masters by torch.
bool adam(const AdamParameters& parameters, const AdamStep& step, unsigned threads);

}  // namespace nvme_offload
