// Convolutions of float32 pictures, summed as they are defined: any size, stride, dilation, padding and number of groups; with bias, residual
// and an activation before a result is written.
#pragma once

#include "activations.h"
#include "geometry.h"

#include <cstdint>

namespace {

// As many numbers as ``direct.geometry`` writes, in its order. Strides are in elements.
struct Direct {
  int64_t threads;
  int64_t batch, channels, height, width;
  int64_t batch_stride, channel_stride, row_stride, column_stride;
  int64_t features, tall, wide;  // of the weights
  int64_t step_down, step_across, apart_down, apart_across;
  int64_t top, left, out_height, out_width;
  int64_t groups;
  Following following;
};

}  // namespace
