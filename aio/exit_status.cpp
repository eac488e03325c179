#include "exit_status.h"

#include <cstdlib>
#include <new>

namespace nvme_offload {
namespace {

/// Linux goes on with what is left to be done at the end, and with the new status: exit(3). A process that is ended by _exit or a signal does not come here.
void fail(int status, void* /*unused*/) {
  if (status == EXIT_SUCCESS) std::exit(EXIT_FAILURE);
}

}  // namespace

void fail_at_exit() {
  static const int registered = ::on_exit(fail, nullptr);
  if (registered != 0) throw std::bad_alloc();
}

}  // namespace nvme_offload
