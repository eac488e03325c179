#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace nvme_offload {

/// A one-shot flag with any number of waiters. Raising it makes a system call only if there is a
/// waiter.
class Latch {
 public:
  /// The object must outlive this call, though a waiter may see the flag earlier.
  void raise() noexcept;

  [[nodiscard]] bool raised() const noexcept {
    return state_.load(std::memory_order_acquire) == kRaised;
  }

  /// Waits until it is raised, for at most *limit*, or until a signal arrives. Returns whether it
  /// is raised.
  bool wait_for(std::chrono::nanoseconds limit) noexcept;

 private:
  static constexpr std::uint32_t kLowered = 0;
  static constexpr std::uint32_t kAwaited = 1;  // lowered, and there may be waiters
  static constexpr std::uint32_t kRaised = 2;

  std::atomic<std::uint32_t> state_{kLowered};
};

}  // namespace nvme_offload
