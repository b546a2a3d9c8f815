// Scores of attention by the distance of two tokens, as DeBERTa adds them up.
//
// Included by processor.cpp only: nothing here has external linkage, since an inline function that was
// compiled with AVX-512 must not be the one that the linker keeps for every processor.
#pragma once

#include "pairs.h"
#include "softmax.h"

namespace {

// Keys whose products with queries of positions are transposed together.
constexpr size_t kPositionKeys = kLanes;
static_assert(kPositionKeys % 4 == 0 && kKeyBlock % kPositionKeys == 0);

// The parts of the scratch memory that positions need.
struct PositionScratch {
  float* scores;    // [num_queries rounded up][q.score_stride()]: keys times queries of positions
  float* products;  // [kPositionKeys][q.window_stride()]
  float* rows;      // [kPositionKeys][num_queries rounded up]: products in their queries' order

  PositionScratch(const FullQueries& q, float* scratch)
      : scores(scratch),
        products(scores + q.padded_queries() * q.score_stride()),
        rows(products + kPositionKeys * q.window_stride()) {}
};

// Rows of floats times a head of a table.
struct FloatPositions {
  static constexpr size_t kRows = kFloatRows;

  const float* rows;  // [][size]
  size_t size;
  float scale;
  const float* table;  // [num_blocks][size][kKeyBlock]

  void multiply(size_t row, size_t num_rows, size_t column, size_t num_columns,
                float* const* out) const {
    float factors[kFloatRows];
    for (size_t r = 0; r < num_rows; ++r) factors[r] = scale;
    const float* block = table + column / kKeyBlock * kKeyBlock * size + column % kKeyBlock;
    multiply_floats<kFloatRows>(num_rows, rows + row * size, size, block, kKeyBlock, size, factors,
                                out, num_columns);
  }
};

// Rows of integers times a head of a table.
struct PairPositions {
  static constexpr size_t kRows = kPairRows;

  const int16_t* rows;  // [][size]
  size_t size;
  const float* row_factors;
  const int16_t* table;        // [num_blocks][size / 2][kKeyBlock][2]
  const float* table_factors;  // [num_blocks][kKeyBlock]

  void multiply(size_t row, size_t num_rows, size_t column, size_t num_columns,
                float* const* out) const {
    const size_t block = column / kKeyBlock * kKeyBlock * size + column % kKeyBlock * 2;
    multiply_pairs<kPairRows>(num_rows, rows + row * size, size, PackedPairs{table + block, kKeyBlock},
                              size / 2, num_columns, {},
                              [&](size_t r, size_t place, Floats sum) {
                                const Floats factors = load(table_factors + column + place);
                                const Floats factor = splat(row_factors[row + r]);
                                store(out[r] + place, mul(mul(sum, factor), factors));
                              });
  }
};

// Multiplies rows, num_rows from `row` on, by the columns from `first` to `last`; returns the column of the
// first product, which is a multiple of kLanes.
template <typename Products>
size_t multiply_columns(const Products& products, size_t row, size_t num_rows, size_t first,
                        size_t last, float* out, size_t stride) {
  const size_t begin = first / kLanes * kLanes;
  for (size_t column = begin; column <= last;) {
    const size_t end = (column / kKeyBlock + 1) * kKeyBlock;
    const size_t stop = last < end ? last / kLanes * kLanes + kLanes : end;
    for (size_t r = 0; r < num_rows; r += Products::kRows) {
      const size_t some = num_rows - r < Products::kRows ? num_rows - r : Products::kRows;
      float* to[Products::kRows];
      for (size_t i = 0; i < some; ++i) to[i] = out + (r + i) * stride + column - begin;
      products.multiply(row + r, some, column, stop - column, to);
    }
    column = stop;
  }
  return begin;
}

// The scores of num_keys keys from `start` on by the queries of positions; `products` has the rows
// of these keys.
template <typename Products>
void score_position_queries(const FullQueries& q, const Products& products, size_t start,
                            size_t num_keys, const PositionScratch& scratch) {
  const size_t stride = q.window_stride(), num_queries = q.padded_queries();
  for (size_t key = 0; key < num_keys; key += kPositionKeys) {
    const size_t some = num_keys - key < kPositionKeys ? num_keys - key : kPositionKeys;
    // The distance of a query from these keys.
    const int32_t* columns = q.columns + q.first - (start + key);
    const auto first = static_cast<size_t>(*(columns - (some - 1)));
    const auto last = static_cast<size_t>(columns[q.num_queries - 1]);
    const size_t begin =
        multiply_columns(products, key, some, first, last, scratch.products, stride);
    for (size_t k = 0; k < some; ++k) {
      const float* row = scratch.products + k * stride;
      for (size_t i = 0; i < q.num_queries; i += kWidth) {
        store(scratch.rows + k * num_queries + i, load_columns(row, begin, columns - k + i));
      }
    }
    transpose_to<kPositionKeys>(scratch.rows, num_queries * sizeof(float), some, num_queries,
                                scratch.scores + start + key, q.score_stride());
  }
}

// Adds the scores by positions to those of num_rows queries from `row` on, [num_rows][score_stride];
// `products` has the rows of these queries, or none if there are no keys of positions.
template <typename Products>
void add_position_scores(const FullQueries& q, const Products& products, size_t row,
                         size_t num_rows, const PositionScratch& scratch, float* scores) {
  const size_t stride = q.score_stride(), window = q.window_stride();
  const int32_t* columns = q.columns - (q.first + row);
  size_t begin = 0;
  if (products.table != nullptr) {
    const auto first = static_cast<size_t>(*(columns - (num_rows - 1)));
    const auto last = static_cast<size_t>(columns[q.length - 1]);
    begin = multiply_columns(products, 0, num_rows, first, last, scratch.products, window);
  }
  for (size_t r = 0; r < num_rows; ++r) {
    float* to = scores + r * stride;
    const float* by_keys = scratch.products + r * window;
    const float* by_queries = scratch.scores + (row + r) * stride;
    for (size_t j = 0; j < q.length; j += kWidth) {
      Floats sum = load(to + j);
      if (products.table != nullptr) sum = add(sum, load_columns(by_keys, begin, columns - r + j));
      if (q.position_queries.table != nullptr) sum = add(sum, load(by_queries + j));
      store(to + j, sum);
    }
  }
}

}  // namespace
