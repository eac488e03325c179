#include "backend.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <ctime>
#include <thread>

#include "failure.h"

namespace nvme_offload {

std::unique_ptr<Backend> make_backend(const std::string& name, std::uint32_t queue_depth,
                                      WakeSignal& wake) {
  if (name == "libaio") return make_libaio_backend(queue_depth, wake);
  if (name == "posix") return make_posix_backend(wake);
  if (name == "io_uring") return make_uring_backend(queue_depth, wake);
  throw Misuse("there is no backend called " + name);
}

WakeSignal::WakeSignal() : descriptor_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (descriptor_ < 0) throw SystemFailure("open", "eventfd", errno);
}

WakeSignal::~WakeSignal() { ::close(descriptor_); }

void WakeSignal::raise() noexcept {
  const std::uint64_t one = 1;
  // fails only if the flag is raised already
  [[maybe_unused]] const auto written = ::write(descriptor_, &one, sizeof one);
}

void WakeSignal::lower() noexcept {
  std::uint64_t count = 0;
  // fails only if the flag is lowered already
  [[maybe_unused]] const auto taken = ::read(descriptor_, &count, sizeof count);
}

void WakeSignal::wait() noexcept {
  wait_until(std::chrono::steady_clock::now() + std::chrono::hours{1});
}

void WakeSignal::wait_until(std::chrono::steady_clock::time_point end) noexcept {
  const auto left =
      std::max(end - std::chrono::steady_clock::now(), std::chrono::steady_clock::duration{0});
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(left);
  const timespec limit{static_cast<std::time_t>(seconds.count()),
                       static_cast<long>(std::chrono::nanoseconds(left - seconds).count())};
  pollfd entry{descriptor_, POLLIN, 0};
  // where a container refuses the call, do not spin
  if (::ppoll(&entry, 1, &limit, nullptr) < 0 && errno != EINTR)
    std::this_thread::sleep_for(
        std::min<std::chrono::nanoseconds>(left, std::chrono::milliseconds{1}));
  lower();
}

}  // namespace nvme_offload
