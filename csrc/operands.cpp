// Products of operands that are what nearly all calls bring, which one look tells: see `quick_linear` in
// tpkernels/ops/inputs.py.
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/autocast_mode.h>
#include <ATen/ops/linear.h>
#include <torch/csrc/autograd/python_variable.h>

#include <optional>

#include "python_module.h"

namespace tpkernels {
namespace {

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
// a mode is to see the call of F.linear.
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

PyMethodDef operand_functions[] = {
    {"linear", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(linear)), METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr}};

}  // namespace

bool add_operands(PyObject* module) { return PyModule_AddFunctions(module, operand_functions) == 0; }

}  // namespace tpkernels
