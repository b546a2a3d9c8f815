// The rows of a batch without padding, whose tokens follow one another.
#pragma once

#include <vector>

#include "tensor.h"

// A row's new tokens are `count` ones from `first` on; `slot` is its place in the batch.
struct PackedRow {
  size_t slot, first, count;
};

// The rows that have new tokens, the longest first, by an operator's input `new_tokens`, int32 (batch):
// `num_tokens` in all.
inline std::vector<PackedRow> packed_rows(const Tensor& new_tokens, size_t batch,
                                          size_t num_tokens) {
  require(new_tokens.type == kInt32 && new_tokens.size() == batch, "new tokens");
  const auto* counts = static_cast<const int32_t*>(new_tokens.data);
  std::vector<PackedRow> rows;
  size_t first = 0;
  for (size_t slot = 0; slot < batch; ++slot) {
    require(counts[slot] >= 0, "new tokens");
    const auto count = static_cast<size_t>(counts[slot]);
    if (count > 0) rows.push_back({slot, first, count});
    first += count;
  }
  require(first == num_tokens, "new tokens");
  std::stable_sort(rows.begin(), rows.end(), [](const PackedRow& a, const PackedRow& b) {
    return a.count > b.count;
  });
  return rows;
}
