#pragma once

#include <cstdint>

namespace nvme_offload {

/// Starts counting forks; to be called before process_generation(). Throws std::bad_alloc.
void watch_forks();

/// Differs between a process and its forked children, which have its memory but not its threads.
/// Unlike getpid() not a system call.
std::uint32_t process_generation() noexcept;

}  // namespace nvme_offload
