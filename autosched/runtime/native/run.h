// One run of a program: what its slots hold, and how its lanes wait for each other.
#pragma once

#include "program.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <thread>

#include <time.h>

namespace {

// A waiting lane that has spun for so long lets others have its core between two looks.
constexpr int64_t kPoliteNs = 20'000;
constexpr int kPausesPerLook = 16;

int64_t clock_ns(clockid_t clock) {
  timespec time{};
  clock_gettime(clock, &time);
  return int64_t{time.tv_sec} * 1'000'000'000 + time.tv_nsec;
}

int64_t now_ns() { return clock_ns(CLOCK_MONOTONIC); }  // what time.perf_counter_ns reads

thread_local int64_t slept_ns = 0;  // of its own accord, waiting for another lane

void pause_briefly() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

struct Place {
  size_t step = 0;
  bool ended = false;
};

struct Run {
  explicit Run(const Program& given)
      : program(given), slots(given.slots), raised(given.operators + most_lanes(given)), places(most_lanes(given)) {}

  static size_t most_lanes(const Program& program) {
    size_t most = 0;
    for (const auto& phase : program.phases) most = std::max(most, phase.size());
    return most;
  }

  const Program& program;
  std::vector<IValue> slots;
  std::vector<std::atomic<uint8_t>> raised;  // flags: one for each operator, then one for the end of each lane
  bool begun = false;
  size_t phase = 0;
  std::vector<Place> places;
  at::Tensor trace;  // int64 [2, operators], or undefined
  std::atomic<bool> stopped{false};
  std::atomic<int> sleepers{0};
  std::mutex mutex;
  std::condition_variable woken;
  std::exception_ptr failure;
  const int64_t begin_ns = now_ns();
  int64_t lost_ns = 0;  // of the team's threads, phase by phase the one that lost most
  int inside = 0;
  bool abandoned = false;

  void raise(size_t flag) {
    raised[flag].store(1, std::memory_order_seq_cst);
    // A lane counts itself as a sleeper before it looks at the flag for the last time, so none can be missed here.
    if (sleepers.load(std::memory_order_seq_cst) != 0) {
      std::lock_guard<std::mutex> guard(mutex);
      woken.notify_all();
    }
  }

  void stop(std::exception_ptr error) {
    std::lock_guard<std::mutex> guard(mutex);
    if (error && !failure) failure = std::move(error);
    stopped.store(true);
    woken.notify_all();
  }

  bool enter() {
    std::lock_guard<std::mutex> guard(mutex);
    if (!abandoned) ++inside;
    return !abandoned;
  }

  void leave() {
    std::lock_guard<std::mutex> guard(mutex);
    if (--inside == 0 && abandoned) slots.clear();
  }

  // From now on no lane works on it; its tensors go with the last lane that still does.
  void abandon() {
    stop(nullptr);
    std::lock_guard<std::mutex> guard(mutex);
    abandoned = true;
    if (inside == 0) slots.clear();
  }
};

enum class Waited { Up, Stopped, Paused };

// ``stops``: whether a failure elsewhere ends the wait.
Waited await(Run& run, size_t flag, int64_t deadline_ns, bool stops) {
  auto& raised = run.raised[flag];
  if (raised.load(std::memory_order_acquire)) return Waited::Up;
  const int64_t begin_ns = now_ns();
  for (int64_t spent_ns = 0; spent_ns < run.program.spin_ns; spent_ns = now_ns() - begin_ns) {
    if (spent_ns > kPoliteNs) {
      std::this_thread::yield();
    } else {
      for (int turn = 0; turn < kPausesPerLook; ++turn) pause_briefly();
    }
    if (raised.load(std::memory_order_acquire)) return Waited::Up;
    if (stops && run.stopped.load(std::memory_order_relaxed)) return Waited::Stopped;
  }
  std::unique_lock<std::mutex> lock(run.mutex);
  run.sleepers.fetch_add(1, std::memory_order_seq_cst);
  auto outcome = Waited::Up;
  while (!raised.load(std::memory_order_seq_cst)) {
    if (stops && run.stopped.load()) {
      outcome = Waited::Stopped;
      break;
    }
    const int64_t left_ns = deadline_ns - now_ns();
    if (left_ns <= 0) {
      outcome = Waited::Paused;
      break;
    }
    run.woken.wait_for(lock, std::chrono::nanoseconds(left_ns));
    slept_ns += left_ns - (deadline_ns - now_ns());
  }
  run.sleepers.fetch_sub(1, std::memory_order_seq_cst);
  return outcome;
}

}  // namespace
