// Convolutions in float32, one at a time and two.

#include "chain.h"
#include "each_channel.h"
#include "entries.h"
#include "grouped.h"
#include "summed.h"
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

}  // namespace

extern "C" {

AUTOSCHED_KERNEL void autosched_winograd(
    const float* picture, float* made, const float* weights, const int64_t* geometry) {
  convolve(picture, made, nullptr, nullptr, weights, geometry);
}

AUTOSCHED_KERNEL void autosched_winograd_bias(
    const float* picture, float* made, const float* bias, const float* weights, const int64_t* geometry) {
  convolve(picture, made, nullptr, bias, weights, geometry);
}

AUTOSCHED_KERNEL void autosched_winograd_residual(
    const float* picture, float* made, const float* residual, const float* weights, const int64_t* geometry) {
  convolve(picture, made, residual, nullptr, weights, geometry);
}

AUTOSCHED_KERNEL void autosched_winograd_bias_residual(
    const float* picture, float* made, const float* bias, const float* residual, const float* weights, const int64_t* geometry) {
  convolve(picture, made, residual, bias, weights, geometry);
}

AUTOSCHED_KERNEL void autosched_direct(
    const float* picture, float* made, const float* weights, const int64_t* geometry) {
  convolve_directly(picture, made, nullptr, nullptr, weights, geometry);
}

AUTOSCHED_KERNEL void autosched_direct_bias(
    const float* picture, float* made, const float* bias, const float* weights, const int64_t* geometry) {
  convolve_directly(picture, made, nullptr, bias, weights, geometry);
}

AUTOSCHED_KERNEL void autosched_direct_residual(
    const float* picture, float* made, const float* residual, const float* weights, const int64_t* geometry) {
  convolve_directly(picture, made, residual, nullptr, weights, geometry);
}

AUTOSCHED_KERNEL void autosched_direct_bias_residual(
    const float* picture, float* made, const float* bias, const float* residual, const float* weights, const int64_t* geometry) {
  convolve_directly(picture, made, residual, bias, weights, geometry);
}

AUTOSCHED_KERNEL void autosched_scaled(
    const float* picture, float* made, const float* scale, const float* weights, const int64_t* geometry) {
  convolve_scaled(picture, made, nullptr, nullptr, scale, weights, geometry);
}

AUTOSCHED_KERNEL void autosched_scaled_bias(
    const float* picture, float* made, const float* bias, const float* scale, const float* weights, const int64_t* geometry) {
  convolve_scaled(picture, made, nullptr, bias, scale, weights, geometry);
}

AUTOSCHED_KERNEL void autosched_scaled_residual(
    const float* picture, float* made, const float* residual, const float* scale, const float* weights, const int64_t* geometry) {
  convolve_scaled(picture, made, residual, nullptr, scale, weights, geometry);
}

AUTOSCHED_KERNEL void autosched_scaled_bias_residual(
    const float* picture, float* made, const float* bias, const float* residual, const float* scale, const float* weights,
    const int64_t* geometry) {
  convolve_scaled(picture, made, residual, bias, scale, weights, geometry);
}

AUTOSCHED_KERNEL void autosched_chain(const float* picture, float* made, const float* weights, const int64_t* numbers) {
  const auto geometry = read<Chained>(numbers);
  Chain(geometry, picture, made, weights).run();
}

}
