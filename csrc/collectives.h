// The collectives that buckets need, and the groups that they run in.
#pragma once

#include <ATen/core/Tensor.h>
#include <sys/types.h>

#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace tpkernels {

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;
using InFlight = c10::intrusive_ptr<c10d::Work>;
using Reduction = c10d::ReduceOp::RedOpType;

// A process group by name, checked before each use: torch lets a destroyed group go on silently, and a
// collective in a forked process hangs.
class LiveGroup {
 public:
  explicit LiveGroup(std::string name);

  // Throws if the group was destroyed, or if this process was forked from the one that made it.
  Group get() const;
  // Whether this process made it: only there have collectives threads that end them.
  bool is_of_this_process() const;
  const std::string& name() const { return name_; }
  int size() const { return size_; }
  int rank() const { return rank_; }

 private:
  std::string name_;
  // Weak, because the last owner ends the backend's threads. Those may wait for Python's lock, which Python's
  // own reference lets go of in the meantime, and ours would not.
  c10::weak_intrusive_ptr<c10d::ProcessGroup> group_;
  int size_;
  int rank_;
  pid_t process_;
};

// `timeout_ms` below zero: the time-out of the group.
InFlight start_all_reduce(const Group& group, const at::Tensor& data, Reduction reduction,
                          int64_t timeout_ms);
InFlight start_reduce_scatter(const Group& group, at::Tensor shard, at::Tensor data, Reduction reduction,
                              int64_t timeout_ms);

// Ends the backends of a destroyed group, whoever still holds it, and with them their threads. Waits for
// these as long as that, at most a day; false if they are busy beyond it. Asked again meanwhile, waits on.
bool end_backends(const Group& group, double seconds);

}  // namespace tpkernels
