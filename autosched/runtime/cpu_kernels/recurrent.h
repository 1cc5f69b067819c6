// A recurrent layer in one direction, in float32: gated recurrent units (Cho et al. 2014, arXiv:1406.1078, as PyTorch has them: the reset gate
// after the product) or long short-term memory (Hochreiter and Schmidhuber 1997, with the forget gate of Gers et al. 2000).
//
// What inputs contribute is one product for all steps. Then each thread computes its own units of every step, from weights that stay in its
// cache, and waits for the others before the next one. No result depends on the number of threads.
#pragma once

#include "summed.h"

namespace {

// As many numbers as ``recurrent.geometry`` writes, in its order. ``hidden`` fills whole vectors.
struct Layer {
  int64_t threads, steps, batch, inputs, hidden;
  int64_t backwards;  // whether the last step comes first
};

#if defined(__AVX512F__) || defined(__aarch64__)
constexpr bool kManyRegisters = true;
#else
constexpr bool kManyRegisters = false;
#endif

// What units become, of what inputs and states contribute to each gate. ``kStates``: of so many rows of a batch at a time, with two vectors of
// units, the sums fill the registers.
struct GatedUnits {
  static constexpr int kGates = 3;  // reset, update, new
  static constexpr int kStates = kManyRegisters ? 4 : 2;

  template <typename Input, typename Sum>
  static Vector next(const Input& input, const Sum& sum, Vector before, float*) {
    const Vector reset = sigmoid(input(0) + sum(0)), update = sigmoid(input(1) + sum(1));
    const Vector fresh = hyperbolic_tangent(input(2) + reset * sum(2));
    return (before - fresh) * update + fresh;
  }
};

struct MemoryUnits {
  static constexpr int kGates = 4;  // input, forget, cell, output
  static constexpr int kStates = kManyRegisters ? 2 : 1;

  template <typename Input, typename Sum>
  static Vector next(const Input& input, const Sum& sum, Vector, float* cell) {
    const Vector taken = sigmoid(input(0) + sum(0)) * hyperbolic_tangent(input(2) + sum(2));
    const Vector kept = sigmoid(input(1) + sum(1)) * load<Vector>(cell) + taken;
    store(cell, kept);
    return sigmoid(input(3) + sum(3)) * hyperbolic_tangent(kept);
  }
};

// With fewer products in a step, waiting for others takes longer than they save.
constexpr int64_t kLeastOfStep = 100'000;

thread_local Scratch recurrent_scratch;

template <typename Units>
class Recurrent {
 public:
  // ``weights``: those of the inputs [inputs, gates, hidden] in blocks, and their biases; those of the states in blocks of up to two vectors of
  // units, each [hidden, gates, units], and their biases.
  Recurrent(const Layer& layer, const float* source, float* made, const float* state, const float* cell, const float* weights)
      : g(layer), source(source), made(made), state(state), of_inputs(weights) {
    bias_of_inputs = of_inputs + g.inputs * width();
    of_states = bias_of_inputs + width();
    bias_of_states = of_states + g.hidden * width();
    const int64_t rows = g.steps * g.batch, states = g.batch * g.hidden;
    given = recurrent_scratch.of(rows * width() + states);
    cells = given + rows * width();
    if (cell != nullptr) std::copy_n(cell, states, cells);
  }

  void run() const {
    inputs();
    on_team(g.batch * g.hidden * width() < kLeastOfStep ? 1 : g.threads, [&](int number, int count) {
      const Share mine((g.hidden + kBlock - 1) / kBlock, number, count);
      const float* before = state;
      for (int64_t done = 0; done < g.steps; ++done) {
        const int64_t row = (g.backwards != 0 ? g.steps - 1 - done : done) * g.batch;
        for (int64_t block = mine.first; block < mine.last; ++block) step(row, block * kBlock, before);
        before = made + row * g.hidden;
        all_are_here(count);
      }
    });
  }

 private:
  int64_t width() const { return Units::kGates * g.hidden; }

  // What the inputs of all steps contribute.
  void inputs() const {
    const int64_t rows = g.steps * g.batch;
    Direct product{};
    product.threads = g.threads, product.batch = 1, product.channels = g.inputs, product.height = 1, product.width = rows;
    product.batch_stride = product.row_stride = rows * g.inputs, product.channel_stride = 1, product.column_stride = g.inputs;
    product.features = width(), product.tall = product.wide = product.step_down = product.step_across = 1;
    product.apart_down = product.apart_across = product.out_height = 1, product.out_width = rows;
    Summed(product, source, given, nullptr, bias_of_inputs, of_inputs, {}).run();
  }

  // The units of a block, of the step whose rows begin at ``row``.
  void step(int64_t row, int64_t first, const float* before) const {
    const bool pair = first + kBlock <= g.hidden;
    int64_t place = 0;
    for (; place + Units::kStates <= g.batch; place += Units::kStates) {
      pair ? states<Units::kStates, 2>(row, place, first, before) : states<Units::kStates, 1>(row, place, first, before);
    }
    for (; place < g.batch; ++place) pair ? states<1, 2>(row, place, first, before) : states<1, 1>(row, place, first, before);
  }

  // ``Count`` rows of the batch from ``place`` on, ``Vectors`` of units from ``first`` on.
  template <int Count, int Vectors>
  void states(int64_t row, int64_t place, int64_t first, const float* before) const {
    constexpr int kSums = Units::kGates * Vectors;
    const float* const factors = of_states + first * width();
    const float* const old = before + place * g.hidden;
    Vector sums[Count][kSums] = {};
    for (int64_t unit = 0; unit < g.hidden; ++unit) {
#pragma GCC unroll 8
      for (int sum = 0; sum < kSums; ++sum) {
        const Vector factor = load<Vector>(factors + (unit * kSums + sum) * kLanes);
#pragma GCC unroll 4
        for (int at = 0; at < Count; ++at) sums[at][sum] = multiply_add(factor, spread(old[at * g.hidden + unit]), sums[at][sum]);
      }
    }
#pragma GCC unroll 4
    for (int at = 0; at < Count; ++at) {
#pragma GCC unroll 2
      for (int vector = 0; vector < Vectors; ++vector) {
        const int64_t unit = first + vector * kLanes;
        const float* const input = given + (row + place + at) * width() + unit;
        const auto of_input = [&](int gate) { return load<Vector>(input + gate * g.hidden); };
        const auto of_state = [&](int gate) { return sums[at][gate * Vectors + vector] + load<Vector>(bias_of_states + gate * g.hidden + unit); };
        float* const cell = cells + (place + at) * g.hidden + unit;
        store(made + (row + place + at) * g.hidden + unit, Units::next(of_input, of_state, load<Vector>(old + at * g.hidden + unit), cell));
      }
    }
  }

  const Layer& g;
  const float* source;
  float* made;
  const float* state;
  const float* of_inputs;
  const float* bias_of_inputs;
  const float* of_states;
  const float* bias_of_states;
  float* given;
  float* cells;
};

}  // namespace
