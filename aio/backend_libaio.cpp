#include <linux/aio_abi.h>
#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <ctime>
#include <string>

#include "backend.h"
#include "failure.h"

namespace nvme_offload {
namespace {

/// The start of the ring of completions, at the address that io_setup returns. Source: struct
/// aio_ring in fs/aio.c; libaio's io_getevents relies on it, too.
struct CompletionRing {
  std::uint32_t id;
  std::uint32_t count;
  std::atomic<std::uint32_t> head;
  std::atomic<std::uint32_t> tail;
  std::uint32_t magic;
};
constexpr std::uint32_t kRingMagic = 0xa10a10a1;

[[noreturn]] void refuse(const char* system_call, int error) {
  throw Unsupported("native AIO is refused here: " + std::string(system_call) + ": " +
                    std::strerror(error) +
                    ", by the kernel or by the container's seccomp profile; use "
                    "backend=\"posix\"");
}

/// Linux native AIO, called "libaio" like the library that others use it through; the library only
/// wraps these system calls. The wake signal is polled in the same queue (Linux 4.18), so one
/// system call waits for completions and for new work.
class LibaioBackend final : public Backend {
 public:
  LibaioBackend(std::uint32_t queue_depth, WakeSignal& wake)
      : wake_(wake),
        control_blocks_(queue_depth),
        submission_(queue_depth),
        events_(queue_depth + 1) {
    if (::syscall(SYS_io_setup, static_cast<long>(queue_depth + 1), &context_) != 0) {
      if (errno == EAGAIN) {
        throw Unsupported("the kernel has no room for " + std::to_string(queue_depth) +
                          " more asynchronous I/O events: raise fs.aio-max-nr (sysctl -w "
                          "fs.aio-max-nr=1048576), lower queue_depth or "
                          "thread_count, or use backend=\"posix\"");
      }
      if (errno == ENOMEM) throw SystemFailure("io_setup", "libaio", errno);
      refuse("io_setup", errno);
    }
    try {
      // Each system call is tried here, because a transfer could not be taken back later.
      if (!arm()) {
        if (errno != EINVAL) refuse("io_submit", errno);
        throw Unsupported(
            "this kernel's native AIO cannot poll (it is older than Linux 4.18): use "
            "backend=\"posix\"");
      }
      timespec at_once{0, 0};
      if (::syscall(SYS_io_getevents, context_, 0L, 0L, nullptr, &at_once) < 0 && errno != EINTR)
        refuse("io_getevents", errno);
    } catch (...) {
      destroy();
      throw;
    }
  }

  ~LibaioBackend() override { destroy(); }
  LibaioBackend(const LibaioBackend&) = delete;
  LibaioBackend& operator=(const LibaioBackend&) = delete;

  [[nodiscard]] std::uint32_t depth() const noexcept override {
    return static_cast<std::uint32_t>(control_blocks_.size());
  }

  std::size_t submit(const Transfer* const* transfers, std::size_t count, int& error) override {
    for (std::size_t i = 0; i < count; ++i) {
      const Transfer& transfer = *transfers[i];
      iocb& block = control_blocks_[transfer.slot];
      block = iocb{};
      block.aio_data = transfer.slot;
      block.aio_lio_opcode =
          transfer.operation == Operation::read ? IOCB_CMD_PREAD : IOCB_CMD_PWRITE;
      block.aio_fildes = static_cast<std::uint32_t>(transfer.descriptor);
      block.aio_buf = reinterpret_cast<std::uintptr_t>(transfer.data);
      block.aio_nbytes = transfer.nbytes;
      block.aio_offset = static_cast<std::int64_t>(transfer.offset);
      submission_[i] = &block;
    }
    std::size_t accepted = 0;
    // io_submit may accept some, and report only at the next call why it stopped
    while (accepted < count) {
      const long result =
          ::syscall(SYS_io_submit, context_, count - accepted, submission_.data() + accepted);
      if (result < 0 && errno == EINTR) continue;
      if (result <= 0) {
        error = result == 0 ? EAGAIN : errno;
        break;
      }
      accepted += static_cast<std::size_t>(result);
    }
    return accepted;
  }

  int reap(std::vector<Completion>& completions, bool wait) override {
    // without the poll a wait could miss new work
    const int arming = wait && !armed_ && !arm() ? EAGAIN : 0;
    if (arming != 0) wait = false;
    if (!wait && is_empty()) return arming;
    timespec at_once{0, 0};
    long count = 0;
    do {
      count = ::syscall(SYS_io_getevents, context_, wait ? 1L : 0L, events_.size(), events_.data(),
                        wait ? nullptr : &at_once);
    } while (count < 0 && errno == EINTR);
    if (count < 0) return errno;
    for (std::size_t i = 0; i < static_cast<std::size_t>(count); ++i) {
      if (events_[i].data == kWake) {
        armed_ = false;
        wake_.lower();
      } else {
        completions.push_back({static_cast<std::uint32_t>(events_[i].data), events_[i].res});
      }
    }
    return arming;
  }

 private:
  // aio_data of the poll on the wake signal; a transfer has the number of its slot
  static constexpr std::uint64_t kWake = UINT64_MAX;

  bool arm() {
    poll_block_ = iocb{};
    poll_block_.aio_data = kWake;
    poll_block_.aio_lio_opcode = IOCB_CMD_POLL;
    poll_block_.aio_fildes = static_cast<std::uint32_t>(wake_.descriptor());
    poll_block_.aio_buf = POLLIN;
    iocb* blocks[] = {&poll_block_};
    armed_ = ::syscall(SYS_io_submit, context_, 1L, blocks) == 1;
    return armed_;
  }

  /// Whether no completion waits, by a look at the ring instead of a system call.
  [[nodiscard]] bool is_empty() const {
    const auto* ring = reinterpret_cast<const CompletionRing*>(context_);
    return ring->magic == kRingMagic &&
           ring->head.load(std::memory_order_relaxed) == ring->tail.load(std::memory_order_acquire);
  }

  void destroy() { ::syscall(SYS_io_destroy, context_); }

  WakeSignal& wake_;
  aio_context_t context_ = 0;
  iocb poll_block_{};
  bool armed_ = false;
  std::vector<iocb> control_blocks_;
  std::vector<iocb*> submission_;
  std::vector<io_event> events_;
};

}  // namespace

std::unique_ptr<Backend> make_libaio_backend(std::uint32_t queue_depth, WakeSignal& wake) {
  return std::make_unique<LibaioBackend>(queue_depth, wake);
}

}  // namespace nvme_offload
