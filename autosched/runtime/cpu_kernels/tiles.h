// Products of bfloat16 by tiles, as processors with AMX have them: 16 rows by 16 features, of 32 channels with one instruction. Sums are float32.
// Or of 64 channels of whole numbers in eight bits, and sums in 32 (Intel, Architecture Instruction Set Extensions Programming Reference, chapter 3).
#pragma once

#include "formats.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

#if defined(AUTOSCHED_EMULATED_TILES) && defined(__AVX512BF16__)
#define AUTOSCHED_TILES
#elif defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__) && defined(__AVX512BF16__) && defined(__x86_64__) && defined(__linux__)
#define AUTOSCHED_TILES
#include <sys/syscall.h>
#include <unistd.h>
#endif

#if defined(AUTOSCHED_TILES)

namespace {

constexpr int64_t kTileRows = 16;
constexpr int64_t kTileChannels = 32;
constexpr int kTiles = 8;

// What tiles hold: rows of pairs in bfloat16, or of four in eight bits, which move like a pair.
enum class Tiled { kBfloat16, kBytes };

// As the processor reads it: the rows of each tile, and the bytes of each of them.
struct TileShapes {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t bytes[2 * kTiles] = {};
  uint8_t rows[2 * kTiles] = {};
};
static_assert(sizeof(TileShapes) == 64);

#if defined(AUTOSCHED_EMULATED_TILES)

// What the instructions do, for tests on processors without them.
struct TileNumbers {
  float numbers[kTileRows][kLanes];
};
thread_local TileNumbers tiles[kTiles];
thread_local int64_t tile_rows[kTiles];

bool may_use_tiles() { return true; }
void shape_tiles(const TileShapes& shapes) { std::copy_n(shapes.rows, kTiles, tile_rows); }
void forget_tiles() { std::fill_n(tile_rows, kTiles, 0); }

template <int To>
void zero_tile() {
  tiles[To] = {};
}

template <int To>
void load_tile(const void* from, int64_t apart) {
  for (int64_t row = 0; row < tile_rows[To]; ++row) std::memcpy(tiles[To].numbers[row], static_cast<const char*>(from) + row * apart, sizeof(Vector));
}

template <int From>
void store_tile(void* to, int64_t apart) {
  for (int64_t row = 0; row < tile_rows[From]; ++row) std::memcpy(static_cast<char*>(to) + row * apart, tiles[From].numbers[row], sizeof(Vector));
}

// Whole numbers in eight bits, four at a time.
Vector add_bytes(Vector sums, Vector weights, float four) {
  int8_t numbers[sizeof(four)], factors[sizeof(Vector)];
  std::memcpy(numbers, &four, sizeof(four)), std::memcpy(factors, &weights, sizeof(weights));
  auto whole = reinterpret_cast<Bits>(sums);
  for (int64_t place = 0; place < static_cast<int64_t>(sizeof(Vector)); ++place) whole[place / 4] += numbers[place % 4] * factors[place];
  return reinterpret_cast<Vector>(whole);
}

template <Tiled Kind, int Sums, int Rows, int Weights>
void multiply_tiles() {
  for (int64_t row = 0; row < tile_rows[Sums]; ++row) {
    auto sums = load<Vector>(tiles[Sums].numbers[row]);
    for (int64_t place = 0; place < kTileChannels / 2; ++place) {
      const auto weights = load<Vector>(tiles[Weights].numbers[place]);
      const float numbers = tiles[Rows].numbers[row][place];
      if constexpr (Kind == Tiled::kBytes) {
        sums = add_bytes(sums, weights, numbers);
      } else {
        sums = _mm512_dpbf16_ps(sums, reinterpret_cast<__m512bh>(weights), reinterpret_cast<__m512bh>(_mm512_set1_ps(numbers)));
      }
    }
    store(tiles[Sums].numbers[row], sums);
  }
}

#else

// Linux gives processes the tiles if they ask for them, on all of their threads: its Documentation/arch/x86/xstate.rst.
bool may_use_tiles() {
  constexpr long kAsk = 0x1023, kTileNumbers = 18;  // ARCH_REQ_XCOMP_PERM, of what XSAVE keeps: XTILEDATA
  static const bool may = syscall(SYS_arch_prctl, kAsk, kTileNumbers) == 0;
  return may;
}

void shape_tiles(const TileShapes& shapes) { asm volatile("ldtilecfg %0" ::"m"(shapes)); }
void forget_tiles() { asm volatile("tilerelease" ::: "memory"); }

template <int To>
void zero_tile() {
  asm volatile("tilezero %%tmm%c0" ::"i"(To));
}

// Lines ``apart`` bytes.
template <int To>
void load_tile(const void* from, int64_t apart) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(apart), "i"(To) : "memory");
}

template <int From>
void store_tile(void* to, int64_t apart) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(apart), "i"(From) : "memory");
}

template <Tiled Kind, int Sums, int Rows, int Weights>
void multiply_tiles() {
  if constexpr (Kind == Tiled::kBytes) {
    asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(Sums), "i"(Rows), "i"(Weights));
  } else {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(Sums), "i"(Rows), "i"(Weights));
  }
}

#endif

// The tiles of a thread as a piece of work takes them: two of rows and two of features at a time, four of sums. ``rows``: of each tile; there may be
// less than sixteen.
class TilesOf {
 public:
  explicit TilesOf(int64_t rows) {
    TileShapes shapes;
    for (int tile = 0; tile < kTiles; ++tile) {
      shapes.bytes[tile] = sizeof(Vector);
      shapes.rows[tile] = static_cast<uint8_t>(tile < kWeights ? rows : kTileRows);
    }
    shape_tiles(shapes);
  }
  TilesOf(const TilesOf&) = delete;
  TilesOf& operator=(const TilesOf&) = delete;
  // Switches between threads take longer while there are numbers in tiles.
  ~TilesOf() { forget_tiles(); }

 private:
  static constexpr int kWeights = 6;  // the first tile of weights, behind those of sums and of rows
};

// So many rows with a block of features at a time.
constexpr int64_t kTiledRows = 2 * kTileRows;

// Rows of numbers that lie ``apart``, and of sums ``between``, which are added to what is there if there is ``more``.
struct TileRows {
  const Half* numbers;
  int64_t apart;
  float* sums;
  int64_t between;
  bool more = false;
};

// ``Rows`` tiles of rows times ``Columns`` of features, over ``channels``, which fill tiles. ``second``: where the second tile of rows begins, which may
// have rows of the first one. ``ahead``: what is fetched meanwhile, as many bytes as the weights have, or null; ``meanwhile()`` is called for each tile
// of channels.
template <Tiled Kind, int Rows, int Columns, typename Meanwhile>
void tile_sums(const TileRows& rows, int64_t second, const float* weights, int64_t channels, const char* ahead, Meanwhile& meanwhile) {
  constexpr int64_t kWide = Columns * kLanes;  // pairs of channels side by side
  const int64_t numbers_apart = rows.apart * sizeof(Half), weights_apart = kWide * sizeof(float), sums_apart = rows.between * sizeof(float);
  const Half* const others = rows.numbers + second * rows.apart;
  float* const other_sums = rows.sums + second * rows.between;
  if (rows.more) {
    load_tile<0>(rows.sums, sums_apart);
    if constexpr (Columns > 1) load_tile<1>(rows.sums + kLanes, sums_apart);
    if constexpr (Rows > 1) load_tile<2>(other_sums, sums_apart);
    if constexpr (Rows > 1 && Columns > 1) load_tile<3>(other_sums + kLanes, sums_apart);
  } else {
    zero_tile<0>(), zero_tile<1>(), zero_tile<2>(), zero_tile<3>();
  }
  for (int64_t channel = 0; channel < channels; channel += kTileChannels, weights += kTileChannels / 2 * kWide) {
    load_tile<6>(weights, weights_apart);
    load_tile<4>(rows.numbers + channel, numbers_apart);
    multiply_tiles<Kind, 0, 4, 6>();
    if constexpr (Columns > 1) {
      load_tile<7>(weights + kLanes, weights_apart);
      multiply_tiles<Kind, 1, 4, 7>();
    }
    if constexpr (Rows > 1) {
      load_tile<5>(others + channel, numbers_apart);
      multiply_tiles<Kind, 2, 5, 6>();
      if constexpr (Columns > 1) multiply_tiles<Kind, 3, 5, 7>();
    }
    if (ahead != nullptr) {
      for (int64_t line = 0; line < kTileChannels / 2 * kWide; line += kLanes, ahead += sizeof(Vector)) __builtin_prefetch(ahead, 0, 2);
    }
    meanwhile();
  }
  store_tile<0>(rows.sums, sums_apart);
  if constexpr (Columns > 1) store_tile<1>(rows.sums + kLanes, sums_apart);
  if constexpr (Rows > 1) store_tile<2>(other_sums, sums_apart);
  if constexpr (Rows > 1 && Columns > 1) store_tile<3>(other_sums + kLanes, sums_apart);
}

// Of ``count`` rows, ``kTiledRows`` or less, with a block of ``width`` features.
template <Tiled Kind, typename Meanwhile>
void tile_block(int64_t count, const TileRows& rows, const float* weights, int64_t channels, int64_t width, const void* ahead, Meanwhile meanwhile) {
  const int64_t second = count - kTileRows;
  const auto* const next = static_cast<const char*>(ahead);
  if (second > 0) {
    width > kLanes ? tile_sums<Kind, 2, 2>(rows, second, weights, channels, next, meanwhile)
                   : tile_sums<Kind, 2, 1>(rows, second, weights, channels, next, meanwhile);
  } else {
    width > kLanes ? tile_sums<Kind, 1, 2>(rows, second, weights, channels, next, meanwhile)
                   : tile_sums<Kind, 1, 1>(rows, second, weights, channels, next, meanwhile);
  }
}

}  // namespace

#endif
