// Products of whole numbers in eight bits, with signs: sums are whole numbers in 32 bits, as exact as these are. By tiles, or by an instruction that
// multiplies four numbers of a kind without signs with four that have them (AVX512-VNNI). Four channels move as two in sixteen bits do.
#pragma once

#include "half_sums.h"

namespace {

// As many numbers as ``byte_linear.geometry_of_bytes`` writes, in its order.
struct ByteLayer {
  int64_t threads;
  int64_t rows, channels, features;
  int64_t format;  // a ``Format``: of what is made
  int64_t of_rows, of_features, bias;  // whether there are any
  Following following;
};

// What makes numbers of sums, where it is there: scales of rows and features, and what is added.
struct Beside {
  const float* of_rows = nullptr;
  const void* of_features = nullptr;
  const void* bias = nullptr;
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

template <typename Numbers>
class ByteProducts {
 public:
  using Number = typename Numbers::Number;

  ByteProducts(const ByteLayer& layer, const Beside& beside, Number* made) : g(layer), beside(beside), made(made), follows(layer.following.read()) {}

  // Results of ``count`` rows, from ``first`` on, of some features.
  template <typename Sum>
  void finish(int64_t first, int64_t count, int64_t feature, int64_t some, Sum sum) const {
    const Vector scale = g.of_features ? Numbers::load(static_cast<const Number*>(beside.of_features) + feature, some) : spread(1.0f);
    // Nothing is added with a minus zero, which leaves even that as it is.
    const Vector added = g.bias ? Numbers::load(static_cast<const Number*>(beside.bias) + feature, some) : spread(-0.0f);
    for (int64_t row = 0; row < count; ++row) {
      const Vector scaled = __builtin_convertvector(sum(row), Vector) * spread(g.of_rows ? beside.of_rows[first + row] : 1.0f) * scale;
      Numbers::store(made + (first + row) * g.features + feature, follows.of(scaled + added), some);
    }
  }

 private:
  const ByteLayer& g;
  const Beside& beside;
  Number* made;
  const Follows follows;
};

// Sums are all that is made.
class ByteSums {
 public:
  using Number = int32_t;

  ByteSums(const ByteLayer& layer, const Beside&, int32_t* made) : g(layer), made(made) {}

  template <typename Sum>
  void finish(int64_t first, int64_t count, int64_t feature, int64_t some, Sum sum) const {
    for (int64_t row = 0; row < count; ++row) {
      const Bits here = sum(row);
      std::memcpy(made + (first + row) * g.features + feature, &here, some * sizeof(int32_t));
    }
  }

 private:
  const ByteLayer& g;
  int32_t* made;
};

// ``weights``: in fours of channels, and behind them -128 times the sum of each feature's, int32, for whole vectors of features.
template <typename Way, typename Made>
void multiply_bytes_by(const ByteLayer& layer, const int8_t* source, const Made& made, const Half* weights) {
  const HalfLayer g{.threads = layer.threads, .rows = layer.rows, .channels = layer.channels / 2, .features = layer.features, .format = 0, .following = {}};
  const auto* const corrections = reinterpret_cast<const float*>(weights + g.channels * whole(g.features));
  multiply_all<Way>(g, reinterpret_cast<const Half*>(source), weights, [&](int64_t first, int64_t count, int64_t feature, int64_t width, const float* sums) __attribute__((noinline)) {
    for (int64_t place = 0; place < width; place += kLanes) {
      const int64_t some = std::min<int64_t>(kLanes, g.features - feature - place);
      const Bits correction = Way::kTooLarge ? load<Bits>(corrections + feature + place) : Bits{};
      made.finish(first, count, feature + place, some, [&](int64_t row) __attribute__((always_inline)) {
        return load<Bits>(sums + row * kBlock + place) + correction;
      });
    }
  });
}

template <typename Makes>
void multiply_bytes_to(const ByteLayer& layer, const int8_t* source, void* made, const Beside& beside, const Half* weights) {
  const Makes makes(layer, beside, static_cast<typename Makes::Number*>(made));
#if defined(AUTOSCHED_TILES)
  if (layer.channels % (2 * kTileChannels) == 0 && may_use_tiles()) return multiply_bytes_by<BytesByTiles>(layer, source, makes, weights);
#endif
  multiply_bytes_by<BytesByVectors>(layer, source, makes, weights);
}

// ``beside``: as many as there are, in order.
void multiply_bytes(const int8_t* source, void* made, const void* const* beside, const Half* weights, const int64_t* numbers) {
  const auto layer = read<ByteLayer>(numbers);
  Beside there;
  if (layer.of_rows) there.of_rows = static_cast<const float*>(*beside++);
  if (layer.of_features) there.of_features = *beside++;
  if (layer.bias) there.bias = *beside++;
  switch (static_cast<Format>(layer.format)) {
    case Format::kInt32: return multiply_bytes_to<ByteSums>(layer, source, made, there, weights);
    case Format::kBfloat16: return multiply_bytes_to<ByteProducts<Bfloat16>>(layer, source, made, there, weights);
    case Format::kFloat16: return multiply_bytes_to<ByteProducts<Float16>>(layer, source, made, there, weights);
    case Format::kFloat32: return multiply_bytes_to<ByteProducts<Float32>>(layer, source, made, there, weights);
  }
}

#else

// Nobody calls it: ``autosched_has_bytes`` says so.
void multiply_bytes(const int8_t*, void*, const void* const*, const Half*, const int64_t*) {}

#endif

}  // namespace
