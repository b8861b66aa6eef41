// How a bucket is sent, waited for, and refused.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/full.h>
#include <ATen/ops/isnan.h>
#include <ATen/record_function.h>

#include <algorithm>

#include "bucket_engine.h"

namespace tpkernels {

std::string reason(const std::exception& error) {
  const auto* from_torch = dynamic_cast<const c10::Error*>(&error);  // whose what() has a C++ backtrace
  std::string text = from_torch ? from_torch->what_without_backtrace() : error.what();
  const size_t place = text.find("] ");  // gloo's begins with its file and line
  if (text.rfind("[/", 0) == 0 && place != std::string::npos) text.erase(0, place + 2);
  return text;
}

// Sends the next bucket.
void BucketEngine::launch(size_t index) {
  Bucket& bucket = buckets_[index];
  RECORD_USER_SCOPE("tpkernels: " + describe(bucket));
  group_.get();
  for (const size_t i : bucket.members) take_leftover(slots_[i]);
  if (options_.check_nan) refuse_nan(bucket);
  scale(bucket);
  start(bucket);
  ++next_;
  advance();
}

// Marked buckets go through the tensor-parallel group first; `send_on` sends them on.
void BucketEngine::start(Bucket& bucket) {
  if (sums_) {  // unmarked ones wait for their turn
    if (bucket.marked) marked_sums_->publish(bucket.number);
    return;
  }
  side_.note_current(bucket.streams);
  side_.wait_for(bucket.streams);
  c10::OptionalStreamGuard on_side;
  side_.enter(on_side);
  send_on();
  if (!reserved_) reserved_.emplace(options_.reservation);
  bucket.wire = bucket.flat.to(wire_dtype(bucket.flat.scalar_type()));
  bucket.half_way = bucket.marked;
  if (bucket.half_way) {
    bucket.work =
        start_all_reduce(tensor_parallel_group_->get(), bucket.wire, Reduction::SUM, options_.timeout_ms);
  } else {
    reduce(bucket);
  }
}

// gloo adds in the dtype that it is given, and 256 + 1 is 256 in bfloat16.
at::ScalarType BucketEngine::wire_dtype(at::ScalarType own) const {
  const bool is_half = own == at::kBFloat16 || own == at::kHalf;
  return options_.wire_dtype.value_or(is_half && !in_backend_ ? at::kFloat : own);
}

void BucketEngine::reduce(Bucket& bucket) {
  if (options_.reduce_scatter) {
    const int64_t elements = bucket.wire.numel() / group_.size();
    const at::Tensor shard = bucket.wire.narrow(0, group_.rank() * elements, elements);
    bucket.work = start_reduce_scatter(group_.get(), shard, bucket.wire, reduction_, options_.timeout_ms);
  } else {
    bucket.work = start_all_reduce(group_.get(), bucket.wire, reduction_, options_.timeout_ms);
  }
}

// Marked buckets into their second group. At the next launch, not when the first sum happens to be there: so
// the order of collectives is the same on all ranks, and what the host waits for had a bucket's time to come.
void BucketEngine::send_on() {
  for (Bucket& bucket : buckets_) {
    if (!std::exchange(bucket.half_way, false)) continue;
    await(bucket, *tensor_parallel_group_, "all_reduce");
    reduce(bucket);
  }
}

// Waits for all buckets: the host on a CPU, the current stream elsewhere.
void BucketEngine::complete() {
  if (sums_) return await_others();
  c10::OptionalStreamGuard on_side;
  side_.enter(on_side);
  send_on();
  for (Bucket& bucket : buckets_) {
    await(bucket, group_, options_.reduce_scatter ? "reduce_scatter" : "all_reduce");
    if (!bucket.wire.is_same(bucket.flat)) bucket.flat.copy_(bucket.wire);
    bucket.wire.reset();
  }
  on_side.reset();
  side_.let_current_wait();
  reserved_.reset();
}

void BucketEngine::await(Bucket& bucket, const LiveGroup& group, const char* operation) {
  RECORD_USER_SCOPE("tpkernels: wait for " + describe(bucket));
  TORCH_CHECK(bucket.work, "GradientBuckets: ", operation, " of ", describe(bucket), " has failed already");
  try {
    std::exchange(bucket.work, {})->wait();
  } catch (const std::exception& error) {
    TORCH_CHECK(false, failure_text(operation + (" of " + describe(bucket)), group, reason(error)));
  }
}

std::string BucketEngine::failure_text(const std::string& what, const LiveGroup& group,
                                       const std::string& cause) const {
  std::ostringstream text;
  text << "GradientBuckets: " << what << " failed in process group '" << group.name() << "' of "
       << group.size() << " ranks, here on rank " << options_.rank
       << "; a rank died, came too late, or left the common order of calls. Cause: " << cause;
  return text.str();
}

// Nothing stays in flight, for memory that is sent must not be written or freed.
void BucketEngine::abandon() noexcept {
  for (Bucket& bucket : buckets_) {
    try {
      InFlight work = std::exchange(bucket.work, {});
      if (work && group_.is_of_this_process()) work->wait();  // in a fork nothing ends it
    } catch (const std::exception&) {  // one failure has been reported; others follow from it
    }
    bucket.wire.reset();
    bucket.half_way = false;
  }
  reserved_.reset();
  finished_ = true;
}

void BucketEngine::scale(Bucket& bucket) {
  if (!divides()) return;
  const auto is_scaled = [this](size_t i) { return slots_[i].scaled; };
  if (std::none_of(bucket.members.begin(), bucket.members.end(), is_scaled)) {
    bucket.flat.div_(divisor_);
    return;
  }
  for (const size_t i : bucket.members) {
    if (!slots_[i].scaled) slots_[i].view.div_(divisor_);
  }
}

// Zero if a bucket may be sent as far as this rank knows; else rank and parameter, both from 1.
int64_t BucketEngine::objection_to(const Bucket& bucket) const {
  int64_t found = 0;
  if (at::isnan(bucket.flat).any().item<bool>()) {
    for (const size_t i : bucket.members) {
      if (at::isnan(slots_[i].view).any().item<bool>()) found = ((options_.rank + 1) << 32) | (i + 1);
    }
  }
  return found;
}

// All ranks learn of an objection by any of them, so that all refuse to send the bucket.
int64_t BucketEngine::objection_of_any(const Bucket& bucket, int64_t own) {
  const at::Tensor anywhere = at::full({1}, own, bucket.flat.options().dtype(at::kLong));
  if (bucket.marked) {
    start_all_reduce(tensor_parallel_group_->get(), anywhere, Reduction::MAX, options_.timeout_ms)->wait();
  }
  start_all_reduce(group_.get(), anywhere, Reduction::MAX, options_.timeout_ms)->wait();
  return anywhere.item<int64_t>();
}

void BucketEngine::refuse_nan(const Bucket& bucket) {
  TORCH_CHECK(!refused_, "GradientBuckets: this step has been refused; call zero()");
  const int64_t found = objection_of_any(bucket, objection_to(bucket));
  refused_ = found != 0;
  const int64_t rank = (found >> 32) - 1;
  const size_t parameter = found & 0xffffffff;
  TORCH_CHECK(found == 0 || (parameter > 0 && parameter <= slots_.size()), "GradientBuckets: rank ", rank,
              " has given up this step, by an exception in backward, say; ", describe(bucket),
              " was not sent");
  TORCH_CHECK(found == 0, "GradientBuckets: on rank ", rank, " the gradient of '", slots_[parameter - 1].name,
              "' holds NaN; ", describe(bucket), " was not sent");
}

std::string BucketEngine::describe(const Bucket& bucket) const {
  const auto last_arriving = bucket.members.size() - 1;
  std::ostringstream text;
  text << "bucket " << &bucket - buckets_.data() << " of " << buckets_.size() << " ('"
       << slots_[bucket.members[0]].name << "' to '" << slots_[bucket.members[last_arriving]].name << "', "
       << bucket.flat.nbytes() << " bytes)";
  return text.str();
}

}  // namespace tpkernels
