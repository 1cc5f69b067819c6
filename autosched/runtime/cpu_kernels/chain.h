// Two convolutions of float32 pictures: one of any size with one group, and on its results one with a group for each channel. Each is with bias
// and an activation.
//
// A few channels of the first are computed a line at a time, just before the second needs it, and lie in the nearest cache: they are not written
// to memory, where both together would spend most of their time. No result depends on the number of threads.
#pragma once

#include "each_channel.h"
#include "summed.h"

namespace {

// As ``chain.geometry`` writes them. The channels of the second are the features of the first.
struct Chained {
  Direct first, second;
};

// Rows of weights of the second, as ``chain.py`` knows.
constexpr int kMostTall = 7;

thread_local Scratch lines_between;

// Weights, one behind the other: those of the first in blocks, its bias, those of the second in blocks, each [tall, wide, features of the
// block], and its bias. Biases fill whole vectors.
class Chain {
 public:
  Chain(const Chained& given, const float* picture, float* made, const float* weights)
      : first(given.first), g(given.second), made(made), summed(first, picture, nullptr, nullptr, nullptr, weights, first.following.read()) {
    follows = g.following.read();
    first_bias = weights + first.tall * first.wide * first.channels * summed.padded;
    factors = first_bias + summed.padded;
    bias = factors + g.tall * g.wide * summed.padded;
  }

  void run() const {
    const int64_t blocks = (summed.padded + kBlock - 1) / kBlock;
    const int64_t sum = first.tall * first.wide * first.channels, products = g.batch * g.height * g.width * sum * summed.padded;
    const int64_t threads = products < kLeastProducts ? 1 : first.threads, bands = best_bands(blocks * g.batch, threads);
    on_team(threads, [&](int number, int count) {
      const Share mine(g.batch * bands * blocks, number, count);
      for (int64_t unit = mine.first; unit < mine.last; ++unit) {
        const Share band(g.out_height, unit / blocks % bands, bands);
        some(unit / blocks / bands, band, unit % blocks);
      }
    });
  }

 private:
  // Into how many bands the lines of each of ``pictures`` are cut: with more, threads have equal shares, but lines at the edges of a band are
  // computed for both sides of it.
  int64_t best_bands(int64_t pictures, int64_t threads) const {
    int64_t best = 1, least = std::numeric_limits<int64_t>::max();
    for (int64_t bands = 1; bands <= std::min(g.out_height, 4 * threads); ++bands) {
      const int64_t lines = ((g.out_height + bands - 1) / bands - 1) * g.step_down + g.tall;
      const int64_t taken = (pictures * bands + threads - 1) / threads * lines;
      if (taken < least) best = bands, least = taken;
    }
    return best;
  }

  // A block of channels of some lines of a picture.
  void some(int64_t batch, const Share& lines, int64_t block) const {
    if (g.wide == 3) return g.step_across == 1 ? at_step<3, 1>(batch, lines, block) : at_step<3, 2>(batch, lines, block);
    if (g.wide == 5) return g.step_across == 1 ? at_step<5, 1>(batch, lines, block) : at_step<5, 2>(batch, lines, block);
    g.step_across == 1 ? at_step<7, 1>(batch, lines, block) : at_step<7, 2>(batch, lines, block);
  }

  // The results of a line that are summed together are as many as leave few over.
  template <int Wide, int Step>
  void at_step(int64_t batch, const Share& lines, int64_t block) const {
    g.out_width % 8 != 0 && g.out_width % 7 == 0 ? these<Wide, Step, 7>(batch, lines, block) : these<Wide, Step, 8>(batch, lines, block);
  }

  template <int Wide, int Step, int Count>
  void these(int64_t batch, const Share& lines, int64_t block) const {
    const int64_t feature = block * kBlock, width = block_width(summed.padded, feature);
    const int64_t parts = (g.out_width + Count - 1) / Count;
    // With zeros at both ends, where a picture ends and where results are that nobody wants.
    const int64_t line = std::max(g.left + g.width, (parts * Count - 1) * Step + Wide) * width;
    float* const between = lines_between.of(g.tall * line);
    std::fill_n(between, g.tall * line, 0.0f);
    int64_t next = 0;  // so many lines of the first are there, or are not needed
    for (int64_t down = lines.first; down < lines.last; ++down) {
      const int64_t top = down * g.step_down - g.top;
      const int64_t begin = std::max<int64_t>(top, 0), end = std::min(top + g.tall, g.height);
      for (next = std::max(next, begin); next < end; ++next) fill(batch, next, block, between + next % g.tall * line + g.left * width);
      const float* rows[kMostTall];
      for (int64_t y = begin; y < end; ++y) rows[y - begin] = between + y % g.tall * line;
      float* const results = made + (batch * g.out_height + down) * g.out_width * g.channels + feature;
      for (int64_t place = 0; place < width; place += kLanes) {
        for (int64_t part = 0; part < parts; ++part) {
          Vector sums[Count][1] = {};
          const float* weight = factors + feature * g.tall * Wide + (begin - top) * Wide * width + place;
          for (int64_t row = 0; row < end - begin; ++row, weight += Wide * width) {
            const float* const numbers = rows[row] + part * Count * Step * width + place;
            add_row<1, Wide, Step, Count, true>(sums, {numbers, width, weight, width, kLanes, 0, 0});
          }
          finish(sums, results + part * Count * g.channels, std::min<int64_t>(Count, g.out_width - part * Count), feature + place, place);
        }
      }
      if (follows.activation != Activation::kNone) follows.over(results, g.out_width, g.channels, std::min(width, g.channels - feature));
    }
  }

  // A line of the first, of the channels of a block.
  void fill(int64_t batch, int64_t line, int64_t block, float* to) const {
    const int64_t feature = block * kBlock, width = block_width(summed.padded, feature);
    const typename Summed::Target target{to, width, false, {first_bias + feature, nullptr, first.following.read(), width}};
    summed.some((batch * g.height + line) * g.width, g.width, {block, block + 1}, false, [&](int64_t) { return target; });
  }

  // The first ``count`` of some results of channels from ``channel`` on, ``place`` behind the beginning of their block.
  template <int Count>
  void finish(const Vector (&sums)[Count][1], float* results, int64_t count, int64_t channel, int64_t place) const {
    const Vector more = load<Vector>(bias + channel);
    for (int result = 0; result < count; ++result) {
      store_some(results + result * g.channels + place, follows.limited(sums[result][0] + more), g.channels - channel);
    }
  }

  const Direct &first, &g;
  float* made;
  const Summed summed;
  Follows follows{};
  const float *first_bias, *factors, *bias;
};

}  // namespace
