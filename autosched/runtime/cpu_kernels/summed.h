// Convolutions of one group: the numbers that a few pixels need are copied side by side, unless they lie so, and multiplied with blocks of
// weights. No result depends on the number of threads.
#pragma once

#include "direct.h"
#include "parallel.h"
#include "products.h"
#include "scratch.h"

#include <algorithm>

namespace {

class Summed {
 public:
  Summed(
      const Direct& geometry, const float* picture, float* made, const float* residual, const float* bias, const float* weights,
      const Follows& follows, const float* scale = nullptr)
      : g(geometry), picture(picture), made(made), residual(residual), bias(bias), weights(weights), follows(follows), scale(scale) {
    taps = g.tall * g.wide;
    sum = taps * g.channels;
    const int64_t parts = (sum + kSummed - 1) / kSummed;
    part = (sum + parts - 1) / parts;
    padded = whole(g.features);
    pixels = g.batch * g.out_height * g.out_width;
    turned = g.channel_stride != 1;
    as_they_lie = scale == nullptr && taps == 1 && g.step_down == 1 && g.step_across == 1 && g.top == 0 && g.left == 0 && g.channel_stride == 1 &&
        g.row_stride == g.width * g.column_stride && (g.batch == 1 || g.batch_stride == g.height * g.row_stride);
  }

  // Each thread has its own results or, where there are more weights than other numbers, its own weights.
  void run() const {
    const int64_t threads = pixels * sum * padded < kLeastProducts ? 1 : g.threads;
    const int64_t blocks = (padded + kBlock - 1) / kBlock;
    const bool heavy = sum * padded > 2 * pixels * (g.channels + padded) && blocks >= threads;
    on_team(threads, [&](int number, int count) {
      const Share rows = share_if(!heavy, pixels, number, count), those = share_if(heavy, blocks, number, count);
      const int64_t together = heavy && as_they_lie ? kMostRows : turned ? 2 * kPixels : kPixels;
      const int64_t rounds = (rows.last - rows.first + together - 1) / together;
      for (int64_t round = 0; round < rounds; ++round) {
        const Share here(rows.last - rows.first, round, rounds);
        const int64_t first = rows.first + here.first;
        // In later rounds a core's own caches have them, unless they are too many.
        const bool fetched = round == 0 || sum * padded > kCachedWeights;
        some(first, here.last - here.first, those, fetched, [&](int64_t feature) { return target(first, feature); });
      }
    });
  }

  // Where ``count`` results of a block of features go, the first of them first, so many numbers apart; and what happens to them.
  struct Target {
    float* to;
    int64_t apart;
    bool more;  // whether they are added to what is there
    End end;
  };

  // ``count`` results, from ``first`` on, of ``those`` blocks; ``fetched``: whether weights are, ahead; ``target(feature)``: of the block that
  // begins there.
  template <typename TargetOf>
  void some(int64_t first, int64_t count, const Share& those, bool fetched, TargetOf target) const {
    // ``numbers``, ``apart`` from each other, are part of the results: those from ``from`` on. The next part begins at ``then`` of ``after``.
    const auto multiply = [&](const float* numbers, int64_t apart, int64_t from, int64_t block, int64_t then, int64_t after) {
      const int64_t feature = block * kBlock, some = std::min(part, sum - from);
      Target here = target(feature);
      here.end.last = from + some == sum;
      const float* const next = fetched && after < those.last && then < sum ? weights + place_of(after, then) : nullptr;
      const Rows rows{numbers, apart, here.to, here.apart, here.more || from > 0, turned, next};
      autosched_product(count, rows, weights + place_of(block, from), some, block_width(padded, feature), here.end);
    };
    if (as_they_lie) {
      const float* const numbers = picture + first * g.column_stride;
      for (int64_t block = those.first; block < those.last; ++block) {
        for (int64_t from = 0; from < sum; from += part) {
          const bool done = from + part >= sum;
          multiply(numbers + from, g.column_stride, from, block, done ? 0 : from + part, done ? block + 1 : block);
        }
      }
      return;
    }
    float* const copied = autosched_scratch(count * part);
    for (int64_t from = 0; from < sum; from += part) {
      const int64_t numbers = std::min(part, sum - from);
      turned ? take_columns(first, count, from, numbers, copied) : take_rows(first, count, from, numbers, copied);
      for (int64_t block = those.first; block < those.last; ++block) {
        const bool done = block + 1 == those.last;
        multiply(copied, turned ? count : numbers, from, block, done ? from + part : from, done ? those.first : block + 1);
      }
    }
  }

  // Of the features, that fill whole vectors.
  int64_t padded = 0;

 private:
  // Where the weights of a block begin, those of the sum from ``from`` on.
  int64_t place_of(int64_t block, int64_t from) const {
    const int64_t feature = block * kBlock;
    return feature * sum + from * block_width(padded, feature);
  }

  Target target(int64_t first, int64_t feature) const {
    float* const to = made + first * g.features + feature;
    // Where results are written over the residual, the first sums are added to it: the last would find them in its place.
    const bool over = residual == made;
    const End end{
        bias == nullptr ? nullptr : bias + feature, residual == nullptr || over ? nullptr : residual + (to - made), follows,
        std::min(block_width(padded, feature), g.features - feature)};
    return {to, g.features, over, end};
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
          const float* const there = picture + at.batch * g.batch_stride + y * g.row_stride + x * g.column_stride + channel;
          scale == nullptr ? copy(there, here, to) : scaled(there, scale + at.batch * g.channels + channel, here, to);
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

  static void scaled(const float* from, const float* factors, int64_t count, float* to) {
    int64_t place = 0;
    for (; place + kLanes <= count; place += kLanes) store(to + place, load<Vector>(from + place) * load<Vector>(factors + place));
    for (; place < count; ++place) to[place] = from[place] * factors[place];
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
  const float* scale;  // what each channel of each picture is multiplied with first, or null; not where channels lie apart
  int64_t taps = 0, sum = 0, pixels = 0;
  int64_t part = 0;  // of a sum, about as much each time
  bool as_they_lie = false, turned = false;
};

}  // namespace
