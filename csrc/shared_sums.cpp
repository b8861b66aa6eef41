#include "shared_sums.h"

#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>

#include <algorithm>

namespace tpkernels {
namespace {

constexpr int64_t BLOCK = 2048;  // elements, whose sums stay in the cache
constexpr int64_t LEAST_A_THREAD = 1 << 15;

template <typename Element>
std::vector<Element*> data_of(const std::vector<at::Tensor>& tensors) {
  std::vector<Element*> data;
  for (const at::Tensor& tensor : tensors) data.push_back(tensor.mutable_data_ptr<Element>());
  return data;
}

template <typename Element, typename Sum, typename Result>
void add_block(const std::vector<Element*>& from, const std::vector<Result*>& into, Sum divisor,
               int64_t first, int64_t count) {
  Sum sums[BLOCK];
  for (int64_t i = 0; i < count; ++i) sums[i] = static_cast<Sum>(from[0][first + i]);
  for (size_t next = 1; next < from.size(); ++next) {
    const Element* const more = from[next] + first;
    for (int64_t i = 0; i < count; ++i) sums[i] += static_cast<Sum>(more[i]);
  }
  if (divisor != 1) {
    for (int64_t i = 0; i < count; ++i) sums[i] /= divisor;
  }
  for (Result* const result : into) {
    for (int64_t i = 0; i < count; ++i) result[first + i] = static_cast<Result>(sums[i]);
  }
}

template <typename Element, typename Sum, typename Result>
void add_blocks(const std::vector<at::Tensor>& tensors, const std::vector<at::Tensor>& results,
                int64_t divisor) {
  const auto from = data_of<Element>(tensors);
  const auto into = data_of<Result>(results);
  at::parallel_for(0, tensors[0].numel(), LEAST_A_THREAD, [&](int64_t first, int64_t last) {
    for (; first < last; first += BLOCK) {
      add_block(from, into, static_cast<Sum>(divisor), first, std::min(BLOCK, last - first));
    }
  });
}

template <typename Element, typename Sum>
void add_in(const std::vector<at::Tensor>& tensors, const std::vector<at::Tensor>& into, int64_t divisor) {
  if (into[0].scalar_type() == tensors[0].scalar_type()) {
    add_blocks<Element, Sum, Element>(tensors, into, divisor);
  } else {
    add_blocks<Element, Sum, Sum>(tensors, into, divisor);
  }
}

// The dtype that tensors of `own` are added in.
at::ScalarType added_in(at::ScalarType own, bool in_double) {
  return in_double || own == at::kDouble ? at::kDouble : at::kFloat;
}

// The sum of tensors, divided, into each of some others; all flat, contiguous, on the CPU, and of one size.
// Added in double, or where `in_double` is false and they are narrower in float; rounded once (from double to
// a half by way of float). `into` are of the dtype of what is added, or of that which it is added in.
void add_up(const std::vector<at::Tensor>& tensors, const std::vector<at::Tensor>& into, int64_t divisor,
            bool in_double) {
  const at::ScalarType own = tensors[0].scalar_type();
  const bool wide = added_in(own, in_double) == at::kDouble;
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, own, "add_up", [&] {
    wide ? add_in<scalar_t, double>(tensors, into, divisor) : add_in<scalar_t, float>(tensors, into, divisor);
  });
}

}  // namespace

SharedSums::SharedSums(std::vector<Place> places, int64_t own, SumOptions options)
    : places_(std::move(places)),
      own_(own),
      options_(std::move(options)),
      across_(options_.across.empty() ? std::nullopt : std::make_optional<LiveGroup>(options_.across)),
      calls_(places_[own].flats.size()) {}

void SharedSums::publish(size_t bucket) {
  ++calls_[bucket];
  to_add_.push_back(bucket);
  tell(bucket, PUBLISHED, calls_[bucket]);
  ring();
}

void SharedSums::advance() {
  for (; !to_add_.empty() && have_all(to_add_.front(), PUBLISHED); to_add_.pop_front()) {
    if (across_) {
      send(to_add_.front());
    } else {
      add_here(to_add_.front());
      finish(to_add_.front());
    }
  }
  for (; !sent_.empty() && sent_.front().work->isCompleted(); sent_.pop_front()) {
    receive(sent_.front());
    finish(sent_.front().bucket);
  }
}

bool SharedSums::is_done(size_t bucket) const { return have_all(bucket, ADDED); }

std::vector<int64_t> SharedSums::late_with(size_t bucket) const {
  return late_with(bucket, have_all(bucket, PUBLISHED) ? ADDED : PUBLISHED);
}

bool SharedSums::have_all(size_t bucket, Word word) const { return late_with(bucket, word).empty(); }

std::vector<int64_t> SharedSums::other_owners() const {
  std::vector<int64_t> others = options_.owners;
  std::erase(others, options_.rank);
  return others;
}

void SharedSums::leave() const {
  for (size_t bucket = 0; bucket < calls_.size(); ++bucket) tell(bucket, PUBLISHED, NEVER);
  ring();
}

bool SharedSums::has_left(int64_t rank) const { return !calls_.empty() && read(rank, 0, PUBLISHED) == NEVER; }

std::vector<int64_t> SharedSums::late_with(size_t bucket, Word word) const {
  std::vector<int64_t> late;
  for (size_t rank = 0; rank < places_.size(); ++rank) {
    if (read(rank, bucket, word) != calls_[bucket]) late.push_back(static_cast<int64_t>(rank));
  }
  return late;
}

int64_t SharedSums::read(size_t rank, size_t bucket, Word word) const {
  return __atomic_load_n(places_[rank].words.const_data_ptr<int64_t>() + WORDS * bucket + word,
                         __ATOMIC_ACQUIRE);
}

// What was written before is seen by whoever sees the count.
void SharedSums::tell(size_t bucket, Word word, int64_t count) const {
  __atomic_store_n(places_[own_].words.mutable_data_ptr<int64_t>() + WORDS * bucket + word, count,
                   __ATOMIC_RELEASE);
}

void SharedSums::ring() const {
  for (size_t rank = 0; rank < places_.size(); ++rank) {
    if (rank != own_) Doorbell(places_[rank].doorbell.mutable_data_ptr<int64_t>()).ring();
  }
}

void SharedSums::finish(size_t bucket) const {
  tell(bucket, ADDED, calls_[bucket]);
  ring();
}

// One of `ranks` shards of a bucket, as tensor_split() cuts it: of each place.
std::vector<at::Tensor> SharedSums::shards(size_t bucket, int64_t ranks, int64_t rank) const {
  std::vector<at::Tensor> shards;
  const int64_t elements = places_[own_].flats[bucket].numel();
  const int64_t each = elements / ranks, more = elements % ranks;
  for (const Place& place : places_) {
    shards.push_back(place.flats[bucket].narrow(0, rank * each + std::min(rank, more), each + (rank < more)));
  }
  return shards;
}

std::vector<at::Tensor> SharedSums::own_shards(size_t bucket) const {
  return shards(bucket, static_cast<int64_t>(places_.size()), static_cast<int64_t>(own_));
}

void SharedSums::add_here(size_t bucket) const {
  const auto from = own_shards(bucket);
  add_up(from, options_.scatter ? std::vector<at::Tensor>{from[own_]} : from, options_.divisor,
         options_.in_double);
}

// To the other owners: the shard to add up, or those of all of them, of which each keeps its own. (gloo's own
// reduce-scatter is an all-reduce as well, and does not tell when it is done.)
void SharedSums::send(size_t bucket) {
  const at::Tensor& flat = places_[own_].flats[bucket];
  std::vector<std::vector<at::Tensor>> pieces;
  if (options_.scatter) {
    for (const int64_t owner : options_.owners) pieces.push_back(shards(bucket, options_.ranks, owner));
  } else {
    pieces.push_back(own_shards(bucket));
  }
  const int64_t each = pieces[0][0].numel();
  const at::ScalarType wide = added_in(flat.scalar_type(), options_.in_double);
  at::Tensor wire = at::empty({each * static_cast<int64_t>(pieces.size())}, flat.options().dtype(wide));
  for (size_t piece = 0; piece < pieces.size(); ++piece) {
    add_up(pieces[piece], {wire.narrow(0, each * static_cast<int64_t>(piece), each)}, options_.divisor,
           options_.in_double);
  }
  wire = wire.to(options_.wire_dtype.value_or(wide));
  sent_.push_back(
      {bucket, wire, start_all_reduce(across_->get(), wire, Reduction::SUM, options_.timeout_ms)});
}

void SharedSums::receive(const Sent& sent) const {
  sent.work->wait();  // at once, or an error
  if (options_.scatter) {
    const auto& owners = options_.owners;
    const int64_t piece = std::find(owners.begin(), owners.end(), options_.rank) - owners.begin();
    const at::Tensor shard = shards(sent.bucket, options_.ranks, options_.rank)[own_];
    shard.copy_(sent.wire.narrow(0, piece * shard.numel(), shard.numel()));
    return;
  }
  for (const at::Tensor& shard : own_shards(sent.bucket)) shard.copy_(sent.wire);
}

}  // namespace tpkernels
