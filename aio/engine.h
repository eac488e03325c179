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

/// Counters of one direction since the engine was made.
struct DirectionStats {
  std::uint64_t requests = 0;   // submitted
  std::uint64_t bytes = 0;      // moved, counted block by block
  std::uint64_t in_flight = 0;  // requests started and not yet finished
  std::uint64_t retries = 0;    // transfers resubmitted: refused, interrupted or short
  double busy_seconds = 0;      // with at least one request in flight
};

struct Stats {
  std::array<DirectionStats, 2> directions;  // by Operation
  std::shared_ptr<Request> oldest;           // the unfinished request that started first, or null
};

class Worker;

/// Worker threads that move requests block by block. All public methods are thread-safe.
class Engine {
 public:
  /// Throws Unsupported, SystemFailure.
  explicit Engine(Settings settings);
  /// Waits for every request.
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  /// Starts moving *nbytes* between *data* and *file*; never waits for the drive. *data* must stay
  /// valid until the request finishes; take_released_owners() then returns *owner*.
  ///
  /// The request starts when all of *after*, requests of this engine, have succeeded; when one
  /// fails, it ends as cancelled. Throws Misuse (the caller keeps *owner*), SystemFailure.
  std::shared_ptr<Request> submit(Operation operation, std::shared_ptr<File> file, std::byte* data,
                                  std::uint64_t nbytes, std::uint64_t offset, Checksum checksum,
                                  std::vector<std::shared_ptr<Request>> after, void* owner);

  /// Cancels all of *requests* and those that wait for them, unless one has finished or has
  /// started. Returns whether it did.
  bool cancel(const std::vector<std::shared_ptr<Request>>& requests);

  /// The owners of requests that finished since the last call.
  std::vector<void*> take_released_owners();

  /// Marks the finished *request* as failed, unless it has: its memory is not the caller's any
  /// more.
  void note_changed_buffer(const std::shared_ptr<Request>& request);

  /// Refuses new requests from now on.
  void refuse_requests();
  /// Waits until all requests have finished, for at most *limit*. Returns whether they have.
  bool wait_idle(std::chrono::nanoseconds limit);
  /// The first request whose failure no caller has observed, or null; it counts as observed from
  /// now on.
  std::shared_ptr<Request> take_unobserved_failure();

  [[nodiscard]] Stats stats() const;
  [[nodiscard]] const Settings& settings() const noexcept { return settings_; }

 private:
  friend class Worker;

  using Requests = std::vector<std::shared_ptr<Request>>;

  bool exchange(Worker& worker);
  void retire_blocks(Worker& worker);
  void assign_blocks(Worker& worker);
  void fail(Request& request, Failure failure);
  void start(Request& request);
  static bool is_over(Request& request);
  void finish(const std::shared_ptr<Request>& request, Requests& finished);
  void end(const std::shared_ptr<Request>& request, Requests& finished);
  void remember_failure(const std::shared_ptr<Request>& request);
  [[nodiscard]] Worker* take_idle_worker() noexcept;
  [[nodiscard]] std::uint64_t queued_blocks() const;
  void stop_workers();

  const Settings settings_;
  const std::uint64_t page_size_;

  // guards all members below, and the engine's fields of unfinished requests
  mutable std::mutex mutex_;
  // waiting for others. Requests only wait for earlier ones, so while there are any, some started
  // one is unfinished.
  std::list<std::shared_ptr<Request>> blocked_;
  std::list<std::shared_ptr<Request>> unfinished_;  // started, in order of start
  std::array<std::deque<Request*>, 2> queues_;  // by Operation: requests not fully cut into blocks
  std::uint64_t queued_bytes_ = 0;
  std::size_t turn_ = 0;  // the next direction: neither starves behind a long queue of the other
  std::array<DirectionStats, 2> stats_;
  std::array<Clock::time_point, 2> busy_since_;
  Requests failures_;
  std::vector<void*> released_owners_;
  // waiting for work and not woken since; the latest at the end
  std::vector<Worker*> idle_workers_;
  bool refusing_ = false;
  bool stopping_ = false;
  std::condition_variable idle_;

  std::vector<std::unique_ptr<Worker>> workers_;
};

}  // namespace nvme_offload
