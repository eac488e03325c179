#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>
#include <memory>

namespace nvme_offload {

class Request;

/// The memory of a tensor's storage, which torch would let go of when the storage is resized, shared or given other memory, whoever holds it.
///
/// While this lives, the storage has the same memory on loan and this has it as its own: torch refuses to resize what is lent ("Trying to resize
/// storage that is not resizable"), and where it moves the storage to shared memory, the memory stays here. There is one for all requests on a storage.
/// An older torch cannot exchange what two storages have (`_swap_data_ptr_`): there all that can be done is to see that it has changed.
///
/// To be made, asked and destroyed with the GIL held.
class HeldStorage {
 public:
  static std::shared_ptr<HeldStorage> of(const pybind11::object& storage);
  /// *loan* is what the storage is to have meanwhile, if anything.
  HeldStorage(pybind11::object storage, pybind11::object loan);
  ~HeldStorage();
  HeldStorage(const HeldStorage&) = delete;
  HeldStorage& operator=(const HeldStorage&) = delete;

  /// Whether the storage still has this memory, or more at the same place. Runs no code of Python's, so no other thread comes between.
  [[nodiscard]] bool intact() const;
  /// Whether the memory is there whatever becomes of the storage.
  [[nodiscard]] bool kept() const { return static_cast<bool>(keeper_); }

 private:
  const pybind11::object storage_;
  const pybind11::object keeper_;  // a storage that nobody else knows, and that owns the memory; none where torch has no way to
  const std::uintptr_t address_;
  const std::size_t nbytes_;
};

/// Memory lent by Python, and what keeps it alive: the exporter of a buffer, locked while the buffer is, a tensor's storage, or any object.
class Buffer {
 public:
  /// *writable* where the exporter's memory is to be changed. Throws Misuse for what has no such memory, and what else the exporter raises.
  Buffer(const pybind11::object& exporter, bool writable);
  /// Of the memory at *address*, which is there as long as *owner*, or its memory where it is a storage of torch's.
  Buffer(std::uintptr_t address, std::uint64_t nbytes_, pybind11::object owner);
  ~Buffer();
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  /// Whether bytes that were moved went elsewhere than the caller's tensor has its own now, or came from elsewhere. As `HeldStorage::intact`.
  [[nodiscard]] bool lost(bool writing) const;

  std::byte* data = nullptr;
  std::uint64_t nbytes = 0;
  std::shared_ptr<Request> request;  // that moves it

 private:
  [[nodiscard]] bool holds_objects() const;

  Py_buffer view_{};
  pybind11::object owner_;
  std::shared_ptr<HeldStorage> held_;
};

}  // namespace nvme_offload
