#include "engine.h"

#include <unistd.h>

#include <algorithm>
#include <limits>
#include <system_error>
#include <utility>

#include "checksum.h"
#include "failure.h"
#include "worker.h"

namespace nvme_offload {
namespace {

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

}  // namespace

Engine::Engine(Settings settings)
    : settings_(std::move(settings)),
      page_size_(static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE))) {
  const auto script =
      settings_.faults.empty() ? nullptr : std::make_shared<FaultScript>(settings_.faults);
  for (std::uint32_t i = 0; i < settings_.thread_count; ++i) {
    workers_.push_back(std::make_unique<Worker>(*this, script));
  }
  idle_workers_.reserve(workers_.size());
  try {
    for (auto& worker : workers_) worker->start();
  } catch (const std::system_error& error) {
    stop_workers();
    throw SystemFailure("start a worker thread of", "the engine", error.code().value());
  }
}

Engine::~Engine() {
  refuse_requests();
  while (!wait_idle(std::chrono::hours{1})) {
  }
  stop_workers();
}

void Engine::stop_workers() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  for (auto& worker : workers_) worker->wake();
  for (auto& worker : workers_) worker->join();
}

std::shared_ptr<Request> Engine::submit(Operation operation, std::shared_ptr<File> file,
                                        std::byte* data, std::uint64_t nbytes, std::uint64_t offset,
                                        Checksum checksum,
                                        std::vector<std::shared_ptr<Request>> after, void* owner) {
  constexpr auto kLargestOffset = static_cast<std::uint64_t>(std::numeric_limits<off_t>::max());
  if (nbytes > kLargestOffset || offset > kLargestOffset - nbytes)
    throw Misuse("the range ends beyond the largest offset that a file can have");
  if (checksum.wanted && !has_checksum()) {
    throw Unsupported(
        "this build has no checksums: install libxxhash-dev (Debian, Ubuntu), xxhash-devel "
        "(Fedora, RHEL) or, without root, conda-forge's xxhash, and install nvme-offload again");
  }
  const std::uint64_t page = std::max(page_size_, file->offset_alignment());
  // Opened here, where a failure can still be thrown to the caller.
  const bool unaligned = offset % page != 0 || (nbytes % page != 0 && !file->pads());
  if (operation == Operation::write && unaligned) (void)file->buffered_descriptor();

  if (checksum.like != nullptr) after.push_back(checksum.like);

  auto request = std::make_shared<Request>(operation, std::move(file), data, nbytes, offset,
                                           std::move(checksum), owner);
  Requests finished;
  Worker* to_wake = nullptr;
  {
    const std::lock_guard lock(mutex_);
    if (refusing_) throw Misuse("the engine is closed");
    stats_[static_cast<std::size_t>(operation)].requests += 1;
    request->place = blocked_.insert(blocked_.end(), request);
    bool blocker_failed = false;
    for (const auto& blocker : after) {
      blocker_failed = blocker_failed || (blocker->ended && blocker->failure);
      if (blocker->ended) continue;
      blocker->followers.push_back(request);
      request->blockers += 1;
    }
    if (blocker_failed) {
      request->failure = Failure{Failure::Kind::abandoned};
      finish(request, finished);
    } else if (request->blockers == 0) {
      start(*request);
      if (is_over(*request)) finish(request, finished);
      to_wake = take_idle_worker();
    }
  }
  for (const auto& one : finished) one->finish();
  if (to_wake != nullptr) to_wake->wake();
  return request;
}

bool Engine::cancel(const Requests& requests) {
  Requests finished;
  {
    const std::lock_guard lock(mutex_);
    if (!std::all_of(requests.begin(), requests.end(),
                     [](const auto& request) { return request->untouched(); }))
      return false;
    for (const auto& request : requests) {
      if (request->ended) continue;  // cancelled with a request that it waited for
      fail(*request, Failure{Failure::Kind::cancelled});
      finish(request, finished);
    }
  }
  for (const auto& one : finished) one->finish();
  return true;
}

/// An idle worker to wake if there is work: the last to go to sleep, whose memory is likeliest to
/// be cached. One at a time: each woken worker wakes the next, so that the caller does not pay for
/// all wake-ups.
Worker* Engine::take_idle_worker() noexcept {
  if (queued_bytes_ == 0 || idle_workers_.empty()) return nullptr;
  Worker* const worker = idle_workers_.back();
  idle_workers_.pop_back();
  worker->idle_listed = false;
  return worker;
}

std::uint64_t Engine::queued_blocks() const {
  return (queued_bytes_ + settings_.block_size - 1) / settings_.block_size;
}

/// A worker's exchange with the engine between two visits to its kernel queue: returns finished
/// blocks, takes new ones. Returns false when the worker must end.
bool Engine::exchange(Worker& worker) {
  Worker* next = nullptr;
  bool stopping = false;
  {
    const std::lock_guard lock(mutex_);
    if (worker.idle_listed)
      idle_workers_.erase(std::find(idle_workers_.begin(), idle_workers_.end(), &worker));
    retire_blocks(worker);
    assign_blocks(worker);
    worker.idle_listed = worker.may_sleep = queued_bytes_ == 0 && worker.free_slots() > 0;
    if (worker.idle_listed) idle_workers_.push_back(&worker);
    next = take_idle_worker();
    stopping = stopping_;
  }
  if (next != nullptr) next->wake();
  return !stopping;
}

void Engine::retire_blocks(Worker& worker) {
  for (Slot* slot : worker.retired) {
    Request& request = *slot->block.request;
    DirectionStats& stats = stats_[static_cast<std::size_t>(request.operation)];
    stats.bytes += slot->moved();
    stats.retries += slot->retries;
    request.done += slot->moved();
    request.sum += slot->sum;
    request.blocks_in_flight -= 1;
    if (slot->failure) fail(request, *slot->failure);
    if (is_over(request)) finish(*request.place, worker.finished);
    worker.release(*slot);
  }
  worker.retired.clear();

  if (Request* request = std::exchange(worker.reserving, nullptr)) {
    request->blocks_in_flight -= 1;
    request->reserved = worker.reservation_error == 0;
    if (request->reserved) {
      queues_[static_cast<std::size_t>(request->operation)].push_front(request);
      queued_bytes_ += request->nbytes;
    } else {
      fail(*request, Failure{Failure::Kind::system, worker.reservation_error});
      if (is_over(*request)) finish(*request->place, worker.finished);
    }
  }
}

void Engine::assign_blocks(Worker& worker) {
  // A fair share, so that copying and pinning for one request is spread over the threads. The rest
  // is taken at the next exchange.
  const std::uint64_t share =
      (queued_blocks() + settings_.thread_count - 1) / settings_.thread_count;
  for (std::uint64_t left = std::min<std::uint64_t>(worker.free_slots(), share); left > 0; --left) {
    if (queues_[turn_].empty()) turn_ ^= 1;
    auto& queue = queues_[turn_];
    if (queue.empty()) return;
    turn_ ^= 1;
    Request& request = *queue.front();
    const bool writing = request.operation == Operation::write;
    if (writing && !request.reserved && request.file->extends(request.offset + request.nbytes)) {
      queue.pop_front();
      queued_bytes_ -= request.nbytes;
      request.blocks_in_flight += 1;
      worker.reserving = &request;
      return;
    }
    request.reserved = true;
    const Block block = cut_block(request, settings_.block_size, page_size_);
    request.cut += block.nbytes;
    request.blocks_in_flight += 1;
    queued_bytes_ -= block.nbytes;
    if (request.cut == request.nbytes) queue.pop_front();
    worker.accept(block);
  }
}

/// Records the first failure of a request, and removes its remaining bytes from the queue.
void Engine::fail(Request& request, Failure failure) {
  if (request.failure) return;
  request.failure = failure;
  if (request.blockers > 0) return;
  auto& queue = queues_[static_cast<std::size_t>(request.operation)];
  const auto place = std::find(queue.begin(), queue.end(), &request);
  if (place == queue.end()) return;
  queue.erase(place);
  queued_bytes_ -= request.nbytes - request.cut;
}

/// Queues a request that waits for no other.
void Engine::start(Request& request) {
  const auto direction = static_cast<std::size_t>(request.operation);
  request.started = Clock::now();
  unfinished_.splice(unfinished_.end(), blocked_, request.place);
  if (stats_[direction].in_flight++ == 0) busy_since_[direction] = request.started;
  if (request.nbytes == 0) return;  // nothing to queue: it is exhausted
  queues_[direction].push_back(&request);
  queued_bytes_ += request.nbytes;
}

/// Whether a started request has ended; if so, checks its checksum.
bool Engine::is_over(Request& request) {
  if (!request.exhausted()) return false;
  const Checksum& checksum = request.checksum;
  const bool differs = (checksum.expected && request.sum != *checksum.expected) ||
                       (checksum.like != nullptr && request.sum != checksum.like->sum);
  if (!request.failure && differs) request.failure = Failure{Failure::Kind::corrupt};
  return true;
}

/// Ends a request. Fails those that wait for it if it failed, else starts those that wait for no
/// other. Appends what ended to *finished*, to be announced without the mutex.
void Engine::finish(const std::shared_ptr<Request>& request, Requests& finished) {
  std::size_t next = finished.size();
  end(request, finished);
  for (; next < finished.size(); ++next) {
    const std::shared_ptr<Request> ended = finished[next];  // a copy: the vector grows
    for (const auto& follower : std::exchange(ended->followers, {})) {
      if (follower->ended) continue;
      if (ended->failure) {
        follower->failure = Failure{Failure::Kind::abandoned};
        end(follower, finished);
      } else if (--follower->blockers == 0) {
        start(*follower);
        if (is_over(*follower)) end(follower, finished);
      }
    }
  }
  if (unfinished_.empty()) idle_.notify_all();
}

void Engine::end(const std::shared_ptr<Request>& request, Requests& finished) {
  request->ended = true;
  const auto direction = static_cast<std::size_t>(request->operation);
  DirectionStats& stats = stats_[direction];
  const bool was_started = request->started != Clock::time_point{};
  if (was_started && --stats.in_flight == 0)
    stats.busy_seconds += seconds_since(busy_since_[direction]);
  released_owners_.push_back(request->owner);
  finished.push_back(request);
  if (request->failure && !request->failure->is_consequence()) remember_failure(request);
  (was_started ? unfinished_ : blocked_).erase(request->place);
}

void Engine::remember_failure(const std::shared_ptr<Request>& request) {
  failures_.erase(std::remove_if(failures_.begin(), failures_.end(),
                                 [](const auto& failed) { return failed->observed.load(); }),
                  failures_.end());
  failures_.push_back(request);
}

void Engine::note_changed_buffer(const std::shared_ptr<Request>& request) {
  const std::lock_guard lock(mutex_);
  if (request->failure) return;
  request->failure = Failure{Failure::Kind::buffer_changed};
  remember_failure(request);
}

std::vector<void*> Engine::take_released_owners() {
  const std::lock_guard lock(mutex_);
  return std::exchange(released_owners_, {});
}

void Engine::refuse_requests() {
  const std::lock_guard lock(mutex_);
  refusing_ = true;
}

bool Engine::wait_idle(std::chrono::nanoseconds limit) {
  std::unique_lock lock(mutex_);
  return idle_.wait_for(lock, limit, [this] { return unfinished_.empty(); });
}

std::shared_ptr<Request> Engine::take_unobserved_failure() {
  const std::lock_guard lock(mutex_);
  for (const auto& request : failures_) {
    if (!request->observed.exchange(true)) return request;
  }
  return nullptr;
}

Stats Engine::stats() const {
  const std::lock_guard lock(mutex_);
  Stats now{stats_, unfinished_.empty() ? nullptr : unfinished_.front()};
  for (std::size_t direction = 0; direction < now.directions.size(); ++direction) {
    if (now.directions[direction].in_flight > 0)
      now.directions[direction].busy_seconds += seconds_since(busy_since_[direction]);
  }
  return now;
}

}  // namespace nvme_offload
