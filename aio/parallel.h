#pragma once

#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <future>
#include <system_error>
#include <vector>

#include "vectors.h"

namespace nvme_offload {

constexpr std::size_t kChunk = std::size_t{1} << 16;  // elements per unit of work

/// Calls *work* with begin and end of each chunk of *count* elements, on up to *threads* threads.
/// *work* runs in the version for the processor's vectors (vectors.h).
///
/// The threads belong to torch's OpenMP runtime. After a parallel loop they spin for
/// milliseconds before they sleep; separate threads would compete with them, which took twice the
/// time. Not with sanitizers, which do not see OpenMP's synchronisation. Source: GOMP_parallel in
/// libgomp's ABI, which LLVM's and Intel's runtimes provide too; OMP_WAIT_POLICY and GOMP_SPINCOUNT
/// in its manual.
template <typename Work>
void parallel_for(std::size_t count, unsigned threads, const Work& work) {
  struct Loop {
    const Work& work;
    const std::size_t count;
    const Version<Work> call = widest_version<Work>();
    std::atomic<std::size_t> next{0};

    static void run(void* address) {
      Loop& self = *static_cast<Loop*>(address);
      for (std::size_t begin;
           (begin = self.next.fetch_add(kChunk, std::memory_order_relaxed)) < self.count;) {
        self.call(self.work, begin, std::min(begin + kChunk, self.count));
      }
    }
  } loop{work, count};
  const auto most =
      static_cast<unsigned>(std::min<std::size_t>(threads, (count + kChunk - 1) / kChunk));
#ifndef NVME_OFFLOAD_SANITIZED
  using Parallel = void (*)(void (*)(void*), void*, unsigned, unsigned);
  static const auto openmp = reinterpret_cast<Parallel>(::dlsym(RTLD_DEFAULT, "GOMP_parallel"));
  if (openmp != nullptr && most > 1) {
    openmp(Loop::run, &loop, most, 0);
    return;
  }
#endif
  std::vector<std::future<void>> others;
  try {
    while (others.size() + 1 < most)
      others.push_back(std::async(std::launch::async, &Loop::run, &loop));
  } catch (const std::system_error&) {  // continue with the threads that were started
  }
  Loop::run(&loop);
}

}  // namespace nvme_offload
