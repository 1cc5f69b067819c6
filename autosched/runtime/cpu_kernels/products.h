// Matrix products: [rows, channels] x [channels, features], both in float32.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

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

// So many numbers as Python has written.
template <typename T>
T read(const int64_t* numbers) {
  static_assert(std::is_trivially_copyable_v<T> && sizeof(T) % sizeof(int64_t) == 0);
  T made;
  std::memcpy(&made, numbers, sizeof(made));
  return made;
}

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

// Rows of numbers that lie ``apart``, and of results ``features`` apart; ``more``: the sums are added to what is there.
struct Rows {
  const float* numbers;
  int64_t apart;
  float* made;
  int64_t features;
  bool more = false;

  void skip(int64_t count) { numbers += count * apart, made += count * features; }
};

// ``Count`` rows of a block of ``Vectors``: every sum over channels in their order, so that it does not depend on what else is computed.
template <int Count, int Vectors>
void block_rows(const Rows& rows, const float* weights, int64_t channels) {
  const float* const numbers = rows.numbers;
  const int64_t apart = rows.apart;
  Vector sums[Count][Vectors] = {};
  for (int64_t channel = 0; channel < channels; ++channel) {
    Vector weight[Vectors];
    for (int place = 0; place < Vectors; ++place) weight[place] = load<Vector>(weights + (channel * Vectors + place) * kLanes);
    for (int row = 0; row < Count; ++row) {
      const float number = numbers[row * apart + channel];
      for (int place = 0; place < Vectors; ++place) sums[row][place] = multiply_add(weight[place], number, sums[row][place]);
    }
  }
#pragma GCC unroll 16
  for (int row = 0; row < Count; ++row) {
#pragma GCC unroll 2
    for (int place = 0; place < Vectors; ++place) {
      float* const to = rows.made + row * rows.features + place * kLanes;
      store(to, rows.more ? load<Vector>(to) + sums[row][place] : sums[row][place]);
    }
  }
}

template <int Count, int Vectors>
void last_rows(int64_t count, const Rows& rows, const float* weights, int64_t channels) {
  if constexpr (Count > 0) {
    if (count == Count) return block_rows<Count, Vectors>(rows, weights, channels);
    last_rows<Count - 1, Vectors>(count, rows, weights, channels);
  }
}

template <int Vectors>
void block(int64_t count, Rows rows, const float* weights, int64_t channels) {
  for (; count >= kRows; count -= kRows, rows.skip(kRows)) block_rows<kRows, Vectors>(rows, weights, channels);
  last_rows<kRows - 1, Vectors>(count, rows, weights, channels);
}

// How many features the block that begins at ``first`` has. ``features`` fill whole vectors.
int64_t block_width(int64_t features, int64_t first) { return first + kBlock <= features ? kBlock : kLanes; }

// The block of features that begins at ``first``, and at ``rows.made``. ``weights`` are its own.
void product(int64_t count, const Rows& rows, const float* weights, int64_t channels, int64_t first) {
  if (block_width(rows.features, first) == kBlock) return block<2>(count, rows, weights, channels);
  block<1>(count, rows, weights, channels);
}

}  // namespace
