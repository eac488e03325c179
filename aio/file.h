#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>

namespace nvme_offload {

enum class Access : std::uint8_t { read, write, read_write };

/// Whether transfers bypass the page cache: required, where the filesystem can, or never.
enum class Direct : std::uint8_t { required, automatic, off };

/// An open file, shared by its requests; its descriptors close with the last of them.
class File {
 public:
  /// Opens *path*. For writing it is created (mode 0600) where missing, never truncated, and a
  /// symbolic link as last component is refused. *nbytes* are preallocated. A failure leaves no new
  /// file behind.
  /// Throws SystemFailure; Misuse where *path* is neither a regular file nor a block device;
  /// Unsupported where *direct* is required and missing.
  static std::shared_ptr<File> open(const std::string& path, Access access, Direct direct,
                                    std::uint64_t nbytes);

  /// An unnamed file in *directory*, for reading and writing: deleted with the last descriptor,
  /// also after kill -9. With *padded* a write that starts at a multiple of kPadding may fill the
  /// bytes up to the next multiple with zeros, so that the whole write uses O_DIRECT.
  static std::shared_ptr<File> open_anonymous(const std::string& directory, Direct direct,
                                              std::uint64_t nbytes, bool padded);

  static constexpr std::uint64_t kPadding = 4096;

  ~File();
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  [[nodiscard]] const std::string& path() const noexcept { return *path_; }
  /// The path, for owners that outlive the file.
  [[nodiscard]] const std::shared_ptr<const std::string>& shared_path() const noexcept {
    return path_;
  }
  [[nodiscard]] bool readable() const noexcept { return access_ != Access::write; }
  [[nodiscard]] bool writable() const noexcept { return access_ != Access::read; }
  [[nodiscard]] bool direct() const noexcept { return direct_; }
  /// Alignment of buffer addresses, and of offsets and lengths in the file, for O_DIRECT; 1 without
  /// it.
  [[nodiscard]] std::uint64_t memory_alignment() const noexcept { return memory_alignment_; }
  [[nodiscard]] std::uint64_t offset_alignment() const noexcept { return offset_alignment_; }
  [[nodiscard]] int descriptor() const noexcept { return descriptor_; }
  /// True where the end of a write uses O_DIRECT, padded with zeros up to the alignment.
  [[nodiscard]] bool pads() const noexcept {
    return padded_ && direct_ && kPadding % offset_alignment_ == 0;
  }

  /// A second descriptor, without O_DIRECT, opened on first use. Throws SystemFailure.
  [[nodiscard]] int buffered_descriptor();

  /// The size in bytes, from the kernel. Throws SystemFailure.
  [[nodiscard]] std::uint64_t size() const;

  /// True where a write that ends at *end* would extend the file, as far as known without a system
  /// call.
  [[nodiscard]] bool extends(std::uint64_t end) const noexcept {
    return end > known_size_.load(std::memory_order_relaxed);
  }

  /// Preallocates the range and extends the file to its end where it is shorter. A filesystem
  /// without preallocation only gets the size. Returns 0 or an errno; the file is then no longer
  /// than before. Checks for ENOSPC before it allocates.
  [[nodiscard]] int reserve(std::uint64_t offset, std::uint64_t nbytes) noexcept;

  /// Starts and awaits write-back of a range that was written through the page cache: its data are
  /// then with the drive, as after a direct write. Returns 0 or an errno. The kernel reports a
  /// write-back error once and not for which range, so after the first error every call fails.
  [[nodiscard]] int write_through(std::uint64_t offset, std::uint64_t nbytes) noexcept;

  /// Makes the data durable, and the metadata needed to read them. Throws SystemFailure.
  void sync();

 private:
  File(std::string path, int descriptor, Access access)
      : path_(std::make_shared<const std::string>(std::move(path))),
        descriptor_(descriptor),
        access_(access) {}
  void configure(Direct direct, std::uint64_t nbytes);

  std::shared_ptr<const std::string> path_;
  int descriptor_;
  Access access_;
  bool direct_ = false;
  bool padded_ = false;
  std::uint64_t memory_alignment_ = 1;
  std::uint64_t offset_alignment_ = 1;
  // a lower bound: another process may have extended the file
  std::atomic<std::uint64_t> known_size_{0};
  std::mutex mutex_;  // guards the lazily opened descriptor, and serialises reserve()
  int buffered_descriptor_ = -1;
  std::mutex write_back_mutex_;  // guards write_back_error_
  int write_back_error_ = 0;
};

}  // namespace nvme_offload
