// Where each gradient lies: tensors to buckets and offsets. Arithmetic only, no tensors.
#pragma once

#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <vector>

namespace tpkernels {

struct LayoutRules {
  int64_t bucket_bytes;        // a bucket is closed before it would grow beyond this
  int64_t first_bucket_bytes;  // the same for the first bucket of each kind: communication starts early
  int64_t alignment;           // each tensor starts at a multiple of this many elements
  int64_t padding;             // each bucket ends at a multiple of this many elements
};

struct BucketLayout {
  std::vector<int64_t> bucket_of;  // by tensor
  std::vector<int64_t> offset_of;  // by tensor, in elements
  std::vector<int64_t> elements;   // by bucket
};

// Tensors are given in the order in which their gradients become ready. Tensors of different `kinds` never
// share a bucket. Buckets are numbered in the order in which they become complete.
BucketLayout lay_out_buckets(c10::IntArrayRef numels, c10::IntArrayRef kinds, c10::IntArrayRef element_bytes,
                             const LayoutRules& rules);

}  // namespace tpkernels
