// Rows into the memory of other ranks and flags behind them, as tpkernels/comm/transports/symmetric.py says,
// in one call.
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <ATen/ops/copy.h>
#include <torch/csrc/autograd/python_variable.h>

#include <atomic>
#include <vector>

#include "python_module.h"

namespace tpkernels {
namespace {

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

PyMethodDef push_functions[] = {
    {"push", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(push)), METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr}};

}  // namespace

bool add_pushes(PyObject* module) { return PyModule_AddFunctions(module, push_functions) == 0; }

}  // namespace tpkernels
