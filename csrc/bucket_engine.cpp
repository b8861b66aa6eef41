#include "bucket_engine.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/full.h>
#include <ATen/ops/isnan.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/zeros.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/utils/lambda_post_hook.h>

#include <algorithm>
#include <limits>
#include <numeric>

#include "gradient_views.h"

namespace tpkernels {
namespace {

std::string reason(const std::exception& error) {
  const auto* from_torch = dynamic_cast<const c10::Error*>(&error);  // whose what() has a C++ backtrace
  return from_torch ? from_torch->what_without_backtrace() : error.what();
}

}  // namespace

BucketEngine::BucketEngine(const std::vector<at::Tensor>& parameters, const std::vector<std::string>& names,
                           const std::vector<bool>& marked, EngineOptions options)
    : options_(checked(std::move(options), parameters, names, marked)),
      group_(options_.group),
      tensor_parallel_group_(options_.tensor_parallel_group.empty()
                                 ? std::nullopt
                                 : std::make_optional<LiveGroup>(options_.tensor_parallel_group)),
      side_(parameters[0].device()),
      in_backend_(group_.averages(parameters[0].device().type())),
      divides_(options_.average && group_.size() > 1 && !in_backend_),
      divisor_(at::scalar_tensor(group_.size())),
      reduction_(options_.average && !divides_ ? Reduction::AVG : Reduction::SUM) {
  for (size_t i = 0; i < parameters.size(); ++i) {
    slots_.push_back(
        {parameters[i], names[i], marked[i], torch::autograd::impl::grad_accumulator(parameters[i])});
    TORCH_CHECK(slots_[i].accumulator, "GradientBuckets: '", names[i], "' receives no gradient");
    slots_[i].dtype = parameters[i].scalar_type();
  }
}

// A hook stays with autograd's node, which others may hold longer than us, or run right now in another
// thread: taking it away would pull it from under them. So hooks do not own the engine, and let it rest once
// it is detached or gone.
c10::intrusive_ptr<BucketEngine> BucketEngine::make(const std::vector<at::Tensor>& parameters,
                                                    const std::vector<std::string>& names,
                                                    const std::vector<bool>& marked, EngineOptions options) {
  auto engine = c10::make_intrusive<BucketEngine>(parameters, names, marked, std::move(options));
  for (size_t i = 0; i < engine->slots_.size(); ++i) {
    engine->slots_[i].accumulator->add_post_hook(std::make_unique<torch::autograd::utils::LambdaPostHook>(
        [weak = c10::weak_intrusive_ptr<BucketEngine>(engine), i](
            const torch::autograd::variable_list& outputs, const torch::autograd::variable_list&) {
          if (const auto alive = weak.lock()) alive->on_gradient(i);
          return outputs;
        }));
  }
  return engine;
}

BucketEngine::~BucketEngine() { release_resources(); }

// When the last owner lets go; the hooks' weak references keep what is left of us beyond that. Nobody can
// have the turn any more, but taking it shows the thread sanitizer that they had it before.
void BucketEngine::release_resources() {
  const Turn turn(order_);
  abandon();
  slots_.clear();  // and with them the hooks, where nobody else holds their nodes
  buckets_.clear();
}

void BucketEngine::detach() {
  const Turn turn(order_);
  detached_ = true;
  abandon();
}

void BucketEngine::arrange(const std::vector<int64_t>& bucket_of, const std::vector<int64_t>& offset_of,
                           const std::vector<int64_t>& elements) {
  const Turn turn(order_);
  const at::NoGradGuard no_grad;
  refuse_detached();
  refuse_midway();
  for (const Slot& slot : slots_) refuse_converted(slot);
  check_arrangement(bucket_of, offset_of, elements);
  std::vector<Bucket> buckets(elements.size());
  std::vector<at::Tensor> views;
  for (size_t i = 0; i < slots_.size(); ++i) {  // nothing is changed until all of this has succeeded
    const Slot& slot = slots_[i];
    Bucket& bucket = buckets[bucket_of[i]];
    if (bucket.members.empty()) {
      bucket.marked = slot.marked;
      bucket.flat = at::zeros({elements[bucket_of[i]]}, slot.parameter.options().requires_grad(false).dtype(
                                                            options_.grad_dtype.value_or(slot.dtype)));
    }
    bucket.members.push_back(i);
    views.push_back(view_like(slot.parameter, bucket.flat, offset_of[i]));
    if (slot.view.defined()) views.back().copy_(slot.view);
  }
  for (Bucket& bucket : buckets) bucket.pending = bucket.members.size();
  buckets_ = std::move(buckets);  // memory of old buckets is held by their views, and goes with the last
  for (size_t i = 0; i < slots_.size(); ++i) {
    Slot& slot = slots_[i];
    at::Tensor& grad = slot.parameter.mutable_grad();
    if (slot.view.defined() && grad.defined() && is_in_place(grad, slot.view)) grad = alias_of(views[i]);
    slot.view = views[i];
    slot.bucket = bucket_of[i];
  }
}

void BucketEngine::expect(const std::vector<int64_t>& arrivals) {
  const Turn turn(order_);
  refuse_detached();
  refuse_midway();
  check_expected(arrivals);
  for (size_t i = 0; i < slots_.size(); ++i) slots_[i].expected = arrivals[i];
  learning_ = false;
}

void BucketEngine::on_gradient(size_t index) {
  const Turn turn(order_);
  const at::NoGradGuard no_grad;
  if (detached_) return;
  refuse_unarranged();
  if (finished_) begin_round();
  Slot& slot = slots_[index];
  refuse_late(slot);
  take_in(slot);
  slot.touched = true;
  Bucket& bucket = buckets_[slot.bucket];
  side_.note_current(bucket.streams);
  if (!synchronizing_) return;
  ++slot.arrived;
  slot.last_arrival = ++clock_;
  if (learning_ || slot.arrived < slot.expected || --bucket.pending > 0) return;
  while (next_ < buckets_.size() && buckets_[next_].pending == 0) {
    launch(next_);
    ++launched_in_backward_;
  }
}

bool BucketEngine::has_begun() const {
  return std::any_of(slots_.begin(), slots_.end(), [](const Slot& slot) { return slot.arrived > 0; });
}

void BucketEngine::begin_round() {
  for (Slot& slot : slots_) {
    slot.touched = slot.scaled = false;
    slot.arrived = slot.last_arrival = 0;
  }
  for (Bucket& bucket : buckets_) {
    bucket.pending = bucket.members.size();
    bucket.streams.clear();
  }
  next_ = 0;
  clock_ = launched_in_backward_ = 0;
  finished_ = refused_ = false;
}

bool BucketEngine::zero() {
  const Turn turn(order_);
  const at::NoGradGuard no_grad;
  refuse_detached();
  group_.get();
  const bool interrupted = !finished_ && has_begun();
  if (interrupted && refused_) abandon();  // as all ranks do
  if (interrupted && !refused_) give_up();
  for (Slot& slot : slots_) {
    slot.reduced = false;
    if (!options_.main_grad) slot.parameter.mutable_grad().reset();
  }
  if (options_.main_grad || interrupted) {
    for (Bucket& bucket : buckets_) bucket.flat.zero_();
  }
  begin_round();
  return interrupted;
}

// This rank stops in the middle (an exception in backward, say). Ranks that did not wait for its buckets:
// they get them, but as NaN, so that nobody takes a part of the sum for the whole, or are told before they
// send.
void BucketEngine::give_up() {
  try {
    if (options_.check_nan && next_ < buckets_.size()) {
      objection_of_any(buckets_[next_], ((options_.rank + 1) << 32) | (slots_.size() + 1));
      abandon();
    } else {
      for (size_t b = next_; b < buckets_.size(); ++b) {
        buckets_[b].flat.fill_(std::numeric_limits<double>::quiet_NaN());
      }
      for (; next_ < buckets_.size(); ++next_) start(buckets_[next_]);
      complete();
    }
  } catch (...) {
    abandon();
    throw;
  }
}

std::vector<int64_t> BucketEngine::finish() {
  const Turn turn(order_);
  const at::NoGradGuard no_grad;
  refuse_detached();
  refuse_unarranged();
  group_.get();
  for (const Slot& slot : slots_) refuse_converted(slot);
  if (!finished_) {
    try {
      while (next_ < buckets_.size()) launch(next_);
      complete();
    } catch (...) {
      abandon();
      throw;
    }
    for (Slot& slot : slots_) slot.reduced = true;
    finished_ = true;
  }
  std::vector<int64_t> unused;
  for (size_t i = 0; i < slots_.size(); ++i) {
    if (!slots_[i].touched) unused.push_back(static_cast<int64_t>(i));
  }
  return unused;
}

void BucketEngine::set_synchronizing(bool synchronizing) {
  const Turn turn(order_);
  refuse_detached();
  synchronizing_ = synchronizing;
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
}

// Marked buckets go through the tensor-parallel group first; `send_on` sends them on.
void BucketEngine::start(Bucket& bucket) {
  side_.note_current(bucket.streams);
  side_.wait_for(bucket.streams);
  c10::OptionalStreamGuard on_side;
  side_.enter(on_side);
  send_on();
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
}

void BucketEngine::await(Bucket& bucket, const LiveGroup& group, const char* operation) {
  TORCH_CHECK(bucket.work, "GradientBuckets: ", operation, " of ", describe(bucket), " has failed already");
  try {
    std::exchange(bucket.work, {})->wait();
  } catch (const std::exception& error) {
    TORCH_CHECK(false, "GradientBuckets: ", operation, " of ", describe(bucket), " failed in process group '",
                group.name(), "' of ", group.size(), " ranks, here on rank ", options_.rank,
                "; a rank died, came too late, or left the common order of calls. Cause: ", reason(error));
  }
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
  finished_ = true;
}

void BucketEngine::scale(Bucket& bucket) {
  if (!divides_) return;
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

std::vector<at::Tensor> BucketEngine::buckets() const {
  const Turn turn(order_);
  std::vector<at::Tensor> flats;
  for (const Bucket& bucket : buckets_) flats.push_back(bucket.flat);
  return flats;
}

std::vector<at::Tensor> BucketEngine::views() const {
  const Turn turn(order_);
  std::vector<at::Tensor> views;
  for (const Slot& slot : slots_) views.push_back(slot.view);
  return views;
}

std::vector<int64_t> BucketEngine::arrivals() const {
  const Turn turn(order_);
  std::vector<int64_t> counts;
  for (const Slot& slot : slots_) counts.push_back(slot.arrived);
  return counts;
}

std::vector<int64_t> BucketEngine::last_arrivals() const {
  const Turn turn(order_);
  std::vector<int64_t> times;
  for (const Slot& slot : slots_) times.push_back(slot.last_arrival);
  return times;
}

int64_t BucketEngine::launched_in_backward() const {
  const Turn turn(order_);
  return launched_in_backward_;
}

}  // namespace tpkernels
