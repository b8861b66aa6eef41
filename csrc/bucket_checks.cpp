// What an engine may be given, and when it may be called. Callers in Python keep to all of it; what does not
// would read or write memory that is not ours, or give a wrong sum.
#include <c10/util/irange.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <numeric>
#include <tuple>
#include <unordered_set>

#include "bucket_engine.h"

namespace tpkernels {
namespace {

constexpr int64_t LONGEST_TIMEOUT_MS = int64_t{365} * 24 * 60 * 60 * 1000;  // clocks overflow in 292 years

bool is_supported(at::ScalarType dtype) {
  return dtype == at::kDouble || dtype == at::kFloat || dtype == at::kHalf || dtype == at::kBFloat16;
}

void check_timeout(int64_t timeout_ms) {
  TORCH_CHECK_VALUE(timeout_ms > 0 && timeout_ms < LONGEST_TIMEOUT_MS,
                    "GradientBuckets: expected a time-out of 1 ms to a year, got ", timeout_ms);
}

bool is_flat(const at::Tensor& given) {
  return given.defined() && given.layout() == at::kStrided && !given.is_nested() && given.dim() == 1 &&
         given.is_contiguous() && given.has_storage() && !given.is_meta() && !given.requires_grad();
}

bool overlap(const at::Tensor& a, const at::Tensor& b) {
  const auto begin = [](const at::Tensor& flat) {
    return reinterpret_cast<uintptr_t>(flat.const_data_ptr());
  };
  return a.nbytes() > 0 && b.nbytes() > 0 && begin(a) < begin(b) + b.nbytes() &&
         begin(b) < begin(a) + a.nbytes();
}

void check_dtype(const char* option, const std::optional<at::ScalarType>& dtype) {
  TORCH_CHECK_TYPE(!dtype || is_supported(*dtype), "GradientBuckets: ", option,
                   ": expected float64, float32, float16 or bfloat16, got ", dtype.value_or(at::kFloat));
}

void check_parameter(const at::Tensor& parameter, const std::string& name, const at::Tensor& first) {
  TORCH_CHECK_VALUE(parameter.defined(), "GradientBuckets: expected a tensor for '", name, "', got none");
  TORCH_CHECK_TYPE(parameter.layout() == at::kStrided && !parameter.is_nested(), "GradientBuckets: '", name,
                   "': expected a dense tensor, got ", parameter.is_nested() ? "a nested" : "a sparse",
                   " one");
  TORCH_CHECK_TYPE(is_supported(parameter.scalar_type()), "GradientBuckets: '", name,
                   "': expected float64, float32, float16 or bfloat16, got ", parameter.scalar_type());
  TORCH_CHECK_VALUE(!parameter.is_meta(), "GradientBuckets: '", name,
                    "': expected a tensor with data, got one on the meta device");
  TORCH_CHECK_VALUE(parameter.device() == first.device(), "GradientBuckets: '", name,
                    "': expected all parameters on ", first.device(), ", got one on ", parameter.device());
  TORCH_CHECK_VALUE(parameter.requires_grad() && parameter.is_leaf(), "GradientBuckets: '", name,
                    "': expected a leaf that requires a gradient, got one that ",
                    parameter.requires_grad() ? "is computed from others" : "requires none");
}

}  // namespace

EngineOptions BucketEngine::checked(EngineOptions options, const std::vector<at::Tensor>& parameters) {
  const auto& names = options.names;
  const auto& marked = options.marked;
  TORCH_CHECK_VALUE(!parameters.empty(), "GradientBuckets: expected at least one parameter, got none");
  TORCH_CHECK_VALUE(names.size() == parameters.size() && marked.size() == parameters.size(),
                    "GradientBuckets: expected a name and a mark for each of ", parameters.size(),
                    " parameters, got ", names.size(), " names and ", marked.size(), " marks");
  check_dtype("grad_dtype", options.grad_dtype);
  check_dtype("wire_dtype", options.wire_dtype);
  TORCH_CHECK_VALUE(options.rank >= 0 && options.rank < std::numeric_limits<int32_t>::max(),
                    "GradientBuckets: expected a rank from 0 that fits 31 bits, got ", options.rank);
  if (options.timeout_ms != -1) check_timeout(options.timeout_ms);  // the group's own
  options.reservation.checked("GradientBuckets");
  TORCH_CHECK_VALUE(
      !options.tensor_parallel_group.empty() || std::none_of(marked.begin(), marked.end(), std::identity{}),
      "GradientBuckets: expected a tensor-parallel group for the parameters that are marked, got none");
  std::unordered_set<const c10::TensorImpl*> known;
  for (size_t i = 0; i < parameters.size(); ++i) {
    check_parameter(parameters[i], names[i], parameters[0]);
    TORCH_CHECK_VALUE(known.insert(parameters[i].unsafeGetTensorImpl()).second, "GradientBuckets: '",
                      names[i], "': expected each parameter once, got one again under another name");
  }
  return options;
}

// Afterwards each parameter has memory of its own in a bucket of its dtype.
void BucketEngine::check_arrangement(const std::vector<int64_t>& bucket_of,
                                     const std::vector<int64_t>& offset_of,
                                     const std::vector<at::Tensor>& flats) const {
  const auto buckets = static_cast<int64_t>(flats.size());
  TORCH_CHECK_VALUE(bucket_of.size() == slots_.size() && offset_of.size() == slots_.size(),
                    "GradientBuckets: expected a bucket and an offset for each of ", slots_.size(),
                    " parameters, got ", bucket_of.size(), " and ", offset_of.size());
  for (int64_t bucket = 0; bucket < buckets; ++bucket) {
    TORCH_CHECK_VALUE(is_flat(flats[bucket]), "GradientBuckets: expected bucket ", bucket,
                      " to be a flat tensor that needs no gradient");
  }
  std::vector<const Slot*> first(flats.size());
  for (size_t i = 0; i < slots_.size(); ++i) {
    const Slot& slot = slots_[i];
    const int64_t bucket = bucket_of[i], numel = slot.parameter.numel();
    TORCH_CHECK_INDEX(bucket >= 0 && bucket < buckets, "GradientBuckets: '", slot.name,
                      "': expected a bucket from 0 below ", buckets, ", got ", bucket);
    const int64_t elements = flats[bucket].numel();
    TORCH_CHECK_INDEX(offset_of[i] >= 0 && offset_of[i] <= elements - numel, "GradientBuckets: '", slot.name,
                      "': expected an offset from 0 that leaves room for ", numel, " of the ", elements,
                      " elements of bucket ", bucket, ", got ", offset_of[i]);
    const at::ScalarType dtype = options_.grad_dtype.value_or(slot.dtype);
    TORCH_CHECK_TYPE(
        flats[bucket].scalar_type() == dtype && flats[bucket].device() == slot.parameter.device(),
        "GradientBuckets: '", slot.name, "': expected a bucket of ", dtype, " on ", slot.parameter.device(),
        ", got ", flats[bucket].scalar_type(), " on ", flats[bucket].device());
    if (first[bucket] == nullptr) first[bucket] = &slot;
    TORCH_CHECK_VALUE(slot.dtype == first[bucket]->dtype && slot.marked == first[bucket]->marked,
                      "GradientBuckets: expected one dtype in bucket ", bucket,
                      ", and all marked or none, but '", first[bucket]->name, "' and '", slot.name,
                      "' differ");
  }
  for (int64_t bucket = 0; bucket < buckets; ++bucket) {
    TORCH_CHECK_VALUE(first[bucket] != nullptr, "GradientBuckets: expected parameters in each of ", buckets,
                      " buckets, but bucket ", bucket, " has none");
    TORCH_CHECK_VALUE(!options_.reduce_scatter || flats[bucket].numel() % group_.size() == 0,
                      "GradientBuckets: expected a multiple of ", group_.size(), " elements in bucket ",
                      bucket, ", of which each rank gets a shard, got ", flats[bucket].numel());
    for (int64_t other = 0; other < bucket; ++other) {
      TORCH_CHECK_VALUE(!overlap(flats[bucket], flats[other]), "GradientBuckets: expected memory of its own ",
                        "for each bucket, but ", other, " and ", bucket, " overlap");
    }
  }
  std::vector<size_t> order(slots_.size());
  std::iota(order.begin(), order.end(), 0);
  const auto key = [&](size_t i) {
    return std::tuple(bucket_of[i], offset_of[i], slots_[i].parameter.numel());
  };
  std::sort(order.begin(), order.end(), [&](size_t a, size_t b) { return key(a) < key(b); });
  for (size_t next = 1; next < order.size(); ++next) {
    const size_t a = order[next - 1], b = order[next];
    TORCH_CHECK_VALUE(
        bucket_of[a] != bucket_of[b] || offset_of[a] + slots_[a].parameter.numel() <= offset_of[b],
        "GradientBuckets: expected memory of its own for each parameter, but '", slots_[a].name, "' and '",
        slots_[b].name, "' overlap in bucket ", bucket_of[a]);
  }
}

std::vector<SharedSums::Place> BucketEngine::checked_places(
    bool tensor_parallel, const std::vector<int64_t>& members, const std::vector<at::Tensor>& doorbells,
    const std::vector<at::Tensor>& words, const std::vector<at::Tensor>& flats, const std::string& across,
    const std::vector<int64_t>& owners, int64_t timeout_ms) const {
  refuse_unarranged();
  TORCH_CHECK_VALUE(!tensor_parallel || tensor_parallel_group_, "GradientBuckets: expected to meet ranks of ",
                    "`group`, for there is no tensor-parallel one");
  check_timeout(timeout_ms);
  std::vector<at::Tensor> own;
  bool any_marked = false;
  for (const Bucket& bucket : buckets_) {
    any_marked |= bucket.marked;
    if (bucket.marked || !tensor_parallel) own.push_back(bucket.flat);
  }
  TORCH_CHECK_VALUE(tensor_parallel || !any_marked || marked_sums_,
                    "GradientBuckets: expected to meet tensor-parallel ranks first, for some are marked");
  const LiveGroup& group = tensor_parallel ? *tensor_parallel_group_ : group_;
  const auto are_ranks = [&](const std::vector<int64_t>& given) {
    return std::is_sorted(given.begin(), given.end(), std::less_equal<>()) && !given.empty() &&
           given.front() >= 0 && given.back() < group.size() &&
           std::find(given.begin(), given.end(), group.rank()) != given.end();
  };
  const size_t machines = across.empty() ? 1 : owners.size();
  TORCH_CHECK_VALUE(are_ranks(members) && members.size() * machines == static_cast<size_t>(group.size()) &&
                        (across.empty() ? owners.empty() : are_ranks(owners) && !tensor_parallel),
                    "GradientBuckets: expected the ranks of this machine, and one of each machine, of ",
                    group.size(), " in their order, got ", c10::IntArrayRef(members), " and ",
                    c10::IntArrayRef(owners));
  TORCH_CHECK_VALUE(across.empty() || LiveGroup(across).size() == static_cast<int>(machines),
                    "GradientBuckets: expected a group of ", machines, " ranks, one of each machine");
  const size_t ranks = members.size();
  TORCH_CHECK_VALUE(doorbells.size() == ranks && words.size() == ranks && flats.size() == ranks * own.size(),
                    "GradientBuckets: expected memory of each of ", ranks, " ranks, got ", doorbells.size(),
                    " doorbells, ", words.size(), " words and ", flats.size(), " buckets for ", own.size());
  const auto are_words = [](const at::Tensor& given, int64_t count) {
    return given.defined() && given.is_cpu() && given.layout() == at::kStrided && given.is_contiguous() &&
           given.scalar_type() == at::kLong && given.numel() == count && given.has_storage();
  };
  std::vector<SharedSums::Place> places;
  for (const auto rank : c10::irange(ranks)) {
    TORCH_CHECK_VALUE(are_words(doorbells[rank], Doorbell::WORDS) &&
                          are_words(words[rank], SharedSums::WORDS * static_cast<int64_t>(own.size())),
                      "GradientBuckets: expected ", Doorbell::WORDS, " words as a doorbell and ",
                      SharedSums::WORDS, " for each of ", own.size(), " buckets, of int64 on the CPU");
    places.push_back({doorbells[rank], words[rank], {}});
    for (const auto bucket : c10::irange(own.size())) {
      const at::Tensor& flat = flats[rank * own.size() + bucket];
      TORCH_CHECK_VALUE(is_flat(flat) && flat.is_cpu() && flat.sizes() == own[bucket].sizes() &&
                            flat.scalar_type() == own[bucket].scalar_type(),
                        "GradientBuckets: expected flat tensors on the CPU like this rank's buckets");
      places.back().flats.push_back(flat);
    }
  }
  const auto own_place = std::find(members.begin(), members.end(), group.rank()) - members.begin();
  for (const auto bucket : c10::irange(own.size())) {
    TORCH_CHECK_VALUE(places[own_place].flats[bucket].data_ptr() == own[bucket].data_ptr(),
                      "GradientBuckets: expected this rank's own buckets at its place");
  }
  return places;
}

void BucketEngine::refuse_detached() const {
  TORCH_CHECK(!detached_, "GradientBuckets: expected a call before detach(); make new ones");
}

void BucketEngine::refuse_unarranged() const {
  TORCH_CHECK(!buckets_.empty(), "GradientBuckets: expected arrange() before the first gradient or finish()");
}

void BucketEngine::refuse_unfinishable() const {
  refuse_detached();
  refuse_unarranged();
  refuse_lost();
  refuse_failed();
  group_.get();
  for (const Slot& slot : slots_) refuse_converted(slot);
}

// Sums of some buckets and not of others must not pass for the result.
void BucketEngine::refuse_failed() const {
  TORCH_CHECK(!failed_, "GradientBuckets: this step has failed, and part of it is not reduced; call zero()");
}

// Gradients of this round lie in the buckets as they are, or are on their way.
void BucketEngine::refuse_midway() const {
  TORCH_CHECK(finished_ || !has_begun(),
              "GradientBuckets: expected buckets and counts to change between steps, got a change within "
              "one; call finish() or zero() first");
}

}  // namespace tpkernels
