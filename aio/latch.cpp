#include "latch.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <ctime>

namespace nvme_offload {

static_assert(sizeof(std::atomic<std::uint32_t>) == sizeof(std::uint32_t) &&
              std::atomic<std::uint32_t>::is_always_lock_free);

void Latch::raise() noexcept {
  if (state_.exchange(kRaised, std::memory_order_acq_rel) != kAwaited) return;
  ::syscall(SYS_futex, &state_, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

bool Latch::wait_for(std::chrono::nanoseconds limit) noexcept {
  std::uint32_t seen = kLowered;
  if (!state_.compare_exchange_strong(seen, kAwaited, std::memory_order_acquire) && seen == kRaised)
    return true;
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(limit);
  const timespec left{static_cast<std::time_t>(seconds.count()),
                      static_cast<long>((limit - seconds).count())};
  // Returns immediately if the flag was raised meanwhile, and early on a signal, which the waiter
  // wants to see.
  ::syscall(SYS_futex, &state_, FUTEX_WAIT_PRIVATE, kAwaited, &left, nullptr, 0);
  return raised();
}

}  // namespace nvme_offload
