#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "backend.h"

namespace nvme_offload {

/// A fault to inject. Transfers are numbered from 0 in the order in which an engine submits them,
/// retries included.
struct Fault {
  enum class Kind : std::uint8_t {
    fail,    // not carried out; completes with errno *value*
    cut,     // completes with *value* bytes where more were asked for
    refuse,  // not accepted, with errno *value*; a resubmission is a new transfer
    // its completion is held back until *value* others have arrived, or no other is in flight
    delay,
  };
  std::uint64_t transfer = 0;
  std::uint64_t count = 1;  // how many transfers from that one on
  Kind kind = Kind::fail;
  std::uint64_t value = 0;
};

/// The faults, and the number of transfers so far; shared by the workers of an engine.
struct FaultScript {
  explicit FaultScript(std::vector<Fault> faults_) : faults(std::move(faults_)) {}
  const std::vector<Fault> faults;
  std::atomic<std::uint64_t> transfers{0};
};

/// Wraps *inner* and injects the faults of *script*.
std::unique_ptr<Backend> make_fault_backend(std::unique_ptr<Backend> inner,
                                            std::shared_ptr<FaultScript> script);

}  // namespace nvme_offload
