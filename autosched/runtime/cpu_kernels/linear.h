// Linear layers of float32: some rows times constant weights, with bias and relu before a result is written.
//
// No result depends on the number of threads.
#pragma once

#include "parallel.h"
#include "products.h"

#include <algorithm>

namespace {

// As many numbers as ``linear.geometry`` writes, in its order. ``features`` fill whole vectors.
struct Layer {
  int64_t threads, rows, channels, features;
  int64_t relu;
};

// So many products are added up before the sum is added to others: long sums lose less so, and the rows' part stays in the nearest cache.
constexpr int64_t kSummed = 512;

// What follows the product, in ``count`` rows from ``made`` on of the block of features that begins at ``first``.
void finish(const Layer& layer, int64_t count, float* made, const float* bias, int64_t first) {
  if (bias == nullptr && layer.relu == 0) return;
  const int64_t width = block_width(layer.features, first);
  for (; count > 0; --count, made += layer.features) {
    for (int64_t feature = 0; feature < width; feature += kLanes) {
      Vector result = load<Vector>(made + feature);
      if (bias != nullptr) result += load<Vector>(bias + first + feature);
      if (layer.relu != 0) result = result < Vector{} ? Vector{} : result;  // not a number stays what it is
      store(made + feature, result);
    }
  }
}

// Each block of features is read from memory once, and from the cache for further rows. Where there are fewer blocks than threads, rows are
// divided as well.
void multiply_rows(const float* rows, float* made, const float* bias, const float* weights, const int64_t* numbers) {
  const auto layer = read<Layer>(numbers);
  const int64_t threads = layer.rows * layer.channels * layer.features < kLeastProducts ? 1 : layer.threads;
  const int64_t blocks = (layer.features + kBlock - 1) / kBlock;
  const int64_t parts = std::min((threads + blocks - 1) / blocks, (layer.rows + kRows - 1) / kRows);
  on_team(threads, [&](int number, int count) {
    const Share mine(blocks * parts, number, count);
    for (int64_t place = mine.first; place < mine.last; ++place) {
      const Share part(layer.rows, static_cast<int>(place % parts), static_cast<int>(parts));
      const int64_t first = place / parts * kBlock, here = part.last - part.first;
      float* const to = made + part.first * layer.features + first;
      const float* factors = weights + first * layer.channels;
      for (int64_t from = 0; from < layer.channels; from += kSummed) {
        const int64_t some = std::min(kSummed, layer.channels - from);
        product(here, {rows + part.first * layer.channels + from, layer.channels, to, layer.features, from > 0}, factors, some, first);
        factors += some * block_width(layer.features, first);
      }
      finish(layer, here, to, bias, first);
    }
  });
}

}  // namespace
