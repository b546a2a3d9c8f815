#include "drawing.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "logits.h"

namespace {

// Bisection has found the last candidates closely enough when they are at most about this many.
constexpr size_t kFew = 256;

// Positive floats are ordered as their bits are.
uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}
float from_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}
float before(float value) { return from_bits(bits_of(value) - 1); }

// Drops those of the heaviest weights that are not needed to reach a target; of equal ones, the last.
// Returns a weight that those left are above; of the dropped ones above it, the weights are made 0.
float keep_heaviest(const Processor& processor, float* weights, size_t size, double total,
                    double top_p, int64_t* room) {
  const double target = top_p * total;
  // Those lighter than a share of the mean hold less than that share of the total, all together.
  const double mean = total / static_cast<double>(size);
  float floor = before(static_cast<float>(std::min((1.0 - top_p) * mean, 1.0)));
  // The weights above the floor reach the target; those above the ceiling do not.
  float ceiling = 1.0f;
  double above_floor = total, above_ceiling = 0.0;
  while (above_floor - above_ceiling > kFew * static_cast<double>(floor)) {
    const uint32_t low = bits_of(floor), high = bits_of(ceiling);
    if (high - low <= 1) break;
    const float middle = from_bits(low + (high - low) / 2);
    const double above = processor.sum_above(weights, size, middle, nullptr);
    (above >= target ? floor : ceiling) = middle;
    (above >= target ? above_floor : above_ceiling) = above;
  }
  const size_t num_last = processor.find_between(weights, size, floor, ceiling, room);
  const auto heavier = [&](int64_t a, int64_t b) {
    return weights[a] != weights[b] ? weights[a] > weights[b] : a < b;
  };
  if (bits_of(ceiling) - bits_of(floor) > 1) std::sort(room, room + num_last, heavier);
  for (size_t i = 0; i < num_last; ++i) {
    const float weight = weights[room[i]];
    if (above_ceiling >= target && i > 0) weights[room[i]] = 0.0f;
    above_ceiling += weight;
  }
  return floor;
}

// The first index at which the sum of the weights above a floor passes a share of their total, where
// `sums` are those of blocks.
size_t index_at(const float* weights, size_t size, float floor, const std::vector<double>& sums,
                double target) {
  size_t block = 0;
  double sum = 0.0;
  while ((block + 1) * kSumBlock < size && sum + sums[block] <= target) sum += sums[block++];
  size_t last = block * kSumBlock;
  const size_t end = std::min(size, last + kSumBlock);
  for (size_t i = last; i < end && sum <= target; ++i) {
    if (!(weights[i] > floor)) continue;
    last = i;  // of the block, if rounding puts the target beyond its sum
    sum += weights[i];
  }
  return last;
}

}  // namespace

int64_t draw(const Processor& processor, const float* scores, size_t size, const Drawing& how,
             float* weights, int64_t* room) {
  const int64_t* ids = nullptr;
  if (how.top_k > 0 && how.top_k < size) {
    const size_t num_greatest = find_greatest(processor, scores, size, how.top_k, room);
    for (size_t i = 0; i < num_greatest; ++i) weights[i] = scores[room[i]];
    scores = weights;
    ids = room;
    room += size;
    size = num_greatest;
  }
  std::vector<double> sums(size / kSumBlock + 1);
  double total =
      processor.exponentials(scores, size, how.max_score, 1.0f / how.temperature, weights, sums.data());
  float floor = 0.0f;
  if (how.top_p < 1.0) {
    floor = keep_heaviest(processor, weights, size, total, how.top_p, room);
  }
  if (how.min_p > 0.0f) floor = std::max(floor, before(how.min_p));
  if (floor > 0.0f) total = processor.sum_above(weights, size, floor, sums.data());
  const size_t index = index_at(weights, size, floor, sums, how.share * total);
  return ids == nullptr ? static_cast<int64_t>(index) : ids[index];
}
