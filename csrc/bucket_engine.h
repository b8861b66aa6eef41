// Gradients in flat buckets, reduced over ranks while backward goes on.
//
// A round goes from `zero` (or the first gradient after `finish`) to `finish`. In a round each parameter's
// hook takes its gradient into the bucket; the hook that completes a bucket launches the collective; `finish`
// launches the rest and waits. Buckets are launched strictly in their order, so that all ranks agree on it.
//
// Ranks whose buckets lie in memory that all of them see (`meet`) add them up there (shared_sums.h); else a
// bucket is a collective of the group's backend.
//
// Until `expect` says how many gradients each parameter receives, nothing is launched before `finish`:
// a parameter may receive several in one backward (reentrant checkpoints), and only a whole one tells.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/custom_class.h>

#include <chrono>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "collectives.h"
#include "reserved_sms.h"
#include "shared_sums.h"
#include "side_stream.h"
#include "turn.h"

namespace tpkernels {

struct EngineOptions {
  std::vector<std::string> names;  // of the parameters
  std::vector<bool> marked;        // whether a gradient is summed over the tensor-parallel group as well
  std::string group;
  std::string tensor_parallel_group;  // where gradients of marked parameters are summed first; "": nowhere
  int64_t rank;                       // of this process in the world, for messages
  bool reduce_scatter;                // else all-reduce
  bool average;                       // over `group`; else sum
  bool main_grad;                     // gradients are accumulated beside `grad`, which stays undefined
  bool check_nan;
  std::optional<at::ScalarType> grad_dtype;  // of buckets; the parameters' own if absent
  std::optional<at::ScalarType> wire_dtype;  // of what is sent; if absent the buckets' own, or wider
  int64_t timeout_ms;                        // of a collective; below zero: the group's own
  Reservation reservation;                   // while collectives are in flight
};

using Awaited = std::tuple<std::string, bool, std::vector<int64_t>, std::vector<int64_t>>;

// An error's text, without a backtrace.
std::string reason(const std::exception& error);

class BucketEngine : public torch::CustomClassHolder {
 public:
  static c10::intrusive_ptr<BucketEngine> make(const std::vector<at::Tensor>& parameters,
                                               EngineOptions options);
  // Without hooks: `make` adds them.
  BucketEngine(const std::vector<at::Tensor>& parameters, EngineOptions options);
  ~BucketEngine() override;
  void release_resources() override;  // called when the last owner lets go

  // Moves the gradients into buckets, which are flat and hold zeros. All parameters of a bucket are of one
  // dtype, and all are marked or none is.
  void arrange(const std::vector<int64_t>& bucket_of, const std::vector<int64_t>& offset_of,
               const std::vector<at::Tensor>& buckets);
  // From now on, until they are arranged anew, buckets are added up in memory that all ranks see. With marked
  // ones, called for the tensor-parallel group first.
  // members: the ranks of the group on this machine
  // doorbells, words: of each member; flats: of each member, all (or for the tensor-parallel group the
  // marked) buckets; see SharedSums. This rank's own are those that `arrange` was given. across, owners: a
  // group of one rank of each machine, and their ranks in `group`; "" where it has one
  void meet(bool tensor_parallel, const std::vector<int64_t>& members,
            const std::vector<at::Tensor>& doorbells, const std::vector<at::Tensor>& words,
            const std::vector<at::Tensor>& flats, std::string across, std::vector<int64_t> owners,
            int64_t timeout_ms);
  // How many gradients each parameter receives in a round: from now on, backward launches.
  void expect(const std::vector<int64_t>& arrivals);

  // Starts a round without gradients. A round that began is ended first, for other ranks may be in it; true
  // then.
  bool zero();
  // Ends the round: all gradients are reduced. The parameters that received none here; again if asked again.
  std::vector<int64_t> finish();
  // The parts of both that come before the wait for other ranks. Who calls these, and `settle` until it is
  // true, has `zero` and `finish` wait for nothing where ranks share memory.
  bool interrupt();
  bool launch_rest();  // false if there was nothing to finish
  // Waits for other ranks, so many seconds at most: whether all that was published in shared memory is done.
  bool settle(double seconds);
  // While it is not: what is waited for, whether of tensor-parallel ranks, of which, and which of them have
  // let go of their engine.
  Awaited awaited() const;
  // Other ranks will not do their part: nothing waits for them any more.
  void lose_others();
  // Whether gradients count towards a launch, or are only accumulated.
  void set_synchronizing(bool synchronizing);
  // Whether gradients that count have come, and `finish` has not.
  bool is_midway() const;
  // Leaves the parameters alone from now on: no hooks, nothing in flight.
  void detach();

  std::vector<at::Tensor> buckets() const { return listed(buckets_, &Bucket::flat); }
  std::vector<at::Tensor> views() const { return listed(slots_, &Slot::view); }  // by parameter
  // Of the last round, by parameter: how many gradients came, and when the last did (from 1; 0: never).
  std::vector<int64_t> arrivals() const { return listed(slots_, &Slot::arrived); }
  std::vector<int64_t> last_arrivals() const { return listed(slots_, &Slot::last_arrival); }
  // Of the last round: how many buckets did not have to wait for `finish`.
  int64_t launched_in_backward() const {
    const Turn turn(order_);
    return launched_in_backward_;
  }

 private:
  using Accumulator = decltype(torch::autograd::impl::grad_accumulator(std::declval<const at::Tensor&>()));

  struct Slot {  // of one parameter
    at::Tensor parameter;
    std::string name;
    bool marked;
    Accumulator accumulator;
    at::ScalarType dtype = at::kFloat;
    at::Tensor view = {};
    size_t bucket = 0;
    int64_t expected = 0;
    // in this round:
    bool touched = false;  // it received a gradient, synchronizing or not
    int64_t arrived = 0;   // gradients that count
    int64_t last_arrival = 0;
    bool scaled = false;   // divided already, while it was taken in
    bool reduced = false;  // holds the result of an earlier round
    // when its last gradient was taken in; none if it left nothing
    std::optional<uint32_t> version = std::nullopt;
  };

  struct Bucket {
    at::Tensor flat;
    std::vector<size_t> members;
    bool marked = false;
    size_t number = 0;      // among the marked, or among the others
    bool half_way = false;  // in the first of its two groups
    size_t pending = 0;     // members that still expect a gradient
    std::vector<c10::Stream> streams = {};
    at::Tensor wire = {};
    InFlight work = {};
  };

  template <typename Of, typename Field>
  std::vector<Field> listed(const std::vector<Of>& all, Field Of::* field) const {
    const Turn turn(order_);
    std::vector<Field> fields;
    for (const Of& each : all) fields.push_back(each.*field);
    return fields;
  }

  static EngineOptions checked(EngineOptions options, const std::vector<at::Tensor>& parameters);
  void check_arrangement(const std::vector<int64_t>& bucket_of, const std::vector<int64_t>& offset_of,
                         const std::vector<at::Tensor>& buckets) const;
  std::vector<SharedSums::Place> checked_places(bool tensor_parallel, const std::vector<int64_t>& members,
                                                const std::vector<at::Tensor>& doorbells,
                                                const std::vector<at::Tensor>& words,
                                                const std::vector<at::Tensor>& flats,
                                                const std::string& across, const std::vector<int64_t>& owners,
                                                int64_t timeout_ms) const;
  void refuse_detached() const;
  void refuse_unarranged() const;
  void refuse_midway() const;
  void refuse_unfinishable() const;
  void refuse_lost() const;
  void refuse_failed() const;

  void on_gradient(size_t index);
  void take_in(Slot& slot);
  void take_leftover(Slot& slot);
  void refuse_converted(const Slot& slot) const;
  void refuse_resized(const Slot& slot, const at::Tensor& grad) const;
  void refuse_reduced(const Slot& slot) const;
  void refuse_changed(const Slot& slot) const;
  std::optional<uint32_t> version_of(const Slot& slot) const;

  static bool has_hook(const Slot& slot);
  static void restore_hook(const Slot& slot);
  bool has_begun() const;
  void begin_without_hooks();
  void begin_round();
  void give_up();
  void launch_those_left();
  void launch(size_t index);
  void start(Bucket& bucket);
  at::ScalarType wire_dtype(at::ScalarType own) const;
  void reduce(Bucket& bucket);
  void send_on();
  void complete();
  void await(Bucket& bucket, const LiveGroup& group, const char* operation);
  void abandon() noexcept;
  bool end_round();

  void advance();
  bool is_settled() const;
  bool settled_within(std::chrono::nanoseconds time);
  void await_others();
  Awaited awaited_now() const;
  std::string failure_of(const Awaited& awaited, const std::string& cause) const;
  std::string failure_text(const std::string& what, const LiveGroup& group, const std::string& cause) const;
  void keep_gradients();
  void leave() noexcept;

  void scale(Bucket& bucket);
  int64_t objection_to(const Bucket& bucket) const;
  int64_t objection_of_any(const Bucket& bucket, int64_t own);
  void refuse_nan(const Bucket& bucket);
  std::string describe(const Bucket& bucket) const;
  bool divides() const { return divides_ && !sums_; }
  bool keeps_average() const { return options_.average && !options_.reduce_scatter; }

  const EngineOptions options_;
  const LiveGroup group_;
  const std::optional<LiveGroup> tensor_parallel_group_;
  const SideStream side_;
  const bool in_backend_;     // averages, and sums of halves in float32: NCCL's business, not gloo's
  const bool divides_;        // before sending; not if the backend does
  const at::Tensor divisor_;  // no dimensions
  const Reduction reduction_;

  mutable Turn::Order order_;  // autograd runs hooks in its own threads
  std::vector<Slot> slots_;
  std::vector<Bucket> buckets_;
  std::optional<SharedSums> sums_, marked_sums_;   // over `group`, and over the tensor-parallel one before
  std::vector<int64_t> members_, marked_members_;  // the ranks of each on this machine
  std::optional<Doorbell> doorbell_;               // rung by ranks of both
  std::chrono::milliseconds longest_wait_{0};
  bool learning_ = true;
  bool synchronizing_ = true;
  bool finished_ = false;
  bool detached_ = false;
  bool refused_ = false;      // by all ranks, for what one has found
  bool failed_ = false;       // some of its buckets are not reduced, and will not be
  bool interrupted_ = false;  // the round that `zero` is to end
  bool lost_others_ = false;
  std::optional<Reserved> reserved_;  // while collectives are in flight
  std::string failure_;               // of a wire to other machines
  size_t next_ = 0;                   // the bucket to launch
  size_t published_ = 0;              // the bucket to publish in `sums_`
  int64_t clock_ = 0;
  int64_t launched_in_backward_ = 0;
};

}  // namespace tpkernels
