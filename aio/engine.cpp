#include "engine.h"

#include <pthread.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <limits>
#include <system_error>
#include <thread>
#include <utility>

#include "checksum.h"
#include "failure.h"
#include "memory.h"

namespace nvme_offload {
namespace {

using std::chrono::microseconds;

/// Transfers that come back empty-handed (EAGAIN, EINTR, no byte of progress) are offered again this often, after ever longer pauses up to
/// the longest: about a second in all. A drive that is merely busy is not failed for it; one that never takes the block is not waited for.
constexpr std::uint32_t kMostStalls = 120;
constexpr microseconds kLongestPause{10'000};

microseconds pause_after(std::uint32_t stalls) { return std::min(kLongestPause, microseconds{10} * (1U << std::min(stalls, 10U))); }

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

bool is_transient(int error) { return error == EAGAIN || error == EINTR; }

constexpr std::uint64_t align_down(std::uint64_t value, std::uint64_t alignment) { return value / alignment * alignment; }
constexpr std::uint64_t align_up(std::uint64_t value, std::uint64_t alignment) { return align_down(value + alignment - 1, alignment); }

}  // namespace

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

/// One thread with a kernel queue of its own.
class Worker {
 public:
  /// *script* is null where nothing is to go wrong.
  Worker(Engine& engine, const std::shared_ptr<FaultScript>& script)
      : engine_(engine), backend_(make_backend(engine.settings_.backend, engine.settings_.queue_depth, wake_)), slots_(backend_->depth()) {
    if (script != nullptr) backend_ = make_fault_backend(std::move(backend_), script);
    const std::size_t depth = slots_.size();
    for (std::uint32_t i = backend_->depth(); i-- > 0;) free_.push_back(i);
    accepted_.reserve(depth);
    ready_.reserve(depth);
    retired.reserve(depth);
    finished.reserve(depth + 1);
    completions_.reserve(depth + 1);
  }

  void start() {
    // Signals belong to the threads of the interpreter. Threads inherit the mask of their maker.
    sigset_t all;
    sigset_t before;
    ::sigfillset(&all);
    ::pthread_sigmask(SIG_SETMASK, &all, &before);
    try {
      thread_ = std::thread(&Worker::run, this);
    } catch (...) {
      ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
      throw;
    }
    ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
    ::pthread_setname_np(thread_.native_handle(), "nvme-offload");
  }

  void join() {
    if (thread_.joinable()) thread_.join();
  }

  void wake() noexcept { wake_.raise(); }

  // What the engine's critical section reads and changes on this worker's behalf.
  std::vector<Slot*> retired;                              // blocks that are through, to be given back
  std::vector<std::shared_ptr<Request>> finished;          // requests that the last exchange found complete, to be announced outside of it
  Request* reserving = nullptr;                            // a write whose file must reach its end before it is cut
  int reservation_error = 0;                               // what came of that, an errno
  bool may_sleep = false;                                  // found no work though it had room
  std::vector<std::pair<std::byte*, std::size_t>> memory;  // to be registered with the kernel queue, in order
  std::uint64_t newly_registered = 0;                      // bytes that the kernel took since the last exchange
  std::uint64_t registered_bytes = 0;                      // that it took in all
  bool hungry = false;                                     // likewise, and nobody woke it since; guarded by the engine's mutex

  /// Blocks that it can take now.
  [[nodiscard]] std::size_t room() const noexcept {
    const bool draining = !engine_.settings_.overlap_events && free_.size() < slots_.size();
    return draining ? 0 : free_.size();
  }

  void accept(Block block) {
    const std::uint32_t index = free_.back();
    free_.pop_back();
    slots_[index].block = block;
    accepted_.push_back(index);
  }

  void release(const Slot& slot) { free_.push_back(static_cast<std::uint32_t>(&slot - slots_.data())); }

 private:
  void run() {
    while (engine_.exchange(*this)) {
      for (const auto& request : finished) request->finish();
      finished.clear();
      for (; registered_ < memory.size(); ++registered_) newly_registered += backend_->register_memory(memory[registered_].first, memory[registered_].second);
      for (const std::uint32_t index : accepted_) prepare(index);
      accepted_.clear();
      submit_ready();
      reap();
      if (reserving != nullptr) reserve();
    }
    backend_.reset();  // in each thread, since it takes the kernel tens of milliseconds to take a libaio queue down
  }

  /// Fills in a slot for the block that it was given.
  void prepare(std::uint32_t index) {
    Slot& slot = slots_[index];
    const Block& block = slot.block;
    const Request& request = *block.request;
    File& file = *request.file;
    const std::uint64_t position = request.offset + block.begin;
    slot.alignment = block.route == Route::buffered ? 1 : file.offset_alignment();
    slot.padding = position % slot.alignment;
    slot.file_offset = position - slot.padding;
    slot.needed = slot.padding + block.nbytes;
    slot.range = align_up(slot.needed, slot.alignment);
    slot.progress = 0;
    slot.stalls = 0;
    slot.retries = 0;
    slot.failure.reset();
    slot.memory = request.data + block.begin;
    slot.sum = request.checksum.wanted && request.operation == Operation::write ? checksum(slot) : 0;
    if (block.route == Route::bounced) {
      try {
        if (slot.bounce.nbytes() < slot.range) slot.bounce = Memory(std::max(slot.range, engine_.settings_.block_size), Memory::InChild::absent);
      } catch (const std::bad_alloc&) {
        fail(slot, ENOMEM);
        return;
      }
      slot.memory = slot.bounce.data();
      if (request.operation == Operation::write) std::memcpy(slot.memory, request.data + block.begin, block.nbytes);
    }
    slot.transfer.operation = request.operation;
    slot.transfer.slot = index;
    slot.transfer.file = &request.file;
    // Opened at submission where a block can take this route, so this cannot fail here.
    slot.transfer.descriptor = block.route == Route::buffered ? file.buffered_descriptor() : file.descriptor();
    offer(slot);
  }

  /// Makes the rest of a slot's range the next transfer.
  void offer(Slot& slot) {
    const std::uint64_t start = align_down(slot.progress, slot.alignment);
    slot.transfer.data = slot.memory + start;
    slot.transfer.offset = slot.file_offset + start;
    slot.transfer.nbytes = slot.range - start;
    ready_.push_back(&slot.transfer);
  }

  Slot& slot_of(const Transfer& transfer) { return slots_[transfer.slot]; }

  void fail(Slot& slot, int error) {
    slot.failure = Failure{Failure::Kind::system, error};
    retired.push_back(&slot);
  }

  /// Offers the slot again, or gives it up where it has made no progress for too long.
  void stall(Slot& slot, int error) {
    slot.stalls += 1;
    longest_stall_ = std::max(longest_stall_, slot.stalls);
    if (slot.stalls > kMostStalls) {
      fail(slot, error);
    } else {
      slot.retries += 1;
      offer(slot);
    }
  }

  void submit_ready() {
    std::size_t first = 0;
    while (first < ready_.size()) {
      const std::size_t count = engine_.settings_.single_submit ? 1 : ready_.size() - first;
      int error = 0;
      const std::size_t accepted = backend_->submit(ready_.data() + first, count, error);
      first += accepted;
      in_flight_ += accepted;
      if (accepted == count) continue;
      Slot& refused = slot_of(*ready_[first]);
      if (is_transient(error)) {
        if (in_flight_ > 0) break;  // full for now: what is under way will make room
        refused.stalls += 1;
        longest_stall_ = std::max(longest_stall_, refused.stalls);
        if (refused.stalls <= kMostStalls) break;
        // The queue takes nothing at all: what stands behind this one has waited for as long.
        while (first < ready_.size()) fail(slot_of(*ready_[first++]), error);
      } else {
        fail(refused, error);
        first += 1;
      }
    }
    ready_.erase(ready_.begin(), ready_.begin() + static_cast<std::ptrdiff_t>(first));
  }

  void reserve() {
    Request& request = *reserving;
    File& file = *request.file;
    const std::uint64_t end = request.offset + request.nbytes;
    reservation_error = file.extends(end) ? file.reserve(request.offset, request.nbytes) : 0;
  }

  void reap() {
    // The kernel refused to take or to move something just now, and nothing else is under way to wait for: give it a moment.
    if (longest_stall_ > 0 && in_flight_ == 0) std::this_thread::sleep_for(pause_after(longest_stall_));
    longest_stall_ = 0;
    const bool nothing_to_do = in_flight_ > 0 ? may_sleep || room() == 0 || !ready_.empty() : may_sleep && ready_.empty();
    completions_.clear();
    if (backend_->reap(completions_, nothing_to_do && retired.empty() && reserving == nullptr && newly_registered == 0) != 0)
      std::this_thread::sleep_for(kLongestPause);
    in_flight_ -= completions_.size();
    for (const Completion& completion : completions_) judge(slots_[completion.slot], completion.result);
  }

  /// Decides what a completion means: through, to be continued, to be tried again, or failed.
  void judge(Slot& slot, std::int64_t result) {
    if (result < 0) {
      const int error = static_cast<int>(-result);
      if (is_transient(error)) {
        stall(slot, error);
      } else {
        fail(slot, error);
      }
      return;
    }
    const std::uint64_t start = align_down(slot.progress, slot.alignment);
    const std::uint64_t reached = start + std::min(static_cast<std::uint64_t>(result), slot.transfer.nbytes);
    if (reached >= slot.needed) {
      const Block& block = slot.block;
      if (block.route == Route::bounced && slot.transfer.operation == Operation::read) {
        std::memcpy(block.request->data + block.begin, slot.memory + slot.padding, block.nbytes);
      }
      if (slot.transfer.operation == Operation::read && block.request->checksum.wanted) slot.sum = checksum(slot);
      slot.progress = slot.needed;
      retired.push_back(&slot);
    } else if (reached > slot.progress) {
      slot.progress = reached;
      slot.stalls = 0;
      slot.retries += 1;
      offer(slot);
    } else if (slot.transfer.operation == Operation::read && ends_before(slot)) {
      slot.failure = Failure{Failure::Kind::truncated};
      if (slot.block.route == Route::bounced) std::memcpy(slot.block.request->data + slot.block.begin, slot.memory + slot.padding, slot.moved());
      retired.push_back(&slot);
    } else {
      stall(slot, EIO);
    }
  }

  static std::uint64_t checksum(const Slot& slot) {
    const Block& block = slot.block;
    return checksum_block(block.request->data + block.begin, block.nbytes, block.begin, block.request->offset);
  }

  /// Whether the file ends where a read got no further.
  static bool ends_before(const Slot& slot) {
    struct stat status {};
    if (::fstat(slot.transfer.descriptor, &status) != 0 || !S_ISREG(status.st_mode)) return true;
    return static_cast<std::uint64_t>(status.st_size) <= slot.file_offset + slot.progress;
  }

  Engine& engine_;
  WakeSignal wake_;
  std::unique_ptr<Backend> backend_;
  std::vector<Slot> slots_;
  std::vector<std::uint32_t> free_;
  std::vector<std::uint32_t> accepted_;  // slots with a new block
  std::vector<const Transfer*> ready_;   // to be handed to the kernel
  std::vector<Completion> completions_;
  std::size_t registered_ = 0;       // entries of *memory* that the kernel queue has been offered
  std::size_t in_flight_ = 0;        // transfers that the kernel has
  std::uint32_t longest_stall_ = 0;  // among the transfers that made no progress since the last reap
  std::thread thread_;
};

Engine::Engine(Settings settings) : settings_(std::move(settings)), page_size_(static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE))) {
  const auto script = settings_.faults.empty() ? nullptr : std::make_shared<FaultScript>(settings_.faults);
  for (std::uint32_t i = 0; i < settings_.thread_count; ++i) {
    workers_.push_back(std::make_unique<Worker>(*this, script));
  }
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

std::shared_ptr<Request> Engine::submit(Operation operation, std::shared_ptr<File> file, std::byte* data, std::uint64_t nbytes, std::uint64_t offset,
                                        Checksum checksum, void* owner) {
  constexpr auto kLargestOffset = static_cast<std::uint64_t>(std::numeric_limits<off_t>::max());
  if (nbytes > kLargestOffset || offset > kLargestOffset - nbytes) throw Misuse("the range ends beyond the largest offset that a file can have");
  if (checksum.wanted && !has_checksum()) {
    throw Unsupported("this build has no checksums: install libxxhash-dev (Debian, Ubuntu) or xxhash-devel (Fedora, RHEL) and install nvme-offload again");
  }
  const std::uint64_t page = std::max(page_size_, file->offset_alignment());
  // Opened here, where it can still be refused, rather than in a worker.
  if (operation == Operation::write && (offset % page != 0 || nbytes % page != 0)) (void)file->buffered_descriptor();

  auto request = std::make_shared<Request>(operation, std::move(file), data, nbytes, offset, checksum, owner);
  std::vector<Worker*> to_wake;
  {
    const std::lock_guard lock(mutex_);
    if (refusing_) throw Misuse("the engine is closed");
    const auto direction = static_cast<std::size_t>(operation);
    DirectionStats& stats = stats_[direction];
    stats.requests += 1;
    if (nbytes == 0) {
      released_owners_.push_back(owner);
    } else {
      if (stats.in_flight++ == 0) busy_since_[direction] = Clock::now();
      request->place = unfinished_.insert(unfinished_.end(), request);
      queues_[direction].push_back(request.get());
      queued_bytes_ += nbytes;
      to_wake = hungry_workers();
    }
  }
  if (nbytes == 0) request->finish();
  for (Worker* worker : to_wake) worker->wake();
  return request;
}

/// As many workers as there are blocks for, of those that wait for work; each is returned once.
std::vector<Worker*> Engine::hungry_workers() {
  std::vector<Worker*> found;
  const std::uint64_t blocks = queued_blocks();
  for (auto& worker : workers_) {
    if (found.size() >= blocks) break;
    if (worker->hungry) {
      worker->hungry = false;
      found.push_back(worker.get());
    }
  }
  return found;
}

std::uint64_t Engine::queued_blocks() const { return (queued_bytes_ + settings_.block_size - 1) / settings_.block_size; }

/// What a worker does between two visits to its kernel queue, in one critical section: gives back what is through and takes what fits.
/// Returns false when the worker is to end.
bool Engine::exchange(Worker& worker) {
  const std::lock_guard lock(mutex_);
  for (Slot* slot : worker.retired) {
    Request& request = *slot->block.request;
    DirectionStats& stats = stats_[static_cast<std::size_t>(request.operation)];
    stats.bytes += slot->moved();
    stats.retries += slot->retries;
    request.done += slot->moved();
    request.sum += slot->sum;
    request.outstanding -= 1;
    if (slot->failure) fail(request, *slot->failure);
    finish_if_exhausted(request, worker.finished);
    worker.release(*slot);
  }
  worker.retired.clear();

  if (Request* request = std::exchange(worker.reserving, nullptr)) {
    request->outstanding -= 1;
    request->reserved = worker.reservation_error == 0;
    if (request->reserved) {
      queues_[static_cast<std::size_t>(request->operation)].push_front(request);
      queued_bytes_ += request->nbytes;
      for (Worker* other : hungry_workers()) other->wake();
    } else {
      fail(*request, Failure{Failure::Kind::system, worker.reservation_error});
      finish_if_exhausted(*request, worker.finished);
    }
  }

  worker.registered_bytes += std::exchange(worker.newly_registered, 0);
  worker.memory.insert(worker.memory.end(), memory_.begin() + static_cast<std::ptrdiff_t>(worker.memory.size()), memory_.end());

  take_blocks(worker);
  worker.may_sleep = queued_bytes_ == 0 && worker.room() > 0;
  worker.hungry = worker.may_sleep;
  return !stopping_;
}

void Engine::take_blocks(Worker& worker) {
  // A fair share, so that the copying and pinning of one request is spread over the threads; what is left is taken the next time round.
  const std::uint64_t share = (queued_blocks() + settings_.thread_count - 1) / settings_.thread_count;
  for (std::uint64_t room = std::min<std::uint64_t>(worker.room(), share); room > 0; --room) {
    if (queues_[turn_].empty()) turn_ ^= 1;
    auto& queue = queues_[turn_];
    if (queue.empty()) return;
    turn_ ^= 1;
    Request& request = *queue.front();
    const bool writing = request.operation == Operation::write;
    if (writing && !request.reserved && request.file->extends(request.offset + request.nbytes)) {
      queue.pop_front();
      queued_bytes_ -= request.nbytes;
      request.outstanding += 1;
      worker.reserving = &request;
      return;
    }
    request.reserved = true;
    const Block block = cut_block(request, settings_.block_size, page_size_);
    request.cut += block.nbytes;
    request.outstanding += 1;
    queued_bytes_ -= block.nbytes;
    if (request.cut == request.nbytes) queue.pop_front();
    worker.accept(block);
  }
}

/// Notes the first failure of a request and takes what is not under way yet out of the queue.
void Engine::fail(Request& request, Failure failure) {
  if (request.failure) return;
  request.failure = failure;
  auto& queue = queues_[static_cast<std::size_t>(request.operation)];
  const auto place = std::find(queue.begin(), queue.end(), &request);
  if (place == queue.end()) return;
  queue.erase(place);
  queued_bytes_ -= request.nbytes - request.cut;
}

void Engine::finish_if_exhausted(Request& request, Requests& finished) {
  if (!request.exhausted()) return;
  if (!request.failure && request.checksum.expected && request.sum != *request.checksum.expected) {
    request.failure = Failure{Failure::Kind::corrupt};
  }
  const auto direction = static_cast<std::size_t>(request.operation);
  DirectionStats& stats = stats_[direction];
  if (--stats.in_flight == 0) stats.busy_seconds += seconds_since(busy_since_[direction]);
  released_owners_.push_back(request.owner);
  finished.push_back(*request.place);
  if (request.failure) {
    failures_.erase(std::remove_if(failures_.begin(), failures_.end(), [](const auto& failed) { return failed->observed.load(); }), failures_.end());
    failures_.push_back(*request.place);
  }
  unfinished_.erase(request.place);
  if (unfinished_.empty()) idle_.notify_all();
}

void Engine::register_memory(std::byte* data, std::size_t nbytes) {
  const std::lock_guard lock(mutex_);
  memory_.emplace_back(data, nbytes);
  for (auto& worker : workers_) worker->wake();
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
  std::uint64_t registered = UINT64_MAX;
  for (const auto& worker : workers_) registered = std::min(registered, worker->registered_bytes);
  Stats now{stats_, registered, unfinished_.empty() ? nullptr : unfinished_.front()};
  for (std::size_t direction = 0; direction < now.directions.size(); ++direction) {
    if (now.directions[direction].in_flight > 0) now.directions[direction].busy_seconds += seconds_since(busy_since_[direction]);
  }
  return now;
}

}  // namespace nvme_offload
