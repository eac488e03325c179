#pragma once

#include <cstddef>
#include <cstdint>

namespace nvme_offload {

/// An io_uring: its two rings, which are shared with the kernel, and its three system calls.
///
/// The kernel's interface is defined here, so that neither liburing nor new kernel headers are
/// needed. Source: include/uapi/linux/io_uring.h. Except for the constructor, only one thread may
/// use it.
class Ring {
 public:
  /// A submission (struct io_uring_sqe).
  struct Entry {
    enum : std::uint8_t { kPoll = 6, kRead = 22, kWrite = 23 };
    static constexpr std::uint8_t kRegisteredFile = 1U << 0;

    std::uint8_t operation;
    std::uint8_t flags;
    std::uint16_t priority;
    std::int32_t file;
    std::uint64_t offset;
    std::uint64_t address;
    std::uint32_t nbytes;
    std::uint32_t poll_events;
    std::uint64_t tag;
    std::uint64_t unused[3];
  };
  static_assert(sizeof(Entry) == 64);

  /// A completion (struct io_uring_cqe).
  struct Result {
    std::uint64_t tag;
    std::int32_t value;
    std::uint32_t flags;
  };
  static_assert(sizeof(Result) == 16);

  Ring() = default;
  ~Ring();
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;

  /// Makes a ring for *entries* submissions, and tries each system call. Returns 0 or an errno.
  [[nodiscard]] int set_up(std::uint32_t entries);
  /// Enables the ring, which then belongs to the calling thread. Returns 0 or an errno.
  [[nodiscard]] int enable();

  /// An entry to be filled in, and submitted by the next enter(). The caller keeps within the size
  /// of the ring.
  [[nodiscard]] Entry& prepare();

  enum class Wait : std::uint8_t {
    none,        // submit only
    not_at_all,  // also collect completions
    for_one,     // also wait for a completion
  };
  /// Submits the prepared entries, in order. Those that the kernel did not accept are taken back,
  /// and *refused* is their number. Returns 0 or an errno.
  [[nodiscard]] int enter(Wait wait, std::uint32_t& refused);

  /// Calls *handle* with each completion.
  template <typename Handle>
  void take_results(Handle handle) {
    std::uint32_t head = *result_head_;
    const std::uint32_t tail = __atomic_load_n(result_tail_, __ATOMIC_ACQUIRE);
    for (; head != tail; ++head) handle(results_[head & result_mask_]);
    __atomic_store_n(result_head_, head, __ATOMIC_RELEASE);
  }

  /// Makes an empty table of *count* registered files. Returns whether the kernel has such (Linux
  /// 5.19).
  [[nodiscard]] bool register_files(std::uint32_t count);
  /// Puts *descriptor* into the table, or -1 to empty the place. Returns whether that
  /// succeeded.
  [[nodiscard]] bool register_file(std::uint32_t place, int descriptor);

 private:
  [[nodiscard]] int set_up(std::uint32_t entries, std::uint32_t flags);
  [[nodiscard]] int error_of_refused_calls() const;

  int descriptor_ = -1;
  std::byte* rings_ = nullptr;
  std::size_t rings_bytes_ = 0;
  Entry* entries_ = nullptr;
  std::size_t entries_bytes_ = 0;
  std::uint32_t entry_mask_ = 0;
  std::uint32_t prepared_ = 0;
  const std::uint32_t* entry_head_ = nullptr;  // the kernel writes it
  std::uint32_t* entry_tail_ = nullptr;
  const Result* results_ = nullptr;
  std::uint32_t result_mask_ = 0;
  std::uint32_t* result_head_ = nullptr;
  const std::uint32_t* result_tail_ = nullptr;  // the kernel writes it
};

}  // namespace nvme_offload
