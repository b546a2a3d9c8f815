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

// The parts of the scratch memory that positions need; q has some.
struct PositionScratch {
  float* keys;      // [padded_length][padded_size], or half as much for integers
  float* scores;    // [position_queries_at_once][score_stride]: keys times queries of positions
  float* products;  // [kPositionKeys][window_stride]
  float* rows;      // [kPositionKeys][position_queries_at_once]: products in their queries' order

  PositionScratch(const FullQueries& q, float* scratch)
      : keys(scratch),
        scores(keys + q.padded_length() * q.padded_size()),
        products(scores + q.position_queries_at_once() * q.score_stride()),
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

// The scores of all keys, the rows of `products`, by the queries of positions, for num_queries queries from
// `query` on.
template <typename Products>
void score_queries_of_positions(const FullQueries& q, const Products& products, size_t query,
                                size_t num_queries, const PositionScratch& scratch) {
  const size_t stride = q.window_stride(), row_stride = q.position_queries_at_once();
  for (size_t key = 0; key < q.length; key += kPositionKeys) {
    const size_t some = q.length - key < kPositionKeys ? q.length - key : kPositionKeys;
    // By the distance of a query from the first of these keys.
    const int32_t* columns = q.columns + q.first + query - key;
    const auto first = static_cast<size_t>(*(columns - (some - 1)));
    const auto last = static_cast<size_t>(columns[num_queries - 1]);
    const size_t begin =
        multiply_columns(products, key, some, first, last, scratch.products, stride);
    for (size_t k = 0; k < some; ++k) {
      const float* row = scratch.products + k * stride;
      for (size_t i = 0; i < num_queries; i += kWidth) {
        store(scratch.rows + k * row_stride + i, load_columns(row, begin, columns - k + i));
      }
    }
    const size_t whole = (num_queries + kLanes - 1) / kLanes * kLanes;
    transpose_to<kPositionKeys>(scratch.rows, row_stride * sizeof(float), some, whole,
                                scratch.scores + key, q.score_stride());
  }
}

// The rows of a tile from `row` on: at most `most`, with scores by positions that are computed together.
inline size_t tile_rows(const FullQueries& q, size_t row, size_t most) {
  size_t left = q.num_queries - row;
  if (q.columns != nullptr) {
    const size_t together = kPositionQueries - row % kPositionQueries;
    left = left < together ? left : together;
  }
  return left < most ? left : most;
}

// Computes the scores by queries of positions that the tiles from `row` on need, if they begin there.
template <typename Products>
void prepare_positions(const FullQueries& q, const Products& products, size_t row,
                       const PositionScratch& scratch) {
  if (q.columns == nullptr || products.table == nullptr || row % kPositionQueries != 0) return;
  const size_t left = q.num_queries - row;
  score_queries_of_positions(q, products, row, left < kPositionQueries ? left : kPositionQueries,
                             scratch);
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
    const float* by_queries = scratch.scores + (row % kPositionQueries + r) * stride;
    for (size_t j = 0; j < q.length; j += kWidth) {
      Floats sum = load(to + j);
      if (products.table != nullptr) sum = add(sum, load_columns(by_keys, begin, columns - r + j));
      if (q.queries_of_positions.table != nullptr) sum = add(sum, load(by_queries + j));
      store(to + j, sum);
    }
  }
}

}  // namespace
