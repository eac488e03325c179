#pragma once

#include <sys/types.h>

#include <cstddef>
#include <utility>

namespace nvme_offload {

/// Anonymous memory at page granularity, on huge pages where the kernel grants them, zeroed; unmapped on destruction.
///
/// Contiguous physical pages are what a drive wants: a block on scattered 4 KiB pages needs one entry of the scatter list for each.
class Memory {
 public:
  enum class InChild { copied, absent };

  Memory() = default;
  /// *in_child*: whether a forked child gets a copy of the memory, or no mapping at all (for what only this process' kernel queues use).
  /// Throws std::bad_alloc.
  /// *reserve*, where it is more than *nbytes*: addresses that `grow` can put memory behind. They take none until then.
  explicit Memory(std::size_t nbytes, InChild in_child = InChild::copied, std::size_t reserve = 0);
  ~Memory();
  Memory(Memory&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)),
        nbytes_(std::exchange(other.nbytes_, 0)),
        mapped_(std::exchange(other.mapped_, 0)),
        absent_elsewhere_than_(other.absent_elsewhere_than_) {}
  Memory& operator=(Memory&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(nbytes_, other.nbytes_);
    std::swap(mapped_, other.mapped_);
    std::swap(absent_elsewhere_than_, other.absent_elsewhere_than_);
    return *this;
  }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  [[nodiscard]] std::byte* data() const noexcept { return data_; }
  [[nodiscard]] std::size_t nbytes() const noexcept { return nbytes_; }

  /// Makes it *nbytes* in all, where it is. Throws std::bad_alloc when that is less than it has or more than was reserved, or there is no memory.
  void grow(std::size_t nbytes);

  /// Keeps the memory resident, from its start on, as far as RLIMIT_MEMLOCK allows. Returns the bytes locked.
  std::size_t lock() noexcept;

 private:
  std::byte* data_ = nullptr;
  std::size_t nbytes_ = 0;
  std::size_t mapped_ = 0;           // addresses from data_ on
  pid_t absent_elsewhere_than_ = 0;  // the only process that has the mapping; 0 where forked children have it too
};

}  // namespace nvme_offload
