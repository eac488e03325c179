#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

#include "backend.h"
#include "backend_fault.h"
#include "memory.h"
#include "request.h"

namespace nvme_offload {

class Engine;

/// The state of one block in flight, with its bounce buffer.
struct Slot {
  Block block;
  Transfer transfer;  // the next system call for it
  // bytes of the sector before the block; read into the bounce buffer only
  std::uint64_t padding = 0;
  std::uint64_t needed = 0;       // bytes from the start of the kernel's range that must be moved
  std::uint64_t range = 0;        // size of the kernel's range: the block, aligned
  std::uint64_t progress = 0;     // bytes of the range moved so far
  std::uint64_t alignment = 1;    // where a continued transfer may start
  std::byte* memory = nullptr;    // the caller's memory or the bounce buffer
  std::uint64_t file_offset = 0;  // where the range starts in the file
  std::uint32_t stalls = 0;       // consecutive attempts without progress
  Clock::time_point due;          // when a stalled transfer is submitted again
  std::uint32_t retries = 0;
  std::uint64_t sum = 0;  // the block's contribution to the checksum
  std::optional<Failure> failure;
  Memory bounce;

  /// Bytes of the block that have reached their destination.
  [[nodiscard]] std::uint64_t moved() const noexcept {
    if (!failure) return block.nbytes;
    const bool left_in_bounce = block.route == Route::bounced &&
                                transfer.operation == Operation::read &&
                                failure->kind == Failure::Kind::system;
    return left_in_bounce || progress < padding ? 0 : std::min(progress - padding, block.nbytes);
  }
};

/// One thread with its own kernel queue: takes blocks from the engine, moves them, returns them.
class Worker {
 public:
  /// *script* is null without fault injection. Throws Unsupported, SystemFailure.
  Worker(Engine& engine, const std::shared_ptr<FaultScript>& script);
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  /// Throws std::system_error.
  void start();
  void join();
  /// Wakes the thread, or keeps it from its next sleep. Thread-safe.
  void wake() noexcept { wake_.raise(); }

  // State that Engine::exchange() reads and changes, under the engine's mutex, in this worker's
  // thread.

  std::vector<Slot*> retired;  // finished blocks, to be returned to the engine
  // requests that the last exchange completed, to be announced without the mutex
  std::vector<std::shared_ptr<Request>> finished;
  Request* reserving = nullptr;  // a write whose file must be extended before it is cut into blocks
  int reservation_error = 0;     // the result of that: 0 or an errno
  bool may_sleep = false;        // found no work although it had free slots
  bool idle_listed = false;      // is in the engine's list of idle workers

  /// Blocks that it can take now.
  [[nodiscard]] std::size_t free_slots() const noexcept;
  void accept(Block block);
  void release(const Slot& slot) {
    free_.push_back(static_cast<std::uint32_t>(&slot - slots_.data()));
  }

 private:
  void run();
  bool prepare(std::uint32_t index);
  void queue_rest(Slot& slot);
  void submit_ready();
  void reserve();
  void reap();
  bool handle_completion(Slot& slot, std::int64_t result);
  void retry_later(Slot& slot, int error);
  void resume_paused();
  bool wait_for_paused();
  void fail(Slot& slot, int error);

  Engine& engine_;
  WakeSignal wake_;
  std::unique_ptr<Backend> backend_;
  std::vector<Slot> slots_;
  std::vector<std::uint32_t> free_;
  std::vector<std::uint32_t> accepted_;  // slots with a new block
  std::vector<const Transfer*> ready_;   // to be submitted to the kernel
  std::vector<Slot*> paused_;            // stalled, each until it is due
  std::vector<Completion> completions_;
  std::size_t handled_ = 0;    // how many of completions_ are handled
  std::size_t in_flight_ = 0;  // transfers that the kernel has
  std::thread thread_;
};

}  // namespace nvme_offload
