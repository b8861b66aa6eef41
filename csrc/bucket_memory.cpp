// How ranks of one machine add up buckets in the memory that they share, and wait for each other.
#include <algorithm>
#include <iterator>

#include "bucket_engine.h"

namespace tpkernels {
namespace {

constexpr std::chrono::milliseconds A_FAREWELL{2000};
constexpr int64_t LOOK_AT_WIRE = 200'000;  // nanoseconds: what comes from other machines rings no bell

}  // namespace

void BucketEngine::meet(bool tensor_parallel, const std::vector<int64_t>& members,
                        const std::vector<at::Tensor>& doorbells, const std::vector<at::Tensor>& words,
                        const std::vector<at::Tensor>& flats, std::string across, std::vector<int64_t> owners,
                        int64_t timeout_ms) {
  const Turn turn(order_);
  refuse_detached();
  refuse_midway();
  auto places = checked_places(tensor_parallel, members, doorbells, words, flats, across, owners, timeout_ms);
  const LiveGroup& group = tensor_parallel ? *tensor_parallel_group_ : group_;
  const auto own = std::find(members.begin(), members.end(), group.rank()) - members.begin();
  SumOptions options{
      .scatter = options_.reduce_scatter && !tensor_parallel,
      .divisor = options_.average && !tensor_parallel ? group.size() : 1,
      .in_double = options_.wire_dtype == at::kDouble,
      .ranks = group.size(),
      .rank = group.rank(),
      .across = std::move(across),
      .owners = std::move(owners),
      .wire_dtype = options_.wire_dtype,
      .timeout_ms = timeout_ms,
  };
  next_ = published_ = 0;  // of the last round
  (tensor_parallel ? marked_sums_ : sums_).emplace(std::move(places), own, std::move(options));
  (tensor_parallel ? marked_members_ : members_) = members;
  doorbell_.emplace(doorbells[own].mutable_data_ptr<int64_t>());
  longest_wait_ = std::chrono::milliseconds(timeout_ms);
}

// What can go on without waiting. Buckets are published in their order, marked ones once they hold the sum of
// the tensor-parallel ranks.
void BucketEngine::advance() {
  if (!sums_ || lost_others_ || !failure_.empty() || !group_.is_of_this_process()) return;
  if (marked_sums_) marked_sums_->advance();
  for (; published_ < next_; ++published_) {
    const Bucket& bucket = buckets_[published_];
    if (bucket.marked && !marked_sums_->is_done(bucket.number)) break;
    sums_->publish(published_);
  }
  try {
    sums_->advance();
  } catch (const std::exception& error) {  // of a wire to other machines; told to who waits, not to a hook
    failure_ = failure_of(awaited_now(), reason(error));
  }
}

// A rank adds up in the order of buckets, so the last tells of all.
bool BucketEngine::is_settled() const {
  return !sums_ || (published_ == next_ && (next_ == 0 || sums_->is_done(next_ - 1)));
}

bool BucketEngine::settled_within(std::chrono::nanoseconds time) {
  const auto end = std::chrono::steady_clock::now() + time;
  while (true) {
    const uint32_t seen = doorbell_ ? doorbell_->times_rung() : 0;
    advance();
    if (is_settled()) return true;
    if (!group_.is_of_this_process()) group_.get();  // an error: a fork adds up nothing
    TORCH_CHECK(failure_.empty(), failure_);
    const auto left = std::chrono::nanoseconds(end - std::chrono::steady_clock::now()).count();
    if (left <= 0) return false;
    doorbell_->sleep(seen, sums_->has_sent() ? std::min<int64_t>(left, LOOK_AT_WIRE) : left);
  }
}

bool BucketEngine::settle(double seconds) {
  const Turn turn(order_);
  refuse_lost();
  TORCH_CHECK_VALUE(seconds >= 0 && seconds <= 3600, "GradientBuckets: expected 0 to 3600 seconds, got ",
                    seconds);
  return settled_within(std::chrono::nanoseconds(static_cast<int64_t>(seconds * 1e9)));
}

void BucketEngine::await_others() {
  refuse_lost();
  if (settled_within(longest_wait_)) return;
  lost_others_ = true;
  const Awaited awaited = awaited_now();
  std::ostringstream cause;
  cause << "ranks " << std::get<2>(awaited) << " of it are late";
  TORCH_CHECK(false, failure_of(awaited, cause.str()));
}

Awaited BucketEngine::awaited() const {
  const Turn turn(order_);
  return awaited_now();
}

Awaited BucketEngine::awaited_now() const {
  if (is_settled()) return {"", false, {}, {}};
  // a marked one is not published before its first sum; an unmarked one only if others are lost
  const bool tensor_parallel = published_ < next_ && buckets_[published_].marked;
  size_t first = tensor_parallel ? published_ : 0;
  // not beyond the last, which others may have added up since we looked
  while (!tensor_parallel && first + 1 < next_ && sums_->is_done(first)) ++first;
  const SharedSums& sums = tensor_parallel ? *marked_sums_ : *sums_;
  std::vector<int64_t> late = sums.late_with(tensor_parallel ? buckets_[first].number : first), left;
  std::copy_if(late.begin(), late.end(), std::back_inserter(left),
               [&](int64_t member) { return sums.has_left(member); });
  const auto& members = tensor_parallel ? marked_members_ : members_;
  for (auto* list : {&late, &left}) {
    for (int64_t& rank : *list) rank = members[rank];
  }
  if (!tensor_parallel && sums_->has_sent()) late = sums_->other_owners();
  const bool scatters = options_.reduce_scatter && !tensor_parallel;
  return {(scatters ? "reduce_scatter of " : "all_reduce of ") + describe(buckets_[first]), tensor_parallel,
          std::move(late), std::move(left)};
}

std::string BucketEngine::failure_of(const Awaited& awaited, const std::string& cause) const {
  return failure_text(std::get<0>(awaited), std::get<1>(awaited) ? *tensor_parallel_group_ : group_, cause);
}

// Their memory stays, for they may still write into ours.
void BucketEngine::lose_others() {
  const Turn turn(order_);
  lost_others_ = true;
}

// Other ranks may be adding to our buckets, which are freed or changed after this.
void BucketEngine::leave() noexcept {
  if (!sums_ || !group_.is_of_this_process()) return;
  try {
    // Python waits for as long as it takes; at its end nobody does, and other ranks may be gone
    const auto end =
        std::chrono::steady_clock::now() + std::min<std::chrono::milliseconds>(longest_wait_, A_FAREWELL);
    while (!lost_others_ && !settled_within(std::chrono::milliseconds(50))) {
      if (!std::get<3>(awaited_now()).empty() || std::chrono::steady_clock::now() > end) break;
    }
  } catch (const std::exception&) {  // nobody is left to be told
  }
  if (marked_sums_) marked_sums_->leave();
  sums_->leave();
  lost_others_ = true;
}

void BucketEngine::refuse_lost() const {
  TORCH_CHECK(!lost_others_, "GradientBuckets: ranks of process group '", group_.name(),
              "' have failed; make a new group and new GradientBuckets, on all ranks");
}

}  // namespace tpkernels
