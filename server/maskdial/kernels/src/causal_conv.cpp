// The operator CausalConv(x, state, taps, bias?, new_tokens) -> y
//
//   x            float (1, tokens, channels): all rows' new tokens one after the other
//   state        float (batch, num_taps - 1, channels): the inputs before them. The last ones are written
//                to it, although it is an input: no other code may read or write it meanwhile.
//   taps         float (num_taps * channels): the last ones are those of the token itself
//   bias         float (channels)
//   new_tokens   int32 (batch): the new tokens of each row; a row may have none
//   silu         attribute: whether y is the SiLU of the sum
//   y            like x
//
// A row's results depend on its own tokens only, and are the same however its tokens are divided between
// calls.
#include <algorithm>

#include "operator.h"
#include "operators.h"
#include "processor.h"
#include "rows.h"
#include "tensor.h"

namespace {

constexpr size_t kTaskChannels = 256;

class CausalConv {
 public:
  static constexpr Signature kSignature{
      "CausalConv", {kFloat, kFloat, kFloat, optional(kFloat), kInt32}, {kFloat}};

  CausalConv(const OrtApi& api, const OrtKernelInfo* info)
      : api_(api), processor_(required_processor()), silu_(int_attribute(api, info, "silu") != 0) {}

  void compute(OrtKernelContext* context) const {
    const Tensor x = Tensor::input(api_, context, 0), state = Tensor::input(api_, context, 1);
    const Tensor taps = Tensor::input(api_, context, 2);
    const Tensor bias = Tensor::input(api_, context, 3, true);
    const Tensor new_tokens = Tensor::input(api_, context, 4);
    require(x.type == kFloat && state.type == kFloat && taps.type == kFloat, "types");
    require(x.dims.size() == 3 && x.dim(0) == 1 && state.dims.size() == 3, "ranks");
    const size_t channels = x.dim(2), num_taps = state.dim(1) + 1;
    require(num_taps <= kMaxTaps && taps.size() == num_taps * channels, "taps");
    require(state.dim(2) == channels, "state");
    require(!bias.given() || (bias.type == kFloat && bias.size() == channels), "bias");
    Pass pass{this, x.floats(), taps.floats(), bias.floats(),
              static_cast<float*>(const_cast<void*>(state.data)),
              Tensor::output(api_, context, 0, x.dims),
              packed_rows(new_tokens, state.dim(0), x.dim(1)), channels, num_taps};
    parallel<&Pass::convolve>(api_, context, pass.rows.size() * pass.tasks_each(), pass);
  }

 private:
  struct Pass {
    const CausalConv* op;
    const float *x, *taps, *bias;
    float *state, *out;
    std::vector<PackedRow> rows;
    size_t channels, num_taps;

    size_t tasks_each() const { return (channels + kTaskChannels - 1) / kTaskChannels; }

    void convolve(size_t task) const {
      const PackedRow& row = rows[task / tasks_each()];
      const size_t channel = task % tasks_each() * kTaskChannels;
      const size_t start = row.first * channels + channel;
      op->processor_->convolve({
          .inputs = x + start,
          .num_tokens = row.count,
          .num_channels = std::min(kTaskChannels, channels - channel),
          .stride = channels,
          .taps = taps + channel,
          .biases = bias == nullptr ? nullptr : bias + channel,
          .num_taps = num_taps,
          .silu = op->silu_,
          .past = state + row.slot * (num_taps - 1) * channels + channel,
          .out = out + start,
      });
    }
  };

  const OrtApi& api_;
  const Processor* processor_;
  bool silu_;
};

}  // namespace

const OrtCustomOp kCausalConvOp = operator_table<CausalConv>();
