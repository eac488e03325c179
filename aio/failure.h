#pragma once

#include <stdexcept>
#include <string>

namespace nvme_offload {

/// A system call on a file failed outside of a request: open, preallocate, sync.
struct SystemFailure : std::runtime_error {
  SystemFailure(std::string operation_, std::string path_, int error_)
      : std::runtime_error(operation_ + " " + path_),
        operation(std::move(operation_)),
        path(std::move(path_)),
        error(error_) {}
  std::string operation;
  std::string path;
  int error;  // errno
};

/// The call was wrong; nothing was changed.
struct Misuse : std::invalid_argument {
  using std::invalid_argument::invalid_argument;
};

/// The machine, the filesystem or the build lacks a feature; the message names it and says what to
/// do.
struct Unsupported : std::runtime_error {
  using std::runtime_error::runtime_error;
};

}  // namespace nvme_offload
