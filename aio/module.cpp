#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <exception>
#include <memory>
#include <optional>
#include <system_error>
#include <type_traits>
#include <vector>

#include "adam.h"
#include "buffer.h"
#include "checksum.h"
#include "codec.h"
#include "engine.h"
#include "exit_status.h"
#include "failure.h"
#include "file.h"
#include "fork.h"
#include "memory.h"
#include "vectors.h"

namespace py = pybind11;

namespace nvme_offload {
namespace {

using std::chrono::nanoseconds;

// How often a wait checks for signals: Ctrl-C ends it within this time.
constexpr std::chrono::milliseconds kSignalInterval{50};

/// Runs *work* without the GIL; returns its result.
///
/// Until Python 3.14, a daemon thread that takes the GIL when the interpreter is ending is
/// terminated by unwinding. That must not pass through a destructor (so no py::gil_scoped_release),
/// nor, with libc++, through pybind11's catch (...). So the thread blocks here, as from 3.14 on.
template <typename Work>
auto without_gil(Work work) -> decltype(work()) {
  if constexpr (std::is_void_v<decltype(work())>) {
    without_gil([&] { return work(), true; });
  } else {
    PyThreadState* const thread = PyEval_SaveThread();
    std::optional<decltype(work())> result;
    std::exception_ptr thrown;
    try {
      result.emplace(work());
    } catch (...) {
      thrown = std::current_exception();
    }
    try {
      PyEval_RestoreThread(thread);
    } catch (...) {
      for (;;) ::pause();
    }
    if (thrown) std::rethrow_exception(thrown);
    return *std::move(result);
  }
}

py::object error_class(const char* name) {
  return py::module_::import("nvme_offload.errors").attr(name);
}

[[noreturn]] void raise(const py::object& exception) {
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(exception.ptr())), exception.ptr());
  throw py::error_already_set();
}

py::str decoded(const std::string& path) {
  return py::reinterpret_steal<py::str>(
      PyUnicode_DecodeFSDefaultAndSize(path.data(), static_cast<py::ssize_t>(path.size())));
}

/// For a full drive or quota the class returns a NoSpaceError.
py::object system_error(int error, const char* operation, const std::string& path,
                        std::uint64_t offset, std::uint64_t nbytes, std::uint64_t done) {
  using py::literals::operator""_a;
  return error_class("IOFailure")(error, std::generic_category().message(error),
                                  "operation"_a = operation, "path"_a = decoded(path),
                                  "offset"_a = offset, "nbytes"_a = nbytes, "done"_a = done);
}

const char* name_of(Operation operation) { return operation == Operation::read ? "read" : "write"; }

[[noreturn]] void raise_failure(const Request& request) {
  using py::literals::operator""_a;
  const std::string& path = *request.path;
  const Failure::Kind kind = request.failure->kind;
  if (kind == Failure::Kind::system) {
    raise(system_error(request.failure->error, name_of(request.operation), path, request.offset,
                       request.nbytes, request.done));
  }
  const py::dict where("operation"_a = name_of(request.operation), "path"_a = decoded(path),
                       "offset"_a = request.offset, "nbytes"_a = request.nbytes,
                       "done"_a = request.done);
  if (request.failure->is_consequence()) {
    const bool cancelled = kind == Failure::Kind::cancelled;
    raise(error_class("CancelledError")(
        cancelled ? "it was cancelled before it started" : "a transfer that it waited for failed",
        **where));
  }
  if (kind == Failure::Kind::buffer_changed) {
    const bool read = request.operation == Operation::read;
    raise(error_class("BufferChangedError")(
        std::string("the tensor's storage was resized, freed or shared meanwhile: ") +
            (read ? "the bytes read are not in it" : "other bytes may have been written"),
        **where));
  }
  const bool truncated = kind == Failure::Kind::truncated;
  raise(error_class(truncated ? "TruncatedError" : "CorruptionError")(
      truncated ? "the file ends before that"
                : "the bytes do not have the checksum that they were written with",
      **where));
}

class PyRequest;

/// The engine for Python: checks the process, and returns buffers to Python.
class PyEngine : public std::enable_shared_from_this<PyEngine> {
 public:
  PyEngine(std::string backend, std::uint64_t block_size, std::uint32_t queue_depth,
           std::uint32_t thread_count, bool single_submit, bool overlap_events,
           std::vector<Fault> faults)
      : engine_(std::make_shared<Engine>(Settings{std::move(backend), block_size, queue_depth,
                                                  thread_count, single_submit, overlap_events,
                                                  std::move(faults)})) {}

  ~PyEngine() {
    if (engine_ == nullptr) return;
    if (process_ != process_generation()) {
      // A forked child has none of the threads, and a copied lock may be held for ever: leak the
      // engine.
      new std::shared_ptr<Engine>(std::move(engine_));
      return;
    }
    engine_->refuse_requests();
    while (!without_gil([this] { return engine_->wait_idle(std::chrono::hours{1}); })) {
    }
    release_owners(*engine_);
    engine_.reset();
  }

  PyEngine(const PyEngine&) = delete;
  PyEngine& operator=(const PyEngine&) = delete;

  /// Reads into the memory of *exporter*, or writes it.
  std::unique_ptr<PyRequest> submit(bool write, const py::object& exporter,
                                    const std::shared_ptr<File>& file, std::uint64_t offset,
                                    const py::handle& checksum,
                                    const std::vector<PyRequest*>& after) {
    return submit(write, std::make_unique<Buffer>(exporter, !write), file, offset, checksum, after);
  }

  /// As submit(), for the memory at *address*, which is valid while *owner* lives.
  std::unique_ptr<PyRequest> submit_at(bool write, std::uintptr_t address, std::uint64_t nbytes,
                                       py::object owner, const std::shared_ptr<File>& file,
                                       std::uint64_t offset, const py::handle& checksum,
                                       const std::vector<PyRequest*>& after) {
    return submit(write, std::make_unique<Buffer>(address, nbytes, std::move(owner)), file, offset,
                  checksum, after);
  }

  /// Cancels all of *requests*, which are this engine's, or none.
  bool cancel(const std::vector<std::shared_ptr<Request>>& requests) {
    if (engine_ == nullptr) return false;
    const std::shared_ptr<Engine> engine = engine_;
    const bool cancelled = engine->cancel(requests);
    release_owners(*engine);
    return cancelled;
  }

  /// Throws Misuse where the engine is closed or belongs to another process.
  void require_live() const { (void)live(); }

  /// Waits for every request and ends the threads; raises the first failure that no caller
  /// observed. Does nothing in a forked child.
  void close() {
    if (engine_ == nullptr || process_ != process_generation()) return;
    std::shared_ptr<Engine> engine = engine_;
    engine->refuse_requests();
    while (!without_gil([&] { return engine->wait_idle(kSignalInterval); })) {
      if (PyErr_CheckSignals() != 0) throw py::error_already_set();
    }
    release_owners(*engine);
    const std::shared_ptr<Request> failed = engine->take_unobserved_failure();
    engine_.reset();
    without_gil([&] { engine.reset(); });  // ends the threads
    if (failed != nullptr) raise_failure(*failed);
  }

  [[nodiscard]] bool closed() const { return engine_ == nullptr; }

  py::tuple stats() {
    const Stats now = live()->stats();
    py::list directions;
    for (const DirectionStats& one : now.directions) {
      directions.append(
          py::make_tuple(one.requests, one.bytes, one.in_flight, one.retries, one.busy_seconds));
    }
    py::object oldest = py::none();
    if (now.oldest != nullptr) {
      const Request& request = *now.oldest;
      const double age = std::chrono::duration<double>(Clock::now() - request.started).count();
      oldest = py::make_tuple(name_of(request.operation), decoded(*request.path), request.offset,
                              request.nbytes, age);
    }
    return py::make_tuple(directions[0], directions[1], oldest);
  }

  /// Releases the buffers of finished requests.
  void release_owners() {
    if (engine_ != nullptr && process_ == process_generation()) release_owners(*engine_);
  }

 private:
  /// Marks changed buffers of all requests before it frees the first: freeing may run Python code,
  /// and another thread may then ask.
  static void release_owners(Engine& engine) {
    const std::vector<void*> owners = engine.take_released_owners();
    for (void* owner : owners) {
      const Buffer& buffer = *static_cast<Buffer*>(owner);
      if (buffer.buffer_changed(buffer.request->operation == Operation::write))
        engine.note_changed_buffer(buffer.request);
    }
    for (void* owner : owners) delete static_cast<Buffer*>(owner);
  }

  std::unique_ptr<PyRequest> submit(bool write, std::unique_ptr<Buffer> buffer,
                                    const std::shared_ptr<File>& file, std::uint64_t offset,
                                    const py::handle& checksum,
                                    const std::vector<PyRequest*>& after);

  std::shared_ptr<Engine> live() const {
    if (process_ != process_generation())
      throw Misuse(
          "the engine belongs to the process that this one was forked from: make one here");
    if (engine_ == nullptr) throw Misuse("the engine is closed");
    return engine_;
  }

  // each call holds its own reference: another thread may close the engine
  std::shared_ptr<Engine> engine_;
  const std::uint32_t process_ = process_generation();
};

class PyRequest {
 public:
  PyRequest(std::shared_ptr<PyEngine> engine, std::shared_ptr<Request> request)
      : engine_(std::move(engine)), request_(std::move(request)) {}

  ~PyRequest() { engine_->release_owners(); }
  PyRequest(const PyRequest&) = delete;
  PyRequest& operator=(const PyRequest&) = delete;

  /// The request, as a blocker of one on *engine*. Throws Misuse where it is another engine's.
  [[nodiscard]] const std::shared_ptr<Request>& of(const PyEngine& engine) const {
    if (engine_.get() != &engine)
      throw Misuse("a request can only follow requests of the same engine");
    return request_;
  }

  /// Cancels all of *requests* before they start, or none. Throws Misuse where they are of several
  /// engines.
  static bool cancel(const std::vector<PyRequest*>& requests) {
    std::vector<std::shared_ptr<Request>> all;
    for (const PyRequest* request : requests) {
      request->require_this_process();
      all.push_back(request->of(*requests.front()->engine_));
    }
    return !all.empty() && requests.front()->engine_->cancel(all);
  }

  [[nodiscard]] bool done() const {
    if (!request_->finished()) return false;
    engine_->release_owners();
    return true;
  }
  [[nodiscard]] std::uint64_t nbytes() const { return request_->nbytes; }

  /// The checksum of the bytes moved, if the request asked for it and has succeeded.
  [[nodiscard]] std::optional<std::uint64_t> checksum() const {
    if (!request_->checksum.wanted || !request_->finished() || request_->failure)
      return std::nullopt;
    return request_->sum;
  }

  std::uint64_t wait(std::optional<double> timeout_seconds) {
    if (!request_->finished()) wait_until_finished(timeout_seconds);
    engine_->release_owners();
    if (request_->failure) {
      request_->observed = true;
      raise_failure(*request_);
    }
    return request_->nbytes;
  }

 private:
  void require_this_process() const {
    if (!request_->of_this_process())
      throw Misuse(
          "the request belongs to the process that this one was forked from: wait for it there");
  }

  void wait_until_finished(std::optional<double> timeout_seconds) {
    require_this_process();
    constexpr double kLongestSeconds = 1e9;  // a longer limit would overflow the clock
    const bool limited = timeout_seconds.has_value() && *timeout_seconds < kLongestSeconds;
    const Clock::time_point deadline =
        limited ? Clock::now() + std::chrono::duration_cast<nanoseconds>(
                                     std::chrono::duration<double>(std::max(0.0, *timeout_seconds)))
                : Clock::time_point::max();
    for (;;) {
      const nanoseconds left = limited ? deadline - Clock::now() : nanoseconds::max();
      const nanoseconds slice = std::clamp<nanoseconds>(left, nanoseconds{0}, kSignalInterval);
      if (without_gil([&] { return request_->wait_for(slice); })) return;
      if (PyErr_CheckSignals() != 0) throw py::error_already_set();
      if (limited && Clock::now() >= deadline) {
        const std::string text = std::string(name_of(request_->operation)) + " in " +
                                 *request_->path + " did not finish within " +
                                 py::cast<std::string>(py::str(py::float_(*timeout_seconds))) +
                                 " s; it continues";
        raise(error_class("WaitTimeout")(decoded(text)));
      }
    }
  }

  std::shared_ptr<PyEngine> engine_;
  std::shared_ptr<Request> request_;
};

/// Python's checksum argument: False, True, the expected checksum of a read, or the request whose
/// checksum it must have.
Checksum asked_checksum(const py::handle& asked, const PyEngine& engine) {
  if (asked.ptr() == Py_False) return {};
  if (asked.ptr() == Py_True) return {true, std::nullopt};
  if (py::isinstance<PyRequest>(asked)) {
    const std::shared_ptr<Request>& like = py::cast<const PyRequest&>(asked).of(engine);
    if (!like->checksum.wanted)
      throw Misuse("the request that was to give the checksum does not sum its bytes");
    return {true, std::nullopt, like};
  }
  const py::int_ sum = py::reinterpret_steal<py::int_>(PyNumber_Index(asked.ptr()));
  const std::uint64_t expected = sum ? PyLong_AsUnsignedLongLong(sum.ptr()) : 0;
  if (PyErr_Occurred() != nullptr) {
    PyErr_Clear();
    throw Misuse("checksum must be true, false, a ticket, or a number from 0 to 2**64 - 1, not " +
                 py::cast<std::string>(py::repr(asked)));
  }
  return {true, expected};
}

std::unique_ptr<PyRequest> PyEngine::submit(bool write, std::unique_ptr<Buffer> buffer,
                                            const std::shared_ptr<File>& file, std::uint64_t offset,
                                            const py::handle& checksum,
                                            const std::vector<PyRequest*>& after) {
  const std::shared_ptr<Engine> engine = live();
  release_owners(*engine);
  if (write ? !file->writable() : !file->readable())
    throw Misuse(file->path() + " is not open for " + (write ? "writing" : "reading"));
  const Operation operation = write ? Operation::write : Operation::read;
  std::vector<std::shared_ptr<Request>> blockers;
  for (const PyRequest* blocker : after) blockers.push_back(blocker->of(*this));
  auto request = engine->submit(operation, file, buffer->data, buffer->nbytes, offset,
                                asked_checksum(checksum, *this), std::move(blockers), buffer.get());
  // it may have finished already; released only with the GIL, which this thread holds
  buffer.release()->request = request;
  return std::make_unique<PyRequest>(shared_from_this(), std::move(request));
}

/// *file*, closed without the GIL: closing a large unnamed file frees its space, which takes time.
std::shared_ptr<File> closed_without_gil(std::shared_ptr<File> file) {
  File* const opened = file.get();
  return std::shared_ptr<File>(opened, [file = std::move(file)](File* /*unused*/) mutable {
    if (PyGILState_Check() != 0) {
      without_gil([&] { file.reset(); });
    } else {
      file.reset();
    }
  });
}

template <typename T>
T* at(std::uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

void translate(std::exception_ptr thrown) {
  try {
    if (thrown) std::rethrow_exception(thrown);
  } catch (const SystemFailure& failure) {
    const py::object exception =
        system_error(failure.error, failure.operation.c_str(), failure.path, 0, 0, 0);
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(exception.ptr())), exception.ptr());
  } catch (const Misuse& misuse) {
    PyErr_SetObject(error_class("UsageError").ptr(), decoded(misuse.what()).ptr());
  } catch (const Unsupported& unsupported) {
    PyErr_SetObject(error_class("UnsupportedError").ptr(), decoded(unsupported.what()).ptr());
  }
}

/// Defines the functions that split masters into working weights and *Low* bits, and that join
/// them.
template <typename Low>
void def_split(py::module_& module, const char* split_name, const char* join_name) {
  using py::literals::operator""_a;
  module.def(
      split_name,
      [](std::uintptr_t master, std::uintptr_t working, std::uintptr_t low, std::size_t count,
         unsigned threads) {
        without_gil([&] {
          split(at<std::uint32_t>(master), at<std::uint16_t>(working), at<Low>(low), count,
                threads);
        });
      },
      "master"_a, "working"_a, "low"_a, "count"_a, "threads"_a);
  module.def(
      join_name,
      [](std::uintptr_t working, std::uintptr_t low, std::uintptr_t master, std::size_t count,
         unsigned threads) {
        without_gil([&] {
          join(at<std::uint16_t>(working), at<Low>(low), at<std::uint32_t>(master), count, threads);
        });
      },
      "working"_a, "low"_a, "master"_a, "count"_a, "threads"_a);
}

}  // namespace
}  // namespace nvme_offload

PYBIND11_MODULE(_aio, module) {
  using namespace nvme_offload;
  using py::literals::operator""_a;
  module.doc() = "The C++ core. Its interface is private: use nvme_offload.Engine.";
  py::register_exception_translator(translate);
  watch_forks();

  py::class_<Memory>(module, "Memory", py::buffer_protocol())
      .def(py::init([](std::size_t nbytes, bool in_child, std::size_t reserve) {
             return std::make_unique<Memory>(
                 nbytes, in_child ? Memory::InChild::copied : Memory::InChild::absent, reserve);
           }),
           "nbytes"_a, "in_child"_a = true, "reserve"_a = 0)
      .def("grow", &Memory::grow, "nbytes"_a)
      .def("populate",
           [](Memory& memory) { without_gil([&] { memory.populate(memory.nbytes()); }); })
      .def("lock", [](Memory& memory) { return without_gil([&] { return memory.lock(); }); })
      .def_property_readonly(
          "address",
          [](const Memory& memory) { return reinterpret_cast<std::uintptr_t>(memory.data()); })
      .def_buffer([](Memory& memory) {
        return py::buffer_info(reinterpret_cast<unsigned char*>(memory.data()),
                               static_cast<py::ssize_t>(memory.nbytes()));
      });

  py::enum_<Access>(module, "Access")
      .value("READ", Access::read)
      .value("WRITE", Access::write)
      .value("READ_WRITE", Access::read_write);
  py::enum_<Direct>(module, "Direct")
      .value("REQUIRED", Direct::required)
      .value("AUTOMATIC", Direct::automatic)
      .value("OFF", Direct::off);

  py::enum_<Fault::Kind>(module, "FaultKind")
      .value("FAIL", Fault::Kind::fail)
      .value("CUT", Fault::Kind::cut)
      .value("REFUSE", Fault::Kind::refuse)
      .value("DELAY", Fault::Kind::delay);
  py::class_<Fault>(module, "Fault")
      .def(py::init([](std::uint64_t transfer, std::uint64_t count, Fault::Kind kind,
                       std::uint64_t value) { return Fault{transfer, count, kind, value}; }),
           "transfer"_a, "count"_a, "kind"_a, "value"_a);

  // Bytes of the buffer of *exporter*.
  module.def(
      "buffer_nbytes",
      [](const py::object& exporter, bool writable) { return Buffer(exporter, writable).nbytes; },
      "exporter"_a, "writable"_a);

  py::class_<File, std::shared_ptr<File>>(module, "File")
      .def_static(
          "open",
          [](const std::string& path, Access access, Direct direct, std::uint64_t nbytes) {
            return closed_without_gil(
                without_gil([&] { return File::open(path, access, direct, nbytes); }));
          },
          "path"_a, "access"_a, "direct"_a, "nbytes"_a)
      .def_static(
          "open_anonymous",
          [](const std::string& directory, Direct direct, std::uint64_t nbytes, bool padded) {
            return closed_without_gil(without_gil(
                [&] { return File::open_anonymous(directory, direct, nbytes, padded); }));
          },
          "directory"_a, "direct"_a, "nbytes"_a, "padded"_a)
      .def("sync", [](File& file) { without_gil([&] { file.sync(); }); })
      .def_property_readonly("path", [](const File& file) { return decoded(file.path()); })
      .def_property_readonly("size", &File::size)
      .def_property_readonly("direct", &File::direct)
      .def_property_readonly("memory_alignment", &File::memory_alignment)
      .def_property_readonly("offset_alignment", &File::offset_alignment);

  py::class_<PyRequest>(module, "Request")
      .def("done", &PyRequest::done)
      .def("wait", &PyRequest::wait, "timeout_seconds"_a = py::none())
      .def_property_readonly("nbytes", &PyRequest::nbytes)
      .def_property_readonly("checksum", &PyRequest::checksum);

  module.def("fail_at_exit", &fail_at_exit);

  // All of *requests*, or none if one has started.
  module.def("cancel", &PyRequest::cancel, "requests"_a);

  py::class_<PyEngine, std::shared_ptr<PyEngine>>(module, "Engine")
      .def(py::init<std::string, std::uint64_t, std::uint32_t, std::uint32_t, bool, bool,
                    std::vector<Fault>>(),
           "backend"_a, "block_size"_a, "queue_depth"_a, "thread_count"_a, "single_submit"_a,
           "overlap_events"_a, "faults"_a)
      .def("submit",
           py::overload_cast<bool, const py::object&, const std::shared_ptr<File>&, std::uint64_t,
                             const py::handle&, const std::vector<PyRequest*>&>(&PyEngine::submit),
           "write"_a, "exporter"_a, "file"_a, "offset"_a, "checksum"_a, "after"_a)
      .def("submit_at", &PyEngine::submit_at, "write"_a, "address"_a, "nbytes"_a, "owner"_a,
           "file"_a, "offset"_a, "checksum"_a, "after"_a)
      .def("require_live", &PyEngine::require_live)
      .def("close", &PyEngine::close)
      .def_property_readonly("closed", &PyEngine::closed)
      .def("stats", &PyEngine::stats);

  // On memory by address, which no other thread changes meanwhile.
  module.def(
      "fingerprint",
      [](std::uintptr_t address, std::size_t nbytes) {
        return without_gil([&] { return fingerprint(at<std::byte>(address), nbytes); });
      },
      "address"_a, "nbytes"_a);

  // On memory by address, *count* elements, which no other thread uses meanwhile.
  def_split<std::uint16_t>(module, "split", "join");
  def_split<std::uint8_t>(module, "split_short", "join_short");
  module.def(
      "round_to_24",
      [](std::uintptr_t values, std::size_t count, std::uintptr_t table, std::uintptr_t factors,
         std::uintptr_t summands, unsigned threads) {
        const Randoms randoms{at<std::uint32_t>(table), at<std::uint32_t>(factors),
                              at<std::uint32_t>(summands)};
        without_gil([&] { round_to_24(at<std::uint32_t>(values), count, randoms, threads); });
      },
      "values"_a, "count"_a, "table"_a, "factors"_a, "summands"_a, "threads"_a);
  module.def(
      "encode",
      [](std::uintptr_t values, std::uintptr_t codes, std::uintptr_t exponents, std::size_t count,
         bool is_signed, std::uintptr_t table, std::uintptr_t factors, std::uintptr_t summands,
         unsigned threads) {
        const Randoms randoms{at<std::uint32_t>(table), at<std::uint32_t>(factors),
                              at<std::uint32_t>(summands)};
        without_gil([&] {
          encode(at<float>(values), at<std::uint8_t>(codes), at<std::uint8_t>(exponents), count,
                 is_signed, randoms, threads);
        });
      },
      "values"_a, "codes"_a, "exponents"_a, "count"_a, "signed"_a, "table"_a, "factors"_a,
      "summands"_a, "threads"_a);
  module.def(
      "decode",
      [](std::uintptr_t codes, std::uintptr_t exponents, std::uintptr_t values, std::size_t count,
         bool is_signed, unsigned threads) {
        without_gil([&] {
          decode(at<std::uint8_t>(codes), at<std::uint8_t>(exponents), at<float>(values), count,
                 is_signed, threads);
        });
      },
      "codes"_a, "exponents"_a, "values"_a, "count"_a, "signed"_a, "threads"_a);
  module.def(
      "mark_far",
      [](std::uintptr_t values, std::uintptr_t first, std::uintptr_t far, std::size_t count,
         double eps, unsigned threads) {
        without_gil([&] {
          mark_far(at<float>(values), at<float>(first), at<std::uint8_t>(far), count, eps, threads);
        });
      },
      "values"_a, "first"_a, "far"_a, "count"_a, "eps"_a, "threads"_a);
  py::enum_<Vectors>(module, "Vectors")
      .value("BASELINE", Vectors::kBaseline)
      .value("AVX2", Vectors::kAvx2)
      .value("AVX512", Vectors::kAvx512);
  module.def("widest_vectors", widest_vectors);
  py::enum_<AdamFormula>(module, "AdamFormula")
      .value("TORCH", AdamFormula::kTorch)
      .value("DEEPSPEED", AdamFormula::kDeepSpeed);
  py::enum_<Element>(module, "Element")
      .value("FLOAT32", Element::kFloat32)
      .value("BFLOAT16", Element::kBFloat16)
      .value("FLOAT16", Element::kFloat16);
  py::class_<AdamStep>(module, "AdamStep")
      .def(
          py::init([](AdamFormula formula, std::size_t tail, double weight, double beta1,
                      double beta2, double square_weight, bool decays, bool decoupled, double decay,
                      bool maximize, double correction, double eps, double step_size,
                      std::uintptr_t square_roots, std::uintptr_t set_mkl_threads) {
            const auto rounded = [](double value) { return static_cast<float>(value); };
            return AdamStep{formula,
                            tail,
                            rounded(weight),
                            rounded(beta1),
                            rounded(beta2),
                            rounded(square_weight),
                            decays,
                            decoupled,
                            rounded(decay),
                            maximize,
                            rounded(correction),
                            rounded(eps),
                            rounded(step_size),
                            reinterpret_cast<decltype(AdamStep::square_roots)>(square_roots),
                            reinterpret_cast<decltype(AdamStep::set_mkl_threads)>(set_mkl_threads)};
          }),
          py::kw_only(), "formula"_a, "tail"_a, "weight"_a, "beta1"_a, "beta2"_a, "square_weight"_a,
          "decays"_a, "decoupled"_a, "decay"_a, "maximize"_a, "correction"_a, "eps"_a,
          "step_size"_a, "square_roots"_a, "set_mkl_threads"_a);
  py::class_<Moment>(module, "Moment")
      .def(py::init([](std::uintptr_t values, std::uintptr_t codes, std::uintptr_t exponents,
                       std::int64_t seed) {
             return Moment{at<float>(values), at<std::uint8_t>(codes), at<std::uint8_t>(exponents),
                           seed};
           }),
           py::kw_only(), "values"_a = 0, "codes"_a = 0, "exponents"_a = 0, "seed"_a = 0);
  module.def(
      "adam",
      [](std::size_t count, std::uintptr_t gradient, Element gradient_element,
         std::uintptr_t master, std::uintptr_t working, Element working_element, std::uintptr_t low,
         unsigned low_bytes, std::int64_t master_seed, const Moment& first, const Moment& second,
         std::uintptr_t table, std::int64_t first_block, const AdamStep& step, unsigned threads) {
        const AdamParameters parameters{count,
                                        at<void>(gradient),
                                        gradient_element,
                                        at<float>(master),
                                        at<std::uint16_t>(working),
                                        working_element,
                                        at<void>(low),
                                        low_bytes,
                                        master_seed,
                                        first,
                                        second,
                                        at<std::uint32_t>(table),
                                        first_block};
        return without_gil([&] { return adam(parameters, step, threads); });
      },
      py::kw_only(), "count"_a, "gradient"_a, "gradient_element"_a, "master"_a, "working"_a,
      "working_element"_a, "low"_a, "low_bytes"_a, "master_seed"_a, "first"_a, "second"_a,
      "table"_a, "first_block"_a, "step"_a, "threads"_a);
}
