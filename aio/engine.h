#pragma once

#include <array>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "backend.h"
#include "backend_fault.h"
#include "request.h"

namespace nvme_offload {

struct Settings {
  std::string backend;
  std::uint64_t block_size = 0;
  std::uint32_t queue_depth = 0;
  std::uint32_t thread_count = 0;
  bool single_submit = false;
  bool overlap_events = true;
  std::vector<Fault> faults;  // for tests
};

/// What went one way (read or write) since the engine was made.
struct DirectionStats {
  std::uint64_t requests = 0;   // submitted
  std::uint64_t bytes = 0;      // moved, block by block
  std::uint64_t in_flight = 0;  // requests started and not yet finished
  std::uint64_t retries = 0;    // transfers handed to the kernel again: refused, interrupted or short
  double busy_seconds = 0;      // during which at least one request was in flight
};

struct Stats {
  std::array<DirectionStats, 2> directions;  // by Operation
  std::uint64_t registered_bytes = 0;        // of memory that every worker's kernel queue has pinned
  std::shared_ptr<Request> oldest;           // the unfinished request that was started first, if any
};

class Worker;

/// Worker threads that move requests block by block. All public methods may be called from any thread.
class Engine {
 public:
  /// Throws Unsupported, SystemFailure.
  explicit Engine(Settings settings);
  /// Waits for every request.
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  /// Starts moving *nbytes* bytes between *data* and *file*; never waits for the drive. *data* must stay until the request is finished;
  /// *owner* then appears in take_released_owners().
  ///
  /// The request starts when all of *after*, requests of this engine, ended well; as soon as one of them fails, it ends as cancelled.
  /// Throws Misuse (and *owner* stays the caller's), SystemFailure.
  std::shared_ptr<Request> submit(Operation operation, std::shared_ptr<File> file, std::byte* data, std::uint64_t nbytes, std::uint64_t offset,
                                  Checksum checksum, std::vector<std::shared_ptr<Request>> after, void* owner);

  /// Ends all of *requests* as cancelled, and what waits for them, unless one of them is finished or a byte of it was asked for. Returns whether it did.
  bool cancel(const std::vector<std::shared_ptr<Request>>& requests);

  /// Lets the workers' kernel queues pin memory that many requests will use; it must stay until the engine is gone.
  void register_memory(std::byte* data, std::size_t nbytes);

  /// The owners of finished requests, each once.
  std::vector<void*> take_released_owners();

  /// Makes a failure of *request*, which is finished, where it has none yet: its memory is not the caller's any more.
  void note_lost_memory(const std::shared_ptr<Request>& request);

  /// Refuses new requests from now on.
  void refuse_requests();
  /// Waits until no request is unfinished, *limit* at the most. Returns whether that is so.
  bool wait_idle(std::chrono::nanoseconds limit);
  /// The first request that failed without anybody learning of it, if any; it counts as observed from now on.
  std::shared_ptr<Request> take_unobserved_failure();

  [[nodiscard]] Stats stats() const;
  [[nodiscard]] const Settings& settings() const noexcept { return settings_; }

 private:
  friend class Worker;

  using Requests = std::vector<std::shared_ptr<Request>>;

  bool exchange(Worker& worker);
  void give_back(Worker& worker);
  void take_blocks(Worker& worker);
  void fail(Request& request, Failure failure);
  void start(Request& request);
  static bool is_over(Request& request);
  void finish(const std::shared_ptr<Request>& request, Requests& finished);
  void end(const std::shared_ptr<Request>& request, Requests& finished);
  void remember_failure(const std::shared_ptr<Request>& request);
  [[nodiscard]] Worker* take_hungry() noexcept;
  [[nodiscard]] std::uint64_t queued_blocks() const;
  void stop_workers();

  const Settings settings_;
  const std::uint64_t page_size_;

  mutable std::mutex mutex_;                        // guards all below, and the inner fields of unfinished requests
  std::list<std::shared_ptr<Request>> held_;        // that wait for others: edges lead back in time, so while there are any, there are started ones
  std::list<std::shared_ptr<Request>> unfinished_;  // that were started, in that order
  std::array<std::deque<Request*>, 2> queues_;      // by Operation: requests with bytes that are not cut yet
  std::uint64_t queued_bytes_ = 0;
  std::size_t turn_ = 0;  // the direction that goes next: neither waits behind a long queue of the other
  std::array<DirectionStats, 2> stats_;
  std::array<Clock::time_point, 2> busy_since_;
  Requests failures_;
  std::vector<std::pair<std::byte*, std::size_t>> memory_;  // registered, in order
  std::vector<void*> released_owners_;
  std::vector<Worker*> hungry_;  // that wait for work, the last to begin at the end; nobody woke them since
  bool refusing_ = false;
  bool stopping_ = false;
  std::condition_variable idle_;

  std::vector<std::unique_ptr<Worker>> workers_;
};

}  // namespace nvme_offload
