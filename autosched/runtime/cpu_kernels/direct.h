// Convolutions of float32 pictures, summed as they are defined: any size, stride, dilation and padding, one group or a group for each channel;
// with bias, residual and an activation before a result is written.
//
// Where each channel is a group of its own, vectors of channels are summed where they lie. Else the numbers that a few pixels need are copied
// side by side, unless they lie so, and multiplied with blocks of weights. No result depends on the number of threads.
#pragma once

#include "geometry.h"
#include "parallel.h"
#include "products.h"
#include "scratch.h"

#include <algorithm>

namespace {

// As many numbers as ``direct.geometry`` writes, in its order. Strides are in elements.
struct Direct {
  int64_t threads;
  int64_t batch, channels, height, width;
  int64_t batch_stride, channel_stride, row_stride, column_stride;
  int64_t features, tall, wide;  // of the weights
  int64_t step_down, step_across, apart_down, apart_across;
  int64_t top, left, out_height, out_width;
  int64_t each_channel;  // whether each channel is a group of its own
  Following following;
};

// So many results are worked on together: what they are made of stays in the nearest caches while all weights go by.
constexpr int64_t kPixels = 4 * kRows;
// So many where the weights take longer to come than they stay.
constexpr int64_t kMostRows = 512;

class Summed {
 public:
  Summed(
      const Direct& geometry, const float* picture, float* made, const float* residual, const float* bias, const float* weights,
      const Follows& follows)
      : g(geometry), picture(picture), made(made), residual(residual), bias(bias), weights(weights), follows(follows) {
    taps = g.tall * g.wide;
    sum = taps * g.channels;
    padded = (g.features + kLanes - 1) / kLanes * kLanes;
    pixels = g.batch * g.out_height * g.out_width;
    turned = g.channel_stride != 1;
    as_they_lie = taps == 1 && g.step_down == 1 && g.step_across == 1 && g.top == 0 && g.left == 0 && g.channel_stride == 1 &&
        g.row_stride == g.width * g.column_stride && (g.batch == 1 || g.batch_stride == g.height * g.row_stride);
  }

  // Each thread has its own results or, where there are more weights than other numbers, its own weights.
  void run() const {
    const int64_t threads = pixels * sum * padded < kLeastProducts ? 1 : g.threads;
    const int64_t blocks = (padded + kBlock - 1) / kBlock;
    const bool heavy = sum * padded > 2 * pixels * (g.channels + padded) && blocks >= threads;
    on_team(threads, [&](int number, int count) {
      const Share rows(pixels, heavy ? 0 : number, heavy ? 1 : count), those(blocks, heavy ? number : 0, heavy ? count : 1);
      const int64_t together = heavy && as_they_lie ? kMostRows : turned ? 2 * kPixels : kPixels;
      const int64_t rounds = (rows.last - rows.first + together - 1) / together;
      for (int64_t round = 0; round < rounds; ++round) {
        const Share here(rows.last - rows.first, static_cast<int>(round), static_cast<int>(rounds));
        some(rows.first + here.first, here.last - here.first, those);
      }
    });
  }

 private:
  void some(int64_t first, int64_t count, const Share& those) const {
    if (as_they_lie) {
      for (int64_t block = those.first; block < those.last; ++block) {
        for (int64_t from = 0; from < sum; from += kSummed) {
          multiply(picture + first * g.column_stride + from, g.column_stride, first, count, from, block);
        }
      }
      return;
    }
    float* const copied = scratch.of(count * std::min(sum, kSummed));
    for (int64_t from = 0; from < sum; from += kSummed) {
      const int64_t numbers = std::min(kSummed, sum - from);
      turned ? take_columns(first, count, from, numbers, copied) : take_rows(first, count, from, numbers, copied);
      for (int64_t block = those.first; block < those.last; ++block) multiply(copied, turned ? count : numbers, first, count, from, block);
    }
  }

  // A block of features of ``count`` results, of which ``numbers``, ``apart`` from each other, are part: those from ``from`` on.
  void multiply(const float* numbers, int64_t apart, int64_t first, int64_t count, int64_t from, int64_t block) const {
    const int64_t feature = block * kBlock, width = block_width(padded, feature), some = std::min(kSummed, sum - from);
    float* const to = made + first * g.features + feature;
    // Where results are written over the residual, the first sums are added to it: the last would find them in its place.
    const bool over = residual == made;
    const End end{
        bias == nullptr ? nullptr : bias + feature, residual == nullptr || over ? nullptr : residual + (to - made), follows,
        std::min(width, g.features - feature), from + some == sum};
    product(count, {numbers, apart, to, g.features, over || from > 0, turned}, weights + feature * sum + from * width, some, width, end);
  }

  struct Place {
    int64_t batch, down, across;
  };

  Place place(int64_t pixel) const {
    const int64_t line = pixel / g.out_width;
    return {line / g.out_height, line % g.out_height, pixel % g.out_width};
  }

  // ``numbers`` of what each of ``count`` results is the sum of, from ``from`` on, one result behind the other. Weights are [tall, wide,
  // channels].
  void take_rows(int64_t first, int64_t count, int64_t from, int64_t numbers, float* to) const {
    for (int64_t pixel = first; pixel < first + count; ++pixel) {
      const Place at = place(pixel);
      const int64_t top = at.down * g.step_down - g.top, left = at.across * g.step_across - g.left;
      int64_t row = from / g.channels / g.wide, column = from / g.channels % g.wide, channel = from % g.channels;
      for (int64_t more = numbers; more > 0; ++column, channel = 0) {
        if (column == g.wide) column = 0, ++row;
        const int64_t y = top + row * g.apart_down, x = left + column * g.apart_across;
        const int64_t here = std::min(more, g.channels - channel);
        if (y >= 0 && y < g.height && x >= 0 && x < g.width) {
          copy(picture + at.batch * g.batch_stride + y * g.row_stride + x * g.column_stride + channel, here, to);
        } else {
          std::fill_n(to, here, 0.0f);
        }
        to += here, more -= here;
      }
    }
  }

  // A few numbers: calling a function for them would take as long.
  static void copy(const float* from, int64_t count, float* to) {
    int64_t place = 0;
    for (; place + kLanes <= count; place += kLanes) store(to + place, load<Vector>(from + place));
    for (; place < count; ++place) to[place] = from[place];
  }

  // The same, but one number of all results behind the other. Weights are [channels, tall, wide].
  void take_columns(int64_t first, int64_t count, int64_t from, int64_t numbers, float* to) const {
    for (int64_t begun = 0, here = 0; begun < count; begun += here) {
      const Place at = place(first + begun);
      here = std::min(count - begun, g.out_width - at.across);
      const int64_t top = at.down * g.step_down - g.top, left = at.across * g.step_across - g.left;
      int64_t channel = from / taps, row = from % taps / g.wide, column = from % g.wide;
      for (int64_t number = 0; number < numbers; ++number, ++column) {
        if (column == g.wide) column = 0, ++row;
        if (row == g.tall) row = 0, ++channel;
        const int64_t y = top + row * g.apart_down, x = left + column * g.apart_across;
        float* const line = to + number * count + begun;
        if (y < 0 || y >= g.height) {
          std::fill_n(line, here, 0.0f);
          continue;
        }
        // Those that lie inside of the picture.
        int64_t begin = 0, end = here;
        while (begin < end && x + begin * g.step_across < 0) ++begin;
        while (end > begin && x + (end - 1) * g.step_across >= g.width) --end;
        const float* const numbers_there =
            picture + at.batch * g.batch_stride + channel * g.channel_stride + y * g.row_stride + x * g.column_stride;
        std::fill_n(line, begin, 0.0f);
        copy_every(numbers_there, g.step_across * g.column_stride, begin, end, line);
        std::fill_n(line + end, here - end, 0.0f);
      }
    }
  }

  static void copy_every(const float* from, int64_t step, int64_t begin, int64_t end, float* to) {
    if (step == 1) {
      for (int64_t place = begin; place < end; ++place) to[place] = from[place];
    } else if (step == 2) {
      for (int64_t place = begin; place < end; ++place) to[place] = from[2 * place];
    } else {
      for (int64_t place = begin; place < end; ++place) to[place] = from[step * place];
    }
  }

  const Direct& g;
  const float* picture;
  float* made;
  const float* residual;
  const float* bias;
  const float* weights;
  const Follows follows;
  int64_t taps = 0, sum = 0, padded = 0, pixels = 0;
  bool as_they_lie = false, turned = false;
};

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
    const int64_t begin = top >= 0 ? 0 : (-top + g.apart_down - 1) / g.apart_down;
    const int64_t end = std::min(g.tall, top >= g.height ? 0 : (g.height - top + g.apart_down - 1) / g.apart_down);
    const float* const from = picture + line / g.out_height * g.batch_stride + top * g.row_stride + channel;
    for (int64_t across = 0; across < g.out_width; across += Count) {
      const int64_t left = across * g.step_across - g.left;
      const Part part{
          from + left * g.column_stride, line * g.out_width + across, std::min<int64_t>(Count, g.out_width - across), left, begin, end, channel};
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
#pragma GCC unroll 2
      for (int place = 0; place < Vectors; ++place) {
        Vector weight[Wide];
#pragma GCC unroll 8
        for (int column = 0; column < Wide; ++column) {
          weight[column] = load_channels<Vectors>(factors + column * g.channels + place * kLanes, channels);
        }
#pragma GCC unroll 16
        for (int number = 0; number < (Count - 1) * Step + Wide; ++number) {
          const int64_t x = part.left + number;
          Vector there = {};
          if (Inside || (x >= 0 && x < g.width)) there = load_channels<Vectors>(numbers + number * g.column_stride + place * kLanes, channels);
#pragma GCC unroll 8
          for (int result = 0; result < Count; ++result) {
            const int column = number - result * Step;
            if (column >= 0 && column < Wide) sums[result][place] = multiply_add(weight[column], there, sums[result][place]);
          }
        }
      }
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

  template <int Vectors>
  static Vector load_channels(const float* from, int64_t channels) {
    return Vectors > 1 ? load<Vector>(from) : load_some(from, channels);
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

void convolve_directly(const float* picture, float* made, const float* residual, const float* bias, const float* weights, const int64_t* numbers) {
  const auto geometry = read<Direct>(numbers);
  if (geometry.each_channel != 0) return EachChannel(geometry, picture, made, residual, bias, weights).run();
  Summed(geometry, picture, made, residual, bias, weights, geometry.following.read()).run();
}

}  // namespace
