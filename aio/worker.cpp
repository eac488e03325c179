#include "worker.h"

#include <pthread.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstring>
#include <new>

#include "checksum.h"
#include "engine.h"

namespace nvme_offload {
namespace {

using std::chrono::microseconds;

/// A transfer without progress (EAGAIN, EINTR, 0 bytes) is resubmitted this often, after growing
/// pauses up to the longest: about a second in all. So a busy drive does not fail a request, and a
/// drive that never takes the block does not block it for ever.
constexpr std::uint32_t kMaxStalls = 120;
constexpr microseconds kLongestPause{10'000};

/// The longest sleep while some transfers are in flight and others pause: Backend::reap waits for
/// completions without a limit.
constexpr microseconds kPollPause{500};

/// The kernel merges adjacent blocks when it gets more than two at a time (AIO_PLUG_THRESHOLD in
/// fs/aio.c, IO_PLUG_THRESHOLD in io_uring/io_uring.c). The drive then sees a few large requests
/// instead of many of the block size, and its queue drains in steps. Keeping them apart gains a
/// fifth of the throughput on a virtio disk. Small blocks are better merged.
constexpr std::size_t kMaxBatch = 2;
constexpr std::uint64_t kSmallBlock = 64 << 10;

microseconds pause_after(std::uint32_t stalls) {
  return std::min(kLongestPause, microseconds{10} * (1U << std::min(stalls, 10U)));
}

bool is_transient(int error) { return error == EAGAIN || error == EINTR; }

constexpr std::uint64_t align_down(std::uint64_t value, std::uint64_t alignment) {
  return value / alignment * alignment;
}
constexpr std::uint64_t align_up(std::uint64_t value, std::uint64_t alignment) {
  return align_down(value + alignment - 1, alignment);
}

std::uint64_t checksum(const Slot& slot) {
  const Block& block = slot.block;
  return checksum_block(block.request->data + block.begin, block.nbytes, block.begin,
                        block.request->offset);
}

/// Whether a short read stopped at the end of the file.
bool ends_before(const Slot& slot) {
  struct stat status{};
  if (::fstat(slot.transfer.descriptor, &status) != 0 || !S_ISREG(status.st_mode)) return true;
  return static_cast<std::uint64_t>(status.st_size) <= slot.file_offset + slot.progress;
}

}  // namespace

Worker::Worker(Engine& engine, const std::shared_ptr<FaultScript>& script)
    : engine_(engine),
      backend_(make_backend(engine.settings().backend, engine.settings().queue_depth, wake_)),
      slots_(backend_->depth()) {
  if (script != nullptr) backend_ = make_fault_backend(std::move(backend_), script);
  const std::size_t depth = slots_.size();
  for (std::uint32_t i = backend_->depth(); i-- > 0;) free_.push_back(i);
  accepted_.reserve(depth);
  ready_.reserve(depth);
  paused_.reserve(depth);
  retired.reserve(depth);
  finished.reserve(depth + 1);
  completions_.reserve(depth + 1);
}

void Worker::start() {
  // Block all signals: they are for the interpreter's threads. A thread inherits the mask of its
  // creator.
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

void Worker::join() {
  if (thread_.joinable()) thread_.join();
}

std::size_t Worker::free_slots() const noexcept {
  const bool draining = !engine_.settings().overlap_events && free_.size() < slots_.size();
  return draining ? 0 : free_.size();
}

void Worker::accept(Block block) {
  const std::uint32_t index = free_.back();
  free_.pop_back();
  slots_[index].block = block;
  accepted_.push_back(index);
}

void Worker::run() {
  while (engine_.exchange(*this)) {
    for (const auto& request : finished) request->finish();
    finished.clear();
    for (const std::uint32_t index : accepted_) {
      if (prepare(index)) submit_ready();  // submit before work on the next block's bytes
    }
    accepted_.clear();
    resume_paused();
    submit_ready();
    reap();
    if (reserving != nullptr) reserve();
  }
  // in each thread: destroying a libaio queue takes the kernel tens of milliseconds
  backend_.reset();
}

/// Fills in the slot of a new block. Returns whether that took work on its bytes (copy, checksum).
bool Worker::prepare(std::uint32_t index) {
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
      if (slot.bounce.nbytes() < slot.range)
        slot.bounce =
            Memory(std::max(slot.range, engine_.settings().block_size), Memory::InChild::absent);
    } catch (const std::bad_alloc&) {
      fail(slot, ENOMEM);
      return false;
    }
    slot.memory = slot.bounce.data();
    if (request.operation == Operation::write) {
      std::memcpy(slot.memory, request.data + block.begin, block.nbytes);
      std::memset(slot.memory + block.nbytes, 0, slot.range - block.nbytes);
    }
  }
  slot.transfer.operation = request.operation;
  slot.transfer.slot = index;
  slot.transfer.file = &request.file;
  // Opened by submit() where a block can take this route, so it cannot fail here.
  slot.transfer.descriptor =
      block.route == Route::buffered ? file.buffered_descriptor() : file.descriptor();
  queue_rest(slot);
  return request.operation == Operation::write &&
         (request.checksum.wanted || block.route == Route::bounced);
}

/// Queues the rest of a slot's range as its next transfer.
void Worker::queue_rest(Slot& slot) {
  const std::uint64_t start = align_down(slot.progress, slot.alignment);
  slot.transfer.data = slot.memory + start;
  slot.transfer.offset = slot.file_offset + start;
  slot.transfer.nbytes = slot.range - start;
  ready_.push_back(&slot.transfer);
}

void Worker::submit_ready() {
  const Settings& settings = engine_.settings();
  const std::size_t at_once = settings.single_submit              ? 1
                              : settings.block_size < kSmallBlock ? slots_.size()
                                                                  : kMaxBatch;
  std::size_t first = 0;
  while (first < ready_.size()) {
    const std::size_t count = std::min(ready_.size() - first, at_once);
    int error = 0;
    const std::size_t accepted = backend_->submit(ready_.data() + first, count, error);
    first += accepted;
    in_flight_ += accepted;
    if (accepted == count) continue;
    if (is_transient(error)) {
      if (in_flight_ > 0) break;  // the queue is full: completions will free it
      // The queue takes nothing: the transfers behind this one wait as long.
      for (; first < ready_.size(); ++first) retry_later(slots_[ready_[first]->slot], error);
    } else {
      fail(slots_[ready_[first]->slot], error);
      first += 1;
    }
  }
  ready_.erase(ready_.begin(), ready_.begin() + static_cast<std::ptrdiff_t>(first));
}

void Worker::reserve() {
  Request& request = *reserving;
  File& file = *request.file;
  const std::uint64_t end = request.offset + request.nbytes;
  reservation_error = file.extends(end) ? file.reserve(request.offset, request.nbytes) : 0;
}

void Worker::reap() {
  const bool takes_no_block = may_sleep || free_slots() == 0;
  const bool nothing_to_take =
      in_flight_ > 0 ? takes_no_block || !ready_.empty() : takes_no_block && ready_.empty();
  const bool nothing_to_give =
      retired.empty() && handled_ == completions_.size() && reserving == nullptr;
  const std::size_t known = completions_.size();
  const bool wait = nothing_to_take && nothing_to_give && !wait_for_paused();
  const int error = backend_->reap(completions_, wait);
  if (error != 0) std::this_thread::sleep_for(kLongestPause);
  in_flight_ -= completions_.size() - known;
  // After work on a block's bytes, refill its slot before handling the next completion: the drive
  // must not idle while completions that arrived together are processed.
  for (bool worked = false; !worked && handled_ < completions_.size(); ++handled_) {
    worked = handle_completion(slots_[completions_[handled_].slot], completions_[handled_].result);
  }
  if (handled_ == completions_.size()) {
    completions_.clear();
    handled_ = 0;
  }
}

/// Handles a completion: the block is finished, continued after a short transfer, retried, or
/// failed. Returns whether that took work on its bytes.
bool Worker::handle_completion(Slot& slot, std::int64_t result) {
  if (result < 0) {
    const int error = static_cast<int>(-result);
    if (is_transient(error)) {
      retry_later(slot, error);
    } else {
      fail(slot, error);
    }
    return false;
  }
  const Block& block = slot.block;
  const bool reading = slot.transfer.operation == Operation::read;
  const std::uint64_t start = align_down(slot.progress, slot.alignment);
  const std::uint64_t reached =
      start + std::min(static_cast<std::uint64_t>(result), slot.transfer.nbytes);
  // The zero padding counts: after a write of an odd number of bytes, the last sector is written
  // again.
  if (reached >= (reading ? slot.needed : slot.range)) {
    slot.progress = slot.needed;
    if (!reading && block.route == Route::buffered) {
      const int error = block.request->file->write_through(slot.file_offset, slot.range);
      if (error != 0) {
        slot.progress = 0;
        fail(slot, error);
        return true;
      }
    }
    const bool copied = reading && block.route == Route::bounced;
    const bool summed = reading && block.request->checksum.wanted;
    if (copied)
      std::memcpy(block.request->data + block.begin, slot.memory + slot.padding, block.nbytes);
    if (summed) slot.sum = checksum(slot);
    retired.push_back(&slot);
    return copied || summed;
  }
  if (reached > slot.progress) {
    slot.progress = reached;
    slot.stalls = 0;
    slot.retries += 1;
    queue_rest(slot);
  } else if (reading && ends_before(slot)) {
    slot.failure = Failure{Failure::Kind::truncated};
    if (block.route == Route::bounced)
      std::memcpy(block.request->data + block.begin, slot.memory + slot.padding, slot.moved());
    retired.push_back(&slot);
  } else {
    retry_later(slot, EIO);
  }
  return false;
}

/// Retries the slot after a pause, or fails it after too many attempts without progress.
void Worker::retry_later(Slot& slot, int error) {
  slot.stalls += 1;
  if (slot.stalls > kMaxStalls) {
    fail(slot, error);
    return;
  }
  slot.retries += 1;
  slot.due = Clock::now() + pause_after(slot.stalls);
  paused_.push_back(&slot);
}

/// Queues the paused transfers that are due.
void Worker::resume_paused() {
  if (paused_.empty()) return;
  const Clock::time_point now = Clock::now();
  const auto still_paused = [&](Slot* slot) { return slot->due > now; };
  const auto due = std::stable_partition(paused_.begin(), paused_.end(), still_paused);
  std::for_each(due, paused_.end(), [this](Slot* slot) { queue_rest(*slot); });
  paused_.erase(due, paused_.end());
}

/// Where transfers are paused, waits for the first that is due, or for new work. Returns whether
/// any are.
bool Worker::wait_for_paused() {
  if (paused_.empty()) return false;
  const auto sooner = [](const Slot* one, const Slot* other) { return one->due < other->due; };
  Clock::time_point end = (*std::min_element(paused_.begin(), paused_.end(), sooner))->due;
  if (in_flight_ > 0) end = std::min(end, Clock::now() + kPollPause);
  wake_.wait_until(end);
  return true;
}

void Worker::fail(Slot& slot, int error) {
  slot.failure = Failure{Failure::Kind::system, error};
  retired.push_back(&slot);
}

}  // namespace nvme_offload
