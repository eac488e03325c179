#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "file.h"
#include "fork.h"
#include "latch.h"

namespace nvme_offload {

enum class Operation : std::uint8_t { read = 0, write = 1 };

using Clock = std::chrono::steady_clock;

/// Why a request did not move every byte.
struct Failure {
  enum class Kind : std::uint8_t {
    system,
    truncated,
    corrupt,
    cancelled,  // before a byte of it was asked for
    abandoned,  // likewise: something that it waited for failed
    lost,       // every byte was moved, but the caller's tensor has other memory by then
  };
  Kind kind;
  int error = 0;  // errno, for Kind::system

  /// Whoever caused it knows: it is no news of its own.
  [[nodiscard]] bool follows() const noexcept { return kind == Kind::cancelled || kind == Kind::abandoned; }
};

class Request;

/// Whether a request's bytes are summed on their way, and against what.
struct Checksum {
  bool wanted = false;
  std::optional<std::uint64_t> expected;    // of a read: any other sum is a failure
  std::shared_ptr<Request> like = nullptr;  // of a read: so is any other sum than that of this request, which ends before the read starts
};

/// One read or write of one buffer.
///
/// Its life: submitted -> (held while it waits for others) -> started -> (cut into blocks, which workers move) -> finished, once and for good, with
/// every byte moved or with a failure. Up to then only the engine touches the fields of the second group, under its mutex; from then on nobody
/// changes anything, but for a failure that is known only when its memory is given back.
class Request {
 public:
  Request(Operation operation_, std::shared_ptr<File> file_, std::byte* data_, std::uint64_t nbytes_, std::uint64_t offset_, Checksum checksum_, void* owner_)
      : operation(operation_),
        file(std::move(file_)),
        path(file->shared_path()),
        data(data_),
        nbytes(nbytes_),
        offset(offset_),
        checksum(std::move(checksum_)),
        owner(owner_) {}

  const Operation operation;
  std::shared_ptr<File> file;  // until it is finished
  const std::shared_ptr<const std::string> path;
  std::byte* const data;
  const std::uint64_t nbytes;
  const std::uint64_t offset;
  const Checksum checksum;
  void* const owner;  // what keeps *data* alive; the engine hands it back when the request is finished

  std::uint32_t blockers = 0;                       // requests that it still waits for: held while there are any
  std::vector<std::shared_ptr<Request>> followers;  // that wait for it, those included that were cancelled meanwhile
  bool ended = false;                               // finished as far as the engine is concerned; who waits learns of it a moment later
  Clock::time_point started;

  std::uint64_t cut = 0;          // bytes already handed out in blocks
  std::uint64_t done = 0;         // bytes moved
  std::uint64_t sum = 0;          // the checksum of the bytes moved
  std::uint32_t outstanding = 0;  // blocks with a worker, or the request itself while one reserves its space
  bool reserved = false;          // the file reaches to the end of this write
  std::optional<Failure> failure;
  std::list<std::shared_ptr<Request>>::iterator place;  // in the engine's list of held requests, or in that of started ones

  /// Nothing more will happen to it, which was started.
  [[nodiscard]] bool exhausted() const noexcept { return outstanding == 0 && (cut == nbytes || failure); }

  /// No byte of it was asked of the kernel, nor of its file's space.
  [[nodiscard]] bool untouched() const noexcept { return !ended && outstanding == 0 && cut == 0; }

  /// The caller holds a reference until this returns.
  void finish() {
    file.reset();
    finished_.raise();
  }

  [[nodiscard]] bool finished() const noexcept { return finished_.raised(); }

  /// Waits until it is finished, *limit* at the most and no longer than until a signal arrives. Returns whether it is.
  bool wait_for(std::chrono::nanoseconds limit) { return finished_.wait_for(limit); }

  /// Set when somebody learned of the failure, so that close() need not report it.
  std::atomic<bool> observed{false};

  /// A forked child has the memory of a request but not the threads that would finish it.
  [[nodiscard]] bool of_this_process() const noexcept { return process_ == process_generation(); }

 private:
  const std::uint32_t process_ = process_generation();
  Latch finished_;
};

/// How a block reaches the file.
enum class Route : std::uint8_t {
  direct,    // between the caller's memory and the file as they lie
  bounced,   // through a buffer of the worker's, which the drive's alignment allows
  buffered,  // through the page cache
};

/// The next part of a request to hand to the kernel: *nbytes* bytes, *begin* bytes into the request.
struct Block {
  Request* request = nullptr;
  std::uint64_t begin = 0;
  std::uint64_t nbytes = 0;
  Route route = Route::direct;
};

/// Cuts the next block of at most *block_size* bytes off *request*; *page_size* is that of the page cache.
///
/// Blocks begin and end at pages of the file, but for the request's own ends. An unaligned end of a read is read with the rest of its sector
/// into a bounce buffer, which harms nobody. That of a write goes through the page cache, which merges it with what else the page holds; the
/// whole page does, because direct and cached writes to one page at a time would overwrite each other. Where the file pads, its end is written
/// with zeros behind it, directly.
inline Block cut_block(Request& request, std::uint64_t block_size, std::uint64_t page_size) {
  const File& file = *request.file;
  const std::uint64_t granule = std::max(file.offset_alignment(), page_size);
  block_size = std::max(block_size, granule);
  const std::uint64_t left = request.nbytes - request.cut;
  const std::uint64_t lead = (request.offset + request.cut) % granule;  // bytes of the first page before the block
  const std::uint64_t most = std::min(left, block_size - lead);
  const std::uint64_t head = std::min(left, (granule - lead) % granule);  // bytes up to the first page boundary
  const std::uint64_t body = (most - head) / granule * granule;           // whole pages after it
  const bool aligned = reinterpret_cast<std::uintptr_t>(request.data + request.cut + head) % file.memory_alignment() == 0;

  Block block{&request, request.cut, most, Route::bounced};
  if (!file.direct()) {
    block.nbytes = left > most ? head + body : most;
    block.route = Route::buffered;
  } else if (request.operation == Operation::read) {
    if (body > 0 && aligned) {
      block.nbytes = head > 0 ? head : body;
      block.route = head > 0 ? Route::bounced : Route::direct;
    } else if (left > most) {
      block.nbytes = head + body;  // all of it has to be copied, ends too
    }
  } else if (head == 0 && body > 0) {
    block.nbytes = body;
    block.route = aligned ? Route::direct : Route::bounced;
  } else if (head == 0 && file.pads()) {
    block.nbytes = left;
  } else {
    block.nbytes = head > 0 ? head : left;
    block.route = Route::buffered;
  }
  return block;
}

}  // namespace nvme_offload
