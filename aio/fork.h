#pragma once

#include <cstdint>

namespace nvme_offload {

/// Counts forks from now on; to be called before anything asks. Throws std::bad_alloc.
void watch_forks();

/// Differs between a process and its forked children, which have its memory but none of its threads. Unlike getpid() it is no system call.
std::uint32_t process_generation() noexcept;

}  // namespace nvme_offload
