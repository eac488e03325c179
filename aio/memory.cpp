#include "memory.h"

#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

// Newer than the headers of some distributions. Source: madvise(2).
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace nvme_offload {
namespace {

constexpr std::size_t kHugePage = std::size_t{2} << 20;
// What a thread of `populate` takes at a time. Less than two of these are not worth a thread.
constexpr std::size_t kPopulated = std::size_t{64} << 20;

std::size_t mapped_bytes(std::size_t nbytes) {
  const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  return (nbytes + page - 1) / page * page;
}

/// The processors that this thread may run on.
unsigned usable_cores() {
  cpu_set_t allowed;
  if (::sched_getaffinity(0, sizeof allowed, &allowed) != 0) return 1;
  return static_cast<unsigned>(std::max(CPU_COUNT(&allowed), 1));
}

/// The bytes that can be read beyond the end: kernels that load whole vectors may read there, such
/// as torch 2.13's fused SGD at the end of a momentum buffer in bfloat16.
std::size_t readable_beyond() { return mapped_bytes(1); }

/// Makes *nbytes* from *start* on, and those beyond them, readable and writable.
bool open_range(std::byte* start, std::size_t nbytes) noexcept {
  return ::mprotect(start, mapped_bytes(nbytes) + readable_beyond(), PROT_READ | PROT_WRITE) == 0;
}

/// Backs a range of whole pages with memory, without changing its contents.
void populate_range(std::byte* start, std::size_t length) noexcept {
  if (::madvise(start, length, MADV_POPULATE_WRITE) == 0 || errno != EINVAL) return;
  // before Linux 5.14
  const std::size_t page = mapped_bytes(1);
  for (std::size_t offset = 0; offset < length; offset += page)
    __atomic_fetch_or(reinterpret_cast<unsigned char*>(start + offset), 0, __ATOMIC_RELAXED);
}

/// Locks a range in memory. Pages without memory are locked when they get it.
bool lock_range(std::byte* start, std::size_t length) noexcept {
  if (::mlock2(start, length, MLOCK_ONFAULT) == 0) return true;
  const bool is_known = errno != ENOSYS && errno != EINVAL;  // since Linux 4.4
  return !is_known && ::mlock(start, length) == 0;
}

}  // namespace

Memory::Memory(std::size_t nbytes, InChild in_child, std::size_t reserve) : nbytes_(nbytes) {
  const std::size_t most = std::max(nbytes, reserve);
  if (most == 0) return;
  const std::size_t length = mapped_bytes(most) + readable_beyond();
  if (length < most || length > SIZE_MAX - kHugePage) throw std::bad_alloc();
  // Huge pages need an aligned start: map more, and unmap the slack.
  const std::size_t slack = length >= kHugePage ? kHugePage : 0;
  // PROT_NONE address space does not count as committed memory.
  const int access = most > nbytes ? PROT_NONE : PROT_READ | PROT_WRITE;
  void* mapping = ::mmap(nullptr, length + slack, access, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapping == MAP_FAILED) throw std::bad_alloc();
  auto* start = static_cast<std::byte*>(mapping);
  if (slack != 0) {
    const std::size_t head =
        (kHugePage - reinterpret_cast<std::uintptr_t>(start) % kHugePage) % kHugePage;
    if (head != 0) ::munmap(start, head);
    if (slack - head != 0) ::munmap(start + head + length, slack - head);
    start += head;
    // best effort: without transparent huge pages small pages do
    ::madvise(start, length, MADV_HUGEPAGE);
  }
  if (in_child == InChild::absent && ::madvise(start, length, MADV_DONTFORK) == 0)
    absent_elsewhere_than_ = ::getpid();
  if (access == PROT_NONE && !open_range(start, nbytes)) {
    ::munmap(start, length);
    throw std::bad_alloc();
  }
  data_ = start;
  mapped_ = length;
}

void Memory::grow(std::size_t nbytes) {
  if (nbytes < nbytes_ || nbytes > mapped_ || mapped_bytes(nbytes) + readable_beyond() > mapped_)
    throw std::bad_alloc();
  if (!open_range(data_, nbytes)) throw std::bad_alloc();
  nbytes_ = nbytes;
}

void Memory::populate(std::size_t nbytes) noexcept {
  const std::size_t length = mapped_bytes(std::min(nbytes, nbytes_));
  std::atomic<std::size_t> next{0};
  const auto work = [&] {
    for (;;) {
      const std::size_t start = next.fetch_add(kPopulated);
      if (start >= length) return;
      populate_range(data_ + start, std::min(kPopulated, length - start));
    }
  };
  std::vector<std::thread> threads;
  const std::size_t most = std::min<std::size_t>(usable_cores(), length / kPopulated);
  try {
    while (threads.size() + 1 < most) threads.emplace_back(work);
  } catch (const std::system_error&) {  // the thread limit: the running threads do the work
  } catch (const std::bad_alloc&) {
  }
  work();
  for (std::thread& thread : threads) thread.join();
}

std::size_t Memory::lock() noexcept {
  const std::size_t length = mapped_bytes(nbytes_);
  const std::size_t page = mapped_bytes(1);
  std::size_t locked = 0;
  // In halving steps: the kernel reports whether a range fits, not how much would.
  for (std::size_t step = length; step >= page && locked < length; step = step / 2 / page * page) {
    while (locked < length && lock_range(data_ + locked, std::min(step, length - locked)))
      locked += std::min(step, length - locked);
  }
  populate(locked);
  return std::min(locked, nbytes_);
}

Memory::~Memory() {
  if (data_ == nullptr) return;
  // A forked child lacks the mapping; something else may be mapped there.
  if (absent_elsewhere_than_ != 0 && absent_elsewhere_than_ != ::getpid()) return;
  ::munmap(data_, mapped_);
}

}  // namespace nvme_offload
