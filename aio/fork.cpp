#include "fork.h"

#include <pthread.h>

#include <atomic>
#include <new>

namespace nvme_offload {
namespace {

std::atomic<std::uint32_t> forks{0};

void count_fork() { forks.fetch_add(1, std::memory_order_relaxed); }

}  // namespace

void watch_forks() {
  if (::pthread_atfork(nullptr, nullptr, count_fork) != 0) throw std::bad_alloc();
}

std::uint32_t process_generation() noexcept { return forks.load(std::memory_order_relaxed); }

}  // namespace nvme_offload
