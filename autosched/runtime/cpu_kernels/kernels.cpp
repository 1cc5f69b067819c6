// Kernels of our own for CPUs, compiled for the processor they run on; see library.py.

#include "attention.h"
#include "byte_products.h"
#include "chain.h"
#include "each_channel.h"
#include "few_queries.h"
#include "grouped.h"
#include "half_products.h"
#include "pooling.h"
#include "recurrent.h"
#include "summed.h"
#include "tiled_attention.h"
#include "winograd.h"

namespace {

void convolve_directly(const float* picture, float* made, const float* residual, const float* bias, const float* weights, const int64_t* numbers) {
  const auto geometry = read<Direct>(numbers);
  if (geometry.groups == 1) return Summed(geometry, picture, made, residual, bias, weights, geometry.following.read()).run();
  if (geometry.groups == geometry.channels && geometry.groups == geometry.features) {
    return EachChannel(geometry, picture, made, residual, bias, weights).run();
  }
  Grouped(geometry, picture, made, residual, bias, weights).run();
}

void convolve_scaled(
    const float* picture, float* made, const float* residual, const float* bias, const float* scale, const float* weights,
    const int64_t* numbers) {
  const auto geometry = read<Direct>(numbers);
  Summed(geometry, picture, made, residual, bias, weights, geometry.following.read(), scale).run();
}

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

// One for each set of tensors that there may be, since whoever calls a kernel hands over all of its pointers, and none that is null.
extern "C" {

__attribute__((visibility("default"))) int64_t autosched_vector_lanes() { return kLanes; }

// Whether weights in bfloat16 are laid out in pairs of channels.
__attribute__((visibility("default"))) int64_t autosched_pairs() { return kInPairs<OfBfloat16> ? 1 : 0; }

// Whether products in bfloat16 are computed by tiles, where channels fill them.
__attribute__((visibility("default"))) int64_t autosched_tiles() {
#if defined(AUTOSCHED_TILES)
  return may_use_tiles() ? 1 : 0;
#else
  return 0;
#endif
}

// Whether there are products in eight bits.
__attribute__((visibility("default"))) int64_t autosched_has_bytes() {
#if defined(AUTOSCHED_BYTES)
  return 1;
#else
  return 0;
#endif
}

// For callers that no exception may reach: calls one of those below, and says whether there was memory for what it works in. Pointers behind
// its own it never looks at, as in native/operators.h.
__attribute__((visibility("default"))) int64_t autosched_call(
    void (*kernel)(void*, void*, void*, void*, void*, void*, void*), void* one, void* two, void* three, void* four, void* five, void* six,
    void* seven) {
  try {
    kernel(one, two, three, four, five, six, seven);
  } catch (const std::bad_alloc&) {
    return 0;
  }
  return 1;
}

__attribute__((visibility("default"))) void autosched_winograd(
    const float* picture, float* made, const float* weights, const int64_t* geometry) {
  convolve(picture, made, nullptr, nullptr, weights, geometry);
}

__attribute__((visibility("default"))) void autosched_winograd_bias(
    const float* picture, float* made, const float* bias, const float* weights, const int64_t* geometry) {
  convolve(picture, made, nullptr, bias, weights, geometry);
}

__attribute__((visibility("default"))) void autosched_winograd_residual(
    const float* picture, float* made, const float* residual, const float* weights, const int64_t* geometry) {
  convolve(picture, made, residual, nullptr, weights, geometry);
}

__attribute__((visibility("default"))) void autosched_winograd_bias_residual(
    const float* picture, float* made, const float* bias, const float* residual, const float* weights, const int64_t* geometry) {
  convolve(picture, made, residual, bias, weights, geometry);
}

__attribute__((visibility("default"))) void autosched_direct(
    const float* picture, float* made, const float* weights, const int64_t* geometry) {
  convolve_directly(picture, made, nullptr, nullptr, weights, geometry);
}

__attribute__((visibility("default"))) void autosched_direct_bias(
    const float* picture, float* made, const float* bias, const float* weights, const int64_t* geometry) {
  convolve_directly(picture, made, nullptr, bias, weights, geometry);
}

__attribute__((visibility("default"))) void autosched_direct_residual(
    const float* picture, float* made, const float* residual, const float* weights, const int64_t* geometry) {
  convolve_directly(picture, made, residual, nullptr, weights, geometry);
}

__attribute__((visibility("default"))) void autosched_direct_bias_residual(
    const float* picture, float* made, const float* bias, const float* residual, const float* weights, const int64_t* geometry) {
  convolve_directly(picture, made, residual, bias, weights, geometry);
}

__attribute__((visibility("default"))) void autosched_scaled(
    const float* picture, float* made, const float* scale, const float* weights, const int64_t* geometry) {
  convolve_scaled(picture, made, nullptr, nullptr, scale, weights, geometry);
}

__attribute__((visibility("default"))) void autosched_scaled_bias(
    const float* picture, float* made, const float* bias, const float* scale, const float* weights, const int64_t* geometry) {
  convolve_scaled(picture, made, nullptr, bias, scale, weights, geometry);
}

__attribute__((visibility("default"))) void autosched_scaled_residual(
    const float* picture, float* made, const float* residual, const float* scale, const float* weights, const int64_t* geometry) {
  convolve_scaled(picture, made, residual, nullptr, scale, weights, geometry);
}

__attribute__((visibility("default"))) void autosched_scaled_bias_residual(
    const float* picture, float* made, const float* bias, const float* residual, const float* scale, const float* weights,
    const int64_t* geometry) {
  convolve_scaled(picture, made, residual, bias, scale, weights, geometry);
}

__attribute__((visibility("default"))) void autosched_halves(const Half* source, Half* made, const Half* weights, const int64_t* numbers) {
  multiply_halves(source, made, nullptr, weights, numbers);
}

__attribute__((visibility("default"))) void autosched_halves_bias(
    const Half* source, Half* made, const Half* bias, const Half* weights, const int64_t* numbers) {
  multiply_halves(source, made, bias, weights, numbers);
}

__attribute__((visibility("default"))) void autosched_bytes0(const int8_t* source, void* made, const Half* weights, const int64_t* numbers) {
  multiply_bytes(source, made, nullptr, weights, numbers);
}

__attribute__((visibility("default"))) void autosched_bytes1(
    const int8_t* source, void* made, const void* one, const Half* weights, const int64_t* numbers) {
  const void* const beside[] = {one};
  multiply_bytes(source, made, beside, weights, numbers);
}

__attribute__((visibility("default"))) void autosched_bytes2(
    const int8_t* source, void* made, const void* one, const void* two, const Half* weights, const int64_t* numbers) {
  const void* const beside[] = {one, two};
  multiply_bytes(source, made, beside, weights, numbers);
}

__attribute__((visibility("default"))) void autosched_bytes3(
    const int8_t* source, void* made, const void* one, const void* two, const void* three, const Half* weights, const int64_t* numbers) {
  const void* const beside[] = {one, two, three};
  multiply_bytes(source, made, beside, weights, numbers);
}

__attribute__((visibility("default"))) void autosched_chain(const float* picture, float* made, const float* weights, const int64_t* numbers) {
  const auto geometry = read<Chained>(numbers);
  Chain(geometry, picture, made, weights).run();
}

__attribute__((visibility("default"))) void autosched_pooling(const float* picture, float* made, const int64_t* numbers) {
  const auto geometry = read<Pooled>(numbers);
  geometry.mean != 0 ? Pool<true>(geometry, picture, made).run() : Pool<false>(geometry, picture, made).run();
}

__attribute__((visibility("default"))) void autosched_gru(
    const float* rows, float* made, const float* state, const float* weights, const int64_t* numbers) {
  const auto layer = read<Layer>(numbers);
  Recurrent<GatedUnits>(layer, rows, made, state, nullptr, weights).run();
}

__attribute__((visibility("default"))) void autosched_lstm(
    const float* rows, float* made, const float* state, const float* cell, const float* weights, const int64_t* numbers) {
  const auto layer = read<Layer>(numbers);
  Recurrent<MemoryUnits>(layer, rows, made, state, cell, weights).run();
}

__attribute__((visibility("default"))) void autosched_attention(
    const void* query, void* made, const void* key, const void* value, const int64_t* numbers) {
  attend(query, made, key, value, nullptr, numbers);
}

__attribute__((visibility("default"))) void autosched_attention_masked(
    const void* query, void* made, const void* key, const void* value, const void* mask, const int64_t* numbers) {
  attend(query, made, key, value, mask, numbers);
}

}
