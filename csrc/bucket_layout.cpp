#include "bucket_layout.h"

namespace tpkernels {

BucketLayout bucket_layout(const std::vector<int64_t>& lengths, int64_t alignment) {
  BucketLayout layout{{}, 0};
  layout.offsets.reserve(lengths.size());
  for (const int64_t length : lengths) {
    layout.offsets.push_back(layout.length);
    layout.length += (length + alignment - 1) / alignment * alignment;
  }
  return layout;
}

}  // namespace tpkernels
