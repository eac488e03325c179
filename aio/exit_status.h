#pragma once

namespace nvme_offload {

/// Lets this process end with status 1 where it would end with 0. All else that is to be done at its end is done as ever. Throws std::bad_alloc.
void fail_at_exit();

}  // namespace nvme_offload
