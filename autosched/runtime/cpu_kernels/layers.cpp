// Attention, recurrent layers and pooling.

#include "attention.h"
#include "entries.h"
#include "few_queries.h"
#include "pooling.h"
#include "recurrent.h"
#include "tiled_attention.h"

namespace {

template <typename Numbers>
void attend_with(const Attention& attention, const void* query, void* made, const void* key, const void* value, const void* mask) {
  using Number = typename Numbers::Number;
  const auto from = [](const void* there) { return static_cast<const Number*>(there); };
  auto* const to = static_cast<Number*>(made);
  if (attention.queries < kFewQueries) return AskingFew<Numbers>(attention, from(query), from(key), from(value), mask, to).run();
#if defined(AUTOSCHED_TILES)
  if constexpr (std::is_same_v<Numbers, Bfloat16>) {
    if (may_use_tiles()) return TiledAttending(attention, from(query), from(key), from(value), mask, to).run();
  }
#endif
  Attending<Numbers>(attention, from(query), from(key), from(value), mask, to).run();
}

void attend(const void* query, void* made, const void* key, const void* value, const void* mask, const int64_t* numbers) {
  const auto attention = read<Attention>(numbers);
  const auto format = static_cast<Format>(attention.format);
  if (format == Format::kBfloat16) return attend_with<Bfloat16>(attention, query, made, key, value, mask);
  if (format == Format::kFloat16) return attend_with<Float16>(attention, query, made, key, value, mask);
  attend_with<Float32>(attention, query, made, key, value, mask);
}

}  // namespace

extern "C" {

AUTOSCHED_KERNEL void autosched_pooling(const float* picture, float* made, const int64_t* numbers) {
  const auto geometry = read<Pooled>(numbers);
  geometry.mean != 0 ? Pool<true>(geometry, picture, made).run() : Pool<false>(geometry, picture, made).run();
}

AUTOSCHED_KERNEL void autosched_gru(
    const float* rows, float* made, const float* state, const float* weights, const int64_t* numbers) {
  const auto layer = read<Layer>(numbers);
  Recurrent<GatedUnits>(layer, rows, made, state, nullptr, weights).run();
}

AUTOSCHED_KERNEL void autosched_lstm(
    const float* rows, float* made, const float* state, const float* cell, const float* weights, const int64_t* numbers) {
  const auto layer = read<Layer>(numbers);
  Recurrent<MemoryUnits>(layer, rows, made, state, cell, weights).run();
}

AUTOSCHED_KERNEL void autosched_attention(
    const void* query, void* made, const void* key, const void* value, const int64_t* numbers) {
  attend(query, made, key, value, nullptr, numbers);
}

AUTOSCHED_KERNEL void autosched_attention_masked(
    const void* query, void* made, const void* key, const void* value, const void* mask, const int64_t* numbers) {
  attend(query, made, key, value, mask, numbers);
}

}
