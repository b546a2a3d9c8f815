// Quantized tensors of GGUF files, as ggml-quants.c lays them out, block by block.
//
// Included by processor.cpp only: see vectors.h.
#pragma once

#include "halves.h"
#include "processor.h"

namespace {

inline float half_at(const uint8_t* p) {
  return half_to_float(static_cast<uint16_t>(p[0] | p[1] << 8));
}

// What a type's block holds: `kBytes` of it are `kValues` integers, of which each `kBlock` share a scale and,
// with `kMinima`, a minimum: a weight is scale * integer - minimum. `kSigned`: the integers are int8.
template <size_t kBytes_, size_t kValues_, size_t kBlock_, bool kMinima_, bool kSigned_>
struct Layout {
  static constexpr size_t kBytes = kBytes_, kValues = kValues_, kBlock = kBlock_;
  static constexpr bool kMinima = kMinima_, kSigned = kSigned_;
};

// A block's first half is in the low bits, its second half in the high ones.
inline void read_nibbles(const uint8_t* packed, size_t half, uint8_t* values) {
  for (size_t i = 0; i < half; ++i) {
    values[i] = packed[i] & 15;
    values[half + i] = packed[i] >> 4;
  }
}

// Bit i of 4 bytes is the fifth of value i.
inline void add_fifth_bits(const uint8_t* bits, uint8_t* values) {
  for (size_t i = 0; i < 32; ++i) values[i] |= static_cast<uint8_t>((bits[i / 8] >> i % 8 & 1) << 4);
}

struct Q4_0 : Layout<18, 32, 32, false, true> {
  static void read(const uint8_t* p, uint8_t* values, float* scales, float*) {
    scales[0] = half_at(p);
    read_nibbles(p + 2, 16, values);
    for (size_t i = 0; i < 32; ++i) values[i] = static_cast<uint8_t>(values[i] - 8);
  }
};

struct Q4_1 : Layout<20, 32, 32, true, false> {
  static void read(const uint8_t* p, uint8_t* values, float* scales, float* minima) {
    scales[0] = half_at(p);
    minima[0] = -half_at(p + 2);
    read_nibbles(p + 4, 16, values);
  }
};

struct Q5_0 : Layout<22, 32, 32, false, true> {
  static void read(const uint8_t* p, uint8_t* values, float* scales, float*) {
    scales[0] = half_at(p);
    read_nibbles(p + 6, 16, values);
    add_fifth_bits(p + 2, values);
    for (size_t i = 0; i < 32; ++i) values[i] = static_cast<uint8_t>(values[i] - 16);
  }
};

struct Q5_1 : Layout<24, 32, 32, true, false> {
  static void read(const uint8_t* p, uint8_t* values, float* scales, float* minima) {
    scales[0] = half_at(p);
    minima[0] = -half_at(p + 2);
    read_nibbles(p + 8, 16, values);
    add_fifth_bits(p + 4, values);
  }
};

struct Q8_0 : Layout<34, 32, 32, false, true> {
  static void read(const uint8_t* p, uint8_t* values, float* scales, float*) {
    scales[0] = half_at(p);
    std::memcpy(values, p + 2, 32);
  }
};

struct Q2_K : Layout<84, 256, 16, true, false> {
  static void read(const uint8_t* p, uint8_t* values, float* scales, float* minima) {
    const float scale = half_at(p + 80), minimum = half_at(p + 82);
    for (size_t i = 0; i < 16; ++i) {
      scales[i] = scale * static_cast<float>(p[i] & 15);
      minima[i] = minimum * static_cast<float>(p[i] >> 4);
    }
    for (size_t part = 0; part < 8; ++part, values += 32) {
      const uint8_t* packed = p + 16 + part / 4 * 32;
      for (size_t i = 0; i < 32; ++i) values[i] = packed[i] >> part % 4 * 2 & 3;
    }
  }
};

struct Q3_K : Layout<110, 256, 16, false, true> {
  static void read(const uint8_t* p, uint8_t* values, float* scales, float*) {
    const float scale = half_at(p + 108);
    for (size_t i = 0; i < 16; ++i) {
      const int low = p[96 + i % 8] >> i / 8 * 4 & 15, high = p[104 + i % 4] >> i / 4 * 2 & 3;
      scales[i] = scale * static_cast<float>((low | high << 4) - 32);
    }
    for (size_t part = 0; part < 8; ++part, values += 32) {
      const uint8_t* packed = p + 32 + part / 4 * 32;
      for (size_t i = 0; i < 32; ++i) {
        const int low = packed[i] >> part % 4 * 2 & 3, high = p[i] >> part & 1;
        values[i] = static_cast<uint8_t>((low | high << 2) - 4);
      }
    }
  }
};

// Those of Q4_K and Q5_K: 8 of 6 bits each in 12 bytes, times a float16 each.
inline void read_scales_and_minima(const uint8_t* p, float* scales, float* minima) {
  const float scale = half_at(p), minimum = half_at(p + 2);
  const uint8_t *low = p + 4, *middle = p + 8, *both = p + 12;
  for (size_t i = 0; i < 4; ++i) {
    scales[i] = scale * static_cast<float>(low[i] & 63);
    minima[i] = minimum * static_cast<float>(middle[i] & 63);
    scales[i + 4] = scale * static_cast<float>((both[i] & 15) | (low[i] >> 2 & 48));
    minima[i + 4] = minimum * static_cast<float>(both[i] >> 4 | (middle[i] >> 2 & 48));
  }
}

struct Q4_K : Layout<144, 256, 32, true, false> {
  static void read(const uint8_t* p, uint8_t* values, float* scales, float* minima) {
    read_scales_and_minima(p, scales, minima);
    for (size_t part = 0; part < 4; ++part) read_nibbles(p + 16 + part * 32, 32, values + part * 64);
  }
};

struct Q5_K : Layout<176, 256, 32, true, false> {
  static void read(const uint8_t* p, uint8_t* values, float* scales, float* minima) {
    read_scales_and_minima(p, scales, minima);
    for (size_t part = 0; part < 4; ++part) read_nibbles(p + 48 + part * 32, 32, values + part * 64);
    for (size_t part = 0; part < 8; ++part, values += 32) {
      for (size_t i = 0; i < 32; ++i) {
        values[i] |= static_cast<uint8_t>((p[16 + i] >> part & 1) << 4);
      }
    }
  }
};

struct Q6_K : Layout<210, 256, 16, false, true> {
  static void read(const uint8_t* p, uint8_t* values, float* scales, float*) {
    const float scale = half_at(p + 208);
    for (size_t i = 0; i < 16; ++i) {
      scales[i] = scale * static_cast<float>(static_cast<int8_t>(p[192 + i]));
    }
    for (size_t part = 0; part < 8; ++part, values += 32) {
      const uint8_t *low = p + part / 4 * 64 + part % 2 * 32, *high = p + 128 + part / 4 * 32;
      const size_t low_shift = part % 4 / 2 * 4, high_shift = part % 4 * 2;
      for (size_t i = 0; i < 32; ++i) {
        const int value = (low[i] >> low_shift & 15) | (high[i] >> high_shift & 3) << 4;
        values[i] = static_cast<uint8_t>(value - 32);
      }
    }
  }
};

template <typename Type>
void unpack(const uint8_t* stored, size_t count, const Unpacked& out) {
  constexpr size_t kBlocks = Type::kValues / Type::kBlock;
  for (size_t i = 0; i < count; ++i) {
    float* minima = Type::kMinima ? out.minima + i * kBlocks : nullptr;
    Type::read(stored + i * Type::kBytes, out.values + i * Type::kValues, out.scales + i * kBlocks, minima);
  }
}

template <typename Type>
void restore(const uint8_t* stored, size_t count, float* out) {
  constexpr size_t kBlock = Type::kBlock, kBlocks = Type::kValues / kBlock;
  for (size_t i = 0; i < count; ++i) {
    uint8_t values[Type::kValues];
    float scales[kBlocks], minima[kBlocks];
    Type::read(stored + i * Type::kBytes, values, scales, minima);
    for (size_t block = 0; block < kBlocks; ++block, out += kBlock) {
      const uint8_t* its = values + block * kBlock;
      for (size_t j = 0; j < kBlock; ++j) {
        const int value = Type::kSigned ? static_cast<int8_t>(its[j]) : its[j];
        const float product = scales[block] * static_cast<float>(value);
        out[j] = Type::kMinima ? product - minima[block] : product;
      }
    }
  }
}

template <typename Type>
constexpr StoredType stored_type(uint32_t number) {
  return {number, Type::kBytes, Type::kValues, unpack<Type>, restore<Type>};
}

// By their numbers in ggml.h.
constexpr StoredType kStoredTypes[] = {
    stored_type<Q4_0>(2),  stored_type<Q4_1>(3),  stored_type<Q5_0>(6),  stored_type<Q5_1>(7),
    stored_type<Q8_0>(8),  stored_type<Q2_K>(10), stored_type<Q3_K>(11), stored_type<Q4_K>(12),
    stored_type<Q5_K>(13), stored_type<Q6_K>(14),
};

const StoredType* find_stored_type(uint32_t number) {
  for (const StoredType& type : kStoredTypes) {
    if (type.number == number) return &type;
  }
  return nullptr;
}

}  // namespace
