// Where a gradient lies in its bucket, and whether it does.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>

namespace tpkernels {

// Laid out like the parameter, so that optimizers walk both in the same order.
inline at::Tensor view_like(const at::Tensor& parameter, const at::Tensor& flat, int64_t offset) {
  const at::Tensor dense = at::empty_like(parameter, parameter.options().device(at::kMeta));
  return flat.as_strided(parameter.sizes(), dense.strides(), flat.storage_offset() + offset);
}

// By storage, for empty tensors have no address.
inline bool is_in_place(const at::Tensor& grad, const at::Tensor& view) {
  return grad.is_alias_of(view) && grad.storage_offset() == view.storage_offset();
}

// What `grad` becomes. Not the view itself: `module.to()` replaces the data of `grad`, and with it the
// view's.
inline at::Tensor alias_of(const at::Tensor& view) { return view.detach(); }

}  // namespace tpkernels
