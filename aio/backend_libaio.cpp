#include <libaio.h>
#include <poll.h>

#include <cerrno>
#include <string>

#include "backend.h"
#include "failure.h"

namespace nvme_offload {
namespace {

/// Linux native AIO. The wake signal is polled in the same queue (Linux 4.18), so one system call
/// waits for completions and for new work.
class LibaioBackend final : public Backend {
 public:
  LibaioBackend(std::uint32_t queue_depth, WakeSignal& wake)
      : wake_(wake),
        control_blocks_(queue_depth),
        submission_(queue_depth),
        events_(queue_depth + 1) {
    const int result = ::io_setup(static_cast<int>(queue_depth + 1), &context_);
    if (result == -EAGAIN) {
      throw Unsupported("the kernel has no room for " + std::to_string(queue_depth) +
                        " more asynchronous I/O events: raise fs.aio-max-nr (sysctl -w "
                        "fs.aio-max-nr=1048576), lower queue_depth or "
                        "thread_count, or use backend=\"posix\"");
    }
    if (result == -ENOSYS)
      throw Unsupported(
          "this kernel or container has no native AIO (io_setup): use backend=\"posix\"");
    if (result < 0) throw SystemFailure("io_setup", "libaio", -result);
    if (!arm()) {
      ::io_destroy(context_);
      throw Unsupported(
          "this kernel's native AIO cannot poll (it is older than Linux 4.18): use "
          "backend=\"posix\"");
    }
  }

  ~LibaioBackend() override { ::io_destroy(context_); }
  LibaioBackend(const LibaioBackend&) = delete;
  LibaioBackend& operator=(const LibaioBackend&) = delete;

  [[nodiscard]] std::uint32_t depth() const noexcept override {
    return static_cast<std::uint32_t>(control_blocks_.size());
  }

  std::size_t submit(const Transfer* const* transfers, std::size_t count, int& error) override {
    for (std::size_t i = 0; i < count; ++i) {
      const Transfer& transfer = *transfers[i];
      iocb& block = control_blocks_[transfer.slot];
      const auto offset = static_cast<long long>(transfer.offset);
      if (transfer.operation == Operation::read) {
        ::io_prep_pread(&block, transfer.descriptor, transfer.data, transfer.nbytes, offset);
      } else {
        ::io_prep_pwrite(&block, transfer.descriptor, transfer.data, transfer.nbytes, offset);
      }
      submission_[i] = &block;
    }
    std::size_t accepted = 0;
    // io_submit may accept some, and report only at the next call why it stopped
    while (accepted < count) {
      const int result =
          ::io_submit(context_, static_cast<long>(count - accepted), submission_.data() + accepted);
      if (result == -EINTR) continue;
      if (result <= 0) {
        error = result == 0 ? EAGAIN : -result;
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
    timespec at_once{0, 0};
    int count = 0;
    do {
      count = ::io_getevents(context_, wait ? 1 : 0, static_cast<long>(events_.size()),
                             events_.data(), wait ? nullptr : &at_once);
    } while (count == -EINTR);
    if (count < 0) return -count;
    for (int i = 0; i < count; ++i) {
      const io_event& event = events_[static_cast<std::size_t>(i)];
      if (event.obj == &poll_block_) {
        armed_ = false;
        wake_.lower();
      } else {
        // res is signed, though io_event declares it unsigned; reads and writes do not use res2.
        completions.push_back({static_cast<std::uint32_t>(event.obj - control_blocks_.data()),
                               static_cast<std::int64_t>(event.res)});
      }
    }
    return arming;
  }

 private:
  bool arm() {
    ::io_prep_poll(&poll_block_, wake_.descriptor(), POLLIN);
    iocb* blocks[] = {&poll_block_};
    armed_ = ::io_submit(context_, 1, blocks) == 1;
    return armed_;
  }

  WakeSignal& wake_;
  io_context_t context_ = nullptr;
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
