#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <deque>

#include "backend.h"
#include "failure.h"

namespace nvme_offload {
namespace {

/// Moves no bytes: measures the engine and its users.
///
/// A transfer completes at once, or when a drive of the given speeds that serves one transfer at a
/// time would have completed it. Alternating reads and writes then run at the harmonic mean of the
/// speeds, as on a drive.
class NullBackend final : public Backend {
 public:
  NullBackend(std::array<double, 2> bytes_per_second, std::uint32_t queue_depth, WakeSignal& wake)
      : bytes_per_second_(bytes_per_second), depth_(queue_depth), wake_(wake) {}

  [[nodiscard]] std::uint32_t depth() const noexcept override { return depth_; }

  std::size_t submit(const Transfer* const* transfers, std::size_t count, int& /*error*/) override {
    for (std::size_t i = 0; i < count; ++i) {
      const Transfer& transfer = *transfers[i];
      in_flight_.push_back(
          {{transfer.slot, static_cast<std::int64_t>(transfer.nbytes)}, end_of(transfer)});
    }
    return count;
  }

  int reap(std::vector<Completion>& completions, bool wait) override {
    const bool timed = bytes_per_second_[0] > 0;
    if (wait && in_flight_.empty()) wake_.wait();
    if (wait && timed && !in_flight_.empty() && Clock::now() < in_flight_.front().end)
      wake_.wait_until(in_flight_.front().end);
    const Clock::time_point now = timed ? Clock::now() : Clock::time_point{};
    for (; !in_flight_.empty() && in_flight_.front().end <= now; in_flight_.pop_front())
      completions.push_back(in_flight_.front().completion);
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
    idle_from_ =
        std::max(idle_from_, Clock::now()) + std::chrono::duration_cast<Clock::duration>(seconds);
    return idle_from_;
  }

  const std::array<double, 2> bytes_per_second_;  // by Operation; 0: completes at once
  const std::uint32_t depth_;
  WakeSignal& wake_;
  std::deque<Served> in_flight_;
  Clock::time_point idle_from_;
};

}  // namespace

std::unique_ptr<Backend> make_null_backend(const std::string& name, std::uint32_t queue_depth,
                                           WakeSignal& wake) {
  std::array<double, 2> speeds{};
  const bool timed = std::sscanf(name.c_str(), "null:%lf:%lf", &speeds[0], &speeds[1]) == 2 &&
                     speeds[0] > 0 && speeds[1] > 0;
  if (!timed && name != "null") throw Misuse("there is no backend called " + name);
  return std::make_unique<NullBackend>(timed ? speeds : std::array<double, 2>{}, queue_depth, wake);
}

}  // namespace nvme_offload
