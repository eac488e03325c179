#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "backend.h"

namespace nvme_offload {

/// What is to go wrong with one transfer. Transfers are numbered from 0 in the order in which an engine starts them, retries included.
struct Fault {
  enum class Kind : std::uint8_t {
    fail,    // it is not carried out, and completes with errno *value*
    cut,     // it completes with *value* bytes, where it was asked for more
    refuse,  // it is not accepted, for errno *value*; offering it again is a new transfer
    delay,   // its completion is kept back until *value* others have come in, or nothing else is under way
  };
  std::uint64_t transfer = 0;
  std::uint64_t count = 1;  // of transfers from that one on
  Kind kind = Kind::fail;
  std::uint64_t value = 0;
};

/// Faults, and how many transfers have been counted so far; shared by the workers of an engine.
struct FaultScript {
  explicit FaultScript(std::vector<Fault> faults_) : faults(std::move(faults_)) {}
  const std::vector<Fault> faults;
  std::atomic<std::uint64_t> transfers{0};
};

/// A backend that does as *inner*, except where the script says otherwise.
std::unique_ptr<Backend> make_fault_backend(std::unique_ptr<Backend> inner, std::shared_ptr<FaultScript> script);

}  // namespace nvme_offload
