// What kernels of attention have in common: what they are told, what hides a score, and softmax.
#pragma once

#include "activations.h"
#include "formats.h"
#include "geometry.h"
#include "parallel.h"
#include "scratch.h"
#include "vectors.h"

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace {

enum class Mask : int64_t { kNone, kAdded, kSeen, kAddedFloats };  // ``kAddedFloats``: to scores of numbers in sixteen bits

// Where the numbers of one tensor are, in elements: each head of each item of a batch has rows of numbers side by side.
struct Heads {
  int64_t offset, batch_stride, head_stride, row_stride;

  int64_t at(int64_t item, int64_t head) const { return offset + item * batch_stride + head * head_stride; }
};

// As many numbers as ``attention.geometry`` writes, in its order.
struct Attention {
  int64_t threads;
  int64_t batch, heads, sharing, queries, keys, width, features;  // ``sharing``: so many heads of queries have the same keys and values
  Heads query, key, value, made, mask;
  int64_t mask_step;  // from a key to the next: 0 or 1
  int64_t masked, causal;  // a ``Mask``, and whether a query sees no key behind its own place
  int64_t scale;  // the bits of a float
  int64_t format;  // a ``Format``
};

constexpr int64_t kFour = 4;
using Four = float __attribute__((vector_size(kFour * sizeof(float))));

template <int Place>
float taken(Four one, Four other) {
  return Place < kFour ? one[Place % kFour] : other[Place % kFour];
}

// Written so that every compiler knows it; all make one instruction of it, or two.
template <int First, int Second, int Third, int Fourth>
Four shuffled(Four one, Four other) {
  return Four{taken<First>(one, other), taken<Second>(one, other), taken<Third>(one, other), taken<Fourth>(one, other)};
}

// A vector of scores, each times ``scale``; behind the first ``count`` of them what has no power.
Vector scores_of(const float* from, int64_t count, float scale) {
  const Vector there = load<Vector>(from) * spread(scale);
  if (count >= kLanes) return there;
  Bits place{};
  for (int lane = 0; lane < kLanes; ++lane) place[lane] = lane;
  return place < static_cast<int32_t>(count) ? there : spread(-INFINITY);
}

// Of ``count`` scores, each times ``scale``, the powers of e, a vector after the other: ``put(place, power)``. Returns what makes their sum one. Where
// nothing is seen nothing is the result.
template <typename Put>
float powers_of(const float* scores, int64_t count, float scale, Put put) {
  Vector most = spread(-INFINITY);
  for (int64_t place = 0; place < count; place += kLanes) {
    const Vector there = scores_of(scores + place, count - place, scale);
    most = there > most ? there : most;
  }
  const float largest = largest_of(most);
  const Vector less = spread(largest == -INFINITY ? 0.0f : largest);
  Vector sums = {};
  for (int64_t place = 0; place < count; place += kLanes) {
    const Vector power = exponential_below_zero(scores_of(scores + place, count - place, scale) - less);
    sums += power;
    put(place, power);
  }
  const float sum = sum_of(sums);
  return sum == 0.0f ? 0.0f : 1.0f / sum;
}

// The same in the place of the scores; zeros from there to ``all``.
float powers(float* scores, int64_t count, int64_t all) {
  const float share = powers_of(scores, count, 1.0f, [&](int64_t place, Vector power) { store(scores + place, power); });
  std::fill(scores + std::min(whole(count), all), scores + all, 0.0f);
  return share;
}

thread_local Scratch attention_scratch;

// A thread's share of all queries, some of a head at a time, ``most`` of them: ``some(item, head, queries)``. Before the first of those that share keys
// and values, ``take(item, shared)``, in the order of these.
template <typename Take, typename Some>
void head_by_head(const Attention& g, int64_t most, int number, int count, Take take, Some some) {
  const int64_t rounds = (g.queries + most - 1) / most;
  const Share mine(g.batch * g.heads * rounds, number, count);
  int64_t there = -1;
  for (int64_t unit = mine.first; unit < mine.last; ++unit) {
    const int64_t each = unit / rounds, item = each / g.heads, head = each % g.heads, first = each - head % g.sharing;
    if (first != there) take(item, head / g.sharing);
    there = first;
    some(item, head, Share(g.queries, unit % rounds, rounds));
  }
}

// Masks of booleans or of numbers, or none.
template <typename Numbers>
class Hiding {
 public:
  Hiding(const Attention& geometry, const void* mask) : g(geometry), mask(mask) {}

  bool hides() const { return static_cast<Mask>(g.masked) != Mask::kNone; }

  // Its part in ``count`` scores of a query, those of the keys from ``first`` on.
  void hide(int64_t item, int64_t head, int64_t row, int64_t first, int64_t count, float* scores) const {
    if (!hides()) return;
    const int64_t from = g.mask.at(item, head) + row * g.mask.row_stride + first * g.mask_step;
    if (static_cast<Mask>(g.masked) == Mask::kSeen) {
      const bool* const seen = static_cast<const bool*>(mask) + from;
      if (g.mask_step == 0) {
        if (!*seen) std::fill_n(scores, count, -INFINITY);
      } else {
        int64_t place = 0;
        for (; place + kLanes <= count; place += kLanes) {
          store(scores + place, load_booleans(seen + place) != 0 ? load<Vector>(scores + place) : spread(-INFINITY));
        }
        for (; place < count; ++place) scores[place] = seen[place] ? scores[place] : -INFINITY;
      }
      return;
    }
    if (static_cast<Mask>(g.masked) == Mask::kAdded) {
      add<Numbers>(from, count, scores);
    } else {
      add<Float32>(from, count, scores);
    }
  }

  // Of the first ``count`` keys, those between the first and the last that a query sees.
  Share seen(int64_t item, int64_t head, int64_t row, int64_t count) const {
    const auto kind = static_cast<Mask>(g.masked);
    if (kind == Mask::kNone || g.mask_step == 0) return {0, count};
    const int64_t from = g.mask.at(item, head) + row * g.mask.row_stride;
    const auto hidden = [&](int64_t place) {
      if (kind == Mask::kSeen) return !static_cast<const bool*>(mask)[from + place];
      return (kind == Mask::kAdded ? one<Numbers>(from + place) : one<Float32>(from + place)) == -INFINITY;
    };
    int64_t first = 0, last = count;
    while (first < last && hidden(first)) ++first;
    while (last > first && hidden(last - 1)) --last;
    return {first, last};
  }

 private:
  template <typename Added>
  float one(int64_t place) const {
    return Added::load(static_cast<const typename Added::Number*>(mask) + place, 1)[0];
  }

  template <typename Added>
  void add(int64_t from, int64_t count, float* scores) const {
    const auto* const added = static_cast<const typename Added::Number*>(mask) + from;
    const Vector same = g.mask_step == 0 ? spread(one<Added>(from)) : Vector{};
    for (int64_t place = 0; place < count; place += kLanes) {
      const int64_t here = count - place;
      const Vector more = g.mask_step == 0 ? same : Added::load(added + place, here);
      store_some(scores + place, load_some(scores + place, here) + more, here);
    }
  }

  const Attention& g;
  const void* mask;
};

}  // namespace
