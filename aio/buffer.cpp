#include "buffer.h"

#include <string>
#include <unordered_map>
#include <utility>

#include "failure.h"

namespace py = pybind11;

namespace nvme_offload {
namespace {

/// Calls *method* of a torch object through the C API: no Python code runs, and no object is made
/// that the garbage collector counts.
template <typename... Arguments>
py::object call(const py::object& object, PyObject* method, const Arguments&... arguments) {
  PyObject* const given[] = {object.ptr(), arguments.ptr()...};
  PyObject* const result =
      PyObject_VectorcallMethod(method, given, sizeof...(arguments) + 1, nullptr);
  if (result == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(result);
}

/// Interned once: lookups allocate nothing.
struct Names {
  PyObject* data_ptr = PyUnicode_InternFromString("data_ptr");
  PyObject* nbytes = PyUnicode_InternFromString("nbytes");
  PyObject* resizable = PyUnicode_InternFromString("resizable");
  PyObject* is_shared = PyUnicode_InternFromString("is_shared");
  PyObject* swap = PyUnicode_InternFromString("_swap_data_ptr_");
  PyObject* cdata = PyUnicode_InternFromString("_cdata");
};

const Names& names() {
  static const Names made;
  return made;
}

std::uintptr_t address_of(const py::object& storage) {
  return PyLong_AsSize_t(call(storage, names().data_ptr).ptr());
}

std::size_t nbytes_of(const py::object& storage) {
  return PyLong_AsSize_t(call(storage, names().nbytes).ptr());
}

/// By the address of torch's C++ object, which may have several Python wrappers. Never destroyed:
/// the interpreter may end before the last of them.
std::unordered_map<std::uintptr_t, std::weak_ptr<HeldStorage>>& held_storages() {
  static auto* const all = new std::unordered_map<std::uintptr_t, std::weak_ptr<HeldStorage>>;
  return *all;
}

std::uintptr_t key_of(const py::object& storage) {
  const auto key =
      py::reinterpret_steal<py::object>(PyObject_GetAttr(storage.ptr(), names().cdata));
  if (!key) throw py::error_already_set();
  return PyLong_AsSize_t(key.ptr());
}

bool is_storage(const py::object& owner) {
  static PyObject* type = nullptr;
  if (type == nullptr) {  // a storage implies that torch was imported
    const auto torch =
        py::reinterpret_steal<py::object>(PyImport_GetModule(py::str("torch").ptr()));
    if (!torch || !py::hasattr(torch, "UntypedStorage")) return false;
    type = py::object(torch.attr("UntypedStorage")).release().ptr();
  }
  return py::isinstance(owner, type);
}

[[noreturn]] void refuse(bool writable) {
  py::error_already_set error;
  if (!error.matches(PyExc_BufferError) && !error.matches(PyExc_TypeError) &&
      !error.matches(PyExc_ValueError))
    throw error;
  throw Misuse(
      std::string("a buffer must be a tensor on the CPU or have the buffer protocol, contiguous") +
      (writable ? " and writable: " : ": ") + py::cast<std::string>(py::str(error.value())));
}

/// A non-owning storage of the same memory, to be swapped with *storage*. None with a torch that
/// cannot swap. None for shared memory: torch neither resizes nor moves it, and would not recognise
/// it afterwards.
py::object alias_of(const py::object& storage) {
  if (!py::hasattr(storage, "_swap_data_ptr_")) return {};
  if (call(storage, names().resizable).ptr() == Py_False &&
      call(storage, names().is_shared).ptr() == Py_True)
    return {};
  static const py::object& construct =
      *new py::object(py::module_::import("torch._C").attr("_construct_storage_from_data_pointer"));
  return construct(call(storage, names().data_ptr), storage.attr("device"),
                   call(storage, names().nbytes));
}

std::shared_ptr<HeldStorage> held_before(std::uintptr_t key) {
  const auto found = held_storages().find(key);
  std::shared_ptr<HeldStorage> held =
      found == held_storages().end() ? nullptr : found->second.lock();
  return held != nullptr && held->intact() ? held : nullptr;
}

}  // namespace

std::shared_ptr<HeldStorage> HeldStorage::of(const py::object& storage) {
  const std::uintptr_t key = key_of(storage);
  if (std::shared_ptr<HeldStorage> held = held_before(key)) return held;
  py::object alias = alias_of(storage);  // may run the garbage collector, and so any code
  if (std::shared_ptr<HeldStorage> held = held_before(key)) return held;
  auto held = std::make_shared<HeldStorage>(storage, std::move(alias));
  held_storages()[key] = held;
  return held;
}

HeldStorage::HeldStorage(py::object storage, py::object alias)
    : storage_(std::move(storage)),
      memory_owner_(std::move(alias)),
      address_(address_of(storage_)),
      nbytes_(nbytes_of(storage_)) {
  if (kept()) (void)call(storage_, names().swap, memory_owner_);
}

HeldStorage::~HeldStorage() {
  try {
    if (kept() && intact()) (void)call(storage_, names().swap, memory_owner_);
    const auto place = held_storages().find(key_of(storage_));
    if (place != held_storages().end() && place->second.expired()) held_storages().erase(place);
  } catch (py::error_already_set& error) {
    error.discard_as_unraisable("returning a tensor's memory");
  }
}

bool HeldStorage::intact() const {
  return address_of(storage_) == address_ && nbytes_of(storage_) >= nbytes_;
}

Buffer::Buffer(const py::object& exporter, bool writable) {
  if (PyObject_GetBuffer(exporter.ptr(), &view_,
                         (writable ? PyBUF_WRITABLE : PyBUF_SIMPLE) | PyBUF_FORMAT | PyBUF_ND) != 0)
    refuse(writable);
  if (holds_objects()) {
    PyBuffer_Release(&view_);
    throw Misuse(
        "the elements of the buffer are Python objects, whose bytes mean nothing on a drive");
  }
  data = static_cast<std::byte*>(view_.buf);
  nbytes = static_cast<std::uint64_t>(view_.len);
}

Buffer::Buffer(std::uintptr_t address, std::uint64_t nbytes_, py::object owner)
    : data(reinterpret_cast<std::byte*>(address)), nbytes(nbytes_), owner_(std::move(owner)) {
  if (nbytes > 0 && is_storage(owner_)) held_ = HeldStorage::of(owner_);
}

Buffer::~Buffer() {
  if (view_.obj != nullptr) PyBuffer_Release(&view_);
}

bool Buffer::buffer_changed(bool writing) const {
  return held_ != nullptr && !(writing && held_->kept()) && !held_->intact();
}

/// Whether the format has an "O" outside of field names, which are between colons.
bool Buffer::holds_objects() const {
  bool in_name = false;
  for (const char* sign = view_.format; sign != nullptr && *sign != '\0'; ++sign) {
    if (*sign == ':') in_name = !in_name;
    if (*sign == 'O' && !in_name) return true;
  }
  return false;
}

}  // namespace nvme_offload
