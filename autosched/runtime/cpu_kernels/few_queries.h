// Attention of a few queries, as a step of decoding asks: keys and values are read once, as they lie, for all queries of all heads that share them.
// What a mask hides from all of those, before the first key that one of them sees and behind the last, is not read. No result depends on the number of
// threads.
#pragma once

#include "formats.h"
#include "parallel.h"
#include "products.h"
#include "scores.h"
#include "scratch.h"

#include <algorithm>
#include <cstdint>
#include <type_traits>

namespace {

// With fewer queries than that copying keys takes longer than it saves.
constexpr int64_t kFewQueries = 8;

template <typename Numbers>
class AskingFew {
  using Number = typename Numbers::Number;

 public:
  AskingFew(const Attention& geometry, const Number* query, const Number* key, const Number* value, const void* mask, Number* made)
      : g(geometry), query(query), key(key), value(value), hiding(geometry, mask), made(made) {}

  void run() const {
    const int64_t shared = g.heads / g.sharing, units = g.batch * shared, rows = g.sharing * g.queries;
    // Keys and values come from memory: that takes longer than their products.
    const int64_t products = units * g.keys * (g.width + g.features) * kFour;
    on_team(products < kLeastProducts ? 1 : g.threads, [&](int number, int count) {
      const Share mine(units, number, count);
      const int64_t padded = whole(g.keys);
      float* const scores = attention_scratch.of(rows * padded);
      for (int64_t unit = mine.first; unit < mine.last; ++unit) all(unit / shared, unit % shared, scores, padded);
    });
  }

 private:
  // Vectors of features that results are added up in at a time.
  static constexpr int kVectors = 4;

  // Rows of keys or values lie apart where those of other heads are between them, so that processors do not foresee which come next. In float32 each
  // of them takes so long that nothing is gained.
  static void fetch(const Number* from, int64_t apart, int64_t count) {
    if constexpr (!std::is_same_v<Numbers, Float32>) {
      constexpr int64_t kAhead = 16, kInLine = kLine / static_cast<int64_t>(sizeof(Number));
      for (int64_t place = 0; place < count; place += kInLine) __builtin_prefetch(from + kAhead * apart + place, 0, 2);
    }
  }

  void all(int64_t item, int64_t shared, float* scores, int64_t apart) const {
    const int64_t rows = g.sharing * g.queries, first_head = shared * g.sharing;
    const Share seen = seen_of(item, first_head);
    const int64_t count = seen.last - seen.first;
    const Number* const keys = key + g.key.at(item, shared) + seen.first * g.key.row_stride;
    for (int64_t four = 0; four < count; four += kFour) {
      for (int64_t row = 0; row < rows; ++row) {
        const Number* const asking = query + g.query.at(item, first_head + row / g.queries) + row % g.queries * g.query.row_stride;
        products_with(asking, keys + four * g.key.row_stride, count - four, scores + row * apart + four);
      }
    }
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t head = first_head + row / g.queries, place = row % g.queries;
      const int64_t mine = g.causal != 0 ? std::clamp<int64_t>(place + 1 - seen.first, 0, count) : count;
      float* const line = scores + row * apart;
      hiding.hide(item, head, place, seen.first, mine, line);
      const float share = powers(line, mine, count);
      for (int64_t each = 0; each < count; ++each) line[each] *= share;
    }
    const Number* const values = value + g.value.at(item, shared) + seen.first * g.value.row_stride;
    int64_t row = 0;
    for (; row + 1 < rows; row += 2) results<2>(item, first_head, row, scores + row * apart, apart, values, count);
    if (row < rows) results<1>(item, first_head, row, scores + row * apart, apart, values, count);
  }

  // Of ``Rows`` queries, from ``row`` on, whose shares of each key lie ``apart``.
  template <int Rows>
  void results(int64_t item, int64_t first_head, int64_t row, const float* shares, int64_t apart, const Number* values, int64_t count) const {
    Number* to[Rows];
    for (int each = 0; each < Rows; ++each) {
      to[each] = made + g.made.at(item, first_head + (row + each) / g.queries) + (row + each) % g.queries * g.made.row_stride;
    }
    int64_t feature = 0;
    for (; feature + kVectors * kLanes <= g.features; feature += kVectors * kLanes) {
      summed_up<Rows, kVectors>(shares, apart, values, feature, count, to);
    }
    for (; feature < g.features; feature += kLanes) summed_up<Rows, 1>(shares, apart, values, feature, count, to);
  }

  // The keys that some query of these heads sees lie in between.
  Share seen_of(int64_t item, int64_t first_head) const {
    Share seen(g.keys, 0);
    for (int64_t row = 0; row < g.sharing * g.queries; ++row) {
      const int64_t place = row % g.queries, most = g.causal != 0 ? std::min(g.keys, place + 1) : g.keys;
      const Share mine = hiding.seen(item, first_head + row / g.queries, place, most);
      if (mine.first < mine.last) seen = {std::min(seen.first, mine.first), std::max(seen.last, mine.last)};
    }
    return seen.first < seen.last ? seen : Share(0, 0);
  }

  // Of a query with four keys, or with what there is of them.
  void products_with(const Number* asking, const Number* keys, int64_t count, float* to) const {
    Vector sums[kFour] = {};
    const Number* from[kFour];
    for (int64_t place = 0; place < kFour; ++place) from[place] = keys + std::min(place, count - 1) * g.key.row_stride;
    for (int64_t place = 0; place < kFour; ++place) fetch(from[place], g.key.row_stride, g.width);
    int64_t channel = 0;
#if defined(__AVX512BF16__)
    if constexpr (std::is_same_v<Numbers, Bfloat16>) {
      for (; channel + 2 * kLanes <= g.width; channel += 2 * kLanes) {
        const auto numbers = reinterpret_cast<__m512bh>(_mm512_loadu_si512(asking + channel));
        for (int place = 0; place < kFour; ++place) {
          sums[place] = _mm512_dpbf16_ps(sums[place], numbers, reinterpret_cast<__m512bh>(_mm512_loadu_si512(from[place] + channel)));
        }
      }
    }
#endif
    for (; channel + kLanes <= g.width; channel += kLanes) {
      const Vector numbers = Numbers::load(asking + channel);
      for (int place = 0; place < kFour; ++place) sums[place] = multiply_add(Numbers::load(from[place] + channel), numbers, sums[place]);
    }
    if (channel < g.width) {
      const Vector numbers = Numbers::load(asking + channel, g.width - channel);
      for (int place = 0; place < kFour; ++place) {
        sums[place] = multiply_add(Numbers::load(from[place] + channel, g.width - channel), numbers, sums[place]);
      }
    }
    store(to, totals(sums) * (number_of(g.scale) - Four{}));
  }

  static Four totals(const Vector (&sums)[kFour]) {
#if defined(__AVX512F__)
    // A quarter has some of each sum, then all of a quarter's own of each; then quarters are added.
    const Vector low = _mm512_unpacklo_ps(sums[0], sums[1]) + _mm512_unpackhi_ps(sums[0], sums[1]);
    const Vector high = _mm512_unpacklo_ps(sums[2], sums[3]) + _mm512_unpackhi_ps(sums[2], sums[3]);
    const Vector all = _mm512_shuffle_ps(low, high, 0x44) + _mm512_shuffle_ps(low, high, 0xee);
    const Vector halves = all + static_cast<Vector>(_mm512_shuffle_f32x4(all, all, 0x4e));
    return _mm512_castps512_ps128(halves) + _mm512_castps512_ps128(_mm512_shuffle_f32x4(halves, halves, 0x1));
#else
    return totals(quarter(sums[0]), quarter(sums[1]), quarter(sums[2]), quarter(sums[3]));
#endif
  }

  // Lanes added to lanes, until four are left.
  static Four quarter(Vector numbers) {
    float lanes[kLanes];
    store(lanes, numbers);
    auto sum = load<Four>(lanes);
    for (int lane = kFour; lane < kLanes; lane += kFour) sum += load<Four>(lanes + lane);
    return sum;
  }

  // The sum of each.
  static Four totals(Four one, Four two, Four three, Four four) {
    const Four low = shuffled<0, 2, 4, 6>(one, two) + shuffled<1, 3, 5, 7>(one, two);
    const Four high = shuffled<0, 2, 4, 6>(three, four) + shuffled<1, 3, 5, 7>(three, four);
    return shuffled<0, 2, 4, 6>(low, high) + shuffled<1, 3, 5, 7>(low, high);
  }

  // Rows of values, each times its share, from vectors of features or from what there is of one.
  template <int Rows, int Vectors>
  void summed_up(const float* shares, int64_t apart, const Number* values, int64_t feature, int64_t count, Number* const (&to)[Rows]) const {
    const int64_t features = g.features - feature;
    Vector sums[Rows][Vectors] = {};
    constexpr bool kPairs = Vectors > 1;  // of vectors, in whatever order their numbers are read
    for (int64_t place = 0; place < count; ++place) {
      const Number* const numbers = values + place * g.value.row_stride + feature;
      if (Vectors > 1) fetch(numbers, g.value.row_stride, Vectors * kLanes);
      Vector there[Vectors];
      if constexpr (kPairs) {
#pragma GCC unroll 2
        for (int pair = 0; pair < Vectors; pair += 2) Numbers::load_two(numbers + pair * kLanes, there[pair], there[pair + 1]);
      } else {
        there[0] = Numbers::load(numbers, features);
      }
#pragma GCC unroll 4
      for (int vector = 0; vector < Vectors; ++vector) {
#pragma GCC unroll 2
        for (int row = 0; row < Rows; ++row) sums[row][vector] = multiply_add(there[vector], spread(shares[row * apart + place]), sums[row][vector]);
      }
    }
    for (int row = 0; row < Rows; ++row) {
      if constexpr (kPairs) {
        for (int pair = 0; pair < Vectors; pair += 2) Numbers::store_two(to[row] + feature + pair * kLanes, sums[row][pair], sums[row][pair + 1]);
      } else {
        Numbers::store(to[row] + feature, sums[row][0], features);
      }
    }
  }

  const Attention& g;
  const Number* query;
  const Number* key;
  const Number* value;
  const Hiding<Numbers> hiding;
  Number* made;
};

}  // namespace
