// Low-rank adapters of products: the matrices of each, and which of them the rows of a pass use.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "operator.h"
#include "processor.h"
#include "tensor.h"

// What one adapter adds to the products of a model, by the products' names: for each layer that a product
// computes, its matrices, in the order of their columns. Passes get the adapter's address, so it lives until
// the last of them ends.
class Adapter {
 public:
  // Copies a [rank][num_inputs] and b [rank][num_outputs], of floats, or of halves if `halves`, and
  // returns the bytes that the copies take.
  size_t add(const std::string& product, const void* a, const void* b, size_t rank,
             size_t num_inputs, size_t num_outputs, size_t first, bool halves);

  // What it has for a product, by `number_of` its name; null for nothing.
  const std::vector<LowRank>* find(size_t product) const {
    return product >= layers_.size() || layers_[product].empty() ? nullptr : &layers_[product];
  }

  // The number of a product's name in this process, so that passes look no names up.
  static size_t number_of(const std::string& product);

 private:
  std::vector<std::vector<LowRank>> layers_;
  std::vector<std::unique_ptr<uint8_t[]>> bytes_;
};

// The adapters of a pass's rows, for the products of one operator.
class AdaptedRows {
 public:
  // The numbers of the products, whose names are lines of the operator's attribute `projections`.
  static std::vector<size_t> products(const OrtApi& api, const OrtKernelInfo* info);

  // `ids`, int64 (num_rows), has the address of each row's adapter, or 0.
  void read(const Tensor& ids, const std::vector<size_t>& products, size_t num_rows);

  // Whether a row has an adapter, and whether any has.
  bool has(size_t row) const { return addresses_ != nullptr && addresses_[row] != 0; }
  bool any() const { return addresses_ != nullptr; }

  // Multiplies a row by A of its adapter, for all products.
  void reduce(const Processor& processor, const float* row, size_t index);

  // The same of a row that is 1 at `input` and 0 elsewhere, which looks up a column of A.
  void look_up(size_t input, size_t index);

  // The columns from `column` on of (row A) B of at most kMaxRows rows: [num_rows][stride]. Where there is
  // nothing to add, it is -0, which leaves every number as it is. Null if it is nothing for all rows. The
  // column and the stride are multiples of kLanes.
  const float* deltas(const Processor& processor, size_t product, size_t row, size_t num_rows,
                      size_t column, size_t num_columns, size_t stride, float* out) const;

 private:
  const int64_t* addresses_ = nullptr;  // null if no row has one
  size_t num_products_ = 0, max_rank_ = 0;
  std::vector<const std::vector<LowRank>*> layers_;  // [num_rows][num_products], or null
  std::unique_ptr<float[]> reduced_;                 // [num_rows][num_products][max_rank]
};
