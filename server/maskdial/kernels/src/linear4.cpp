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
// NormLinear4 is to it what NormLinear is to Linear (linear.cpp).
//
// It takes the place of MatMulNBits with activations of 8 bits (accuracy level 4): each block of a
// row is quantized to int8, relative to its largest magnitude, and multiplied exactly. A row's sum
// over its blocks is always in the same order.
#include <cstring>

#include "linear.h"
#include "packed_bytes.h"
#include "projection.h"

namespace {

// A weight matrix as panels of kPanel4 columns of nibbles. What fills up the last panel, and the
// last chunk of inputs, is zero, as are the inputs there.
class Int4Matrix {
 public:
  static constexpr ElementType kType = kUint8;
  static constexpr size_t kColumns = kPanel4;

  Int4Matrix(const OrtApi& api, const OrtKernelInfo* info, size_t index, size_t num_given) {
    const int64_t num_inputs = int_attribute(api, info, "num_inputs");
    const Tensor weight = Tensor::constant(api, info, index, kType);
    if (num_inputs <= 0 || weight.dims.size() != 3 || weight.size() == 0) {
      throw Error("a weight of Linear4 must be a matrix in blocks");
    }
    num_inputs_ = static_cast<size_t>(num_inputs);
    num_outputs_ = weight.dim(0);
    num_blocks_ = weight.dim(1);
    const size_t block_size = 2 * weight.dim(2);
    if (block_size % kChunk != 0) throw Error("a block of Linear4 must be a multiple of 32");
    // Sums of larger ones could overflow.
    if (block_size > 65536) throw Error("a block of Linear4 has more than 65,536 inputs");
    if (num_blocks_ != (num_inputs_ + block_size - 1) / block_size) {
      throw Error("the blocks of Linear4 do not fit its number of inputs");
    }
    chunks_per_block_ = block_size / kChunk;
    const Tensor scale = Tensor::constant(api, info, index + 1, kFloat);
    if (scale.size() != num_outputs_ * num_blocks_) {
      throw Error("a scale of Linear4 does not fit its weight");
    }
    Tensor bias;
    if (num_given > index + 2) bias = Tensor::constant(api, info, index + 2, kFloat, true);
    if (bias.data != nullptr && bias.size() != num_outputs_) {
      throw Error("a bias of Linear4 does not fit its weight");
    }
    pack(static_cast<const uint8_t*>(weight.data), scale.floats(), bias.floats());
  }

  size_t num_inputs() const { return num_inputs_; }
  size_t num_outputs() const { return num_outputs_; }
  size_t num_chunks() const { return (num_inputs_ + kChunk - 1) / kChunk; }
  size_t num_panels() const { return (num_outputs_ + kPanel4 - 1) / kPanel4; }
  size_t panel_bytes() const { return num_chunks() * kChunk * kPanel4 / 2; }
  Ahead panel(size_t index) const {
    return {packed_.data() + index * panel_bytes(), panel_bytes()};
  }

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
                size_t panel, const Ahead&, const Result& result) const {
    const BlockPanel columns{packed_.data() + panel * panel_bytes(), num_chunks(),
                             chunks_per_block_, factors_.data() + panel * num_blocks_ * kPanel4,
                             biases_.empty() ? nullptr : biases_.data() + panel * kPanel4};
    processor.multiply_blocks(rows.from(row), num_rows, columns, result);
  }

 private:
  void pack(const uint8_t* weights, const float* scales, const float* biases) {
    const size_t padded = num_panels() * kPanel4;
    const size_t block_bytes = chunks_per_block_ * kChunk / 2;
    std::vector<uint8_t> packed(num_panels() * panel_bytes());
    factors_.resize(padded * num_blocks_);
    if (biases != nullptr) biases_.assign(biases, biases + num_outputs_);
    biases_.resize(biases != nullptr ? padded : 0);
    for (size_t column = 0; column < num_outputs_; ++column) {
      const size_t panel = column / kPanel4, lane = column % kPanel4;
      uint8_t* out = packed.data() + panel * panel_bytes() + lane * kQuad;
      const uint8_t* in = weights + column * num_blocks_ * block_bytes;
      for (size_t i = 0; i < num_inputs_; ++i) {
        const int nibble = in[i / 2] >> (i % 2 * 4) & 15;
        const size_t octet = i / (2 * kQuad), high = i / kQuad % 2;
        out[octet * kPanel4 * kQuad + i % kQuad] |= static_cast<uint8_t>(nibble << (high * 4));
      }
      for (size_t block = 0; block < num_blocks_; ++block) {
        factors_[(panel * num_blocks_ + block) * kPanel4 + lane] =
            scales[column * num_blocks_ + block] / kLargestInput;
      }
    }
    packed_ = PackedBytes(packed);
  }

  size_t num_inputs_ = 0, num_outputs_ = 0, num_blocks_ = 0, chunks_per_block_ = 0;
  PackedBytes packed_;
  std::vector<float> factors_;
  std::vector<float> biases_;
};

}  // namespace

const OrtCustomOp kLinear4Op = [] {
  OrtCustomOp table = projection_table<Int4Matrix, false, false>();
  table.GetName = [](const OrtCustomOp*) { return "Linear4"; };
  return table;
}();

const OrtCustomOp kNormLinear4Op = [] {
  OrtCustomOp table = projection_table<Int4Matrix, false, true>();
  table.GetName = [](const OrtCustomOp*) { return "NormLinear4"; };
  return table;
}();
