// The Python module `tpkernels._C`: steps of calls that torch's dispatcher would make longer, as it converts
// arguments in each call.
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <ATen/ops/copy.h>
#include <ATen/ops/linear.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/python_headers.h>

#include <atomic>
#include <optional>
#include <vector>

namespace tpkernels {
namespace {

// While it lives, other threads may run Python: one of them may notice that a peer has died.
class WithoutGil {
 public:
  WithoutGil() : state_(PyEval_SaveThread()) {}
  ~WithoutGil() { PyEval_RestoreThread(state_); }
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  PyThreadState* state_;
};

// Not of a class that has its own say, such as a checker's.
const at::Tensor* plain_tensor(PyObject* object) {
  if (!THPVariable_CheckExact(object)) return nullptr;
  const at::Tensor& tensor = THPVariable_Unpack(object);
  const bool plain = tensor.defined() && tensor.is_cpu() && tensor.layout() == at::kStrided &&
                     !tensor.is_nested() && !tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides();
  return plain ? &tensor : nullptr;
}

// linear(x, weight, bias) -> F.linear of them, by torch's operator, if it takes them as they are, and
// `ops.linear` means the same: matrices of the CPU that fit, and None or a vector. None says nothing, or that
// a mode is to see the call of F.linear. See `quick_linear` in tpkernels/ops/inputs.py.
PyObject* linear(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  if (count != 3) {
    PyErr_SetString(PyExc_TypeError, "linear(x, weight, bias)");
    return nullptr;
  }
  const at::Tensor *x = plain_tensor(args[0]), *weight = plain_tensor(args[1]), *bias = nullptr;
  if (x == nullptr || weight == nullptr || at::autocast::is_autocast_enabled(at::kCPU) ||
      at::impl::torch_function_mode_enabled()) {
    Py_RETURN_NONE;
  }
  const auto dtype = x->scalar_type();
  if (x->dim() != 2 || weight->dim() != 2 || x->size(1) != weight->size(1) || !at::isFloatingType(dtype) ||
      weight->scalar_type() != dtype) {
    Py_RETURN_NONE;
  }
  if (args[2] != Py_None) {
    bias = plain_tensor(args[2]);
    if (bias == nullptr || bias->dim() != 1 || bias->size(0) != weight->size(0) ||
        bias->scalar_type() != dtype) {
      Py_RETURN_NONE;
    }
  }
  at::Tensor y;
  {
    const at::Tensor held_x = *x, held_weight = *weight;  // whatever Python does meanwhile
    const auto held_bias = bias == nullptr ? std::optional<at::Tensor>() : *bias;
    WithoutGil released;
    y = at::linear(held_x, held_weight, held_bias);
  }
  return THPVariable_Wrap(y);
  END_HANDLE_TH_ERRORS
}

int64_t number_at(PyObject* tuple, Py_ssize_t place) {
  return PyLong_AsLongLong(PyTuple_GET_ITEM(tuple, place));
}

// By the current stream, after all that came before in it; on a CPU at once.
void write_word(const at::Tensor& words, int64_t chunk, int64_t word) {
  if (words.is_meta()) return;
  if (!words.is_cpu()) {
    static const auto write =
        c10::Dispatcher::singleton().findSchemaOrThrow("symm_mem::stream_write_value32_", "");
    torch::jit::Stack stack{words, chunk, word};  // boxed: a wrong type of C++ would be told on GPUs alone
    write.callBoxed(stack);
    return;
  }
  TORCH_CHECK(words.scalar_type() == at::kUInt32 && words.dim() == 1 && words.is_contiguous() && chunk >= 0 &&
                  chunk < words.numel(),
              "push: expected words in a vector of uint32, and one of its places");
  std::atomic_ref<uint32_t>(words.mutable_data_ptr<uint32_t>()[chunk])
      .store(static_cast<uint32_t>(word), std::memory_order_release);
}

// Rows into the memory of a rank, and flags behind them.
struct Push {
  at::Tensor landing, words;
  int64_t first_row, first_chunk, chunks;

  void run(const at::Tensor& outgoing, int64_t word) const {
    const int64_t rows = landing.size(0);
    landing.copy_(rows == outgoing.size(0) ? outgoing : outgoing.narrow(0, first_row, rows), true);
    for (int64_t chunk = first_chunk; chunk < first_chunk + chunks; ++chunk) write_word(words, chunk, word);
  }
};

// push(outgoing, pushes, word): pushes as of `SymmetricExchange.pushes`
PyObject* push(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  if (count != 3 || !THPVariable_Check(args[0]) || !PyTuple_Check(args[1])) {
    PyErr_SetString(PyExc_TypeError, "push(outgoing, pushes, word)");
    return nullptr;
  }
  const at::Tensor outgoing = THPVariable_Unpack(args[0]);
  const int64_t word = PyLong_AsLongLong(args[2]);
  std::vector<Push> pushes;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(args[1]); ++i) {
    PyObject* each = PyTuple_GET_ITEM(args[1], i);
    pushes.push_back({THPVariable_Unpack(PyTuple_GET_ITEM(each, 0)),
                      THPVariable_Unpack(PyTuple_GET_ITEM(each, 1)), number_at(each, 2), number_at(each, 3),
                      number_at(each, 4)});
  }
  if (PyErr_Occurred()) return nullptr;
  TORCH_CHECK(word >= 0 && word <= 0xffffffff, "push: expected a word of 32 bits, got ", word);
  {
    WithoutGil released;
    for (const Push& each : pushes) each.run(outgoing, word);
  }
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyMethodDef functions[] = {
    {"linear", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(linear)), METH_FASTCALL, nullptr},
    {"push", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(push)), METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef definition = {PyModuleDef_HEAD_INIT, "tpkernels._C", "Steps of calls, in C++.", -1, functions};

}  // namespace
}  // namespace tpkernels

PyMODINIT_FUNC PyInit__C() { return PyModule_Create(&tpkernels::definition); }
