// The operator CausalAttention(query, key?, value?, cached_key, cached_value, seqlens_k,
//                              total_sequence_length, cosines?, sines?, sinks?, new_tokens?,
//                              ahead?, rows?) -> y
//
//   query         float (batch, length, num_heads * head_size), or followed by key and value in
//                 the same rows, which are missing then
//   key, value    float (batch, length, kv_num_heads * head_size)
//   cached_*      float (batch, kv_num_heads, max_length, head_size)
//                 or, in Int8CausalAttention, int8 (..., 8 + head_size), and in Int16CausalAttention,
//                 int16 (..., 2 + head_size): see Int8Header and kInt16Header. New keys and values are
//                 written to them, although they are inputs: no other code may read or write them
//                 meanwhile.
//   seqlens_k     int32 (batch): the tokens of each row, the new ones included, less 1
//   total_sequence_length   int32: their maximum; equal to length if there are none before
//   cosines, sines          float (positions, at most head_size / 2), to rotate queries and keys
//   sinks         float (num_heads): for each head, the score of one more key, which has no value
//   new_tokens    int32 (batch): the new tokens of each row. The query is then (1, their sum, ...),
//                 all rows' tokens one after the other, without padding; a row may have none.
//   ahead         int32 (tokens), with new_tokens: how many of the tokens behind it in its row each token
//                 of the query sees as well; none sees less far than the one before it
//   rows          int64 (n), with new_tokens: the tokens of the query that attend, in any order. y is then
//                 (1, n, ...); keys and values of all are stored.
//   num_heads, kv_num_heads, scale   attributes
//   window        attribute: how many tokens one sees, itself included; 0 for all
//
// Inputs with a cache of floats are those of ONNX Runtime's GroupQueryAttention, whose other outputs are
// the same memory as the cache; here they are left out, since each output of each layer takes ONNX Runtime
// some tenths of a microsecond. A row's results depend on its own tokens only, and are the same however its
// tokens are divided between calls.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <type_traits>

#include "operator.h"
#include "operators.h"
#include "processor.h"
#include "scratch.h"
#include "tensor.h"

namespace {

// Rows per task: enough for a block of transposed keys, which takes as long as kKeyRows, to be worth its time.
constexpr size_t kTaskRows = 48, kKeyRows = 16;
// Threads that share a group's keys read them more than once, which pays for many.
constexpr size_t kSharedKeys = 256;
constexpr size_t kTokensPerTask = 16;

// Element is the type of the cache: float, int8_t or int16_t.
template <typename Element>
class Attention {
 public:
  Attention(const OrtApi& api, const OrtKernelInfo* info)
      : api_(api), processor_(required_processor()), num_threads_(session_threads(api, info)) {
    const int64_t heads = int_attribute(api, info, "num_heads");
    const int64_t kv_heads = int_attribute(api, info, "kv_num_heads");
    if (heads < 1 || kv_heads < 1 || heads % kv_heads != 0) {
      throw Error("num_heads of CausalAttention must be a multiple of kv_num_heads");
    }
    kv_heads_ = static_cast<size_t>(kv_heads);
    group_ = static_cast<size_t>(heads / kv_heads);
    scale_ = float_attribute(api, info, "scale");
    const int64_t window = int_attribute(api, info, "window");
    if (window < 0) throw Error("window of CausalAttention must not be negative");
    window_ = static_cast<size_t>(window);
  }

  void compute(OrtKernelContext* context) const {
    Pass pass = read(context);
    if (pass.num_tokens == 0) return;
    const size_t num_heads = pass.num_tokens * kv_heads_ * group_;
    pass.queries.reset(new Query[num_heads * pass.head_size]);
    if constexpr (kQuantized) pass.query_factors.reset(new float[num_heads]);
    pass.divide(std::max<size_t>(1, kTaskRows / group_));
    if (!pass.tasks_store) {
      parallel<&Pass::store_tokens>(
          api_, context, (pass.num_tokens + kTokensPerTask - 1) / kTokensPerTask, pass);
    }
    parallel<&Pass::attend>(api_, context, pass.tasks.size() * kv_heads_ * pass.num_parts, pass);
  }

 protected:
  static constexpr ElementType kCache = element_type<Element>;

  static constexpr Signature signature(const char* name) {
    return {name,
            {kFloat, optional(kFloat), optional(kFloat), kCache, kCache, kInt32, kInt32,
             optional(kFloat), optional(kFloat), optional(kFloat), optional(kInt32),
             optional(kInt32), optional(kInt64)},
            {kFloat}};
  }

 private:
  static constexpr bool kInt8Cache = std::is_same_v<Element, int8_t>;
  static constexpr bool kQuantized = !std::is_same_v<Element, float>;
  using Query = std::conditional_t<kInt8Cache, uint8_t, Element>;
  // The elements before a token's key or value in one head.
  static constexpr size_t kHeader = kInt8Cache ? sizeof(Int8Header) : kQuantized ? kInt16Header : 0;

  static size_t width(size_t head_size) { return kHeader + head_size; }

  // A row's new tokens are num_new tokens of the query from first on.
  struct Row {
    size_t first, num_new, num_past;
  };

  // Some new tokens of a row, which one thread attends from; the first one's results are those of the
  // token `out` of y.
  struct Task {
    size_t row, start, stop, out;
  };

  struct Pass {
    const Attention* op;
    size_t num_tokens;  // of the query, padding included
    size_t max_length, head_size, half;
    const float *query, *new_key, *new_value, *cosines, *sines, *sinks;
    size_t query_stride, new_stride;
    std::vector<Row> rows{};
    std::vector<Task> tasks{};
    bool all_attend = true;
    bool tasks_store = false;  // whether each task puts its own tokens into the cache
    size_t num_parts = 1;      // of a group's query heads, which attend as tasks of their own
    const int32_t* ahead = nullptr;  // null if no token sees a later one
    const int64_t* selected;  // those that attend otherwise
    size_t num_selected;
    float* out;
    Element *key, *value;
    // For each row [kv_heads][num_new][group][head_size]; and the same without the last.
    std::unique_ptr<Query[]> queries{};
    std::unique_ptr<float[]> query_factors{};

    size_t cache(size_t row, size_t head) const {
      return (row * op->kv_heads_ + head) * max_length * width(head_size);
    }

    // The place of a token's first query head among all of them.
    size_t place(const Row& row, size_t head, size_t token) const {
      return (row.first * op->kv_heads_ + head * row.num_new + token) * op->group_;
    }

    size_t out_stride() const { return op->kv_heads_ * op->group_ * head_size; }

    // Divides all tokens that attend into tasks. Those that see the most keys come first.
    void divide(size_t tokens_per_task) {
      if (all_attend) {
        size_t num_new = 0, max_new = 0;
        for (const Row& row : rows) {
          num_new += row.num_new;
          max_new = std::max(max_new, row.num_new);
        }
        tokens_per_task = best_size(std::min(tokens_per_task, std::max<size_t>(1, max_new)), 1,
                                    (kKeyRows + op->group_ - 1) / op->group_, op->num_threads_,
                                    [&](size_t size) { return count_tasks(size); });
        // No other task reads them, and there is no padding.
        tasks_store = max_new <= tokens_per_task && num_new == num_tokens;
        for (size_t row = 0; row < rows.size(); ++row) {
          for (size_t start = 0; start < rows[row].num_new; start += tokens_per_task) {
            const size_t stop = std::min(rows[row].num_new, start + tokens_per_task);
            tasks.push_back({row, start, stop, rows[row].first + start});
          }
        }
      } else {
        divide_selected(tokens_per_task);
      }
      const auto num_keys = [&](const Task& task) {
        return num_seen(task) - num_skipped(task);
      };
      std::stable_sort(tasks.begin(), tasks.end(), [&](const Task& a, const Task& b) {
        return num_keys(a) > num_keys(b);
      });
      const size_t num_threads = op->num_threads_, num_tasks = tasks.size() * op->kv_heads_;
      const bool single = std::all_of(tasks.begin(), tasks.end(), [](const Task& task) {
        return task.stop - task.start == 1;
      });
      if (!single || tasks.empty() || num_tasks >= num_threads || num_keys(tasks[0]) < kSharedKeys) return;
      num_parts = std::min(op->group_, (num_threads + num_tasks - 1) / num_tasks);
      if (num_parts > 1) tasks_store = false;
    }

    size_t count_tasks(size_t tokens_per_task) const {
      size_t count = 0;
      for (const Row& row : rows) count += (row.num_new + tokens_per_task - 1) / tokens_per_task;
      return count * op->kv_heads_;
    }

    // The same if some attend: a task's tokens follow one another.
    void divide_selected(size_t tokens_per_task) {
      for (size_t i = 0; i < num_selected; ++i) {
        const auto token = static_cast<size_t>(selected[i]);
        const size_t row = row_of(token), place = token - rows[row].first;
        const bool follows = i > 0 && tasks.back().row == row && tasks.back().stop == place &&
                             place - tasks.back().start < tokens_per_task;
        if (follows) {
          ++tasks.back().stop;
        } else {
          tasks.push_back({row, place, place + 1, i});
        }
      }
    }

    // The row of a token: of those that begin at the same one, all but the last have no new tokens.
    size_t row_of(size_t token) const {
      const auto after = std::upper_bound(
          rows.begin(), rows.end(), token, [](size_t t, const Row& row) { return t < row.first; });
      return static_cast<size_t>(after - rows.begin()) - 1;
    }

    // Puts some tokens' keys and values into the cache and their queries in order; padding, which
    // attends to nothing, becomes zero.
    void store_tokens(size_t task) const {
      const size_t last = std::min(num_tokens, (task + 1) * kTokensPerTask);
      for (size_t i = task * kTokensPerTask; i < last; ++i) {
        const size_t row = row_of(i);
        if (i < rows[row].first + rows[row].num_new) {
          for (size_t head = 0; head < op->kv_heads_; ++head) {
            store(row, i - rows[row].first, head);
          }
        } else {
          std::memset(out + i * out_stride(), 0, out_stride() * sizeof(float));
        }
      }
    }

    // The same for one key-value head of one of them.
    void store(size_t row, size_t token, size_t head) const {
      const size_t group = op->group_, size = head_size;
      const Row& its = rows[row];
      const size_t position = its.num_past + token, index = its.first + token;
      const size_t to = cache(row, head) + position * width(size);
      store_key(new_key + index * new_stride + head * size, position, key + to);
      store(new_value + index * new_stride + head * size, kMaxInt16Value, value + to);
      const float* queries_of = query + index * query_stride + head * group * size;
      for (size_t g = 0; g < group; ++g) {
        store_query(queries_of + g * size, position, place(its, head, token) + g);
      }
    }

    // `max_integer` is that of a cache of int16.
    void store(const float* head, int max_integer, Element* to) const {
      if constexpr (kInt8Cache) {
        op->processor_->cache_head(head, head_size, to);
      } else if constexpr (kQuantized) {
        const float factor = op->processor_->quantize_head_int16(
            head, head_size, static_cast<float>(max_integer), to + kHeader);
        std::memcpy(to, &factor, sizeof(factor));
      } else {
        std::memcpy(to, head, head_size * sizeof(float));
      }
    }

    void store_key(const float* head, size_t position, Element* to) const {
      if constexpr (kQuantized) {
        float rotated[kMaxHeadSize];
        rotate(head, position, rotated);
        store(rotated, max_int16_key(head_size), to);
      } else {
        rotate(head, position, to);
      }
    }

    void store_query(const float* head, size_t position, size_t index) const {
      Query* to = queries.get() + index * head_size;
      if constexpr (kQuantized) {
        float rotated[kMaxHeadSize];
        rotate(head, position, rotated);
        query_factors[index] = scale() * quantize(rotated, to);
      } else {
        rotate(head, position, to);
      }
    }

    float quantize(const float* query_head, Query* to) const {
      if constexpr (kInt8Cache) {
        return op->processor_->quantize_head(query_head, head_size, to);
      } else {
        const auto max_integer = static_cast<float>(max_int16_key(head_size));
        return op->processor_->quantize_head_int16(query_head, head_size, max_integer, to);
      }
    }

    float scale() const {
      return op->scale_ != 0 ? op->scale_ : 1.0f / std::sqrt(static_cast<float>(head_size));
    }

    void rotate(const float* head, size_t position, float* to) const {
      if (cosines == nullptr) {
        std::memcpy(to, head, head_size * sizeof(float));
        return;
      }
      op->processor_->rotate(head, head_size, cosines + position * half, sines + position * half,
                             half, to);
    }

    // Keys up to the last that its tokens see.
    size_t num_seen(const Task& task) const {
      const Row& row = rows[task.row];
      const size_t later =
          ahead == nullptr ? 0 : static_cast<size_t>(ahead[row.first + task.stop - 1]);
      return row.num_past + task.stop + later;
    }

    // Keys that come before all that its tokens see.
    size_t num_skipped(const Task& task) const {
      const size_t seen = rows[task.row].num_past + task.start + 1, window = op->window_;
      return window == 0 || seen <= window ? 0 : (seen - window) / kSkipStep * kSkipStep;
    }

    // The first keys of a task, or nothing if there is no such task. If another thread takes that task,
    // it finds them in a shared cache.
    Prefetch first_keys(size_t index) const {
      index /= num_parts;
      if (index >= tasks.size() * op->kv_heads_) return {};
      const Task& task = tasks[index / op->kv_heads_];
      const size_t skipped = num_skipped(task);
      const Element* keys =
          key + cache(task.row, index % op->kv_heads_) + skipped * width(head_size);
      const size_t num_keys = std::min(kKeyBlock, num_seen(task) - skipped);
      return {reinterpret_cast<const uint8_t*>(keys),
              num_keys * width(head_size) * sizeof(Element)};
    }

    void attend(size_t part) const {
      const size_t kv_heads = op->kv_heads_, size = head_size, index = part / num_parts;
      // With several parts, the task has a single token.
      const size_t begin = part % num_parts * op->group_ / num_parts;
      const size_t group = (part % num_parts + 1) * op->group_ / num_parts - begin;
      const Task& task = tasks[index / kv_heads];
      const size_t head = index % kv_heads;
      const Row& row = rows[task.row];
      for (size_t token = task.start; token < task.stop && tasks_store; ++token) {
        store(task.row, token, head);
      }
      const size_t first_head = head * op->group_ + begin;
      float* to = out + (task.out * kv_heads * op->group_ + first_head) * size;
      const size_t skipped = num_skipped(task);
      const Queries task_queries = {
          .num_rows = (task.stop - task.start) * group,
          .group = group,
          .head_size = size,
          .first_length = row.num_past + task.start + 1 - skipped,
          .window = op->window_,
          .ahead = ahead == nullptr ? nullptr : ahead + row.first + task.start,
          .sinks = sinks == nullptr ? nullptr : sinks + first_head,
          .out = to,
          .out_stride = out_stride(),
          .after = first_keys(part + 1),
      };
      float* scratch = thread_scratch(task_queries.scratch());
      const size_t first = place(row, head, task.start) + begin;
      const Query* heads = queries.get() + first * size;
      const size_t cached = cache(task.row, head) + skipped * width(size);
      if constexpr (kInt8Cache) {
        const Int8Head its = {heads, query_factors.get() + first, key + cached, value + cached};
        op->processor_->attend_int8(task_queries, its, scratch);
      } else if constexpr (kQuantized) {
        const Int16Head its = {heads, query_factors.get() + first, key + cached, value + cached};
        op->processor_->attend_int16(task_queries, its, scratch);
      } else {
        op->processor_->attend(task_queries, {heads, scale(), key + cached, value + cached},
                               scratch);
      }
    }
  };

  // Checks the inputs.
  Pass read(OrtKernelContext* context) const {
    const Tensor query = Tensor::input(api_, context, 0);
    const Tensor key = Tensor::input(api_, context, 3), value = Tensor::input(api_, context, 4);
    const Tensor seqlens = Tensor::input(api_, context, 5);
    const Tensor total = Tensor::input(api_, context, 6);
    require(query.type == kFloat && key.type == kCache && value.type == kCache &&
                seqlens.type == kInt32 && total.type == kInt32,
            "types");
    require(query.dims.size() == 3 && key.dims.size() == 4 && key.dims == value.dims, "ranks");
    Pass pass{};
    pass.op = this;
    pass.num_tokens = query.dim(0) * query.dim(1);
    pass.max_length = key.dim(2);
    require(key.dim(3) > width(0), "head size");
    pass.head_size = key.dim(3) - width(0);
    require(seqlens.size() == key.dim(0) && total.size() == 1 && key.dim(1) == kv_heads_,
            "batch sizes or heads");
    require(pass.head_size % kLanes == 0 && pass.head_size <= kMaxHeadSize, "head size");
    read_new(query, Tensor::input(api_, context, 1, true), Tensor::input(api_, context, 2, true),
             pass);
    pass.key = static_cast<Element*>(const_cast<void*>(key.data));
    pass.value = static_cast<Element*>(const_cast<void*>(value.data));
    const int32_t longest = *static_cast<const int32_t*>(total.data);
    require(longest >= 0, "total length");
    const auto* lengths = static_cast<const int32_t*>(seqlens.data);
    const Tensor new_tokens = Tensor::input(api_, context, 10, true);
    if (new_tokens.data == nullptr) {
      require(query.dim(0) == key.dim(0), "batch sizes");
      divide_padded(query.dim(1), static_cast<size_t>(longest) == query.dim(1), lengths,
                    key.dim(0), pass);
    } else {
      require(query.dim(0) == 1, "batch sizes");
      divide_packed(new_tokens, lengths, key.dim(0), pass);
    }
    read_ahead(Tensor::input(api_, context, 11, true), new_tokens, pass);
    read_selected(Tensor::input(api_, context, 12, true), new_tokens, pass);
    const Tensor sinks = Tensor::input(api_, context, 9, true);
    require(!sinks.given() || (sinks.type == kFloat && sinks.size() == kv_heads_ * group_), "sinks");
    pass.sinks = sinks.floats();
    read_rotation(Tensor::input(api_, context, 7, true), Tensor::input(api_, context, 8, true),
                  pass);
    const auto columns = static_cast<int64_t>(pass.out_stride());
    const int64_t length =
        pass.all_attend ? query.dims[1] : static_cast<int64_t>(pass.num_selected);
    pass.out = Tensor::output<float>(api_, context, 0, {query.dims[0], length, columns});
    return pass;
  }

  // The rows of a padded query. In a first pass, no tokens come before these, and padding follows.
  static void divide_padded(size_t length, bool first, const int32_t* lengths, size_t batch,
                            Pass& pass) {
    for (size_t i = 0; i < batch; ++i) {
      require(lengths[i] >= 0, "lengths");
      const size_t total = static_cast<size_t>(lengths[i]) + 1;
      require(first ? total <= length : total >= length, "lengths");
      add({i * length, first ? total : length, first ? 0 : total - length}, pass);
    }
  }

  // The rows of a query without padding.
  static void divide_packed(const Tensor& new_tokens, const int32_t* lengths, size_t batch,
                            Pass& pass) {
    require(new_tokens.type == kInt32 && new_tokens.size() == batch, "new tokens");
    const auto* counts = static_cast<const int32_t*>(new_tokens.data);
    size_t first = 0;
    for (size_t i = 0; i < batch; ++i) {
      require(counts[i] >= 0 && lengths[i] >= counts[i] - 1, "new tokens");
      const auto num_new = static_cast<size_t>(counts[i]);
      add({first, num_new, static_cast<size_t>(lengths[i] + 1) - num_new}, pass);
      first += num_new;
    }
    require(first == pass.num_tokens, "new tokens");
  }

  static void add(const Row& row, Pass& pass) {
    require(row.num_past + row.num_new <= pass.max_length, "lengths");
    pass.rows.push_back(row);
  }

  // Where the new tokens' queries, keys and values are.
  void read_new(const Tensor& query, const Tensor& key, const Tensor& value, Pass& pass) const {
    const size_t queries = kv_heads_ * group_ * pass.head_size;
    const size_t keys = kv_heads_ * pass.head_size;
    const bool packed = key.data == nullptr;
    require(packed == (value.data == nullptr), "key and value");
    require(query.dim(2) == (packed ? queries + 2 * keys : queries), "columns");
    pass.query = query.floats();
    pass.query_stride = query.dim(2);
    if (packed) {
      pass.new_stride = pass.query_stride;
      pass.new_key = pass.query + queries;
      pass.new_value = pass.new_key + keys;
      return;
    }
    const int64_t expected[] = {query.dims[0], query.dims[1], static_cast<int64_t>(keys)};
    const Dims dims(expected, std::size(expected));
    require(key.type == kFloat && value.type == kFloat && key.dims == dims && value.dims == dims,
            "key and value");
    pass.new_stride = keys;
    pass.new_key = key.floats();
    pass.new_value = value.floats();
  }

  static void read_ahead(const Tensor& ahead, const Tensor& new_tokens, Pass& pass) {
    if (!ahead.given()) return;
    require(new_tokens.data != nullptr && ahead.type == kInt32 && ahead.size() == pass.num_tokens,
            "tokens ahead");
    const auto* counts = static_cast<const int32_t*>(ahead.data);
    if (std::all_of(counts, counts + pass.num_tokens, [](int32_t count) { return count == 0; })) return;
    pass.ahead = counts;
    for (const Row& row : pass.rows) {
      size_t seen = 0;
      for (size_t token = 0; token < row.num_new; ++token) {
        const int32_t count = counts[row.first + token];
        require(count >= 0 && token + 1 + static_cast<size_t>(count) <= row.num_new, "tokens ahead");
        require(token + 1 + static_cast<size_t>(count) >= seen, "tokens ahead");
        seen = token + 1 + static_cast<size_t>(count);
      }
    }
  }

  static void read_selected(const Tensor& selected, const Tensor& new_tokens, Pass& pass) {
    if (!selected.given()) return;
    require(new_tokens.data != nullptr && selected.type == kInt64 && selected.dims.size() == 1,
            "rows");
    pass.all_attend = false;
    pass.selected = static_cast<const int64_t*>(selected.data);
    pass.num_selected = selected.size();
    for (size_t i = 0; i < pass.num_selected; ++i) {
      require(pass.selected[i] >= 0 && static_cast<size_t>(pass.selected[i]) < pass.num_tokens,
              "rows");
    }
  }

  void read_rotation(const Tensor& cosines, const Tensor& sines, Pass& pass) const {
    require((cosines.data == nullptr) == (sines.data == nullptr), "rotation");
    if (cosines.data == nullptr) return;
    require(cosines.type == kFloat && sines.type == kFloat && cosines.dims.size() == 2 &&
                cosines.dims == sines.dims && cosines.dim(1) * 2 <= pass.head_size,
            "rotation");
    for (const Row& row : pass.rows) {
      require(row.num_past + row.num_new <= cosines.dim(0), "positions");
    }
    pass.cosines = cosines.floats();
    pass.sines = sines.floats();
    pass.half = cosines.dim(1);
  }

  const OrtApi& api_;
  const Processor* processor_;
  size_t num_threads_, kv_heads_, group_, window_;
  float scale_;
};

struct CausalAttention : Attention<float> {
  static constexpr Signature kSignature = signature("CausalAttention");
  using Attention::Attention;
};

struct Int8CausalAttention : Attention<int8_t> {
  static constexpr Signature kSignature = signature("Int8CausalAttention");
  using Attention::Attention;
};

struct Int16CausalAttention : Attention<int16_t> {
  static constexpr Signature kSignature = signature("Int16CausalAttention");
  using Attention::Attention;
};

}  // namespace

const OrtCustomOp kAttentionOp = operator_table<CausalAttention>();
const OrtCustomOp kInt8AttentionOp = operator_table<Int8CausalAttention>();
const OrtCustomOp kInt16AttentionOp = operator_table<Int16CausalAttention>();
