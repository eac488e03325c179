#include <unistd.h>

#include <cerrno>
#include <optional>

#include "backend.h"

namespace nvme_offload {
namespace {

/// pread and pwrite, one at a time. Works on any filesystem; the reference for the other backends.
class PosixBackend final : public Backend {
 public:
  explicit PosixBackend(WakeSignal& wake) : wake_(wake) {}

  [[nodiscard]] std::uint32_t depth() const noexcept override { return 1; }

  std::size_t submit(const Transfer* const* transfers, std::size_t count, int& error) override {
    if (count == 0) return 0;
    if (completed_) {
      error = EAGAIN;
      return 0;
    }
    const Transfer& transfer = *transfers[0];
    const auto offset = static_cast<off_t>(transfer.offset);
    const ssize_t moved =
        transfer.operation == Operation::read
            ? ::pread(transfer.descriptor, transfer.data, transfer.nbytes, offset)
            : ::pwrite(transfer.descriptor, transfer.data, transfer.nbytes, offset);
    completed_ = Completion{transfer.slot, moved < 0 ? -errno : moved};
    return 1;
  }

  int reap(std::vector<Completion>& completions, bool wait) override {
    if (completed_) {
      completions.push_back(*completed_);
      completed_.reset();
    } else if (wait) {
      wake_.wait();
    }
    return 0;
  }

 private:
  std::optional<Completion> completed_;
  WakeSignal& wake_;
};

}  // namespace

std::unique_ptr<Backend> make_posix_backend(WakeSignal& wake) {
  return std::make_unique<PosixBackend>(wake);
}

}  // namespace nvme_offload
