// Layers with a state of a fixed size: short convolutions and linear attention.
//
// Included by processor.cpp only: nothing here has external linkage, since an inline function that was
// compiled with AVX-512 must not be the one that the linker keeps for every processor.
#pragma once

#include <new>

#include "activations.h"
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

// The sum of the products of two heads' elements, by lanes.
inline float dot(const float* a, const float* b, size_t size) {
  constexpr size_t kVectors = kLanes / kWidth;
  Floats sums[kVectors];
  UNROLL for (size_t v = 0; v < kVectors; ++v) sums[v] = splat(0.0f);
  size_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    UNROLL for (size_t v = 0; v < kVectors; ++v) {
      sums[v] = fma(load(a + i + v * kWidth), load(b + i + v * kWidth), sums[v]);
    }
  }
  float sum = sum_of_lanes(sums);
  for (; i < size; ++i) sum = std::fmaf(a[i], b[i], sum);
  return sum;
}

// out = a factor times a head, and times its elements of `by` unless that is null
inline void scale(const float* head, float factor, const float* by, size_t size, float* out) {
  const Floats factors = splat(factor);
  for_each_vector(size, [&](size_t i, size_t count) {
    const Floats scaled = mul(load_some(head + i, count), factors);
    store_some(out + i, by == nullptr ? scaled : mul(scaled, load_some(by + i, count)), count);
  });
}

// What the passes over a state need of a token: its key, and its key and its query times the decay; the
// decay, of all keys or of each; and the product of its query and its key.
struct StateToken {
  float *key, *decayed_key, *decayed_query, *decays;
  float similarity;

  // Of each array of floats.
  static size_t size(const LinearHead& head) { return 4 * head.num_keys; }

  StateToken(const LinearHead& head, size_t token, float* room)
      : key(room),
        decayed_key(key + head.num_keys),
        decayed_query(decayed_key + head.num_keys),
        decays(decayed_query + head.num_keys) {
    const size_t size = head.num_keys, num_decays = head.decays_by_key ? size : 1;
    const float* logarithms = head.decays + token * head.decay_stride;
    for_each_vector(num_decays, [&](size_t i, size_t count) {
      store_some(decays + i, decay_of(load_some(logarithms + i, count)), count);
    });
    const float* its_key = head.keys + token * head.key_stride;
    const float* its_query = head.queries + token * head.query_stride;
    const auto inverse_length = [&](const float* of) {
      return head.epsilon == 0.0f ? 1.0f : 1.0f / std::sqrt(dot(of, of, size) + head.epsilon);
    };
    scale(its_key, inverse_length(its_key), nullptr, size, key);
    // The query itself lies where the decayed one will.
    scale(its_query, head.scale * inverse_length(its_query), nullptr, size, decayed_query);
    similarity = dot(decayed_query, key, size);
    const float decay = head.decays_by_key ? 1.0f : *decays;
    const float* by = head.decays_by_key ? decays : nullptr;
    scale(key, decay, by, size, decayed_key);
    scale(decayed_query, decay, by, size, decayed_query);
  }
};

constexpr size_t kStateVectors = kStateColumns / kWidth;
// Sums over keys have two parts, of the keys of even and of odd numbers: a single one would wait for
// itself.
constexpr size_t kParts = 2;

// Some columns of a value.
struct Columns {
  Floats vectors[kStateVectors];
};

// The columns of a state, [num_keys][stride].
struct StateRows {
  float* rows;
  size_t stride;
};

// Brings a state from before a token to after it, unless there is no token `last` (kUpdates), and writes
// it to `to`; and gives the products of it and the next token's decayed key and query (kReads). kByKey:
// whether decays differ between keys; kDelta: whether the key's product is needed.
template <bool kUpdates, bool kReads, bool kByKey, bool kDelta>
inline void pass_over(const StateRows& from, const StateRows& to, size_t num_keys,
                      const StateToken* last, const Columns& added, const StateToken* next,
                      Columns& known, Columns& read) {
  Floats key_sums[kParts][kStateVectors], query_sums[kParts][kStateVectors];
  UNROLL for (size_t part = 0; part < kParts; ++part) {
    UNROLL for (size_t v = 0; v < kStateVectors; ++v) {
      key_sums[part][v] = query_sums[part][v] = splat(0.0f);
    }
  }
  const Floats common = kUpdates ? splat(*last->decays) : splat(0.0f);
  const auto advance = [&](size_t key, size_t part) __attribute__((always_inline)) {
    Floats decay = common, its_key = common, next_key = common, next_query = common;
    if constexpr (kUpdates && kByKey) decay = splat(last->decays[key]);
    if constexpr (kUpdates) its_key = splat(last->key[key]);
    if constexpr (kReads && kDelta) next_key = splat(next->decayed_key[key]);
    if constexpr (kReads) next_query = splat(next->decayed_query[key]);
    UNROLL for (size_t v = 0; v < kStateVectors; ++v) {
      Floats state = load(from.rows + key * from.stride + v * kWidth);
      if constexpr (kUpdates) {
        state = fma(its_key, added.vectors[v], mul(decay, state));
        store(to.rows + key * to.stride + v * kWidth, state);
      }
      if constexpr (kReads && kDelta) key_sums[part][v] = fma(next_key, state, key_sums[part][v]);
      if constexpr (kReads) query_sums[part][v] = fma(next_query, state, query_sums[part][v]);
    }
  };
  size_t key = 0;
  for (; key + kParts <= num_keys; key += kParts) {
    advance(key, 0);
    advance(key + 1, 1);
  }
  if (key < num_keys) advance(key, 0);
  UNROLL for (size_t v = 0; v < kStateVectors; ++v) {
    known.vectors[v] = add(key_sums[0][v], key_sums[1][v]);
    read.vectors[v] = add(query_sums[0][v], query_sums[1][v]);
  }
}

// Some tokens of a head, in some of its columns, of which all vectors are there.
template <bool kByKey, bool kDelta>
inline void attend_columns(const LinearHead& head, const StateToken* tokens, size_t first,
                           size_t num_tokens, size_t column, size_t count, const StateRows& state,
                           const StateRows& between) {
  Columns added, known, read;
  UNROLL for (size_t v = 0; v < kStateVectors; ++v) added.vectors[v] = splat(0.0f);
  for (size_t i = 0; i < num_tokens; ++i) {
    const StateRows& from = i <= 1 ? state : between;
    if (i == 0) {
      pass_over<false, true, kByKey, kDelta>(from, between, head.num_keys, nullptr, added, tokens,
                                             known, read);
    } else {
      pass_over<true, true, kByKey, kDelta>(from, between, head.num_keys, tokens + i - 1, added,
                                            tokens + i, known, read);
    }
    const size_t token = first + i;
    float padded[kStateColumns] = {};
    std::memcpy(padded, head.values + token * head.value_stride + column, count * sizeof(float));
    const Floats similarity = splat(tokens[i].similarity);
    const Floats beta = splat(kDelta ? head.betas[token * head.beta_stride] : 0.0f);
    UNROLL for (size_t v = 0; v < kStateVectors; ++v) {
      added.vectors[v] = load(padded + v * kWidth);
      if constexpr (kDelta) added.vectors[v] = mul(sub(added.vectors[v], known.vectors[v]), beta);
      store(padded + v * kWidth, fma(similarity, added.vectors[v], read.vectors[v]));
    }
    std::memcpy(head.out + token * head.out_stride + column, padded, count * sizeof(float));
  }
  pass_over<true, false, kByKey, kDelta>(num_tokens == 1 ? state : between, state, head.num_keys,
                                         tokens + num_tokens - 1, added, nullptr, known, read);
}

template <bool kByKey, bool kDelta>
inline void attend_linearly(const LinearHead& head, float* scratch) {
  const size_t num_keys = head.num_keys;
  float* block = scratch + kStateTokens * StateToken::size(head);
  float* padded_block = block + num_keys * kStateColumns;
  const StateRows between = {block, kStateColumns}, padded = {padded_block, kStateColumns};
  for (size_t first = 0; first < head.num_tokens; first += kStateTokens) {
    const size_t left = head.num_tokens - first, num_tokens = left < kStateTokens ? left : kStateTokens;
    alignas(StateToken) unsigned char room[kStateTokens * sizeof(StateToken)];
    auto* tokens = reinterpret_cast<StateToken*>(room);
    for (size_t i = 0; i < num_tokens; ++i) {
      new (tokens + i) StateToken(head, first + i, scratch + i * StateToken::size(head));
    }
    for (size_t column = 0; column < head.num_columns; column += kStateColumns) {
      const size_t rest = head.num_columns - column;
      const StateRows state = {head.state + column, head.num_columns};
      if (rest >= kStateColumns) {
        attend_columns<kByKey, kDelta>(head, tokens, first, num_tokens, column, kStateColumns, state,
                                       between);
        continue;
      }
      for (size_t key = 0; key < num_keys; ++key) {
        float* row = padded_block + key * kStateColumns;
        std::memcpy(row, state.rows + key * state.stride, rest * sizeof(float));
        std::memset(row + rest, 0, (kStateColumns - rest) * sizeof(float));
      }
      attend_columns<kByKey, kDelta>(head, tokens, first, num_tokens, column, rest, padded, between);
      for (size_t key = 0; key < num_keys; ++key) {
        std::memcpy(state.rows + key * state.stride, padded_block + key * kStateColumns,
                    rest * sizeof(float));
      }
    }
  }
}

void attend_linearly(const LinearHead& head, float* scratch) {
  const bool by_key = head.decays_by_key;
  if (head.betas != nullptr) {
    by_key ? attend_linearly<true, true>(head, scratch) : attend_linearly<false, true>(head, scratch);
  } else {
    by_key ? attend_linearly<true, false>(head, scratch) : attend_linearly<false, false>(head, scratch);
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
