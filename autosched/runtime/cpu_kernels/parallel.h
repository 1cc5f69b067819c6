// Threads of the calling thread's OpenMP team, and what each of them does.
#pragma once

#include <atomic>
#include <cstdint>
#include <new>

// Whichever OpenMP PyTorch was linked with, as in native/team.h: nothing here is compiled for one, so no second one is loaded.
extern "C" {
__attribute__((weak)) void GOMP_parallel(void (*function)(void*), void* given, unsigned threads, unsigned flags);
__attribute__((weak)) void GOMP_barrier();
__attribute__((weak)) int omp_get_thread_num();
__attribute__((weak)) int omp_get_num_threads();
}

namespace {

// With fewer products than a core does in some ten microseconds, other threads come too late to be of use.
constexpr int64_t kLeastProducts = 500'000;

// What a team does, and whether one of its threads had no memory for it: no exception may leave such a thread.
template <typename Work>
struct Shared {
  Work& work;
  std::atomic<bool> failed{false};
};

template <typename Work>
void call_work(void* given) {
  auto& shared = *static_cast<Shared<Work>*>(given);
  try {
    shared.work(omp_get_thread_num(), omp_get_num_threads());
  } catch (const std::bad_alloc&) {
    shared.failed.store(true);
  }
}

// ``work(number, count)`` on each thread of a team, however many come. Work that waits for all of them takes no memory: one that had none
// would not come.
template <typename Work>
void on_team(int64_t threads, Work work) {
  if (threads < 2 || GOMP_parallel == nullptr || GOMP_barrier == nullptr) return work(0, 1);
  Shared<Work> shared{work};
  GOMP_parallel(call_work<Work>, &shared, static_cast<unsigned>(threads), 0);
  if (shared.failed.load()) throw std::bad_alloc();
}

void all_are_here(int count) {
  if (count > 1) GOMP_barrier();
}

// The share of ``all`` that one of ``count`` threads has, or one of so many rounds.
struct Share {
  Share(int64_t first, int64_t last) : first(first), last(last) {}
  Share(int64_t all, int64_t number, int64_t count) : first(all * number / count), last(all * (number + 1) / count) {}
  int64_t first, last;
};

// A thread's share of ``all`` if that is ``divided`` among them, else all of it.
Share share_if(bool divided, int64_t all, int number, int count) { return divided ? Share(all, number, count) : Share(0, all); }

}  // namespace
