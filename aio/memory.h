#pragma once

#include <sys/types.h>

#include <cstddef>
#include <utility>

namespace nvme_offload {

/// Page-aligned anonymous memory, zeroed, on huge pages where the kernel grants them; unmapped on
/// destruction.
///
/// Drives prefer contiguous physical pages: a block on scattered 4 KiB pages needs a scatter-gather
/// entry for each.
class Memory {
 public:
  enum class InChild { copied, absent };

  Memory() = default;
  /// *in_child*: whether a forked child gets a copy of the memory, or no mapping (for memory that
  /// only this process's kernel queues use).
  /// *reserve*, where more than *nbytes*: address space that `grow` can back with memory.
  /// Throws std::bad_alloc.
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

  /// Grows it in place to *nbytes* in all. Throws std::bad_alloc when that is less than now, more
  /// than reserved, or there is no memory.
  void grow(std::size_t nbytes);

  /// Backs the first *nbytes* with memory, on all cores: the kernel zeroes each page when it is
  /// first used, which takes one core longer than anything else of a large arena. Best effort.
  void populate(std::size_t nbytes) noexcept;

  /// Locks the memory, from its start on, as far as RLIMIT_MEMLOCK allows, and populates it.
  /// Returns the bytes locked.
  std::size_t lock() noexcept;

 private:
  std::byte* data_ = nullptr;
  std::size_t nbytes_ = 0;
  std::size_t mapped_ = 0;  // mapped bytes from data_ on
  // the only process with the mapping; 0 where forked children have it too
  pid_t absent_elsewhere_than_ = 0;
};

}  // namespace nvme_offload
