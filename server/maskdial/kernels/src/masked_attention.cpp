// The operator MaskedAttention(query, key, value, bias?, lengths, rows?, position_keys?, key_factors?,
//                             position_queries?, query_factors?, reaches?) -> y
//
//   query, key, value   float (batch, length, num_heads * head_size), texts padded to the right; or
//                       (tokens, 1, num_heads * head_size), texts one after the other (Pack)
//   rows                int64 (queries): which of the packed tokens the queries are of, if not of all;
//                       query is then (queries, 1, num_heads * head_size)
//   bias                float (3 * num_heads * head_size), added to query, key and value
//   lengths             int32 (batch): the tokens of each text, at least 1
//   position_keys,
//   position_queries    for scores by the distance of two tokens (DeBERTa), without a window: PositionTable
//                       of each head, of 2 * span + 1 columns, padded to whole blocks: int16, with factors
//                       float (num_heads, columns), if numbers are rounded to 12 bits, else float.
//                       Column span + n is for keys that come so far behind a query (of position_keys), or
//                       queries behind a key (of position_queries), that n is the last one of `reaches`
//                       within their distance; column span - n, for those as far before.
//   reaches             int32 (span + 1), ascending from 0
//   y                   like query; zeros where it is padded
//   num_heads, scale, window, packed, integers   attributes; scale 0 means 1 / sqrt(head_size); tokens
//                       see those less than window tokens away, all if it is 0; with integers,
//                       numbers are rounded to 12 bits where there is no window
//
// A text's results depend on its own tokens only.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "operator.h"
#include "operators.h"
#include "processor.h"
#include "scratch.h"
#include "tensor.h"

namespace {

// Queries per task: many, since each task copies and transposes the text's keys, which takes about as long as
// attention from kKeyQueries queries.
constexpr size_t kTaskQueries = 512, kLeastQueries = 16, kKeyQueries = 24;

class MaskedAttention {
 public:
  static constexpr Signature kSignature{
      "MaskedAttention",
      {kFloat, kFloat, kFloat, optional(kFloat), kInt32, optional(kInt64), optional(kAnyType),
       optional(kFloat), optional(kAnyType), optional(kFloat), optional(kInt32)},
      {kFloat}};

  MaskedAttention(const OrtApi& api, const OrtKernelInfo* info)
      : api_(api), processor_(required_processor()), num_threads_(session_threads(api, info)) {
    const int64_t heads = int_attribute(api, info, "num_heads");
    if (heads < 1) throw Error("num_heads of MaskedAttention must be positive");
    heads_ = static_cast<size_t>(heads);
    scale_ = float_attribute(api, info, "scale");
    const int64_t window = int_attribute(api, info, "window");
    if (window < 0) throw Error("the window of MaskedAttention must not be negative");
    window_ = static_cast<size_t>(window);
    packed_ = int_attribute(api, info, "packed") != 0;
    integers_ = int_attribute(api, info, "integers") != 0 && window == 0;
  }

  void compute(OrtKernelContext* context) const {
    Pass pass = read(context);
    parallel<&Pass::attend>(api_, context, pass.blocks.size() * heads_, pass);
  }

 private:
  // Some queries, from the row `query` on, of a text, whose first token has the row `row` of keys and
  // values. The queries are those of the tokens from `start` on, or of any if all tokens are seen.
  struct Block {
    size_t query, count, row, length, start;
  };

  struct Pass {
    const MaskedAttention* op;
    const float *query, *key, *value, *bias;
    float* out;
    size_t columns, head_size;
    std::vector<Block> blocks{};
    Tensor tables[2]{}, factors[2]{};  // of keys and queries of positions
    size_t span = 0;
    std::vector<int32_t> by_distance{};  // a column each, from -(the longest text) on

    void attend(size_t task) const {
      const Block& block = blocks[task / op->heads_];
      const size_t head = task % op->heads_ * head_size;
      // Only these keys are copied and transposed.
      const size_t window = op->window_ != 0 ? op->window_ : block.length;
      const size_t from = block.start < window ? 0 : block.start + 1 - window;
      const size_t to = std::min(block.length, block.start + block.count - 1 + window);
      const size_t start = block.query * columns + head;
      const size_t text = (block.row + from) * columns + head;
      FullQueries queries = {
          query + start,
          key + text,
          value + text,
          columns,
          bias == nullptr ? nullptr : bias + head,
          bias == nullptr ? nullptr : bias + columns + head,
          bias == nullptr ? nullptr : bias + 2 * columns + head,
          block.count,
          block.start - from,
          to - from,
          window,
          head_size,
          op->scale_ != 0 ? op->scale_ : 1.0f / std::sqrt(static_cast<float>(head_size)),
          out + start,
      };
      const bool rounds = op->rounds(head_size);
      if (!by_distance.empty()) {
        queries.columns = by_distance.data() + (by_distance.size() - kLanes) / 2;
        queries.num_columns = 2 * span + 1;
        queries.keys_of_positions = table_of(0, task % op->heads_);
        queries.queries_of_positions = table_of(1, task % op->heads_);
      }
      const auto run = rounds ? op->processor_->attend_fully_int16 : op->processor_->attend_fully;
      run(queries, thread_scratch(queries.scratch()));
    }

    // The head's part of a table, each of which has as many bytes.
    PositionTable table_of(size_t which, size_t head) const {
      const Tensor &table = tables[which], &its = factors[which];
      if (table.data == nullptr) return {};
      const size_t bytes = table.size() * (table.type == kInt16 ? sizeof(int16_t) : sizeof(float));
      return {static_cast<const char*>(table.data) + head * (bytes / op->heads_),
              its.data == nullptr ? nullptr : its.floats() + head * (its.size() / op->heads_)};
    }
  };

  bool rounds(size_t head_size) const { return integers_ && head_size <= kMaxHeadSize; }

  Pass read(OrtKernelContext* context) const {
    const Tensor query = Tensor::input(api_, context, 0);
    const Tensor key = Tensor::input(api_, context, 1), value = Tensor::input(api_, context, 2);
    const Tensor bias = Tensor::input(api_, context, 3, true);
    const Tensor lengths = Tensor::input(api_, context, 4);
    const Tensor rows = Tensor::input(api_, context, 5, true);
    require(query.type == kFloat && key.type == kFloat && value.type == kFloat &&
                lengths.type == kInt32,
            "types");
    require(query.dims.size() == 3 && key.dims.size() == 3 && key.dims == value.dims &&
                query.dim(2) == key.dim(2) && lengths.dims.size() == 1,
            "shapes");
    if (!rows.given()) {
      require(query.dims == key.dims, "shapes");
    } else {
      require(packed_ && rows.type == kInt64 && rows.dims.size() == 1 &&
                  query.dim(0) == rows.size() && query.dim(1) == 1,
              "rows");
    }
    Pass pass{this, query.floats(), key.floats(), value.floats(), bias.floats(), nullptr,
              query.dim(2), query.dim(2) / heads_};
    require(pass.head_size > 0 && pass.head_size * heads_ == pass.columns, "head size");
    require(bias.data == nullptr || (bias.type == kFloat && bias.size() == 3 * pass.columns),
            "bias");
    const Tensor reaches = Tensor::input(api_, context, 10, true);
    if (reaches.given()) read_positions(context, reaches, pass);
    pass.out = Tensor::output(api_, context, 0, query.dims);
    require(packed_ ? key.dim(1) == 1 : key.dim(0) == lengths.dim(0), "batch");
    const auto* each = static_cast<const int32_t*>(lengths.data);
    if (!rows.given()) {
      divide(each, lengths.dim(0), key.dim(packed_ ? 0 : 1), pass);
    } else {
      divide_rows(each, lengths.dim(0), key.dim(0), static_cast<const int64_t*>(rows.data),
                  rows.size(), pass);
    }
    if (reaches.given()) fill_columns(each, lengths.dim(0), reaches, pass);
    return pass;
  }

  void read_positions(OrtKernelContext* context, const Tensor& reaches, Pass& pass) const {
    const auto* least = static_cast<const int32_t*>(reaches.data);
    require(window_ == 0 && reaches.type == kInt32 && reaches.size() > 1 && least[0] == 0,
            "reaches");
    pass.span = reaches.size() - 1;
    for (size_t n = 0; n < pass.span; ++n) require(least[n] < least[n + 1], "reaches");
    const bool integers = rounds(pass.head_size);
    const size_t num_columns = (2 * pass.span + kKeyBlock) / kKeyBlock * kKeyBlock;
    const size_t padded_size = (pass.head_size + kLanes - 1) / kLanes * kLanes;
    for (size_t which = 0; which < 2; ++which) {
      const Tensor table = Tensor::input(api_, context, 6 + 2 * which, true);
      const Tensor factors = Tensor::input(api_, context, 7 + 2 * which, true);
      if (!table.given()) continue;
      require(table.type == (integers ? kInt16 : kFloat) &&
                  table.size() == heads_ * num_columns * padded_size,
              "positions");
      require(!integers || (factors.given() && factors.size() == heads_ * num_columns), "factors");
      pass.tables[which] = table;
      pass.factors[which] = factors;
    }
  }

  // The column of each distance, and of some beyond, which are read and not used.
  static void fill_columns(const int32_t* lengths, size_t num_texts, const Tensor& reaches,
                           Pass& pass) {
    const auto longest = static_cast<size_t>(*std::max_element(lengths, lengths + num_texts));
    const auto* least = static_cast<const int32_t*>(reaches.data);
    pass.by_distance.resize(2 * longest + kLanes);
    int32_t* zero = pass.by_distance.data() + longest;
    size_t n = 0;
    for (size_t distance = 0; distance < longest + kLanes; ++distance) {
      while (n < pass.span && static_cast<size_t>(least[n + 1]) <= distance) ++n;
      zero[distance] = static_cast<int32_t>(pass.span + n);
      if (distance <= longest) *(zero - distance) = static_cast<int32_t>(pass.span - n);
    }
  }

  // Divides the texts into blocks, and clears the padding.
  void divide(const int32_t* lengths, size_t num_texts, size_t num_rows, Pass& pass) const {
    size_t longest = 1;
    for (size_t text = 0; text < num_texts; ++text) {
      require(lengths[text] > 0, "lengths");
      longest = std::max(longest, static_cast<size_t>(lengths[text]));
    }
    const size_t task_queries =
        best_size(std::min(kTaskQueries, longest), kLeastQueries, kKeyQueries, num_threads_,
                  [&](size_t size) {
                    size_t count = 0;
                    for (size_t text = 0; text < num_texts; ++text) {
                      count += (static_cast<size_t>(lengths[text]) + size - 1) / size;
                    }
                    return count * heads_;
                  });
    size_t row = 0;
    for (size_t text = 0; text < num_texts; ++text) {
      const size_t room = packed_ ? num_rows - row : num_rows;
      require(static_cast<size_t>(lengths[text]) <= room, "lengths");
      const auto length = static_cast<size_t>(lengths[text]);
      for (size_t start = 0; start < length; start += task_queries) {
        pass.blocks.push_back(
            {row + start, std::min(task_queries, length - start), row, length, start});
      }
      row += length;
      if (packed_) continue;
      std::memset(pass.out + row * pass.columns, 0,
                  (num_rows - length) * pass.columns * sizeof(float));
      row += num_rows - length;
    }
    require(!packed_ || row == num_rows, "lengths");
  }

  // The same for queries of some of num_tokens packed tokens, in any order. Those of a text that follow
  // one another share a block; through a window or with positions, only if their tokens do, too.
  void divide_rows(const int32_t* lengths, size_t num_texts, size_t num_tokens,
                   const int64_t* rows, size_t num_rows, Pass& pass) const {
    std::vector<size_t> ends;
    size_t end = 0;
    for (size_t text = 0; text < num_texts; ++text) {
      require(lengths[text] > 0, "lengths");
      ends.push_back(end += static_cast<size_t>(lengths[text]));
    }
    require(end == num_tokens, "lengths");
    const bool placed = window_ != 0 || pass.span != 0;
    for (size_t i = 0; i < num_rows; ++i) {
      require(rows[i] >= 0 && static_cast<size_t>(rows[i]) < num_tokens, "rows");
      const auto token = static_cast<size_t>(rows[i]);
      const size_t text = static_cast<size_t>(
          std::upper_bound(ends.begin(), ends.end(), token) - ends.begin());
      const size_t first = text == 0 ? 0 : ends[text - 1];
      if (!pass.blocks.empty()) {
        Block& last = pass.blocks.back();
        const bool follows = !placed || token == first + last.start + last.count;
        // Rows may be given twice; attention expects no more queries than tokens.
        if (last.row == first && follows && last.count < std::min(kTaskQueries, last.length)) {
          ++last.count;
          continue;
        }
      }
      pass.blocks.push_back({i, 1, first, ends[text] - first, placed ? token - first : 0});
    }
  }

  const OrtApi& api_;
  const Processor* processor_;
  size_t num_threads_, heads_, window_;
  float scale_;
  bool packed_, integers_;
};

}  // namespace

const OrtCustomOp kMaskedAttentionOp = operator_table<MaskedAttention>();
