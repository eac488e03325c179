#include "ring.h"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

namespace nvme_offload {
namespace {

// the same on every architecture; libc's headers may be older than they are
constexpr long kSetup = 425;
constexpr long kEnter = 426;
constexpr long kRegister = 427;

constexpr std::uint32_t kDisabled = 1U << 6;       // IORING_SETUP_R_DISABLED
constexpr std::uint32_t kSingleIssuer = 1U << 12;  // IORING_SETUP_SINGLE_ISSUER
constexpr std::uint32_t kDeferTaskrun = 1U << 13;  // IORING_SETUP_DEFER_TASKRUN
constexpr std::uint32_t kGetEvents = 1U << 0;      // IORING_ENTER_GETEVENTS
constexpr std::uint32_t kSparse = 1U << 0;         // IORING_RSRC_REGISTER_SPARSE
constexpr long kRegisterFilesUpdate = 6;
constexpr long kRegisterProbe = 8;
constexpr long kRegisterEnableRings = 12;
constexpr long kRegisterFiles2 = 13;
constexpr off_t kRings = 0;               // IORING_OFF_SQ_RING
constexpr off_t kEntries = 0x10'000'000;  // IORING_OFF_SQES

/// struct io_sqring_offsets and struct io_cqring_offsets, which differ in their last fields.
struct Offsets {
  std::uint32_t head, tail, mask, count;
  std::uint32_t various[4];
  std::uint64_t user_address;
};

/// struct io_uring_params
struct Parameters {
  std::uint32_t entries, results, flags, thread_cpu, thread_idle, features, worker_queue;
  std::uint32_t reserved[3];
  Offsets entry;   // various[2]: the array of indices
  Offsets result;  // various[1]: the completions
};
static_assert(sizeof(Parameters) == 120);

/// struct io_uring_rsrc_register
struct FileTableRequest {
  std::uint32_t count, flags;
  std::uint64_t reserved, data, tags;
};

/// struct io_uring_files_update
struct FileUpdate {
  std::uint32_t place, reserved;
  std::uint64_t descriptors;
};

std::byte* map(int descriptor, std::size_t nbytes, off_t part) {
  void* mapping =
      ::mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, descriptor, part);
  return mapping == MAP_FAILED ? nullptr : static_cast<std::byte*>(mapping);
}

}  // namespace

int Ring::set_up(std::uint32_t entries) {
  // With SINGLE_ISSUER and DEFER_TASKRUN, completions are processed when the worker asks for them
  // (Linux 6.1). The ring starts disabled, because its creator is not the thread that uses it.
  // Older kernels get a plain ring.
  int error = set_up(entries, kSingleIssuer | kDeferTaskrun | kDisabled);
  if (error == EINVAL) error = set_up(entries, kDisabled);
  return error != 0 ? error : error_of_refused_calls();
}

/// The errno of a system call that a container refuses although it allows io_uring_setup, or 0.
int Ring::error_of_refused_calls() const {
  std::uint64_t no_operations[2] = {};
  if (::syscall(kRegister, static_cast<long>(descriptor_), kRegisterProbe, no_operations, 0L) != 0)
    return errno;
  const long entered = ::syscall(kEnter, static_cast<long>(descriptor_), 0L, 0L, 0L, nullptr, 0L);
  const bool refused = entered < 0 && (errno == EPERM || errno == EACCES || errno == ENOSYS);
  return refused ? errno : 0;  // another error: the ring is not enabled yet
}

int Ring::set_up(std::uint32_t entries, std::uint32_t flags) {
  Parameters made{};
  made.flags = flags;
  descriptor_ = static_cast<int>(::syscall(kSetup, static_cast<long>(entries), &made));
  if (descriptor_ < 0) return errno;
  // One mapping has both rings (Linux 5.4; disabled rings are newer).
  const std::size_t array = made.entry.various[2];
  const std::size_t results = made.result.various[1];
  rings_bytes_ = std::max(array + made.entries * sizeof(std::uint32_t),
                          results + made.results * sizeof(Result));
  rings_ = map(descriptor_, rings_bytes_, kRings);
  if (rings_ == nullptr) return errno;
  entries_bytes_ = made.entries * sizeof(Entry);
  entries_ = reinterpret_cast<Entry*>(map(descriptor_, entries_bytes_, kEntries));
  if (entries_ == nullptr) return errno;
  const auto field = [this](std::size_t offset) {
    return reinterpret_cast<std::uint32_t*>(rings_ + offset);
  };
  entry_head_ = field(made.entry.head);
  entry_tail_ = field(made.entry.tail);
  entry_mask_ = *field(made.entry.mask);
  // the index of each place of the ring is its own
  for (std::uint32_t i = 0; i < made.entries; ++i) field(array)[i] = i;
  result_head_ = field(made.result.head);
  result_tail_ = field(made.result.tail);
  result_mask_ = *field(made.result.mask);
  results_ = reinterpret_cast<const Result*>(rings_ + results);
  return 0;
}

Ring::~Ring() {
  if (entries_ != nullptr) ::munmap(entries_, entries_bytes_);
  if (rings_ != nullptr) ::munmap(rings_, rings_bytes_);
  if (descriptor_ >= 0) ::close(descriptor_);
}

int Ring::enable() {
  return ::syscall(kRegister, static_cast<long>(descriptor_), kRegisterEnableRings, nullptr, 0L) < 0
             ? errno
             : 0;
}

Ring::Entry& Ring::prepare() {
  Entry& entry = entries_[(*entry_tail_ + prepared_) & entry_mask_];
  prepared_ += 1;
  return entry = Entry{};
}

int Ring::enter(Wait wait, std::uint32_t& refused) {
  const std::uint32_t tail = *entry_tail_ + prepared_;
  __atomic_store_n(entry_tail_, tail, __ATOMIC_RELEASE);
  const long result =
      ::syscall(kEnter, static_cast<long>(descriptor_), static_cast<long>(prepared_),
                wait == Wait::for_one ? 1L : 0L,
                wait == Wait::none ? 0L : static_cast<long>(kGetEvents), nullptr, 0L);
  const int error = result < 0 ? errno : 0;
  prepared_ = 0;
  // The kernel reads the ring only inside this call, so refused entries can be taken back.
  const std::uint32_t head = __atomic_load_n(entry_head_, __ATOMIC_ACQUIRE);
  refused = tail - head;
  __atomic_store_n(entry_tail_, head, __ATOMIC_RELEASE);
  return error;
}

bool Ring::register_files(std::uint32_t count) {
  FileTableRequest request{};
  request.count = count;
  request.flags = kSparse;
  return ::syscall(kRegister, static_cast<long>(descriptor_), kRegisterFiles2, &request,
                   sizeof request) >= 0;
}

bool Ring::register_file(std::uint32_t place, int descriptor) {
  FileUpdate update{};
  update.place = place;
  update.descriptors = reinterpret_cast<std::uintptr_t>(&descriptor);
  return ::syscall(kRegister, static_cast<long>(descriptor_), kRegisterFilesUpdate, &update, 1L) >=
         0;
}

}  // namespace nvme_offload
