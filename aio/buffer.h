#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>
#include <memory>

namespace nvme_offload {

class Request;

/// Holds the memory of a tensor's storage. torch frees that memory when the storage is resized,
/// shared or given other memory, whatever else references the storage.
///
/// While this object lives, it owns the memory and the storage has a non-owning alias of it
/// (`_swap_data_ptr_`): torch refuses to resize an alias ("Trying to resize storage that is not
/// resizable"), and when torch moves the storage to shared memory, the memory stays here. There is
/// one such object for all requests on a storage. An older torch lacks `_swap_data_ptr_`: there a
/// change is only detected.
///
/// The GIL must be held to create, use and destroy it.
class HeldStorage {
 public:
  static std::shared_ptr<HeldStorage> of(const pybind11::object& storage);
  /// *alias* is what the storage gets meanwhile; may be none.
  HeldStorage(pybind11::object storage, pybind11::object alias);
  ~HeldStorage();
  HeldStorage(const HeldStorage&) = delete;
  HeldStorage& operator=(const HeldStorage&) = delete;

  /// Whether the storage still has this memory, or more at the same address. Runs no Python code,
  /// so no other thread intervenes.
  [[nodiscard]] bool intact() const;
  /// Whether the memory is valid whatever happens to the storage.
  [[nodiscard]] bool kept() const { return static_cast<bool>(memory_owner_); }

 private:
  const pybind11::object storage_;
  // a private storage that owns the memory; none with an older torch
  const pybind11::object memory_owner_;
  const std::uintptr_t address_;
  const std::size_t nbytes_;
};

/// Memory of a Python object, and the object that keeps it alive: the exporter of a buffer (locked
/// meanwhile), the storage of a tensor, or any object.
class Buffer {
 public:
  /// *writable*: the memory will be changed. Throws Misuse for an object without such memory, and
  /// what the exporter raises.
  Buffer(const pybind11::object& exporter, bool writable);
  /// Memory at *address*, valid while *owner* lives; for a storage of torch, while its memory is
  /// held.
  Buffer(std::uintptr_t address, std::uint64_t nbytes_, pybind11::object owner);
  ~Buffer();
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  /// Whether the caller's tensor has other memory than the bytes moved. As `HeldStorage::intact`.
  [[nodiscard]] bool buffer_changed(bool writing) const;

  std::byte* data = nullptr;
  std::uint64_t nbytes = 0;
  std::shared_ptr<Request> request;  // the request on it

 private:
  [[nodiscard]] bool holds_objects() const;

  Py_buffer view_{};
  pybind11::object owner_;
  std::shared_ptr<HeldStorage> held_;
};

}  // namespace nvme_offload
