// A product of quantized rows and packed weights, and what follows it, as one operator.
//
// A Matrix packs its inputs from `index` on (weight, scale, and perhaps a bias), says how large it
// is, and multiplies a tile of its Rows by a panel of columns; Rows are quantized one by one. Every
// row is quantized once per pass, on the session's threads, as the products are computed.
#pragma once

#include <algorithm>
#include <memory>
#include <vector>

#include "operator.h"
#include "processor.h"
#include "tensor.h"

template <typename Matrix>
class Projection {
 public:
  Projection(const OrtApi& api, const OrtKernelInfo* info)
      : api_(api), processor_(required_processor()) {
    gelu_ = int_attribute(api, info, "gelu") != 0;
    size_t num_given = 0;
    check(api, api.KernelInfo_GetInputCount(info, &num_given));
    first_ = std::make_unique<Matrix>(api, info, 1, num_given);
    if (num_given > 4) {
      if (gelu_) throw Error("a gated Linear has no GELU");
      up_ = std::make_unique<Matrix>(api, info, 4, num_given);
      if (up_->num_inputs() != first_->num_inputs()) {
        throw Error("the two weights of Linear have different numbers of inputs");
      }
      if (up_->num_outputs() != first_->num_outputs()) {
        throw Error("the two weights of Linear have different numbers of outputs");
      }
    }
  }

  void compute(OrtKernelContext* context) const {
    const Tensor x = Tensor::input(api_, context, 0);
    if (x.type != kFloat) throw Error("the input of Linear must be float");
    if (x.dims.empty() || x.dims.back() != static_cast<int64_t>(first_->num_inputs())) {
      throw Error("the input of Linear does not have as many columns as its weight has rows");
    }
    std::vector<int64_t> dims = x.dims;
    dims.back() = static_cast<int64_t>(first_->num_outputs());
    auto* out = Tensor::output<float>(api_, context, 0, dims);
    const size_t num_rows = x.size() / first_->num_inputs();
    if (num_rows == 0) return;
    Pass{this, x.floats(), out, num_rows, typename Matrix::Rows(*first_, num_rows)}.run(context);
  }

 private:
  // A task should take longer than the threads need to take it.
  static constexpr size_t kTaskBytes = 64 * 1024;
  static constexpr size_t kRowsPerTask = 16;
  // Many rows are several tasks, so that a narrow matrix, too, has work for many threads.
  static constexpr size_t kTilesPerTask = 8;

  // One call: first all rows are quantized, then each task multiplies them by some panels.
  struct Pass {
    const Projection* op;
    const float* x;
    float* out;
    size_t num_rows;
    typename Matrix::Rows rows;
    size_t tile_rows = 0, panels_per_task = 1, num_blocks = 1;

    void run(OrtKernelContext* context) {
      if (num_rows <= kRowsPerTask) {
        quantize(0);
      } else {
        op->parallel(context, (num_rows + kRowsPerTask - 1) / kRowsPerTask, quantize_task, this);
      }
      const size_t num_tiles = (num_rows + kMostRows - 1) / kMostRows;
      tile_rows = (num_rows + num_tiles - 1) / num_tiles;
      const Matrix& matrix = *op->first_;
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
      for (size_t row = task * kRowsPerTask; row < last; ++row) {
        rows.quantize(*op->processor_, x + row * op->first_->num_inputs(), row);
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
      const Matrix& matrix = *op->first_;
      const size_t some = std::min(tile_rows, num_rows - row);
      const size_t stride = matrix.num_outputs();
      const size_t columns = std::min(kPanel, stride - panel * kPanel);
      float* result = out + row * stride + panel * kPanel;
      if (!op->up_) {
        matrix.multiply(processor, rows, row, some, panel, result, stride, columns);
        for (size_t r = 0; r < some && op->gelu_; ++r) {
          processor.gelu(result + r * stride, columns);
        }
        return;
      }
      float gates[kMostRows * kPanel];
      matrix.multiply(processor, rows, row, some, panel, gates, kPanel, columns);
      op->up_->multiply(processor, rows, row, some, panel, result, stride, columns);
      for (size_t r = 0; r < some; ++r) {
        processor.gate(gates + r * kPanel, result + r * stride, columns);
      }
    }
  };

  void parallel(OrtKernelContext* context, size_t num_tasks, void (*task)(void*, size_t),
                Pass* pass) const {
    if (num_tasks == 1) return task(pass, 0);
    check(api_, api_.KernelContext_ParallelFor(context, task, num_tasks, 0, pass));
  }

  const OrtApi& api_;
  const Processor* processor_;
  bool gelu_ = false;
  std::unique_ptr<Matrix> first_, up_;
};

// Memory for packed weights, which begin at a multiple of a cache line.
class PackedBytes {
 public:
  explicit PackedBytes(size_t size) : storage_(size + kLine) {}

  uint8_t* data() {
    const auto address = reinterpret_cast<uintptr_t>(storage_.data());
    return storage_.data() + (kLine - address % kLine) % kLine;
  }
  const uint8_t* data() const { return const_cast<PackedBytes*>(this)->data(); }

 private:
  static constexpr size_t kLine = 64;
  std::vector<uint8_t> storage_;
};

// What both kinds of Linear take from ONNX Runtime in the same way.
template <typename Matrix>
OrtCustomOp projection_table() {
  OrtCustomOp table = operator_table<Projection<Matrix>>();
  table.GetInputType = [](const OrtCustomOp*, size_t i) {
    return i == 1 || i == 4 ? Matrix::kType : kFloat;
  };
  table.GetInputTypeCount = [](const OrtCustomOp*) -> size_t { return 7; };
  table.GetOutputTypeCount = [](const OrtCustomOp*) -> size_t { return 1; };
  table.GetInputCharacteristic = [](const OrtCustomOp*, size_t i) {
    return i < 3 ? kRequired : kOptional;
  };
  return table;
}
