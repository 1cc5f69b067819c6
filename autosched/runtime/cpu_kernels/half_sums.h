// How sums of rows in sixteen bits with blocks of weights are made: by vectors, or by tiles.
#pragma once

#include "activations.h"
#include "formats.h"
#include "parallel.h"
#include "products.h"
#include "scratch.h"
#include "tiles.h"

#include <algorithm>
#include <type_traits>
#include <utility>

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
  static constexpr bool kWhole = false;
  static Vector weights(const Half* from) { return Numbers::load(from); }
  static Vector add(Vector weights, float number, Vector sums) { return multiply_add(weights, spread(number), sums); }
};

#if defined(__AVX512BF16__)
// Two channels in bfloat16 by one instruction. A pair of them is moved like a float32.
struct Pairs {
  using Weight = float;
  static constexpr bool kWhole = false;
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

// Blocks of weights from ``first`` to ``last``, of all; ``fetched``: whether each comes while the one before it is multiplied with.
template <typename Weight>
struct Blocks {
  const Half* weights;
  int64_t channels, padded;
  Share those;
  bool fetched;

  // ``use(weights, feature, width, ahead)`` for each: the feature that it begins with, and what to fetch meanwhile, or null.
  template <typename Use>
  void each(Use use) const {
    for (int64_t block = those.first; block < those.last; ++block) {
      const int64_t feature = block * kBlock, width = block_width(padded, feature);
      const Half* const mine = weights + feature * channels;
      use(reinterpret_cast<const Weight*>(mine), feature, width, fetched && block + 1 < those.last ? mine + width * channels : nullptr);
    }
  }
};

// By vectors.
template <typename Numbers, typename Factors>
class ByVectors {
 public:
  using Weight = typename Factors::Weight;
  static constexpr bool kPairs = kInPairs<Factors>;

  explicit ByVectors(const Share&) {}

  static int64_t products(const HalfLayer& g, int64_t all) { return g.rows * all; }
  static bool heavy(const HalfLayer& g, int64_t all, int64_t padded) { return all > 2 * g.rows * (g.channels + padded); }
  static int64_t together(const HalfLayer&, bool heavy) { return heavy ? kMostRows : kPixels; }
  static int64_t room_for_sums(int64_t) { return kPixels * kBlock; }
  static int64_t room_for_numbers(const HalfLayer& g, int64_t count) { return kPairs ? 0 : count * g.channels; }

  // ``count`` rows as they are read below.
  static const float* ready(const HalfLayer& g, const Half* source, int64_t count, float* room) {
    if constexpr (kPairs) {
      return reinterpret_cast<const float*>(source);
    } else {
      widen<Numbers>(source, count * g.channels, room);
      return room;
    }
  }

  // ``count`` rows with blocks of weights: ``finish(first, count, feature, width, sums)`` for a few of them with one block at a time.
  template <typename Finish>
  static void multiply(const HalfLayer& g, const float* numbers, int64_t count, const Blocks<Weight>& blocks, float* sums, Finish finish) {
    const int64_t channels = kPairs ? g.channels / 2 : g.channels, times = (count + kPixels - 1) / kPixels;
    blocks.each([&](const Weight* weights, int64_t feature, int64_t width, const void* ahead) {
      for (int64_t time = 0; time < times; ++time) {
        const Share here(count, time, times);
        const int64_t some = here.last - here.first;
        const Rows rows{numbers + here.first * channels, channels, sums, kBlock, false, false, time == 0 ? ahead : nullptr};
        width == kBlock ? ::block<Factors, 2, false>(some, rows, weights, channels, {})
                        : ::block<Factors, 1, false>(some, rows, weights, channels, {.features = width});
        finish(here.first, some, feature, width, sums);
      }
    });
  }
};

#if defined(AUTOSCHED_TILES)
// By tiles: as many channels as fill them.
template <Tiled Kind>
class ByTiles {
 public:
  using Weight = float;

  explicit ByTiles(const Share& rows) : shaped(std::min(rows.last - rows.first, kTileRows)) {}

  // As many as vectors do in the time that they take. Weights of a few rows take as long to come as those of a tile of them.
  static int64_t products(const HalfLayer& g, int64_t all) { return all * std::max(g.rows, kTileRows) / kTimesAsFast; }
  // A thread reads all of what is not divided.
  static bool heavy(const HalfLayer& g, int64_t, int64_t padded) { return padded > g.rows; }
  // As many as stay in a core's own caches while weights go by.
  static int64_t together(const HalfLayer& g, bool) { return std::clamp(kCachedNumbers / g.channels, kTiledRows, kMostRows); }
  static int64_t room_for_sums(int64_t count) { return 2 * count * kBlock; }
  static int64_t room_for_numbers(const HalfLayer&, int64_t) { return 0; }
  static const Half* ready(const HalfLayer&, const Half* source, int64_t, float*) { return source; }

  // As above. Results of some rows are made of their sums while tiles are busy with the next ones.
  template <typename Finish>
  static void multiply(const HalfLayer& g, const Half* numbers, int64_t count, const Blocks<Weight>& blocks, float* sums, Finish finish) {
    const int64_t times = (count + kTiledRows - 1) / kTiledRows, step = times > kFewTimes ? kNearChannels : g.channels;
    float* others = sums + count * kBlock;
    Unfinished last;
    blocks.each([&](const float* weights, int64_t feature, int64_t width, const void* ahead) {
      for (int64_t channel = 0; channel < g.channels; channel += step) {
        const int64_t channels = std::min(step, g.channels - channel);
        for (int64_t time = 0; time < times; ++time) {
          const Share here(count, time, times);
          const int64_t some = here.last - here.first, pace = (last.count * kTileChannels + channels - 1) / channels;
          const TileRows rows{numbers + here.first * g.channels + channel, g.channels, sums + here.first * kBlock, kBlock, channel > 0};
          tile_block<Kind>(some, rows, weights + channel / 2 * width, channels, width, times > kFewTimes ? nullptr : ahead, [&] { last.finish_some(pace, finish); });
          last.finish_some(last.count, finish);
          if (channel + channels == g.channels) last = {here.first, some, feature, width, rows.sums};
        }
      }
      std::swap(sums, others);
    });
    last.finish_some(last.count, finish);
  }

 private:
  // Rows whose sums with a block are there.
  struct Unfinished {
    int64_t first = 0, count = 0, feature = 0, width = 0;
    const float* sums = nullptr;

    template <typename Finish>
    void finish_some(int64_t most, Finish& finish) {
      const int64_t some = std::min(most, count);
      if (some == 0) return;
      finish(first, some, feature, width, sums);
      first += some, count -= some, sums += some * kBlock;
    }
  };

  static constexpr int64_t kTimesAsFast = 8;  // as vectors
  static constexpr int64_t kCachedNumbers = 4 * kCachedWeights;
  // A block of weights of so many channels stays in the nearest cache while rows go by; if they do so a few times only, that saves nothing.
  static constexpr int64_t kNearChannels = 256, kFewTimes = 2;
  const TilesOf shaped;
};
#endif

// As ``kCachedWeights``.
constexpr int64_t kCachedHalves = 2 * kCachedWeights;

// All sums: ``finish(first, count, feature, width, sums)`` for those of some rows with a block of weights. Each thread has its own rows or, where there
// are more weights than other numbers, its own weights.
template <typename Way, typename Finish>
void multiply_all(const HalfLayer& g, const Half* source, const Half* weights, Finish finish) {
  const int64_t padded = whole(g.features), all = g.channels * padded, blocks = (padded + kBlock - 1) / kBlock;
  const int64_t threads = Way::products(g, all) < kLeastProducts ? 1 : g.threads;
  const bool heavy = Way::heavy(g, all, padded) && blocks >= threads;
  on_team(threads, [&](int number, int count) {
    const Share rows = share_if(!heavy, g.rows, number, count), those = share_if(heavy, blocks, number, count);
    if (rows.first == rows.last) return;
    const Way way(rows);
    const int64_t together = Way::together(g, heavy), rounds = (rows.last - rows.first + together - 1) / together;
    for (int64_t round = 0; round < rounds; ++round) {
      const Share here(rows.last - rows.first, round, rounds);
      const int64_t first = rows.first + here.first, some = here.last - here.first, room = Way::room_for_sums(some);
      float* const sums = autosched_scratch(room + Way::room_for_numbers(g, some));
      const auto* const numbers = Way::ready(g, source + first * g.channels, some, sums + room);
      // Those that do not stay in a core's own caches are fetched each time.
      const Blocks<typename Way::Weight> these{weights, g.channels, padded, those, round == 0 || all > kCachedHalves};
      Way::multiply(g, numbers, some, these, sums, [&](int64_t from, int64_t few, int64_t feature, int64_t width, const float* made) {
        finish(first + from, few, feature, width, made);
      });
    }
  });
}

}  // namespace
