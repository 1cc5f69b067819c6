// Attention in bfloat16 by a processor's tiles, otherwise as ``attention.h`` has it. What softmax makes is multiplied as the sum of two numbers in bfloat16,
// so that results are rounded once.
#pragma once

#include "parallel.h"
#include "products.h"
#include "scores.h"
#include "scratch.h"
#include "tiles.h"

#include <algorithm>

#if defined(AUTOSCHED_TILES)

namespace {

// So many numbers that they fill the rows of tiles.
int64_t whole_tiles(int64_t count) { return (count + kTileChannels - 1) / kTileChannels * kTileChannels; }

// The first ``count`` numbers of so many that fill the row of a tile, or all if there are more; the others are zeros.
__m512i load_row(const Half* from, int64_t count) {
  return _mm512_maskz_loadu_epi16(count >= kTileChannels ? ~__mmask32{0} : (__mmask32{1} << std::max<int64_t>(count, 0)) - 1, from);
}

// Rows of 16 numbers of 32 bits, as columns.
void turn(__m512i (&rows)[kLanes]) {
  __m512i turned[kLanes];
  // Numbers of two rows, then of four, side by side within quarters; then the quarters.
  for (int row = 0; row < kLanes; row += 2) {
    turned[row] = _mm512_unpacklo_epi32(rows[row], rows[row + 1]);
    turned[row + 1] = _mm512_unpackhi_epi32(rows[row], rows[row + 1]);
  }
  for (int row = 0; row < kLanes; row += 4) {
    for (int half = 0; half < 2; ++half) {
      rows[row + 2 * half] = _mm512_unpacklo_epi64(turned[row + half], turned[row + 2 + half]);
      rows[row + 2 * half + 1] = _mm512_unpackhi_epi64(turned[row + half], turned[row + 2 + half]);
    }
  }
  for (int place = 0; place < 4; ++place) {
    const __m512i even = _mm512_shuffle_i32x4(rows[place], rows[place + 4], 0x88), odd = _mm512_shuffle_i32x4(rows[place], rows[place + 4], 0xdd);
    const __m512i other_even = _mm512_shuffle_i32x4(rows[place + 8], rows[place + 12], 0x88);
    const __m512i other_odd = _mm512_shuffle_i32x4(rows[place + 8], rows[place + 12], 0xdd);
    turned[place] = _mm512_shuffle_i32x4(even, other_even, 0x88);
    turned[place + 8] = _mm512_shuffle_i32x4(even, other_even, 0xdd);
    turned[place + 4] = _mm512_shuffle_i32x4(odd, other_odd, 0x88);
    turned[place + 12] = _mm512_shuffle_i32x4(odd, other_odd, 0xdd);
  }
  std::copy_n(turned, kLanes, rows);
}

class TiledAttending {
 public:
  TiledAttending(const Attention& geometry, const Half* query, const Half* key, const Half* value, const void* mask, Half* made)
      : g(geometry), query(query), key(key), value(value), hiding(geometry, mask), made(made) {
    width = whole_tiles(g.width), keys = whole_tiles(g.keys), features = whole(g.features);
  }

  void run() const {
    const int64_t products = g.batch * g.heads * g.queries * g.keys * (g.width + g.features);
    on_team(products < kLeastTiled ? 1 : g.threads, [&](int number, int count) {
      const Room room(*this);
      const TilesOf shaped(std::min(g.queries, kTileRows));
      const auto take = [&](int64_t item, int64_t shared) { take_keys(item, shared, room.keys), take_values(item, shared, room.values); };
      head_by_head(g, kTiledRows, number, count, take, [&](int64_t item, int64_t head, const Share& here) { some(item, head, here, room); });
    });
  }

 private:
  // As ``kLeastProducts``: tiles do several times as many in that time.
  static constexpr int64_t kLeastTiled = 4 * kLeastProducts;

  // What a thread works in. Scores of a query lie one line of a cache further apart than they are long, which a power of two may be: few of those would
  // fit.
  struct Room {
    explicit Room(const TiledAttending& of) : apart(of.keys + kLanes) {
      const int64_t of_keys = of.keys * of.width / 2, of_values = of.keys * of.features, of_scores = kTiledRows * apart;
      const int64_t of_sums = kTiledRows * of.features, of_queries = kTiledRows * of.width / 2;
      keys = attention_scratch.of(of_keys + of_values + of_scores + of_sums + of_queries);
      values = keys + of_keys;
      scores = values + of_values;
      sums = scores + of_scores;
      asking = reinterpret_cast<Half*>(sums + of_sums);
    }

    int64_t apart;
    float *keys, *values;  // in pairs of numbers
    float* scores;  // and, in their place, what softmax makes of them: of a vector the larger parts of all numbers, then what is left of them
    float* sums;
    Half* asking;
  };

  // As columns of blocks, in pairs of channels; zeros where there are none.
  void take_keys(int64_t item, int64_t head, float* to) const {
    const Half* const from = key + g.key.at(item, head);
    for (int64_t first = 0; first < keys; first += kBlock, to += kBlock * width / 2) {
      for (int64_t place = 0; place < kBlock; place += kLanes) {
        for (int64_t channel = 0; channel < width; channel += kTileChannels) {
          __m512i rows[kLanes] = {};
          const int64_t there = std::min<int64_t>(kLanes, g.keys - first - place);
          for (int64_t row = 0; row < there; ++row) {
            rows[row] = load_row(from + (first + place + row) * g.key.row_stride + channel, g.width - channel);
          }
          turn(rows);
          for (int64_t pair = 0; pair < kLanes; ++pair) store(to + (channel / 2 + pair) * kBlock + place, reinterpret_cast<Vector>(rows[pair]));
        }
      }
    }
  }

  // As rows of blocks, in pairs of keys; zeros where there are none. Those of as many keys as a vector has lanes are there twice: what they are multiplied
  // with has two parts.
  void take_values(int64_t item, int64_t head, float* to) const {
    const Half* const from = value + g.value.at(item, head);
    for (int64_t first = 0; first < features; first += kBlock) {
      const int64_t wide = block_width(features, first), again = kLanes / 2 * wide;
      for (int64_t place = 0; place < keys; place += kLanes, to += again) {
        for (int64_t key = place; key < place + kLanes; key += 2, to += wide) {
          const int64_t there[] = {key < g.keys ? g.features - first : 0, key + 1 < g.keys ? g.features - first : 0};
          const Half* const row = from + key * g.value.row_stride + first;
          for (int64_t lane = 0; lane < wide; lane += kLanes) {
            const Bits low = numbers_of(row + lane, there[0] - lane), high = numbers_of(row + g.value.row_stride + lane, there[1] - lane);
            const auto both = reinterpret_cast<Vector>(low | (high << 16));
            store(to + lane, both), store(to + again + lane, both);
          }
        }
      }
    }
  }

  // The first ``count`` numbers of a vector, or all if there are more, as whole numbers; the others are zeros.
  static Bits numbers_of(const Half* from, int64_t count) {
    return wide(reinterpret_cast<Halves>(_mm256_maskz_loadu_epi16(lanes_of(std::max<int64_t>(count, 0)), from)));
  }

  void some(int64_t item, int64_t head, const Share& here, const Room& room) const {
    const int64_t count = here.last - here.first;
    // Behind the place of the last of these queries none of them sees a key.
    const int64_t seen = g.causal != 0 ? std::min(g.keys, here.last) : g.keys, padded = whole_tiles(seen);
    const Half* asking = query + g.query.at(item, head) + here.first * g.query.row_stride;
    int64_t apart = g.query.row_stride;
    if (width != g.width) asking = with_zeros(asking, count, room.asking), apart = width;
    const auto nothing = [] {};
    for (int64_t first = 0; first < padded; first += kBlock) {
      const TileRows rows{asking, apart, room.scores + first, room.apart};
      tile_block<Tiled::kBfloat16>(count, rows, room.keys + first * width / 2, width, kBlock, nullptr, nothing);
    }
    float parts[kTiledRows];
    for (int64_t place = 0; place < count; ++place) {
      const int64_t row = here.first + place, mine = g.causal != 0 ? std::min(seen, row + 1) : seen;
      parts[place] = share(item, head, row, mine, padded, room.scores + place * room.apart);
    }
    for (int64_t first = 0; first < features; first += kBlock) {
      const int64_t wide = block_width(features, first);
      const TileRows rows{reinterpret_cast<const Half*>(room.scores), 2 * room.apart, room.sums + first, features};
      tile_block<Tiled::kBfloat16>(count, rows, room.values + first * keys, 2 * padded, wide, nullptr, nothing);
    }
    Half* const to = made + g.made.at(item, head) + here.first * g.made.row_stride;
    for (int64_t place = 0; place < count; ++place) {
      for (int64_t first = 0; first < g.features; first += kLanes) {
        const Vector sums = load<Vector>(room.sums + place * features + first) * spread(parts[place]);
        Bfloat16::store(to + place * g.made.row_stride + first, sums, g.features - first);
      }
    }
  }

  // Powers of the scores of a query, in two parts each, up to ``all`` keys, and what makes their sum one.
  float share(int64_t item, int64_t head, int64_t row, int64_t mine, int64_t all, float* scores) const {
    float scale = number_of(g.scale);
    if (hiding.hides()) {
      for (int64_t place = 0; place < mine; place += kLanes) store(scores + place, load<Vector>(scores + place) * spread(scale));
      hiding.hide(item, head, row, 0, mine, scores);
      scale = 1.0f;
    }
    const float sum = powers_of(scores, mine, scale, [&](int64_t place, Vector power) {
      const auto most = reinterpret_cast<Vector>(reinterpret_cast<Bits>(power) & static_cast<int32_t>(0xffff0000));
      const __m512bh both = _mm512_cvtne2ps_pbh(power - most, most);
      std::memcpy(scores + place, &both, sizeof(both));
    });
    std::fill(scores + whole(mine), scores + all, 0.0f);
    return sum;
  }

  // Rows that tiles can read, where channels do not fill those.
  const Half* with_zeros(const Half* from, int64_t count, Half* to) const {
    for (int64_t row = 0; row < count; ++row) {
      for (int64_t channel = 0; channel < width; channel += kTileChannels) {
        _mm512_storeu_si512(to + row * width + channel, load_row(from + row * g.query.row_stride + channel, g.width - channel));
      }
    }
    return to;
  }

  const Attention& g;
  const Half* query;
  const Half* key;
  const Half* value;
  const Hiding<Bfloat16> hiding;
  Half* made;
  int64_t width = 0, keys = 0, features = 0;  // that fill tiles, and vectors
};

}  // namespace

#endif
