// What Python sees. Bindings go through the dispatcher: no pybind, and no CUDA headers to build.
#include <ATen/core/Tensor.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/new_zeros.h>
#include <torch/headeronly/version.h>
#include <torch/library.h>

// Read from the file before it is loaded, so that an extension built for another torch never runs.
extern "C" __attribute__((visibility("default"), used)) const char tpkernels_stamp[] =
    "tpkernels built with torch " TORCH_VERSION;

namespace tpkernels {
namespace {

// The tensors flattened into one, each at a multiple of `alignment` elements, with zeros between.
at::Tensor pack(at::TensorList tensors, int64_t alignment) {
  TORCH_CHECK_VALUE(!tensors.empty(), "pack: expected at least one tensor, got an empty list");
  TORCH_CHECK_VALUE(alignment > 0, "pack: expected a positive alignment, got ", alignment);
  std::vector<at::Tensor> pieces;
  pieces.reserve(2 * tensors.size());
  for (const at::Tensor& tensor : tensors) {
    TORCH_CHECK_VALUE(tensor.scalar_type() == tensors[0].scalar_type(),
                      "pack: expected tensors of one dtype, got ", tensors[0].scalar_type(), " and ",
                      tensor.scalar_type());
    TORCH_CHECK_VALUE(tensor.device() == tensors[0].device(), "pack: expected tensors on one device, got ",
                      tensors[0].device(), " and ", tensor.device());
    pieces.push_back(tensor.reshape({-1}));
    // an empty gap is added as well: to leave it out would ask a symbolic size for its value
    const c10::SymInt gap = (alignment - tensor.sym_numel() % alignment) % alignment;
    pieces.push_back(tensor.new_zeros_symint({gap}));
  }
  return at::cat(pieces);
}

std::string built_with_torch() { return TORCH_VERSION; }

}  // namespace

TORCH_LIBRARY(tpkernels, library) {
  library.def("built_with_torch() -> str", &built_with_torch);
  // Made of differentiable operators: autograd, meta tensors and every device come with them.
  library.def("pack(Tensor[] tensors, int alignment) -> Tensor");
  library.impl("pack", torch::dispatch(c10::DispatchKey::CompositeImplicitAutograd, TORCH_FN(pack)));
}

}  // namespace tpkernels
