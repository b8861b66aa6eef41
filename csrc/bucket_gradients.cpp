// How a gradient gets into its bucket, and when it may not.
#include <ATen/ops/div.h>

#include "bucket_engine.h"
#include "gradient_views.h"

namespace tpkernels {

// A gradient of a backward into its place in the bucket.
void BucketEngine::take_in(Slot& slot) {
  at::Tensor& grad = slot.parameter.mutable_grad();
  // What clears `grad` leaves `main_grad` as it is, and the last step's would be trained on once more.
  TORCH_CHECK(
      !options_.main_grad || !slot.reduced, "GradientBuckets(main_grad=True): '", slot.name,
      "' receives a gradient while main_grad holds that of the last step; call zero() before the next "
      "backward, for optimizer.zero_grad() clears grad alone");
  if (!grad.defined()) return;  // nothing came, or a fused kernel has added it to the bucket already
  TORCH_CHECK_TYPE(grad.layout() == at::kStrided, "GradientBuckets: the gradient of '", slot.name,
                   "' is sparse; expected a dense one: make its embedding with sparse=False");
  TORCH_CHECK(
      !grad.requires_grad(), "GradientBuckets: the gradient of '", slot.name,
      "' has a graph of its own; backward(create_graph=True) is not supported, use torch.autograd.grad");
  refuse_resized(slot, grad);
  if (options_.main_grad) {
    slot.view.add_(grad);
    grad.reset();
  } else if (is_in_place(grad, slot.view)) {
    refuse_reduced(slot);
  } else {
    // The first gradient after `zero` is written, not added: that reads and writes half as much, and can
    // divide on the way.
    slot.scaled = divides() && synchronizing_ && slot.expected == 1;
    if (slot.scaled) {
      at::div_out(slot.view, grad, divisor_);
    } else {
      copy_into(slot.view, grad);
    }
    grad = alias_of(slot.view);
    slot.reduced = false;
  }
}

// What lies in `grad` when the bucket is sent, where no hook took it in during this round.
void BucketEngine::take_leftover(Slot& slot) {
  if (options_.main_grad) return;
  at::Tensor& grad = slot.parameter.mutable_grad();
  if (grad.defined() && is_in_place(grad, slot.view)) {
    if (!slot.touched) refuse_reduced(slot);
    return;
  }
  if (grad.defined()) {
    refuse_resized(slot, grad);
    copy_into(slot.view, grad);
    slot.touched = true;
  } else {
    slot.view.zero_();
  }
  grad = alias_of(slot.view);
}

void BucketEngine::refuse_converted(const Slot& slot) const {
  TORCH_CHECK(slot.parameter.scalar_type() == slot.dtype &&
                  (!slot.view.defined() || slot.parameter.device() == slot.view.device()),
              "GradientBuckets: '", slot.name, "' was converted or moved, which takes its hook away; make ",
              "GradientBuckets after that");
}

// It would be broadcast.
void BucketEngine::refuse_resized(const Slot& slot, const at::Tensor& grad) const {
  TORCH_CHECK(grad.sizes() == slot.view.sizes(), "GradientBuckets: the gradient of '", slot.name,
              "' is of shape ", grad.sizes(), "; expected ", slot.view.sizes(),
              ", as when GradientBuckets were made");
}

void BucketEngine::refuse_reduced(const Slot& slot) const {
  TORCH_CHECK(!slot.reduced || keeps_average(), "GradientBuckets: the gradient of '", slot.name,
              "' is reduced already, and more cannot be added to it; call zero() first");
}

// Of what the user sees; changes of its `data` do not count.
std::optional<uint32_t> BucketEngine::version_of(const Slot& slot) const {
  const at::Tensor& seen = options_.main_grad ? slot.view : slot.parameter.grad();
  if (!seen.defined() || seen.is_inference()) return std::nullopt;
  return seen._version();
}

// Its bucket may be on its way: what is done to a gradient now may reach some ranks, or none.
void BucketEngine::refuse_changed(const Slot& slot) const {
  if (slot.arrived == 0 || !slot.version) return;
  const at::Tensor& grad = slot.parameter.grad();
  const bool is_there = options_.main_grad || (grad.defined() && is_in_place(grad, slot.view));
  TORCH_CHECK(is_there && version_of(slot) == slot.version, "GradientBuckets: the gradient of '", slot.name,
              "' was changed, replaced or cleared between backward and finish(); call finish() first, and "
              "clip, unscale or clear gradients after it");
}

}  // namespace tpkernels
