// Pooling of float32 pictures: the largest number, or the mean, of what lies around a place, vectors of channels at a time.
#pragma once

#include "geometry.h"
#include "parallel.h"
#include "scratch.h"
#include "vectors.h"

#include <algorithm>
#include <cstdint>
#include <limits>

namespace {

// As many numbers as ``pooling.geometry`` writes, in its order. Strides are in elements; a channel follows the one before.
struct Pooled {
  int64_t threads;
  int64_t batch, channels, height, width;
  int64_t batch_stride, channel_stride, row_stride, column_stride;
  int64_t tall, wide, step_down, step_across, apart_down, apart_across;
  int64_t top, left, out_height, out_width;
  int64_t mean;     // or else the largest
  int64_t divisor;  // of a mean: given, or else 0
  int64_t padding;  // whether a mean counts zeros of the padding, too
};

// So many vectors are worked on together, and so many lines of them: what they come from lies in as many places.
constexpr int64_t kPooledVectors = 4, kPooledLines = 8;

// Of the taps around a place, along a line or a column: those that lie inside of the picture, and how many a mean counts.
struct Reach : Inside {
  Reach(int64_t place, int64_t size, int64_t step, int64_t before, int64_t taps, int64_t apart, bool padding)
      : Inside(place * step - before, size, taps, apart), from(place * step - before) {
    counted = padding ? std::min(from + taps, size + before) - from : end - begin;
  }
  int64_t from, counted;
};

// Each line of results has the rows that belong to it put together first, and then the columns of what that makes.
template <bool Mean>
class Pool {
 public:
  Pool(const Pooled& geometry, const float* picture, float* made) : g(geometry), picture(picture), made(made) {}

  void run() const {
    constexpr int64_t kTogether = kPooledVectors * kLanes;
    const int64_t lines = g.batch * g.out_height, blocks = (g.channels + kTogether - 1) / kTogether;
    const int64_t numbers = lines * g.channels * (g.width * g.tall + g.out_width * g.wide);
    on_team(numbers < kLeastProducts ? 1 : g.threads, [&](int number, int count) {
      // Of few lines, each thread has some channels.
      const bool few = lines < count;
      const Share mine = share_if(!few, lines, number, count), those = share_if(few, blocks, number, count);
      const int64_t first = those.first * kTogether, channels = std::min(those.last * kTogether, g.channels) - first;
      if (channels <= 0) return;
      float* const rows = autosched_scratch(g.width * channels);
      for (int64_t line = mine.first; line < mine.last; ++line) {
        const Reach down(line % g.out_height, g.height, g.step_down, g.top, g.tall, g.apart_down, g.padding != 0);
        const float* const from = picture + line / g.out_height * g.batch_stride + down.from * g.row_stride + first;
        // Where nothing lies between them, all pixels are one.
        const int64_t pixels = g.column_stride == channels ? 1 : g.width, each = g.width / pixels * channels;
        for (int64_t x = 0; x < pixels; ++x) {
          together(from + x * g.column_stride, g.apart_down * g.row_stride, down.begin, down.end, each, 1.0f, rows + x * channels);
        }
        for (int64_t across = 0; across < g.out_width; ++across) {
          const Reach those(across, g.width, g.step_across, g.left, g.wide, g.apart_across, g.padding != 0);
          float* const to = made + (line * g.out_width + across) * g.channels + first;
          const float share = 1.0f / static_cast<float>(g.divisor != 0 ? g.divisor : down.counted * those.counted);
          together(rows + those.from * channels, g.apart_across * channels, those.begin, those.end, channels, share, to);
        }
      }
    });
  }

 private:
  // Of lines of ``count`` numbers that lie ``apart``, those from ``begin`` on: the largest, or the sums, multiplied with ``share``.
  static void together(const float* from, int64_t apart, int64_t begin, int64_t end, int64_t count, float share, float* to) {
    for (int64_t first = begin; first == begin || first < end; first += kPooledLines) {
      const Lines lines{from, apart, first, std::min(end, first + kPooledLines), first > begin, first + kPooledLines < end ? 1.0f : share};
      int64_t place = 0;
      for (; place + kPooledVectors * kLanes <= count; place += kPooledVectors * kLanes) some<kPooledVectors>(lines, place, 0, to);
      for (; place < count; place += kLanes) some<1>(lines, place, count - place, to);
    }
  }

  // ``more``: they are put together with what is there already.
  struct Lines {
    const float* from;
    int64_t apart, begin, end;
    bool more;
    float share;
  };

  // Of lines the vectors at ``place``, or what there is of one.
  template <int Vectors>
  static void some(const Lines& lines, int64_t place, int64_t count, float* to) {
    const auto at = [&](const float* numbers) { return Vectors > 1 ? load<Vector>(numbers) : load_some(numbers, count); };
    const Vector nothing = Mean ? Vector{} : spread(-std::numeric_limits<float>::infinity());
    Vector values[Vectors];
    for (int vector = 0; vector < Vectors; ++vector) values[vector] = lines.more ? at(to + place + vector * kLanes) : nothing;
    for (int64_t line = lines.begin; line < lines.end; ++line) {
#pragma GCC unroll 4
      for (int vector = 0; vector < Vectors; ++vector) {
        const Vector there = at(lines.from + line * lines.apart + place + vector * kLanes);
        values[vector] = Mean ? values[vector] + there : largest(values[vector], there);
      }
    }
    for (int vector = 0; vector < Vectors; ++vector) {
      const Vector value = Mean ? values[vector] * spread(lines.share) : values[vector];
      float* const there = to + place + vector * kLanes;
      Vectors > 1 ? store(there, value) : store_some(there, value, count);
    }
  }

  const Pooled& g;
  const float* picture;
  float* made;
};

}  // namespace
