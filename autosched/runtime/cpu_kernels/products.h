// Matrix products: [rows, channels] x [channels, features], both in float32.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>
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

// Of two vectors of features, so many rows at a time: their sums, one row of weights and one number fill the registers, 32 or 16. Where rows
// lie apart, more of them than twelve take more addresses than there are registers for: short sums alone gain by it.
#if defined(__AVX512F__)
constexpr int kRows = 14, kRowsOfLongSums = 12;
#elif defined(__aarch64__)
constexpr int kRows = 12, kRowsOfLongSums = 12;
#else
constexpr int kRows = 6, kRowsOfLongSums = 6;
#endif
constexpr int64_t kShortSum = 64;

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

// The first ``count`` numbers of a vector, if ``Whole`` does not say that there are enough; the others are zeros.
template <bool Whole>
Vector load_some(const float* from, int64_t count) {
  if constexpr (Whole) return load<Vector>(from);
#if defined(__AVX512F__)
  return _mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << count) - 1), from);
#else
  Vector made = {};
  std::memcpy(&made, from, count * sizeof(float));
  return made;
#endif
}

template <bool Whole>
void store_some(float* to, Vector value, int64_t count) {
  if constexpr (Whole) return store(to, value);
#if defined(__AVX512F__)
  _mm512_mask_storeu_ps(to, static_cast<__mmask16>((1u << count) - 1), value);
#else
  std::memcpy(to, &value, count * sizeof(float));
#endif
}

// Results lie between these.
struct Limits {
  float least = -std::numeric_limits<float>::infinity(), most = std::numeric_limits<float>::infinity();

  // What is not a number stays what it is.
  Vector of(Vector value) const {
    const Vector low = spread(least), high = spread(most);
#if defined(__AVX512F__)
    return _mm512_min_ps(high, _mm512_max_ps(low, value));
#elif defined(__AVX__)
    return _mm256_min_ps(high, _mm256_max_ps(low, value));
#else
    value = value < low ? low : value;
    return value > high ? high : value;
#endif
  }

  float of(float value) const {
    value = value < least ? least : value;
    return value > most ? most : value;
  }
};

// The float of those bits.
float number_of(int64_t bits) {
  const auto low = static_cast<uint32_t>(bits);
  float made;
  std::memcpy(&made, &low, sizeof(made));
  return made;
}

// Rows of numbers that lie ``apart``, and of results ``features`` apart; ``more``: the sums are added to what is there. ``turned``: it is the
// columns that lie ``apart``.
struct Rows {
  const float* numbers;
  int64_t apart;
  float* made;
  int64_t features;
  bool more = false;
  bool turned = false;
};

// What happens to the sums of a block before they are written, unless others are added to them later.
struct End {
  const float* bias = nullptr;
  const float* residual = nullptr;  // lies as the results do
  Limits limits = {};
  int64_t features = kBlock;  // so many of the block are results
  bool last = true;
};

// The results at ``made + place``, in the vector of the block that begins at ``vector``.
template <bool Whole>
void finish(Vector value, const Rows& rows, const End& end, int64_t place, int64_t vector) {
  const int64_t count = end.features - vector;
  if (rows.more) value += load_some<Whole>(rows.made + place, count);
  if (end.last) {
    if (end.bias != nullptr) value += load_some<Whole>(end.bias + vector, count);
    if (end.residual != nullptr) value += load_some<Whole>(end.residual + place, count);
    value = end.limits.of(value);
  }
  store_some<Whole>(rows.made + place, value, count);
}

// ``Count`` rows of a block of ``Vectors``: every sum over channels in their order, so that it does not depend on what else is computed.
// ``Whole``: all of the block's features are results.
template <int Count, int Vectors, bool Whole, bool Turned>
void block_rows(const Rows& rows, int64_t first, const float* weights, int64_t channels, const End& end) {
  const float* const numbers = rows.numbers + (Turned ? first : first * rows.apart);
  const int64_t apart = rows.apart;
  Vector sums[Count][Vectors] = {};
  for (int64_t channel = 0; channel < channels; ++channel) {
    Vector weight[Vectors];
    for (int place = 0; place < Vectors; ++place) weight[place] = load<Vector>(weights + (channel * Vectors + place) * kLanes);
    for (int row = 0; row < Count; ++row) {
      const float number = Turned ? numbers[channel * apart + row] : numbers[row * apart + channel];
      for (int place = 0; place < Vectors; ++place) sums[row][place] = multiply_add(weight[place], spread(number), sums[row][place]);
    }
  }
#pragma GCC unroll 16
  for (int row = 0; row < Count; ++row) {
    const int64_t to = (first + row) * rows.features;
#pragma GCC unroll 2
    for (int place = 0; place < Vectors; ++place) {
      if (Whole || place + 1 < Vectors) {
        finish<true>(sums[row][place], rows, end, to + place * kLanes, place * kLanes);
      } else {
        finish<false>(sums[row][place], rows, end, to + place * kLanes, place * kLanes);
      }
    }
  }
}

template <int Count, int Vectors, bool Whole, bool Turned>
void some_rows(int64_t count, const Rows& rows, int64_t first, const float* weights, int64_t channels, const End& end) {
  if constexpr (Count > 0) {
    if (count == Count) return block_rows<Count, Vectors, Whole, Turned>(rows, first, weights, channels, end);
    some_rows<Count - 1, Vectors, Whole, Turned>(count, rows, first, weights, channels, end);
  }
}

// As few times as it takes, about as many rows each time.
template <int Vectors, bool Whole, bool Turned>
void block(int64_t count, const Rows& rows, const float* weights, int64_t channels, const End& end) {
  const int64_t most = Turned || channels <= kShortSum ? kRows : kRowsOfLongSums;
  const int64_t times = (count + most - 1) / most;
  for (int64_t time = 0, first = 0; time < times; ++time) {
    const int64_t next = count * (time + 1) / times;
    some_rows<kRows, Vectors, Whole, Turned>(next - first, rows, first, weights, channels, end);
    first = next;
  }
}

// How many features the block that begins at ``first`` has. ``features`` fill whole vectors.
int64_t block_width(int64_t features, int64_t first) { return first + kBlock <= features ? kBlock : kLanes; }

template <bool Turned>
void blocks(int64_t count, const Rows& rows, const float* weights, int64_t channels, int64_t width, const End& end) {
  const bool whole = end.features >= width;
  if (width == kBlock && whole) return block<2, true, Turned>(count, rows, weights, channels, end);
  if (width == kBlock) return block<2, false, Turned>(count, rows, weights, channels, end);
  if (whole) return block<1, true, Turned>(count, rows, weights, channels, end);
  block<1, false, Turned>(count, rows, weights, channels, end);
}

// ``count`` rows of a block of features, ``width`` wide, that begins at ``rows.made``. ``weights`` are its own.
void product(int64_t count, const Rows& rows, const float* weights, int64_t channels, int64_t width, const End& end) {
  rows.turned ? blocks<true>(count, rows, weights, channels, width, end) : blocks<false>(count, rows, weights, channels, width, end);
}

}  // namespace
