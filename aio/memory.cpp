#include "memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <new>

namespace nvme_offload {
namespace {

constexpr std::size_t kHugePage = std::size_t{2} << 20;

std::size_t mapped_bytes(std::size_t nbytes) {
  const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  return (nbytes + page - 1) / page * page;
}

}  // namespace

Memory::Memory(std::size_t nbytes, InChild in_child, std::size_t reserve) : nbytes_(nbytes) {
  const std::size_t most = std::max(nbytes, reserve);
  if (most == 0) return;
  const std::size_t length = mapped_bytes(most);
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
  if (access == PROT_NONE && ::mprotect(start, mapped_bytes(nbytes), PROT_READ | PROT_WRITE) != 0) {
    ::munmap(start, length);
    throw std::bad_alloc();
  }
  data_ = start;
  mapped_ = length;
}

void Memory::grow(std::size_t nbytes) {
  if (nbytes < nbytes_ || nbytes > mapped_) throw std::bad_alloc();
  if (::mprotect(data_, mapped_bytes(nbytes), PROT_READ | PROT_WRITE) != 0) throw std::bad_alloc();
  nbytes_ = nbytes;
}

std::size_t Memory::lock() noexcept {
  const std::size_t length = mapped_bytes(nbytes_);
  const std::size_t page = mapped_bytes(1);
  std::size_t locked = 0;
  // In halving steps: the kernel tells whether a range fits, not how much would.
  for (std::size_t step = length; step >= page && locked < length; step = step / 2 / page * page) {
    while (locked < length && ::mlock(data_ + locked, std::min(step, length - locked)) == 0)
      locked += std::min(step, length - locked);
  }
  return std::min(locked, nbytes_);
}

Memory::~Memory() {
  if (data_ == nullptr) return;
  // A forked child lacks the mapping; something else may be mapped there.
  if (absent_elsewhere_than_ != 0 && absent_elsewhere_than_ != ::getpid()) return;
  ::munmap(data_, mapped_);
}

}  // namespace nvme_offload
