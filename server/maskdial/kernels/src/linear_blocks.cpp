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
#include <span>
#include <string>
#include <vector>

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

// Writes up to kMaxGroup numbers, `stride` apart, as multiples of a step of 16 bits; false if they are none of
// a step of which the largest of them is a multiple between two.
bool find_step(const float* numbers, size_t stride, size_t count, int most, int least, uint16_t& step,
               uint8_t* multiples) {
  float largest = 0;
  for (size_t i = 0; i < count; ++i) {
    const float number = numbers[i * stride];
    if (std::abs(number) > std::abs(largest)) largest = number;
  }
  for (int multiple = most; multiple >= least; --multiple) {
    const auto factor = static_cast<float>(multiple);
    const float one = largest / factor;
    uint32_t bits;
    std::memcpy(&bits, &one, sizeof(bits));
    if ((bits & 0x1fff) != 0 && std::abs(one) >= 0x1p-14f) continue;  // most are ruled out here
    if (!float_to_half(one, step)) continue;
    bool fits = one * factor == largest;
    for (size_t i = 0; i < count && fits; ++i) {
      const float number = numbers[i * stride];
      const float times = largest == 0 ? 0 : nearest(number / one);
      fits = times >= 0 && times <= factor && times * one == number;
      multiples[i] = fits ? static_cast<uint8_t>(times) : 0;
    }
    if (fits) return true;
  }
  return false;
}

// A weight matrix as panels of kPanel4 columns. The padding of the last panel and of the last chunk of inputs
// is zero, as are the inputs there. A panel is in memory as it is read: each block's weights and numbers, and
// perhaps biases. Of the forms that change no number, it has the smallest one: those of GGUF's types have about as
// many bits as in the file.
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
    has_minima_ = minimum_.data != nullptr;
    if (has_minima_ && minimum_.size() != scale_.size()) {
      throw Error("the minima of " + kName + " do not fit its weight");
    }
    if (has_minima_ && zero_.data != nullptr) {
      throw Error("a Linear4 has zeros or minima, not both");
    }
    // Whole matrices are alike, so the first panel tells nearly always.
    std::vector<uint8_t> first(panel_bytes());
    while (!pack_some(first.data(), 0, 0, 1)) {
      widen();
      first.assign(panel_bytes(), 0);
    }
  }

  size_t num_inputs() const { return num_inputs_; }
  size_t num_outputs() const { return num_outputs_; }
  size_t block_size() const { return chunks_per_block_ * chunk_size_; }
  size_t num_chunks() const { return (num_inputs_ + chunk_size_ - 1) / chunk_size_; }
  size_t num_panels() const { return (num_outputs_ + kPanel4 - 1) / kPanel4; }
  size_t panel_bytes() const {
    return num_chunks() * chunk_bytes_of(form().weights) + num_blocks_ * form().number_bytes() +
           num_groups() * form().group_bytes() + (num_blocks_ + 1) / 2 * form().pair_bytes() +
           (has_bias_ ? kBiasBytes : 0);
  }

  // Writes some of the panels, each `stride` bytes after the one before, to zeros; false if they do not fit
  // the form, and `widen` has to be called before the next try.
  bool pack(uint8_t* out, size_t stride, size_t first_panel, size_t last_panel) const {
    if (!pack_some(out, stride, first_panel, last_panel)) return false;
    forget_packed(first_panel, last_panel);
    return true;
  }

  void widen() { ++form_; }

  // Where they are from now on. The weight is not read again.
  void place(const uint8_t* panels, size_t stride) {
    panels_ = panels;
    stride_ = stride;
    forget_file_pages(weight_.data, weight_.size());
    forget_file_pages(scale_.data, scale_.size() * sizeof(float));
    if (has_minima_) forget_file_pages(minimum_.data, minimum_.size() * sizeof(float));
  }

  Prefetch panel(size_t index) const { return {panels_ + index * stride_, panel_bytes()}; }

  class Rows {
   public:
    Rows(const BlockMatrix& matrix, size_t num_rows, bool)
        : matrix_(&matrix),
          values_(new int8_t[num_rows * row_bytes()]),
          steps_(new float[num_rows * matrix.num_blocks_ + kNumbersAtOnce]),
          sums_(new float[num_rows * matrix.num_blocks_ + kNumbersAtOnce]) {}

    void quantize(const Processor& processor, const float* row, size_t index, bool) {
      const size_t size = matrix_->num_inputs_, first = index * matrix_->num_blocks_;
      int8_t* values = values_.get() + index * row_bytes();
      std::memset(values + size, 0, row_bytes() - size);
      processor.quantize_blocks(row, size, matrix_->block_size(), values, steps_.get() + first,
                                sums_.get() + first);
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
    const BlockPanel columns{weights, form(), num_chunks(), chunks_per_block_,
                             has_bias_ ? reinterpret_cast<const float*>(biases) : nullptr};
    processor.multiply_blocks(rows.from(row), num_rows, columns, result);
  }

 private:
  static constexpr size_t kBiasBytes = kPanel4 * sizeof(float);
  static constexpr size_t kForgotten = 8 * 1024 * 1024;  // finding a mapping takes 0.1 ms
  static constexpr uint8_t kMiddle = 8, kMiddle8 = 128;
  // The most that the largest of a group may be of its step: scales and minima of Q4_K and Q5_K have 6
  // bits, scales of Q6_K 8 with a sign.
  static constexpr int kMaxMultiple = 63, kMaxMultiple8 = 127;

  size_t zero_stride() const { return (num_blocks_ + 1) / 2; }
  size_t num_groups() const { return (num_blocks_ + form().group_size() - 1) / form().group_size(); }

  // From the smallest one to the one that holds all numbers.
  std::span<const BlockForm> forms() const {
    using Weights = BlockWeights;
    using Numbers = BlockNumbers;
    static constexpr BlockForm kOfNibbles[] = {{Weights::kNibbles, Numbers::kHalfZero},
                                               {Weights::kNibbles, Numbers::kFloatZero}};
    static constexpr BlockForm kOfNibblesWithMinima[] = {{Weights::kNibbles, Numbers::kByteMinimum},
                                                         {Weights::kNibbles, Numbers::kHalfMinimum},
                                                         {Weights::kNibbles, Numbers::kFloatMinimum}};
    static constexpr BlockForm kOfBytes[] = {{Weights::kFives, Numbers::kHalf},
                                             {Weights::kBytes, Numbers::kByte},
                                             {Weights::kBytes, Numbers::kHalf},
                                             {Weights::kBytes, Numbers::kFloat}};
    static constexpr BlockForm kOfBytesWithMinima[] = {{Weights::kFives, Numbers::kByteMinimum},
                                                       {Weights::kFives, Numbers::kHalfMinimum},
                                                       {Weights::kBytes, Numbers::kFloatMinimum}};
    static constexpr BlockForm kOfHalfBytes[] = {{Weights::kSixes, Numbers::kByte},
                                                 {Weights::kHalfBytes, Numbers::kHalf},
                                                 {Weights::kHalfBytes, Numbers::kFloat}};
    static constexpr BlockForm kOfHalfBytesWithMinima[] = {
        {Weights::kSixes, Numbers::kByteMinimum}, {Weights::kHalfBytes, Numbers::kFloatMinimum}};
    if constexpr (kNibbles) {
      if (has_minima_) return kOfNibblesWithMinima;
      return kOfNibbles;
    } else if (chunk_size_ == kChunk) {
      if (has_minima_) return kOfBytesWithMinima;
      return kOfBytes;
    } else {
      if (has_minima_) return kOfHalfBytesWithMinima;
      return kOfHalfBytes;
    }
  }

  const BlockForm& form() const { return forms()[form_]; }

  bool pack_some(uint8_t* out, size_t stride, size_t first_panel, size_t last_panel) const {
    const size_t last_column = std::min(last_panel * kPanel4, num_outputs_);
    for (size_t column = first_panel * kPanel4; column < last_column; ++column) {
      if (!pack_column(column, out + column / kPanel4 * stride)) return false;
    }
    return true;
  }

  // Writes a column into its panel.
  bool pack_column(size_t column, uint8_t* to) const {
    const BlockForm form = this->form();
    const size_t its = column % kPanel4, block_size = this->block_size();
    Group group;
    uint8_t* pair = nullptr;
    for (size_t block = 0; block < num_blocks_; ++block) {
      const size_t index = block % form.group_size();
      if (form.group_bytes() > 0 && index == 0) {
        if (!find_steps(column, block, group)) return false;
        constexpr size_t kHalf = sizeof(uint16_t);
        std::memcpy(to + its * kHalf, &group.scale_step, kHalf);
        if (has_minima_) std::memcpy(to + (kPanel4 + its) * kHalf, &group.minimum_step, kHalf);
        to += form.group_bytes();
      }
      if (form.pair_bytes() > 0 && block % 2 == 0) {
        pair = to;
        to += form.pair_bytes();
      }
      const size_t left = num_inputs_ - block * block_size;
      const size_t size = left < block_size ? left : block_size;
      bool negative = group.scales[index] > kMaxMultiple8;
      if (!pack_weights(column, block, size, negative, to + its * kQuad)) return false;
      to += (size + chunk_size_ - 1) / chunk_size_ * chunk_bytes_of(form.weights);
      if (form.numbers == BlockNumbers::kByte) {
        const int scale = group.scales[index];
        pair[block % 2 * kPanel4 + its] = static_cast<uint8_t>(negative ? -scale : scale);
      } else if (form.numbers == BlockNumbers::kByteMinimum) {
        to[its] = group.scales[index];
        to[kPanel4 + its] = group.minima[index];
      } else if (!pack_numbers(column, block, negative, to, its)) {
        return false;
      }
      to += form.number_bytes();
    }
    if (has_bias_) std::memcpy(to + its * sizeof(float), bias_.floats() + column, sizeof(float));
    return true;
  }

  // The scales and minima of some blocks of a column, as multiples of two steps of 16 bits.
  struct Group {
    uint16_t scale_step = 0, minimum_step = 0;
    uint8_t scales[kMaxGroup] = {}, minima[kMaxGroup] = {};
  };

  // Whether the negatives fit where the scale is that of no byte but -128.
  bool fit_negative(size_t column, size_t block, size_t count, const Group& group) const {
    const auto* in = static_cast<const uint8_t*>(weight_.data) +
                     (column * num_blocks_ + block) * chunk_size_;
    const int least = form().weights == BlockWeights::kSixes ? kMiddle8 - form().zero() : 0;
    for (size_t i = 0; i < count; ++i, in += chunk_size_) {
      if (group.scales[i] <= kMaxMultiple8) continue;
      if (std::any_of(in, in + chunk_size_, [&](uint8_t value) { return value <= least; })) return false;
    }
    return true;
  }

  bool find_steps(size_t column, size_t block, Group& group) const {
    const size_t count = std::min(form().group_size(), num_blocks_ - block);
    const float* scales = scale_.floats() + column * num_blocks_ + block;
    if (form().numbers == BlockNumbers::kByte) {
      // llama.cpp makes the largest scale -128 times a step.
      constexpr int kLargest = kMaxMultiple8 + 1;
      return (find_step(scales, 1, count, kLargest, kLargest, group.scale_step, group.scales) &&
              fit_negative(column, block, count, group)) ||
             find_step(scales, 1, count, kMaxMultiple8, 1, group.scale_step, group.scales);
    }
    const float* minima = minimum_.floats() + block * num_outputs_ + column;
    return find_step(scales, 1, count, kMaxMultiple, 1, group.scale_step, group.scales) &&
           find_step(minima, num_outputs_, count, kMaxMultiple, 1, group.minimum_step, group.minima);
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
    if (has_minima_) forget(minimum_.data, scales);
  }

  // Four nibbles, the lowest ones of a byte each.
  static uint32_t spread(uint32_t pairs) {
    const uint32_t apart = (pairs & 0xff) | (pairs & 0xff00) << 8;
    return (apart & 0x000f000f) | (apart & 0x00f000f0) << 4;
  }

  // Writes the first `size` weights of a column's block, or their negatives: if `negative`, which is set if
  // only those fit, and without minima.
  bool pack_weights(size_t column, size_t block, size_t size, bool& negative, uint8_t* to) const {
    const size_t block_bytes = block_size() * kBits / 8;
    const auto* in = static_cast<const uint8_t*>(weight_.data) +
                     (column * num_blocks_ + block) * block_bytes;
    if constexpr (kNibbles) {
      pack_nibbles(in, size, to);
      return true;
    } else {
      switch (form().weights) {
        case BlockWeights::kFives:
          return pack_chunk<BlockWeights::kFives>(in, size, negative, to);
        case BlockWeights::kSixes:
          return pack_chunk<BlockWeights::kSixes>(in, size, negative, to);
        case BlockWeights::kBytes:
          return pack_chunk<BlockWeights::kBytes>(in, size, negative, to);
        default:
          return pack_chunk<BlockWeights::kHalfBytes>(in, size, negative, to);
      }
    }
  }

  static void pack_nibbles(const uint8_t* in, size_t size, uint8_t* to) {
    size_t i = 0;
    // Two whole quads at a time, whose second one is the upper half
    for (; i + 2 * kQuad <= size; i += 2 * kQuad) {
      uint16_t low, high;  // the pairs of either quad
      std::memcpy(&low, in + i / 2, sizeof(low));
      std::memcpy(&high, in + i / 2 + sizeof(low), sizeof(high));
      const uint32_t octet = spread(low) | spread(high) << 4;
      std::memcpy(to + i / (2 * kQuad) * kRowBytes, &octet, sizeof(octet));
    }
    for (; i < size; ++i) {
      const int nibble = in[i / 2] >> (i % 2 * 4) & 15;
      const size_t octet = i / (2 * kQuad), high = i / kQuad % 2;
      to[octet * kRowBytes + i % kQuad] |= static_cast<uint8_t>(nibble << (high * 4));
    }
  }

  template <BlockWeights kWeights>
  bool pack_chunk(const uint8_t* in, size_t size, bool& negative, uint8_t* to) const {
    constexpr size_t kSize = chunk_size_of(kWeights);
    uint8_t values[kSize];
    if (size < kSize) {
      std::memset(values, kMiddle8, kSize);
      std::memcpy(values, in, size);
    } else {
      std::memcpy(values, in, kSize);
    }
    // What is 0 in the panel, and how many integers there are from there on; all of kBytes, with a sign
    constexpr bool kUnsigned = kWeights == BlockWeights::kFives || kWeights == BlockWeights::kSixes;
    const int first = kUnsigned ? kMiddle8 - form().zero() : 0;
    constexpr int kCount = kWeights == BlockWeights::kFives ? 32 : kUnsigned ? 64 : 256;
    uint8_t least = 255, most = 0;
    for (const uint8_t value : values) {
      least = std::min(least, value);
      most = std::max(most, value);
    }
    if (kUnsigned && !has_minima_) negative |= most >= first + kCount;
    const int end = 2 * kMiddle8;  // a value's negative is 256 minus the value
    if (negative && (end - most < first || end - least >= first + kCount)) return false;
    if (!negative && (least < first || most >= first + kCount)) return false;
    const auto sign = static_cast<uint8_t>(negative ? -1 : 1);
    const auto offset = static_cast<uint8_t>(kUnsigned ? first : kMiddle8);
    for (uint8_t& value : values) value = static_cast<uint8_t>(sign * value - offset);
    uint32_t quads[kSize / kQuad];
    std::memcpy(quads, values, kSize);
    // Some bits of the four bytes of a quad, moved to others
    const auto bits = [&](size_t quad, int from, uint32_t mask, int left) {
      return (quads[quad] >> from & mask * 0x01010101u) << left;
    };
    if constexpr (kWeights == BlockWeights::kSixes) {
      for (size_t i = 0; i < 3; ++i) quads[i] |= bits(3, 2 * static_cast<int>(i), 3, 6);
    } else if constexpr (kWeights == BlockWeights::kFives) {
      quads[0] |= bits(5, 0, 7, 5);
      quads[1] |= bits(5, 3, 3, 5) | bits(6, 0, 1, 7);
      quads[2] |= bits(6, 1, 7, 5);
      quads[3] |= bits(6, 4, 1, 5) | bits(7, 0, 3, 6);
      quads[4] |= bits(7, 2, 7, 5);
    }
    for (size_t i = 0; i < rows_of_chunk(kWeights); ++i) {
      std::memcpy(to + i * kRowBytes, quads + i, sizeof(quads[i]));
    }
    return true;
  }

  // Writes the numbers of a column, `its` in its panel, that are no multiples.
  bool pack_numbers(size_t column, size_t block, bool negative, uint8_t* to, size_t its) const {
    const auto write = [&](float number) {
      std::memcpy(to + its * sizeof(number), &number, sizeof(number));
      to += kPanel4 * sizeof(number);
      return true;
    };
    const auto write_half = [&](float number) {
      uint16_t half;
      if (!float_to_half(number, half)) return false;
      std::memcpy(to + its * sizeof(half), &half, sizeof(half));
      to += kPanel4 * sizeof(half);
      return true;
    };
    const float scale = scale_.floats()[column * num_blocks_ + block];
    switch (form().numbers) {
      case BlockNumbers::kFloatMinimum:
        return write(scale) && write(minimum_.floats()[block * num_outputs_ + column]);
      case BlockNumbers::kHalfMinimum:
        return write_half(scale) && write_half(minimum_.floats()[block * num_outputs_ + column]);
      case BlockNumbers::kFloat:
        return write(scale);
      case BlockNumbers::kHalf:
        return write_half(negative ? -scale : scale);
      default:
        break;
    }
    if (!(form().numbers == BlockNumbers::kHalfZero ? write_half(scale) : write(scale))) return false;
    to[its] = kMiddle;
    if (zero_.data != nullptr) {
      const auto* zeros = static_cast<const uint8_t*>(zero_.data) + column * zero_stride();
      to[its] = zeros[block / 2] >> (block % 2 * 4) & 15;
    }
    return true;
  }

  bool has_bias_ = false, has_minima_ = false;
  size_t form_ = 0;  // of `forms`
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
