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
// The operator Linear8(x, weight, scale, bias?, minimum?, up_weight?, up_scale?, up_bias?, up_minimum?)
// -> y is the same with weights of 8 bits, uint8 (num_outputs, num_blocks, block_size), of which 128 is
// zero, in blocks of 16 or 32.
//
// NormLinear4 and NormLinear8 add and normalize their input first, as NormLinear does (linear.cpp).
//
// They take the place of MatMulNBits with activations of 8 bits (accuracy level 4): each block of a
// row is quantized to int8, relative to its largest magnitude, and multiplied exactly. A row's sum
// over its blocks is always in the same order.
#include <cmath>
#include <cstring>
#include <string>

#include "file_pages.h"
#include "halves.h"
#include "operators.h"
#include "projection.h"

namespace {

// The nearest integer to a number of a magnitude below 2^22, where std::nearbyint is a call.
inline float nearest(float number) {
  constexpr float kShift = 0x1.8p23f;  // floats are integers there
  return number + kShift - kShift;
}

// Writes up to kBlockGroup numbers, `stride` apart, as multiples up to 255 of a step; false if they are
// none of a step that gives the largest of them up to `max_multiple`.
bool find_step(const float* numbers, size_t stride, size_t count, int max_multiple, float& step,
               uint8_t* multiples) {
  float largest = 0;
  for (size_t i = 0; i < count; ++i) {
    const float number = numbers[i * stride];
    if (std::abs(number) > std::abs(largest)) largest = number;
  }
  if (!std::isfinite(largest)) return false;
  // Shares of the largest rule most multiples out. Each of the roundings below is of less than 2^-23 of a number
  // that is no multiple above 128, unless the step is subnormal, or the numbers are zeros.
  constexpr float kOff = 0x1p-13f, kLeast = 0x1p-100f;
  const bool rules_out = std::abs(largest) > kLeast;
  float shares[kBlockGroup] = {};
  for (size_t i = 0; i < count && rules_out; ++i) shares[i] = numbers[i * stride] / largest;
  for (int multiple = max_multiple; multiple > 0; --multiple) {
    const auto factor = static_cast<float>(multiple);
    bool fits = true;
    for (size_t i = 0; i < count && fits; ++i) {
      const float times = shares[i] * factor;
      fits = std::abs(times - nearest(times)) <= kOff;
    }
    if (!fits) continue;
    step = largest / factor;
    fits = step * factor == largest;
    for (size_t i = 0; i < count && fits; ++i) {
      const float number = numbers[i * stride];
      const float times = largest == 0 ? 0 : nearest(number / step);
      fits = times >= 0 && times <= 255 && times * step == number;
      multiples[i] = fits ? static_cast<uint8_t>(times) : 0;
    }
    if (fits) return true;
  }
  return false;
}

// A weight matrix as panels of kPanel4 columns of nibbles or bytes. The padding of the last panel and of
// the last chunk of inputs is zero, as are the inputs there. A panel is in memory as it is read: each
// block's weights and numbers, and perhaps biases. Scales are of 16 bits where that changes none, and
// scales and minima of bytes where groups of them are multiples of floats, as those of llama.cpp's _K
// types are.
template <size_t kBits>
class BlockMatrix {
  static constexpr bool kNibbles = kBits == 4;
  inline static const std::string kName = kNibbles ? "Linear4" : "Linear8";

 public:
  static constexpr size_t kColumns = kPanel4;
  static constexpr auto kInputs = [] {
    if constexpr (kNibbles) {
      return std::array<Value, 5>{kUint8, kFloat, optional(kFloat), optional(kUint8),
                                  optional(kFloat)};
    } else {
      return std::array<Value, 4>{kUint8, kFloat, optional(kFloat), optional(kFloat)};
    }
  }();

  BlockMatrix(const OrtApi& api, const OrtKernelInfo* info, size_t index, size_t num_given) {
    const int64_t num_inputs = int_attribute(api, info, "num_inputs");
    weight_ = Tensor::constant(api, info, index, kUint8);
    if (num_inputs <= 0 || weight_.dims.size() != 3 || weight_.size() == 0) {
      throw Error("a weight of " + kName + " must be a matrix in blocks");
    }
    num_inputs_ = static_cast<size_t>(num_inputs);
    num_outputs_ = weight_.dim(0);
    num_blocks_ = weight_.dim(1);
    const size_t block_size = weight_.dim(2) * 8 / kBits;
    if (kNibbles) {
      if (block_size % kChunk != 0) throw Error("a block of Linear4 must be a multiple of 32");
      // Sums of larger ones could overflow.
      if (block_size > 65536) throw Error("a block of Linear4 has more than 65,536 inputs");
    } else if (block_size != kChunk && block_size != kHalfChunk) {
      throw Error("a block of Linear8 must have 16 or 32 inputs");
    } else {
      chunk_size_ = block_size;
    }
    if (num_blocks_ != (num_inputs_ + block_size - 1) / block_size) {
      throw Error("the blocks of " + kName + " do not fit its number of inputs");
    }
    chunks_per_block_ = block_size / chunk_size_;
    scale_ = Tensor::constant(api, info, index + 1, kFloat);
    if (scale_.size() != num_outputs_ * num_blocks_) {
      throw Error("a scale of " + kName + " does not fit its weight");
    }
    const auto given = [&](size_t offset, ElementType type) {
      if (num_given <= index + offset) return Tensor{};
      return Tensor::constant(api, info, index + offset, type, true);
    };
    bias_ = given(2, kFloat);
    has_bias_ = bias_.data != nullptr;
    if (has_bias_ && bias_.size() != num_outputs_) {
      throw Error("a bias of " + kName + " does not fit its weight");
    }
    if (kNibbles) zero_ = given(3, kUint8);
    if (zero_.data != nullptr && zero_.size() != num_outputs_ * zero_stride()) {
      throw Error("the zeros of Linear4 do not fit its weight");
    }
    minimum_ = given(kNibbles ? 4 : 3, kFloat);
    if (minimum_.data != nullptr && minimum_.size() != scale_.size()) {
      throw Error("the minima of " + kName + " do not fit its weight");
    }
    if (minimum_.data != nullptr && zero_.data != nullptr) {
      throw Error("a Linear4 has zeros or minima, not both");
    }
    numbers_ = numbers();
  }

  size_t num_inputs() const { return num_inputs_; }
  size_t num_outputs() const { return num_outputs_; }
  size_t num_chunks() const { return (num_inputs_ + chunk_size_ - 1) / chunk_size_; }
  size_t num_panels() const { return (num_outputs_ + kPanel4 - 1) / kPanel4; }
  size_t panel_bytes() const {
    return num_chunks() * chunk_bytes() + num_blocks_ * number_bytes() + num_groups() * group_bytes() +
           (has_bias_ ? kBiasBytes : 0);
  }

  // Writes some of the panels, each `stride` bytes after the one before, to zeros.
  void pack(uint8_t* out, size_t stride, size_t first_panel, size_t last_panel) const {
    const size_t block_size = chunks_per_block_ * chunk_size_;
    const size_t last_column = std::min(last_panel * kPanel4, num_outputs_);
    for (size_t column = first_panel * kPanel4; column < last_column; ++column) {
      const size_t its = column % kPanel4;
      uint8_t* to = out + column / kPanel4 * stride;
      Group group;
      for (size_t block = 0; block < num_blocks_; ++block) {
        if (group_bytes() > 0 && block % kBlockGroup == 0) {
          group = group_of(column, block);
          std::memcpy(to + its * sizeof(float), &group.scale_step, sizeof(float));
          if (minimum_.data != nullptr) {
            std::memcpy(to + (kPanel4 + its) * sizeof(float), &group.minimum_step, sizeof(float));
          }
          to += group_bytes();
        }
        const size_t left = num_inputs_ - block * block_size;
        const size_t size = left < block_size ? left : block_size;
        pack_weights(column, block, size, to + its * kQuad);
        to += (size + chunk_size_ - 1) / chunk_size_ * chunk_bytes();
        if (group_bytes() > 0) {
          to[its] = group.scales[block % kBlockGroup];
          if (minimum_.data != nullptr) to[kPanel4 + its] = group.minima[block % kBlockGroup];
        } else {
          pack_numbers(column, block, to, its);
        }
        to += number_bytes();
      }
      if (has_bias_) std::memcpy(to + its * sizeof(float), bias_.floats() + column, sizeof(float));
    }
    forget_packed(first_panel, last_panel);
  }

  // Where they are from now on. The weight is not read again.
  void place(const uint8_t* panels, size_t stride) {
    panels_ = panels;
    stride_ = stride;
    forget_file_pages(weight_.data, weight_.size());
    forget_file_pages(scale_.data, scale_.size() * sizeof(float));
    if (minimum_.data != nullptr) forget_file_pages(minimum_.data, minimum_.size() * sizeof(float));
  }

  Prefetch panel(size_t index) const { return {panels_ + index * stride_, panel_bytes()}; }

  class Rows {
   public:
    Rows(const BlockMatrix& matrix, size_t num_rows, bool)
        : matrix_(&matrix),
          values_(new int8_t[num_rows * row_bytes()]),
          steps_(new float[num_rows * matrix.num_blocks_]),
          sums_(new float[num_rows * matrix.num_blocks_]) {}

    void quantize(const Processor& processor, const float* row, size_t index, bool) {
      const size_t size = matrix_->num_inputs_, first = index * matrix_->num_blocks_;
      int8_t* values = values_.get() + index * row_bytes();
      std::memset(values + size, 0, row_bytes() - size);
      processor.quantize_blocks(row, size, matrix_->chunks_per_block_ * matrix_->chunk_size_, values,
                                steps_.get() + first, sums_.get() + first);
    }

    BlockRows from(size_t index) const {
      const size_t first = index * matrix_->num_blocks_;
      return {values_.get() + index * row_bytes(), steps_.get() + first, sums_.get() + first};
    }

   private:
    size_t row_bytes() const { return matrix_->num_chunks() * matrix_->chunk_size_; }

    const BlockMatrix* matrix_;
    std::unique_ptr<int8_t[]> values_;
    std::unique_ptr<float[]> steps_;
    std::unique_ptr<float[]> sums_;
  };

  void multiply(const Processor& processor, const Rows& rows, size_t row, size_t num_rows,
                size_t panel, const Prefetch&, const Result& result) const {
    const uint8_t* weights = this->panel(panel).bytes;
    const uint8_t* biases = weights + panel_bytes() - kBiasBytes;
    const BlockPanel columns{weights, kBits, chunk_size_, num_chunks(), chunks_per_block_, numbers_,
                             has_bias_ ? reinterpret_cast<const float*>(biases) : nullptr};
    processor.multiply_blocks(rows.from(row), num_rows, columns, result);
  }

 private:
  static constexpr size_t kBiasBytes = kPanel4 * sizeof(float);
  static constexpr size_t kForgotten = 8 * 1024 * 1024;  // finding a mapping takes 0.1 ms
  static constexpr uint8_t kMiddle = 8, kMiddle8 = 128;
  // The most that the largest of a group may be of its step: scales and minima of Q4_K and Q5_K have 6
  // bits, scales of Q6_K 8 with a sign.
  static constexpr int kMaxMultiple = 63, kMaxMultiple8 = 128;

  size_t chunk_bytes() const { return chunk_size_ * kPanel4 * kBits / 8; }
  size_t zero_stride() const { return (num_blocks_ + 1) / 2; }
  size_t number_bytes() const { return kPanel4 * bytes_per_column(numbers_); }
  size_t num_groups() const { return (num_blocks_ + kBlockGroup - 1) / kBlockGroup; }
  size_t group_bytes() const { return kPanel4 * group_bytes_per_column(numbers_); }

  // The smallest form that changes no number.
  BlockNumbers numbers() const {
    if (minimum_.data != nullptr) {
      return are_multiples() ? BlockNumbers::kByteMinimum : BlockNumbers::kFloatMinimum;
    }
    if (!kNibbles && are_multiples()) return BlockNumbers::kByte;
    uint16_t half;
    const float *scales = scale_.floats(), *end = scales + scale_.size();
    const bool halves = std::all_of(scales, end, [&](float s) { return float_to_half(s, half); });
    if (kNibbles) return halves ? BlockNumbers::kHalfZero : BlockNumbers::kFloatZero;
    return halves ? BlockNumbers::kHalf : BlockNumbers::kFloat;
  }

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
                           kNibbles ? kMaxMultiple : kMaxMultiple8, group.scale_step, group.scales);
    if (group.fits && minimum_.data != nullptr) {
      group.fits = find_step(minimum_.floats() + block * num_outputs_ + column, num_outputs_, count,
                             kMaxMultiple, group.minimum_step, group.minima);
    }
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

  // Gives back what some panels were packed of, a few megabytes at a time: otherwise all of a large
  // matrix, such as an output layer, would be in memory twice.
  void forget_packed(size_t first_panel, size_t last_panel) const {
    const size_t row_bytes = weight_.size() / num_outputs_;
    const size_t step = std::max<size_t>(kForgotten / (row_bytes * kPanel4), 1);
    const size_t end = last_panel / step * step;
    if (first_panel / step == last_panel / step) return;
    const size_t first = (first_panel / step * step) * kPanel4;
    const size_t rows = std::min(end * kPanel4, num_outputs_) - first;
    const size_t scales = scale_.size() / num_outputs_ * sizeof(float);
    const auto forget = [&](const void* data, size_t bytes) {
      forget_file_pages(static_cast<const uint8_t*>(data) + first * bytes, rows * bytes);
    };
    forget(weight_.data, row_bytes);
    forget(scale_.data, scales);
    if (minimum_.data != nullptr) forget(minimum_.data, scales);
  }

  // Four nibbles, the lowest ones of a byte each.
  static uint32_t spread(uint32_t pairs) {
    const uint32_t apart = (pairs & 0xff) | (pairs & 0xff00) << 8;
    return (apart & 0x000f000f) | (apart & 0x00f000f0) << 4;
  }

  // Writes the first `size` weights of a column's block.
  void pack_weights(size_t column, size_t block, size_t size, uint8_t* to) const {
    const size_t block_bytes = chunks_per_block_ * chunk_size_ * kBits / 8;
    const auto* in = static_cast<const uint8_t*>(weight_.data) +
                     (column * num_blocks_ + block) * block_bytes;
    size_t i = 0;
    // Whole quads at a time, and of nibbles two, whose second one is the upper half
    if constexpr (kNibbles) {
      for (; i + 2 * kQuad <= size; i += 2 * kQuad) {
        uint16_t low, high;  // the pairs of either quad
        std::memcpy(&low, in + i / 2, sizeof(low));
        std::memcpy(&high, in + i / 2 + sizeof(low), sizeof(high));
        const uint32_t octet = spread(low) | spread(high) << 4;
        std::memcpy(to + i / (2 * kQuad) * kPanel4 * kQuad, &octet, sizeof(octet));
      }
    } else {
      for (; i + kQuad <= size; i += kQuad) {
        uint32_t quad;
        std::memcpy(&quad, in + i, sizeof(quad));
        quad ^= kMiddle8 * 0x01010101u;
        std::memcpy(to + i * kPanel4, &quad, sizeof(quad));
      }
    }
    for (; i < size; ++i) {
      if (kNibbles) {
        const int nibble = in[i / 2] >> (i % 2 * 4) & 15;
        const size_t octet = i / (2 * kQuad), high = i / kQuad % 2;
        to[octet * kPanel4 * kQuad + i % kQuad] |= static_cast<uint8_t>(nibble << (high * 4));
      } else {
        to[i / kQuad * kPanel4 * kQuad + i % kQuad] = in[i] ^ kMiddle8;  // less 128
      }
    }
  }

  // Writes the numbers of a column, `its` in its panel.
  void pack_numbers(size_t column, size_t block, uint8_t* to, size_t its) const {
    const size_t index = column * num_blocks_ + block;
    const float scale = scale_.floats()[index];
    if (numbers_ == BlockNumbers::kHalfZero || numbers_ == BlockNumbers::kHalf) {
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
    } else if (kNibbles && zero_.data == nullptr) {
      to[its] = kMiddle;
    } else if (kNibbles) {
      const auto* zeros = static_cast<const uint8_t*>(zero_.data) + column * zero_stride();
      to[its] = zeros[block / 2] >> (block % 2 * 4) & 15;
    }
  }

  bool has_bias_ = false;
  BlockNumbers numbers_ = BlockNumbers::kFloatZero;
  size_t num_inputs_ = 0, num_outputs_ = 0, num_blocks_ = 0;
  size_t chunk_size_ = kChunk, chunks_per_block_ = 0;
  Tensor weight_, scale_, bias_, zero_, minimum_;  // while the operator is made
  const uint8_t* panels_ = nullptr;
  size_t stride_ = 0;
};

struct Linear4 : Projection<BlockMatrix<4>, false, false> {
  static constexpr Signature kSignature = signature("Linear4");
  using Projection::Projection;
};

struct NormLinear4 : Projection<BlockMatrix<4>, false, true> {
  static constexpr Signature kSignature = signature("NormLinear4");
  using Projection::Projection;
};

struct Linear8 : Projection<BlockMatrix<8>, false, false> {
  static constexpr Signature kSignature = signature("Linear8");
  using Projection::Projection;
};

struct NormLinear8 : Projection<BlockMatrix<8>, false, true> {
  static constexpr Signature kSignature = signature("NormLinear8");
  using Projection::Projection;
};

}  // namespace

const OrtCustomOp kLinear4Op = operator_table<Linear4>();
const OrtCustomOp kNormLinear4Op = operator_table<NormLinear4>();
const OrtCustomOp kLinear8Op = operator_table<Linear8>();
const OrtCustomOp kNormLinear8Op = operator_table<NormLinear8>();
