#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "request.h"

namespace nvme_offload {

/// One call of pread or pwrite, as the kernel is to carry it out.
struct Transfer {
  Operation operation = Operation::read;
  const std::shared_ptr<File>* file = nullptr;  // the request's: valid until the transfer completes
  int descriptor = -1;                          // one of the file's
  std::byte* data = nullptr;
  std::size_t nbytes = 0;
  std::uint64_t offset = 0;
  std::uint32_t slot = 0;  // below the backend's depth, and of one transfer at a time: backends keep their own state under it
};

/// What became of a transfer: the bytes moved, which may be fewer than asked for, or a negative errno.
struct Completion {
  std::uint32_t slot = 0;
  std::int64_t result = 0;
};

/// An eventfd: a flag that another thread raises, and that a kernel queue can wait for beside its completions.
class WakeSignal {
 public:
  WakeSignal();
  ~WakeSignal();
  WakeSignal(const WakeSignal&) = delete;
  WakeSignal& operator=(const WakeSignal&) = delete;
  [[nodiscard]] int descriptor() const noexcept { return descriptor_; }
  void raise() noexcept;
  /// Lowers the flag; never blocks.
  void lower() noexcept;
  void wait() noexcept;
  /// Likewise, but no longer than until *end*.
  void wait_until(std::chrono::steady_clock::time_point end) noexcept;

 private:
  int descriptor_;
};

/// A kernel interface, made for one worker thread and used by it alone.
class Backend {
 public:
  virtual ~Backend() = default;

  /// The most transfers that may be under way.
  [[nodiscard]] virtual std::uint32_t depth() const noexcept = 0;

  /// Starts transfers in order. Returns how many were accepted; where that is not all of them, *error* says why the next one was not, as an
  /// errno. The refused ones were not started.
  virtual std::size_t submit(const Transfer* const* transfers, std::size_t count, int& error) = 0;

  /// Appends what has completed to *completions*. With *wait*, first waits for a completion or for the wake signal that the backend was made
  /// with, which it lowers. Returns 0 or an errno.
  virtual int reap(std::vector<Completion>& completions, bool wait) = 0;

  /// Offers memory that many transfers will use, for the kernel to pin once. Returns the bytes that it did.
  virtual std::size_t register_memory(std::byte* data, std::size_t nbytes) {
    (void)data, (void)nbytes;
    return 0;
  }
};

/// Makes the backend called *name*, which *wake* must outlive. Throws Unsupported where this kernel or build lacks it, Misuse for a name that nobody has.
std::unique_ptr<Backend> make_backend(const std::string& name, std::uint32_t queue_depth, WakeSignal& wake);

std::unique_ptr<Backend> make_libaio_backend(std::uint32_t queue_depth, WakeSignal& wake);
std::unique_ptr<Backend> make_posix_backend(WakeSignal& wake);
/// *name* is "null", or "null:" and the bytes a second that each worker's drive reads, ":" and those that it writes.
std::unique_ptr<Backend> make_null_backend(const std::string& name, std::uint32_t queue_depth, WakeSignal& wake);
#ifdef NVME_OFFLOAD_HAVE_URING
std::unique_ptr<Backend> make_uring_backend(std::uint32_t queue_depth, WakeSignal& wake);
#endif

}  // namespace nvme_offload
