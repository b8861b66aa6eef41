#include "add_up.h"

#include <ATen/Parallel.h>

#include <algorithm>

namespace tpkernels {
namespace {

constexpr int64_t BLOCK = 2048;  // elements, whose sums stay in the cache
constexpr int64_t LEAST_A_THREAD = 1 << 15;

template <typename Element>
std::vector<Element*> data_of(const std::vector<at::Tensor>& tensors) {
  std::vector<Element*> data;
  for (const at::Tensor& tensor : tensors) data.push_back(tensor.mutable_data_ptr<Element>());
  return data;
}

template <typename Element, typename Sum, typename Result>
void add_block(const std::vector<Element*>& from, const std::vector<Result*>& into, Sum divisor,
               int64_t first, int64_t count) {
  Sum sums[BLOCK];
  for (int64_t i = 0; i < count; ++i) sums[i] = static_cast<Sum>(from[0][first + i]);
  for (size_t next = 1; next < from.size(); ++next) {
    const Element* const more = from[next] + first;
    for (int64_t i = 0; i < count; ++i) sums[i] += static_cast<Sum>(more[i]);
  }
  if (divisor != 1) {
    for (int64_t i = 0; i < count; ++i) sums[i] /= divisor;
  }
  for (Result* const result : into) {
    for (int64_t i = 0; i < count; ++i) result[first + i] = static_cast<Result>(sums[i]);
  }
}

template <typename Element, typename Sum, typename Result>
void add_blocks(const std::vector<at::Tensor>& tensors, const std::vector<at::Tensor>& results,
                int64_t divisor) {
  const auto from = data_of<Element>(tensors);
  const auto into = data_of<Result>(results);
  at::parallel_for(0, tensors[0].numel(), LEAST_A_THREAD, [&](int64_t first, int64_t last) {
    for (; first < last; first += BLOCK) {
      add_block(from, into, static_cast<Sum>(divisor), first, std::min(BLOCK, last - first));
    }
  });
}

template <typename Element, typename Sum>
void add_in(const std::vector<at::Tensor>& tensors, const std::vector<at::Tensor>& into, int64_t divisor) {
  if (into[0].scalar_type() == tensors[0].scalar_type()) {
    add_blocks<Element, Sum, Element>(tensors, into, divisor);
  } else {
    add_blocks<Element, Sum, Sum>(tensors, into, divisor);
  }
}

template <typename Element>
void add_narrow(const std::vector<at::Tensor>& tensors, const std::vector<at::Tensor>& into, int64_t divisor,
                bool in_double) {
  in_double ? add_in<Element, double>(tensors, into, divisor)
            : add_in<Element, float>(tensors, into, divisor);
}

}  // namespace

void add_up(const std::vector<at::Tensor>& tensors, const std::vector<at::Tensor>& into, int64_t divisor,
            bool in_double) {
  switch (tensors[0].scalar_type()) {
    case at::kDouble:
      return add_in<double, double>(tensors, into, divisor);
    case at::kFloat:
      return add_narrow<float>(tensors, into, divisor, in_double);
    case at::kHalf:
      return add_narrow<at::Half>(tensors, into, divisor, in_double);
    default:
      return add_narrow<at::BFloat16>(tensors, into, divisor, in_double);
  }
}

at::ScalarType added_in(at::ScalarType own, bool in_double) {
  return in_double || own == at::kDouble ? at::kDouble : at::kFloat;
}

}  // namespace tpkernels
