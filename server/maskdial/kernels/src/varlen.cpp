// The operators Pack(x, lengths) -> y, Unpack(y, lengths, input_ids) -> x,
// TokenPositions(lengths) -> positions, PackedRows(rows, lengths, input_ids) -> packed_rows, and
// FirstRows(lengths) -> packed_rows
//
//   x           float (batch, length, ...), texts padded to the right
//   lengths     int32 (batch): the tokens of each text
//   y           float (tokens, 1, ...), texts one after the other
//   input_ids   int64 (batch, length), for its shape
//   positions   int64 (tokens, 1): 0, 1, ... in each text
//   rows        int64 (n): places of tokens among those of x, counted through all texts with padding
//   packed_rows int64 (n): the same tokens' places among those of y; or, of FirstRows, (batch): the
//               place of each text's first token
//
// Unpack pads with zeros.
#include <algorithm>
#include <cstring>

#include "operator.h"
#include "operators.h"
#include "tensor.h"

namespace {

// The lengths of some texts.
struct Lengths {
  std::vector<size_t> each{};
  size_t total = 0, longest = 0;

  static Lengths input(const OrtApi& api, const OrtKernelContext* context, size_t index) {
    const Tensor tensor = Tensor::input(api, context, index);
    require(tensor.type == kInt32 && tensor.dims.size() == 1, "lengths");
    Lengths lengths;
    for (size_t i = 0; i < tensor.dim(0); ++i) {
      const int32_t length = static_cast<const int32_t*>(tensor.data)[i];
      require(length >= 0, "lengths");
      lengths.each.push_back(static_cast<size_t>(length));
      lengths.total += lengths.each.back();
      lengths.longest = std::max(lengths.longest, lengths.each.back());
    }
    return lengths;
  }
};

// The floats of a token.
size_t columns_of(const Tensor& tensor) {
  size_t product = 1;
  for (size_t i = 2; i < tensor.dims.size(); ++i) product *= tensor.dim(i);
  return product;
}

class Pack {
 public:
  static constexpr Signature kSignature{"Pack", {kFloat, kInt32}, {kFloat}};

  Pack(const OrtApi& api, const OrtKernelInfo*) : api_(api) {}

  void compute(OrtKernelContext* context) const {
    const Tensor x = Tensor::input(api_, context, 0);
    const Lengths lengths = Lengths::input(api_, context, 1);
    require(x.type == kFloat && x.dims.size() > 1 && x.dim(0) == lengths.each.size() &&
                lengths.longest <= x.dim(1),
            "x and lengths");
    const size_t columns = columns_of(x);
    std::vector<int64_t> dims(x.dims.begin(), x.dims.end());
    dims[0] = static_cast<int64_t>(lengths.total);
    dims[1] = 1;
    float* out = Tensor::output(api_, context, 0, dims);
    const float* text = x.floats();
    for (size_t length : lengths.each) {
      out = std::copy_n(text, length * columns, out);
      text += x.dim(1) * columns;
    }
  }

 private:
  const OrtApi& api_;
};

class Unpack {
 public:
  static constexpr Signature kSignature{"Unpack", {kFloat, kInt32, kInt64}, {kFloat}};

  Unpack(const OrtApi& api, const OrtKernelInfo*) : api_(api) {}

  void compute(OrtKernelContext* context) const {
    const Tensor x = Tensor::input(api_, context, 0), ids = Tensor::input(api_, context, 2);
    const Lengths lengths = Lengths::input(api_, context, 1);
    require(ids.dims.size() == 2 && ids.dim(0) == lengths.each.size() &&
                lengths.longest <= ids.dim(1),
            "input_ids and lengths");
    require(x.type == kFloat && x.dims.size() > 1 && x.dim(0) == lengths.total && x.dim(1) == 1,
            "x and lengths");
    const size_t columns = columns_of(x);
    std::vector<int64_t> dims(x.dims.begin(), x.dims.end());
    std::copy_n(ids.dims.begin(), 2, dims.begin());
    float* out = Tensor::output(api_, context, 0, dims);
    const float* text = x.floats();
    for (size_t length : lengths.each) {
      out = std::copy_n(text, length * columns, out);
      out = std::fill_n(out, (ids.dim(1) - length) * columns, 0.0f);
      text += length * columns;
    }
  }

 private:
  const OrtApi& api_;
};

class TokenPositions {
 public:
  static constexpr Signature kSignature{"TokenPositions", {kInt32}, {kInt64}};

  TokenPositions(const OrtApi& api, const OrtKernelInfo*) : api_(api) {}

  void compute(OrtKernelContext* context) const {
    const Lengths lengths = Lengths::input(api_, context, 0);
    auto* out = Tensor::output<int64_t>(api_, context, 0, {static_cast<int64_t>(lengths.total), 1});
    for (size_t length : lengths.each) {
      for (size_t i = 0; i < length; ++i) *out++ = static_cast<int64_t>(i);
    }
  }

 private:
  const OrtApi& api_;
};

class PackedRows {
 public:
  static constexpr Signature kSignature{"PackedRows", {kInt64, kInt32, kInt64}, {kInt64}};

  PackedRows(const OrtApi& api, const OrtKernelInfo*) : api_(api) {}

  void compute(OrtKernelContext* context) const {
    const Tensor rows = Tensor::input(api_, context, 0), ids = Tensor::input(api_, context, 2);
    const Lengths lengths = Lengths::input(api_, context, 1);
    require(ids.dims.size() == 2 && ids.dim(0) == lengths.each.size(),
            "input_ids and lengths");
    require(rows.type == kInt64 && rows.dims.size() == 1, "rows");
    const std::vector<int64_t> starts = starts_of(lengths);
    auto* out = Tensor::output<int64_t>(api_, context, 0, rows.dims);
    const auto width = ids.dims[1];
    for (size_t i = 0; i < rows.size(); ++i) {
      const int64_t row = static_cast<const int64_t*>(rows.data)[i];
      require(row >= 0 && row < ids.dims[0] * width, "rows");
      const auto text = static_cast<size_t>(row / width);
      require(static_cast<size_t>(row % width) < lengths.each[text], "rows");
      out[i] = starts[text] + row % width;
    }
  }

  // The place of each text's first token.
  static std::vector<int64_t> starts_of(const Lengths& lengths) {
    std::vector<int64_t> starts;
    size_t start = 0;
    for (size_t length : lengths.each) {
      starts.push_back(static_cast<int64_t>(start));
      start += length;
    }
    return starts;
  }

 private:
  const OrtApi& api_;
};

class FirstRows {
 public:
  static constexpr Signature kSignature{"FirstRows", {kInt32}, {kInt64}};

  FirstRows(const OrtApi& api, const OrtKernelInfo*) : api_(api) {}

  void compute(OrtKernelContext* context) const {
    const Lengths lengths = Lengths::input(api_, context, 0);
    for (size_t length : lengths.each) require(length > 0, "lengths");
    const std::vector<int64_t> starts = PackedRows::starts_of(lengths);
    const auto batch = static_cast<int64_t>(starts.size());
    std::copy(starts.begin(), starts.end(),
              Tensor::output<int64_t>(api_, context, 0, {batch}));
  }

 private:
  const OrtApi& api_;
};

}  // namespace

const OrtCustomOp kPackOp = operator_table<Pack>();
const OrtCustomOp kUnpackOp = operator_table<Unpack>();
const OrtCustomOp kTokenPositionsOp = operator_table<TokenPositions>();
const OrtCustomOp kPackedRowsOp = operator_table<PackedRows>();
const OrtCustomOp kFirstRowsOp = operator_table<FirstRows>();
