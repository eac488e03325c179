#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <deque>

#include "backend.h"
#include "failure.h"

namespace nvme_offload {
namespace {

/// Touches no byte: what is left to measure is the engine itself, and what is built on it.
///
/// Every transfer completes at once, or when a drive of the given speeds, which serves one after another, would have it done. Reads and writes that
/// take turns then go at the speed in between, as on a drive.
class NullBackend final : public Backend {
 public:
  NullBackend(std::array<double, 2> bytes_per_second, std::uint32_t queue_depth, WakeSignal& wake)
      : bytes_per_second_(bytes_per_second), depth_(queue_depth), wake_(wake) {}

  [[nodiscard]] std::uint32_t depth() const noexcept override { return depth_; }

  std::size_t submit(const Transfer* const* transfers, std::size_t count, int& /*error*/) override {
    for (std::size_t i = 0; i < count; ++i) {
      const Transfer& transfer = *transfers[i];
      under_way_.push_back({{transfer.slot, static_cast<std::int64_t>(transfer.nbytes)}, end_of(transfer)});
    }
    return count;
  }

  int reap(std::vector<Completion>& completions, bool wait) override {
    const bool timed = bytes_per_second_[0] > 0;
    if (wait && under_way_.empty()) wake_.wait();
    if (wait && timed && !under_way_.empty() && Clock::now() < under_way_.front().end) wake_.wait_until(under_way_.front().end);
    const Clock::time_point now = timed ? Clock::now() : Clock::time_point{};
    for (; !under_way_.empty() && under_way_.front().end <= now; under_way_.pop_front()) completions.push_back(under_way_.front().completion);
    return 0;
  }

 private:
  struct Served {
    Completion completion;
    Clock::time_point end;
  };

  Clock::time_point end_of(const Transfer& transfer) {
    const double speed = bytes_per_second_[static_cast<std::size_t>(transfer.operation)];
    if (speed <= 0) return {};
    const std::chrono::duration<double> seconds{static_cast<double>(transfer.nbytes) / speed};
    idle_from_ = std::max(idle_from_, Clock::now()) + std::chrono::duration_cast<Clock::duration>(seconds);
    return idle_from_;
  }

  const std::array<double, 2> bytes_per_second_;  // by Operation; 0: at once
  const std::uint32_t depth_;
  WakeSignal& wake_;
  std::deque<Served> under_way_;
  Clock::time_point idle_from_;
};

}  // namespace

std::unique_ptr<Backend> make_null_backend(const std::string& name, std::uint32_t queue_depth, WakeSignal& wake) {
  std::array<double, 2> speeds{};
  const bool timed = std::sscanf(name.c_str(), "null:%lf:%lf", &speeds[0], &speeds[1]) == 2 && speeds[0] > 0 && speeds[1] > 0;
  if (!timed && name != "null") throw Misuse("there is no backend called " + name);
  return std::make_unique<NullBackend>(timed ? speeds : std::array<double, 2>{}, queue_depth, wake);
}

}  // namespace nvme_offload
