// Layers with a state of a fixed size: short convolutions and linear attention.
//
// Included by processor.cpp only: nothing here has external linkage, since an inline function that was
// compiled with AVX-512 must not be the one that the linker keeps for every processor.
#pragma once

#include "activations.h"
#include "norms.h"
#include "softmax.h"
#include "vectors.h"

namespace {

// kTaps is the number of taps, or 0 for any.
template <size_t kTaps>
inline void convolve_tokens(const Convolution& conv) {
  const size_t num_taps = kTaps == 0 ? conv.num_taps : kTaps, stride = conv.stride;
  for (size_t token = 0; token < conv.num_tokens; ++token) {
    const float* sources[kMaxTaps];
    for (size_t i = 0; i < num_taps; ++i) {
      const size_t place = token + i;  // among the past's inputs and the new ones
      sources[i] = place + 1 < num_taps ? conv.past + place * stride
                                        : conv.inputs + (place + 1 - num_taps) * stride;
    }
    float* out = conv.out + token * stride;
    for_each_vector(conv.num_channels, [&](size_t c, size_t count) {
      Floats sum = mul(load_some(sources[0] + c, count), load_some(conv.taps + c, count));
      UNROLL for (size_t i = 1; i < num_taps; ++i) {
        sum = fma(load_some(sources[i] + c, count), load_some(conv.taps + i * stride + c, count), sum);
      }
      if (conv.biases != nullptr) sum = add(sum, load_some(conv.biases + c, count));
      store_some(out + c, conv.silu ? silu(sum) : sum, count);
    });
  }
}

void convolve(const Convolution& conv) {
  switch (conv.num_taps) {
    case 3: convolve_tokens<3>(conv); break;
    case 4: convolve_tokens<4>(conv); break;
    default: convolve_tokens<0>(conv);
  }
  for (size_t i = 0; i + 1 < conv.num_taps; ++i) {
    const size_t place = conv.num_tokens + i;
    const float* source = place + 1 < conv.num_taps
                              ? conv.past + place * conv.stride
                              : conv.inputs + (place + 1 - conv.num_taps) * conv.stride;
    std::memcpy(conv.past + i * conv.stride, source, conv.num_channels * sizeof(float));
  }
}

// The largest exponent; decays are not above 0, unless a model is broken.
constexpr float kMaxExponent = 88.0f;

inline Floats decay_of(Floats logarithm) {
  return exponential(min(logarithm, splat(kMaxExponent)));
}

// A query or a key times a factor, and divided by its length if there is an epsilon.
inline void scale_head(const float* head, size_t size, float factor, float epsilon, float* out) {
  if (epsilon != 0.0f) {
    const float squares = sum_lanes(
        head, size, [](Floats v, Floats sum) { return fma(v, v, sum); },
        [](float v, float sum) { return std::fmaf(v, v, sum); });
    factor *= 1.0f / std::sqrt(squares + epsilon);
  }
  const Floats factors = splat(factor);
  for_each_vector(size, [&](size_t i, size_t count) {
    store_some(out + i, mul(load_some(head + i, count), factors), count);
  });
}

constexpr size_t kStateVectors = kStateColumns / kWidth;
// Sums over keys have two parts, of the keys of even and of odd numbers: a single one would wait for
// itself.
constexpr size_t kParts = 2;

struct StateColumns {
  Floats vectors[kStateVectors];
};

// The sum over keys of factors[key] times rows[key][column].
inline StateColumns weighted_rows(const float* rows, size_t stride, const float* factors,
                                  size_t num_keys) {
  Floats sums[kParts][kStateVectors];
  UNROLL for (size_t v = 0; v < kStateVectors; ++v) sums[0][v] = sums[1][v] = splat(0.0f);
  const auto accumulate = [&](size_t key, size_t part) {
    const Floats factor = splat(factors[key]);
    UNROLL for (size_t v = 0; v < kStateVectors; ++v) {
      sums[part][v] = fma(factor, load(rows + key * stride + v * kWidth), sums[part][v]);
    }
  };
  size_t key = 0;
  for (; key + kParts <= num_keys; key += kParts) {
    UNROLL for (size_t part = 0; part < kParts; ++part) accumulate(key + part, part);
  }
  if (key < num_keys) accumulate(key, 0);
  StateColumns result;
  UNROLL for (size_t v = 0; v < kStateVectors; ++v) result.vectors[v] = add(sums[0][v], sums[1][v]);
  return result;
}

// to[key] = decays[key] * from[key] + keys[key] * added, of which the sum over keys, each times its
// query, is the result. kByKey: whether decays differ between keys; else the first one is that of all.
template <bool kByKey>
inline StateColumns advance(const float* from, size_t from_stride, float* to, size_t to_stride,
                            const float* decays, const float* keys, const float* queries,
                            size_t num_keys, const StateColumns& added) {
  Floats sums[kParts][kStateVectors];
  UNROLL for (size_t v = 0; v < kStateVectors; ++v) sums[0][v] = sums[1][v] = splat(0.0f);
  const auto update = [&](size_t key, size_t part) {
    const Floats decay = splat(decays[kByKey ? key : 0]);
    const Floats its_key = splat(keys[key]), its_query = splat(queries[key]);
    UNROLL for (size_t v = 0; v < kStateVectors; ++v) {
      const Floats old = mul(decay, load(from + key * from_stride + v * kWidth));
      const Floats updated = fma(its_key, added.vectors[v], old);
      store(to + key * to_stride + v * kWidth, updated);
      sums[part][v] = fma(its_query, updated, sums[part][v]);
    }
  };
  size_t key = 0;
  for (; key + kParts <= num_keys; key += kParts) {
    UNROLL for (size_t part = 0; part < kParts; ++part) update(key + part, part);
  }
  if (key < num_keys) update(key, 0);
  StateColumns result;
  UNROLL for (size_t v = 0; v < kStateVectors; ++v) result.vectors[v] = add(sums[0][v], sums[1][v]);
  return result;
}

void attend_linearly(const LinearHead& head, float* scratch) {
  const size_t num_keys = head.num_keys, columns = head.num_columns;
  float* keys = scratch;
  float* queries = keys + num_keys;
  float* decays = queries + num_keys;
  float* decayed_keys = decays + num_keys;
  float* block = decayed_keys + num_keys;
  // Between two tokens the state lies in the scratch memory: its columns are adjacent there.
  const bool whole = columns == kStateColumns;
  if (!whole) {
    for (size_t key = 0; key < num_keys; ++key) {
      float* row = block + key * kStateColumns;
      std::memcpy(row, head.state + key * head.state_stride, columns * sizeof(float));
      std::memset(row + columns, 0, (kStateColumns - columns) * sizeof(float));
    }
  }
  for (size_t token = 0; token < head.num_tokens; ++token) {
    scale_head(head.queries + token * head.query_stride, num_keys, head.scale, head.epsilon, queries);
    scale_head(head.keys + token * head.key_stride, num_keys, 1.0f, head.epsilon, keys);
    const float* logarithms = head.decays + token * head.decay_stride;
    const size_t num_decays = head.decays_by_key ? num_keys : 1;
    for_each_vector(num_decays, [&](size_t i, size_t count) {
      store_some(decays + i, decay_of(load_some(logarithms + i, count)), count);
    });
    const bool first = token == 0 && whole, last = token + 1 == head.num_tokens && whole;
    const float* from = first ? head.state : block;
    const size_t from_stride = first ? head.state_stride : kStateColumns;
    float* to = last ? head.state : block;
    const size_t to_stride = last ? head.state_stride : kStateColumns;

    float padded[kStateColumns] = {};
    std::memcpy(padded, head.values + token * head.value_stride, columns * sizeof(float));
    StateColumns added;
    UNROLL for (size_t v = 0; v < kStateVectors; ++v) added.vectors[v] = load(padded + v * kWidth);
    if (head.betas != nullptr) {
      for_each_vector(num_keys, [&](size_t i, size_t count) {
        const Floats decay = head.decays_by_key ? load_some(decays + i, count) : splat(decays[0]);
        store_some(decayed_keys + i, mul(load_some(keys + i, count), decay), count);
      });
      const StateColumns known = weighted_rows(from, from_stride, decayed_keys, num_keys);
      const Floats beta = splat(head.betas[token * head.beta_stride]);
      UNROLL for (size_t v = 0; v < kStateVectors; ++v) {
        added.vectors[v] = mul(sub(added.vectors[v], known.vectors[v]), beta);
      }
    }
    const StateColumns result =
        head.decays_by_key ? advance<true>(from, from_stride, to, to_stride, decays, keys, queries,
                                           num_keys, added)
                           : advance<false>(from, from_stride, to, to_stride, decays, keys, queries,
                                            num_keys, added);
    UNROLL for (size_t v = 0; v < kStateVectors; ++v) {
      store(padded + v * kWidth, result.vectors[v]);
    }
    std::memcpy(head.out + token * head.out_stride, padded, columns * sizeof(float));
  }
  for (size_t key = 0; key < num_keys && !whole; ++key) {
    std::memcpy(head.state + key * head.state_stride, block + key * kStateColumns,
                columns * sizeof(float));
  }
}

void scan_channel(const LinearHead& head, float* scratch) {
  constexpr size_t kVectors = kLanes / kWidth;
  const size_t num_keys = head.num_keys;
  const auto some = [&](const float* p, size_t i) {
    return i + kWidth <= num_keys ? load(p + i) : load_some(p + i, i < num_keys ? num_keys - i : 0);
  };
  const size_t padded = (num_keys + kLanes - 1) / kLanes * kLanes;
  float* state = scratch;
  std::memset(state, 0, padded * sizeof(float));
  std::memcpy(state, head.state, num_keys * sizeof(float));
  for (size_t token = 0; token < head.num_tokens; ++token) {
    const float* key = head.keys + token * head.key_stride;
    const float* query = head.queries + token * head.query_stride;
    const float* logarithms = head.decays + token * head.decay_stride;
    const Floats value = splat(head.values[token * head.value_stride]);
    Floats sums[kVectors];
    UNROLL for (size_t v = 0; v < kVectors; ++v) sums[v] = splat(0.0f);
    for (size_t i = 0; i < padded; i += kLanes) {
      UNROLL for (size_t v = 0; v < kVectors; ++v) {
        const size_t at = i + v * kWidth;
        const Floats decay = head.decays_by_key ? some(logarithms, at) : splat(*logarithms);
        const Floats updated =
            fma(some(key, at), value, mul(decay_of(decay), load(state + at)));
        store(state + at, updated);
        sums[v] = fma(some(query, at), updated, sums[v]);
      }
    }
    head.out[token * head.out_stride] = sum_of_lanes(sums) * head.scale;
  }
  std::memcpy(head.state, state, num_keys * sizeof(float));
}

}  // namespace
