#include "bucket_engine.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/scalar_tensor.h>
#include <torch/csrc/autograd/utils/lambda_post_hook.h>

#include <algorithm>
#include <limits>

#include "gradient_views.h"

namespace tpkernels {
namespace {

// Nodes of autograd are held by one or the other, as torch's version has it.
template <typename Node>
std::weak_ptr<Node> weak(const std::shared_ptr<Node>& node) {
  return node;
}
template <typename Node>
c10::weak_intrusive_ptr<Node> weak(const c10::intrusive_ptr<Node>& node) {
  return c10::weak_intrusive_ptr<Node>(node);
}

}  // namespace

BucketEngine::BucketEngine(const std::vector<at::Tensor>& parameters, EngineOptions options)
    : options_(checked(std::move(options), parameters)),
      group_(options_.group),
      tensor_parallel_group_(options_.tensor_parallel_group.empty()
                                 ? std::nullopt
                                 : std::make_optional<LiveGroup>(options_.tensor_parallel_group)),
      side_(parameters[0].device()),
      in_backend_(group_.get()->getBackend(parameters[0].device().type())->getBackendName() == "nccl"),
      divides_(options_.average && group_.size() > 1 && !in_backend_),
      divisor_(at::scalar_tensor(group_.size())),
      reduction_(options_.average && !divides_ ? Reduction::AVG : Reduction::SUM) {
  for (size_t i = 0; i < parameters.size(); ++i) {
    slots_.push_back({parameters[i], options_.names[i], options_.marked[i],
                      torch::autograd::impl::grad_accumulator(parameters[i]), parameters[i].scalar_type()});
    TORCH_CHECK(slots_[i].accumulator, "GradientBuckets: '", slots_[i].name, "' receives no gradient");
  }
}

// A hook stays with autograd's node, which others may hold longer than us, or run right now in another
// thread: taking it away would pull it from under them. So hooks do not own the engine, and let it rest once
// it is detached or gone.
c10::intrusive_ptr<BucketEngine> BucketEngine::make(const std::vector<at::Tensor>& parameters,
                                                    EngineOptions options) {
  auto engine = c10::make_intrusive<BucketEngine>(parameters, std::move(options));
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
// have the turn any more, but taking it shows the thread sanitizer that they had it before. What a backend
// sends it keeps alive, and we do not wait for it: our owner may have Python's lock in its hand, which the
// backend's thread needs to let go of a tensor that it sent before.
void BucketEngine::release_resources() {
  const Turn turn(order_);
  leave();
  reserved_.reset();
  slots_.clear();  // and with them the hooks, where nobody else holds their nodes
  buckets_.clear();
}

void BucketEngine::detach() {
  const Turn turn(order_);
  detached_ = true;
  abandon();
  leave();
  if (!is_settled()) keep_gradients();
}

// Ranks that we do not wait for may yet read the buckets, and write into them: what stays is a copy.
void BucketEngine::keep_gradients() {
  const at::NoGradGuard no_grad;
  for (const Slot& slot : slots_) {
    at::Tensor& grad = slot.parameter.mutable_grad();
    if (grad.defined() && slot.view.defined() && is_in_place(grad, slot.view)) grad = grad.detach().clone();
  }
}

void BucketEngine::arrange(const std::vector<int64_t>& bucket_of, const std::vector<int64_t>& offset_of,
                           const std::vector<at::Tensor>& flats) {
  const Turn turn(order_);
  const at::NoGradGuard no_grad;
  refuse_detached();
  refuse_midway();
  for (const Slot& slot : slots_) refuse_converted(slot);
  check_arrangement(bucket_of, offset_of, flats);
  await_others();
  std::vector<Bucket> buckets(flats.size());
  std::vector<at::Tensor> views;
  for (size_t i = 0; i < slots_.size(); ++i) {  // nothing is changed until all of this has succeeded
    const Slot& slot = slots_[i];
    Bucket& bucket = buckets[bucket_of[i]];
    if (bucket.members.empty()) {
      bucket.marked = slot.marked;
      bucket.flat = flats[bucket_of[i]];
    }
    bucket.members.push_back(i);
    views.push_back(view_like(slot.parameter, bucket.flat, offset_of[i]));
    if (slot.view.defined()) views.back().copy_(slot.view);
  }
  size_t numbers[2] = {0, 0};
  for (Bucket& bucket : buckets) {
    bucket.pending = bucket.members.size();
    bucket.number = numbers[bucket.marked]++;
  }
  sums_.reset();
  marked_sums_.reset();
  doorbell_.reset();
  next_ = published_ = 0;         // of buckets that are no more
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
  TORCH_CHECK_VALUE(arrivals.size() == slots_.size(), "GradientBuckets: expected a count for each of ",
                    slots_.size(), " parameters, got ", arrivals.size());
  for (size_t i = 0; i < slots_.size(); ++i) {
    TORCH_CHECK_VALUE(arrivals[i] > 0, "GradientBuckets: '", slots_[i].name,
                      "': expected at least one gradient in a step, got ", arrivals[i]);
  }
  for (size_t i = 0; i < slots_.size(); ++i) slots_[i].expected = arrivals[i];
  learning_ = false;
}

void BucketEngine::on_gradient(size_t index) {
  const Turn turn(order_);
  const at::AutoDispatchBelowADInplaceOrView no_autograd;  // whose layers take as long as a small copy
  if (detached_) return;
  refuse_unarranged();
  refuse_lost();
  refuse_failed();
  if (finished_) {
    await_others();
    begin_round();
  }
  Slot& slot = slots_[index];
  TORCH_CHECK(
      learning_ || (slot.bucket >= next_ && slot.arrived < slot.expected), "GradientBuckets: '", slot.name,
      "' received gradient ", slot.arrived + 1, " of this step, but ", slot.expected,
      " had been expected, as in the first step, and may be on its way; run all backwards but the last "
      "under no_sync(), then finish()");
  take_in(slot);
  slot.touched = true;
  slot.version = version_of(slot);
  Bucket& bucket = buckets_[slot.bucket];
  side_.note_current(bucket.streams);
  advance();
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

// A parameter that is converted gets another node of autograd, and keeps that when it is converted back.
bool BucketEngine::has_hook(const Slot& slot) {
  return torch::autograd::impl::try_get_grad_accumulator(slot.parameter) == slot.accumulator;
}

void BucketEngine::restore_hook(const Slot& slot) {
  if (!has_hook(slot) && slot.parameter.scalar_type() == slot.dtype && slot.view.defined() &&
      slot.parameter.device() == slot.view.device()) {
    torch::autograd::impl::set_grad_accumulator(slot.parameter, weak(slot.accumulator));
  }
}

// `finish` after another: a round without gradients if those of the last are gone, or one whose gradients no
// hook saw.
void BucketEngine::begin_without_hooks() {
  if (!finished_ || options_.main_grad) return;
  bool is_new = false;
  for (const Slot& slot : slots_) {
    const at::Tensor& grad = slot.parameter.grad();
    const bool unseen = grad.defined() && !has_hook(slot) && !is_in_place(grad, slot.view);
    if (unseen) refuse_reduced(slot);  // it may be a sum that was converted
    is_new |= unseen || !grad.defined();
  }
  if (is_new) begin_round();
}

void BucketEngine::begin_round() {
  for (Slot& slot : slots_) {
    restore_hook(slot);
    slot.touched = slot.scaled = false;
    slot.arrived = slot.last_arrival = 0;
  }
  for (Bucket& bucket : buckets_) {
    bucket.pending = bucket.members.size();
    bucket.streams.clear();
  }
  next_ = published_ = 0;
  clock_ = launched_in_backward_ = 0;
  finished_ = refused_ = failed_ = false;
}

bool BucketEngine::zero() {
  const Turn turn(order_);
  const at::NoGradGuard no_grad;
  refuse_detached();
  group_.get();
  end_round();
  await_others();
  const bool interrupted = std::exchange(interrupted_, false);
  for (Slot& slot : slots_) {
    slot.reduced = false;
    slot.parameter.mutable_grad().reset();  // with main_grad it is what a backward that failed has left
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
        for (const size_t i : buckets_[b].members) {  // not what lies between them, which nobody clears
          slots_[i].view.fill_(std::numeric_limits<double>::quiet_NaN());
        }
      }
      for (; next_ < buckets_.size(); ++next_) start(buckets_[next_]);
      advance();
      if (!sums_) complete();
    }
  } catch (...) {
    abandon();
    throw;
  }
}

bool BucketEngine::end_round() {
  if (!finished_ && (failed_ || has_begun())) {
    interrupted_ = true;
    if (refused_) {
      abandon();  // as all ranks do
    } else {
      give_up();
    }
    finished_ = true;
  }
  return interrupted_;
}

bool BucketEngine::interrupt() {
  const Turn turn(order_);
  const at::NoGradGuard no_grad;
  refuse_detached();
  group_.get();
  return end_round();
}

bool BucketEngine::launch_rest() {
  const Turn turn(order_);
  const at::NoGradGuard no_grad;
  refuse_unfinishable();
  begin_without_hooks();
  if (finished_) return false;
  launch_those_left();
  return true;
}

void BucketEngine::launch_those_left() {
  try {
    for (const Slot& slot : slots_) refuse_changed(slot);
    while (next_ < buckets_.size()) launch(next_);
  } catch (...) {
    failed_ = true;
    if (refused_) abandon();  // else `zero` gives the rest up: other ranks may wait for it
    throw;
  }
}

std::vector<int64_t> BucketEngine::finish() {
  const Turn turn(order_);
  const at::NoGradGuard no_grad;
  refuse_unfinishable();
  begin_without_hooks();
  if (!finished_) {
    launch_those_left();
    try {
      complete();
    } catch (...) {
      abandon();
      failed_ = true;
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

bool BucketEngine::is_midway() const {
  const Turn turn(order_);
  return !finished_ && has_begun();
}

void BucketEngine::set_synchronizing(bool synchronizing) {
  const Turn turn(order_);
  refuse_detached();
  synchronizing_ = synchronizing;
}

}  // namespace tpkernels
