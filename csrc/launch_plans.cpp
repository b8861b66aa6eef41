// Plans of launchers, found and repeated: see tpkernels/kernels/launch_plans.py, which makes them.
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/Device.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/autograd/python_variable.h>

#include <string>
#include <vector>

#include "python_module.h"

namespace tpkernels {
namespace {

// What the keys and plans of all launchers need of Python.
struct Bound {
  PyObject* launch = nullptr;       // the module; tests replace its `allocate`
  PyObject* allocate = nullptr;     // its own
  PyObject* start = nullptr;        // its `unobserved`
  PyObject* settings = nullptr;     // a tuple: what launchers look at besides their arguments, see `value_of`
  PyObject* plain_types = nullptr;  // of values that hold no tensor, and stay as they are
  PyObject* is_plain = nullptr;     // (value) -> whether it is such a value, of another type
  PyObject* share_memory = nullptr;
} bound;

// All that a launcher may look at.
class Key {
 public:
  std::vector<Reference> operands;

  // Whether plans can be kept by what was described.
  bool describe(PyObject* value) {
    if (value == Py_None) return put('n');
    if (value == Py_True) return put('t');
    if (value == Py_False) return put('f');
    // not by `isinstance`, which takes a proxy for what it stands for
    if (PyObject_TypeCheck(value, reinterpret_cast<PyTypeObject*>(THPVariableClass))) {
      return describe_tensor(value);
    }
    if (PyLong_CheckExact(value)) {
      int overflow = 0;
      const long long number = PyLong_AsLongLongAndOverflow(value, &overflow);
      return overflow ? describe_other(value) : put('i') && put(number);
    }
    if (PyFloat_CheckExact(value)) return put('d') && put(PyFloat_AS_DOUBLE(value));
    if (PyUnicode_CheckExact(value)) return put('s') && put_text(value);
    if (PyTuple_Check(value) || PyList_Check(value)) return describe_sequence(value);
    if (PyRange_Check(value)) {
      put('r');
      for (const char* name : {"start", "stop", "step"}) {
        if (!describe(Reference(PyObject_GetAttrString(value, name)).get())) return false;
      }
      return true;
    }
    if (THPDtype_Check(value)) return put('y') && put(reinterpret_cast<THPDtype*>(value)->scalar_type);
    if (THPDevice_Check(value)) return put('v') && put_device(reinterpret_cast<THPDevice*>(value)->device);
    return describe_other(value);
  }

  bool put_text(PyObject* text) {
    Py_ssize_t size = 0;
    const char* characters = PyUnicode_AsUTF8AndSize(text, &size);
    if (characters == nullptr) return failed();
    put(size);
    bytes_.append(characters, size);
    return true;
  }

  // Hashable.
  Reference object() const {
    Reference bytes(PyBytes_FromStringAndSize(bytes_.data(), bytes_.size()));
    if (others_.empty()) return bytes;
    Reference all(PyTuple_New(others_.size() + 1));
    for (size_t i = 0; i < others_.size(); ++i)
      PyTuple_SET_ITEM(all.get(), i + 1, Py_NewRef(others_[i].get()));
    PyTuple_SET_ITEM(all.get(), 0, bytes.release());
    return all;
  }

 private:
  static constexpr int kDeepest = 16;  // of sequences in sequences

  template <typename T>
  bool put(T value) {
    bytes_.append(reinterpret_cast<const char*>(&value), sizeof value);
    return true;
  }

  // What launchers do not take, they say best.
  static bool failed() {
    PyErr_Clear();
    return false;
  }

  bool put_device(c10::Device device) { return put(device.type()) && put(device.index()); }

  bool describe_tensor(PyObject* value) {
    for (size_t number = 0; number < operands.size(); ++number) {
      if (operands[number].get() == value) return put('=') && put(number);
    }
    const at::Tensor& tensor = THPVariable_Unpack(value);
    // what has no address, makes its own sizes, or has other numbers than its memory
    if (!tensor.has_storage() || tensor.is_neg() || tensor.is_nested() || tensor.layout() != at::kStrided ||
        tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides() ||
        tensor.unsafeGetTensorImpl()->is_python_dispatch()) {
      return false;
    }
    put('T');
    put(tensor.dim());
    for (const int64_t size : tensor.sizes()) put(size);
    for (const int64_t stride : tensor.strides()) put(stride);
    put(tensor.scalar_type());
    put_device(tensor.device());
    put(static_cast<uint8_t>(reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) & 15));
    operands.push_back(Reference::shared(value));
    return true;
  }

  bool describe_sequence(PyObject* value) {
    if (depth_ == kDeepest) return false;
    ++depth_;
    put('(');
    put(Py_TYPE(value));  // of ours, which stay
    put(PySequence_Fast_GET_SIZE(value));
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(value); ++i) {  // what describes may change a list
      const Reference item = Reference::shared(PySequence_Fast_GET_ITEM(value, i));
      if (!describe(item.get())) return false;
    }
    --depth_;
    return true;
  }

  bool describe_other(PyObject* value) {
    if (bound.launch == nullptr) return false;
    others_.push_back(Reference::shared(value));
    put('o');
    const int known = PySet_Contains(bound.plain_types, reinterpret_cast<PyObject*>(Py_TYPE(value)));
    if (known < 0) return failed();
    return known || Reference(PyObject_CallOneArg(bound.is_plain, value)).get() == Py_True;
  }

  std::string bytes_;
  std::vector<Reference> others_;  // compared as Python does
  int depth_ = 0;
};

// Of a setting: (object, name of its attribute), a context variable, or a function.
Reference value_of(PyObject* setting) {
  if (PyTuple_CheckExact(setting)) {
    return Reference(PyObject_GetAttr(PyTuple_GET_ITEM(setting, 0), PyTuple_GET_ITEM(setting, 1)));
  }
  if (!PyContextVar_CheckExact(setting)) return Reference(PyObject_CallNoArgs(setting));
  PyObject* value = nullptr;
  if (PyContextVar_Get(setting, Py_None, &value) < 0) throw PythonError();
  return Reference(value);
}

// Whether the arguments have a key.
bool describe_call(Key& key, PyObject* args, PyObject* options) try {
  if (bound.launch == nullptr) return false;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(bound.settings); ++i) {
    if (!key.describe(value_of(PyTuple_GET_ITEM(bound.settings, i)).get())) return false;
  }
  if (!key.describe(args)) return false;
  PyObject *name = nullptr, *value = nullptr;
  for (Py_ssize_t i = 0; PyDict_Next(options, &i, &name, &value);) {
    const Reference held = Reference::shared(value);
    if (!key.put_text(name) || !key.describe(held.get())) return false;
  }
  return true;
} catch (const c10::Error&) {  // a tensor of a kind that cannot be asked
  return false;
}

Py_ssize_t number_in(PyObject* tuple, Py_ssize_t place) {
  const Py_ssize_t number = PyLong_AsSsize_t(PyTuple_GET_ITEM(tuple, place));
  if (number == -1 && PyErr_Occurred()) throw PythonError();
  return number;
}

using Tensors = std::vector<Reference>;

// `launch_plans.Arguments`.
class Arguments {
 public:
  explicit Arguments(PyObject* given) {
    PyObject *others = PyTuple_GET_ITEM(given, 0), *tensors = PyTuple_GET_ITEM(given, 1),
             *descriptors = PyTuple_GET_ITEM(given, 2);
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(others); ++i)
      others_.push_back(Reference::shared(PyList_GET_ITEM(others, i)));
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tensors); ++i) {
      PyObject* each = PyTuple_GET_ITEM(tensors, i);
      tensors_.emplace_back(number_in(each, 0), number_in(each, 1));
    }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(descriptors); ++i) {
      PyObject* each = PyTuple_GET_ITEM(descriptors, i);
      PyObject* descriptor = PyTuple_GET_ITEM(each, 2);
      descriptors_.push_back({number_in(each, 0), number_in(each, 1),
                              Reference::shared(reinterpret_cast<PyObject*>(Py_TYPE(descriptor))),
                              Reference(PyObject_GenericGetDict(descriptor, nullptr))});
    }
  }

  Reference of(const Tensors& tensors) const {
    Reference filled(PyTuple_New(others_.size()));
    std::vector<Reference> described;
    for (const auto& each : descriptors_) described.push_back(each.of(tensors[each.tensor]));
    size_t next = 0, tensor = 0;
    for (size_t i = 0; i < others_.size(); ++i) {
      PyObject* value = others_[i].get();
      if (tensor < tensors_.size() && tensors_[tensor].first == static_cast<Py_ssize_t>(i)) {
        value = tensors[tensors_[tensor++].second].get();
      } else if (next < described.size() && descriptors_[next].position == static_cast<Py_ssize_t>(i)) {
        value = described[next++].get();
      }
      PyTuple_SET_ITEM(filled.get(), i, Py_NewRef(value));
    }
    return filled;
  }

 private:
  struct Descriptor {
    Py_ssize_t position, tensor;
    Reference type, fields;  // all but its `base`

    // Without its checks, which have passed.
    Reference of(const Reference& base) const {
      static PyObject* const none = checked(PyTuple_New(0));
      Reference made(PyBaseObject_Type.tp_new(reinterpret_cast<PyTypeObject*>(type.get()), none, nullptr));
      Reference filled(PyDict_Copy(fields.get()));
      if (PyDict_SetItemString(filled.get(), "base", base.get()) < 0 ||
          PyObject_GenericSetDict(made.get(), filled.get(), nullptr) < 0) {
        throw PythonError();
      }
      return made;
    }
  };

  std::vector<Reference> others_;
  std::vector<std::pair<Py_ssize_t, Py_ssize_t>> tensors_;  // by position
  std::vector<Descriptor> descriptors_;                     // by position
};

struct Step {
  virtual ~Step() = default;
  virtual void run(Tensors& tensors) const = 0;
};

struct Allocate : Step {
  explicit Allocate(PyObject* step) : arguments(Reference::shared(step)) {
    PyObject* shape = PyTuple_GET_ITEM(step, 0);
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(shape); ++i) sizes.push_back(number_in(shape, i));
    options = at::TensorOptions()
                  .dtype(reinterpret_cast<THPDtype*>(PyTuple_GET_ITEM(step, 1))->scalar_type)
                  .device(reinterpret_cast<THPDevice*>(PyTuple_GET_ITEM(step, 2))->device);
  }

  void run(Tensors& tensors) const override {
    Reference allocate(PyObject_GetAttrString(bound.launch, "allocate"));
    if (allocate.get() != bound.allocate || at::impl::torch_function_mode_enabled()) {  // which sees it
      tensors.emplace_back(PyObject_CallObject(allocate.get(), arguments.get()));
      return;
    }
    at::Tensor made;
    {
      WithoutGil released;  // a full GPU holds up who allocates
      made = at::empty(sizes, options);
    }
    tensors.emplace_back(THPVariable_Wrap(made));
  }

  Reference arguments;
  std::vector<int64_t> sizes;
  at::TensorOptions options;
};

struct TakeView : Step {
  explicit TakeView(PyObject* step)
      : operation(Reference::shared(PyTuple_GET_ITEM(step, 0))), arguments(PyTuple_GET_ITEM(step, 1)) {}

  void run(Tensors& tensors) const override {
    tensors.emplace_back(PyObject_CallObject(operation.get(), arguments.of(tensors).get()));
  }

  Reference operation;
  Arguments arguments;
};

struct Start : Step {
  explicit Start(PyObject* step)
      : where(checked(PyTuple_GetSlice(step, 0, 3))),
        arguments(PyTuple_GET_ITEM(step, 3)),
        constants(Reference::shared(PyTuple_GET_ITEM(step, 4))) {}

  void run(Tensors& tensors) const override {
    Reference start(PyObject_CallObject(bound.start, where.get()));
    PyObject* options = PyDict_GET_SIZE(constants.get()) ? constants.get() : nullptr;
    Reference(PyObject_Call(start.get(), arguments.of(tensors).get(), options));
  }

  Reference where;  // device, kernel, grid
  Arguments arguments;
  Reference constants;
};

// `launch_plans.LaunchPlan`.
class Plan {
 public:
  // returns: a type of tuple; None: the only result itself
  Plan(PyObject* steps, PyObject* results, PyObject* returns, PyObject* apart)
      : results_(results), returns_(Reference::shared(returns)) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(steps); ++i) {
      PyObject* step = PyTuple_GET_ITEM(steps, i);
      switch (PyTuple_GET_SIZE(step)) {  // named tuples, each of another length
        case 3:
          steps_.push_back(std::make_unique<Allocate>(step));
          break;
        case 2:
          steps_.push_back(std::make_unique<TakeView>(step));
          break;
        default:
          steps_.push_back(std::make_unique<Start>(step));
      }
    }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(apart); ++i) {
      PyObject* pair = PyTuple_GET_ITEM(apart, i);
      apart_.emplace_back(number_in(pair, 0), number_in(pair, 1));
    }
  }

  bool fits(const Tensors& operands) const {
    for (const auto& [one, other] : apart_) {
      Reference shares(PyObject_CallFunctionObjArgs(bound.share_memory, operands[one].get(),
                                                    operands[other].get(), nullptr));
      if (shares.get() == Py_True) return false;
    }
    return true;
  }

  // tensors: the operands
  PyObject* run(Tensors tensors) const {
    tensors.reserve(tensors.size() + steps_.size());
    for (const auto& step : steps_) step->run(tensors);
    Reference found = results_.of(tensors);
    if (returns_.get() == Py_None) return checked(Py_XNewRef(PyTuple_GetItem(found.get(), 0)));
    auto* type = reinterpret_cast<PyTypeObject*>(returns_.get());
    if (type == &PyTuple_Type) return found.release();
    const Reference given(PyTuple_Pack(1, found.get()));
    return checked(PyTuple_Type.tp_new(type, given.get(), nullptr));  // a named tuple, whose fields are right
  }

 private:
  std::vector<std::unique_ptr<Step>> steps_;
  Arguments results_;
  Reference returns_;
  std::vector<std::pair<Py_ssize_t, Py_ssize_t>> apart_;
};

struct PlanObject {
  PyObject_HEAD Plan* plan;
};

PyObject* new_plan(PyTypeObject* type, PyObject* args, PyObject*) {
  HANDLE_TH_ERRORS
  PyObject *steps, *results, *returns, *apart;
  if (!PyArg_ParseTuple(args, "O!O!OO!", &PyTuple_Type, &steps, &PyTuple_Type, &results, &returns,
                        &PyTuple_Type, &apart)) {
    return nullptr;
  }
  if (returns != Py_None &&
      !(PyType_Check(returns) && PyType_IsSubtype(reinterpret_cast<PyTypeObject*>(returns), &PyTuple_Type))) {
    PyErr_SetString(PyExc_TypeError, "Plan: expected a type of tuple, or None, as what it returns");
    return nullptr;
  }
  auto plan = std::make_unique<Plan>(steps, results, returns, apart);
  PyObject* made = checked(type->tp_alloc(type, 0));
  reinterpret_cast<PlanObject*>(made)->plan = plan.release();
  return made;
  END_HANDLE_TH_ERRORS
}

void free_plan(PyObject* object) {
  PyTypeObject* type = Py_TYPE(object);
  delete reinterpret_cast<PlanObject*>(object)->plan;
  type->tp_free(object);
  Py_DECREF(type);
}

PyType_Slot slots[] = {{Py_tp_new, reinterpret_cast<void*>(new_plan)},
                       {Py_tp_dealloc, reinterpret_cast<void*>(free_plan)},
                       {0, nullptr}};
PyType_Spec spec = {"tpkernels._C.Plan", sizeof(PlanObject), 0, Py_TPFLAGS_DEFAULT, slots};
PyTypeObject* plan_type = nullptr;

// bind_launch_plans(launch, settings, plain_types, is_plain, share_memory): once
PyObject* bind(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  PyObject *launch, *settings, *plain_types, *is_plain, *share_memory;
  if (!PyArg_ParseTuple(args, "OO!OOO", &launch, &PyTuple_Type, &settings, &plain_types, &is_plain,
                        &share_memory)) {
    return nullptr;
  }
  bound = {Py_NewRef(launch),
           checked(PyObject_GetAttrString(launch, "allocate")),
           checked(PyObject_GetAttrString(launch, "unobserved")),
           Py_NewRef(settings),
           Py_NewRef(plain_types),
           Py_NewRef(is_plain),
           Py_NewRef(share_memory)};
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// signature(values) -> key, without what launchers look at besides
PyObject* signature(PyObject*, PyObject* values) {
  HANDLE_TH_ERRORS
  Key key;
  if (!key.describe(values)) {
    PyErr_SetString(PyExc_TypeError, "it may hold a tensor, or change");
    return nullptr;
  }
  return key.object().release();
  END_HANDLE_TH_ERRORS
}

// key_of(args, options, operands) -> key; operands: the tensors among the arguments are appended, each once
PyObject* key_of(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  PyObject *given, *options, *operands;
  if (!PyArg_ParseTuple(args, "O!O!O!", &PyTuple_Type, &given, &PyDict_Type, &options, &PyList_Type,
                        &operands)) {
    return nullptr;
  }
  Key key;
  if (!describe_call(key, given, options)) {
    PyErr_SetString(PyExc_TypeError, "it may hold a tensor, or change");
    return nullptr;
  }
  for (const Reference& operand : key.operands) {
    if (PyList_Append(operands, operand.get()) < 0) return nullptr;
  }
  return key.object().release();
  END_HANDLE_TH_ERRORS
}

// repeat(plans, args, options) -> what the launcher returns; NotImplemented if it has to run
PyObject* repeat(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  if (count != 3 || !PyDict_Check(args[0]) || !PyTuple_Check(args[1]) || !PyDict_Check(args[2])) {
    PyErr_SetString(PyExc_TypeError, "repeat(plans, args, options)");
    return nullptr;
  }
  Key key;
  if (!describe_call(key, args[1], args[2])) Py_RETURN_NOTIMPLEMENTED;
  PyObject* found = PyDict_GetItemWithError(args[0], key.object().get());
  if (found == nullptr && PyErr_Occurred()) return nullptr;
  if (found == nullptr || Py_TYPE(found) != plan_type) Py_RETURN_NOTIMPLEMENTED;
  const Reference held = Reference::shared(found);  // whatever becomes of `plans` meanwhile
  const Plan& plan = *reinterpret_cast<PlanObject*>(found)->plan;
  if (!plan.fits(key.operands)) Py_RETURN_NOTIMPLEMENTED;
  return plan.run(std::move(key.operands));
  END_HANDLE_TH_ERRORS
}

PyMethodDef plan_functions[] = {
    {"bind_launch_plans", bind, METH_VARARGS, nullptr},
    {"signature", signature, METH_O, nullptr},
    {"key_of", key_of, METH_VARARGS, nullptr},
    {"repeat", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(repeat)), METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr}};

}  // namespace

bool add_launch_plans(PyObject* module) {
  plan_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
  return plan_type != nullptr && PyModule_AddFunctions(module, plan_functions) == 0 &&
         PyModule_AddObjectRef(module, "Plan", reinterpret_cast<PyObject*>(plan_type)) == 0;
}

}  // namespace tpkernels
