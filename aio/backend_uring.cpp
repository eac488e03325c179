#ifdef NVME_OFFLOAD_HAVE_URING

#include <liburing.h>
#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <string>

#include "backend.h"
#include "failure.h"

namespace nvme_offload {
namespace {

// user data of the poll on the wake signal; that of a transfer is its slot
constexpr std::uint64_t kWake = UINT64_MAX;

/// Registered files: the kernel then needs no descriptor lookup per transfer.
///
/// The kernel holds a registered file open. So a file is unregistered when nobody else holds it,
/// and all are while the worker sleeps.
class FileTable {
 public:
  /// Does nothing where the kernel cannot register single files (before Linux 5.19).
  void enable(io_uring* ring) {
    ring_ = ::io_uring_register_files_sparse(ring, kSize) == 0 ? ring : nullptr;
  }

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

  /// Unregisters files that no transfer uses and nobody else holds; with *all*, also held ones.
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
    const int descriptor = registered ? entry.descriptor : -1;
    if (::io_uring_register_files_update(ring_, static_cast<unsigned>(place_of(entry)), &descriptor,
                                         1) < 0)
      return false;
    entry.registered = registered;
    return true;
  }

  [[nodiscard]] int place_of(const Entry& entry) const {
    return static_cast<int>(&entry - entries_.data());
  }

  io_uring* ring_ = nullptr;
  std::array<Entry, kSize> entries_;
};

/// Registered memory, pinned once, in regions of the largest size that the kernel accepts as one
/// buffer.
class MemoryTable {
 public:
  /// Returns the bytes registered: none before Linux 5.19, and as RLIMIT_MEMLOCK allows.
  std::size_t add(io_uring* ring, std::byte* data, std::size_t nbytes) {
    if (regions_.empty() && ::io_uring_register_buffers_sparse(ring, kSize) != 0) return 0;
    std::size_t added = 0;
    while (added < nbytes && regions_.size() < kSize) {
      const iovec region{data + added, std::min(nbytes - added, kLargestRegion)};
      if (::io_uring_register_buffers_update_tag(ring, static_cast<unsigned>(regions_.size()),
                                                 &region, nullptr, 1) != 1)
        break;
      regions_.push_back(region);
      added += region.iov_len;
    }
    return added;
  }

  /// The region that contains the range, or -1.
  [[nodiscard]] int find(const std::byte* data, std::size_t nbytes) const {
    for (std::size_t i = 0; i < regions_.size(); ++i) {
      const auto* start = static_cast<const std::byte*>(regions_[i].iov_base);
      if (data >= start && data + nbytes <= start + regions_[i].iov_len) return static_cast<int>(i);
    }
    return -1;
  }

 private:
  static constexpr std::size_t kLargestRegion = std::size_t{1} << 30;
  static constexpr unsigned kSize = 512;

  std::vector<iovec> regions_;
};

/// io_uring. Between two calls the submission ring is empty: entries that the kernel did not accept
/// are taken back.
class UringBackend final : public Backend {
 public:
  UringBackend(std::uint32_t queue_depth, WakeSignal& wake)
      : wake_(wake), places_(queue_depth, -1) {
    // With SINGLE_ISSUER and DEFER_TASKRUN, completions are processed when the worker asks for them
    // (Linux 6.1). The ring starts disabled, because its creator is not the thread that uses it.
    // Older kernels get a plain ring.
    constexpr unsigned kSingleIssuer =
        IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN | IORING_SETUP_R_DISABLED;
    int result = set_up(queue_depth + 1, kSingleIssuer);
    if (result == -EINVAL) result = set_up(queue_depth + 1, IORING_SETUP_R_DISABLED);
    if (result == -ENOSYS || result == -EPERM || result == -EACCES) {
      throw Unsupported("io_uring is refused here (" + std::string(std::strerror(-result)) +
                        "): by the kernel (sysctl kernel.io_uring_disabled) or by the container's "
                        "seccomp profile; use backend=\"libaio\"");
    }
    if (result == -ENOMEM) {
      throw Unsupported("there is no locked memory left for an io_uring of depth " +
                        std::to_string(queue_depth) +
                        ": raise the limit (ulimit -l), lower queue_depth or thread_count, or use "
                        "backend=\"libaio\"");
    }
    if (result < 0) throw SystemFailure("io_uring_setup", "io_uring", -result);
  }

  ~UringBackend() override { ::io_uring_queue_exit(&ring_); }
  UringBackend(const UringBackend&) = delete;
  UringBackend& operator=(const UringBackend&) = delete;

  [[nodiscard]] std::uint32_t depth() const noexcept override {
    return static_cast<std::uint32_t>(places_.size());
  }

  std::size_t submit(const Transfer* const* transfers, std::size_t count, int& error) override {
    if ((error = enable()) != 0) return 0;
    // the ring has an entry for each slot
    for (std::size_t i = 0; i < count; ++i) prepare(*transfers[i]);
    const int result = ::io_uring_submit(&ring_);
    const std::size_t accepted = count - take_back();
    for (std::size_t i = accepted; i < count; ++i) release(transfers[i]->slot);
    if (accepted < count) error = result < 0 ? -result : EAGAIN;
    return accepted;
  }

  int reap(std::vector<Completion>& completions, bool wait) override {
    int error = enable();
    files_.forget_unused(wait && in_flight_ == 0);
    if (error == 0) {
      if (wait && !armed_) arm();
      const int result =
          wait ? ::io_uring_submit_and_wait(&ring_, 1) : ::io_uring_submit_and_get_events(&ring_);
      if (result < 0 && result != -EINTR) error = -result;
      if (take_back() > 0) {
        armed_ = false;
        if (error == 0) error = EAGAIN;  // without the poll a wait could miss new work
      }
    }
    if (error != 0 && in_flight_ == 0) {
      if (wait) wake_.wait();
      return 0;
    }
    unsigned head = 0;
    unsigned seen = 0;
    io_uring_cqe* entry = nullptr;
    io_uring_for_each_cqe(&ring_, head, entry) {
      seen += 1;
      if (entry->user_data == kWake) {
        armed_ = false;
        wake_.lower();
      } else {
        const auto slot = static_cast<std::uint32_t>(entry->user_data);
        release(slot);
        completions.push_back({slot, entry->res});
      }
    }
    ::io_uring_cq_advance(&ring_, seen);
    return error;
  }

  std::size_t register_memory(std::byte* data, std::size_t nbytes) override {
    return enable() == 0 ? memory_.add(&ring_, data, nbytes) : 0;
  }

 private:
  int set_up(unsigned entries, unsigned flags) {
    io_uring_params parameters{};
    parameters.flags = flags;
    return ::io_uring_queue_init_params(entries, &ring_, &parameters);
  }

  /// Called by the worker: a single-issuer ring belongs to the thread that enables it. Returns 0 or
  /// an errno.
  int enable() {
    if (enabled_) return 0;
    // Not io_uring_enable_rings(): the shared library of liburing 2.3 (Debian 12) does not export
    // it.
    if (::syscall(SYS_io_uring_register, ring_.ring_fd, IORING_REGISTER_ENABLE_RINGS, nullptr, 0) !=
        0)
      return errno;
    enabled_ = true;
    files_.enable(&ring_);
    return 0;
  }

  void prepare(const Transfer& transfer) {
    io_uring_sqe* entry = ::io_uring_get_sqe(&ring_);
    const int place = files_.acquire(*transfer.file, transfer.descriptor);
    const int file = place >= 0 ? place : transfer.descriptor;
    const auto nbytes = static_cast<unsigned>(transfer.nbytes);
    const int region = memory_.find(transfer.data, transfer.nbytes);
    if (transfer.operation == Operation::read) {
      region >= 0
          ? ::io_uring_prep_read_fixed(entry, file, transfer.data, nbytes, transfer.offset, region)
          : ::io_uring_prep_read(entry, file, transfer.data, nbytes, transfer.offset);
    } else {
      region >= 0
          ? ::io_uring_prep_write_fixed(entry, file, transfer.data, nbytes, transfer.offset, region)
          : ::io_uring_prep_write(entry, file, transfer.data, nbytes, transfer.offset);
    }
    if (place >= 0) ::io_uring_sqe_set_flags(entry, IOSQE_FIXED_FILE);
    ::io_uring_sqe_set_data64(entry, transfer.slot);
    places_[transfer.slot] = place;
    in_flight_ += 1;
  }

  void arm() {
    io_uring_sqe* entry = ::io_uring_get_sqe(&ring_);
    ::io_uring_prep_poll_add(entry, wake_.descriptor(), POLLIN);
    ::io_uring_sqe_set_data64(entry, kWake);
    armed_ = true;
  }

  /// Removes the entries that the kernel has not accepted from the submission ring, which it reads
  /// only inside io_uring_enter. Returns their number.
  unsigned take_back() {
    io_uring_sq& ring = ring_.sq;
    const unsigned head = *ring.khead;
    const unsigned refused = ring.sqe_tail - head;
    ring.sqe_head = ring.sqe_tail = *ring.ktail = head;
    return refused;
  }

  void release(std::uint32_t slot) {
    files_.release(places_[slot]);
    in_flight_ -= 1;
  }

  WakeSignal& wake_;
  io_uring ring_{};
  FileTable files_;
  MemoryTable memory_;
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

#endif
