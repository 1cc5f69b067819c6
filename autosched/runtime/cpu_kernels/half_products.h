// Linear layers of numbers in sixteen bits: sums are float32 and rounded once, when all that follows is done. No result depends on the number of
// threads.
#pragma once

#include "activations.h"
#include "formats.h"
#include "geometry.h"
#include "parallel.h"
#include "products.h"
#include "scratch.h"

#include <algorithm>
#include <type_traits>

namespace {

// As many numbers as ``linear.geometry_of_halves`` writes, in its order.
struct HalfLayer {
  int64_t threads;
  int64_t rows, channels, features;
  int64_t format;  // a ``Format`` of sixteen bits
  Following following;
};

// Weights that are made float32 as they are read.
template <typename Numbers>
struct Widened {
  using Weight = Half;
  static Vector weights(const Half* from) { return Numbers::load(from); }
  static Vector add(Vector weights, float number, Vector sums) { return multiply_add(weights, spread(number), sums); }
};

#if defined(__AVX512BF16__)
// Two channels in bfloat16 by one instruction. A pair of them is moved like a float32.
struct Pairs {
  using Weight = float;
  static Vector weights(const float* from) { return load<Vector>(from); }
  static Vector add(Vector weights, float pair, Vector sums) {
    return _mm512_dpbf16_ps(sums, reinterpret_cast<__m512bh>(weights), reinterpret_cast<__m512bh>(_mm512_set1_ps(pair)));
  }
};
using OfBfloat16 = Pairs;
#else
using OfBfloat16 = Widened<Bfloat16>;
#endif

// Whether weights lie in pairs of channels.
template <typename Factors>
constexpr bool kInPairs = !std::is_same_v<typename Factors::Weight, Half>;

template <typename Numbers, typename Factors>
class HalfProducts {
 public:
  HalfProducts(const HalfLayer& layer, const Half* source, Half* made, const Half* bias, const Half* weights)
      : g(layer), source(source), made(made), bias(bias), weights(weights), follows(layer.following.read()) {
    padded = whole(g.features);
  }

  // Each thread has its own rows or, where there are more weights than other numbers, its own weights.
  void run() const {
    const int64_t all = g.channels * padded, blocks = (padded + kBlock - 1) / kBlock;
    const int64_t threads = g.rows * all < kLeastProducts ? 1 : g.threads;
    const bool heavy = all > 2 * g.rows * (g.channels + padded) && blocks >= threads;
    on_team(threads, [&](int number, int count) {
      const Share rows(g.rows, heavy ? 0 : number, heavy ? 1 : count), those(blocks, heavy ? number : 0, heavy ? count : 1);
      const int64_t together = heavy ? kMostRows : kPixels, rounds = (rows.last - rows.first + together - 1) / together;
      for (int64_t round = 0; round < rounds; ++round) {
        const Share here(rows.last - rows.first, static_cast<int>(round), static_cast<int>(rounds));
        some(rows.first + here.first, here.last - here.first, those, round == 0 || all > kCachedHalves);
      }
    });
  }

 private:
  // As ``kCachedWeights``.
  static constexpr int64_t kCachedHalves = 2 * kCachedWeights;
  static constexpr bool kPairs = kInPairs<Factors>;

  // ``count`` rows, from ``first`` on, with ``those`` blocks of weights; ``fetched``: whether these are, ahead.
  void some(int64_t first, int64_t count, const Share& those, bool fetched) const {
    const int64_t channels = kPairs ? g.channels / 2 : g.channels;
    float* const sums = scratch.of(kPixels * kBlock + (kPairs ? 0 : count * channels));
    const float* numbers = reinterpret_cast<const float*>(source + first * g.channels);
    if constexpr (!kPairs) {
      widen<Numbers>(source + first * g.channels, count * channels, sums + kPixels * kBlock);
      numbers = sums + kPixels * kBlock;
    }
    const int64_t times = (count + kPixels - 1) / kPixels;
    for (int64_t block = those.first; block < those.last; ++block) {
      const int64_t feature = block * kBlock, width = block_width(padded, feature);
      const auto* const mine = reinterpret_cast<const typename Factors::Weight*>(weights + feature * g.channels);
      for (int64_t time = 0; time < times; ++time) {
        const Share here(count, static_cast<int>(time), static_cast<int>(times));
        const bool ahead = fetched && time == 0 && block + 1 < those.last;
        const Rows rows{numbers + here.first * channels, channels, sums, kBlock, false, false, ahead ? mine + width * channels : nullptr};
        const int64_t here_count = here.last - here.first;
        width == kBlock ? ::block<Factors, 2, true, false>(here_count, rows, mine, channels, {})
                        : ::block<Factors, 1, true, false>(here_count, rows, mine, channels, {.features = width});
        finish(first + here.first, here_count, feature, width, sums);
      }
    }
  }

  // Results of ``count`` rows, from ``first`` on, of the features of a block.
  void finish(int64_t first, int64_t count, int64_t feature, int64_t width, const float* sums) const {
    for (int64_t place = 0; place < width; place += kLanes) {
      const int64_t here = std::min<int64_t>(kLanes, g.features - feature - place);
      const Vector added = bias == nullptr ? spread(-0.0f) : Numbers::load(bias + feature + place, here);
      Half* to = made + first * g.features + feature + place;
      for (int64_t row = 0; row < count; ++row, to += g.features) {
        Numbers::store(to, follows.of(load<Vector>(sums + row * kBlock + place) + added), here);
      }
    }
  }

  const HalfLayer& g;
  const Half* source;
  Half* made;
  const Half* bias;
  const Half* weights;
  const Follows follows;
  int64_t padded = 0;  // of the features, that fill whole vectors
};

void multiply_halves(const Half* source, Half* made, const Half* bias, const Half* weights, const int64_t* numbers) {
  const auto layer = read<HalfLayer>(numbers);
  if (static_cast<Format>(layer.format) == Format::kBfloat16) {
    return HalfProducts<Bfloat16, OfBfloat16>(layer, source, made, bias, weights).run();
  }
  HalfProducts<Float16, Widened<Float16>>(layer, source, made, bias, weights).run();
}

}  // namespace
