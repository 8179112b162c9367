// Stored elements, scales and the payload digest, one value at a time: the same code for the CPU and for the GPU.
//
// Arithmetic follows pdhandoff/native/encodings.py, which is the specification: float32, round to nearest even, true
// division. What a NaN's payload becomes is not specified; that it stays a NaN is.
#ifndef PDH_MATH_H
#define PDH_MATH_H

#include <cstdint>
#include <cstring>

#include "pdh_layout.h"

#if defined(__CUDACC__)
#define PDH_BOTH __host__ __device__ __forceinline__
#else
#define PDH_BOTH inline
#endif

namespace pdh {

constexpr uint64_t kGolden = 0x9E3779B97F4A7C15ull;
constexpr float kE4m3Max = 448.0f;
constexpr float kSmallestAmax = 1e-4f;  // vLLM's floor under amax where scales are powers of two
constexpr float kHadamardScale = 0.08838834764831845f;  // 128 ** -0.5
constexpr uint32_t kInfinity = 0x7F800000u;
constexpr uint32_t kNan = 0x7FC00000u;

PDH_BOTH uint32_t to_bits(float value) {
#if defined(__CUDA_ARCH__)
  return __float_as_uint(value);
#else
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
#endif
}

PDH_BOTH float from_bits(uint32_t bits) {
#if defined(__CUDA_ARCH__)
  return __uint_as_float(bits);
#else
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
#endif
}

PDH_BOTH int element_bytes(int element) {
  switch (element) {
    case PDH_BF16:
    case PDH_F16:
      return 2;
    case PDH_F32:
    case PDH_UE8M0X4:
      return 4;
    default:
      return 1;
  }
}

// The finaliser of splitmix64, see docs/spec/digest.md.
PDH_BOTH uint64_t mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}

PDH_BOTH uint64_t row_key(uint64_t head_key, uint64_t token) { return mix(head_key + (token + 1) * kGolden); }

// Word `index` of a row.
PDH_BOTH uint64_t hash_word(uint64_t word, uint64_t key, uint64_t index) { return mix(word ^ (key + (index + 1) * kGolden)); }

PDH_BOTH uint16_t encode_bf16(float value) {
  uint32_t bits = to_bits(value);
  if ((bits & 0x7FFFFFFFu) > kInfinity) return 0x7FFF;
  return static_cast<uint16_t>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}

PDH_BOTH float decode_bf16(uint16_t code) { return from_bits(static_cast<uint32_t>(code) << 16); }

PDH_BOTH uint16_t encode_f16(float value) {
  uint32_t bits = to_bits(value);
  uint32_t sign = (bits >> 16) & 0x8000u;
  bits &= 0x7FFFFFFFu;
  if (bits > kInfinity) return static_cast<uint16_t>(sign | 0x7E00u);
  if (bits >= 0x47800000u) return static_cast<uint16_t>(sign | 0x7C00u);  // 65536 and above
  if (bits < 0x38800000u) {  // below 2 ** -14: the sum's last bit is 2 ** -24, a step of subnormals
    return static_cast<uint16_t>(sign | (to_bits(from_bits(bits) + 0.5f) - 0x3F000000u));
  }
  return static_cast<uint16_t>(sign | ((bits - 0x38000000u + 0xFFFu + ((bits >> 13) & 1u)) >> 13));
}

PDH_BOTH float decode_f16(uint16_t code) {
  uint32_t sign = static_cast<uint32_t>(code & 0x8000u) << 16;
  uint32_t exponent = (code >> 10) & 31u;
  uint32_t mantissa = code & 0x3FFu;
  if (exponent == 0) return from_bits(sign | to_bits(static_cast<float>(mantissa) * 0x1p-24f));
  if (exponent == 31) return from_bits(sign | kInfinity | mantissa << 13);
  return from_bits(sign | (exponent + 112u) << 23 | mantissa << 13);
}

// |value| is at most 448, or a NaN.
PDH_BOTH uint8_t encode_e4m3(float value) {
  uint32_t bits = to_bits(value);
  uint32_t sign = (bits >> 24) & 0x80u;
  bits &= 0x7FFFFFFFu;
  if (bits > kInfinity) return static_cast<uint8_t>(sign | 0x7Fu);
  if (bits < 0x3C800000u) {  // below 2 ** -6: the sum's last bit is 2 ** -9, a step of subnormals
    return static_cast<uint8_t>(sign | (to_bits(from_bits(bits) + 0x1p14f) - 0x46800000u));
  }
  return static_cast<uint8_t>(sign | ((bits - 0x3C000000u + 0x7FFFFu + ((bits >> 20) & 1u)) >> 20));
}

PDH_BOTH float decode_e4m3(uint8_t code) {
  uint32_t sign = static_cast<uint32_t>(code & 0x80u) << 24;
  uint32_t exponent = (code >> 3) & 15u;
  uint32_t mantissa = code & 7u;
  if ((code & 0x7Fu) == 0x7Fu) return from_bits(sign | kNan);
  if (exponent == 0) return from_bits(sign | to_bits(static_cast<float>(mantissa) * 0x1p-9f));
  return from_bits(sign | (exponent + 120u) << 23 | mantissa << 20);
}

// The smallest power of two that is not below the scale, as an exponent byte; 255 where there is none.
PDH_BOTH uint8_t encode_ue8m0(float scale) {
  uint32_t bits = to_bits(scale);
  if ((bits & 0x7FFFFFFFu) == 0) return 0;
  if (bits >= kInfinity) return 255;  // infinite, NaN or negative
  uint32_t exponent = bits >> 23;
  uint32_t mantissa = bits & 0x7FFFFFu;
  if (exponent == 0) return bits > 0x400000u;
  return static_cast<uint8_t>(exponent + (mantissa != 0));
}

PDH_BOTH float decode_ue8m0(uint8_t exponent) {
  if (exponent == 0) return from_bits(0x400000u);
  if (exponent == 255) return from_bits(kNan);
  return from_bits(static_cast<uint32_t>(exponent) << 23);
}

// Stored bytes as a little-endian integer, at any alignment.
PDH_BOTH uint32_t load_bytes(const uint8_t *from, int bytes) {
  uint32_t value = 0;
  for (int i = 0; i < bytes; i++) value |= static_cast<uint32_t>(from[i]) << (8 * i);
  return value;
}

PDH_BOTH void store_bytes(uint8_t *to, uint32_t value, int bytes) {
  for (int i = 0; i < bytes; i++) to[i] = static_cast<uint8_t>(value >> (8 * i));
}

PDH_BOTH float load_element(const uint8_t *from, int element) {
  switch (element) {
    case PDH_BF16:
      return decode_bf16(static_cast<uint16_t>(load_bytes(from, 2)));
    case PDH_F16:
      return decode_f16(static_cast<uint16_t>(load_bytes(from, 2)));
    case PDH_F32:
      return from_bits(load_bytes(from, 4));
    case PDH_E4M3:
      return decode_e4m3(*from);
    case PDH_UE8M0:
      return decode_ue8m0(*from);
    default: {  // UE8M0X4: where the four bytes differ it was no such scale
      uint32_t word = load_bytes(from, 4);
      return word == (word & 255u) * 0x01010101u ? decode_ue8m0(static_cast<uint8_t>(word)) : from_bits(kNan);
    }
  }
}

PDH_BOTH void store_element(uint8_t *to, int element, float value) {
  switch (element) {
    case PDH_BF16:
      store_bytes(to, encode_bf16(value), 2);
      break;
    case PDH_F16:
      store_bytes(to, encode_f16(value), 2);
      break;
    case PDH_F32:
      store_bytes(to, to_bits(value), 4);
      break;
    case PDH_E4M3:
      *to = encode_e4m3(value);
      break;
    case PDH_UE8M0:
      *to = encode_ue8m0(value);
      break;
    default:
      store_bytes(to, encode_ue8m0(value) * 0x01010101u, 4);
  }
}

// The scale of a block whose largest finite magnitude is `amax`: amax / 448, or the next power of two.
PDH_BOTH float block_scale(float amax, bool power_of_two) {
  if (!power_of_two) {
    float scale = amax / kE4m3Max;
    return scale > 0.0f ? scale : 1.0f;
  }
  uint32_t bits = to_bits((amax > kSmallestAmax ? amax : kSmallestAmax) / kE4m3Max);
  return from_bits((bits & kInfinity) + ((bits & 0x7FFFFFu) != 0 ? 0x800000u : 0u));
}

PDH_BOTH float magnitude(float value) {  // 0 where it is not finite
  uint32_t bits = to_bits(value) & 0x7FFFFFFFu;
  return bits < kInfinity ? from_bits(bits) : 0.0f;
}

PDH_BOTH float saturated(float value) {  // NaN stays
  return value > kE4m3Max ? kE4m3Max : value < -kE4m3Max ? -kE4m3Max : value;
}

}  // namespace pdh

#endif
