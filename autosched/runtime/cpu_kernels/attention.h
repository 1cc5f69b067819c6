// Attention where the scores of a few queries fit into a cache: softmax(scale * Q K' + mask) V (Vaswani et al. 2017,
// arXiv:1706.03762, equation 1).
//
// Keys and values of a head are copied once into blocks, as weights of products lie. Then a few queries at a time have their scores, what softmax
// makes of them, and their results, one behind the other, all from the nearest caches. No result depends on the number of threads.
#pragma once

#include "parallel.h"
#include "products.h"
#include "scores.h"
#include "scratch.h"

#include <algorithm>

namespace {

template <typename Numbers>
class Attending {
  using Number = typename Numbers::Number;

 public:
  Attending(const Attention& geometry, const Number* query, const Number* key, const Number* value, const void* mask, Number* made)
      : g(geometry), query(query), key(key), value(value), hiding(geometry, mask), made(made) {
    padded_keys = whole(g.keys), padded_features = whole(g.features);
  }

  void run() const {
    const int64_t products = g.batch * g.heads * g.queries * g.keys * (g.width + g.features);
    on_team(products < kLeastProducts ? 1 : g.threads, [&](int number, int count) {
      float* const keys = attention_scratch.of(padded_keys * g.width + g.keys * padded_features + kQueries * padded_keys + room());
      float* const values = keys + padded_keys * g.width;
      float* const scores = values + g.keys * padded_features;
      float* const room = scores + kQueries * padded_keys;
      const auto take = [&](int64_t item, int64_t shared) { take_keys(item, shared, keys, room), take_values(item, shared, values); };
      head_by_head(g, kQueries, number, count, take, [&](int64_t item, int64_t head, const Share& here) {
        some(item, head, here, keys, values, scores, room);
      });
    });
  }

 private:
  // So many queries at a time, at most.
  static constexpr int64_t kQueries = 2 * kRowsOfLongSums;
  static constexpr bool kInPlace = std::is_same_v<Numbers, Float32>;

  // For what is read or made in sixteen bits: four keys, queries or their results as float32.
  int64_t room() const { return kInPlace ? 0 : kQueries * std::max(whole(g.width), padded_features); }

  // As columns of blocks, each key times the scale; zeros where there are none.
  void take_keys(int64_t item, int64_t head, float* to, float* room) const {
    const Number* const from = key + g.key.at(item, head);
    for (int64_t first = 0; first < padded_keys; first += kBlock) {
      const int64_t wide = block_width(padded_keys, first);
      for (int64_t place = 0; place < wide; place += kFour) take_four(from, first + place, to + place, wide, room);
      to += wide * g.width;
    }
  }

  // Four keys, from ``first`` on, to columns that are ``wide`` numbers long.
  void take_four(const Number* from, int64_t first, float* to, int64_t wide, float* room) const {
    const float scale = number_of(g.scale);
    const float* keys[kFour];
    for (int64_t place = 0; place < kFour; ++place) {
      keys[place] = as_floats<Numbers>(from + std::min(first + place, g.keys - 1) * g.key.row_stride, g.width, room + place * g.width);
    }
    const float scales[kFour] = {
        first < g.keys ? scale : 0.0f, first + 1 < g.keys ? scale : 0.0f, first + 2 < g.keys ? scale : 0.0f, first + 3 < g.keys ? scale : 0.0f};
    const auto factors = load<Four>(scales);
    int64_t channel = 0;
    for (; channel + kFour <= g.width; channel += kFour) {
      const auto one = load<Four>(keys[0] + channel), two = load<Four>(keys[1] + channel);
      const auto three = load<Four>(keys[2] + channel), four = load<Four>(keys[3] + channel);
      const Four low = shuffled<0, 4, 1, 5>(one, two), high = shuffled<2, 6, 3, 7>(one, two);
      const Four other_low = shuffled<0, 4, 1, 5>(three, four), other_high = shuffled<2, 6, 3, 7>(three, four);
      float* const here = to + channel * wide;
      store(here, shuffled<0, 1, 4, 5>(low, other_low) * factors);
      store(here + wide, shuffled<2, 3, 6, 7>(low, other_low) * factors);
      store(here + 2 * wide, shuffled<0, 1, 4, 5>(high, other_high) * factors);
      store(here + 3 * wide, shuffled<2, 3, 6, 7>(high, other_high) * factors);
    }
    for (; channel < g.width; ++channel) {
      for (int64_t place = 0; place < kFour; ++place) to[channel * wide + place] = keys[place][channel] * scales[place];
    }
  }

  // As rows of blocks.
  void take_values(int64_t item, int64_t head, float* to) const {
    const Number* const from = value + g.value.at(item, head);
    for (int64_t first = 0; first < padded_features; first += kBlock) {
      const int64_t wide = block_width(padded_features, first);
      for (int64_t place = 0; place < g.keys; ++place, to += wide) {
        const Number* const numbers = from + place * g.value.row_stride + first;
        for (int64_t lane = 0; lane < wide; lane += kLanes) store(to + lane, load_at_most(numbers + lane, g.features - first - lane));
      }
    }
  }

  static Vector load_at_most(const Number* from, int64_t count) { return count <= 0 ? Vector{} : Numbers::load(from, count); }

  void some(int64_t item, int64_t head, const Share& here, const float* keys, const float* values, float* scores, float* room) const {
    const int64_t count = here.last - here.first;
    // Behind the place of the last of these queries none of them sees a key.
    const int64_t seen = g.causal != 0 ? std::min(g.keys, here.last) : g.keys, padded = whole(seen);
    const Number* const from = query + g.query.at(item, head) + here.first * g.query.row_stride;
    const float* asking = room;
    if constexpr (kInPlace) {
      asking = from;
    } else {
      for (int64_t place = 0; place < count; ++place) widen<Numbers>(from + place * g.query.row_stride, g.width, room + place * g.width);
    }
    const int64_t apart = kInPlace ? g.query.row_stride : g.width;
    for (int64_t first = 0; first < padded; first += kBlock) {
      const int64_t wide = block_width(padded_keys, first);
      autosched_product(count, {asking, apart, scores + first, padded_keys}, keys + first * g.width, g.width, wide, {.features = wide});
    }
    float shares[kQueries];
    for (int64_t place = 0; place < count; ++place) {
      const int64_t row = here.first + place, mine = g.causal != 0 ? std::min(seen, row + 1) : seen;
      float* const line = scores + place * padded_keys;
      hiding.hide(item, head, row, 0, mine, line);
      shares[place] = powers(line, mine, seen);
    }
    Number* const to = made + g.made.at(item, head) + here.first * g.made.row_stride;
    float* sums = room;
    if constexpr (kInPlace) sums = to;
    const int64_t between = kInPlace ? g.made.row_stride : padded_features;
    for (int64_t first = 0; first < padded_features; first += kBlock) {
      const int64_t wide = block_width(padded_features, first);
      const End end{.features = std::min(wide, g.features - first)};
      for (int64_t from = 0; from < seen; from += kSummed) {
        const float* const factors = values + first * g.keys + from * wide;
        autosched_product(count, {scores + from, padded_keys, sums + first, between, from > 0}, factors, std::min(kSummed, seen - from), wide, end);
      }
    }
    for (int64_t place = 0; place < count; ++place) multiply(sums + place * between, shares[place], to + place * g.made.row_stride);
  }

  void multiply(const float* numbers, float factor, Number* to) const {
    for (int64_t place = 0; place < g.features; place += kLanes) {
      Numbers::store(to + place, load_some(numbers + place, g.features - place) * spread(factor), g.features - place);
    }
  }

  const Attention& g;
  const Number* query;
  const Number* key;
  const Number* value;
  const Hiding<Numbers> hiding;
  Number* made;
  int64_t padded_keys = 0, padded_features = 0;
};

}  // namespace
