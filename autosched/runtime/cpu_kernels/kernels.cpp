// Kernels of our own for CPUs, compiled for the processor they run on; see library.py.

#include "attention.h"
#include "chain.h"
#include "each_channel.h"
#include "few_queries.h"
#include "grouped.h"
#include "pooling.h"
#include "recurrent.h"
#include "summed.h"
#include "winograd.h"

#include <utility>

namespace {

template <size_t... Places>
void call_with(const void* function, const void* const* pointers, std::index_sequence<Places...>) {
  reinterpret_cast<void (*)(decltype(static_cast<void>(Places), static_cast<const void*>(nullptr))...)>(const_cast<void*>(function))(
      pointers[Places]...);
}

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

void attend(const float* query, float* made, const float* key, const float* value, const void* mask, const int64_t* numbers) {
  const auto attention = read<Attention>(numbers);
  if (attention.queries < kFewQueries) return AskingFew(attention, query, key, value, mask, made).run();
  Attending(attention, query, key, value, mask, made).run();
}

}  // namespace

// One for each set of tensors that there may be, since whoever calls a kernel hands over all of its pointers, and none that is null.
extern "C" {

__attribute__((visibility("default"))) int64_t autosched_vector_lanes() { return kLanes; }

// One of those below, for Python, through which no exception may go: whether there was memory for it to work in.
__attribute__((visibility("default"))) int autosched_called(const void* function, const void* const* pointers, int64_t count) {
  try {
    switch (count) {
      case 3: call_with(function, pointers, std::make_index_sequence<3>()); break;
      case 4: call_with(function, pointers, std::make_index_sequence<4>()); break;
      case 5: call_with(function, pointers, std::make_index_sequence<5>()); break;
      case 6: call_with(function, pointers, std::make_index_sequence<6>()); break;
      case 7: call_with(function, pointers, std::make_index_sequence<7>()); break;
    }
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
    const float* query, float* made, const float* key, const float* value, const int64_t* numbers) {
  attend(query, made, key, value, nullptr, numbers);
}

__attribute__((visibility("default"))) void autosched_attention_masked(
    const float* query, float* made, const float* key, const float* value, const void* mask, const int64_t* numbers) {
  attend(query, made, key, value, mask, numbers);
}

}
