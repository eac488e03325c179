#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace nvme_offload {

/// A flag that is raised once, and that any number of threads wait for. Raising it is a system call only where somebody waits.
class Latch {
 public:
  /// The memory must stay until this returns, though a waiter sees the flag before that.
  void raise() noexcept;

  [[nodiscard]] bool raised() const noexcept { return state_.load(std::memory_order_acquire) == kRaised; }

  /// Waits until it is raised, *limit* at the most and no longer than until a signal arrives. Returns whether it is.
  bool wait_for(std::chrono::nanoseconds limit) noexcept;

 private:
  static constexpr std::uint32_t kLowered = 0;
  static constexpr std::uint32_t kAwaited = 1;  // lowered, and somebody may be waiting
  static constexpr std::uint32_t kRaised = 2;

  std::atomic<std::uint32_t> state_{kLowered};
};

}  // namespace nvme_offload
