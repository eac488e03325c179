#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>

namespace nvme_offload {

enum class Access : std::uint8_t { read, write, read_write };

/// Whether transfers bypass the page cache: always or an error, where the filesystem can, or never.
enum class Direct : std::uint8_t { required, automatic, off };

/// An open file, shared by its requests; its descriptors close with the last of them.
class File {
 public:
  /// Opens *path*; for writing it is created (mode 0600) where missing, never truncated, and a symbolic link in the last place is refused.
  /// *nbytes* of it are allocated. What fails leaves no file behind that was not there.
  /// Throws SystemFailure, Misuse for what is neither a regular file nor a block device, Unsupported where *direct* cannot be had.
  static std::shared_ptr<File> open(const std::string& path, Access access, Direct direct, std::uint64_t nbytes);

  /// A file without a name in *directory*, for reading and writing: gone with the last descriptor, also after kill -9.
  /// With *padded* a write that begins at a multiple of kPadding may fill the bytes up to the next one with zeros, so that all of it goes direct.
  static std::shared_ptr<File> open_anonymous(const std::string& directory, Direct direct, std::uint64_t nbytes, bool padded);

  static constexpr std::uint64_t kPadding = 4096;

  ~File();
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  [[nodiscard]] const std::string& path() const noexcept { return *path_; }
  /// The same, for those that outlive the file.
  [[nodiscard]] const std::shared_ptr<const std::string>& shared_path() const noexcept { return path_; }
  [[nodiscard]] bool readable() const noexcept { return access_ != Access::write; }
  [[nodiscard]] bool writable() const noexcept { return access_ != Access::read; }
  [[nodiscard]] bool direct() const noexcept { return direct_; }
  /// What addresses of buffers, and offsets and lengths in the file, must be multiples of for O_DIRECT; 1 where it is not used.
  [[nodiscard]] std::uint64_t memory_alignment() const noexcept { return memory_alignment_; }
  [[nodiscard]] std::uint64_t offset_alignment() const noexcept { return offset_alignment_; }
  [[nodiscard]] int descriptor() const noexcept { return descriptor_; }
  /// True where the end of a write goes direct, with zeros behind it up to a multiple of the alignment.
  [[nodiscard]] bool pads() const noexcept { return padded_ && direct_ && kPadding % offset_alignment_ == 0; }

  /// A second descriptor that goes through the page cache, opened on first use. Throws SystemFailure.
  [[nodiscard]] int buffered_descriptor();

  /// Bytes; asks the kernel. Throws SystemFailure.
  [[nodiscard]] std::uint64_t size() const;

  /// True where a write that ends at *end* would extend the file, as far as is known without asking.
  [[nodiscard]] bool extends(std::uint64_t end) const noexcept { return end > known_size_.load(std::memory_order_relaxed); }

  /// Allocates the range and extends the file to its end where it is shorter. Where the filesystem cannot preallocate, only the size is set.
  /// Returns 0 or an errno; the file is no longer than before then, and a drive without the room is told apart before anything is allocated.
  [[nodiscard]] int reserve(std::uint64_t offset, std::uint64_t nbytes) noexcept;

  /// Waits until a range that was written through the page cache is with the drive, as one that was written directly is. Returns 0 or an errno.
  /// The kernel tells an error of writing back once, and not of which range: from the first one on, every call fails.
  [[nodiscard]] int write_through(std::uint64_t offset, std::uint64_t nbytes) noexcept;

  /// Data and the metadata needed to read it are on the drive on return. Throws SystemFailure.
  void sync();

 private:
  File(std::string path, int descriptor, Access access)
      : path_(std::make_shared<const std::string>(std::move(path))), descriptor_(descriptor), access_(access) {}
  void settle(Direct direct, std::uint64_t nbytes);

  std::shared_ptr<const std::string> path_;
  int descriptor_;
  Access access_;
  bool direct_ = false;
  bool padded_ = false;
  std::uint64_t memory_alignment_ = 1;
  std::uint64_t offset_alignment_ = 1;
  std::atomic<std::uint64_t> known_size_{0};  // a lower bound: another process may have extended the file
  std::mutex mutex_;                          // guards the lazily opened descriptor and serialises reserve()
  int buffered_descriptor_ = -1;
  std::mutex write_back_mutex_;  // guards the error
  int write_back_error_ = 0;
};

}  // namespace nvme_offload
