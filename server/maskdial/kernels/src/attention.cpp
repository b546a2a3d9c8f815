// The operator CausalAttention(query, key?, value?, past_key, past_value, seqlens_k,
//                              total_sequence_length, cosines?, sines?)
//                              -> y, present_key, present_value
//
//   query         float (batch, length, num_heads * head_size), or followed by key and value in
//                 the same rows, which are missing then
//   key, value    float (batch, length, kv_num_heads * head_size)
//   past_*        float (batch, kv_num_heads, max_length, head_size)
//                 or, in Int8CausalAttention, int8 (..., 8 + head_size): see Int8Header
//   seqlens_k     int32 (batch): the tokens of each row, the new ones included, less 1
//   total_sequence_length   int32: the most of them; equal to length if there are none before
//   cosines, sines          float (positions, at most head_size / 2), to rotate queries and keys
//   num_heads, kv_num_heads, scale   attributes
//
// Inputs and outputs with a cache of floats are those of ONNX Runtime's GroupQueryAttention. Past and present may be the
// same memory; otherwise the past is copied. A row's results depend on its own tokens only, and
// are the same however its tokens are divided between calls.
#include "attention.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <type_traits>

#include "operator.h"
#include "processor.h"
#include "tensor.h"

namespace {

// Rows per task: enough for a block of transposed keys to be worth its time.
constexpr size_t kTaskRows = 48;
constexpr size_t kTokensPerTask = 16;

// Element is what the cache consists of: float or int8_t.
template <typename Element>
class Attention {
 public:
  Attention(const OrtApi& api, const OrtKernelInfo* info)
      : api_(api), processor_(required_processor()) {
    const int64_t heads = int_attribute(api, info, "num_heads");
    const int64_t kv_heads = int_attribute(api, info, "kv_num_heads");
    if (heads < 1 || kv_heads < 1 || heads % kv_heads != 0) {
      throw Error("num_heads of CausalAttention must be a multiple of kv_num_heads");
    }
    kv_heads_ = static_cast<size_t>(kv_heads);
    group_ = static_cast<size_t>(heads / kv_heads);
    scale_ = float_attribute(api, info, "scale");
  }

  void compute(OrtKernelContext* context) const {
    Pass pass = read(context);
    if (pass.batch == 0 || pass.length == 0) return;
    const size_t num_heads = pass.batch * pass.length * kv_heads_ * group_;
    pass.queries.reset(new Query[num_heads * pass.head_size]);
    if constexpr (kQuantized) pass.query_factors.reset(new float[num_heads]);
    const size_t tokens = pass.batch * pass.length;
    parallel(context, (tokens + kTokensPerTask - 1) / kTokensPerTask, store_task, &pass);
    pass.tokens_per_task = std::max<size_t>(1, kTaskRows / group_);
    pass.tasks_per_head = (pass.length + pass.tokens_per_task - 1) / pass.tokens_per_task;
    parallel(context, pass.batch * kv_heads_ * pass.tasks_per_head, attend_task, &pass);
  }

 private:
  static constexpr ElementType kCache = element_type<Element>;
  static constexpr bool kQuantized = std::is_same_v<Element, int8_t>;
  using Query = std::conditional_t<kQuantized, uint8_t, float>;

  // The elements of a token's key or value in one head.
  static size_t width(size_t head_size) {
    return kQuantized ? sizeof(Int8Header) + head_size : head_size;
  }

  struct Pass {
    const Attention* op;
    size_t batch, length, max_length, past_max_length, head_size, half;
    const float *query, *new_key, *new_value, *cosines, *sines;
    const Element *past_key, *past_value;
    size_t query_stride, new_stride;
    const int32_t* seqlens;
    bool first;  // whether no tokens come before these
    float* out;
    Element *key, *value;
    std::unique_ptr<Query[]> queries{};  // [batch][kv_heads][length][group][head_size]
    std::unique_ptr<float[]> query_factors{};  // [batch][kv_heads][length][group]
    size_t tokens_per_task = 0, tasks_per_head = 0;

    size_t total(size_t row) const { return static_cast<size_t>(seqlens[row]) + 1; }
    size_t num_past(size_t row) const { return first ? 0 : total(row) - length; }
    // The new tokens of a row; padding follows them.
    size_t num_new(size_t row) const { return first ? total(row) : length; }

    size_t cache(size_t row, size_t head) const {
      return (row * op->kv_heads_ + head) * max_length * width(head_size);
    }

    // Puts some tokens' keys and values into the cache and their queries in order.
    void store(size_t task) const {
      const size_t last = std::min(batch * length, (task + 1) * kTokensPerTask);
      for (size_t i = task * kTokensPerTask; i < last; ++i) {
        const size_t row = i / length, token = i % length;
        if (token < num_new(row)) store(row, token);
      }
    }

    void store(size_t row, size_t token) const {
      const size_t kv_heads = op->kv_heads_, group = op->group_, size = head_size;
      const size_t position = num_past(row) + token;
      const float* from = query + (row * length + token) * query_stride;
      const float* keys = new_key + (row * length + token) * new_stride;
      const float* values = new_value + (row * length + token) * new_stride;
      for (size_t head = 0; head < kv_heads; ++head) {
        const size_t place = cache(row, head) + position * width(size);
        store_rotated(keys + head * size, position, key + place);
        store(values + head * size, value + place);
        const size_t first = ((row * kv_heads + head) * length + token) * group;
        for (size_t g = 0; g < group; ++g) {
          store_query(from + (head * group + g) * size, position, first + g);
        }
      }
    }

    void store(const float* head, Element* to) const {
      if constexpr (kQuantized) {
        op->processor_->cache_head(head, head_size, to);
      } else {
        std::memcpy(to, head, head_size * sizeof(float));
      }
    }

    void store_rotated(const float* head, size_t position, Element* to) const {
      if constexpr (kQuantized) {
        float rotated[kMostHeadSize];
        rotate(head, position, rotated);
        store(rotated, to);
      } else {
        rotate(head, position, to);
      }
    }

    void store_query(const float* head, size_t position, size_t index) const {
      if constexpr (kQuantized) {
        float rotated[kMostHeadSize];
        rotate(head, position, rotated);
        uint8_t* to = queries.get() + index * head_size;
        query_factors[index] = scale() * op->processor_->quantize_head(rotated, head_size, to);
      } else {
        rotate(head, position, queries.get() + index * head_size);
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

    void attend(size_t task) const {
      const size_t kv_heads = op->kv_heads_, group = op->group_, size = head_size;
      // The last tokens see the most keys, so they come first.
      const size_t block = tasks_per_head - 1 - task / (batch * kv_heads);
      const size_t row = task % (batch * kv_heads) / kv_heads, head = task % kv_heads;
      const size_t start = block * tokens_per_task;
      const size_t stop = std::min(length, start + tokens_per_task);
      float* to = out + ((row * length + start) * kv_heads + head) * group * size;
      const size_t out_stride = kv_heads * group * size;
      const size_t end = std::min(stop, std::max(start, num_new(row)));
      for (size_t token = end; token < stop; ++token) {  // padding
        std::memset(to + (token - start) * out_stride, 0, group * size * sizeof(float));
      }
      if (end == start) return;
      const Queries task_queries = {
          (end - start) * group, group, size, num_past(row) + start + 1, to, out_stride,
      };
      // Kept by each thread: a decode step would allocate it for microseconds of work.
      static thread_local std::vector<float> scratch;
      if (scratch.size() < task_queries.scratch()) scratch.resize(task_queries.scratch());
      const size_t first = ((row * kv_heads + head) * length + start) * group;
      const Query* rows = queries.get() + first * size;
      const Element *keys = key + cache(row, head), *values = value + cache(row, head);
      if constexpr (kQuantized) {
        const Int8Head task_head = {rows, query_factors.get() + first, keys, values};
        op->processor_->attend_int8(task_queries, task_head, scratch.data());
      } else {
        op->processor_->attend(task_queries, {rows, scale(), keys, values}, scratch.data());
      }
    }

    // Copies what the cache holds before these tokens.
    void copy_past(size_t row, size_t head) const {
      const size_t from = (row * op->kv_heads_ + head) * past_max_length * width(head_size);
      const size_t bytes = num_past(row) * width(head_size) * sizeof(Element);
      std::memcpy(key + cache(row, head), past_key + from, bytes);
      std::memcpy(value + cache(row, head), past_value + from, bytes);
    }
  };

  static void store_task(void* pass, size_t task) { static_cast<Pass*>(pass)->store(task); }
  static void attend_task(void* pass, size_t task) { static_cast<Pass*>(pass)->attend(task); }

  void parallel(OrtKernelContext* context, size_t num_tasks, void (*task)(void*, size_t),
                Pass* pass) const {
    if (num_tasks == 1) return task(pass, 0);
    check(api_, api_.KernelContext_ParallelFor(context, task, num_tasks, 0, pass));
  }

  // Checks the inputs, and copies the past if the present is other memory.
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
    pass.batch = key.dim(0);
    pass.length = query.dim(1);
    pass.past_max_length = key.dim(2);
    require(key.dim(3) > width(0), "head size");
    pass.head_size = key.dim(3) - width(0);
    require(query.dim(0) == pass.batch && seqlens.size() == pass.batch && total.size() == 1 &&
                key.dim(1) == kv_heads_,
            "batch sizes or heads");
    require(pass.head_size % kLanes == 0 && pass.head_size <= kMostHeadSize, "head size");
    read_new(query, Tensor::input(api_, context, 1, true), Tensor::input(api_, context, 2, true),
             pass);
    pass.past_key = static_cast<const Element*>(key.data);
    pass.past_value = static_cast<const Element*>(value.data);
    pass.seqlens = static_cast<const int32_t*>(seqlens.data);
    const int32_t longest = *static_cast<const int32_t*>(total.data);
    require(longest >= 0, "total length");
    pass.first = static_cast<size_t>(longest) == pass.length;
    pass.max_length = std::max(pass.past_max_length, static_cast<size_t>(longest));
    for (size_t row = 0; row < pass.batch; ++row) {
      require(pass.seqlens[row] >= 0 && pass.total(row) <= pass.max_length &&
                  (pass.first ? pass.total(row) <= pass.length : pass.total(row) >= pass.length) &&
                  pass.num_past(row) <= pass.past_max_length,
              "lengths");
    }
    read_rotation(Tensor::input(api_, context, 7, true), Tensor::input(api_, context, 8, true),
                  pass);
    write(context, key, pass);
    return pass;
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
    const std::vector<int64_t> dims = {query.dims[0], query.dims[1], static_cast<int64_t>(keys)};
    require(key.type == kFloat && value.type == kFloat && key.dims == dims && value.dims == dims,
            "key and value");
    pass.new_stride = keys;
    pass.new_key = key.floats();
    pass.new_value = value.floats();
  }

  void read_rotation(const Tensor& cosines, const Tensor& sines, Pass& pass) const {
    require((cosines.data == nullptr) == (sines.data == nullptr), "rotation");
    if (cosines.data == nullptr) return;
    require(cosines.type == kFloat && sines.type == kFloat && cosines.dims.size() == 2 &&
                cosines.dims == sines.dims && cosines.dim(1) * 2 <= pass.head_size,
            "rotation");
    for (size_t row = 0; row < pass.batch; ++row) {
      require(pass.total(row) <= cosines.dim(0), "positions");
    }
    pass.cosines = cosines.floats();
    pass.sines = sines.floats();
    pass.half = cosines.dim(1);
  }

  void write(OrtKernelContext* context, const Tensor& past, Pass& pass) const {
    std::vector<int64_t> dims = past.dims;
    dims[2] = static_cast<int64_t>(pass.max_length);
    const auto columns = static_cast<int64_t>(kv_heads_ * group_ * pass.head_size);
    const auto length = static_cast<int64_t>(pass.length);
    pass.out = Tensor::output<float>(api_, context, 0, {past.dims[0], length, columns});
    pass.key = Tensor::output<Element>(api_, context, 1, dims);
    pass.value = Tensor::output<Element>(api_, context, 2, dims);
    if (pass.key == pass.past_key && pass.value == pass.past_value) return;
    for (size_t row = 0; row < pass.batch; ++row) {
      for (size_t head = 0; head < kv_heads_; ++head) pass.copy_past(row, head);
    }
  }

  static void require(bool fits, const char* what) {
    if (!fits) throw Error(std::string("inputs of CausalAttention do not fit: ") + what);
  }

  const OrtApi& api_;
  const Processor* processor_;
  size_t kv_heads_, group_;
  float scale_;
};

template <typename Element>
OrtCustomOp attention_table() {
  OrtCustomOp table = operator_table<Attention<Element>>();
  table.GetInputType = [](const OrtCustomOp*, size_t i) {
    return i == 3 || i == 4 ? element_type<Element> : i == 5 || i == 6 ? kInt32 : kFloat;
  };
  table.GetInputTypeCount = [](const OrtCustomOp*) -> size_t { return 9; };
  table.GetOutputType = [](const OrtCustomOp*, size_t i) {
    return i == 0 ? kFloat : element_type<Element>;
  };
  table.GetOutputTypeCount = [](const OrtCustomOp*) -> size_t { return 3; };
  table.GetInputCharacteristic = [](const OrtCustomOp*, size_t i) {
    return i == 1 || i == 2 || i > 6 ? kOptional : kRequired;
  };
  return table;
}

}  // namespace

const OrtCustomOp kAttentionOp = [] {
  OrtCustomOp table = attention_table<float>();
  table.GetName = [](const OrtCustomOp*) { return "CausalAttention"; };
  return table;
}();

const OrtCustomOp kInt8AttentionOp = [] {
  OrtCustomOp table = attention_table<int8_t>();
  table.GetName = [](const OrtCustomOp*) { return "Int8CausalAttention"; };
  return table;
}();
