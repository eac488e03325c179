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

/// Why a request failed.
struct Failure {
  enum class Kind : std::uint8_t {
    system,
    truncated,
    corrupt,
    cancelled,       // before it started
    abandoned,       // before it started: a request that it waited for failed
    buffer_changed,  // every byte was moved, but the caller's tensor has other memory now
  };
  Kind kind;
  int error = 0;  // errno, for Kind::system

  /// A consequence of another failure or of cancel(): not reported separately.
  [[nodiscard]] bool is_consequence() const noexcept {
    return kind == Kind::cancelled || kind == Kind::abandoned;
  }
};

class Request;

/// Whether to compute the checksum of a request, and its expected value.
struct Checksum {
  bool wanted = false;
  std::optional<std::uint64_t> expected;  // of a read: the checksum that it must have
  // of a read: the request whose checksum it must have; it ends before the read starts
  std::shared_ptr<Request> like = nullptr;
};

/// One read or write of one buffer.
///
/// Life cycle: submitted -> (blocked while it waits for others) -> started -> (cut into blocks,
/// which workers move) -> finished, once, with every byte moved or with a failure. Until then only
/// the engine changes the fields of the second group, under its mutex. Afterwards they are
/// constant, except for a failure that is detected when its memory is released.
class Request {
 public:
  Request(Operation operation_, std::shared_ptr<File> file_, std::byte* data_,
          std::uint64_t nbytes_, std::uint64_t offset_, Checksum checksum_, void* owner_)
      : operation(operation_),
        file(std::move(file_)),
        path(file->shared_path()),
        data(data_),
        nbytes(nbytes_),
        offset(offset_),
        checksum(std::move(checksum_)),
        owner(owner_) {}

  const Operation operation;
  std::shared_ptr<File> file;  // until it finishes
  const std::shared_ptr<const std::string> path;
  std::byte* const data;
  const std::uint64_t nbytes;
  const std::uint64_t offset;
  const Checksum checksum;
  void* const owner;  // keeps *data* alive; the engine returns it when the request finishes

  std::uint32_t blockers = 0;  // unfinished requests that it waits for
  // requests that wait for it, including cancelled ones
  std::vector<std::shared_ptr<Request>> followers;
  bool ended = false;  // finished inside the engine; waiters see it a moment later
  Clock::time_point started;

  std::uint64_t cut = 0;               // bytes already cut into blocks
  std::uint64_t done = 0;              // bytes moved
  std::uint64_t sum = 0;               // the checksum of the bytes moved
  std::uint32_t blocks_in_flight = 0;  // with a worker; 1 while a worker extends the file
  bool reserved = false;               // the file extends to the end of this write
  std::optional<Failure> failure;
  // in the engine's list of blocked or of started requests
  std::list<std::shared_ptr<Request>>::iterator place;

  /// Started, and nothing is left to do.
  [[nodiscard]] bool exhausted() const noexcept {
    return blocks_in_flight == 0 && (cut == nbytes || failure);
  }

  /// Not started: nothing was asked of the kernel.
  [[nodiscard]] bool untouched() const noexcept {
    return !ended && blocks_in_flight == 0 && cut == 0;
  }

  /// The caller must hold a reference until this returns.
  void finish() {
    file.reset();
    finished_.raise();
  }

  [[nodiscard]] bool finished() const noexcept { return finished_.raised(); }

  /// Waits until it is finished, for at most *limit*, or until a signal arrives. Returns whether it
  /// is finished.
  bool wait_for(std::chrono::nanoseconds limit) { return finished_.wait_for(limit); }

  /// A caller has seen the failure: close() need not report it.
  std::atomic<bool> observed{false};

  /// False in a forked child, which has the memory of a request but not the threads that finish it.
  [[nodiscard]] bool of_this_process() const noexcept { return process_ == process_generation(); }

 private:
  const std::uint32_t process_ = process_generation();
  Latch finished_;
};

/// How a block reaches the file.
enum class Route : std::uint8_t {
  direct,    // between the caller's memory and the file
  bounced,   // through the worker's aligned bounce buffer
  buffered,  // through the page cache
};

/// A part of a request: *nbytes* bytes, *begin* bytes into it.
struct Block {
  Request* request = nullptr;
  std::uint64_t begin = 0;
  std::uint64_t nbytes = 0;
  Route route = Route::direct;
};

/// Cuts the next block of at most *block_size* bytes off *request*; *page_size* is the size of a
/// page of the page cache.
///
/// Blocks start and end at pages of the file, except at the ends of the request. An unaligned end
/// of a read is read with the rest of its sector into a bounce buffer. An unaligned end of a write
/// goes through the page cache, which merges it into the page. So does the whole page: a direct and
/// a cached write to one page at the same time would overwrite each other. In a file that pads, the
/// end is written directly with zeros behind it.
inline Block cut_block(Request& request, std::uint64_t block_size, std::uint64_t page_size) {
  const File& file = *request.file;
  const std::uint64_t granule = std::max(file.offset_alignment(), page_size);
  block_size = std::max(block_size, granule);
  const std::uint64_t left = request.nbytes - request.cut;
  // bytes of the first page before the block
  const std::uint64_t lead = (request.offset + request.cut) % granule;
  const std::uint64_t most = std::min(left, block_size - lead);
  // bytes up to the first page boundary
  const std::uint64_t head = std::min(left, (granule - lead) % granule);
  const std::uint64_t body = (most - head) / granule * granule;  // whole pages after it
  const bool aligned = reinterpret_cast<std::uintptr_t>(request.data + request.cut + head) %
                           file.memory_alignment() ==
                       0;

  Block block{&request, request.cut, most, Route::bounced};
  if (!file.direct()) {
    block.nbytes = left > most ? head + body : most;
    block.route = Route::buffered;
  } else if (request.operation == Operation::read) {
    if (body > 0 && aligned) {
      block.nbytes = head > 0 ? head : body;
      block.route = head > 0 ? Route::bounced : Route::direct;
    } else if (left > most) {
      block.nbytes = head + body;  // unaligned memory: the bounce buffer takes the whole block
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
