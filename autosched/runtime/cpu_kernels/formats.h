// Numbers as memory has them: float32, or sixteen bits, bfloat16 (the upper half of a float32) and float16. What is computed with them is float32.
#pragma once

#include "vectors.h"

#include <cstdint>
#include <cstring>
#include <type_traits>

namespace {

using Half = uint16_t;
using Halves = Half __attribute__((vector_size(kLanes * sizeof(Half))));

// As Python numbers them.
enum class Format : int64_t { kFloat32, kBfloat16, kFloat16, kInt32 };

// As whole numbers. Compilers take several instructions for it if they are not told which one to take.
Bits wide(Halves halves) {
#if defined(__AVX512F__)
  return reinterpret_cast<Bits>(_mm512_cvtepu16_epi32(reinterpret_cast<__m256i>(halves)));
#elif defined(__AVX2__)
  return reinterpret_cast<Bits>(_mm256_cvtepu16_epi32(reinterpret_cast<__m128i>(halves)));
#else
  return __builtin_convertvector(halves, Bits);
#endif
}

struct Bfloat16Bits {
  static Vector widened(Halves halves) { return reinterpret_cast<Vector>(wide(halves) << 16); }

  // To the nearest, of two as near to the even one; what is not a number stays so.
  static Halves narrowed(Vector value) {
#if defined(__AVX512BF16__)
    return reinterpret_cast<Halves>(_mm512_cvtneps_pbh(value));
#else
    const Bits bits = reinterpret_cast<Bits>(value);
    const Bits rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return __builtin_convertvector(value == value ? rounded : Bits{} + 0x7fc0, Halves);
#endif
  }
};

struct Float16Bits {
#if defined(__AVX512F__)
  static Vector widened(Halves halves) { return _mm512_cvtph_ps(reinterpret_cast<__m256i>(halves)); }
  static Halves narrowed(Vector value) { return reinterpret_cast<Halves>(_mm512_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT)); }
#elif defined(__F16C__)
  static Vector widened(Halves halves) { return _mm256_cvtph_ps(reinterpret_cast<__m128i>(halves)); }
  static Halves narrowed(Vector value) { return reinterpret_cast<Halves>(_mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT)); }
#elif defined(__aarch64__)
  static Vector widened(Halves halves) { return vcvt_f32_f16(reinterpret_cast<float16x4_t>(halves)); }
  static Halves narrowed(Vector value) { return reinterpret_cast<Halves>(vcvt_f16_f32(value)); }
#else
  // An exponent has 15 added to it, that of a float32 127.
  static Vector widened(Halves halves) {
    const Bits bits = wide(halves), sign = (bits & 0x8000) << 16, size = (bits & 0x7fff) << 13;
    const Bits scaled = reinterpret_cast<Bits>(reinterpret_cast<Vector>(size) * spread(0x1p112f));
    return reinterpret_cast<Vector>(sign | ((bits & 0x7c00) == 0x7c00 ? size | 0x7f800000 : scaled));
  }

  // To the nearest, of two as near to the even one. What has fewer than eleven digits is rounded where 0.5 has its last of them.
  static Halves narrowed(Vector value) {
    const Bits bits = reinterpret_cast<Bits>(value), sign = (bits >> 16) & 0x8000, size = bits & 0x7fffffff;
    const Bits least = reinterpret_cast<Bits>(reinterpret_cast<Vector>(size) + spread(0.5f)) - reinterpret_cast<Bits>(spread(0.5f));
    const Bits usual = (size - (112 << 23) + 0xfff + ((size >> 13) & 1)) >> 13;
    const Bits number = size < (113 << 23) ? least : size < 0x477ff000 ? usual : Bits{} + 0x7c00;
    return __builtin_convertvector(sign | (value == value ? number : Bits{} + 0x7e00), Halves);
  }
#endif
};

// How numbers of a ``Packing`` are read and written: the first ``count`` numbers of a vector, or all if there are more. What is read beyond is zeros.
template <typename Packing>
struct Sixteen {
  using Number = Half;

  static Vector load(const Half* from, int64_t count = kLanes) {
    Halves there{};
    if (count >= kLanes) {
      std::memcpy(&there, from, sizeof(there));
    } else {
      std::memcpy(&there, from, count * sizeof(Half));
    }
    return Packing::widened(there);
  }

  static void store(Half* to, Vector value, int64_t count = kLanes) {
    const Halves made = Packing::narrowed(value);
    if (count >= kLanes) {
      std::memcpy(to, &made, sizeof(made));
    } else {
      std::memcpy(to, &made, count * sizeof(Half));
    }
  }
};

// Two vectors of numbers side by side, one behind the other.
template <typename Numbers>
struct OneByOne : Numbers {
  using Number = typename Numbers::Number;

  static void load_two(const Number* from, Vector& one, Vector& other) { one = Numbers::load(from), other = Numbers::load(from + kLanes); }
  static void store_two(Number* to, Vector one, Vector other) { Numbers::store(to, one), Numbers::store(to + kLanes, other); }
};

// Of pairs the first numbers, then the second: a shift for one, and nothing but zeros in the lower half for the other, make them float32.
struct Bfloat16 : Sixteen<Bfloat16Bits> {
  static void load_two(const Half* from, Vector& one, Vector& other) {
    Bits both;
    std::memcpy(&both, from, sizeof(both));
    one = reinterpret_cast<Vector>(both << 16), other = reinterpret_cast<Vector>(both & static_cast<int32_t>(0xffff0000));
  }

  static void store_two(Half* to, Vector one, Vector other) {
    const Bits both = wide(Bfloat16Bits::narrowed(one)) | (wide(Bfloat16Bits::narrowed(other)) << 16);
    std::memcpy(to, &both, sizeof(both));
  }
};

using Float16 = OneByOne<Sixteen<Float16Bits>>;

struct Float32s {
  using Number = float;
  static Vector load(const float* from, int64_t count = kLanes) { return load_some(from, count); }
  static void store(float* to, Vector value, int64_t count = kLanes) { store_some(to, value, count); }
};

using Float32 = OneByOne<Float32s>;

// ``count`` numbers side by side.
template <typename Numbers>
void widen(const Half* from, int64_t count, float* to) {
  for (int64_t place = 0; place < count; place += kLanes) store_some(to + place, Numbers::load(from + place, count - place), count - place);
}

// ``count`` numbers side by side as float32: where they are or, of sixteen bits, at ``room``.
template <typename Numbers>
const float* as_floats(const typename Numbers::Number* from, int64_t count, float* room) {
  if constexpr (std::is_same_v<Numbers, Float32>) {
    return from;
  } else {
    widen<Numbers>(from, count, room);
    return room;
  }
}

}  // namespace
