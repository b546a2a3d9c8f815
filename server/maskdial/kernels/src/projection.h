// Products of the same rows and packed weights, with their activations, as one operator.
//
// A Matrix reads its inputs from `index` on (weight, scale, and perhaps a bias), says how large it
// is, packs them as panels of columns, and multiplies some of its Rows by a panel; Rows are quantized
// one by one. Every row is quantized once per pass, on the session's threads, as the products are
// computed. If the rows are the RMS norm of a sum, they are added and normalized one by one, too, and
// the sum is the first output. The last input, `adapters` (adapters.cpp), is optional: what a row's adapter
// adds to its product is computed from the row as it is before it is quantized.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <memory>
#include <utility>
#include <vector>

#include "adapters.h"
#include "operator.h"
#include "packed_bytes.h"
#include "processor.h"
#include "scratch.h"
#include "tensor.h"

// One product, silu(first) * second of two, or with kSeveral two or three with results of their own.
// With kNormed, residual and norm are inputs after x.
template <typename Matrix, bool kSeveral, bool kNormed>
class Projection {
 public:
  static constexpr size_t kMaxMatrices = kSeveral ? kMaxProducts : 2;
  static constexpr size_t kFirstProduct = kNormed ? 3 : 1;
  // The inputs of a product: weight, scale, and optional ones.
  static constexpr size_t kInputs = Matrix::kInputs.size();
  static constexpr size_t kAdapters = kFirstProduct + kMaxMatrices * kInputs;

  Projection(const OrtApi& api, const OrtKernelInfo* info)
      : api_(api), processor_(required_processor()), num_threads_(session_threads(api, info)) {
    gelu_ = int_attribute(api, info, "gelu") != 0;
    if (kNormed) epsilon_ = float_attribute(api, info, "epsilon");
    size_t num_given = 0;
    check(api, api.KernelInfo_GetInputCount(info, &num_given));
    adapts_ = num_given > kAdapters;
    if (adapts_) projections_ = AdaptedRows::products(api, info);
    for (size_t index = kFirstProduct; index < std::min(num_given, kAdapters); index += kInputs) {
      if (adapts_ && index > kFirstProduct && !Tensor::is_constant(api, info, index)) break;
      matrices_.push_back(std::make_unique<Matrix>(api, info, index, num_given));
      const Matrix &first = *matrices_[0], &last = *matrices_.back();
      if (last.num_inputs() != first.num_inputs() || last.block_size() != first.block_size()) {
        throw Error("the weights of Linear have different numbers of inputs, or blocks");
      }
      if (!kSeveral && last.num_outputs() != first.num_outputs()) {
        throw Error("the two weights of Linear have different numbers of outputs");
      }
      num_panels_ += last.num_panels();
    }
    if (adapts_ && projections_.size() != matrices_.size()) {
      throw Error("a Linear with adapters has as many projections as products");
    }
    if (gelu_ && matrices_.size() > 1) throw Error("a Linear of several products has no GELU");
    // The panels of gated products are read in turns, and so they follow one another in memory.
    const size_t num_together = kSeveral ? 1 : matrices_.size();
    for (size_t first = 0; first < matrices_.size(); first += num_together) {
      pack(first, first + num_together);
    }
  }

  void compute(OrtKernelContext* context) const {
    const size_t num_inputs = matrices_[0]->num_inputs();
    const Tensor x = Tensor::input(api_, context, 0);
    if (x.type != kFloat) throw Error("the input of Linear must be float");
    if (x.dims.empty() || x.dims.back() != static_cast<int64_t>(num_inputs)) {
      throw Error("the input of Linear does not have as many columns as its weight has rows");
    }
    const size_t num_rows = x.size() / num_inputs;
    AdaptedRows adapted;
    if (adapts_) adapted.read(Tensor::input(api_, context, kAdapters), projections_, num_rows);
    Pass pass{this, x.floats(), num_rows,
              typename Matrix::Rows(*matrices_[0], num_rows, adapted.any()), std::move(adapted)};
    if constexpr (kNormed) read_norm(context, x, pass);
    std::vector<int64_t> dims(x.dims.begin(), x.dims.end());
    for (size_t i = 0; i < (kSeveral ? matrices_.size() : 1); ++i) {
      dims.back() = static_cast<int64_t>(matrices_[i]->num_outputs());
      pass.out[i] = Tensor::output<float>(api_, context, i + (kNormed ? 1 : 0), dims);
    }
    if (num_rows > 0) pass.run(context);
  }

 protected:
  // The last product may be missing, and every bias.
  static constexpr Signature signature(const char* name) {
    Signature signature{name, {kFloat}, {kFloat}};
    if (kNormed) {
      signature.inputs.add(kFloat);  // residual
      signature.inputs.add(kFloat);  // norm
      signature.outputs.add(kFloat);
    }
    for (size_t product = 0; product < kMaxMatrices; ++product) {
      const Characteristic need = product < kMaxMatrices - 1 ? kRequired : kOptional;
      for (const Value& input : Matrix::kInputs) {
        signature.inputs.add({input.type, input.characteristic == kRequired ? need : kOptional});
      }
      if (kSeveral && product > 0) signature.outputs.add({kFloat, need});
    }
    signature.inputs.add(optional(kInt64));  // adapters
    return signature;
  }

 private:
  // A task should take longer than the threads need to take it, unless there are few for each.
  static constexpr size_t kTaskBytes = 64 * 1024;
  // A task quantizes this many floats, or one row.
  static constexpr size_t kFloatsPerTask = 8 * 1024;
  // Many rows are several tasks, so that a narrow matrix, too, has work for many threads, and a
  // task's rows stay in the cache.
  static constexpr size_t kRowsPerTask = 2 * kMaxRows;
  static constexpr size_t kTileRows = 8;
  // A task's work is the bytes of its weights, for each time that they are multiplied by so many rows.
  static constexpr size_t kWorkRows = 24;

  // One call: first all rows are quantized, then each task multiplies some by some panels. Panels of
  // several products are counted through; of gated ones, each is that of both.
  struct Pass {
    const Projection* op;
    const float* x;
    size_t num_rows;
    typename Matrix::Rows rows;
    AdaptedRows adapted;
    std::array<float*, kMaxMatrices> out{};
    const float *residual = nullptr, *norm = nullptr;
    float* sum = nullptr;
    size_t rows_per_quantization = 1, rows_per_task = 1, num_groups = 1;

    bool gated() const { return !kSeveral && op->matrices_.size() > 1; }

    size_t num_panels() const {
      return kSeveral ? op->num_panels_ : op->matrices_[0]->num_panels();
    }

    void run(OrtKernelContext* context) {
      const Matrix& matrix = *op->matrices_[0];
      rows_per_quantization = ::rows_per_task(
          num_rows, matrix.num_inputs(), kFloatsPerTask / matrix.num_inputs(), op->num_threads_);
      if (adapted.any()) rows_per_quantization = 1;
      parallel<&Pass::quantize>(
          op->api_, context, (num_rows + rows_per_quantization - 1) / rows_per_quantization, *this);
      divide();
      parallel<&Pass::multiply_group>(op->api_, context, num_groups * num_blocks(), *this);
    }

    size_t num_blocks() const { return (num_rows + rows_per_task - 1) / rows_per_task; }

    void divide() {
      const size_t blocks = (num_rows + kRowsPerTask - 1) / kRowsPerTask;
      // Whole tiles on every processor, but for the last one.
      size_t tiles = (num_rows + blocks * kTileRows - 1) / (blocks * kTileRows);
      rows_per_task = tiles * kTileRows;
      const size_t work = op->matrices_[0]->panel_bytes() * (gated() ? 2 : 1) *
                          ((rows_per_task + kWorkRows - 1) / kWorkRows);
      // An even number of groups, as large as each other: two threads end at the same time.
      const size_t num_pairs = (num_panels() * work + 2 * kTaskBytes - 1) / (2 * kTaskBytes);
      num_groups = std::min(num_panels(), 2 * num_pairs);
      const size_t wanted = kTasksPerThread * op->num_threads_;
      if (num_groups * blocks >= wanted) return;
      num_groups = num_panels();
      // A task reads its panel, which takes as long as multiplying a tile of rows by it.
      const auto span = [&] {
        return makespan(num_groups * num_blocks(), rows_per_task, kTileRows, op->num_threads_);
      };
      for (size_t best = rows_per_task, least = span(); tiles > 0; --tiles) {
        rows_per_task = tiles * kTileRows;
        if (span() < least) {
          best = rows_per_task;
          least = span();
        }
        if (tiles == 1) rows_per_task = best;
      }
    }

    void quantize(size_t task) {
      const size_t last = std::min(num_rows, (task + 1) * rows_per_quantization);
      const size_t size = op->matrices_[0]->num_inputs();
      for (size_t row = task * rows_per_quantization; row < last; ++row) {
        const float* values = x + row * size;
        if constexpr (kNormed) {
          float* normed = thread_scratch(size);
          op->processor_->add_rms_norm(values, residual + row * size, size, norm, op->epsilon_,
                                       sum + row * size, normed);
          values = normed;
        }
        rows.quantize(*op->processor_, values, row, adapted.has(row));
        if (adapted.any()) adapted.reduce(*op->processor_, values, row);
      }
    }

    // The tasks of the same rows follow one another: the weights are read ahead, the rows are not.
    void multiply_group(size_t task) {
      const size_t first_row = task / num_groups * rows_per_task;
      const size_t num_some = std::min(rows_per_task, num_rows - first_row);
      const size_t group = task % num_groups;
      const size_t first = group * num_panels() / num_groups;
      const size_t last = (group + 1) * num_panels() / num_groups;
      for (size_t panel = first; panel < last; ++panel) {
        size_t which = 0, its_panel = panel;
        while (its_panel >= op->matrices_[which]->num_panels()) {
          its_panel -= op->matrices_[which++]->num_panels();
        }
        multiply(which, its_panel, first_row, num_some);
      }
    }

    // The panel after another: that of the other product if they are gated, or the next one.
    Prefetch after(size_t which, size_t panel) const {
      const auto& matrices = op->matrices_;
      if (gated()) which = 1 - which;
      if (!gated() || which == 0) ++panel;
      if (panel < matrices[which]->num_panels()) return matrices[which]->panel(panel);
      if (kSeveral && which + 1 < matrices.size()) return matrices[which + 1]->panel(0);
      return {};
    }

    void multiply(size_t which, size_t panel, size_t first_row, size_t num_some) {
      const Matrix& matrix = *op->matrices_[which];
      const size_t stride = matrix.num_outputs(), column = panel * Matrix::kColumns;
      const size_t columns = std::min(Matrix::kColumns, stride - column);
      const size_t num_chunks = (num_some + kMaxRows - 1) / kMaxRows;
      float gates[kMaxRows * Matrix::kColumns], deltas[kMaxRows * Matrix::kColumns];
      for (size_t chunk = 0; chunk < num_chunks; ++chunk) {
        const size_t row = first_row + chunk * kMaxRows;
        const size_t some = std::min(kMaxRows, first_row + num_some - row);
        const auto put = [&](size_t index, Result result) {
          if (adapted.any()) {
            result.deltas = adapted.deltas(*op->processor_, index, row, some, column, columns,
                                           Matrix::kColumns, deltas);
            result.delta_stride = Matrix::kColumns;
          }
          Prefetch prefetch = after(index, panel);
          prefetch.size /= num_chunks;
          prefetch.bytes += chunk * prefetch.size;
          op->matrices_[index]->multiply(*op->processor_, rows, row, some, panel, prefetch, result);
        };
        Result result{out[which] + row * stride + column, stride, columns, op->gelu_};
        if (gated()) {
          put(0, {gates, Matrix::kColumns, columns});
          result.gates = gates;
          result.gate_stride = Matrix::kColumns;
        }
        put(gated() ? 1 : which, result);
      }
    }
  };

  // Puts the panels of some matrices into memory, the first of each, then the second, and so on.
  void pack(size_t first, size_t last) {
    while (!try_to_pack(first, last)) {
    }
    const size_t stride = stride_of(first, last);
    for (size_t i = first, offset = 0; i < last; offset += matrices_[i++]->panel_bytes()) {
      matrices_[i]->place(packed_.back().data() + offset, stride);
    }
  }

  // False if a matrix takes more room than it thought.
  bool try_to_pack(size_t first, size_t last) {
    const size_t stride = stride_of(first, last);
    std::array<std::atomic<bool>, kMaxMatrices> too_small{};
    const auto pack_panels = [&](uint8_t* bytes, size_t begin, size_t end) {
      for (size_t i = first, offset = 0; i < last; offset += matrices_[i++]->panel_bytes()) {
        if (!matrices_[i]->pack(bytes + offset, stride, begin, end)) too_small[i] = true;
      }
    };
    packed_.emplace_back(stride, matrices_[first]->num_panels(), num_threads_, pack_panels);
    bool fits = true;
    for (size_t i = first; i < last; ++i) {
      if (!too_small[i]) continue;
      matrices_[i]->widen();
      fits = false;
    }
    if (!fits) packed_.pop_back();
    return fits;
  }

  size_t stride_of(size_t first, size_t last) const {
    size_t stride = 0;
    for (size_t i = first; i < last; ++i) stride += matrices_[i]->panel_bytes();
    return stride;
  }

  void read_norm(OrtKernelContext* context, const Tensor& x, Pass& pass) const {
    const Tensor residual = Tensor::input(api_, context, 1), norm = Tensor::input(api_, context, 2);
    if (residual.type != kFloat || residual.dims != x.dims) {
      throw Error("the residual of NormLinear does not fit its input");
    }
    if (norm.type != kFloat || norm.size() != x.dim(x.dims.size() - 1)) {
      throw Error("the norm of NormLinear does not fit its input");
    }
    pass.residual = residual.floats();
    pass.norm = norm.floats();
    pass.sum = Tensor::output<float>(api_, context, 0, x.dims);
  }

  const OrtApi& api_;
  const Processor* processor_;
  size_t num_threads_;
  bool gelu_ = false, adapts_ = false;
  std::vector<size_t> projections_;
  float epsilon_ = 0;
  size_t num_panels_ = 0;
  std::vector<std::unique_ptr<Matrix>> matrices_;
  std::vector<PackedBytes> packed_;
};
