#include "file.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>

#include "failure.h"

// Linux 6.1's answer to "what does O_DIRECT need here?", for the headers of older systems (statx(2)).
#ifndef STATX_DIOALIGN
#define STATX_DIOALIGN 0x00002000U
#endif

namespace nvme_offload {
namespace {

constexpr std::uint64_t kFallbackAlignment = 4096;  // where the kernel does not say: at least the largest logical block of any drive

constexpr std::uint64_t kUnlimited = UINT64_MAX;  // the known size of a block device: it neither grows nor is allocated

/// struct statx as the kernel lays it out, since libc's may end before the fields for direct I/O.
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

/// A descriptor on *path*, created where it is missing and may be; *created* tells. O_NONBLOCK keeps a FIFO from hanging the open.
int open_or_create(const std::string& path, Access access, bool& created) {
  const int flags = open_flags(access) | O_CLOEXEC | O_NONBLOCK | (access == Access::read ? 0 : O_NOFOLLOW);
  created = false;
  for (;;) {
    int descriptor = restarted([&] { return ::open(path.c_str(), flags); });
    if (descriptor >= 0 || errno != ENOENT || access == Access::read) return descriptor;
    descriptor = restarted([&] { return ::open(path.c_str(), flags | O_CREAT | O_EXCL, 0600); });
    created = descriptor >= 0;
    if (descriptor >= 0 || errno != EEXIST) return descriptor;
    struct stat found {};
    if (::lstat(path.c_str(), &found) == 0 && S_ISLNK(found.st_mode)) {  // a dangling link: neither there nor creatable
      errno = ELOOP;
      return -1;
    }
  }
}

bool is_memory_filesystem(int descriptor) {
  struct statfs filesystem {};
  if (::fstatfs(descriptor, &filesystem) != 0) return false;
  return filesystem.f_type == TMPFS_MAGIC || filesystem.f_type == RAMFS_MAGIC;
}

}  // namespace

std::shared_ptr<File> File::open(const std::string& path, Access access, Direct direct) {
  bool created = false;
  const int descriptor = open_or_create(path, access, created);
  if (descriptor < 0) {
    if (errno == ELOOP) throw Misuse(path + " is a symbolic link, which is not followed for writing: name the file itself");
    throw SystemFailure("open", path, errno);
  }
  std::shared_ptr<File> file(new File(path, descriptor, access));
  try {
    file->settle(direct);
  } catch (...) {
    if (created) ::unlink(path.c_str());
    throw;
  }
  return file;
}

std::shared_ptr<File> File::open_anonymous(const std::string& directory, Direct direct) {
  int descriptor = restarted([&] { return ::open(directory.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600); });
  if (descriptor < 0 && (errno == EOPNOTSUPP || errno == EISDIR)) {  // a filesystem without O_TMPFILE (NFS): a name for an instant
    std::string name = directory + "/.nvme-offload-XXXXXX";
    descriptor = ::mkostemp(name.data(), O_CLOEXEC);
    if (descriptor >= 0) ::unlink(name.c_str());
  }
  if (descriptor < 0) throw SystemFailure("open", directory, errno);
  std::shared_ptr<File> file(new File(directory + "/(anonymous)", descriptor, Access::read_write));
  file->settle(direct);
  return file;
}

/// Settles what the descriptor is and how it may be used.
void File::settle(Direct direct) {
  struct stat status {};
  if (::fstat(descriptor_, &status) != 0) throw SystemFailure("open", path_, errno);
  if (S_ISDIR(status.st_mode)) throw SystemFailure("open", path_, EISDIR);
  if (!S_ISREG(status.st_mode) && !S_ISBLK(status.st_mode)) throw Misuse(path_ + " is neither a regular file nor a block device");
  known_size_ = S_ISBLK(status.st_mode) ? kUnlimited : static_cast<std::uint64_t>(status.st_size);
  int flags = ::fcntl(descriptor_, F_GETFL) & ~O_NONBLOCK;  // io_uring would answer EAGAIN rather than wait
  ::fcntl(descriptor_, F_SETFL, flags);
  if (direct == Direct::off) return;

  KernelStatx answer{};
  const bool told = ::syscall(SYS_statx, descriptor_, "", AT_EMPTY_PATH, STATX_DIOALIGN, &answer) == 0 && (answer.mask & STATX_DIOALIGN) != 0;
  const bool refused = told && answer.dio_offset_alignment == 0;
  // tmpfs takes the flag and then serves from memory all the same: that is the page cache, and is called so.
  if (refused || is_memory_filesystem(descriptor_) || ::fcntl(descriptor_, F_SETFL, flags | O_DIRECT) != 0) {
    if (direct == Direct::automatic) return;
    throw Unsupported("the filesystem of " + path_ + " has no O_DIRECT: use another one, or direct=\"auto\" to go through the page cache");
  }
  direct_ = true;
  const std::uint64_t fallback = std::max(kFallbackAlignment, static_cast<std::uint64_t>(status.st_blksize));
  memory_alignment_ = told ? answer.dio_memory_alignment : fallback;
  offset_alignment_ = told ? answer.dio_offset_alignment : fallback;
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
    std::snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor_);  // by descriptor: the name may be gone, or another file's by now
    buffered_descriptor_ = restarted([&] { return ::open(link, open_flags(access_) | O_CLOEXEC); });
    if (buffered_descriptor_ < 0) throw SystemFailure("open", path_, errno);
  }
  return buffered_descriptor_;
}

std::uint64_t File::size() const {
  const off_t end = ::lseek(descriptor_, 0, SEEK_END);  // transfers carry their own offsets; and unlike st_size it works on block devices
  if (end < 0) throw SystemFailure("size", path_, errno);
  return static_cast<std::uint64_t>(end);
}

int File::reserve(std::uint64_t offset, std::uint64_t nbytes) noexcept {
  const std::lock_guard lock(mutex_);
  const std::uint64_t end = offset + nbytes;
  if (nbytes == 0 || known_size_ == kUnlimited) return 0;
  const auto range_start = static_cast<off_t>(offset);
  const auto length = static_cast<off_t>(nbytes);
  const auto last = static_cast<off_t>(end - 1);
  const auto allocate = [&](int mode, off_t start, off_t count) {
    return restarted([&] { return ::fallocate(descriptor_, mode, start, count); }) == 0 ? 0 : errno;
  };
  // In two steps, so that what a failure leaves lies beyond the file's end, where it can be taken back without touching anybody's bytes.
  int error = allocate(FALLOC_FL_KEEP_SIZE, range_start, length);
  if (error == 0) error = allocate(0, last, 1);
  if (error == EOPNOTSUPP || error == ENOSYS) {
    struct stat status {};
    if (::fstat(descriptor_, &status) != 0) return errno;
    if (static_cast<std::uint64_t>(status.st_size) < end && restarted([&] { return ::ftruncate(descriptor_, last + 1); }) != 0) return errno;
    error = 0;
  }
  if (error != 0) {
    struct stat status {};
    if (::fstat(descriptor_, &status) == 0 && status.st_size <= last) {
      const off_t start = std::max(range_start, status.st_size);
      allocate(FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, start, last + 1 - start);
    }
    return error;
  }
  if (extends(end)) known_size_ = end;
  return 0;
}

void File::sync() {
  if (restarted([&] { return ::fdatasync(descriptor_); }) != 0) throw SystemFailure("sync", path_, errno);
}

}  // namespace nvme_offload
