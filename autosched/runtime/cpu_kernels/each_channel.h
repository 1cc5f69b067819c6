// Convolutions with a group for each channel: vectors of channels are summed where they lie.
#pragma once

#include "direct.h"
#include "parallel.h"
#include "products.h"

#include <algorithm>

namespace {

// One vector of two, or what there is of a single one.
template <int Vectors>
Vector load_channels(const float* from, int64_t channels) {
  return Vectors > 1 ? load<Vector>(from) : load_some(from, channels);
}

// What is multiplied with a row of weights, from ``left`` on, and how far numbers and weights are apart.
struct Row {
  const float* numbers;
  int64_t apart;
  const float* factors;
  int64_t factors_apart;
  int64_t channels;  // that there are
  int64_t left, width;
};

// Added to ``Count`` results next to each other: each number is read once. ``Inside``: all of them lie inside of the picture. (Pointers, since
// GCC 12 makes slower code of functions that are handed over.)
template <int Vectors, int Wide, int Step, int Count, bool Inside>
__attribute__((always_inline)) inline void add_row(Vector (&sums)[Count][Vectors], const Row& row) {
#pragma GCC unroll 2
  for (int place = 0; place < Vectors; ++place) {
    Vector weight[Wide];
#pragma GCC unroll 8
    for (int column = 0; column < Wide; ++column) {
      weight[column] = load_channels<Vectors>(row.factors + column * row.factors_apart + place * kLanes, row.channels);
    }
#pragma GCC unroll 32
    for (int number = 0; number < (Count - 1) * Step + Wide; ++number) {
      const int64_t x = row.left + number;
      Vector there = {};
      if (Inside || (x >= 0 && x < row.width)) there = load_channels<Vectors>(row.numbers + number * row.apart + place * kLanes, row.channels);
#pragma GCC unroll 8
      for (int result = 0; result < Count; ++result) {
        const int column = number - result * Step;
        if (column >= 0 && column < Wide) sums[result][place] = multiply_add(weight[column], there, sums[result][place]);
      }
    }
  }
}

// Weights are [tall, wide, channels]; a channel follows the one before in the picture.
class EachChannel {
 public:
  EachChannel(const Direct& geometry, const float* picture, float* made, const float* residual, const float* bias, const float* weights)
      : g(geometry), picture(picture), made(made), residual(residual), bias(bias), weights(weights) {
    follows = g.following.read();
  }

  void run() const {
    const int64_t lines = g.batch * g.out_height;
    const int64_t products = lines * g.out_width * g.channels * g.tall * g.wide;
    on_team(products < kLeastProducts ? 1 : g.threads, [&](int number, int count) {
      const Share mine(lines, number, count);
      for (int64_t line = mine.first; line < mine.last; ++line) {
        int64_t channel = 0;
        for (; channel + kBlock <= g.channels; channel += kBlock) along<2>(line, channel);
        for (; channel < g.channels; channel += kLanes) along<1>(line, channel);
      }
    });
  }

 private:
  // Results next to each other, the numbers that they are made of, and a few channels.
  struct Part {
    const float* from;  // what the first weight of the first result is multiplied with
    int64_t pixel, count, left;
    int64_t begin, end;  // rows of weights that lie inside of the picture
    int64_t channel;
  };

  // A few channels of a line: as many as two vectors have, or as one has at most.
  template <int Vectors>
  void along(int64_t line, int64_t channel) const {
    const bool adjacent = g.apart_across == 1, every = adjacent && g.step_across == 1, second = adjacent && g.step_across == 2;
    if (every && g.wide == 3) return parts<Vectors, 3, 1, 8>(line, channel);
    if (every && g.wide == 5) return parts<Vectors, 5, 1, 8>(line, channel);
    if (every && g.wide == 7) return parts<Vectors, 7, 1, 8>(line, channel);
    if (second && g.wide == 3) return parts<Vectors, 3, 2, 4>(line, channel);
    if (second && g.wide == 5) return parts<Vectors, 5, 2, 4>(line, channel);
    parts<Vectors, 0, 0, 1>(line, channel);
  }

  template <int Vectors, int Wide, int Step, int Count>
  void parts(int64_t line, int64_t channel) const {
    const int64_t top = line % g.out_height * g.step_down - g.top;
    const Inside rows(top, g.height, g.tall, g.apart_down);
    const float* const from = picture + line / g.out_height * g.batch_stride + top * g.row_stride + channel;
    for (int64_t across = 0; across < g.out_width; across += Count) {
      const int64_t left = across * g.step_across - g.left;
      const Part part{
          from + left * g.column_stride, line * g.out_width + across, std::min<int64_t>(Count, g.out_width - across), left, rows.begin, rows.end, channel};
      if constexpr (Wide == 0) {
        one<Vectors>(part);
      } else if (left >= 0 && left + (Count - 1) * Step + Wide <= g.width && part.count == Count) {
        some<Vectors, Wide, Step, Count, true>(part);
      } else {
        some<Vectors, Wide, Step, Count, false>(part);
      }
    }
    if (follows.activation == Activation::kNone) return;
    const int64_t width = std::min<int64_t>(Vectors * kLanes, g.channels - channel);
    follows.over(made + line * g.out_width * g.channels + channel, g.out_width, g.channels, width);
  }

  // Each number is read once. ``Inside``: all of them lie inside of the picture.
  template <int Vectors, int Wide, int Step, int Count, bool Inside>
  void some(const Part& part) const {
    const int64_t channels = g.channels - part.channel;
    Vector sums[Count][Vectors] = {};
    for (int64_t row = part.begin; row < part.end; ++row) {
      const float* const numbers = part.from + row * g.apart_down * g.row_stride;
      const float* const factors = weights + row * Wide * g.channels + part.channel;
      add_row<Vectors, Wide, Step, Count, Inside>(sums, {numbers, g.column_stride, factors, g.channels, channels, part.left, g.width});
    }
#pragma GCC unroll 8
    for (int result = 0; result < Count; ++result) {
      if (Inside || result < part.count) finish<Vectors>(sums[result], part.pixel + result, part.channel);
    }
  }

  // A result with weights of any size.
  template <int Vectors>
  void one(const Part& part) const {
    const int64_t channels = g.channels - part.channel;
    Vector sums[Vectors] = {};
    for (int64_t row = part.begin; row < part.end; ++row) {
      for (int64_t column = 0; column < g.wide; ++column) {
        const int64_t x = part.left + column * g.apart_across;
        if (x < 0 || x >= g.width) continue;
        const float* const numbers = part.from + row * g.apart_down * g.row_stride + column * g.apart_across * g.column_stride;
        const float* const factors = weights + (row * g.wide + column) * g.channels + part.channel;
#pragma GCC unroll 2
        for (int place = 0; place < Vectors; ++place) {
          const Vector weight = load_channels<Vectors>(factors + place * kLanes, channels);
          sums[place] = multiply_add(weight, load_channels<Vectors>(numbers + place * kLanes, channels), sums[place]);
        }
      }
    }
    finish<Vectors>(sums, part.pixel, part.channel);
  }

  // With bias and residual; an activation is still to follow.
  template <int Vectors>
  void finish(const Vector (&sums)[Vectors], int64_t pixel, int64_t channel) const {
    const int64_t channels = g.channels - channel;
#pragma GCC unroll 2
    for (int place = 0; place < Vectors; ++place) {
      const int64_t first = channel + place * kLanes, to = pixel * g.channels + first;
      Vector value = sums[place];
      if (bias != nullptr) value += load_channels<Vectors>(bias + first, channels);
      if (residual != nullptr) value += load_channels<Vectors>(residual + to, channels);
      value = follows.limited(value);
      Vectors > 1 ? store(made + to, value) : store_some(made + to, value, channels);
    }
  }

  const Direct& g;
  const float* picture;
  float* made;
  const float* residual;
  const float* bias;
  const float* weights;
  Follows follows{};
};

}  // namespace
