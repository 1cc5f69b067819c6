// What follows a sum, before it is written.
#pragma once

#include "geometry.h"
#include "vectors.h"

#include <cstdint>
#include <initializer_list>
#include <limits>

namespace {

// Beyond it, results would have fewer digits, and take many times as long, or be infinite.
constexpr float kLargestPower = 87.0f;

// e to the power of each number between minus and plus ``kLargestPower``: two to the power of a whole number, and of what is left a polynomial
// whose largest relative error is as small as can be (3e-9; coefficients found by weighted least squares): some 1e-7 off with what is rounded.
Vector exponential(Vector value) {
  constexpr float kShift = 12582912.0f;  // 1.5 * 2^23: what is added to it is rounded to a whole number, in its last bits
  const Vector shifted = multiply_add(value, spread(1.44269504088896341f), spread(kShift));
  const Vector left = multiply_add(shifted - spread(kShift), spread(-0.693147180559945f), value);
  Vector sum = spread(1.3814466976518e-3f);
  for (const float factor : {8.3687804514437e-3f, 4.1668394215697e-2f, 1.6666520107490e-1f, 4.9999993412471e-1f, 1.0f, 1.0f}) {
    sum = multiply_add(sum, left, spread(factor));
  }
  // The whole number goes where a float has its exponent. Multiplied, what is not a number stays so.
  return sum * reinterpret_cast<Vector>((reinterpret_cast<Bits>(shifted) << 23) + reinterpret_cast<Bits>(spread(1.0f)));
}

Vector within_powers(Vector value) { return at_most(at_least(value, -kLargestPower), kLargestPower); }

// The same of numbers that are not above zero, however small.
Vector exponential_below_zero(Vector value) {
  return value < spread(-kLargestPower) ? Vector{} : exponential(at_least(value, -kLargestPower));
}

Vector sigmoid(Vector value) { return spread(1.0f) / (spread(1.0f) + exponential(-within_powers(value))); }

Vector hard_sigmoid(Vector value) { return at_most(at_least(value + spread(3.0f), 0.0f), 6.0f) * spread(1.0f / 6.0f); }

// Near zero a polynomial, of Cephes (tanhf: Moshier, Methods and Programs for Mathematical Functions, 1989), since little would be left of a difference.
Vector hyperbolic_tangent(Vector value) {
  const Vector square = value * value;
  Vector sum = spread(-5.70498872745e-3f);
  for (const float factor : {2.06390887954e-2f, -5.37397155531e-2f, 1.33314422036e-1f, -3.33332819422e-1f}) {
    sum = multiply_add(sum, square, spread(factor));
  }
  const Vector small = multiply_add(sum * square, value, value);
  const Vector large = spread(1.0f) - spread(2.0f) / (spread(1.0f) + exponential(within_powers(value + value)));
  return square < spread(0.625f * 0.625f) ? small : large;
}

// The share of a normal distribution that is below each number (GELU multiplies with it: Hendrycks and Gimpel, arXiv:1606.08415): half, and the
// number times a quotient of polynomials in its square, whose largest error up to ``kLargestDeviation`` is about as small as can be (7e-9;
// coefficients found by least squares, weighted anew until errors were alike). Some 1e-7 off with what is rounded; nothing where less than that is
// left, so that what is far below zero becomes zero.
Vector below_in_normal(Vector value) {
  constexpr float kLargestDeviation = 5.5f;
  const Vector near = at_most(at_least(value, -kLargestDeviation), kLargestDeviation), square = near * near;
  Vector above = spread(2.2749343377406e-8f), under = spread(1.1975039994105e-6f);
  for (const float factor : {6.3521274934720e-6f, 1.6882669482823e-4f, 4.6772667833640e-3f, 3.3852744142933e-2f, 3.9894223462148e-1f}) {
    above = multiply_add(above, square, spread(factor));
  }
  for (const float factor : {7.3647843664019e-5f, 1.8844505507361e-3f, 2.8645927889477e-2f, 2.5152216394674e-1f, 1.0f}) {
    under = multiply_add(under, square, spread(factor));
  }
  return value < spread(-kLargestDeviation) ? Vector{} : near * above / under + spread(0.5f);
}

// As ``convolution._INSIDE`` numbers them.
enum class Activation : int64_t { kNone, kSilu, kHardswish, kSigmoid, kHardsigmoid, kTanh, kGelu, kGeluByTanh };

// ``value`` times the sigmoid of ``power``, both of which are kept above minus ``kLargestPower``: below, results are next to nothing.
Vector by_sigmoid(Vector value, Vector power) { return value / (spread(1.0f) + exponential(-at_most(power, kLargestPower))); }

Vector above_least_power(Vector value) { return at_least(value, -kLargestPower); }

// An activation, or limits: what is not a number stays so.
struct Follows {
  float least = -std::numeric_limits<float>::infinity(), most = std::numeric_limits<float>::infinity();
  Activation activation = Activation::kNone;

  Vector limited(Vector value) const { return at_most(at_least(value, least), most); }

  Vector of(Vector value) const {
    if (activation == Activation::kSilu) {
      const Vector bounded = above_least_power(value);
      return by_sigmoid(bounded, bounded);
    }
    if (activation == Activation::kGelu) return value * below_in_normal(value);
    if (activation == Activation::kGeluByTanh) {
      // Half of one and the hyperbolic tangent that section 2 of the paper has instead is a sigmoid.
      const Vector factor = multiply_add(value * value, spread(7.1354816272600e-2f), spread(1.5957691216057f));
      return by_sigmoid(above_least_power(value), above_least_power(value * factor));
    }
    if (activation == Activation::kTanh) return hyperbolic_tangent(value);
    if (activation == Activation::kHardswish) return value * hard_sigmoid(value);
    if (activation == Activation::kSigmoid) return sigmoid(value);
    if (activation == Activation::kHardsigmoid) return hard_sigmoid(value);
    return limited(value);
  }

  // ``count`` lines of ``width`` numbers, ``apart``, that have just been written. Limits they have already: a few instructions where a value
  // is at hand; an activation takes more than should stand in each of the many copies of that code.
  __attribute__((noinline)) void over(float* made, int64_t count, int64_t apart, int64_t width) const {
    for (; count > 0; --count, made += apart) {
      int64_t place = 0;
      for (; place + kLanes <= width; place += kLanes) store(made + place, of(load<Vector>(made + place)));
      if (place < width) store_some(made + place, of(load_some(made + place, width - place)), width - place);
    }
  }
};

// As Python has written it: the bits of two floats, and a number.
struct Following {
  int64_t least, most, activation;

  Follows read() const { return {number_of(least), number_of(most), static_cast<Activation>(activation)}; }
};

}  // namespace
