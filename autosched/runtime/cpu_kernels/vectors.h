// Vectors of float32, as long as the processor's.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

using Vector = float __attribute__((vector_size(kLanes * sizeof(float))));
using Bits = int32_t __attribute__((vector_size(sizeof(Vector))));

// So many that they fill vectors.
int64_t whole(int64_t count) { return (count + kLanes - 1) / kLanes * kLanes; }

template <typename V>
V load(const float* from) {
  V made;
  std::memcpy(&made, from, sizeof(V));
  return made;
}

template <typename V>
void store(float* to, V value) {
  std::memcpy(to, &value, sizeof(V));
}

// A vector of one number. Nothing is taken away: adding nothing would make plus of a minus zero, and takes time.
Vector spread(float number) { return number - Vector{}; }

// One rounding where the processor can. Said, not left to the compiler, which may choose otherwise for another number of rows.
Vector multiply_add(Vector factor, Vector number, Vector sum) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(factor, number, sum);
#elif defined(__FMA__)
  return _mm256_fmadd_ps(factor, number, sum);
#elif defined(__aarch64__)
  return vfmaq_f32(sum, factor, number);
#else
  return sum + factor * number;
#endif
}

#if defined(__AVX512F__)
// The lanes of the first ``count`` numbers of a vector, or of all if there are more.
__mmask16 lanes_of(int64_t count) { return static_cast<__mmask16>(count >= kLanes ? 0xffff : (1u << count) - 1); }
#endif

// The first ``count`` numbers of a vector, or all if there are more; the others are zeros.
Vector load_some(const float* from, int64_t count) {
  if (count >= kLanes) return load<Vector>(from);
#if defined(__AVX512F__)
  return _mm512_maskz_loadu_ps(lanes_of(count), from);
#else
  Vector made = {};
  std::memcpy(&made, from, count * sizeof(float));
  return made;
#endif
}

void store_some(float* to, Vector value, int64_t count) {
  if (count >= kLanes) return store(to, value);
#if defined(__AVX512F__)
  _mm512_mask_storeu_ps(to, lanes_of(count), value);
#else
  std::memcpy(to, &value, count * sizeof(float));
#endif
}

// The same of several vectors, asked for once; ``All``: they are whole.
template <bool All>
class Some {
 public:
#if defined(__AVX512F__)
  explicit Some(int64_t count) : mask(lanes_of(count)) {}
  Vector load(const float* from) const { return All ? ::load<Vector>(from) : static_cast<Vector>(_mm512_maskz_loadu_ps(mask, from)); }
  void store(float* to, Vector value) const { All ? ::store(to, value) : _mm512_mask_storeu_ps(to, mask, value); }

 private:
  const __mmask16 mask;
#else
  explicit Some(int64_t count) : count(All ? kLanes : count) {}
  Vector load(const float* from) const { return load_some(from, count); }
  void store(float* to, Vector value) const { store_some(to, value, count); }

 private:
  const int64_t count;
#endif
};

// Of as many booleans as a vector has numbers: not zero where one is true.
Bits load_booleans(const bool* from) {
#if defined(__AVX512F__)
  return reinterpret_cast<Bits>(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
#elif defined(__AVX2__)
  return reinterpret_cast<Bits>(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
#else
  Bits made{};
  for (int lane = 0; lane < kLanes; ++lane) made[lane] = from[lane];
  return made;
#endif
}

// The numbers of ``value`` that ``order`` says, of eight from the same half of it.
Vector permuted(Vector value, Bits order) {
#if defined(__AVX512F__)
  return _mm512_permutexvar_ps(reinterpret_cast<__m512i>(order), value);
#elif defined(__AVX__)
  return _mm256_permutevar_ps(value, reinterpret_cast<__m256i>(order));
#else
  Vector made;
  for (int lane = 0; lane < kLanes; ++lane) made[lane] = value[order[lane]];
  return made;
#endif
}

// Not a number where ``value`` is none.
Vector at_least(Vector value, float least) {
#if defined(__AVX512F__)
  return _mm512_max_ps(spread(least), value);
#elif defined(__AVX__)
  return _mm256_max_ps(spread(least), value);
#else
  return value < spread(least) ? spread(least) : value;
#endif
}

// Not a number where one of both is none.
Vector largest(Vector value, Vector other) {
#if defined(__AVX512F__)
  const Vector more = _mm512_max_ps(value, other);
#elif defined(__AVX__)
  const Vector more = _mm256_max_ps(value, other);
#else
  const Vector more = value > other ? value : other;
#endif
  return value != value ? value : more;
}

Vector at_most(Vector value, float most) {
#if defined(__AVX512F__)
  return _mm512_min_ps(spread(most), value);
#elif defined(__AVX__)
  return _mm256_min_ps(spread(most), value);
#else
  return value > spread(most) ? spread(most) : value;
#endif
}

// The sum of all lanes, added in pairs.
float sum_of(Vector value) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps(value);
#else
  for (int count = kLanes / 2; count > 0; count /= 2) {
    for (int lane = 0; lane < count; ++lane) value[lane] += value[lane + count];
  }
  return value[0];
#endif
}

// The largest of all lanes, each of which is a number.
float largest_of(Vector value) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps(value);
#else
  for (int count = kLanes / 2; count > 0; count /= 2) {
    for (int lane = 0; lane < count; ++lane) value[lane] = value[lane] > value[lane + count] ? value[lane] : value[lane + count];
  }
  return value[0];
#endif
}

}  // namespace
