#include "python_module.h"

namespace {

PyModuleDef definition = {PyModuleDef_HEAD_INIT, "tpkernels._C", "The steps of every call, in C++.", -1,
                          nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__C() {
  PyObject* module = PyModule_Create(&definition);
  if (module != nullptr && tpkernels::add_launch_plans(module) && tpkernels::add_operands(module) &&
      tpkernels::add_pushes(module)) {
    return module;
  }
  Py_XDECREF(module);
  return nullptr;
}
