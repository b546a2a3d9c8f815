// What the operator Summary, and the sampler, want to know of a row of scores. The sampler's functions are
// called with what a graph has computed.
#include "vocabulary.h"

#include <algorithm>
#include <functional>
#include <vector>

namespace {

float kth_greatest(std::vector<float>& values, size_t k) {
  const auto kth = values.begin() + static_cast<std::ptrdiff_t>(k - 1);
  std::nth_element(values.begin(), kth, values.end(), std::greater<>());
  return *kth;
}

}  // namespace

RowSummary summarize_segment(const Processor& processor, const float* scores, size_t size,
                             size_t segment) {
  const size_t start = segment * kSegment;
  RowSummary summary = processor.summarize(scores + start, std::min(kSegment, size - start));
  summary.best += static_cast<int64_t>(start);
  return summary;
}

RowSummary join_segments(const RowSummary* segments, size_t count) {
  RowSummary row = segments[0];
  for (size_t i = 0; i < count; ++i) {
    if (std::isnan(segments[i].peak)) return {0, segments[i].peak, 0.0};
    if (segments[i].peak > row.peak) row = segments[i];
  }
  row.total = 0.0;
  for (size_t i = 0; i < count && std::isfinite(row.peak); ++i) {
    row.total += segments[i].total * std::exp(static_cast<double>(segments[i].peak) - row.peak);
  }
  return row;
}

size_t find_greatest(const Processor& processor, const float* scores, size_t size, size_t k,
                     int64_t* out) {
  std::vector<float> values;
  float bound = -INFINITY;
  if (k <= size / kScoreBlock) {
    // The k-th greatest peak of the blocks is a lower bound of the k-th greatest score.
    for (size_t start = 0; start < size; start += kScoreBlock) {
      values.push_back(processor.find_peak(scores + start, std::min(kScoreBlock, size - start)));
    }
    bound = kth_greatest(values, k);
    values.clear();
  }
  const size_t num_above = processor.find_at_least(scores, size, bound, out);
  for (size_t i = 0; i < num_above; ++i) values.push_back(scores[out[i]]);
  if (num_above <= k) return num_above;  // fewer if some are not numbers
  const float least = kth_greatest(values, k);
  size_t found = 0;
  for (size_t i = 0; i < num_above; ++i) {
    const int64_t index = out[i];
    out[found] = index;
    found += scores[index] >= least;
  }
  return found;
}
