#pragma once

namespace nvme_offload {

/// Makes this process exit with status 1 where it would exit with 0. Other exit handlers run as
/// usual. Throws std::bad_alloc.
void fail_at_exit();

}  // namespace nvme_offload
