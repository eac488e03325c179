#include "exit_status.h"

#include <cstdlib>
#include <new>

namespace nvme_offload {
namespace {

/// exit() within an exit handler continues with the remaining handlers and the new status: exit(3).
/// _exit and signals do not come here.
void fail(int status, void* /*unused*/) {
  if (status == EXIT_SUCCESS) std::exit(EXIT_FAILURE);
}

}  // namespace

void fail_at_exit() {
  static const int registered = ::on_exit(fail, nullptr);
  if (registered != 0) throw std::bad_alloc();
}

}  // namespace nvme_offload
