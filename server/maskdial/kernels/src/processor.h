// Functions of which each instruction set has its own version: processor.cpp is compiled once for each.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>

// Of a function in a class, several compilations have one copy, and the linker takes any of them: without
// this, a processor might get a copy with instructions that it does not have.
#define SHARED [[gnu::always_inline]]

// A panel holds this many columns of a matrix of 8-bit weights, of one of 4-bit weights, and of keys
// in a cache of int8; a packed quad, four rows of a column. All are multiples of every tile's columns.
constexpr size_t kPanel = 48;
constexpr size_t kPanel4 = 32;
constexpr size_t kKeyPanel = 32;
constexpr size_t kQuad = 4;
// Products take at most this many rows at once, which are whole tiles of every processor.
constexpr size_t kMaxRows = 48;
// Linears and NormLinears have at most this many products.
constexpr size_t kMaxProducts = 3;

// Bytes that a thread reads next. Software prefetch brings them into the level-2 cache meanwhile.
constexpr size_t kLine = 64;
struct Prefetch {
  const uint8_t* bytes = nullptr;
  size_t size = 0;

  // The lines to prefetch in each of num_steps steps; all of them if num_steps is 0.
  SHARED size_t lines_each(size_t num_steps) const {
    const size_t num_lines = (size + kLine - 1) / kLine;
    return num_steps == 0 ? num_lines : (num_lines + num_steps - 1) / num_steps;
  }
};

// True where the hardware prefetcher beats software prefetch (AMD; docs/kernels.md).
extern const bool kHardwarePrefetches;

// One panel: weights int8 [num_quads][columns][kQuad], and per column the factor of the sum, the
// sum of its weights times -128, and a bias or null.
struct Panel {
  const int8_t* weights;
  size_t num_quads;
  const float* factors;
  const int32_t* corrections;
  const float* biases;
  Prefetch prefetch{};
};

// Where the product of some rows and a panel goes, and the functions that follow it.
struct Result {
  float* out;  // [num_rows][stride]
  size_t stride, num_columns;
  bool gelu = false;              // by the error function
  const float* gates = nullptr;   // [num_rows][gate_stride]: the result is silu(gate) * product
  size_t gate_stride = 0;
  const float* deltas = nullptr;  // [num_rows][delta_stride]: added to the product
  size_t delta_stride = 0;

  SHARED Result from(size_t row) const {
    Result rest = *this;
    rest.out += row * stride;
    if (deltas != nullptr) rest.deltas += row * delta_stride;
    if (gates != nullptr) rest.gates += row * gate_stride;
    return rest;
  }
};

// The two matrices of a layer's adapter, of floats or of halves, where the adapter adds (row A) B to a row's
// product. Both are in memory as they are read: A [rank / kRankStep][inputs / kLanes][kRankStep][kLanes], and
// B [num_blocks][rank][kLanes], whose blocks of columns are those of the product from `first_block` on. The
// rank is a multiple of kRankStep; what is beyond the matrices' ends is zero.
constexpr size_t kRankStep = 4;
constexpr size_t kExpandedRows = 4;
struct LowRank {
  const void *a, *b;
  bool halves;
  size_t rank, num_inputs, first_block, num_blocks;
};

// Weights of blocks come in chunks of this many inputs, or in half chunks.
constexpr size_t kChunk = 32;
constexpr size_t kHalfChunk = kChunk / 2;
// The largest input.
constexpr float kLargestInput = 127.0f;

// How a panel holds the weights of a chunk, in rows of a quad for each column, [kPanel4][kQuad] bytes.
//   kNibbles  4 bits in 4 rows: the quads 2 i and 2 i + 1 are the low and the high halves of row i
//   kFives    5 bits in 5 rows, and kSixes 6 bits of a half chunk in 3 rows: quad i is in the low bits of row
//             i, and the quads left over are in the high bits, one after the other, with their lowest bits first
//   kBytes    8 bits with a sign, a quad a row; kHalfBytes of a half chunk
// Fewer bits than 8 have no sign. What is zero is BlockForm's `zero`.
enum class BlockWeights { kNibbles, kFives, kSixes, kBytes, kHalfBytes };
constexpr size_t chunk_size_of(BlockWeights weights) {
  return weights == BlockWeights::kSixes || weights == BlockWeights::kHalfBytes ? kHalfChunk : kChunk;
}
constexpr size_t rows_of_chunk(BlockWeights weights) {
  switch (weights) {
    case BlockWeights::kNibbles:
      return 4;
    case BlockWeights::kFives:
      return 5;
    case BlockWeights::kSixes:
      return 3;
    case BlockWeights::kBytes:
      return kChunk / kQuad;
    case BlockWeights::kHalfBytes:
      return kHalfChunk / kQuad;
  }
  return 0;
}
constexpr size_t kRowBytes = kPanel4 * kQuad;
constexpr size_t chunk_bytes_of(BlockWeights weights) { return rows_of_chunk(weights) * kRowBytes; }

// The numbers of a block, for each column of its panel: a scale, and the weight that is zero (kNibbles only)
// or the minimum, which is subtracted from the scaled weights. They follow the weights of the block. Bytes
// are multiples of halves, which come before every group of blocks. Those of kByte have a sign, and precede
// every two blocks, so that weights begin with a cache line. All is in the order in which it is read: where the
// hardware prefetches, one look behind took twice the time.
enum class BlockNumbers {
  kFloatZero,
  kHalfZero,
  kFloatMinimum,
  kHalfMinimum,
  kByteMinimum,
  kFloat,
  kHalf,
  kByte,
};
constexpr bool has_minima(BlockNumbers numbers) {
  return numbers == BlockNumbers::kFloatMinimum || numbers == BlockNumbers::kHalfMinimum ||
         numbers == BlockNumbers::kByteMinimum;
}
constexpr bool are_multiples(BlockNumbers numbers) {
  return numbers == BlockNumbers::kByteMinimum || numbers == BlockNumbers::kByte;
}
constexpr size_t bytes_per_column(BlockNumbers numbers) {
  switch (numbers) {
    case BlockNumbers::kFloatZero:
      return sizeof(float) + sizeof(uint8_t);
    case BlockNumbers::kHalfZero:
      return sizeof(uint16_t) + sizeof(uint8_t);
    case BlockNumbers::kFloatMinimum:
      return 2 * sizeof(float);
    case BlockNumbers::kHalfMinimum:
      return 2 * sizeof(uint16_t);
    case BlockNumbers::kByteMinimum:
      return 2 * sizeof(uint8_t);
    case BlockNumbers::kFloat:
      return sizeof(float);
    case BlockNumbers::kHalf:
      return sizeof(uint16_t);
    case BlockNumbers::kByte:
      break;
  }
  return 0;
}

// The form of a panel, block after block.
struct BlockForm {
  BlockWeights weights;
  BlockNumbers numbers;

  SHARED constexpr size_t chunk_size() const { return chunk_size_of(weights); }
  // The blocks of a group are those of 256 inputs, as in GGUF's _K types, if they are chunks.
  SHARED constexpr size_t group_size() const { return 8 * kChunk / chunk_size(); }
  SHARED constexpr size_t group_bytes() const {
    if (numbers == BlockNumbers::kByteMinimum) return kPanel4 * 2 * sizeof(uint16_t);
    return numbers == BlockNumbers::kByte ? kPanel4 * sizeof(uint16_t) : 0;
  }
  SHARED constexpr size_t pair_bytes() const { return numbers == BlockNumbers::kByte ? 2 * kPanel4 : 0; }
  SHARED constexpr size_t number_bytes() const { return kPanel4 * bytes_per_column(numbers); }
  // The integer of a weight that is 0; of kNibbles a number of each block.
  SHARED constexpr int zero() const {
    if (weights == BlockWeights::kSixes) return 32;
    return weights == BlockWeights::kFives && !has_minima(numbers) ? 16 : 0;
  }
};
constexpr size_t kMaxGroup = 8 * kChunk / kHalfChunk;

// One panel of weights: for each block [chunks_per_block][rows_of_chunk][kPanel4][kQuad] bytes, fewer chunks
// in the last one, and its numbers, the scales [kPanel4] first, beside those of its pair and its group. And a
// bias per column or null.
struct BlockPanel {
  const uint8_t* weights;
  BlockForm form;
  size_t num_chunks, chunks_per_block;
  const float* biases;

  SHARED size_t num_blocks() const { return (num_chunks + chunks_per_block - 1) / chunks_per_block; }
};

// Rows quantized in blocks: values [num_rows][num_chunks][chunk_size], and [num_rows][num_blocks] the step
// between the integers of each block, and the sum of its integers times -1. So many more steps and sums may be
// read behind the last ones.
constexpr size_t kNumbersAtOnce = 16;
struct BlockRows {
  const int8_t* values;
  const float* steps;
  const float* sums;
};

// Keys are transposed and multiplied in blocks of this many.
constexpr size_t kKeyBlock = 64;
// Attention vectorizes over this many numbers; head sizes are multiples of it.
constexpr size_t kLanes = 16;
constexpr size_t kMaxHeadSize = 512;
// Tiles of queries that see all tokens have at most this many rows.
constexpr size_t kMaxQueries = 12;
// The scores of so many queries by queries of positions are computed together.
constexpr size_t kPositionQueries = 128;

// Keys that no query of a task sees are left out in multiples of this many, so that the blocks in which
// keys and values are computed begin at the same tokens in every task.
constexpr size_t kSkipStep = 128;

// Queries of one key-value head: row r belongs to the token r / group, which sees the last `window` ones,
// or all if that is 0, of the first first_length + r / group keys.
struct Queries {
  size_t num_rows, group, head_size, first_length, window;
  // [num_rows / group]: how many later keys each token sees; or null, for none. None sees less far than
  // the one before it.
  const int32_t* ahead;
  const float* sinks;  // [group]: for each head, the score of one more key without a value; or null
  float* out;  // [num_rows / group][out_stride], in each row [group][head_size]
  size_t out_stride;
  Prefetch after;  // read after them; fetched over a cache of integers only

  SHARED size_t length(size_t row) const {
    const size_t token = row / group;
    return first_length + token + (ahead == nullptr ? 0 : static_cast<size_t>(ahead[token]));
  }
  SHARED size_t longest() const { return length(num_rows - 1); }
  // The first key that a row sees.
  SHARED size_t begin(size_t row) const {
    const size_t own = first_length + row / group;
    return window == 0 || own <= window ? 0 : own - window;
  }
  // The first row that sees a key, which the last one does.
  SHARED size_t first_row(size_t key) const {
    if (ahead == nullptr) return key < first_length ? 0 : (key - first_length + 1) * group;
    size_t row = 0;
    while (length(row) <= key) row += group;
    return row;
  }
  // The floats of scratch memory: scores, a block of transposed keys, and a factor per value.
  SHARED size_t score_stride() const { return (longest() + kKeyBlock - 1) / kKeyBlock * kKeyBlock; }
  SHARED size_t scratch() const { return (num_rows + 1) * score_stride() + head_size * kKeyBlock; }
};

// Their head in a cache of floats.
struct FloatHead {
  const float* rows;  // [num_rows][head_size]
  float scale;
  const float* keys;    // [length][head_size]
  const float* values;  // [length][head_size]
};

// A token's key or value in a cache of int8, followed by its head_size integers: the factor that
// makes them floats again, and their sum times -128, the zero point of queries.
struct Int8Header {
  float factor;
  int32_t correction;
};

// Their head in a cache of int8.
struct Int8Head {
  const uint8_t* rows;   // [num_rows][head_size], with zero point 128
  const float* factors;  // [num_rows], which make them floats again, times the scale
  const int8_t* keys;    // [length][sizeof(Int8Header) + head_size]
  const int8_t* values;  // the same
};

// A token's key or value in a cache of int16: the factor that makes it floats again, a float, in place
// of this many integers, and its head_size integers.
constexpr size_t kInt16Header = sizeof(float) / sizeof(int16_t);
// The maximum of values, and that of queries and keys: sums of their products fit 32 bits.
constexpr int kMaxInt16Value = 4095;
inline int max_int16_key(size_t head_size) {
  return static_cast<int>(std::sqrt(static_cast<double>(INT32_MAX / head_size)));
}

// Their head in a cache of int16.
struct Int16Head {
  const int16_t* rows;   // [num_rows][head_size]
  const float* factors;  // [num_rows], which make them floats again, times the scale
  const int16_t* keys;   // [length][kInt16Header + head_size]
  const int16_t* values;  // the same
};

// One head's keys or queries of relative positions: floats [num_blocks][padded_size][kKeyBlock], or
// integers [num_blocks][padded_size / 2][kKeyBlock][2] with a factor for each column. A table that is null
// adds nothing to the scores.
struct PositionTable {
  const void* table = nullptr;
  const float* factors = nullptr;
};

// Queries of one head of a text: query i is that of token first + i of these keys, and sees those
// less than window tokens away. A row is that of a token, of which this head is a part; a bias, which
// may be null, is added to each row.
struct FullQueries {
  const float* queries;  // [num_queries][stride]
  const float* keys;     // [length][stride]
  const float* values;   // [length][stride]
  size_t stride;
  const float *query_bias, *key_bias, *value_bias;  // [head_size]
  size_t num_queries, first, length, window, head_size;
  float scale;
  float* out;  // [num_queries][stride]
  // Without a window: query i and key j also get the scores of the query times column c(j - i) of the keys
  // of positions, and of the key times column c(i - j) of the queries of positions. c ascends from
  // -length to length + kLanes, by at most 1 each, and is below num_columns; null without positions.
  const int32_t* columns = nullptr;
  size_t num_columns = 0;
  PositionTable keys_of_positions{}, queries_of_positions{};

  // The keys of a query.
  SHARED size_t begin(size_t query) const {
    return first + query < window ? 0 : first + query + 1 - window;
  }
  SHARED size_t end(size_t query) const {
    return length - (first + query) < window ? length : first + query + window;
  }

  SHARED size_t padded_size() const { return (head_size + kLanes - 1) / kLanes * kLanes; }
  SHARED size_t padded_length() const { return (length + kKeyBlock - 1) / kKeyBlock * kKeyBlock; }
  // A query's scores begin anywhere, and end with whole vectors.
  SHARED size_t score_stride() const { return padded_length() + kLanes; }
  // The queries whose scores by queries of positions are in scratch memory.
  SHARED size_t position_queries_at_once() const {
    const size_t most = num_queries < kPositionQueries ? num_queries : kPositionQueries;
    return (most + kLanes - 1) / kLanes * kLanes;
  }
  // The products of a tile of rows and the columns of positions that it needs, which begin and end
  // with whole vectors; as many may be read behind them.
  SHARED size_t window_stride() const {
    const size_t most = length + kLanes < num_columns ? length + kLanes : num_columns;
    return (most + kLanes - 1) / kLanes * kLanes + 3 * kLanes;
  }
  // The floats of scratch memory: keys, values, a tile of queries and their scores. Integers of 16
  // bits, which need factors, take no more.
  SHARED size_t scratch_of_content() const {
    return (padded_length() + length + kMaxQueries) * padded_size() +
           kMaxQueries * score_stride();
  }
  // And those of positions.
  SHARED size_t scratch() const {
    if (columns == nullptr) return scratch_of_content();
    return scratch_of_content() + padded_length() * padded_size() +
           position_queries_at_once() * (score_stride() + kLanes) + kLanes * window_stride();
  }
};

// Convolutions have at most this many taps.
constexpr size_t kMaxTaps = 16;

// A convolution of some channels, each by itself: result t is the sum of tap i times input
// t + i - (num_taps - 1), where inputs before the first one are the past's.
struct Convolution {
  const float* inputs;  // [num_tokens][stride], of which num_channels
  size_t num_tokens, num_channels, stride;
  const float* taps;    // [num_taps][stride]
  const float* biases;  // [num_channels], or null
  size_t num_taps;
  bool silu;
  float* past;  // [num_taps - 1][stride]; the last inputs afterwards
  float* out;   // [num_tokens][stride]
};

// Columns of a state that are computed together, and tokens.
constexpr size_t kStateColumns = 32;
constexpr size_t kStateTokens = 8;

// One head of linear attention over a row's tokens: each one's state is the decayed state before it plus
// the outer product of its key and its value, and the result is its query times the state. By the delta
// rule, with betas, what the decayed state has for the key is subtracted from the value first, and the
// difference is multiplied by beta. The strides are those of tokens.
struct LinearHead {
  const float *queries, *keys;  // [num_keys]
  const float* values;          // [num_columns]
  const float* decays;          // logarithms [num_keys] or [1]
  const float* betas;           // [1], or null
  size_t query_stride, key_stride, value_stride, decay_stride, beta_stride;
  size_t num_tokens, num_keys, num_columns;
  bool decays_by_key;
  float scale;    // of queries
  float epsilon;  // queries and keys are divided by their lengths if it is not 0
  float* state;   // [num_keys][num_columns]
  float* out;     // [num_columns]
  size_t out_stride;

  // The floats of scratch memory: a token's keys, queries and decays, and two blocks of the state.
  SHARED size_t scratch() const { return num_keys * (4 * kStateTokens + 2 * kStateColumns) + kLanes; }
};

// The k greatest scores of a row are searched in blocks of this many, by each block's maximum.
constexpr size_t kScoreBlock = 128;

// The first index of a row's maximum, the maximum, and the sum of exp(logit - maximum).
struct LogitsSummary {
  int64_t best;
  float max_logit;  // NaN if any logit is
  double sum_exp;   // 0 if the maximum is not finite
};

// Sums of floats are short: weights are added up in blocks of this many, and the blocks as doubles.
constexpr size_t kSumBlock = 512;

// Where the integers of stored blocks go, and what they are multiplied by and less; minima are null if there
// are none.
struct Unpacked {
  uint8_t* values;
  float *scales, *minima;
};

// A type of GGUF's quantized tensors, by its number in ggml.h. Both functions read `count` blocks.
struct StoredType {
  uint32_t number;
  size_t num_bytes, num_values;  // of a block
  void (*unpack)(const uint8_t* stored, size_t count, const Unpacked& out);
  void (*restore)(const uint8_t* stored, size_t count, float* out);
};

struct Processor {
  const char* name;

  // Quantizes a row to uint8 with zero point 128, as QuantizeLinear does.
  void (*quantize)(const float* row, size_t size, float step, uint8_t* out);

  // The same for a row divided by its largest magnitude, which is returned.
  float (*quantize_by_peak)(const float* row, size_t size, float step, uint8_t* out);

  // Rows uint8 [num_rows][4 * num_quads] times a panel of kPanel columns: the product of a row and a
  // column is their sum times the column's factor, times peaks[r] unless peaks is null, plus the
  // bias. At most kMaxRows rows.
  void (*multiply)(const uint8_t* rows, size_t num_rows, const Panel& panel, const float* peaks,
                   const Result& result);

  // Quantizes each block of a row to int8, relative to its largest magnitude.
  void (*quantize_blocks)(const float* row, size_t size, size_t block_size, int8_t* values,
                          float* steps, float* sums);

  // Such rows times a panel: a product is the sum over the blocks, from the first one on, of the
  // integers' sum (less the zero times the row's) times the column's scale, times the row's step, and
  // less the minimum times the row's sum and step; plus the bias. At most kMaxRows rows.
  void (*multiply_blocks)(const BlockRows& rows, size_t num_rows, const BlockPanel& panel,
                          const Result& result);

  // A row times A, float [rank].
  void (*reduce)(const LowRank& matrices, const float* row, float* out);

  // That of at most kExpandedRows rows, times some blocks of B, is added to `out`.
  void (*expand)(const LowRank& matrices, const float* const* reduced, size_t num_rows, size_t block,
                 size_t num_blocks, float* const* out);

  // Rotates the pairs (i, i + half) of a head, and copies its other elements.
  void (*rotate)(const float* head, size_t head_size, const float* cosines, const float* sines,
                 size_t half, float* out);

  // Rounds a head to integers of at most 127, in steps of its largest magnitude, with zero point
  // 128; returns the factor that makes them floats again.
  float (*quantize_head)(const float* head, size_t head_size, uint8_t* out);

  // The same as a cache of int8 has it: out is its header and its integers.
  void (*cache_head)(const float* head, size_t head_size, int8_t* out);

  // Rounds a head to integers up to `max_integer`, in steps of its largest magnitude; returns the factor
  // that makes them floats again.
  float (*quantize_head_int16)(const float* head, size_t head_size, float max_integer, int16_t* out);

  // Softmax attention. The order of a row's operations depends on its length only.
  void (*attend)(const Queries& queries, const FloatHead& head, float* scratch);
  void (*attend_int8)(const Queries& queries, const Int8Head& head, float* scratch);
  void (*attend_int16)(const Queries& queries, const Int16Head& head, float* scratch);

  // The same without a causal mask.
  void (*attend_fully)(const FullQueries& queries, float* scratch);
  // By integers of 12 bits, for heads of at most kMaxHeadSize and without a window.
  void (*attend_fully_int16)(const FullQueries& queries, float* scratch);

  // The layer norm of x + residual; the bias may be null.
  void (*add_norm)(const float* x, const float* residual, size_t size, const float* weight,
                   const float* bias, float epsilon, float* out);

  // sum = x + residual, and out its RMS norm.
  void (*add_rms_norm)(const float* x, const float* residual, size_t size, const float* weight,
                       float epsilon, float* sum, float* out);

  void (*convolve)(const Convolution& convolution);

  // Linear attention, and the same for heads of one column, without the delta rule and the epsilon.
  void (*attend_linearly)(const LinearHead& head, float* scratch);
  void (*scan_channel)(const LinearHead& head, float* scratch);

  // At least one score.
  LogitsSummary (*summarize)(const float* scores, size_t size);

  // The maximum score; NaN does not count.
  float (*find_max)(const float* scores, size_t size);

  // The weight of a score is exp((score - max_score) * factor), or 0 if that is less than
  // 1e-37. Writes the weights, perhaps over the scores, and the sum of each kSumBlock of them; returns
  // the sum of all.
  double (*exponentials)(const float* scores, size_t size, float max_score, float factor,
                         float* weights, double* sums);

  // The sum of the weights above a floor. Writes the blocks' sums, too, unless `sums` is null.
  double (*sum_above)(const float* weights, size_t size, float floor, double* sums);

  // Write the indices of the scores that reach a threshold, or that are above a floor and at most the
  // ceiling, ascending, and return how many those are. There is room for all.
  size_t (*find_at_least)(const float* scores, size_t size, float threshold, int64_t* out);
  size_t (*find_between)(const float* scores, size_t size, float floor, float ceiling, int64_t* out);

  // Null for a type that is not known.
  const StoredType* (*find_stored_type)(uint32_t number);
};

// The best instruction set of this machine, or the one named by MASKDIAL_KERNELS_ISA; null if this
// machine does not support the named one.
const Processor* choose_processor();
