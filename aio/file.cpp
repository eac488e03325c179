#include "file.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>

#include "failure.h"

// O_DIRECT alignment from statx(2), since Linux 6.1; for older headers.
#ifndef STATX_DIOALIGN
#define STATX_DIOALIGN 0x00002000U
#endif

namespace nvme_offload {
namespace {

// if the kernel does not report one: no drive has larger logical blocks
constexpr std::uint64_t kFallbackAlignment = 4096;

// the known size of a block device, which is neither extended nor preallocated
constexpr std::uint64_t kUnlimited = UINT64_MAX;

/// struct statx as the kernel defines it: libc's may lack the fields for direct I/O.
struct KernelStatx {
  std::uint32_t mask;
  std::uint32_t unused[37];
  std::uint32_t dio_memory_alignment;  // byte 152
  std::uint32_t dio_offset_alignment;
  std::uint64_t spare[12];
};
static_assert(sizeof(KernelStatx) == 256);

int open_flags(Access access) {
  switch (access) {
    case Access::read:
      return O_RDONLY;
    case Access::write:
      return O_WRONLY;
    default:
      return O_RDWR;
  }
}

template <typename Call>
auto restarted(Call call) {
  auto result = call();
  while (result == -1 && errno == EINTR) result = call();
  return result;
}

/// Whether the filesystem lacks the system call, or a container refuses it.
bool is_refusal(int error) {
  return error == EPERM || error == EACCES || error == ENOSYS || error == EOPNOTSUPP;
}

/// Opens *path*. For writing, creates it where missing; sets *created* then. O_NONBLOCK keeps a
/// FIFO from blocking the open.
int open_or_create(const std::string& path, Access access, bool& created) {
  const int flags =
      open_flags(access) | O_CLOEXEC | O_NONBLOCK | (access == Access::read ? 0 : O_NOFOLLOW);
  created = false;
  for (;;) {
    int descriptor = restarted([&] { return ::open(path.c_str(), flags); });
    if (descriptor >= 0 || errno != ENOENT || access == Access::read) return descriptor;
    descriptor = restarted([&] { return ::open(path.c_str(), flags | O_CREAT | O_EXCL, 0600); });
    created = descriptor >= 0;
    if (descriptor >= 0 || errno != EEXIST) return descriptor;
    struct stat found{};
    if (::lstat(path.c_str(), &found) == 0 && S_ISLNK(found.st_mode)) {  // a dangling link
      errno = ELOOP;
      return -1;
    }
  }
}

/// A descriptor on *path* if that is still the file of *descriptor*, else -1.
int reopened(const std::string& path, int descriptor, int flags) {
  const int found =
      restarted([&] { return ::open(path.c_str(), flags | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK); });
  struct stat one{};
  struct stat other{};
  if (found < 0 || (::fstat(found, &one) == 0 && ::fstat(descriptor, &other) == 0 &&
                    one.st_dev == other.st_dev && one.st_ino == other.st_ino))
    return found;
  ::close(found);
  return -1;
}

bool is_memory_filesystem(int descriptor) {
  struct statfs filesystem{};
  if (::fstatfs(descriptor, &filesystem) != 0) return false;
  return filesystem.f_type == TMPFS_MAGIC || filesystem.f_type == RAMFS_MAGIC;
}

}  // namespace

std::shared_ptr<File> File::open(const std::string& path, Access access, Direct direct,
                                 std::uint64_t nbytes) {
  bool created = false;
  const int descriptor = open_or_create(path, access, created);
  if (descriptor < 0) {
    if (errno == ELOOP)
      throw Misuse(path +
                   " is a symbolic link, which is not followed for writing: name the file itself");
    throw SystemFailure("open", path, errno);
  }
  std::shared_ptr<File> file(new File(path, descriptor, access));
  try {
    file->configure(direct, nbytes);
  } catch (...) {
    if (created) ::unlink(path.c_str());
    throw;
  }
  return file;
}

std::shared_ptr<File> File::open_anonymous(const std::string& directory, Direct direct,
                                           std::uint64_t nbytes, bool padded) {
  int descriptor =
      restarted([&] { return ::open(directory.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600); });
  // no O_TMPFILE (NFS): create a named file and unlink it
  if (descriptor < 0 && (errno == EOPNOTSUPP || errno == EISDIR)) {
    std::string name = directory + "/.nvme-offload-XXXXXX";
    descriptor = ::mkostemp(name.data(), O_CLOEXEC);
    if (descriptor >= 0) ::unlink(name.c_str());
  }
  if (descriptor < 0) throw SystemFailure("open", directory, errno);
  std::shared_ptr<File> file(new File(directory + "/(anonymous)", descriptor, Access::read_write));
  file->padded_ = padded;
  file->configure(direct, nbytes);
  return file;
}

/// Checks the file's type, sets O_DIRECT and alignment, and preallocates.
void File::configure(Direct direct, std::uint64_t nbytes) {
  struct stat status{};
  if (::fstat(descriptor_, &status) != 0) throw SystemFailure("open", path(), errno);
  if (S_ISDIR(status.st_mode)) throw SystemFailure("open", path(), EISDIR);
  if (!S_ISREG(status.st_mode) && !S_ISBLK(status.st_mode))
    throw Misuse(path() + " is neither a regular file nor a block device");
  known_size_ = S_ISBLK(status.st_mode) ? kUnlimited : static_cast<std::uint64_t>(status.st_size);
  // with O_NONBLOCK io_uring returns EAGAIN instead of waiting
  const int flags = ::fcntl(descriptor_, F_GETFL) & ~O_NONBLOCK;
  ::fcntl(descriptor_, F_SETFL, flags);
  if (direct != Direct::off) {
    KernelStatx answer{};
    const bool told =
        ::syscall(SYS_statx, descriptor_, "", AT_EMPTY_PATH, STATX_DIOALIGN, &answer) == 0 &&
        (answer.mask & STATX_DIOALIGN) != 0;
    const bool refused = told && answer.dio_offset_alignment == 0;
    // tmpfs accepts O_DIRECT but uses the page cache. A block device is queried itself, though its
    // node is on devtmpfs.
    const bool in_memory = S_ISREG(status.st_mode) && is_memory_filesystem(descriptor_);
    direct_ = !refused && !in_memory && ::fcntl(descriptor_, F_SETFL, flags | O_DIRECT) == 0;
    if (!direct_ && direct == Direct::required) {
      throw Unsupported(
          "the filesystem of " + path() +
          " has no O_DIRECT: use another one, or direct=\"auto\" to go through the page cache");
    }
    const std::uint64_t fallback =
        std::max(kFallbackAlignment, static_cast<std::uint64_t>(status.st_blksize));
    if (direct_) memory_alignment_ = told ? answer.dio_memory_alignment : fallback;
    if (direct_) offset_alignment_ = told ? answer.dio_offset_alignment : fallback;
  }
  const int error = reserve(0, nbytes);
  if (error != 0) throw SystemFailure("preallocate", path(), error);
}

File::~File() {
  ::close(descriptor_);
  if (buffered_descriptor_ >= 0) ::close(buffered_descriptor_);
}

int File::buffered_descriptor() {
  if (!direct_) return descriptor_;
  const std::lock_guard lock(mutex_);
  if (buffered_descriptor_ < 0) {
    char link[32];
    // by descriptor: the path may be deleted, or another file by now
    std::snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor_);
    buffered_descriptor_ = restarted([&] { return ::open(link, open_flags(access_) | O_CLOEXEC); });
    if (buffered_descriptor_ < 0 && (errno == EMFILE || errno == ENFILE))
      throw SystemFailure("open", path(), errno);
    if (buffered_descriptor_ < 0)
      buffered_descriptor_ = reopened(path(), descriptor_, open_flags(access_));
    if (buffered_descriptor_ < 0) {
      throw Unsupported(
          "the unaligned ends of a write to " + path() +
          " take a second descriptor, and with it /proc, which cannot be used here: mount it, or " +
          "give offsets and sizes that are multiples of " + std::to_string(offset_alignment_) +
          " bytes");
    }
  }
  return buffered_descriptor_;
}

std::uint64_t File::size() const {
  // transfers do not use the file position; unlike st_size this works for block devices
  const off_t end = ::lseek(descriptor_, 0, SEEK_END);
  if (end < 0) throw SystemFailure("size", path(), errno);
  return static_cast<std::uint64_t>(end);
}

int File::reserve(std::uint64_t offset, std::uint64_t nbytes) noexcept {
  const std::lock_guard lock(mutex_);
  if (nbytes == 0 || known_size_ == kUnlimited) return 0;
  const std::uint64_t end = offset + nbytes;
  struct stat status{};
  if (::fstat(descriptor_, &status) != 0) return errno;
  const auto size = static_cast<std::uint64_t>(status.st_size);
  // Checked first: a failed fallocate keeps the blocks that it got beyond the end of the file, and
  // so fills the drive. Where a container refuses fstatfs, only fallocate checks.
  struct statfs filesystem{};
  if (::fstatfs(descriptor_, &filesystem) != 0) filesystem.f_blocks = 0;
  const auto free_blocks =
      static_cast<std::uint64_t>(::geteuid() == 0 ? filesystem.f_bfree : filesystem.f_bavail);
  struct rlimit largest{};
  if (end > size && ::getrlimit(RLIMIT_FSIZE, &largest) == 0 && end > largest.rlim_cur)
    return EFBIG;
  const std::uint64_t beyond = end > size ? end - std::max(offset, size) : 0;
  if (filesystem.f_blocks > 0 &&
      beyond / static_cast<std::uint64_t>(filesystem.f_bsize) > free_blocks)
    return ENOSPC;

  const auto allocate = [&](int mode, std::uint64_t start, std::uint64_t count) {
    return restarted([&] {
             return ::fallocate(descriptor_, mode, static_cast<off_t>(start),
                                static_cast<off_t>(count));
           }) == 0
               ? 0
               : errno;
  };
  // In two steps: a failure does not leave a longer file.
  int error = allocate(FALLOC_FL_KEEP_SIZE, offset, nbytes);
  if (error == 0) error = allocate(0, end - 1, 1);
  if (is_refusal(error)) {
    error = size < end && restarted([&] {
                            return ::ftruncate(descriptor_, static_cast<off_t>(end));
                          }) != 0
                ? errno
                : 0;
  }
  if (error == 0 && extends(end)) known_size_ = end;
  return error;
}

int File::write_through(std::uint64_t offset, std::uint64_t nbytes) noexcept {
  const int descriptor = direct_ ? buffered_descriptor_ : descriptor_;
  const auto error_of = [](auto call) { return restarted(call) == 0 ? 0 : errno; };
  const auto synced = [&](unsigned flags) {
    return error_of([&] {
      return ::sync_file_range(descriptor, static_cast<off64_t>(offset),
                               static_cast<off64_t>(nbytes), flags);
    });
  };
  // Start before taking the lock, while others wait. A full drive may be reported here, and only
  // here: by a filesystem that allocates blocks at write-back.
  int error = synced(SYNC_FILE_RANGE_WRITE);
  const std::lock_guard lock(write_back_mutex_);
  constexpr unsigned kAll =
      SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE | SYNC_FILE_RANGE_WAIT_AFTER;
  if (error == 0) error = synced(kAll);
  // Under the lock, because it takes the error of every range.
  if (is_refusal(error)) error = error_of([&] { return ::fdatasync(descriptor); });
  if (write_back_error_ == 0) write_back_error_ = error;
  return write_back_error_;
}

void File::sync() {
  if (restarted([&] { return ::fdatasync(descriptor_); }) != 0)
    throw SystemFailure("sync", path(), errno);
}

}  // namespace nvme_offload
