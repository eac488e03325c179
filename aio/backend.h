#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "request.h"

namespace nvme_offload {

/// One pread or pwrite for the kernel.
struct Transfer {
  Operation operation = Operation::read;
  const std::shared_ptr<File>* file = nullptr;  // the request's; valid until the transfer completes
  int descriptor = -1;                          // one of the file's descriptors
  std::byte* data = nullptr;
  std::size_t nbytes = 0;
  std::uint64_t offset = 0;
  // less than depth(), unique among transfers in flight: the index for a backend's own state
  std::uint32_t slot = 0;
};

/// The result of a transfer: the bytes moved, possibly fewer than asked for, or a negative errno.
struct Completion {
  std::uint32_t slot = 0;
  std::int64_t result = 0;
};

/// An eventfd: a flag that other threads raise, and that a kernel queue can poll together with its
/// completions.
class WakeSignal {
 public:
  WakeSignal();
  ~WakeSignal();
  WakeSignal(const WakeSignal&) = delete;
  WakeSignal& operator=(const WakeSignal&) = delete;
  [[nodiscard]] int descriptor() const noexcept { return descriptor_; }
  void raise() noexcept;
  /// Lowers the flag. Never blocks.
  void lower() noexcept;
  /// Waits until the flag is raised, and lowers it. May return early.
  void wait() noexcept;
  /// As wait(), but at most until *end*.
  void wait_until(std::chrono::steady_clock::time_point end) noexcept;

 private:
  int descriptor_;
};

/// A kernel interface, used by one worker thread only.
class Backend {
 public:
  virtual ~Backend() = default;

  /// The maximum number of transfers in flight.
  [[nodiscard]] virtual std::uint32_t depth() const noexcept = 0;

  /// Submits transfers in order. Returns how many were accepted; if not all, *error* is the errno
  /// of the next one. The others were not started.
  virtual std::size_t submit(const Transfer* const* transfers, std::size_t count, int& error) = 0;

  /// Appends completed transfers to *completions*. With *wait*, first waits for a completion or for
  /// the wake signal, which it lowers. Returns 0 or an errno.
  virtual int reap(std::vector<Completion>& completions, bool wait) = 0;
};

/// Makes the backend *name*; *wake* must outlive it. Throws Unsupported where this kernel lacks
/// it, Misuse for an unknown name.
std::unique_ptr<Backend> make_backend(const std::string& name, std::uint32_t queue_depth,
                                      WakeSignal& wake);

std::unique_ptr<Backend> make_libaio_backend(std::uint32_t queue_depth, WakeSignal& wake);
std::unique_ptr<Backend> make_posix_backend(WakeSignal& wake);
std::unique_ptr<Backend> make_uring_backend(std::uint32_t queue_depth, WakeSignal& wake);

}  // namespace nvme_offload
