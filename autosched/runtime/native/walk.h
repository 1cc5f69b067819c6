// Walking the lanes of a run: on threads that Python hands over, or on the calling thread's OpenMP team.
#pragma once

#include "operators.h"
#include "run.h"
#include "team.h"
#include "threads.h"

#include <c10/core/InferenceMode.h>

namespace {

// After so long a lane goes back to Python, which looks for signals (Ctrl-C) and calls again.
constexpr int64_t kTurnNs = 50'000'000;

void wait_out(int64_t delay_ns) {
  for (const int64_t end_ns = now_ns() + delay_ns; now_ns() < end_ns;) std::this_thread::yield();
}

void run_step(Run& run, const Step& step, Stack& stack) {
  int64_t* times = run.trace.defined() ? run.trace.mutable_data_ptr<int64_t>() + step.index : nullptr;
  if (step.delay_ns > 0) wait_out(step.delay_ns);
  if (step.width > 1) muster(step.width);
  if (times != nullptr) times[0] = now_ns();
  for (int64_t turn = 0; turn < step.repeats; ++turn) {
    for (const auto& todo : step.instructions) run_instruction(todo, run.slots, stack);
  }
  if (times != nullptr) times[run.program.operators] = now_ns();
  if (step.records) run.raise(step.index);
  for (auto slot : step.frees) run.slots[slot] = IValue();
}

// Whether the lane has come to the end of the phase; false if its turn is over first.
bool walk_steps(Run& run, size_t lane, int64_t deadline_ns) {
  const auto& steps = run.program.phases[run.phase][lane];
  auto& place = run.places[lane];
  Stack stack;
  for (const size_t first = place.step; place.step < steps.size(); ++place.step) {
    const Step& step = steps[place.step];
    for (auto producer : step.waits) {
      auto waited = await(run, producer, deadline_ns, true);
      if (waited != Waited::Up) return waited == Waited::Stopped;
    }
    if (run.stopped.load(std::memory_order_relaxed)) return true;
    if (place.step > first && now_ns() > deadline_ns) return false;
    use_threads(step.width);
    run_step(run, step, stack);
  }
  return true;
}

// One turn of one lane of a program of one phase, whose lanes have threads of their own; whether it is the last. The first lane ends
// after all others.
bool walk_turn(Run& run, size_t lane) {
  const int64_t deadline_ns = now_ns() + kTurnNs;
  const CallersThreads kept;
  auto& place = run.places.at(lane);
  if (!place.ended) {
    try {
      if (!walk_steps(run, lane, deadline_ns)) return false;
    } catch (...) {
      run.stop(std::current_exception());
    }
    place.ended = true;
    run.raise(run.program.operators + lane);
  }
  for (size_t other = 1; lane == 0 && other < run.places.size(); ++other) {
    if (await(run, run.program.operators + other, deadline_ns, false) == Waited::Paused) return false;
  }
  return true;
}

// ---- Lanes that are the threads of one OpenMP team ---------------------------------------------------------------------------------

// A run has come late if a thread of its team was without a core for so long, and for a tenth of the run.
constexpr int64_t kLateNs = 100'000;

struct Turn {
  Run& run;
  int64_t deadline_ns;
  size_t lanes;
  int64_t begin_ns;
  std::atomic<size_t> ended{0};
  std::atomic<bool> deserted{false};  // fewer threads came than there are lanes
  std::atomic<int64_t> lost_ns{0};  // the most that a thread was late, or without a core

  void walk(size_t lane) {
    try {
      if (!walk_steps(run, lane, deadline_ns)) return;
    } catch (...) {
      run.stop(std::current_exception());
    }
    ended.fetch_add(1);
  }

  void lose(int64_t time_ns) {
    for (auto most = lost_ns.load(); time_ns > most && !lost_ns.compare_exchange_weak(most, time_ns);) {
    }
  }
};

void join_turn(void* given) {
  auto& turn = *static_cast<Turn*>(given);
  const auto lane = static_cast<size_t>(omp_get_thread_num());
  if (static_cast<size_t>(omp_get_num_threads()) < turn.lanes) {
    turn.deserted.store(true);
  } else if (lane < turn.lanes) {
    c10::InferenceMode guard;
    const int64_t had_ns = clock_ns(CLOCK_THREAD_CPUTIME_ID) + slept_ns;
    turn.walk(lane);
    const int64_t used_ns = clock_ns(CLOCK_THREAD_CPUTIME_ID) + slept_ns - had_ns;
    turn.lose(now_ns() - turn.begin_ns - used_ns);
  }
}

// The numbers are those of lanes.py.
enum class Outcome : int64_t { Forsaken = -2, Deserted = -1, Ended = 0, Paused = 1, Late = 2 };

// One turn of all lanes. They are the threads of the team that the calling thread's wide operators have: another thread for each lane
// would be in their way, and OpenMP's, which spin for the next wide operator, in the lanes' way.
Outcome walk_phases(Run& run) {
  const int64_t deadline_ns = now_ns() + kTurnNs;
  const CallersThreads kept;
  const auto& phases = run.program.phases;
  // What has run may have changed memory of the caller's: better known before than after it.
  if (!std::exchange(run.begun, true) && phases.size() > 1 && phases.front().size() == 1) {
    if (!muster(run.program.team) || team_of(run.program.team) < run.program.team) return Outcome::Deserted;
  }
  for (; run.phase < phases.size(); ++run.phase) {
    Turn turn{run, deadline_ns, phases[run.phase].size(), 0};
    if (turn.lanes == 1) {
      turn.walk(0);
    } else if (GOMP_parallel == nullptr || !muster(run.program.team)) {
      return run.phase == 0 ? Outcome::Deserted : Outcome::Forsaken;
    } else {
      turn.begin_ns = now_ns();
      GOMP_parallel(join_turn, &turn, static_cast<unsigned>(run.program.team), 0);
    }
    if (turn.deserted.load()) return run.phase == 0 ? Outcome::Deserted : Outcome::Forsaken;
    run.lost_ns += turn.lost_ns.load();
    if (run.stopped.load()) return Outcome::Ended;
    if (turn.ended.load() < turn.lanes) return Outcome::Paused;
    std::fill(run.places.begin(), run.places.end(), Place());
  }
  return run.lost_ns > std::max(kLateNs, (now_ns() - run.begin_ns) / 10) ? Outcome::Late : Outcome::Ended;
}

}  // namespace
