// What follows a sum, before it is written.
#pragma once

#include "geometry.h"
#include "vectors.h"

#include <cstdint>
#include <initializer_list>
#include <limits>

namespace {

// e to the power of a number: ``part``, between 0.7 and 1.5, times two to the power of ``power``.
struct Exponential {
  Vector part;
  Bits power;
};

// A polynomial of what is left of a number beside multiples of ln 2 (Cephes' expf: Moshier, Methods and Programs for Mathematical Functions,
// 1989), some 1e-7 of the result off.
Exponential split_exponential(Vector value) {
  constexpr float kShift = 12582912.0f;  // 1.5 * 2^23: what is added to it is rounded to a whole number, in its last bits
  const Vector shifted = multiply_add(value, spread(1.44269504088896341f), spread(kShift));
  const Vector whole = shifted - spread(kShift);
  Vector left = multiply_add(whole, spread(-0.693359375f), value);
  left = multiply_add(whole, spread(2.12194440e-4f), left);
  Vector sum = spread(1.9875691500e-4f);
  for (const float factor : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f}) {
    sum = multiply_add(sum, left, spread(factor));
  }
  sum = multiply_add(sum * left, left, left) + spread(1.0f);
  return {sum, reinterpret_cast<Bits>(shifted) - reinterpret_cast<Bits>(spread(kShift))};
}

Vector power_of_two(Bits power) { return reinterpret_cast<Vector>((power + 127) << 23); }

// e to the power of each number. Infinite above 88.7.
Vector exponential(Vector value) {
  const Exponential made = split_exponential(at_most(at_least(value, -104.0f), 89.0f));
  // In two steps, since a power of two may have to be larger or smaller than there is one.
  const Bits half = made.power >> 1;
  return made.part * power_of_two(half) * power_of_two(made.power - half);
}

// The same of numbers that are not above zero; zero below -87, where results would have fewer digits, and take many times as long.
Vector exponential_below_zero(Vector value) {
  const Exponential made = split_exponential(at_least(value, -87.0f));
  return value < spread(-87.0f) ? Vector{} : made.part * power_of_two(made.power);
}

Vector sigmoid(Vector value) { return spread(1.0f) / (spread(1.0f) + exponential(-value)); }

// Near zero a polynomial, also of Cephes (tanhf), since little would be left of a difference.
Vector hyperbolic_tangent(Vector value) {
  const Vector square = value * value;
  Vector sum = spread(-5.70498872745e-3f);
  for (const float factor : {2.06390887954e-2f, -5.37397155531e-2f, 1.33314422036e-1f, -3.33332819422e-1f}) {
    sum = multiply_add(sum, square, spread(factor));
  }
  const Vector small = multiply_add(sum * square, value, value);
  const Vector large = spread(1.0f) - spread(2.0f) / (spread(1.0f) + exponential(value + value));
  return square < spread(0.625f * 0.625f) ? small : large;
}

// As ``convolution._INSIDE`` numbers them.
enum class Activation : int64_t { kNone, kSilu, kHardswish };

// An activation, or limits: what is not a number stays so.
struct Follows {
  float least = -std::numeric_limits<float>::infinity(), most = std::numeric_limits<float>::infinity();
  Activation activation = Activation::kNone;

  Vector limited(Vector value) const { return at_most(at_least(value, least), most); }

  Vector of(Vector value) const {
    if (activation == Activation::kSilu) return value / (spread(1.0f) + exponential(-value));
    if (activation == Activation::kHardswish) return value * at_most(at_least(value + spread(3.0f), 0.0f), 6.0f) / spread(6.0f);
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
