// The operator Linear(x, weight, scale, bias?, up_weight?, up_scale?, up_bias?) -> y
//
//   x          float (..., num_inputs)
//   weight     int8 (num_inputs, num_outputs), or transposed; constant, without -128
//   scale      float (num_outputs); constant
//   bias       float (num_outputs); constant
//   up_*       the same for a second product; then y = silu(first) * second
//   step       attribute: the step of x's quantization, relative to each row's largest magnitude
//              if by_row is 1
//   by_row, transposed, gelu   attributes: 0 or 1; gelu applies to a single product
//
// The operator Linears(x, (weight, scale, bias?) of each product) -> a y of each of two or three
// products, has no gelu.
//
// adapters   int64 (rows of x), optional, after the last product: see adapters.cpp
//
// Results are those of QuantizeLinear, MatMulIntegerToFloat and BiasGelu, to the last bit.
//
// The operators NormLinear(x, residual, norm, weight, ...) -> sum, y and NormLinears are the same for
// the RMS norm of sum = x + residual, which are of one shape; norm is float (num_inputs), and epsilon
// an attribute.
#include <cstring>

#include "file_pages.h"
#include "operators.h"
#include "projection.h"

namespace {

// A weight matrix as panels of kPanel columns; the last one is filled up with zeros. A panel is in memory
// as it is read, from its beginning to its end: corrections, weights, factors, and perhaps biases.
class Int8Matrix {
 public:
  static constexpr size_t kColumns = kPanel;

  static constexpr std::array<Value, 3> kInputs = {kInt8, kFloat, optional(kFloat)};

  Int8Matrix(const OrtApi& api, const OrtKernelInfo* info, size_t index, size_t num_given) {
    step_ = float_attribute(api, info, "step");
    by_row_ = int_attribute(api, info, "by_row") != 0;
    if (!(step_ > 0)) throw Error("the step of Linear must be positive");
    transposed_ = int_attribute(api, info, "transposed") != 0;
    weight_ = Tensor::constant(api, info, index, kInt8);
    if (weight_.dims.size() != 2 || weight_.size() == 0) {
      throw Error("a weight of Linear must be a matrix");
    }
    num_inputs_ = weight_.dim(transposed_ ? 1 : 0);
    num_outputs_ = weight_.dim(transposed_ ? 0 : 1);
    // A sum of more products of 8 bits could overflow.
    if (num_inputs_ > 65536) throw Error("a weight of Linear has more than 65,536 inputs");
    scale_ = Tensor::constant(api, info, index + 1, kFloat);
    if (scale_.size() != num_outputs_) throw Error("a scale of Linear does not fit its weight");
    if (num_given > index + 2) bias_ = Tensor::constant(api, info, index + 2, kFloat, true);
    has_bias_ = bias_.data != nullptr;
    if (has_bias_ && bias_.size() != num_outputs_) {
      throw Error("a bias of Linear does not fit its weight");
    }
  }

  size_t num_inputs() const { return num_inputs_; }
  size_t num_outputs() const { return num_outputs_; }
  size_t block_size() const { return num_inputs_; }
  size_t num_quads() const { return (num_inputs_ + kQuad - 1) / kQuad; }
  size_t num_panels() const { return (num_outputs_ + kPanel - 1) / kPanel; }
  size_t panel_bytes() const {
    return kColumnBytes + weight_bytes() + kColumnBytes * (has_bias_ ? 2 : 1);
  }

  // Writes some of the panels, each `stride` bytes after the one before, to zeros; they all fit.
  bool pack(uint8_t* out, size_t stride, size_t first_panel, size_t last_panel) const {
    const auto* weights = static_cast<const int8_t*>(weight_.data);
    const size_t last_column = std::min(last_panel * kPanel, num_outputs_);
    for (size_t column = first_panel * kPanel; column < last_column; ++column) {
      uint8_t* panel = out + column / kPanel * stride;
      const size_t lane = column % kPanel;
      auto* to = reinterpret_cast<int8_t*>(panel + kColumnBytes) + lane * kQuad;
      int32_t sum = 0;
      for (size_t i = 0; i < num_inputs_; ++i) {
        const int8_t weight =
            transposed_ ? weights[column * num_inputs_ + i] : weights[i * num_outputs_ + column];
        if (weight == -128) throw Error("a weight of Linear is -128; the minimum is -127");
        sum += weight;
        to[i / kQuad * kPanel * kQuad + i % kQuad] = weight;
      }
      const int32_t correction = -128 * sum;
      const float factor = step_ * scale_.floats()[column];
      uint8_t* after = panel + kColumnBytes + weight_bytes() + lane * sizeof(float);
      std::memcpy(panel + lane * sizeof(correction), &correction, sizeof(correction));
      std::memcpy(after, &factor, sizeof(factor));
      if (has_bias_) std::memcpy(after + kColumnBytes, bias_.floats() + column, sizeof(float));
    }
    return true;
  }

  void widen() {}

  // Where they are from now on. The weight is not read again.
  void place(const uint8_t* panels, size_t stride) {
    panels_ = panels;
    stride_ = stride;
    forget_file_pages(weight_.data, weight_.size());
  }

  Prefetch panel(size_t index) const { return {panels_ + index * stride_, panel_bytes()}; }

  class Rows {
   public:
    // `adapted`: whether some rows are.
    Rows(const Int8Matrix& matrix, size_t num_rows, bool adapted)
        : matrix_(&matrix), bytes_(new uint8_t[num_rows * row_bytes()]) {
      if (matrix.by_row_ || adapted) peaks_.resize(num_rows, 1.0f);
    }

    // A fixed step was chosen for the inputs that there are without adapters, so adapted rows have their own.
    void quantize(const Processor& processor, const float* row, size_t index, bool adapted) {
      uint8_t* quantized = bytes_.get() + index * row_bytes();
      // The padding of the last quad is multiplied by zeros.
      std::memset(quantized + row_bytes() - kQuad, 0, kQuad);
      const size_t size = matrix_->num_inputs_;
      if (matrix_->by_row_) {
        peaks_[index] = processor.quantize_by_peak(row, size, matrix_->step_, quantized);
      } else if (adapted) {
        const float step = 1 / kLargestInput;
        peaks_[index] = processor.quantize_by_peak(row, size, step, quantized) * step / matrix_->step_;
      } else {
        processor.quantize(row, size, matrix_->step_, quantized);
      }
    }

    const uint8_t* bytes(size_t index) const { return bytes_.get() + index * row_bytes(); }
    const float* peaks(size_t index) const {
      return peaks_.empty() ? nullptr : peaks_.data() + index;
    }

   private:
    size_t row_bytes() const { return matrix_->num_quads() * kQuad; }

    const Int8Matrix* matrix_;
    std::unique_ptr<uint8_t[]> bytes_;
    std::vector<float> peaks_;
  };

  void multiply(const Processor& processor, const Rows& rows, size_t row, size_t num_rows,
                size_t panel, const Prefetch& prefetch, const Result& result) const {
    const uint8_t* bytes = this->panel(panel).bytes;
    const uint8_t* weights = bytes + kColumnBytes;
    const auto* factors = reinterpret_cast<const float*>(weights + weight_bytes());
    const Panel columns{reinterpret_cast<const int8_t*>(weights),
                        num_quads(),
                        factors,
                        reinterpret_cast<const int32_t*>(bytes),
                        has_bias_ ? factors + kPanel : nullptr,
                        prefetch};
    processor.multiply(rows.bytes(row), num_rows, columns, rows.peaks(row), result);
  }

 private:
  // A number for each column of a panel.
  static constexpr size_t kColumnBytes = kPanel * sizeof(float);
  static_assert(sizeof(int32_t) == sizeof(float));

  size_t weight_bytes() const { return num_quads() * kQuad * kPanel; }

  float step_ = 0;
  bool by_row_ = false, transposed_ = false, has_bias_ = false;
  size_t num_inputs_ = 0, num_outputs_ = 0;
  Tensor weight_, scale_, bias_;  // while the operator is made
  const uint8_t* panels_ = nullptr;
  size_t stride_ = 0;
};

struct Linear : Projection<Int8Matrix, false, false> {
  static constexpr Signature kSignature = signature("Linear");
  using Projection::Projection;
};

struct Linears : Projection<Int8Matrix, true, false> {
  static constexpr Signature kSignature = signature("Linears");
  using Projection::Projection;
};

struct NormLinear : Projection<Int8Matrix, false, true> {
  static constexpr Signature kSignature = signature("NormLinear");
  using Projection::Projection;
};

struct NormLinears : Projection<Int8Matrix, true, true> {
  static constexpr Signature kSignature = signature("NormLinears");
  using Projection::Projection;
};

}  // namespace

const OrtCustomOp kLinearOp = operator_table<Linear>();
const OrtCustomOp kLinearsOp = operator_table<Linears>();
const OrtCustomOp kNormLinearOp = operator_table<NormLinear>();
const OrtCustomOp kNormLinearsOp = operator_table<NormLinears>();
