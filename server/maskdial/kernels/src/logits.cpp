// Summaries of rows of logits, for the operator LogitsSummary and the sampler, and the k greatest.
#include "logits.h"

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

LogitsSummary summarize_segment(const Processor& processor, const float* scores, size_t size,
                             size_t segment) {
  const size_t start = segment * kSegment;
  LogitsSummary summary = processor.summarize(scores + start, std::min(kSegment, size - start));
  summary.best += static_cast<int64_t>(start);
  return summary;
}

LogitsSummary merge_segments(const LogitsSummary* segments, size_t count) {
  LogitsSummary row = segments[0];
  for (size_t i = 0; i < count; ++i) {
    if (std::isnan(segments[i].max_logit)) return {0, segments[i].max_logit, 0.0};
    if (segments[i].max_logit > row.max_logit) row = segments[i];
  }
  row.sum_exp = 0.0;
  for (size_t i = 0; i < count && std::isfinite(row.max_logit); ++i) {
    row.sum_exp +=
        segments[i].sum_exp * std::exp(static_cast<double>(segments[i].max_logit) - row.max_logit);
  }
  return row;
}

size_t find_greatest(const Processor& processor, const float* scores, size_t size, size_t k,
                     int64_t* out) {
  std::vector<float> values;
  float bound = -INFINITY;
  if (k <= size / kScoreBlock) {
    // The k-th greatest of the blocks' maxima is a lower bound of the k-th greatest score.
    for (size_t start = 0; start < size; start += kScoreBlock) {
      values.push_back(processor.find_max(scores + start, std::min(kScoreBlock, size - start)));
    }
    bound = kth_greatest(values, k);
    values.clear();
  }
  const size_t num_above = processor.find_at_least(scores, size, bound, out);
  for (size_t i = 0; i < num_above; ++i) values.push_back(scores[out[i]]);
  if (num_above <= k) return num_above;  // fewer if some are not numbers
  const float min_score = kth_greatest(values, k);
  size_t found = 0;
  for (size_t i = 0; i < num_above; ++i) {
    const int64_t index = out[i];
    out[found] = index;
    found += scores[index] >= min_score;
  }
  return found;
}
