// Whether operands are what nearly all calls bring, in one look: see `linear_fits` in
// tpkernels/ops/inputs.py.
#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/python_variable.h>

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

// linear_fits(x, weight, bias) -> whether F.linear takes them as they are, and `ops.linear` means the same:
// matrices of the CPU that fit, and None or a vector. False says nothing.
PyObject* linear_fits(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  if (count != 3) {
    PyErr_SetString(PyExc_TypeError, "linear_fits(x, weight, bias)");
    return nullptr;
  }
  const at::Tensor *x = plain_tensor(args[0]), *weight = plain_tensor(args[1]);
  if (x == nullptr || weight == nullptr || at::autocast::is_autocast_enabled(at::kCPU)) Py_RETURN_FALSE;
  const auto dtype = x->scalar_type();
  if (x->dim() != 2 || weight->dim() != 2 || x->size(1) != weight->size(1) || !at::isFloatingType(dtype) ||
      weight->scalar_type() != dtype) {
    Py_RETURN_FALSE;
  }
  if (args[2] != Py_None) {
    const at::Tensor* bias = plain_tensor(args[2]);
    if (bias == nullptr || bias->dim() != 1 || bias->size(0) != weight->size(0) ||
        bias->scalar_type() != dtype) {
      Py_RETURN_FALSE;
    }
  }
  Py_RETURN_TRUE;
  END_HANDLE_TH_ERRORS
}

PyMethodDef operand_functions[] = {
    {"linear_fits", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(linear_fits)), METH_FASTCALL,
     nullptr},
    {nullptr, nullptr, 0, nullptr}};

}  // namespace

bool add_operands(PyObject* module) { return PyModule_AddFunctions(module, operand_functions) == 0; }

}  // namespace tpkernels
