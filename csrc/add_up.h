// Sums in the order that they are given in.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace tpkernels {

// The sum of tensors, divided, into each of some others; all flat, contiguous, on the CPU, and of one size.
// Added in double, or where `in_double` is false and they are narrower in float; rounded once (from double to
// a half by way of float). `into` are of the dtype of what is added, or of that which it is added in.
void add_up(const std::vector<at::Tensor>& tensors, const std::vector<at::Tensor>& into, int64_t divisor,
            bool in_double);

// The dtype that tensors of `own` are added in.
at::ScalarType added_in(at::ScalarType own, bool in_double);

}  // namespace tpkernels
