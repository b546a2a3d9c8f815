// The operator Linear4(x, weight, scale, bias?, zero?, minimum?, up_weight?, up_scale?, up_bias?,
// up_zero?, up_minimum?) -> y
//
//   x            float (..., num_inputs)
//   weight       uint8 (num_outputs, num_blocks, block_size / 2), two weights of 4 bits in a byte,
//                the first one low; constant
//   scale        float (num_outputs, num_blocks); constant
//   bias         float (num_outputs); constant
//   zero         uint8 (num_outputs, ceil(num_blocks / 2)), the weights that are zero, two in a byte, the
//                first one low; 8 without it; constant
//   minimum      float (num_blocks, num_outputs), in place of zero: subtracted from weight * scale; constant
//   up_*         the same for a second product; then y = silu(first) * second
//   num_inputs   attribute
//   gelu         attribute: 0 or 1; applies to a single product
//
// NormLinear4 adds and normalizes its input first, as NormLinear does (linear.cpp).
//
// It takes the place of MatMulNBits with activations of 8 bits (accuracy level 4): each block of a
// row is quantized to int8, relative to its largest magnitude, and multiplied exactly. A row's sum
// over its blocks is always in the same order.
#include <cmath>
#include <cstring>

#include "halves.h"
#include "operators.h"
#include "projection.h"

namespace {

// Writes up to kBlockGroup numbers, `stride` apart, as multiples up to 255 of a step; false if they are
// none of a step that gives the largest of them up to 6 bits.
bool find_step(const float* numbers, size_t stride, size_t count, float& step, uint8_t* multiples) {
  constexpr int kLargestMultiple = 63;
  float largest = 0;
  for (size_t i = 0; i < count; ++i) {
    const float number = numbers[i * stride];
    if (std::abs(number) > std::abs(largest)) largest = number;
  }
  if (!std::isfinite(largest)) return false;
  for (int multiple = kLargestMultiple; multiple > 0; --multiple) {
    step = largest / static_cast<float>(multiple);
    bool fits = step * static_cast<float>(multiple) == largest;
    for (size_t i = 0; i < count && fits; ++i) {
      const float number = numbers[i * stride];
      const float times = largest == 0 ? 0 : std::nearbyint(number / step);
      fits = times >= 0 && times <= 255 && times * step == number;
      multiples[i] = fits ? static_cast<uint8_t>(times) : 0;
    }
    if (fits) return true;
  }
  return false;
}

// A weight matrix as panels of kPanel4 columns of nibbles. The padding of the last panel and of
// the last chunk of inputs is zero, as are the inputs there. A panel is in memory as it is read: each
// block's weights and numbers, and perhaps biases. Scales are of 16 bits where that changes none, and
// scales and minima of bytes where groups of them are multiples of floats, as llama.cpp's Q4_K has them.
class Int4Matrix {
 public:
  static constexpr size_t kColumns = kPanel4;
  static constexpr std::array<Value, 5> kInputs = {kUint8, kFloat, optional(kFloat),
                                                   optional(kUint8), optional(kFloat)};

  Int4Matrix(const OrtApi& api, const OrtKernelInfo* info, size_t index, size_t num_given) {
    const int64_t num_inputs = int_attribute(api, info, "num_inputs");
    weight_ = Tensor::constant(api, info, index, kUint8);
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
    const auto given = [&](size_t offset, ElementType type) {
      if (num_given <= index + offset) return Tensor{};
      return Tensor::constant(api, info, index + offset, type, true);
    };
    bias_ = given(2, kFloat);
    has_bias_ = bias_.data != nullptr;
    if (has_bias_ && bias_.size() != num_outputs_) {
      throw Error("a bias of Linear4 does not fit its weight");
    }
    zero_ = given(3, kUint8);
    if (zero_.data != nullptr && zero_.size() != num_outputs_ * zero_stride()) {
      throw Error("the zeros of Linear4 do not fit its weight");
    }
    minimum_ = given(4, kFloat);
    if (minimum_.data != nullptr && minimum_.size() != scale_.size()) {
      throw Error("the minima of Linear4 do not fit its weight");
    }
    if (minimum_.data != nullptr) {
      if (zero_.data != nullptr) throw Error("a Linear4 has zeros or minima, not both");
      numbers_ = are_multiples() ? BlockNumbers::kByteMinimum : BlockNumbers::kFloatMinimum;
    } else {
      uint16_t half;
      const float *scales = scale_.floats(), *end = scales + scale_.size();
      const bool halves = std::all_of(scales, end, [&](float s) { return float_to_half(s, half); });
      numbers_ = halves ? BlockNumbers::kHalfZero : BlockNumbers::kFloatZero;
    }
  }

  size_t num_inputs() const { return num_inputs_; }
  size_t num_outputs() const { return num_outputs_; }
  size_t num_chunks() const { return (num_inputs_ + kChunk - 1) / kChunk; }
  size_t num_panels() const { return (num_outputs_ + kPanel4 - 1) / kPanel4; }
  size_t panel_bytes() const {
    return num_chunks() * kChunkBytes + num_blocks_ * number_bytes() + num_groups() * group_bytes() +
           (has_bias_ ? kBiasBytes : 0);
  }

  // Writes the panels, each `stride` bytes after the one before, to zeros.
  void pack(uint8_t* out, size_t stride) const {
    const size_t block_size = chunks_per_block_ * kChunk;
    const auto* weights = static_cast<const uint8_t*>(weight_.data);
    for (size_t column = 0; column < num_outputs_; ++column) {
      const size_t its = column % kPanel4;
      uint8_t* to = out + column / kPanel4 * stride;
      Group group;
      for (size_t block = 0; block < num_blocks_; ++block) {
        if (numbers_ == BlockNumbers::kByteMinimum && block % kBlockGroup == 0) {
          group = group_of(column, block);
          std::memcpy(to + its * sizeof(float), &group.scale_step, sizeof(float));
          std::memcpy(to + (kPanel4 + its) * sizeof(float), &group.minimum_step, sizeof(float));
          to += group_bytes();
        }
        const size_t first = block * block_size;
        const size_t left = num_inputs_ - first, size = left < block_size ? left : block_size;
        const uint8_t* in = weights + (column * num_blocks_ + block) * block_size / 2;
        for (size_t i = 0; i < size; ++i) {
          const int nibble = in[i / 2] >> (i % 2 * 4) & 15;
          const size_t octet = i / (2 * kQuad), high = i / kQuad % 2;
          to[(octet * kPanel4 + its) * kQuad + i % kQuad] |=
              static_cast<uint8_t>(nibble << (high * 4));
        }
        to += (size + kChunk - 1) / kChunk * kChunkBytes;
        if (numbers_ == BlockNumbers::kByteMinimum) {
          to[its] = group.scales[block % kBlockGroup];
          to[kPanel4 + its] = group.minima[block % kBlockGroup];
        } else {
          pack_numbers(column, block, to, its);
        }
        to += number_bytes();
      }
      if (has_bias_) std::memcpy(to + its * sizeof(float), bias_.floats() + column, sizeof(float));
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
    Rows(const Int4Matrix& matrix, size_t num_rows, bool)
        : matrix_(&matrix),
          values_(new int8_t[num_rows * row_bytes()]),
          steps_(new float[num_rows * matrix.num_blocks_]),
          sums_(new float[num_rows * matrix.num_blocks_]) {}

    void quantize(const Processor& processor, const float* row, size_t index, bool) {
      const size_t size = matrix_->num_inputs_, first = index * matrix_->num_blocks_;
      int8_t* values = values_.get() + index * row_bytes();
      std::memset(values + size, 0, row_bytes() - size);
      processor.quantize_blocks(row, size, matrix_->chunks_per_block_ * kChunk, values,
                                steps_.get() + first, sums_.get() + first);
    }

    BlockRows from(size_t index) const {
      const size_t first = index * matrix_->num_blocks_;
      return {values_.get() + index * row_bytes(), steps_.get() + first, sums_.get() + first};
    }

   private:
    size_t row_bytes() const { return matrix_->num_chunks() * kChunk; }

    const Int4Matrix* matrix_;
    std::unique_ptr<int8_t[]> values_;
    std::unique_ptr<float[]> steps_;
    std::unique_ptr<float[]> sums_;
  };

  void multiply(const Processor& processor, const Rows& rows, size_t row, size_t num_rows,
                size_t panel, const Prefetch&, const Result& result) const {
    const uint8_t* weights = this->panel(panel).bytes;
    const uint8_t* biases = weights + panel_bytes() - kBiasBytes;
    const BlockPanel columns{weights, num_chunks(), chunks_per_block_, numbers_,
                             has_bias_ ? reinterpret_cast<const float*>(biases) : nullptr};
    processor.multiply_blocks(rows.from(row), num_rows, columns, result);
  }

 private:
  static constexpr size_t kChunkBytes = kChunk * kPanel4 / 2;
  static constexpr size_t kBiasBytes = kPanel4 * sizeof(float);
  static constexpr uint8_t kMiddle = 8;

  size_t zero_stride() const { return (num_blocks_ + 1) / 2; }
  size_t number_bytes() const { return kPanel4 * bytes_per_column(numbers_); }
  size_t num_groups() const { return (num_blocks_ + kBlockGroup - 1) / kBlockGroup; }
  size_t group_bytes() const { return kPanel4 * group_bytes_per_column(numbers_); }

  // The scales and minima of some blocks of a column, as multiples of two steps.
  struct Group {
    bool fits = false;
    float scale_step = 0, minimum_step = 0;
    uint8_t scales[kBlockGroup] = {}, minima[kBlockGroup] = {};
  };

  Group group_of(size_t column, size_t block) const {
    Group group;
    const size_t count = std::min(kBlockGroup, num_blocks_ - block);
    group.fits = find_step(scale_.floats() + column * num_blocks_ + block, 1, count,
                           group.scale_step, group.scales) &&
                 find_step(minimum_.floats() + block * num_outputs_ + column, num_outputs_, count,
                           group.minimum_step, group.minima);
    return group;
  }

  bool are_multiples() const {
    for (size_t column = 0; column < num_outputs_; ++column) {
      for (size_t block = 0; block < num_blocks_; block += kBlockGroup) {
        if (!group_of(column, block).fits) return false;
      }
    }
    return true;
  }

  // Writes the numbers of a column, `its` in its panel.
  void pack_numbers(size_t column, size_t block, uint8_t* to, size_t its) const {
    const size_t index = column * num_blocks_ + block;
    const float scale = scale_.floats()[index];
    if (numbers_ == BlockNumbers::kHalfZero) {
      uint16_t half = 0;
      float_to_half(scale, half);
      std::memcpy(to + its * sizeof(half), &half, sizeof(half));
      to += kPanel4 * sizeof(half);
    } else {
      std::memcpy(to + its * sizeof(scale), &scale, sizeof(scale));
      to += kPanel4 * sizeof(scale);
    }
    if (numbers_ == BlockNumbers::kFloatMinimum) {
      const float* minima = minimum_.floats() + block * num_outputs_;
      std::memcpy(to + its * sizeof(float), minima + column, sizeof(float));
    } else if (zero_.data == nullptr) {
      to[its] = kMiddle;
    } else {
      const auto* zeros = static_cast<const uint8_t*>(zero_.data) + column * zero_stride();
      to[its] = zeros[block / 2] >> (block % 2 * 4) & 15;
    }
  }

  bool has_bias_ = false;
  BlockNumbers numbers_ = BlockNumbers::kFloatZero;
  size_t num_inputs_ = 0, num_outputs_ = 0, num_blocks_ = 0, chunks_per_block_ = 0;
  Tensor weight_, scale_, bias_, zero_, minimum_;  // while the operator is made
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
