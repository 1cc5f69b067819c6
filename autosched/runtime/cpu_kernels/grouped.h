// Convolutions of several groups: a few lines of the picture, with the zeros at both sides, are copied side by side for a few channels, and vectors
// of features are summed from there. No result depends on the number of threads.
#pragma once

#include "direct.h"
#include "parallel.h"
#include "products.h"
#include "scratch.h"

#include <algorithm>

namespace {

// So many results next to each other, of two vectors of features: enough sums that none waits for the one before, also where there are only 16
// registers and weights come from the cache each time. Pictures are often multiples of seven wide.
constexpr int kNeighbors = 7;

// What is multiplied with weights: ``second`` lies between what two vectors of features are made of, ``apart`` between pixels.
struct Pixels {
  const float* from;
  int64_t apart, second;
};

// A channel of the group that a vector of features belongs to; ``Narrow``: of each of its groups, in the lanes that ``order`` says.
template <bool Narrow>
Vector channel_of(const float* from, [[maybe_unused]] Bits order) {
  if constexpr (Narrow) {
    return permuted(load<Vector>(from), order);
  } else {
    return spread(*from);
  }
}

// A row of weights, multiplied with a channel of pixels ``Step`` apart: each of those is read once.
template <bool Narrow, int Vectors, int Wide, int Step>
__attribute__((always_inline)) inline void add_channel(
    Vector (&sums)[kNeighbors][Vectors], const Pixels& pixels, const float* factors, Bits order) {
#pragma GCC unroll 2
  for (int place = 0; place < Vectors; ++place) {
    Vector weight[Wide];
#pragma GCC unroll 8
    for (int column = 0; column < Wide; ++column) weight[column] = load<Vector>(factors + (column * Vectors + place) * kLanes);
#pragma GCC unroll 32
    for (int number = 0; number < (kNeighbors - 1) * Step + Wide; ++number) {
      const Vector there = channel_of<Narrow>(pixels.from + number * pixels.apart + place * pixels.second, order);
#pragma GCC unroll 8
      for (int result = 0; result < kNeighbors; ++result) {
        const int column = number - result * Step;
        if (column >= 0 && column < Wide) sums[result][place] = multiply_add(weight[column], there, sums[result][place]);
      }
    }
  }
}

// Weights are blocks of two vectors of features (the last one may be of one), each [tall, channels of a group, wide, features of the block].
// Groups of as many features as channels, several of which fill a vector, lie in one; else a group begins with a vector of its own, and of its
// last one only some may be features.
class Grouped {
 public:
  Grouped(const Direct& geometry, const float* picture, float* made, const float* residual, const float* bias, const float* weights)
      : g(geometry), picture(picture), made(made), residual(residual), bias(bias), weights(weights) {
    follows = g.following.read();
    channels = g.channels / g.groups, features = g.features / g.groups;
    narrow = channels == features && features < kLanes && kLanes % features == 0;
    group_vectors = (features + kLanes - 1) / kLanes;
    vectors = narrow ? (g.features + kLanes - 1) / kLanes : g.groups * group_vectors;
    span = (g.tall - 1) * g.apart_down + 1;
    // Where a line has no more results, some are computed all the same.
    const int64_t computed = (g.out_width + kNeighbors - 1) / kNeighbors * kNeighbors;
    wide = (computed - 1) * g.step_across + (g.wide - 1) * g.apart_across + 1;
    for (int channel = 0; narrow && channel < channels; ++channel) {
      for (int lane = 0; lane < kLanes; ++lane) orders[channel][lane] = lane - lane % static_cast<int>(channels) + channel;
    }
  }

  void run() const {
    const int64_t blocks = (vectors + 1) / 2, lines = g.batch * blocks * g.out_height;
    const int64_t products = g.batch * g.out_height * g.out_width * g.features * channels * g.tall * g.wide;
    on_team(products < kLeastProducts ? 1 : g.threads, [&](int number, int count) {
      const Share mine(lines, number, count);
      for (int64_t first = mine.first, next = 0; first < mine.last; first = next) {
        const int64_t line = first % g.out_height, block = first / g.out_height % blocks, batch = first / g.out_height / blocks;
        next = std::min(mine.last, first + g.out_height - line);
        const Share those(line, line + next - first);
        if (2 * block + 1 < vectors) {
          narrow ? some<true, 2>(batch, block, those) : some<false, 2>(batch, block, those);
        } else {
          narrow ? some<true, 1>(batch, block, those) : some<false, 1>(batch, block, those);
        }
      }
    });
  }

 private:
  // Where the features of a vector begin, how many it has, and where the channels begin that they are made of.
  struct Place {
    int64_t feature, count, channel;
  };

  Place place_of(int64_t vector) const {
    if (narrow) return {vector * kLanes, std::min<int64_t>(kLanes, g.features - vector * kLanes), vector * kLanes};
    const int64_t group = vector / group_vectors, feature = vector % group_vectors * kLanes;
    return {group * features + feature, std::min<int64_t>(kLanes, features - feature), group * channels};
  }

  // Results next to each other, of a block of features.
  template <int Vectors>
  struct Part {
    const Place (&places)[Vectors];
    const float* copied;  // what the first result is made of, in the first line that there is memory for
    int64_t apart;
    const float* factors;
    int64_t top, begin, end;  // rows of weights that lie inside of the picture
    int64_t pixel, count;
  };

  template <bool Narrow, int Vectors>
  void some(int64_t batch, int64_t block, const Share& lines) const {
    Place places[Vectors];
    for (int place = 0; place < Vectors; ++place) places[place] = place_of(2 * block + place);
    const Place &front = places[0], &back = places[Vectors - 1];
    const int64_t taken = std::min(back.channel + (Narrow ? kLanes : channels), g.channels) - front.channel;
    // Vectors are whole, whether there are so many channels or not.
    const int64_t apart = Narrow ? Vectors * kLanes : taken;
    float* const copied = autosched_scratch(span * wide * apart);
    int64_t next = 0;
    for (int64_t line = lines.first; line < lines.last; ++line) {
      const int64_t top = line * g.step_down - g.top;
      // Most of the lines were copied for the results above.
      for (next = std::max({next, top, int64_t{0}}); next < std::min(top + span, g.height); ++next) {
        take(picture + batch * g.batch_stride + next * g.row_stride + front.channel, taken, apart, copied + next % span * wide * apart);
      }
      const Inside rows(top, g.height, g.tall, g.apart_down);
      const int64_t pixel = (batch * g.out_height + line) * g.out_width;
      for (int64_t across = 0; across < g.out_width; across += kNeighbors) {
        const Part<Vectors> part{
            places, copied + across * g.step_across * apart, apart, weights + 2 * block * kLanes * channels * g.tall * g.wide, top,
            rows.begin, rows.end, pixel + across, std::min<int64_t>(kNeighbors, g.out_width - across)};
        if (g.wide == 3 && g.apart_across == 1 && g.step_across == 1) {
          sum<Narrow, Vectors, 3, 1>(part);
        } else if (g.wide == 3 && g.apart_across == 1 && g.step_across == 2) {
          sum<Narrow, Vectors, 3, 2>(part);
        } else {
          sum<Narrow, Vectors, 0, 0>(part);
        }
      }
      if (follows.activation == Activation::kNone) continue;
      follows.over(made + pixel * g.features + front.feature, g.out_width, g.features, back.feature + back.count - front.feature);
    }
  }

  // A line with the zeros around it, and behind the last channel.
  void take(const float* from, int64_t count, int64_t apart, float* to) const {
    const int64_t left = std::min(g.left, wide), inside = std::min(g.width, wide - left);
    std::fill_n(to, left * apart, 0.0f);
    for (int64_t x = 0; x < inside; ++x) {
      const float* const here = from + x * g.column_stride;
      float* const there = to + (left + x) * apart;
      int64_t channel = 0;
      for (; channel + kLanes <= count; channel += kLanes) store(there + channel, load<Vector>(here + channel));
      for (; channel < count; ++channel) there[channel] = here[channel];
      for (; channel < apart; ++channel) there[channel] = 0.0f;
    }
    std::fill_n(to + (left + inside) * apart, (wide - left - inside) * apart, 0.0f);
  }

  // ``Wide``: columns of weights, next to each other, or zero for any.
  template <bool Narrow, int Vectors, int Wide, int Step>
  void sum(const Part<Vectors>& part) const {
    constexpr int64_t kWidth = Vectors * kLanes;
    const int64_t second = part.places[Vectors - 1].channel - part.places[0].channel;
    Vector sums[kNeighbors][Vectors] = {};
    for (int64_t row = part.begin; row < part.end; ++row) {
      const float* const line = part.copied + (part.top + row * g.apart_down) % span * wide * part.apart;
      const float* factors = part.factors + row * channels * g.wide * kWidth;
      for (int64_t channel = 0; channel < channels; ++channel) {
        const Bits order = Narrow ? orders[channel] : Bits{};
        const float* const from = Narrow ? line : line + channel;
        if constexpr (Wide > 0) {
          add_channel<Narrow, Vectors, Wide, Step>(sums, {from, part.apart, second}, factors, order);
          factors += Wide * kWidth;
        } else {
          for (int64_t column = 0; column < g.wide; ++column, factors += kWidth) {
            const float* const there = from + column * g.apart_across * part.apart;
            add_channel<Narrow, Vectors, 1, 1>(sums, {there, g.step_across * part.apart, second}, factors, order);
          }
        }
      }
    }
#pragma GCC unroll 8
    for (int result = 0; result < kNeighbors; ++result) {
      if (result >= part.count) break;
#pragma GCC unroll 2
      for (int place = 0; place < Vectors; ++place) finish(sums[result][place], part.places[place], part.pixel + result);
    }
  }

  // With bias and residual; an activation is still to follow.
  void finish(Vector value, const Place& place, int64_t pixel) const {
    const int64_t to = pixel * g.features + place.feature;
    if (bias != nullptr) value += load_some(bias + place.feature, place.count);
    if (residual != nullptr) value += load_some(residual + to, place.count);
    store_some(made + to, follows.limited(value), place.count);
  }

  const Direct& g;
  const float* picture;
  float* made;
  const float* residual;
  const float* bias;
  const float* weights;
  Follows follows{};
  int64_t channels = 0, features = 0;  // of a group
  bool narrow = false;  // whether groups share vectors
  int64_t group_vectors = 0, vectors = 0;  // of the features of a group, and of all
  int64_t span = 0, wide = 0;  // lines that results of one are made of, and their pixels
  Bits orders[kLanes / 2] = {};
};

}  // namespace
