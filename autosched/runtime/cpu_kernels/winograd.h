// 3x3 convolutions of float32 pictures, channels last, by Winograd's minimal filtering: a tile of 2x2 or 4x4 results takes 16 or 36 products
// where the sum itself takes 36 or 144 (Lavin and Gray, arXiv:1509.09308). Compiled for the processor it runs on; see library.py.
//
// Tiles are transformed, multiplied and transformed back in blocks that stay in a core's cache, each block by one thread. Where there are
// too few tiles for weights of that size, all threads do each of the three steps together, and each reads its own share of the weights. One
// group comes after the other.
//
// No result depends on the number of threads, or on which tiles are worked on together.

#pragma once

#include "geometry.h"
#include "parallel.h"
#include "products.h"
#include "scratch.h"
#include "transforms.h"

#include <algorithm>

namespace {

// As many numbers as ``winograd.geometry`` writes, in its order. Strides are in elements; a channel follows the one before.
struct Geometry {
  int64_t outputs;  // of a tile, in one dimension: 2 or 4
  int64_t threads;
  int64_t batch, channels, height, width;
  int64_t batch_stride, row_stride, column_stride;
  int64_t features, top, left, out_height, out_width;
  int64_t groups;
  Following following;
};

// Results whose tiles are worked on together: more of them read the weights less often, fewer stay in the cache.
constexpr int64_t kTogether = 36;
// What one thread transforms and another one multiplies goes from core to core, which takes long where these share no cache. So each thread
// rather reads all of the weights, if they are of no more numbers than this, and if it has so many tiles that reading is not all it does.
constexpr int64_t kLightWeights = 1 << 20;
constexpr int64_t kFewTiles = 8;

template <int Outputs>
class Convolution {
 public:
  Convolution(const Geometry& geometry, const float* picture, float* made, const float* residual, const float* bias, const float* weights)
      : g(geometry), picture(picture), made(made), residual(residual), bias(bias), weights(weights) {
    channels = g.channels / g.groups, features = g.features / g.groups;
    padded = whole(features);
    across = (g.out_width + Outputs - 1) / Outputs;
    down = (g.out_height + Outputs - 1) / Outputs;
    tiles = g.batch * down * across;
    follows = g.following.read();
  }

  void run() const {
    const int64_t products = g.groups * kPoints * tiles * channels * padded;
    const int64_t threads = products < kLeastProducts ? 1 : g.threads;
    const bool alone = g.groups > 1 || (tiles >= kFewTiles * threads && kPoints * channels * padded <= kLightWeights);
    if (threads > 1 && tiles <= kTogether * (2 * threads - 1) && !alone) return together();
    // So many threads share the tiles of a group.
    const int64_t sharing = (threads + g.groups - 1) / g.groups, rounds = (tiles + kTogether * sharing - 1) / (kTogether * sharing);
    block_by_block(threads, (tiles + rounds * sharing - 1) / (rounds * sharing));
  }

 private:
  using Rule = Tile<Outputs>;
  static constexpr int kIn = Rule::kIn;
  static constexpr int64_t kPoints = int64_t{kIn} * kIn;  // products of a tile

  struct Corner {
    int64_t picture, row, column;  // of the first result
  };

  Corner corner(int64_t tile) const {
    const int64_t place = tile % (down * across);
    return {tile / (down * across), place / across * Outputs, place % across * Outputs};
  }

  // How far apart ``count`` numbers of one point begin from those of the next: not so that all points share a few lines of a cache.
  static int64_t apart(int64_t count) { return count % 512 == 0 ? count + 16 : count; }

  void block_by_block(int64_t threads, int64_t most) const {
    const int64_t blocks = (tiles + most - 1) / most;
    on_team(threads, [&](int number, int count) {
      const Share share(g.groups * blocks, number, count);
      if (share.first == share.last) return;
      float* const rows = autosched_scratch(kPoints * (apart(most * channels) + apart(most * padded)));
      float* const sums = rows + kPoints * apart(most * channels);
      for (int64_t block = share.first; block < share.last; ++block) {
        const int64_t group = block / blocks, first = block % blocks * most, here = std::min(most, tiles - first);
        for (int64_t tile = 0; tile < here; ++tile) take(group, first + tile, rows + tile * channels, apart(here * channels));
        // Behind the first block a core's own caches have them, unless they are too many.
        const bool fetched = first == 0 || block == share.first || kPoints * channels * padded > kCachedWeights;
        for (int64_t point = 0; point < kPoints; ++point) {
          for (int64_t feature = 0; feature < padded; feature += kBlock) {
            multiply(group, point, feature, rows, sums, here, fetched && (point + 1 < kPoints || feature + kBlock < padded));
          }
        }
        for (int64_t tile = 0; tile < here; ++tile) give(group, first + tile, sums + tile * padded, apart(here * padded));
      }
    });
  }

  void together() const {
    const int64_t row_step = apart(tiles * channels), sum_step = apart(tiles * padded);
    float* const rows = autosched_scratch(kPoints * (row_step + sum_step));
    float* const sums = rows + kPoints * row_step;
    const int64_t blocks = (padded + kBlock - 1) / kBlock;
    on_team(g.threads, [&](int number, int count) {
      const Share mine(tiles, number, count), factors(kPoints * blocks, number, count);
      for (int64_t tile = mine.first; tile < mine.last; ++tile) take(0, tile, rows + tile * channels, row_step);
      all_are_here(count);
      for (int64_t place = factors.first; place < factors.last; ++place) {
        multiply(0, place / blocks, place % blocks * kBlock, rows, sums, tiles, place + 1 < factors.last);
      }
      all_are_here(count);
      for (int64_t tile = mine.first; tile < mine.last; ++tile) give(0, tile, sums + tile * padded, sum_step);
    });
  }

  // ``fetched``: the weights behind these are, ahead.
  void multiply(int64_t group, int64_t point, int64_t feature, const float* rows, float* sums, int64_t count, bool fetched) const {
    const int64_t width = block_width(padded, feature);
    const float* const factors = weights + ((group * kPoints + point) * padded + feature) * channels;
    float* const made_here = sums + point * apart(count * padded);
    const float* const next = fetched ? factors + width * channels : nullptr;
    const Rows those{rows + point * apart(count * channels), channels, made_here + feature, padded, false, false, next};
    autosched_product(count, those, factors, channels, width, {});
  }

  void take(int64_t group, int64_t tile, float* row, int64_t between) const {
    const Corner at = corner(tile);
    const int64_t top = at.row - g.top, left = at.column - g.left;
    const bool whole = top >= 0 && top + kIn <= g.height && left >= 0 && left + kIn <= g.width;
    const float* const from = picture + at.picture * g.batch_stride + top * g.row_stride + left * g.column_stride + group * channels;
    for (int64_t channel = 0; channel < channels; channel += kLanes) {
      const int64_t some = channels - channel;
      if (some < kLanes) {
        take_channels<false, false>(top, left, from + channel, row + channel, between, some);
      } else if (whole) {
        take_channels<true, true>(top, left, from + channel, row + channel, between, kLanes);
      } else {
        take_channels<false, true>(top, left, from + channel, row + channel, between, kLanes);
      }
    }
  }

  // The input of a tile, transformed: one number of each product, ``between`` apart. ``Whole``: no part of it lies outside of the picture;
  // ``Full``: there are as many channels as a vector has numbers, else ``some``.
  template <bool Whole, bool Full>
  void take_channels(int64_t top, int64_t left, const float* from, float* row, int64_t between, int64_t some) const {
    Vector halfway[kPoints];
    for (int column_at = 0; column_at < kIn; ++column_at) {
      const int64_t x = left + column_at;
      Vector column[kIn];
#pragma GCC unroll 6
      for (int row_at = 0; row_at < kIn; ++row_at) {
        const int64_t y = top + row_at;
        const bool inside = Whole || (y >= 0 && y < g.height && x >= 0 && x < g.width);
        const float* const there = from + row_at * g.row_stride + column_at * g.column_stride;
        column[row_at] = !inside ? Vector{} : Full ? load<Vector>(there) : load_some(there, some);
      }
      Rule::input(column, 1, halfway + column_at, kIn);
    }
    for (int row_at = 0; row_at < kIn; ++row_at) {
      Vector line[kIn];
      Rule::input(halfway + row_at * kIn, 1, line, 1);
#pragma GCC unroll 6
      for (int column_at = 0; column_at < kIn; ++column_at) {
        float* const there = row + (row_at * kIn + column_at) * between;
        Full ? store(there, line[column_at]) : store_some(there, line[column_at], some);
      }
    }
  }

  void give(int64_t group, int64_t tile, const float* sums, int64_t between) const {
    for (int64_t feature = 0; feature < features; feature += kLanes) give_features(group, tile, sums, between, feature);
  }

  // The results of a tile, with all that follows.
  void give_features(int64_t group, int64_t tile, const float* sums, int64_t between, int64_t feature) const {
    const Corner at = corner(tile);
    Vector halfway[Outputs * kIn], results[Outputs * Outputs];
    for (int column_at = 0; column_at < kIn; ++column_at) {
      Vector column[kIn];
#pragma GCC unroll 6
      for (int row_at = 0; row_at < kIn; ++row_at) column[row_at] = load<Vector>(sums + (row_at * kIn + column_at) * between + feature);
      Rule::output(column, 1, halfway + column_at, kIn);
    }
    for (int row_at = 0; row_at < Outputs; ++row_at) Rule::output(halfway + row_at * kIn, 1, results + row_at * Outputs, 1);
    const int64_t some = features - feature, place = group * features + feature;
    const Vector added = bias == nullptr ? Vector{} : load_some(bias + place, some);
    const int64_t rows = std::min<int64_t>(Outputs, g.out_height - at.row), columns = std::min<int64_t>(Outputs, g.out_width - at.column);
    for (int64_t row_at = 0; row_at < rows; ++row_at) {
      for (int64_t column_at = 0; column_at < columns; ++column_at) {
        const int64_t pixel = (at.picture * g.out_height + at.row + row_at) * g.out_width + at.column + column_at;
        const int64_t to = pixel * g.features + place;
        Vector result = results[row_at * Outputs + column_at] + added;
        if (residual != nullptr) result += load_some(residual + to, some);
        store_some(made + to, follows.of(result), some);
      }
    }
  }

  const Geometry& g;
  const float* picture;
  float* made;
  const float* residual;
  const float* bias;
  const float* weights;
  int64_t channels = 0, features = 0, padded = 0;  // of a group; features that fill whole vectors
  int64_t across = 0, down = 0, tiles = 0;
  Follows follows{};
};

void convolve(const float* picture, float* made, const float* residual, const float* bias, const float* weights, const int64_t* numbers) {
  const auto geometry = read<Geometry>(numbers);
  if (geometry.outputs == 2) return Convolution<2>(geometry, picture, made, residual, bias, weights).run();
  Convolution<4>(geometry, picture, made, residual, bias, weights).run();
}

}  // namespace
