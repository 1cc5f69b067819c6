// Matrix products: [rows, channels] x [channels, features], both in float32.
#pragma once

#include "activations.h"
#include "vectors.h"

#include <algorithm>
#include <cstdint>
#include <type_traits>

namespace {

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

// So many products are added up before the sum is added to others: long sums lose less so, and the rows' part stays in the nearest cache.
constexpr int64_t kSummed = 512;

// So many results are worked on together: what they are made of stays in the nearest caches while all weights go by.
constexpr int64_t kPixels = 4 * kRows;
// So many where the weights take longer to come than they stay.
constexpr int64_t kMostRows = 512;

// Weights are laid out in blocks of so many features, one behind the other; what is left is a block of one vector.
constexpr int64_t kBlock = 2 * kLanes;

// More weights than that are not in a core's own caches when they are needed again.
constexpr int64_t kCachedWeights = (512 * 1024) / sizeof(float);

// The weights that are multiplied with next come from memory while the first so many groups of rows are computed, an even part with each.
constexpr int64_t kMostTimesAhead = 8;
constexpr int64_t kFewRows = 2;  // take no longer than their weights do as they come: to fetch those ahead takes time, and saves none
constexpr int64_t kLine = 64;  // bytes that come at once

// Rows of numbers that lie ``apart``, and of results ``features`` apart; ``more``: the sums are added to what is there. ``turned``: it is the
// columns that lie ``apart``. ``next``: weights, as many as these, to be fetched meanwhile, or null.
struct Rows {
  const float* numbers;
  int64_t apart;
  float* made;
  int64_t features;
  bool more = false;
  bool turned = false;
  const void* next = nullptr;
};

// Weights in float32, one for each channel. ``kWhole``: sums are whole numbers, written as they are.
struct Floats {
  using Weight = float;
  static constexpr bool kWhole = false;
  static Vector weights(const float* from) { return load<Vector>(from); }
  static Vector add(Vector weights, float number, Vector sums) { return multiply_add(weights, spread(number), sums); }
};

// What happens to the sums of a block before they are written, unless others are added to them later.
struct End {
  const float* bias = nullptr;
  const float* residual = nullptr;  // lies as the results do
  Follows follows = {};
  int64_t features = kBlock;  // so many of the block are results
  bool last = true;
};

// ``Count`` rows of a block of ``Vectors``: every sum over channels in their order, so that it does not depend on what else is computed.
// ``ahead``: what is fetched meanwhile, ``step`` bytes with each channel.
template <typename Factors, int Count, int Vectors, bool Turned>
void block_rows(const Rows& rows, int64_t first, const typename Factors::Weight* weights, int64_t channels, const End& end, const char* ahead, int64_t step) {
  const float* const numbers = rows.numbers + (Turned ? first : first * rows.apart);
  const int64_t apart = rows.apart;
  Vector sums[Count][Vectors] = {};
  const auto add = [&](int64_t channel) __attribute__((always_inline)) {
    Vector weight[Vectors];
    for (int place = 0; place < Vectors; ++place) weight[place] = Factors::weights(weights + (channel * Vectors + place) * kLanes);
    for (int row = 0; row < Count; ++row) {
      const float number = Turned ? numbers[channel * apart + row] : numbers[row * apart + channel];
      for (int place = 0; place < Vectors; ++place) sums[row][place] = Factors::add(weight[place], number, sums[row][place]);
    }
  };
  // Two loops: where nothing is fetched, to ask for every channel takes as long as a row of its products.
  if (step == 0) {
    for (int64_t channel = 0; channel < channels; ++channel) add(channel);
  } else {
    for (int64_t channel = 0; channel < channels; ++channel) {
      __builtin_prefetch(ahead + channel * step, 0, 2);
      if (step > kLine) __builtin_prefetch(ahead + channel * step + kLine, 0, 2);
      add(channel);
    }
  }
  if constexpr (Factors::kWhole) {
    for (int row = 0; row < Count; ++row) {
      for (int place = 0; place < Vectors; ++place) store(rows.made + (first + row) * rows.features + place * kLanes, sums[row][place]);
    }
    return;
  }
  // Where others are added later, nothing else happens to sums. Nothing is added with a minus zero, which leaves even that as it is.
  const Follows follows = end.last ? end.follows : Follows{};
  const auto write = [&](auto plain) __attribute__((always_inline)) {
#pragma GCC unroll 2
    for (int place = 0; place < Vectors; ++place) {
      const int64_t vector = place * kLanes;
      const Some<plain.value> here(end.features - vector);
      const Vector bias = end.bias == nullptr || !end.last ? spread(-0.0f) : here.load(end.bias + vector);
#pragma GCC unroll 16
      for (int row = 0; row < Count; ++row) {
        const int64_t to = (first + row) * rows.features + vector;
        Vector value = sums[row][place];
        if (!plain.value && rows.more) value += here.load(rows.made + to);
        value += bias;
        if (!plain.value && end.last && end.residual != nullptr) value += here.load(end.residual + to);
        here.store(rows.made + to, follows.limited(value));
      }
    }
  };
  // Most are whole, and made of these sums alone: two questions less for each of them.
  const bool plain = !rows.more && (end.residual == nullptr || !end.last) && end.features >= Vectors * kLanes;
  plain ? write(std::true_type{}) : write(std::false_type{});
  if (end.last && end.follows.activation != Activation::kNone) end.follows.over(rows.made + first * rows.features, Count, rows.features, end.features);
}

template <typename Factors, int Count, int Vectors, bool Turned>
void some_rows(
    int64_t count, const Rows& rows, int64_t first, const typename Factors::Weight* weights, int64_t channels, const End& end, const char* ahead, int64_t step) {
  if constexpr (Count > 0) {
    if (count == Count) return block_rows<Factors, Count, Vectors, Turned>(rows, first, weights, channels, end, ahead, step);
    some_rows<Factors, Count - 1, Vectors, Turned>(count, rows, first, weights, channels, end, ahead, step);
  }
}

// As few times as it takes, about as many rows each time.
template <typename Factors, int Vectors, bool Turned>
void block(int64_t count, const Rows& rows, const typename Factors::Weight* weights, int64_t channels, const End& end) {
  const int64_t most = Turned || channels <= kShortSum ? kRows : kRowsOfLongSums;
  const int64_t times = (count + most - 1) / most;
  // Bytes of weights that are fetched with each channel; lines of a cache come whole.
  constexpr int64_t kBytes = Vectors * kLanes * sizeof(typename Factors::Weight);
  const int64_t fetching = rows.next == nullptr || count <= kFewRows ? 0 : std::min(times, kMostTimesAhead);
  const int64_t step = fetching == 0 ? 0 : (kBytes + fetching - 1) / fetching;
  for (int64_t time = 0, first = 0; time < times; ++time) {
    const int64_t next = count * (time + 1) / times;
    const char* const ahead = static_cast<const char*>(rows.next) + time * channels * step;
    some_rows<Factors, kRows, Vectors, Turned>(next - first, rows, first, weights, channels, end, ahead, time < fetching ? step : 0);
    first = next;
  }
}

// How many features the block that begins at ``first`` has. ``features`` fill whole vectors.
int64_t block_width(int64_t features, int64_t first) { return first + kBlock <= features ? kBlock : kLanes; }

}  // namespace

// ``count`` rows of a block of features, ``width`` wide, that begins at ``rows.made``. ``weights`` are its own. Compiled once, for all that calls it.
extern "C" void autosched_product(int64_t count, const Rows& rows, const float* weights, int64_t channels, int64_t width, const End& end);
