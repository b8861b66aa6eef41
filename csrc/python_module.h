// The Python module `tpkernels._C`: what every call of an op does. By torch's dispatcher arguments that only
// Python knows, such as tuples and kernels, would have to be converted in each call.
#pragma once

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/python_headers.h>

#include <utility>

namespace tpkernels {

// Of a Python error that is set.
struct PythonError : python_error {
  PythonError() { persist(); }
};

// The result of Python's C functions, if they did not fail.
inline PyObject* checked(PyObject* object) {
  if (object == nullptr) throw PythonError();
  return object;
}

// A reference that is owned.
class Reference {
 public:
  Reference() = default;
  explicit Reference(PyObject* owned) : object_(checked(owned)) {}
  Reference(Reference&& other) noexcept : object_(other.release()) {}
  Reference& operator=(Reference&& other) noexcept {
    std::swap(object_, other.object_);
    return *this;
  }
  ~Reference() { Py_XDECREF(object_); }

  static Reference shared(PyObject* borrowed) { return Reference(Py_NewRef(borrowed)); }

  PyObject* get() const { return object_; }
  PyObject* release() { return std::exchange(object_, nullptr); }

 private:
  PyObject* object_ = nullptr;
};

// While it lives, other threads may run Python: one of them may be who notices that a peer has died.
class WithoutGil {
 public:
  WithoutGil() : state_(PyEval_SaveThread()) {}
  ~WithoutGil() { PyEval_RestoreThread(state_); }
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  PyThreadState* state_;
};

bool add_launch_plans(PyObject* module);
bool add_operands(PyObject* module);
bool add_pushes(PyObject* module);

}  // namespace tpkernels
