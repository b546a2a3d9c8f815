// The operator Adapt(x, y, adapters) -> z, for products that other operators compute
//
//   x             float (..., num_inputs), the product's input
//   y             float (..., num_outputs), its result
//   adapters      int64 (num_rows): the address of each row's adapter, or 0
//   z             y + (x A) B of the row's adapter
//   projections   attribute: the product's name
//
// AdaptLookup(ids, y, adapters) -> z, for rows of a table
//
//   ids           int64 (batch, length): the rows that were looked up
//   y             float (batch, length, num_outputs): the table's
//   adapters      int64 (batch * length): the address of each row's adapter, or 0
//   z             y + A[id] B of the row's adapter
//   projections   attribute: the table's name
//
// and AdapterRows(adapters, input_ids, counts?) -> rows
//
//   adapters    int64 (batch)
//   input_ids   int64 (batch, length), for its shape
//   counts      int32 (batch): the tokens of each text, if they follow one another without padding
//   rows        int64: each text's adapter, once for each of its tokens
#include "adapters.h"

#include <algorithm>
#include <cstring>
#include <mutex>
#include <unordered_map>

#include "halves.h"
#include "operators.h"
#include "scratch.h"

size_t Adapter::add(const std::string& product, const void* a, const void* b, size_t rank,
                    size_t num_inputs, size_t num_outputs, size_t first, bool halves) {
  const size_t bytes = halves ? sizeof(uint16_t) : sizeof(float);
  const size_t padded_rank = (rank + kRankStep - 1) / kRankStep * kRankStep;
  const size_t input_blocks = (num_inputs + kLanes - 1) / kLanes, lane = first % kLanes;
  LowRank matrices{nullptr, nullptr, halves, padded_rank, num_inputs, first / kLanes,
                   (lane + num_outputs + kLanes - 1) / kLanes};
  const auto reserve = [&](size_t size) {
    bytes_.emplace_back(new uint8_t[size * bytes]());
    return bytes_.back().get();
  };
  uint8_t* to = reserve(padded_rank * input_blocks * kLanes);
  matrices.a = to;
  for (size_t r = 0; r < rank; ++r) {
    for (size_t i = 0; i < num_inputs; i += kLanes) {
      const size_t block = r / kRankStep * input_blocks + i / kLanes;
      std::memcpy(to + (block * kRankStep + r % kRankStep) * kLanes * bytes,
                  static_cast<const uint8_t*>(a) + (r * num_inputs + i) * bytes,
                  std::min(kLanes, num_inputs - i) * bytes);
    }
  }
  to = reserve(padded_rank * matrices.num_blocks * kLanes);
  matrices.b = to;
  for (size_t r = 0; r < rank; ++r) {
    for (size_t i = 0, some = 0; i < num_outputs; i += some) {
      const size_t column = lane + i;
      const size_t place = (column / kLanes * padded_rank + r) * kLanes + column % kLanes;
      some = std::min(kLanes - column % kLanes, num_outputs - i);
      std::memcpy(to + place * bytes, static_cast<const uint8_t*>(b) + (r * num_outputs + i) * bytes,
                  some * bytes);
    }
  }
  const size_t number = number_of(product);
  if (number >= layers_.size()) layers_.resize(number + 1);
  layers_[number].push_back(matrices);
  return padded_rank * (input_blocks + matrices.num_blocks) * kLanes * bytes;
}

size_t Adapter::number_of(const std::string& product) {
  static std::mutex turn;
  static std::unordered_map<std::string, size_t> numbers;
  const std::lock_guard<std::mutex> lock(turn);
  return numbers.emplace(product, numbers.size()).first->second;
}

std::vector<size_t> AdaptedRows::products(const OrtApi& api, const OrtKernelInfo* info) {
  std::vector<size_t> products;
  const std::string lines = string_attribute(api, info, "projections");
  for (size_t start = 0; start < lines.size();) {
    const size_t end = std::min(lines.find('\n', start), lines.size());
    products.push_back(Adapter::number_of(lines.substr(start, end - start)));
    start = end + 1;
  }
  return products;
}

void AdaptedRows::read(const Tensor& ids, const std::vector<size_t>& products, size_t num_rows) {
  require(ids.type == kInt64 && ids.size() == num_rows, "adapters and rows");
  const auto* addresses = static_cast<const int64_t*>(ids.data);
  if (std::all_of(addresses, addresses + num_rows, [](int64_t each) { return each == 0; })) return;
  addresses_ = addresses;
  num_products_ = products.size();
  layers_.resize(num_rows * num_products_);
  for (size_t row = 0; row < num_rows; ++row) {
    const auto its = layers_.begin() + static_cast<ptrdiff_t>(row * num_products_);
    if (row > 0 && addresses[row] == addresses[row - 1]) {
      std::copy_n(its - static_cast<ptrdiff_t>(num_products_), num_products_, its);
      continue;
    }
    const auto* adapter = reinterpret_cast<const Adapter*>(addresses[row]);
    for (size_t product = 0; product < num_products_ && adapter != nullptr; ++product) {
      const std::vector<LowRank>* layers = adapter->find(products[product]);
      its[static_cast<ptrdiff_t>(product)] = layers;
      size_t rank = 0;
      if (layers != nullptr) {
        for (const LowRank& layer : *layers) rank += layer.rank;
      }
      max_rank_ = std::max(max_rank_, rank);
    }
  }
  reduced_.reset(new float[num_rows * num_products_ * max_rank_]);
}

void AdaptedRows::reduce(const Processor& processor, const float* row, size_t index) {
  for (size_t product = 0; product < num_products_; ++product) {
    const size_t its = index * num_products_ + product;
    if (layers_[its] == nullptr) continue;
    float* out = reduced_.get() + its * max_rank_;
    for (const LowRank& layer : *layers_[its]) {
      processor.reduce(layer, row, out);
      out += layer.rank;
    }
  }
}

void AdaptedRows::look_up(size_t input, size_t index) {
  for (size_t product = 0; product < num_products_; ++product) {
    const size_t its = index * num_products_ + product;
    if (layers_[its] == nullptr) continue;
    float* out = reduced_.get() + its * max_rank_;
    for (const LowRank& layer : *layers_[its]) {
      require(input < layer.num_inputs, "ids and an adapter's table");
      const size_t num_blocks = (layer.num_inputs + kLanes - 1) / kLanes;
      for (size_t r = 0; r < layer.rank; ++r) {
        const size_t block = r / kRankStep * num_blocks + input / kLanes;
        const size_t place = (block * kRankStep + r % kRankStep) * kLanes + input % kLanes;
        *out++ = layer.halves ? half_to_float(static_cast<const uint16_t*>(layer.a)[place])
                              : static_cast<const float*>(layer.a)[place];
      }
    }
  }
}

const float* AdaptedRows::deltas(const Processor& processor, size_t product, size_t row,
                                 size_t num_rows, size_t column, size_t num_columns, size_t stride,
                                 float* out) const {
  const size_t begin = column / kLanes, end = (column + num_columns + kLanes - 1) / kLanes;
  bool some = false, done[kMaxRows] = {};
  for (size_t i = 0; i < num_rows; ++i) {
    const auto its = [&](size_t index) { return (row + index) * num_products_ + product; };
    const std::vector<LowRank>* layers = layers_[its(i)];
    if (done[i] || layers == nullptr) continue;
    // Rows of the same adapter, which is then read once.
    size_t group[kExpandedRows], size = 0;
    for (size_t other = i; other < num_rows && size < kExpandedRows; ++other) {
      if (layers_[its(other)] != layers) continue;
      group[size++] = other;
      done[other] = true;
    }
    size_t rank = 0;
    for (const LowRank& layer : *layers) {
      const size_t first = std::max(begin, layer.first_block);
      const size_t last = std::min(end, layer.first_block + layer.num_blocks);
      if (first < last) {
        if (!some) std::fill_n(out, num_rows * stride, -0.0f);
        some = true;
        const float* reduced[kExpandedRows];
        float* to[kExpandedRows];
        for (size_t each = 0; each < size; ++each) {
          reduced[each] = reduced_.get() + its(group[each]) * max_rank_ + rank;
          to[each] = out + group[each] * stride + (first - begin) * kLanes;
        }
        processor.expand(layer, reduced, size, first - layer.first_block, last - first, to);
      }
      rank += layer.rank;
    }
  }
  return some ? out : nullptr;
}

namespace {

// Rows of results, to which their adapters are added.
struct Sums {
  const Processor* processor;
  const float *x, *y;  // x is null if its rows are reduced already
  size_t num_inputs, num_outputs, num_rows;
  AdaptedRows adapted{};
  float* out = nullptr;

  void run(const OrtApi& api, OrtKernelContext* context, const Tensor& results) {
    out = Tensor::output(api, context, 0, results.dims);
    if (!adapted.any()) {
      std::copy_n(y, results.size(), out);
      return;
    }
    parallel<&Sums::add>(api, context, (num_rows + kRowsPerTask - 1) / kRowsPerTask, *this);
  }

 private:
  static constexpr size_t kRowsPerTask = 4;

  void add(size_t task) {
    const size_t last = std::min(num_rows, (task + 1) * kRowsPerTask);
    const size_t stride = (num_outputs + kLanes - 1) / kLanes * kLanes;
    for (size_t row = task * kRowsPerTask; row < last; ++row) {
      if (x != nullptr) adapted.reduce(*processor, x + row * num_inputs, row);
      const float* deltas = adapted.deltas(*processor, 0, row, 1, 0, num_outputs, stride,
                                           thread_scratch(stride));
      float* sum = out + row * num_outputs;
      std::copy_n(y + row * num_outputs, num_outputs, sum);
      for (size_t i = 0; i < num_outputs && deltas != nullptr; ++i) sum[i] += deltas[i];
    }
  }
};

class Adapt {
 public:
  static constexpr Signature kSignature{"Adapt", {kFloat, kFloat, kInt64}, {kFloat}};

  Adapt(const OrtApi& api, const OrtKernelInfo* info)
      : api_(api), processor_(required_processor()), products_(AdaptedRows::products(api, info)) {}

  void compute(OrtKernelContext* context) const {
    const Tensor x = Tensor::input(api_, context, 0), y = Tensor::input(api_, context, 1);
    require(x.type == kFloat && y.type == kFloat && !x.dims.empty() && !y.dims.empty(), "x and y");
    const size_t num_inputs = x.dim(x.dims.size() - 1), num_outputs = y.dim(y.dims.size() - 1);
    require(num_inputs > 0 && num_outputs > 0, "x and y");
    const size_t num_rows = x.size() / num_inputs;
    require(num_rows == y.size() / num_outputs, "x and y");
    Sums sums{processor_, x.floats(), y.floats(), num_inputs, num_outputs, num_rows};
    sums.adapted.read(Tensor::input(api_, context, 2), products_, num_rows);
    sums.run(api_, context, y);
  }

 private:
  const OrtApi& api_;
  const Processor* processor_;
  std::vector<size_t> products_;
};

class AdaptLookup {
 public:
  static constexpr Signature kSignature{"AdaptLookup", {kInt64, kFloat, kInt64}, {kFloat}};

  AdaptLookup(const OrtApi& api, const OrtKernelInfo* info)
      : api_(api), processor_(required_processor()), tables_(AdaptedRows::products(api, info)) {}

  void compute(OrtKernelContext* context) const {
    const Tensor ids = Tensor::input(api_, context, 0), y = Tensor::input(api_, context, 1);
    require(ids.type == kInt64 && ids.dims.size() == 2, "ids");
    require(y.type == kFloat && y.dims.size() == 3, "y");
    const size_t num_rows = ids.size(), num_outputs = y.dim(2);
    require(num_outputs > 0 && num_rows == y.size() / num_outputs, "ids and y");
    Sums sums{processor_, nullptr, y.floats(), 0, num_outputs, num_rows};
    sums.adapted.read(Tensor::input(api_, context, 2), tables_, num_rows);
    const auto* looked_up = static_cast<const int64_t*>(ids.data);
    for (size_t row = 0; row < num_rows && sums.adapted.any(); ++row) {
      sums.adapted.look_up(static_cast<size_t>(looked_up[row]), row);
    }
    sums.run(api_, context, y);
  }

 private:
  const OrtApi& api_;
  const Processor* processor_;
  std::vector<size_t> tables_;
};

class AdapterRows {
 public:
  static constexpr Signature kSignature{
      "AdapterRows", {kInt64, kInt64, optional(kInt32)}, {kInt64}};

  AdapterRows(const OrtApi& api, const OrtKernelInfo*) : api_(api) {}

  void compute(OrtKernelContext* context) const {
    const Tensor adapters = Tensor::input(api_, context, 0), ids = Tensor::input(api_, context, 1);
    const Tensor counts = Tensor::input(api_, context, 2, true);
    require(adapters.type == kInt64 && ids.dims.size() == 2, "adapters and input_ids");
    const size_t batch = adapters.size();
    require(counts.given() ? counts.type == kInt32 && counts.size() == batch : ids.dim(0) == batch,
            "adapters and counts");
    const auto* given = static_cast<const int32_t*>(counts.data);
    const auto count = [&](size_t text) {
      return counts.given() ? static_cast<size_t>(std::max(given[text], 0)) : ids.dim(1);
    };
    size_t total = 0;
    for (size_t text = 0; text < batch; ++text) total += count(text);
    auto* out = Tensor::output<int64_t>(api_, context, 0, {static_cast<int64_t>(total)});
    for (size_t text = 0; text < batch; ++text) {
      out = std::fill_n(out, count(text), static_cast<const int64_t*>(adapters.data)[text]);
    }
  }

 private:
  const OrtApi& api_;
};

}  // namespace

const OrtCustomOp kAdapterRowsOp = operator_table<AdapterRows>();
const OrtCustomOp kAdaptOp = operator_table<Adapt>();
const OrtCustomOp kAdaptLookupOp = operator_table<AdaptLookup>();
