// The matrix products in the middle: [rows, channels] x [channels, features], both in float32.
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

// Of two vectors of features, so many rows at a time: their sums, one row of weights and one number fill the registers, 32 or 16.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kRows = 12;
#else
constexpr int kRows = 6;
#endif

// Weights are laid out in blocks of so many features, one behind the other; what is left is a block of one vector.
constexpr int64_t kBlock = 2 * kLanes;

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

// One rounding where the processor can. Said, not left to the compiler, which may choose otherwise for another number of rows.
Vector multiply_add(Vector factor, float number, Vector sum) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(factor, _mm512_set1_ps(number), sum);
#elif defined(__FMA__)
  return _mm256_fmadd_ps(factor, _mm256_set1_ps(number), sum);
#elif defined(__aarch64__)
  return vfmaq_n_f32(sum, factor, number);
#else
  return sum + factor * number;
#endif
}

// ``Rows`` rows of a block of ``Vectors``: every sum over channels in their order, so that it does not depend on what else is computed.
template <int Rows, int Vectors>
void block_rows(const float* rows, const float* weights, float* made, int64_t channels, int64_t features) {
  Vector sums[Rows][Vectors] = {};
  for (int64_t channel = 0; channel < channels; ++channel) {
    Vector weight[Vectors];
    for (int place = 0; place < Vectors; ++place) weight[place] = load<Vector>(weights + (channel * Vectors + place) * kLanes);
    for (int row = 0; row < Rows; ++row) {
      const float number = rows[row * channels + channel];
      for (int place = 0; place < Vectors; ++place) sums[row][place] = multiply_add(weight[place], number, sums[row][place]);
    }
  }
#pragma GCC unroll 16
  for (int row = 0; row < Rows; ++row) {
#pragma GCC unroll 2
    for (int place = 0; place < Vectors; ++place) store(made + row * features + place * kLanes, sums[row][place]);
  }
}

template <int Rows, int Vectors>
void last_rows(int64_t count, const float* rows, const float* weights, float* made, int64_t channels, int64_t features) {
  if constexpr (Rows > 0) {
    if (count == Rows) return block_rows<Rows, Vectors>(rows, weights, made, channels, features);
    last_rows<Rows - 1, Vectors>(count, rows, weights, made, channels, features);
  }
}

template <int Vectors>
void block(int64_t count, const float* rows, const float* weights, float* made, int64_t channels, int64_t features) {
  for (; count >= kRows; count -= kRows, rows += kRows * channels, made += kRows * features) {
    block_rows<kRows, Vectors>(rows, weights, made, channels, features);
  }
  last_rows<kRows - 1, Vectors>(count, rows, weights, made, channels, features);
}

// The block of features that begins at ``first``. ``features`` is padded to whole vectors: as many as lie between two rows of ``made``.
void product(int64_t count, const float* rows, const float* weights, float* made, int64_t channels, int64_t features, int64_t first) {
  weights += first * channels;
  if (first + kBlock <= features) return block<2>(count, rows, weights, made + first, channels, features);
  block<1>(count, rows, weights, made + first, channels, features);
}

}  // namespace
