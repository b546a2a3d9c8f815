// The operator Summary(logits) -> best, peaks, totals
//
//   logits   float (..., vocabulary), at least one column
//   best     int64 (rows): the first of the greatest
//   peaks    float (rows): that logit; not a number if any is not
//   totals   double (rows): the sum of e to the power of each one's distance from it; 0 if that is not
//            finite
#include "operator.h"
#include "operators.h"
#include "processor.h"
#include "tensor.h"
#include "vocabulary.h"

namespace {

class Summary {
 public:
  static constexpr Signature kSignature{"Summary", {kFloat}, {kInt64, kFloat, kDouble}};

  Summary(const OrtApi& api, const OrtKernelInfo*) : api_(api), processor_(required_processor()) {}

  void compute(OrtKernelContext* context) const {
    const Tensor logits = Tensor::input(api_, context, 0);
    if (logits.type != kFloat || logits.dims.empty() || logits.dims.back() == 0) {
      throw Error("the logits of Summary must be rows of floats");
    }
    const auto size = static_cast<size_t>(logits.dims.back());
    const size_t num_rows = logits.size() / size;
    const std::vector<int64_t> dims = {static_cast<int64_t>(num_rows)};
    auto* best = Tensor::output<int64_t>(api_, context, 0, dims);
    auto* peaks = Tensor::output<float>(api_, context, 1, dims);
    auto* totals = Tensor::output<double>(api_, context, 2, dims);
    Pass pass{processor_, logits.floats(), size, num_segments(size), {}};
    pass.summaries.resize(num_rows * pass.per_row);
    parallel<&Pass::summarize>(api_, context, pass.summaries.size(), pass);
    for (size_t row = 0; row < num_rows; ++row) {
      const RowSummary summary =
          join_segments(pass.summaries.data() + row * pass.per_row, pass.per_row);
      best[row] = summary.best;
      peaks[row] = summary.peak;
      totals[row] = summary.total;
    }
  }

 private:
  struct Pass {
    const Processor* processor;
    const float* logits;
    size_t size, per_row;
    std::vector<RowSummary> summaries;

    void summarize(size_t task) {
      const float* row = logits + task / per_row * size;
      summaries[task] = summarize_segment(*processor, row, size, task % per_row);
    }
  };

  const OrtApi& api_;
  const Processor* processor_;
};

}  // namespace

const OrtCustomOp kSummaryOp = operator_table<Summary>();
