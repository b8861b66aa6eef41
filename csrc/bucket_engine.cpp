#include "bucket_engine.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/div.h>
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

BucketEngine::BucketEngine(std::vector<at::Tensor> parameters, std::vector<std::string> names,
                           std::vector<bool> marked, EngineOptions options)
    : options_(std::move(options)),
      group_(options_.group),
      tensor_parallel_group_(options_.tensor_parallel_group.empty()
                                 ? std::nullopt
                                 : std::make_optional<LiveGroup>(options_.tensor_parallel_group)),
      side_(parameters.at(0).device()),
      in_backend_(group_.averages(parameters[0].device().type())),
      divides_(options_.average && group_.size() > 1 && !in_backend_),
      divisor_(at::scalar_tensor(group_.size())),
      reduction_(options_.average && !divides_ ? Reduction::AVG : Reduction::SUM) {
  TORCH_INTERNAL_ASSERT(parameters.size() == names.size() && parameters.size() == marked.size());
  for (size_t i = 0; i < parameters.size(); ++i) {
    slots_.push_back(
        {parameters[i], names[i], marked[i], torch::autograd::impl::grad_accumulator(parameters[i])});
    slots_[i].dtype = parameters[i].scalar_type();
    slots_[i].hook =
        slots_[i].accumulator->add_post_hook(std::make_unique<torch::autograd::utils::LambdaPostHook>(
            [this, i](const torch::autograd::variable_list& outputs, const torch::autograd::variable_list&) {
              on_gradient(i);
              return outputs;
            }));
  }
}

BucketEngine::~BucketEngine() { detach(); }

void BucketEngine::detach() {
  const std::lock_guard lock(mutex_);
  for (Slot& slot : slots_) {
    if (slot.hook != 0) slot.accumulator->del_post_hook(slot.hook);
    slot.hook = 0;
  }
  abandon();
}

void BucketEngine::arrange(const std::vector<int64_t>& bucket_of, const std::vector<int64_t>& offset_of,
                           const std::vector<int64_t>& elements) {
  const std::lock_guard lock(mutex_);
  const at::NoGradGuard no_grad;
  buckets_.clear();  // memory of old buckets is held by their views, and goes with the last of them
  buckets_.resize(elements.size());
  for (size_t i = 0; i < slots_.size(); ++i) buckets_[bucket_of[i]].members.push_back(i);
  for (size_t b = 0; b < buckets_.size(); ++b) {
    Bucket& bucket = buckets_[b];
    const Slot& first = slots_[bucket.members.front()];
    bucket.marked = first.marked;
    bucket.flat = at::zeros({elements[b]}, first.parameter.options().requires_grad(false).dtype(
                                               options_.grad_dtype.value_or(first.parameter.scalar_type())));
    for (const size_t i : bucket.members) {
      Slot& slot = slots_[i];
      const at::Tensor view = view_like(slot.parameter, bucket.flat, offset_of[i]);
      at::Tensor& grad = slot.parameter.mutable_grad();
      const bool is_ours = slot.view.defined() && grad.defined() && is_in_place(grad, slot.view);
      if (slot.view.defined()) view.copy_(slot.view);
      if (is_ours) grad = alias_of(view);
      slot.view = view;
      slot.bucket = b;
    }
  }
}

void BucketEngine::expect(const std::vector<int64_t>& arrivals) {
  const std::lock_guard lock(mutex_);
  for (size_t i = 0; i < slots_.size(); ++i) slots_[i].expected = arrivals[i];
  learning_ = false;
}

void BucketEngine::on_gradient(size_t index) {
  const std::lock_guard lock(mutex_);
  const at::NoGradGuard no_grad;
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

// A gradient of a backward into its place in the bucket.
void BucketEngine::take_in(Slot& slot) {
  at::Tensor& grad = slot.parameter.mutable_grad();
  if (!grad.defined()) return;  // nothing came, or a fused kernel has added it to the bucket already
  TORCH_CHECK_TYPE(grad.layout() == at::kStrided, "GradientBuckets: the gradient of '", slot.name,
                   "' is sparse; expected a dense one: make its embedding with sparse=False");
  TORCH_CHECK(
      !grad.requires_grad(), "GradientBuckets: the gradient of '", slot.name,
      "' has a graph of its own; backward(create_graph=True) is not supported, use torch.autograd.grad");
  if (options_.main_grad) {
    refuse_reduced(slot);
    slot.view.add_(grad);
    grad.reset();
  } else if (is_in_place(grad, slot.view)) {
    refuse_reduced(slot);
  } else {
    // The first gradient after `zero` is written, not added: that reads and writes half as much, and can
    // divide on the way.
    slot.scaled = divides_ && synchronizing_ && slot.expected == 1;
    if (slot.scaled) {
      at::div_out(slot.view, grad, divisor_);
    } else {
      slot.view.copy_(grad);
    }
    grad = alias_of(slot.view);
    slot.reduced = false;
  }
}

// What lies in `grad` when the bucket is sent, where no hook took it in during this round.
void BucketEngine::take_leftover(Slot& slot) {
  if (options_.main_grad) return;
  at::Tensor& grad = slot.parameter.mutable_grad();
  if (grad.defined() && is_in_place(grad, slot.view)) {
    if (!slot.touched) refuse_reduced(slot);
    return;
  }
  if (grad.defined()) {
    slot.view.copy_(grad);
  } else {
    slot.view.zero_();
  }
  grad = alias_of(slot.view);
}

void BucketEngine::refuse_converted(const Slot& slot) const {
  TORCH_CHECK(slot.parameter.scalar_type() == slot.dtype && slot.parameter.device() == slot.view.device(),
              "GradientBuckets: '", slot.name, "' was converted or moved, which takes its hook away; make ",
              "GradientBuckets after that");
}

void BucketEngine::refuse_late(const Slot& slot) const {
  if (learning_) return;
  TORCH_CHECK(
      slot.bucket >= next_ && slot.arrived < slot.expected, "GradientBuckets: '", slot.name,
      "' received gradient ", slot.arrived + 1, " of this step, but ", slot.expected,
      " had been expected, as in the first step, and may be on its way; run all backwards but the last "
      "under no_sync(), then finish()");
}

void BucketEngine::refuse_reduced(const Slot& slot) const {
  TORCH_CHECK(!slot.reduced || keeps_average(), "GradientBuckets: the gradient of '", slot.name,
              "' is reduced already, and more cannot be added to it; call zero() first");
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
  finished_ = false;
}

void BucketEngine::zero() {
  const std::lock_guard lock(mutex_);
  const at::NoGradGuard no_grad;
  group_.get();
  const bool interrupted = !finished_ && std::any_of(slots_.begin(), slots_.end(),
                                                     [](const Slot& slot) { return slot.arrived > 0; });
  if (interrupted) {
    // This rank gave up in the middle (an exception in backward, say). Ranks that did not wait for its
    // buckets: they get them, but as NaN, so that nobody takes a part of the sum for the whole.
    for (size_t b = next_; b < buckets_.size(); ++b) {
      buckets_[b].flat.fill_(std::numeric_limits<double>::quiet_NaN());
    }
    try {
      for (; next_ < buckets_.size(); ++next_) start(buckets_[next_]);
      complete();
    } catch (...) {
      abandon();
      throw;
    }
  }
  for (Slot& slot : slots_) {
    slot.reduced = false;
    if (!options_.main_grad) slot.parameter.mutable_grad().reset();
  }
  if (options_.main_grad || interrupted) {
    for (Bucket& bucket : buckets_) bucket.flat.zero_();
  }
  begin_round();
}

std::vector<int64_t> BucketEngine::finish() {
  const std::lock_guard lock(mutex_);
  const at::NoGradGuard no_grad;
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
  const std::lock_guard lock(mutex_);
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

// Marked buckets go through the tensor-parallel group first; `complete` sends them on.
void BucketEngine::start(Bucket& bucket) {
  side_.note_current(bucket.streams);
  side_.wait_for(bucket.streams);
  c10::OptionalStreamGuard on_side;
  side_.enter(on_side);
  bucket.wire = bucket.flat.to(wire_dtype(bucket.flat.scalar_type()));
  if (bucket.marked) {
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

// Waits for all buckets: the host on a CPU, the current stream elsewhere.
void BucketEngine::complete() {
  c10::OptionalStreamGuard on_side;
  side_.enter(on_side);
  for (Bucket& bucket : buckets_) {
    if (!bucket.marked) continue;
    await(bucket, *tensor_parallel_group_, "all_reduce");
    reduce(bucket);
  }
  for (Bucket& bucket : buckets_) {
    await(bucket, group_, options_.reduce_scatter ? "reduce_scatter" : "all_reduce");
    if (!bucket.wire.is_same(bucket.flat)) bucket.flat.copy_(bucket.wire);
    bucket.wire.reset();
  }
  on_side.reset();
  side_.let_current_wait();
}

void BucketEngine::await(Bucket& bucket, const LiveGroup& group, const char* operation) {
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
      if (bucket.work) std::exchange(bucket.work, {})->wait();
    } catch (const std::exception&) {  // one failure has been reported; others follow from it
    }
    bucket.wire.reset();
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

// All ranks learn of a NaN on any of them, so that all refuse to send the bucket.
void BucketEngine::refuse_nan(const Bucket& bucket) {
  int64_t found = 0;  // rank and parameter, both from 1
  if (at::isnan(bucket.flat).any().item<bool>()) {
    for (const size_t i : bucket.members) {
      if (at::isnan(slots_[i].view).any().item<bool>()) found = ((options_.rank + 1) << 32) | (i + 1);
    }
  }
  const at::Tensor anywhere = at::full({1}, found, bucket.flat.options().dtype(at::kLong));
  if (bucket.marked) {
    start_all_reduce(tensor_parallel_group_->get(), anywhere, Reduction::MAX, options_.timeout_ms)->wait();
  }
  start_all_reduce(group_.get(), anywhere, Reduction::MAX, options_.timeout_ms)->wait();
  found = anywhere.item<int64_t>();
  TORCH_CHECK(found == 0, "GradientBuckets: on rank ", (found >> 32) - 1, " the gradient of '",
              slots_[(found & 0xffffffff) - 1].name, "' holds NaN; ", describe(bucket), " was not sent");
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
  std::vector<at::Tensor> flats;
  for (const Bucket& bucket : buckets_) flats.push_back(bucket.flat);
  return flats;
}

std::vector<at::Tensor> BucketEngine::views() const {
  std::vector<at::Tensor> views;
  for (const Slot& slot : slots_) views.push_back(slot.view);
  return views;
}

std::vector<int64_t> BucketEngine::arrivals() const {
  std::vector<int64_t> counts;
  for (const Slot& slot : slots_) counts.push_back(slot.arrived);
  return counts;
}

std::vector<int64_t> BucketEngine::last_arrivals() const {
  std::vector<int64_t> times;
  for (const Slot& slot : slots_) times.push_back(slot.last_arrival);
  return times;
}

}  // namespace tpkernels
