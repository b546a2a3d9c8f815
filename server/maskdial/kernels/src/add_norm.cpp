// The operator AddNorm(x, residual, weight, bias?) -> y
//
//   x, residual    float (..., columns), of one shape
//   weight, bias   float (columns)
//   y              the layer norm of each row of x + residual, like x
//   epsilon        attribute
#include <algorithm>

#include "operator.h"
#include "operators.h"
#include "processor.h"
#include "tensor.h"

namespace {

constexpr size_t kMaxTaskRows = 16;

class AddNorm {
 public:
  static constexpr Signature kSignature{
      "AddNorm", {kFloat, kFloat, kFloat, optional(kFloat)}, {kFloat}};

  AddNorm(const OrtApi& api, const OrtKernelInfo* info)
      : api_(api), processor_(required_processor()), num_threads_(session_threads(api, info)) {
    epsilon_ = float_attribute(api, info, "epsilon");
  }

  void compute(OrtKernelContext* context) const {
    const Tensor x = Tensor::input(api_, context, 0), residual = Tensor::input(api_, context, 1);
    const Tensor weight = Tensor::input(api_, context, 2);
    const Tensor bias = Tensor::input(api_, context, 3, true);
    require(x.type == kFloat && residual.type == kFloat && weight.type == kFloat, "types");
    require(!x.dims.empty() && x.dims == residual.dims, "shapes");
    const size_t columns = x.dim(x.dims.size() - 1);
    require(columns > 0 && weight.size() == columns, "weight");
    require(bias.data == nullptr || (bias.type == kFloat && bias.size() == columns), "bias");
    Pass pass{this, x.floats(), residual.floats(), weight.floats(), bias.floats(),
              Tensor::output(api_, context, 0, x.dims), x.size() / columns, columns};
    pass.task_rows = rows_per_task(pass.num_rows, columns, kMaxTaskRows, num_threads_);
    const size_t num_tasks = (pass.num_rows + pass.task_rows - 1) / pass.task_rows;
    parallel<&Pass::norm>(api_, context, num_tasks, pass);
  }

 private:
  struct Pass {
    const AddNorm* op;
    const float *x, *residual, *weight, *bias;
    float* out;
    size_t num_rows, columns, task_rows = 1;

    void norm(size_t task) const {
      const size_t last = std::min(num_rows, (task + 1) * task_rows);
      for (size_t row = task * task_rows; row < last; ++row) {
        const size_t start = row * columns;
        op->processor_->add_norm(x + start, residual + start, columns, weight, bias, op->epsilon_,
                                 out + start);
      }
    }
  };

  const OrtApi& api_;
  const Processor* processor_;
  size_t num_threads_;
  float epsilon_;
};

}  // namespace

const OrtCustomOp kAddNormOp = operator_table<AddNorm>();
