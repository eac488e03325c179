#include <poll.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <string>

#include "backend.h"
#include "failure.h"
#include "ring.h"

namespace nvme_offload {
namespace {

// tag of the poll on the wake signal; a transfer has the number of its slot
constexpr std::uint64_t kWake = UINT64_MAX;

/// Registered files: the kernel then needs no descriptor lookup per transfer.
///
/// The kernel holds a registered file open. So a file is unregistered when no other owner is left,
/// and all are while the worker sleeps.
class FileTable {
 public:
  /// Does nothing where the kernel cannot register single files (before Linux 5.19).
  void enable(Ring& ring) { ring_ = ring.register_files(kSize) ? &ring : nullptr; }

  /// The index of the registered descriptor, for one transfer and until release(); -1 where it is
  /// not registered.
  int acquire(const std::shared_ptr<File>& file, int descriptor) {
    if (ring_ == nullptr) return -1;
    Entry* vacant = nullptr;
    for (Entry& entry : entries_) {
      if (entry.descriptor == descriptor && !entry.file.owner_before(file) &&
          !file.owner_before(entry.file)) {
        entry.seen += 1;
        if (entry.seen < kWorthIt || (!entry.registered && !set(entry, true))) return -1;
        entry.uses += 1;
        return place_of(entry);
      }
      if (entry.descriptor < 0) vacant = &entry;
    }
    if (vacant != nullptr) *vacant = Entry{descriptor, file, 1, 0, false};
    return -1;
  }

  void release(int place) {
    if (place >= 0) entries_[static_cast<std::size_t>(place)].uses -= 1;
  }

  /// Unregisters files that no transfer uses and that have no other owner; with *all*, also files
  /// with other owners.
  void forget_unused(bool all) {
    for (Entry& entry : entries_) {
      if (entry.descriptor < 0 || entry.uses > 0 || !(all || entry.file.expired())) continue;
      if (entry.registered && !set(entry, false)) continue;
      entry = Entry{};
    }
  }

 private:
  static constexpr std::uint32_t kSize = 16;
  // transfers after which registering, two system calls, pays off
  static constexpr std::uint32_t kWorthIt = 8;

  struct Entry {
    int descriptor = -1;
    std::weak_ptr<File> file;  // distinguishes it from a later file with the same descriptor
    std::uint32_t seen = 0;    // transfers so far
    std::uint32_t uses = 0;    // transfers in flight
    bool registered = false;
  };

  bool set(Entry& entry, bool registered) {
    const auto place = static_cast<std::uint32_t>(place_of(entry));
    if (!ring_->register_file(place, registered ? entry.descriptor : -1)) return false;
    entry.registered = registered;
    return true;
  }

  [[nodiscard]] int place_of(const Entry& entry) const {
    return static_cast<int>(&entry - entries_.data());
  }

  Ring* ring_ = nullptr;
  std::array<Entry, kSize> entries_;
};

/// io_uring. The wake signal is polled in the same ring, so one system call waits for completions
/// and for new work.
class UringBackend final : public Backend {
 public:
  UringBackend(std::uint32_t queue_depth, WakeSignal& wake)
      : wake_(wake), places_(queue_depth, -1) {
    const int error = ring_.set_up(queue_depth + 1);
    if (error == 0) return;
    if (error == EMFILE || error == ENFILE)
      throw SystemFailure("io_uring_setup", "io_uring", error);
    if (error == ENOMEM) {
      throw Unsupported("there is no locked memory left for an io_uring of depth " +
                        std::to_string(queue_depth) +
                        ": raise the limit (ulimit -l), lower queue_depth or thread_count, or use "
                        "backend=\"libaio\"");
    }
    throw Unsupported("io_uring is refused here (" + std::string(std::strerror(error)) +
                      "): by the kernel (sysctl kernel.io_uring_disabled; it must be Linux 5.10 or "
                      "newer) or by the container's seccomp profile; use backend=\"libaio\"");
  }

  [[nodiscard]] std::uint32_t depth() const noexcept override {
    return static_cast<std::uint32_t>(places_.size());
  }

  std::size_t submit(const Transfer* const* transfers, std::size_t count, int& error) override {
    if ((error = enable()) != 0) return 0;
    // the ring has an entry for each slot
    for (std::size_t i = 0; i < count; ++i) prepare(*transfers[i]);
    std::uint32_t refused = 0;
    error = ring_.enter(Ring::Wait::none, refused);
    if (error == 0 || error == EINTR) error = EAGAIN;
    for (std::size_t i = count - refused; i < count; ++i) release(transfers[i]->slot);
    return count - refused;
  }

  int reap(std::vector<Completion>& completions, bool wait) override {
    int error = enable();
    files_.forget_unused(wait && in_flight_ == 0);
    if (error == 0) {
      if (wait && !armed_) arm();
      std::uint32_t refused = 0;
      error = ring_.enter(wait ? Ring::Wait::for_one : Ring::Wait::not_at_all, refused);
      if (error == EINTR) error = 0;
      if (refused > 0) {
        armed_ = false;
        if (error == 0) error = EAGAIN;  // without the poll a wait could miss new work
      }
    }
    if (error != 0 && in_flight_ == 0) {
      if (wait) wake_.wait();
      return 0;
    }
    ring_.take_results([&](const Ring::Result& result) {
      if (result.tag == kWake) {
        armed_ = false;
        wake_.lower();
      } else {
        const auto slot = static_cast<std::uint32_t>(result.tag);
        release(slot);
        completions.push_back({slot, result.value});
      }
    });
    return error;
  }

 private:
  /// Called by the worker: the ring belongs to the thread that enables it. Returns 0 or an errno.
  int enable() {
    if (enabled_) return 0;
    if (const int error = ring_.enable()) return error;
    enabled_ = true;
    files_.enable(ring_);
    return 0;
  }

  void prepare(const Transfer& transfer) {
    const int place = files_.acquire(*transfer.file, transfer.descriptor);
    Ring::Entry& entry = ring_.prepare();
    entry.operation =
        transfer.operation == Operation::read ? Ring::Entry::kRead : Ring::Entry::kWrite;
    entry.flags = place >= 0 ? Ring::Entry::kRegisteredFile : 0;
    entry.file = place >= 0 ? place : transfer.descriptor;
    entry.address = reinterpret_cast<std::uintptr_t>(transfer.data);
    entry.nbytes = static_cast<std::uint32_t>(transfer.nbytes);
    entry.offset = transfer.offset;
    entry.tag = transfer.slot;
    places_[transfer.slot] = place;
    in_flight_ += 1;
  }

  void arm() {
    Ring::Entry& entry = ring_.prepare();
    entry.operation = Ring::Entry::kPoll;
    entry.file = wake_.descriptor();
    entry.poll_events = POLLIN;
    entry.tag = kWake;
    armed_ = true;
  }

  void release(std::uint32_t slot) {
    files_.release(places_[slot]);
    in_flight_ -= 1;
  }

  WakeSignal& wake_;
  Ring ring_;
  FileTable files_;
  std::vector<int> places_;  // by slot: the index of its registered file
  std::size_t in_flight_ = 0;
  bool enabled_ = false;
  bool armed_ = false;
};

}  // namespace

std::unique_ptr<Backend> make_uring_backend(std::uint32_t queue_depth, WakeSignal& wake) {
  return std::make_unique<UringBackend>(queue_depth, wake);
}

}  // namespace nvme_offload
