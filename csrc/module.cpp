// What Python sees. Bindings go through the dispatcher: no pybind, and no CUDA headers to build.
#include <ATen/core/Tensor.h>
#include <ATen/ops/cat.h>
#include <torch/headeronly/version.h>
#include <torch/library.h>

#include "bucket_layout.h"

// Read from the file before it is loaded, so that an extension built for another torch never runs.
extern "C" __attribute__((visibility("default"), used)) const char tpkernels_stamp[] =
    "tpkernels built with torch " TORCH_VERSION;

namespace tpkernels {
namespace {

// The tensors flattened into one, each at an aligned offset, with zeros between.
at::Tensor pack(at::TensorList tensors, int64_t alignment) {
  TORCH_CHECK_VALUE(!tensors.empty(), "pack: expected at least one tensor, got an empty list");
  TORCH_CHECK_VALUE(alignment > 0, "pack: expected a positive alignment, got ", alignment);
  std::vector<int64_t> lengths;
  lengths.reserve(tensors.size());
  for (const at::Tensor& tensor : tensors) {
    TORCH_CHECK_VALUE(tensor.scalar_type() == tensors[0].scalar_type(),
                      "pack: expected tensors of one dtype, got ", tensors[0].scalar_type(), " and ",
                      tensor.scalar_type());
    TORCH_CHECK_VALUE(tensor.device() == tensors[0].device(), "pack: expected tensors on one device, got ",
                      tensors[0].device(), " and ", tensor.device());
    lengths.push_back(tensor.numel());
  }
  const BucketLayout layout = bucket_layout(lengths, alignment);
  std::vector<at::Tensor> pieces;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const int64_t end = i + 1 < tensors.size() ? layout.offsets[i + 1] : layout.length;
    const int64_t gap = end - layout.offsets[i] - lengths[i];
    pieces.push_back(tensors[i].reshape({-1}));
    if (gap > 0) pieces.push_back(tensors[i].new_zeros({gap}));
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
