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
// It computes what QuantizeLinear, MatMulIntegerToFloat and BiasGelu do, to the last bit.
#include "linear.h"

#include <algorithm>
#include <cstring>
#include <memory>

#include "operator.h"
#include "processor.h"
#include "tensor.h"

namespace {

constexpr size_t kAlignment = 64;
// A task should take longer than the threads need to take it.
constexpr size_t kTaskBytes = 64 * 1024;
constexpr size_t kRowsPerTask = 16;
// Many rows are several tasks, so that a narrow matrix, too, has work for many threads.
constexpr size_t kTilesPerTask = 8;

// A weight matrix as panels of kPanel columns; the last one is filled up with zeros.
class PackedMatrix {
 public:
  PackedMatrix(const int8_t* weights, size_t num_inputs, size_t num_outputs, bool transposed,
               const float* scales, const float* biases, float step)
      : num_outputs_(num_outputs), num_quads_((num_inputs + kQuad - 1) / kQuad) {
    const size_t padded = num_panels() * kPanel;
    storage_.resize(padded * num_quads_ * kQuad + kAlignment);
    const auto address = reinterpret_cast<uintptr_t>(storage_.data());
    weights_ = storage_.data() + (kAlignment - address % kAlignment) % kAlignment;
    factors_.resize(padded);
    corrections_.resize(padded);
    if (biases != nullptr) biases_.resize(padded);
    for (size_t column = 0; column < num_outputs; ++column) {
      int8_t* out = weights_ + column / kPanel * panel_bytes() + column % kPanel * kQuad;
      int32_t sum = 0;
      for (size_t i = 0; i < num_inputs; ++i) {
        const int8_t weight =
            transposed ? weights[column * num_inputs + i] : weights[i * num_outputs + column];
        if (weight == -128) throw Error("a weight of Linear is -128; the least is -127");
        sum += weight;
        out[i / kQuad * kPanel * kQuad + i % kQuad] = weight;
      }
      corrections_[column] = -128 * sum;
      factors_[column] = step * scales[column];
      if (biases != nullptr) biases_[column] = biases[column];
    }
  }

  size_t num_outputs() const { return num_outputs_; }
  size_t num_quads() const { return num_quads_; }
  size_t num_panels() const { return (num_outputs_ + kPanel - 1) / kPanel; }
  size_t panel_bytes() const { return num_quads_ * kQuad * kPanel; }
  size_t columns_of(size_t panel) const {
    return std::min(kPanel, num_outputs_ - panel * kPanel);
  }

  Panel panel(size_t index) const {
    const size_t column = index * kPanel;
    return {weights_ + index * panel_bytes(), num_quads_, factors_.data() + column,
            corrections_.data() + column, biases_.empty() ? nullptr : biases_.data() + column};
  }

 private:
  size_t num_outputs_, num_quads_;
  std::vector<int8_t> storage_;
  int8_t* weights_;
  std::vector<float> factors_;
  std::vector<int32_t> corrections_;
  std::vector<float> biases_;
};

class Linear {
 public:
  Linear(const OrtApi& api, const OrtKernelInfo* info) : api_(api), processor_(required_processor()) {
    step_ = float_attribute(api, info, "step");
    by_row_ = int_attribute(api, info, "by_row") != 0;
    if (!(step_ > 0)) throw Error("the step of Linear must be positive");
    gelu_ = int_attribute(api, info, "gelu") != 0;
    const bool transposed = int_attribute(api, info, "transposed") != 0;
    size_t num_inputs = 0;
    check(api, api.KernelInfo_GetInputCount(info, &num_inputs));
    first_ = pack(info, 1, num_inputs, transposed);
    if (num_inputs > 4) {
      if (gelu_) throw Error("a gated Linear has no GELU");
      up_ = pack(info, 4, num_inputs, transposed);
      if (up_->num_outputs() != first_->num_outputs()) {
        throw Error("the two weights of Linear have different numbers of outputs");
      }
    }
  }

  void compute(OrtKernelContext* context) const {
    const Tensor x = Tensor::input(api_, context, 0);
    if (x.type != kFloat) throw Error("the input of Linear must be float");
    if (x.dims.empty() || x.dims.back() != static_cast<int64_t>(num_inputs_)) {
      throw Error("the input of Linear does not have as many columns as its weight has rows");
    }
    std::vector<int64_t> dims = x.dims;
    dims.back() = static_cast<int64_t>(first_->num_outputs());
    Pass pass{this, x.floats(), Tensor::output<float>(api_, context, 0, dims), x.size() / num_inputs_};
    if (pass.num_rows == 0) return;
    pass.run(context);
  }

 private:
  // One call: first all rows are quantized, then each task multiplies them by some panels.
  struct Pass {
    const Linear* op;
    const float* x;
    float* out;
    size_t num_rows;
    std::unique_ptr<uint8_t[]> rows{};
    std::vector<float> peaks{};
    size_t tile_rows = 0, panels_per_task = 1, num_blocks = 1;

    void run(OrtKernelContext* context) {
      rows.reset(new uint8_t[num_rows * op->row_bytes()]);
      if (op->by_row_) peaks.resize(num_rows);
      if (num_rows <= kRowsPerTask) {
        quantize(0);
      } else {
        op->parallel(context, (num_rows + kRowsPerTask - 1) / kRowsPerTask, quantize_task, this);
      }
      const size_t num_tiles = (num_rows + kMostRows - 1) / kMostRows;
      tile_rows = (num_rows + num_tiles - 1) / num_tiles;
      const PackedMatrix& matrix = *op->first_;
      num_blocks = (num_tiles + kTilesPerTask - 1) / kTilesPerTask;
      const size_t work =
          matrix.panel_bytes() * (op->up_ ? 2 : 1) * std::min(num_tiles, kTilesPerTask);
      panels_per_task = std::max<size_t>(1, kTaskBytes / work);
      const size_t num_groups = (matrix.num_panels() + panels_per_task - 1) / panels_per_task;
      op->parallel(context, num_groups * num_blocks, multiply_task, this);
    }

    static void quantize_task(void* pass, size_t task) { static_cast<Pass*>(pass)->quantize(task); }
    static void multiply_task(void* pass, size_t task) { static_cast<Pass*>(pass)->multiply(task); }

    void quantize(size_t task) {
      const size_t last = std::min(num_rows, (task + 1) * kRowsPerTask);
      for (size_t r = task * kRowsPerTask; r < last; ++r) {
        const float* row = x + r * op->num_inputs_;
        uint8_t* quantized = rows.get() + r * op->row_bytes();
        // What fills up the last quad is multiplied by zeros.
        std::memset(quantized + op->row_bytes() - kQuad, 0, kQuad);
        if (op->by_row_) {
          peaks[r] = op->processor_->quantize_by_peak(row, op->num_inputs_, op->step_, quantized);
        } else {
          op->processor_->quantize(row, op->num_inputs_, op->step_, quantized);
        }
      }
    }

    void multiply(size_t task) {
      const size_t first = task / num_blocks * panels_per_task;
      const size_t last = std::min(op->first_->num_panels(), first + panels_per_task);
      const size_t first_row = task % num_blocks * kTilesPerTask * tile_rows;
      const size_t last_row = std::min(num_rows, first_row + kTilesPerTask * tile_rows);
      for (size_t panel = first; panel < last; ++panel) {
        for (size_t row = first_row; row < last_row; row += tile_rows) multiply(panel, row);
      }
    }

    void multiply(size_t panel, size_t row) {
      const Processor& processor = *op->processor_;
      const size_t some = std::min(tile_rows, num_rows - row);
      const size_t stride = op->first_->num_outputs(), columns = op->first_->columns_of(panel);
      const uint8_t* quantized = rows.get() + row * op->row_bytes();
      const float* row_peaks = op->by_row_ ? peaks.data() + row : nullptr;
      float* result = out + row * stride + panel * kPanel;
      if (!op->up_) {
        processor.multiply(quantized, some, op->first_->panel(panel), row_peaks, result, stride,
                           columns);
        for (size_t r = 0; r < some && op->gelu_; ++r) {
          processor.gelu(result + r * stride, columns);
        }
        return;
      }
      float gates[kMostRows * kPanel];
      processor.multiply(quantized, some, op->first_->panel(panel), row_peaks, gates, kPanel,
                         columns);
      processor.multiply(quantized, some, op->up_->panel(panel), row_peaks, result, stride,
                         columns);
      for (size_t r = 0; r < some; ++r) {
        processor.gate(gates + r * kPanel, result + r * stride, columns);
      }
    }
  };

  size_t row_bytes() const { return first_->num_quads() * kQuad; }

  void parallel(OrtKernelContext* context, size_t num_tasks, void (*task)(void*, size_t),
                Pass* pass) const {
    if (num_tasks == 1) return task(pass, 0);
    check(api_, api_.KernelContext_ParallelFor(context, task, num_tasks, 0, pass));
  }

  // Packs inputs index to index + 2: weight, scale, and perhaps a bias.
  std::unique_ptr<PackedMatrix> pack(const OrtKernelInfo* info, size_t index, size_t num_inputs,
                                     bool transposed) {
    const Tensor weight = Tensor::constant(api_, info, index, kInt8);
    if (weight.dims.size() != 2 || weight.size() == 0) {
      throw Error("a weight of Linear must be a matrix");
    }
    const auto rows = static_cast<size_t>(weight.dims[transposed ? 1 : 0]);
    const auto columns = static_cast<size_t>(weight.dims[transposed ? 0 : 1]);
    if (num_inputs_ != 0 && rows != num_inputs_) {
      throw Error("the two weights of Linear have different numbers of inputs");
    }
    // A sum of more products of 8 bits could overflow.
    if (rows > 65536) throw Error("a weight of Linear has more than 65,536 inputs");
    num_inputs_ = rows;
    const Tensor scale = Tensor::constant(api_, info, index + 1, kFloat);
    if (scale.size() != columns) throw Error("a scale of Linear does not fit its weight");
    Tensor bias;
    if (num_inputs > index + 2) bias = Tensor::constant(api_, info, index + 2, kFloat, true);
    if (bias.data != nullptr && bias.size() != columns) {
      throw Error("a bias of Linear does not fit its weight");
    }
    return std::make_unique<PackedMatrix>(static_cast<const int8_t*>(weight.data), rows, columns,
                                          transposed, scale.floats(), bias.floats(), step_);
  }

  const OrtApi& api_;
  const Processor* processor_;
  float step_ = 0;
  bool by_row_ = false, gelu_ = false;
  size_t num_inputs_ = 0;
  std::unique_ptr<PackedMatrix> first_, up_;
};

}  // namespace

const OrtCustomOp kLinearOp = [] {
  OrtCustomOp table = operator_table<Linear>();
  table.GetName = [](const OrtCustomOp*) { return "Linear"; };
  table.GetInputType = [](const OrtCustomOp*, size_t i) { return i == 1 || i == 4 ? kInt8 : kFloat; };
  table.GetInputTypeCount = [](const OrtCustomOp*) -> size_t { return 7; };
  table.GetOutputTypeCount = [](const OrtCustomOp*) -> size_t { return 1; };
  table.GetInputCharacteristic = [](const OrtCustomOp*, size_t i) {
    return i < 3 ? kRequired : kOptional;
  };
  return table;
}();
