// Buckets that ranks of a machine see in each other's memory, added up there.
//
// Each rank owns a shard of every bucket. When all ranks have published a bucket, the owner of a shard adds
// it up over the ranks, in their order, and writes the sum into the bucket of every rank (or of its own
// alone). A bucket is done when all its shards are. Who reads and writes what, and when:
//
// - An owner reads its shard of a rank after that rank has published the bucket, hence after all gradients.
// - It writes there after it has read that shard of all ranks. Nobody else reads or writes it meanwhile.
// - A rank touches its bucket again once all owners have said that they are done with it.
//
// Two words for each bucket and rank say how often the rank has published it, and how often added up its
// shard. All ranks publish the same buckets in the same order, so a count stands for one call.
//
// Where the group has ranks on other machines, equally many on each, an owner's sum travels between what it
// reads and what it writes: the owners of a shard on all machines reduce it over torch.distributed, each
// shard in a group of its own.
//
// There is no thread here: a rank adds up when it publishes, when it gets more gradients, and while it waits.
#pragma once

#include <ATen/core/Tensor.h>

#include <deque>
#include <optional>
#include <string>
#include <vector>

#include "collectives.h"
#include "doorbell.h"

namespace tpkernels {

struct SumOptions {
  bool scatter;                 // a sum goes to the rank that its shard belongs to alone
  int64_t divisor;              // of sums
  bool in_double;               // else halves and floats are added as floats
  int64_t ranks, rank;          // of the whole group, and of this process in it
  std::string across;           // the owners of this rank's shards on all machines; "": there is one machine
  std::vector<int64_t> owners;  // their ranks in the whole group
  std::optional<at::ScalarType> wire_dtype;  // between machines; if absent what it is added in
  int64_t timeout_ms;
};

class SharedSums {
 public:
  static constexpr int64_t WORDS = 2;  // of a bucket

  // Memory of each rank: its doorbell, its words, and its buckets, which are of the same sizes.
  struct Place {
    at::Tensor doorbell, words;
    std::vector<at::Tensor> flats;
  };

  // places: of the ranks of this machine; own: which of them is ours
  SharedSums(std::vector<Place> places, int64_t own, SumOptions options);

  void publish(size_t bucket);
  // Adds up what can be, without waiting.
  void advance();
  bool is_done(size_t bucket) const;
  // Whether this rank waits for other machines.
  bool has_sent() const { return !sent_.empty(); }
  // Whom it waits for then: ranks of the whole group.
  std::vector<int64_t> other_owners() const;
  // Of a bucket that is not done: the ranks of this machine that have not published it or, if all have, not
  // added it up.
  std::vector<int64_t> late_with(size_t bucket) const;
  // This rank publishes nothing any more, and has done all that it published.
  void leave() const;
  bool has_left(int64_t rank) const;

 private:
  enum Word { PUBLISHED, ADDED };
  static constexpr int64_t NEVER = -1;  // instead of a count

  struct Sent {
    size_t bucket;
    at::Tensor wire;
    InFlight work;
  };

  int64_t read(size_t rank, size_t bucket, Word word) const;
  void tell(size_t bucket, Word word, int64_t count) const;
  void ring() const;
  bool have_all(size_t bucket, Word word) const;
  std::vector<int64_t> late_with(size_t bucket, Word word) const;
  std::vector<at::Tensor> shards(size_t bucket, int64_t ranks, int64_t rank) const;
  std::vector<at::Tensor> own_shards(size_t bucket) const;  // among the ranks of this machine
  void add_here(size_t bucket) const;
  void send(size_t bucket);
  void receive(const Sent& sent) const;
  void finish(size_t bucket) const;

  const std::vector<Place> places_;
  const size_t own_;
  const SumOptions options_;
  const std::optional<LiveGroup> across_;
  std::vector<int64_t> calls_;  // by bucket: how often it was published here
  std::deque<size_t> to_add_;   // published here and not added up here, in this order
  std::deque<Sent> sent_;
};

}  // namespace tpkernels
