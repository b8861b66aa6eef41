// Where each tensor of a list lies in one flat buffer.
#pragma once

#include <cstdint>
#include <vector>

namespace tpkernels {

struct BucketLayout {
  std::vector<int64_t> offsets;  // in elements, one per tensor
  int64_t length;                // in elements, the padding after the last tensor included
};

// Every tensor starts at a multiple of `alignment` elements, so that kernels can load it in whole vectors.
BucketLayout bucket_layout(const std::vector<int64_t>& lengths, int64_t alignment);

}  // namespace tpkernels
