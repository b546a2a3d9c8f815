// The operator Linear4(x, weight, scale, bias?, up_weight?, up_scale?, up_bias?) -> y
//
//   x            float (..., num_inputs)
//   weight       uint8 (num_outputs, num_blocks, block_size / 2), two weights of 4 bits in a byte,
//                the first one low; 8 is zero; constant
//   scale        float (num_outputs, num_blocks); constant
//   bias         float (num_outputs); constant
//   up_*         the same for a second product; then y = silu(first) * second
//   num_inputs   attribute
//   gelu         attribute: 0 or 1; applies to a single product
//
// NormLinear4 adds and normalizes its input first, as NormLinear does (linear.cpp).
//
// It takes the place of MatMulNBits with activations of 8 bits (accuracy level 4): each block of a
// row is quantized to int8, relative to its largest magnitude, and multiplied exactly. A row's sum
// over its blocks is always in the same order.
#include <cstring>

#include "operators.h"
#include "projection.h"

namespace {

// A weight matrix as panels of kPanel4 columns of nibbles. The padding of the last panel and of
// the last chunk of inputs is zero, as are the inputs there. A panel is in memory as it is read: each
// block's weights and factors, and perhaps biases.
class Int4Matrix {
 public:
  static constexpr ElementType kType = kUint8;
  static constexpr size_t kColumns = kPanel4;

  Int4Matrix(const OrtApi& api, const OrtKernelInfo* info, size_t index, size_t num_given) {
    const int64_t num_inputs = int_attribute(api, info, "num_inputs");
    weight_ = Tensor::constant(api, info, index, kType);
    if (num_inputs <= 0 || weight_.dims.size() != 3 || weight_.size() == 0) {
      throw Error("a weight of Linear4 must be a matrix in blocks");
    }
    num_inputs_ = static_cast<size_t>(num_inputs);
    num_outputs_ = weight_.dim(0);
    num_blocks_ = weight_.dim(1);
    const size_t block_size = 2 * weight_.dim(2);
    if (block_size % kChunk != 0) throw Error("a block of Linear4 must be a multiple of 32");
    // Sums of larger ones could overflow.
    if (block_size > 65536) throw Error("a block of Linear4 has more than 65,536 inputs");
    if (num_blocks_ != (num_inputs_ + block_size - 1) / block_size) {
      throw Error("the blocks of Linear4 do not fit its number of inputs");
    }
    chunks_per_block_ = block_size / kChunk;
    scale_ = Tensor::constant(api, info, index + 1, kFloat);
    if (scale_.size() != num_outputs_ * num_blocks_) {
      throw Error("a scale of Linear4 does not fit its weight");
    }
    if (num_given > index + 2) bias_ = Tensor::constant(api, info, index + 2, kFloat, true);
    has_bias_ = bias_.data != nullptr;
    if (has_bias_ && bias_.size() != num_outputs_) {
      throw Error("a bias of Linear4 does not fit its weight");
    }
  }

  size_t num_inputs() const { return num_inputs_; }
  size_t num_outputs() const { return num_outputs_; }
  size_t num_chunks() const { return (num_inputs_ + kChunk - 1) / kChunk; }
  size_t num_panels() const { return (num_outputs_ + kPanel4 - 1) / kPanel4; }
  size_t panel_bytes() const {
    return num_chunks() * kChunkBytes + (num_blocks_ + (has_bias_ ? 1 : 0)) * kColumnBytes;
  }

  // Writes the panels, each `stride` bytes after the one before, to zeros.
  void pack(uint8_t* out, size_t stride) const {
    const size_t block_size = chunks_per_block_ * kChunk;
    const auto* weights = static_cast<const uint8_t*>(weight_.data);
    for (size_t column = 0; column < num_outputs_; ++column) {
      // The bytes of a quad of nibbles, a factor and a bias are as many.
      uint8_t* to = out + column / kPanel4 * stride + column % kPanel4 * kQuad;
      for (size_t block = 0; block < num_blocks_; ++block) {
        const size_t first = block * block_size;
        const size_t left = num_inputs_ - first, size = left < block_size ? left : block_size;
        const uint8_t* in = weights + (column * num_blocks_ + block) * block_size / 2;
        for (size_t i = 0; i < size; ++i) {
          const int nibble = in[i / 2] >> (i % 2 * 4) & 15;
          const size_t octet = i / (2 * kQuad), high = i / kQuad % 2;
          to[octet * kPanel4 * kQuad + i % kQuad] |= static_cast<uint8_t>(nibble << (high * 4));
        }
        to += (size + kChunk - 1) / kChunk * kChunkBytes;
        const float factor = scale_.floats()[column * num_blocks_ + block] / kLargestInput;
        std::memcpy(to, &factor, sizeof(factor));
        to += kColumnBytes;
      }
      if (has_bias_) std::memcpy(to, bias_.floats() + column, sizeof(float));
    }
  }

  // Where they are from now on.
  void place(const uint8_t* panels, size_t stride) {
    panels_ = panels;
    stride_ = stride;
  }

  Prefetch panel(size_t index) const { return {panels_ + index * stride_, panel_bytes()}; }

  class Rows {
   public:
    Rows(const Int4Matrix& matrix, size_t num_rows)
        : matrix_(&matrix),
          values_(new int8_t[num_rows * row_bytes()]),
          peaks_(new float[num_rows * matrix.num_blocks_]),
          starts_(new int32_t[num_rows * matrix.num_blocks_]) {}

    void quantize(const Processor& processor, const float* row, size_t index) {
      const size_t size = matrix_->num_inputs_, first = index * matrix_->num_blocks_;
      int8_t* values = values_.get() + index * row_bytes();
      std::memset(values + size, 0, row_bytes() - size);
      processor.quantize_blocks(row, size, matrix_->chunks_per_block_ * kChunk, values,
                                peaks_.get() + first, starts_.get() + first);
    }

    BlockRows from(size_t index) const {
      const size_t first = index * matrix_->num_blocks_;
      return {values_.get() + index * row_bytes(), peaks_.get() + first, starts_.get() + first};
    }

   private:
    size_t row_bytes() const { return matrix_->num_chunks() * kChunk; }

    const Int4Matrix* matrix_;
    std::unique_ptr<int8_t[]> values_;
    std::unique_ptr<float[]> peaks_;
    std::unique_ptr<int32_t[]> starts_;
  };

  void multiply(const Processor& processor, const Rows& rows, size_t row, size_t num_rows,
                size_t panel, const Prefetch&, const Result& result) const {
    const uint8_t* weights = this->panel(panel).bytes;
    const uint8_t* biases = weights + panel_bytes() - kColumnBytes;
    const BlockPanel columns{weights, num_chunks(), chunks_per_block_,
                             has_bias_ ? reinterpret_cast<const float*>(biases) : nullptr};
    processor.multiply_blocks(rows.from(row), num_rows, columns, result);
  }

 private:
  static constexpr size_t kChunkBytes = kChunk * kPanel4 / 2;
  // A number for each column of a panel.
  static constexpr size_t kColumnBytes = kPanel4 * sizeof(float);
  static_assert(sizeof(float) == kQuad);

  bool has_bias_ = false;
  size_t num_inputs_ = 0, num_outputs_ = 0, num_blocks_ = 0, chunks_per_block_ = 0;
  Tensor weight_, scale_, bias_;  // while the operator is made
  const uint8_t* panels_ = nullptr;
  size_t stride_ = 0;
};

struct Linear4 : Projection<Int4Matrix, false, false> {
  static constexpr Signature kSignature = signature("Linear4");
  using Projection::Projection;
};

struct NormLinear4 : Projection<Int4Matrix, false, true> {
  static constexpr Signature kSignature = signature("NormLinear4");
  using Projection::Projection;
};

}  // namespace

const OrtCustomOp kLinear4Op = operator_table<Linear4>();
const OrtCustomOp kNormLinear4Op = operator_table<NormLinear4>();
