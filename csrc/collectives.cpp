#include "collectives.h"

#include <ATen/ThreadLocalPythonObjects.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <unordered_set>

namespace tpkernels {
namespace {

// Schemas, because the methods of ProcessGroup change names between torch 2.11 and 2.14, and these do not.
template <typename Signature>
auto find_operator(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

// A collective keeps the Python objects of the thread that starts it: in backward, the context variables.
// gloo's thread lets go of them last, which takes Python's lock, and whoever asks for that lock while the
// interpreter ends is ended with it: the process aborts.
class WithoutPythonObjects {
 public:
  WithoutPythonObjects() { at::impl::ThreadLocalPythonObjects::set_state({}); }
  ~WithoutPythonObjects() { at::impl::ThreadLocalPythonObjects::set_state(std::move(objects_)); }
  WithoutPythonObjects(const WithoutPythonObjects&) = delete;
  WithoutPythonObjects& operator=(const WithoutPythonObjects&) = delete;

 private:
  at::impl::ThreadLocalPythonObjects objects_ = at::impl::ThreadLocalPythonObjects::get_state();
};

}  // namespace

LiveGroup::LiveGroup(std::string name)
    : name_(std::move(name)), group_(c10d::resolve_process_group(name_)), process_(getpid()) {
  const Group group = group_.lock();
  TORCH_CHECK(group, "process group '", name_, "' was destroyed; expected one that lives");
  size_ = group->getSize();
  rank_ = group->getRank();
}

bool LiveGroup::is_of_this_process() const { return getpid() == process_; }

Group LiveGroup::get() const {
  TORCH_CHECK(is_of_this_process(), "GradientBuckets made in process ", process_,
              " cannot be used in process ", getpid(),
              ", which was forked from it; make process groups and GradientBuckets after the fork");
  Group registered;
  try {
    registered = c10d::resolve_process_group(name_);
  } catch (const std::exception&) {  // no longer registered: reported below
  }
  TORCH_CHECK(registered && registered == group_.lock(), "process group '", name_,
              "' was destroyed; make a new group and new GradientBuckets");
  return registered;
}

InFlight start_all_reduce(const Group& group, const at::Tensor& data, Reduction reduction,
                          int64_t timeout_ms) {
  static const auto all_reduce = find_operator<std::tuple<std::vector<at::Tensor>, InFlight>(
      at::TensorList, const Group&, const c10::intrusive_ptr<c10d::ReduceOp>&,
      const std::optional<at::Tensor>&, bool, int64_t)>("c10d::allreduce_");
  const std::vector<at::Tensor> tensors{data};
  const WithoutPythonObjects guard;
  return std::get<1>(all_reduce.call(tensors, group, c10::make_intrusive<c10d::ReduceOp>(reduction),
                                     std::nullopt, /*async_op=*/true, timeout_ms));
}

InFlight start_reduce_scatter(const Group& group, at::Tensor shard, at::Tensor data, Reduction reduction,
                              int64_t timeout_ms) {
  static const auto reduce_scatter = find_operator<std::tuple<at::Tensor, InFlight>(
      at::Tensor&, at::Tensor&, const Group&, const c10::intrusive_ptr<c10d::ReduceOp>&, bool, int64_t)>(
      "c10d::_reduce_scatter_base_");
  const WithoutPythonObjects guard;
  return std::get<1>(reduce_scatter.call(shard, data, group, c10::make_intrusive<c10d::ReduceOp>(reduction),
                                         /*async_op=*/true, timeout_ms));
}

namespace {

// Groups whose backends are being ended. Two threads at it would free the same twice.
struct Ending {
  std::mutex mutex;
  std::condition_variable changed;
  std::unordered_set<const c10d::ProcessGroup*> groups;
};

bool is_registered(const Group& group) {
  try {
    return c10d::resolve_process_group(group->getGroupName()) == group;
  } catch (const std::exception&) {
    return false;
  }
}

// In a thread of its own: the backends' destructors wait for what is in flight, up to the group's time-out.
void end_in_background(const Group& group, Ending& ending) {
  std::thread([group, &ending] {
    try {
      group->release_resources();
    } catch (const std::exception&) {  // nobody is left to be told; the group is of no use any more
    }
    const std::lock_guard lock(ending.mutex);
    ending.groups.erase(group.get());
    ending.changed.notify_all();
  }).detach();
}

}  // namespace

bool end_backends(const Group& group, double seconds) {
  constexpr double DAY = 24 * 60 * 60;
  TORCH_CHECK_VALUE(group, "end_backends: expected a process group, got none");
  TORCH_CHECK_VALUE(seconds >= 0 && seconds <= DAY, "end_backends: expected 0 to ", DAY, " seconds, got ",
                    seconds);
  TORCH_CHECK_VALUE(!is_registered(group), "end_backends: expected a destroyed process group, but '",
                    group->getGroupName(), "' is in use; call torch.distributed.destroy_process_group first");
  static Ending& ending = *new Ending;  // never freed: a thread that is busy uses it when the process exits
  std::unique_lock lock(ending.mutex);
  if (ending.groups.insert(group.get()).second) {
    try {
      end_in_background(group, ending);
    } catch (...) {
      ending.groups.erase(group.get());
      throw;
    }
  }
  return ending.changed.wait_for(lock, std::chrono::duration<double>(seconds),
                                 [&] { return !ending.groups.contains(group.get()); });
}

}  // namespace tpkernels
