#include "bucket_layout.h"

#include <c10/util/Exception.h>
#include <c10/util/safe_numerics.h>

#include <algorithm>
#include <numeric>
#include <unordered_map>

namespace tpkernels {
namespace {

// The next multiple; false beyond 63 bits.
bool round_up(int64_t value, int64_t multiple, int64_t* rounded) {
  const int64_t rest = value % multiple;
  return !c10::add_overflows(value, rest == 0 ? 0 : multiple - rest, rounded);
}

void check(c10::IntArrayRef numels, c10::IntArrayRef kinds, c10::IntArrayRef element_bytes,
           const LayoutRules& rules) {
  TORCH_CHECK_VALUE(kinds.size() == numels.size() && element_bytes.size() == numels.size(),
                    "bucket_layout: expected one kind and one element size for each of ", numels.size(),
                    " tensors, got ", kinds.size(), " and ", element_bytes.size());
  TORCH_CHECK_VALUE(rules.bucket_bytes > 0 && rules.first_bucket_bytes > 0,
                    "bucket_layout: expected bucket sizes of at least one byte, got ", rules.bucket_bytes,
                    " and ", rules.first_bucket_bytes);
  TORCH_CHECK_VALUE(rules.alignment > 0 && rules.padding > 0,
                    "bucket_layout: expected an alignment and a padding of at least one element, got ",
                    rules.alignment, " and ", rules.padding);
  for (size_t tensor = 0; tensor < numels.size(); ++tensor) {
    TORCH_CHECK_VALUE(numels[tensor] >= 0 && element_bytes[tensor] > 0, "bucket_layout: tensor ", tensor,
                      ": expected no less than 0 elements of at least one byte, got ", numels[tensor],
                      " elements of ", element_bytes[tensor]);
  }
}

// Whether a bucket with this many elements has room for so many more.
bool fits(int64_t filled, int64_t size, int64_t element_bytes, int64_t capacity_bytes) {
  int64_t elements, bytes;
  return !c10::add_overflows(filled, size, &elements) &&
         !c10::mul_overflows(elements, element_bytes, &bytes) && bytes <= capacity_bytes;
}

// Renumbers buckets by their last tensor. Otherwise a bucket that is opened first and filled last (the norm
// weights of a whole model, say) would hold back all others, since buckets are launched in order.
void number_by_completion(BucketLayout& layout) {
  std::vector<size_t> last_tensor(layout.elements.size());
  for (size_t tensor = 0; tensor < layout.bucket_of.size(); ++tensor) {
    last_tensor[layout.bucket_of[tensor]] = tensor;
  }
  std::vector<size_t> order(layout.elements.size());
  std::iota(order.begin(), order.end(), 0);
  std::sort(order.begin(), order.end(), [&](size_t a, size_t b) { return last_tensor[a] < last_tensor[b]; });

  std::vector<int64_t> number(order.size()), elements(order.size());
  for (size_t position = 0; position < order.size(); ++position) {
    number[order[position]] = static_cast<int64_t>(position);
    elements[position] = layout.elements[order[position]];
  }
  for (int64_t& bucket : layout.bucket_of) bucket = number[bucket];
  layout.elements = std::move(elements);
}

}  // namespace

BucketLayout lay_out_buckets(c10::IntArrayRef numels, c10::IntArrayRef kinds, c10::IntArrayRef element_bytes,
                             const LayoutRules& rules) {
  check(numels, kinds, element_bytes, rules);
  BucketLayout layout;
  struct OpenBucket {
    int64_t number;
    int64_t capacity_bytes;
  };
  std::unordered_map<int64_t, OpenBucket> open;  // by kind
  for (size_t tensor = 0; tensor < numels.size(); ++tensor) {
    int64_t size, bytes;
    TORCH_CHECK_VALUE(round_up(numels[tensor], rules.alignment, &size) &&
                          !c10::mul_overflows(size, element_bytes[tensor], &bytes),
                      "bucket_layout: tensor ", tensor, ": expected a size in bytes of at most 63 bits, got ",
                      numels[tensor], " elements of ", element_bytes[tensor]);
    auto found = open.find(kinds[tensor]);
    const bool is_first = found == open.end();
    if (is_first || !fits(layout.elements[found->second.number], size, element_bytes[tensor],
                          found->second.capacity_bytes)) {
      const OpenBucket next{
          static_cast<int64_t>(layout.elements.size()),
          is_first ? std::min(rules.first_bucket_bytes, rules.bucket_bytes) : rules.bucket_bytes};
      found = open.insert_or_assign(kinds[tensor], next).first;
      layout.elements.push_back(0);
    }
    int64_t& filled = layout.elements[found->second.number];
    layout.bucket_of.push_back(found->second.number);
    layout.offset_of.push_back(filled);
    filled += size;
  }
  number_by_completion(layout);
  for (int64_t& elements : layout.elements) {
    const int64_t filled = elements;
    TORCH_CHECK_VALUE(round_up(filled, rules.padding, &elements),
                      "bucket_layout: expected buckets of at most 63 bits, got ", filled,
                      " elements padded to a multiple of ", rules.padding);
  }
  return layout;
}

}  // namespace tpkernels
