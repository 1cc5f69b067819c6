// Products of whole numbers in eight bits, with signs: sums are whole numbers in 32 bits, as exact as these are. By tiles, or by an instruction that
// multiplies four numbers of a kind without signs with four that have them (AVX512-VNNI). Four channels move as two in sixteen bits do.
#pragma once

#include "half_products.h"

namespace {

// As many numbers as ``linear.geometry_of_bytes`` writes, in its order.
struct ByteLayer {
  int64_t threads;
  int64_t rows, channels, features;
};

#if defined(__AVX512VNNI__)
#define AUTOSCHED_BYTES

struct Fours {
  using Weight = float;
  static constexpr bool kWhole = true;
  static Vector weights(const float* from) { return load<Vector>(from); }
  static Vector add(Vector weights, float four, Vector sums) {
    const __m512i numbers = _mm512_castps_si512(_mm512_set1_ps(four));
    return _mm512_castsi512_ps(_mm512_dpbusd_epi32(_mm512_castps_si512(sums), numbers, _mm512_castps_si512(weights)));
  }
};

// As for pairs, but 128 is added to all numbers, which so lose their signs: sums are too large by 128 for each weight.
class BytesByVectors : public ByVectors<Bfloat16, Fours> {
 public:
  using ByVectors::ByVectors;
  static constexpr bool kTooLarge = true;

  static int64_t room_for_numbers(const HalfLayer& g, int64_t count) { return whole(count * g.channels / 2); }

  static const float* ready(const HalfLayer& g, const Half* source, int64_t count, float* room) {
    const auto* const from = reinterpret_cast<const char*>(source);
    const int64_t all = count * g.channels / 2;  // fours
    for (int64_t four = 0; four < all; four += kLanes) {
      const int64_t bytes = std::min<int64_t>(kLanes, all - four) * sizeof(float);
      Bits numbers{};
      std::memcpy(&numbers, from + four * sizeof(float), bytes);
      numbers ^= static_cast<int32_t>(0x80808080);
      std::memcpy(room + four, &numbers, sizeof(numbers));
    }
    return room;
  }
};

#if defined(AUTOSCHED_TILES)
class BytesByTiles : public ByTiles<Tiled::kBytes> {
 public:
  using ByTiles::ByTiles;
  static constexpr bool kTooLarge = false;
};
#endif

// ``weights``: in fours of channels, and behind them -128 times the sum of each feature's, int32, for whole vectors of features.
template <typename Way>
void multiply_bytes(const HalfLayer& g, const int8_t* source, int32_t* made, const Half* weights) {
  const auto* const corrections = reinterpret_cast<const float*>(weights + g.channels * whole(g.features));
  multiply_all<Way>(g, reinterpret_cast<const Half*>(source), weights, [&](int64_t first, int64_t count, int64_t feature, int64_t width, const float* sums) {
    for (int64_t place = 0; place < width; place += kLanes) {
      const int64_t bytes = std::min<int64_t>(kLanes, g.features - feature - place) * sizeof(int32_t);
      const Bits correction = Way::kTooLarge ? load<Bits>(corrections + feature + place) : Bits{};
      int32_t* to = made + first * g.features + feature + place;
      for (int64_t row = 0; row < count; ++row, to += g.features) {
        const Bits sum = reinterpret_cast<Bits>(load<Vector>(sums + row * kBlock + place)) + correction;
        std::memcpy(to, &sum, bytes);
      }
    }
  });
}

void multiply_bytes(const int8_t* source, int32_t* made, const Half* weights, const int64_t* numbers) {
  const auto layer = read<ByteLayer>(numbers);
  const HalfLayer halves{.threads = layer.threads, .rows = layer.rows, .channels = layer.channels / 2, .features = layer.features, .format = 0, .following = {}};
#if defined(AUTOSCHED_TILES)
  if (halves.channels % kTileChannels == 0 && may_use_tiles()) return multiply_bytes<BytesByTiles>(halves, source, made, weights);
#endif
  multiply_bytes<BytesByVectors>(halves, source, made, weights);
}

#endif

}  // namespace
