#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "backend.h"
#include "backend_fault.h"
#include "memory.h"
#include "request.h"

namespace nvme_offload {

class Engine;

/// A place for one block on its way, with the bounce buffer that it may need.
struct Slot {
  Block block;
  Transfer transfer;              // what the kernel is asked for next
  std::uint64_t padding = 0;      // bytes of the sector before the block's first byte, read into the bounce buffer only
  std::uint64_t needed = 0;       // bytes from the start of the kernel's range that must be moved
  std::uint64_t range = 0;        // the kernel's range: what an aligned transfer asks for
  std::uint64_t progress = 0;     // bytes of it moved so far
  std::uint64_t alignment = 1;    // of the place where a continued transfer may start
  std::byte* memory = nullptr;    // the caller's, or the bounce buffer
  std::uint64_t file_offset = 0;  // where the kernel's range starts
  std::uint32_t stalls = 0;       // attempts in a row without progress
  std::uint32_t retries = 0;
  std::uint64_t sum = 0;  // the block's part in the checksum
  std::optional<Failure> failure;
  Memory bounce;

  /// Bytes of the block that are where they belong.
  [[nodiscard]] std::uint64_t moved() const noexcept {
    if (!failure) return block.nbytes;
    const bool left_in_bounce = block.route == Route::bounced && transfer.operation == Operation::read && failure->kind == Failure::Kind::system;
    return left_in_bounce || progress < padding ? 0 : std::min(progress - padding, block.nbytes);
  }
};

/// One thread with a kernel queue of its own: takes blocks from the engine, moves them, gives them back.
class Worker {
 public:
  /// *script* is null where nothing is to go wrong. Throws Unsupported, SystemFailure.
  Worker(Engine& engine, const std::shared_ptr<FaultScript>& script);
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  /// Throws std::system_error.
  void start();
  void join();
  /// Ends its sleep, or keeps it from the next one. From any thread.
  void wake() noexcept { wake_.raise(); }

  // What Engine::exchange() reads and changes, under the engine's mutex, on behalf of this worker's thread.

  std::vector<Slot*> retired;                              // blocks that are through, to be given back
  std::vector<std::shared_ptr<Request>> finished;          // requests that the last exchange found complete, to be announced outside of it
  Request* reserving = nullptr;                            // a write whose file must reach its end before it is cut
  int reservation_error = 0;                               // what came of that, an errno
  bool may_sleep = false;                                  // found no work though it had room
  bool hungry = false;                                     // stands in the engine's list of those that nobody woke since
  std::vector<std::pair<std::byte*, std::size_t>> memory;  // to be registered with the kernel queue, in order
  std::uint64_t newly_registered = 0;                      // bytes that the kernel took since the last exchange
  std::uint64_t registered_bytes = 0;                      // that it took in all

  /// Blocks that it can take now.
  [[nodiscard]] std::size_t room() const noexcept;
  void accept(Block block);
  void release(const Slot& slot) { free_.push_back(static_cast<std::uint32_t>(&slot - slots_.data())); }

 private:
  void run();
  void register_memory();
  bool prepare(std::uint32_t index);
  void offer(Slot& slot);
  void submit_ready();
  void reserve();
  void reap();
  bool judge(Slot& slot, std::int64_t result);
  void stall(Slot& slot, int error);
  void fail(Slot& slot, int error);

  Engine& engine_;
  WakeSignal wake_;
  std::unique_ptr<Backend> backend_;
  std::vector<Slot> slots_;
  std::vector<std::uint32_t> free_;
  std::vector<std::uint32_t> accepted_;  // slots with a new block
  std::vector<const Transfer*> ready_;   // to be handed to the kernel
  std::vector<Completion> completions_;
  std::size_t judged_ = 0;           // of *completions_*, those that are dealt with
  std::size_t registered_ = 0;       // entries of *memory* that the kernel queue has been offered
  std::size_t in_flight_ = 0;        // transfers that the kernel has
  std::uint32_t longest_stall_ = 0;  // among the transfers that made no progress since the last reap
  std::thread thread_;
};

}  // namespace nvme_offload
