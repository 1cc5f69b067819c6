// The transforms of F(2x2, 3x3) and F(4x4, 3x3) in one dimension, as Lavin and Gray give them (Fast Algorithms for Convolutional Neural
// Networks, arXiv:1509.09308, sections 4.1 and 4.2). Two dimensions are one after the other.
#pragma once

#include <cstddef>

namespace {

// ``Outputs`` results of one dimension are made from ``kIn`` numbers. ``step`` lies between the numbers read, ``out_step`` between those made.
template <int Outputs>
struct Tile;

template <>
struct Tile<2> {
  static constexpr int kIn = 4;

  template <typename V>
  static void input(const V* d, int step, V* made, int out_step) {
    const V d0 = d[0], d1 = d[step], d2 = d[2 * step], d3 = d[3 * step];
    made[0] = d0 - d2;
    made[out_step] = d1 + d2;
    made[2 * out_step] = d2 - d1;
    made[3 * out_step] = d1 - d3;
  }

  template <typename V>
  static void output(const V* m, int step, V* made, int out_step) {
    const V m0 = m[0], m1 = m[step], m2 = m[2 * step], m3 = m[3 * step];
    made[0] = m0 + m1 + m2;
    made[out_step] = m1 - m2 - m3;
  }
};

template <>
struct Tile<4> {
  static constexpr int kIn = 6;

  template <typename V>
  static void input(const V* d, int step, V* made, int out_step) {
    const V d0 = d[0], d1 = d[step], d2 = d[2 * step], d3 = d[3 * step], d4 = d[4 * step], d5 = d[5 * step];
    const V even = d4 - 4.0f * d2, odd = d3 - 4.0f * d1;
    const V far_even = d4 - d2, far_odd = 2.0f * (d3 - d1);
    made[0] = 4.0f * d0 - 5.0f * d2 + d4;
    made[out_step] = even + odd;
    made[2 * out_step] = even - odd;
    made[3 * out_step] = far_even + far_odd;
    made[4 * out_step] = far_even - far_odd;
    made[5 * out_step] = 4.0f * d1 - 5.0f * d3 + d5;
  }

  template <typename V>
  static void output(const V* m, int step, V* made, int out_step) {
    const V m0 = m[0], m1 = m[step], m2 = m[2 * step], m3 = m[3 * step], m4 = m[4 * step], m5 = m[5 * step];
    const V near_sum = m1 + m2, near_difference = m1 - m2, far_sum = m3 + m4, far_difference = m3 - m4;
    made[0] = m0 + near_sum + far_sum;
    made[out_step] = near_difference + 2.0f * far_difference;
    made[2 * out_step] = near_sum + 4.0f * far_sum;
    made[3 * out_step] = near_difference + 8.0f * far_difference + m5;
  }
};

}  // namespace
