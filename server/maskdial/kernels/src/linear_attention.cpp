// The operator LinearAttention(query, key, value, state, decay, beta?, new_tokens) -> y
//
//   query, key   float (1, tokens, key_heads * num_keys): all rows' new tokens one after the other
//   value        float (1, tokens, heads * columns); heads is a multiple of key_heads
//   state        float (batch, heads, num_keys, columns). New states are written to it, although it is an
//                input: no other code may read or write it meanwhile.
//   decay        float (1, tokens, heads or heads * num_keys): logarithms
//   beta         float (1, tokens, heads): the delta rule's
//   new_tokens   int32 (batch): the new tokens of each row; a row may have none
//   scale        attribute: of queries
//   epsilon      attribute: unless it is 0, queries and keys x become x / sqrt(sum(x * x) + epsilon)
//   y            like value
//
// It computes what ONNX Runtime's LinearAttention does with the rules "gated" and "gated_delta"
// (docs/ContribOperators.md), token by token: a row's results depend on its own tokens only, and are the
// same however its tokens are divided between calls.
#include <algorithm>

#include "operator.h"
#include "operators.h"
#include "processor.h"
#include "rows.h"
#include "scratch.h"
#include "tensor.h"

namespace {

// Heads of one column are short, so a task has several.
constexpr size_t kTaskHeads = 64;

class LinearAttention {
 public:
  static constexpr Signature kSignature{
      "LinearAttention",
      {kFloat, kFloat, kFloat, kFloat, kFloat, optional(kFloat), kInt32},
      {kFloat}};

  LinearAttention(const OrtApi& api, const OrtKernelInfo* info)
      : api_(api), processor_(required_processor()) {
    scale_ = float_attribute(api, info, "scale");
    epsilon_ = float_attribute(api, info, "epsilon");
  }

  void compute(OrtKernelContext* context) const {
    const Tensor query = Tensor::input(api_, context, 0), key = Tensor::input(api_, context, 1);
    const Tensor value = Tensor::input(api_, context, 2), state = Tensor::input(api_, context, 3);
    const Tensor decay = Tensor::input(api_, context, 4);
    const Tensor beta = Tensor::input(api_, context, 5, true);
    const Tensor new_tokens = Tensor::input(api_, context, 6);
    for (const Tensor* each : {&query, &key, &value, &decay}) {
      require(each->type == kFloat && each->dims.size() == 3, "types or ranks");
      require(each->dim(0) == 1 && each->dim(1) == value.dim(1), "tokens");
    }
    require(state.type == kFloat && state.dims.size() == 4, "state");
    Pass pass{this, query.floats(), key.floats(), value.floats(), decay.floats(), beta.floats(),
              static_cast<float*>(const_cast<void*>(state.data))};
    pass.heads = state.dim(1);
    pass.num_keys = state.dim(2);
    pass.columns = state.dim(3);
    require(pass.heads > 0 && pass.num_keys > 0 && pass.columns > 0, "state");
    require(value.dim(2) == pass.heads * pass.columns, "value");
    pass.key_heads = query.dim(2) / pass.num_keys;
    require(pass.key_heads > 0 && query.dim(2) == pass.key_heads * pass.num_keys &&
                key.dim(2) == query.dim(2) && pass.heads % pass.key_heads == 0,
            "query and key");
    pass.by_key = decay.dim(2) != pass.heads;
    require(!pass.by_key || decay.dim(2) == pass.heads * pass.num_keys, "decay");
    require(!beta.given() || (beta.type == kFloat && beta.dims.size() == 3 &&
                              beta.dim(1) == value.dim(1) && beta.dim(2) == pass.heads),
            "beta");
    pass.out = Tensor::output(api_, context, 0, value.dims);
    pass.rows = packed_rows(new_tokens, state.dim(0), value.dim(1));
    if (pass.columns == 1 && !beta.given() && epsilon_ == 0.0f) {
      parallel<&Pass::scan>(api_, context, pass.rows.size() * pass.scans_each(), pass);
    } else {
      parallel<&Pass::attend>(api_, context, pass.rows.size() * pass.heads, pass);
    }
  }

 private:
  struct Pass {
    const LinearAttention* op;
    const float *query, *key, *value, *decay, *beta;
    float* state;
    size_t heads = 0, key_heads = 0, num_keys = 0, columns = 0;
    bool by_key = false;
    float* out = nullptr;
    std::vector<PackedRow> rows{};

    size_t scans_each() const { return (heads + kTaskHeads - 1) / kTaskHeads; }

    void attend(size_t task) const {
      const LinearHead its = head_of(rows[task / heads], task % heads);
      op->processor_->attend_linearly(its, thread_scratch(its.scratch()));
    }

    void scan(size_t task) const {
      const size_t start = task % scans_each() * kTaskHeads;
      const size_t stop = std::min(heads, start + kTaskHeads);
      for (size_t head = start; head < stop; ++head) {
        const LinearHead its = head_of(rows[task / scans_each()], head);
        op->processor_->scan_channel(its, thread_scratch(its.scratch()));
      }
    }

    LinearHead head_of(const PackedRow& row, size_t head) const {
      const size_t key_stride = key_heads * num_keys, value_stride = heads * columns;
      const size_t num_decays = by_key ? num_keys : 1;
      const size_t at_key = row.first * key_stride + head / (heads / key_heads) * num_keys;
      const size_t at_value = row.first * value_stride + head * columns;
      return {
          .queries = query + at_key,
          .keys = key + at_key,
          .values = value + at_value,
          .decays = decay + (row.first * heads + head) * num_decays,
          .betas = beta == nullptr ? nullptr : beta + row.first * heads + head,
          .query_stride = key_stride,
          .key_stride = key_stride,
          .value_stride = value_stride,
          .decay_stride = heads * num_decays,
          .beta_stride = heads,
          .num_tokens = row.count,
          .num_keys = num_keys,
          .num_columns = columns,
          .decays_by_key = by_key,
          .scale = op->scale_,
          .epsilon = op->epsilon_,
          .state = state + (row.slot * heads + head) * num_keys * columns,
          .out = out + at_value,
          .out_stride = value_stride,
      };
    }
  };

  const OrtApi& api_;
  const Processor* processor_;
  float scale_, epsilon_;
};

}  // namespace

const OrtCustomOp kLinearAttentionOp = operator_table<LinearAttention>();
