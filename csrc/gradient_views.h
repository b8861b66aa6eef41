// Where a gradient lies in its bucket, and whether it does.
#pragma once

#include <ATen/TensorSubclassLikeUtils.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>

#include <cstring>

namespace tpkernels {

// Laid out like the parameter, so that optimizers walk both in the same order. Autograd does not know that it
// is a view: else its version would be that of all tensors in the bucket.
inline at::Tensor view_like(const at::Tensor& parameter, const at::Tensor& flat, int64_t offset) {
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  const at::Tensor dense = at::empty_like(parameter, parameter.options().device(at::kMeta));
  return flat.as_strided(parameter.sizes(), dense.strides(), flat.storage_offset() + offset);
}

// By storage, for empty tensors have no address.
inline bool is_in_place(const at::Tensor& grad, const at::Tensor& view) {
  return grad.is_alias_of(view) && grad.storage_offset() == view.storage_offset();
}

// For small tensors on a CPU, what `copy_` does before it copies takes longer than the copy.
inline void copy_into(const at::Tensor& view, const at::Tensor& grad) {
  constexpr size_t SMALL = 1 << 15;
  const bool is_plain =  // a tensor of zeros may have no memory
      grad.is_cpu() && !at::isTensorSubclassLike(grad) && !grad.is_neg() && !grad._is_zerotensor();
  if (is_plain && view.is_cpu() && grad.scalar_type() == view.scalar_type() && grad.nbytes() <= SMALL &&
      grad.strides() == view.strides() && view.is_non_overlapping_and_dense()) {
    if (grad.nbytes() > 0) std::memcpy(view.mutable_data_ptr(), grad.const_data_ptr(), grad.nbytes());
  } else {
    view.copy_(grad);
  }
}

// What `grad` becomes. Not the view itself: `module.to()` replaces the data of `grad`, and with it the
// view's. Its version counts what is done to it alone.
inline at::Tensor alias_of(const at::Tensor& view) {
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  return view.detach();
}

}  // namespace tpkernels
