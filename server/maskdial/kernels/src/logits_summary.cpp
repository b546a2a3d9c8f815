// The operator LogitsSummary(logits) -> best, max_logits, sum_exp
//
//   logits       float (..., vocabulary), at least one column
//   best         int64 (rows): the first index of the maximum
//   max_logits   float (rows): that logit; NaN if any is
//   sum_exp      double (rows): the sum of exp(logit - max_logit); 0 if the maximum is not finite
#include "operator.h"
#include "operators.h"
#include "processor.h"
#include "tensor.h"
#include "logits.h"

namespace {

class SummarizeLogits {
 public:
  static constexpr Signature kSignature{"LogitsSummary", {kFloat}, {kInt64, kFloat, kDouble}};

  SummarizeLogits(const OrtApi& api, const OrtKernelInfo*)
      : api_(api), processor_(required_processor()) {}

  void compute(OrtKernelContext* context) const {
    const Tensor logits = Tensor::input(api_, context, 0);
    if (logits.type != kFloat || logits.dims.empty() || logits.dims.back() == 0) {
      throw Error("the logits of LogitsSummary must be rows of floats");
    }
    const auto size = static_cast<size_t>(logits.dims.back());
    const size_t num_rows = logits.size() / size;
    const std::vector<int64_t> dims = {static_cast<int64_t>(num_rows)};
    auto* best = Tensor::output<int64_t>(api_, context, 0, dims);
    auto* max_logits = Tensor::output<float>(api_, context, 1, dims);
    auto* sum_exp = Tensor::output<double>(api_, context, 2, dims);
    Pass pass{processor_, logits.floats(), size, num_segments(size), {}};
    pass.summaries.resize(num_rows * pass.per_row);
    parallel<&Pass::summarize>(api_, context, pass.summaries.size(), pass);
    for (size_t row = 0; row < num_rows; ++row) {
      const LogitsSummary summary =
          merge_segments(pass.summaries.data() + row * pass.per_row, pass.per_row);
      best[row] = summary.best;
      max_logits[row] = summary.max_logit;
      sum_exp[row] = summary.sum_exp;
    }
  }

 private:
  struct Pass {
    const Processor* processor;
    const float* logits;
    size_t size, per_row;
    std::vector<LogitsSummary> summaries;

    void summarize(size_t task) {
      const float* row = logits + task / per_row * size;
      summaries[task] = summarize_segment(*processor, row, size, task % per_row);
    }
  };

  const OrtApi& api_;
  const Processor* processor_;
};

}  // namespace

const OrtCustomOp kLogitsSummaryOp = operator_table<SummarizeLogits>();
