// A layer of gated recurrent units (Cho et al. 2014, arXiv:1406.1078, as PyTorch has it: the reset gate after the product), in float32.
//
// What inputs contribute is one product for all steps. Then each thread computes its own units of every step, from weights that stay in its
// cache, and waits for the others before the next one. No result depends on the number of threads.
#pragma once

#include "direct.h"

namespace {

// As many numbers as ``gru.geometry`` writes, in its order. ``hidden`` fills whole vectors.
struct Layer {
  int64_t threads, steps, batch, inputs, hidden;
};

constexpr int64_t kGates = 3;  // reset, update, new
// So many rows of a batch at a time: with two vectors of units, their sums fill the registers, 32 or 16.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kStates = 4;
#else
constexpr int kStates = 2;
#endif
// With fewer products in a step, waiting for others takes longer than they save.
constexpr int64_t kLeastOfStep = 100'000;

class Gru {
 public:
  // ``weights``: those of the inputs [inputs, gates, hidden] in blocks, their biases; those of the states in blocks of up to two vectors of
  // units [hidden, gates, units], their biases.
  Gru(const Layer& layer, const float* source, float* made, const float* state, const float* weights)
      : g(layer), source(source), made(made), state(state), of_inputs(weights) {
    const int64_t all = kGates * g.hidden;
    bias_of_inputs = of_inputs + g.inputs * all;
    of_states = bias_of_inputs + all;
    bias_of_states = of_states + g.hidden * all;
  }

  void run() const {
    const int64_t rows = g.steps * g.batch, all = kGates * g.hidden;
    float* const given = given_scratch.of(rows * all);
    Direct product{};
    product.threads = g.threads, product.batch = 1, product.channels = g.inputs, product.height = 1, product.width = rows;
    product.batch_stride = product.row_stride = rows * g.inputs, product.channel_stride = 1, product.column_stride = g.inputs;
    product.features = all, product.tall = product.wide = product.step_down = product.step_across = 1;
    product.apart_down = product.apart_across = product.out_height = 1, product.out_width = rows;
    Summed(product, source, given, nullptr, bias_of_inputs, of_inputs, {}).run();
    const bool alone = g.batch * g.hidden * all < kLeastOfStep;
    on_team(alone ? 1 : g.threads, [&](int number, int count) {
      const Share mine((g.hidden + kBlock - 1) / kBlock, number, count);
      for (int64_t step = 0; step < g.steps; ++step) {
        const float* const before = step == 0 ? state : made + (step - 1) * g.batch * g.hidden;
        for (int64_t block = mine.first; block < mine.last; ++block) units(step, block * kBlock, before, given);
        all_are_here(count);
      }
    });
  }

 private:
  void units(int64_t step, int64_t first, const float* before, const float* given) const {
    const int64_t here = step * g.batch;
    const bool pair = first + kBlock <= g.hidden;
    int64_t row = 0;
    for (; row + kStates <= g.batch; row += kStates) {
      pair ? states<kStates, 2>(here, row, first, before, given) : states<kStates, 1>(here, row, first, before, given);
    }
    for (; row < g.batch; ++row) pair ? states<1, 2>(here, row, first, before, given) : states<1, 1>(here, row, first, before, given);
  }

  // ``Count`` rows of a batch from ``row`` on, ``Vectors`` of units from ``first`` on.
  template <int Count, int Vectors>
  void states(int64_t here, int64_t row, int64_t first, const float* before, const float* given) const {
    constexpr int kWidth = kGates * Vectors;
    const float* const factors = of_states + first * kGates * g.hidden;
    const float* const old = before + row * g.hidden;
    Vector sums[Count][kWidth] = {};
    for (int64_t unit = 0; unit < g.hidden; ++unit) {
#pragma GCC unroll 8
      for (int place = 0; place < kWidth; ++place) {
        const Vector factor = load<Vector>(factors + (unit * kWidth + place) * kLanes);
#pragma GCC unroll 4
        for (int state_at = 0; state_at < Count; ++state_at) {
          sums[state_at][place] = multiply_add(factor, spread(old[state_at * g.hidden + unit]), sums[state_at][place]);
        }
      }
    }
#pragma GCC unroll 4
    for (int state_at = 0; state_at < Count; ++state_at) {
      const float* const input = given + (here + row + state_at) * kGates * g.hidden + first;
      float* const to = made + (here + row + state_at) * g.hidden + first;
#pragma GCC unroll 2
      for (int place = 0; place < Vectors; ++place) {
        const auto gate = [&](int number) { return load<Vector>(input + number * g.hidden + place * kLanes); };
        const auto sum = [&](int number) {
          return sums[state_at][number * Vectors + place] + load<Vector>(bias_of_states + number * g.hidden + first + place * kLanes);
        };
        const Vector reset = sigmoid(gate(0) + sum(0)), update = sigmoid(gate(1) + sum(1));
        const Vector fresh = hyperbolic_tangent(gate(2) + reset * sum(2));
        const Vector was = load<Vector>(old + state_at * g.hidden + first + place * kLanes);
        store(to + place * kLanes, (was - fresh) * update + fresh);
      }
    }
  }

  static thread_local Scratch given_scratch;
  const Layer& g;
  const float* source;
  float* made;
  const float* state;
  const float* of_inputs;
  const float* bias_of_inputs;
  const float* of_states;
  const float* bias_of_states;
};

thread_local Scratch Gru::given_scratch;

void recur(const float* source, float* made, const float* state, const float* weights, const int64_t* numbers) {
  const auto layer = read<Layer>(numbers);
  Gru(layer, source, made, state, weights).run();
}

}  // namespace
