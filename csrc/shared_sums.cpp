#include "shared_sums.h"

#include <ATen/Parallel.h>

namespace tpkernels {
namespace {

constexpr int64_t BLOCK = 2048;  // elements, whose sums stay in the cache
constexpr int64_t LEAST_A_THREAD = 1 << 15;

struct Range {
  int64_t begin, end;
};

// Of `ranks` shards of a bucket, as tensor_split() cuts it: the first ones may have one element more.
Range shard_of(int64_t elements, int64_t ranks, int64_t rank) {
  const int64_t each = elements / ranks, more = elements % ranks;
  const int64_t begin = rank * each + std::min(rank, more);
  return {begin, begin + each + (rank < more)};
}

template <typename Element, typename Sum>
void add_block(const std::vector<Element*>& flats, const std::vector<Element*>& results, Sum divisor,
               int64_t first, int64_t count) {
  Sum sums[BLOCK];
  for (int64_t i = 0; i < count; ++i) sums[i] = static_cast<Sum>(flats[0][first + i]);
  for (size_t rank = 1; rank < flats.size(); ++rank) {
    const Element* const more = flats[rank] + first;
    for (int64_t i = 0; i < count; ++i) sums[i] += static_cast<Sum>(more[i]);
  }
  if (divisor != 1) {
    for (int64_t i = 0; i < count; ++i) sums[i] /= divisor;
  }
  for (Element* const result : results) {
    for (int64_t i = 0; i < count; ++i) result[first + i] = static_cast<Element>(sums[i]);
  }
}

template <typename Element, typename Sum>
void add_range(const std::vector<at::Tensor>& flats, size_t owner, const SumOptions& options) {
  std::vector<Element*> from;
  for (const at::Tensor& flat : flats) from.push_back(flat.mutable_data_ptr<Element>());
  const std::vector<Element*> into = options.scatter ? std::vector<Element*>{from[owner]} : from;
  const auto divisor = static_cast<Sum>(options.divisor);
  const auto [begin, end] =
      shard_of(flats[0].numel(), static_cast<int64_t>(flats.size()), static_cast<int64_t>(owner));
  at::parallel_for(begin, end, LEAST_A_THREAD, [&](int64_t first, int64_t last) {
    for (; first < last; first += BLOCK) add_block(from, into, divisor, first, std::min(BLOCK, last - first));
  });
}

template <typename Element>
void add_halves(const std::vector<at::Tensor>& flats, size_t owner, const SumOptions& options) {
  options.in_double ? add_range<Element, double>(flats, owner, options)
                    : add_range<Element, float>(flats, owner, options);
}

}  // namespace

SharedSums::SharedSums(std::vector<Place> places, int64_t rank, SumOptions options)
    : places_(std::move(places)), rank_(rank), options_(options), calls_(places_[rank].flats.size()) {}

void SharedSums::publish(size_t bucket) {
  ++calls_[bucket];
  to_add_.push_back(bucket);
  tell(bucket, PUBLISHED, calls_[bucket]);
  ring();
}

bool SharedSums::advance() {
  bool any = false;
  while (!to_add_.empty() && have_all(to_add_.front(), PUBLISHED)) {
    add_up(to_add_.front());
    tell(to_add_.front(), ADDED, calls_[to_add_.front()]);
    ring();
    to_add_.pop_front();
    any = true;
  }
  return any;
}

bool SharedSums::is_done(size_t bucket) const { return have_all(bucket, ADDED); }

std::vector<int64_t> SharedSums::late_with(size_t bucket) const {
  return late_with(bucket, have_all(bucket, PUBLISHED) ? ADDED : PUBLISHED);
}

bool SharedSums::have_all(size_t bucket, Word word) const {
  for (size_t rank = 0; rank < places_.size(); ++rank) {
    if (read(rank, bucket, word) != calls_[bucket]) return false;
  }
  return true;
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
  __atomic_store_n(places_[rank_].words.mutable_data_ptr<int64_t>() + WORDS * bucket + word, count,
                   __ATOMIC_RELEASE);
}

void SharedSums::ring() const {
  for (size_t rank = 0; rank < places_.size(); ++rank) {
    if (rank != rank_) Doorbell(places_[rank].doorbell.mutable_data_ptr<int64_t>()).ring();
  }
}

void SharedSums::add_up(size_t bucket) const {
  std::vector<at::Tensor> flats;
  for (const Place& place : places_) flats.push_back(place.flats[bucket]);
  switch (flats[0].scalar_type()) {
    case at::kDouble:
      return add_range<double, double>(flats, rank_, options_);
    case at::kFloat:
      return add_halves<float>(flats, rank_, options_);
    case at::kHalf:
      return add_halves<at::Half>(flats, rank_, options_);
    default:
      return add_halves<at::BFloat16>(flats, rank_, options_);
  }
}

}  // namespace tpkernels
