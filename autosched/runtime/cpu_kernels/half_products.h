// Linear layers of numbers in sixteen bits: sums are float32 and rounded once, when all that follows is done. No result depends on the number of
// threads.
#pragma once

#include "activations.h"
#include "formats.h"
#include "geometry.h"
#include "half_sums.h"
#include "tiles.h"

#include <algorithm>

namespace {

template <typename Numbers, typename Way>
class HalfProducts {
 public:
  HalfProducts(const HalfLayer& layer, const Half* source, Half* made, const Half* bias, const Half* weights)
      : g(layer), source(source), made(made), bias(bias), weights(weights), follows(layer.following.read()) {}

  void run() const {
    multiply_all<Way>(g, source, weights, [&](int64_t first, int64_t count, int64_t feature, int64_t width, const float* sums) {
      finish(first, count, feature, width, sums);
    });
  }

 private:
  // Results of ``count`` rows, from ``first`` on, of the features of a block. Called in many places, each of which would have its own.
  __attribute__((noinline)) void finish(int64_t first, int64_t count, int64_t feature, int64_t width, const float* sums) const {
    Half* const to = made + first * g.features + feature;
    if (width == kBlock && feature + width <= g.features) {
      if (follows.activation == Activation::kNone) return whole_block<Activation::kNone>(to, count, feature, sums);
      if (follows.activation == Activation::kSilu) return whole_block<Activation::kSilu>(to, count, feature, sums);
      if (follows.activation == Activation::kGelu) return whole_block<Activation::kGelu>(to, count, feature, sums);
      if (follows.activation == Activation::kGeluByTanh) return whole_block<Activation::kGeluByTanh>(to, count, feature, sums);
    }
    for (int64_t place = 0; place < width; place += kLanes) {
      const int64_t here = std::min<int64_t>(kLanes, g.features - feature - place);
      const Vector added = bias_of(feature + place, here);
      for (int64_t row = 0; row < count; ++row) {
        Numbers::store(to + row * g.features + place, follows.of(load<Vector>(sums + row * kBlock + place) + added), here);
      }
    }
  }

  // The same of a block of which all are results, with an activation that is asked for once.
  template <Activation Kind>
  void whole_block(Half* to, int64_t count, int64_t feature, const float* sums) const {
    const Vector added[] = {bias_of(feature, kLanes), bias_of(feature + kLanes, kLanes)};
    const Follows mine{follows.least, follows.most, Kind};
    for (; count > 0; --count, to += g.features, sums += kBlock) {
      for (int place = 0; place < 2; ++place) {
        Numbers::store(to + place * kLanes, mine.of(load<Vector>(sums + place * kLanes) + added[place]));
      }
    }
  }

  // Nothing is added with a minus zero, which leaves even that as it is.
  Vector bias_of(int64_t feature, int64_t count) const { return bias == nullptr ? spread(-0.0f) : Numbers::load(bias + feature, count); }

  const HalfLayer& g;
  const Half* source;
  Half* made;
  const Half* bias;
  const Half* weights;
  const Follows follows;
};

void multiply_halves(const Half* source, Half* made, const Half* bias, const Half* weights, const int64_t* numbers) {
  const auto layer = read<HalfLayer>(numbers);
  if (static_cast<Format>(layer.format) == Format::kFloat16) {
    return HalfProducts<Float16, ByVectors<Float16, Widened<Float16>>>(layer, source, made, bias, weights).run();
  }
#if defined(AUTOSCHED_TILES)
  if (layer.channels % kTileChannels == 0 && may_use_tiles()) return HalfProducts<Bfloat16, ByTiles<Tiled::kBfloat16>>(layer, source, made, bias, weights).run();
#endif
  HalfProducts<Bfloat16, ByVectors<Bfloat16, OfBfloat16>>(layer, source, made, bias, weights).run();
}

}  // namespace
