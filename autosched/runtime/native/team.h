// The OpenMP team of the calling thread: how many threads come, and on which cores they wake up.
#pragma once

#include "cores.h"
#include "run.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

// Whichever OpenMP PyTorch was linked with: nothing here is compiled for one, so no second one is loaded. All on Linux have GNU's entry.
extern "C" {
__attribute__((weak)) void GOMP_parallel(void (*function)(void*), void* given, unsigned threads, unsigned flags);
__attribute__((weak)) int omp_get_thread_num();
__attribute__((weak)) int omp_get_num_threads();
}

namespace {

// Threads of a team spin for the next region before they sleep, GNU's for one to three milliseconds. One that was called less than this
// ago is awake.
constexpr int64_t kAwakeNs = 1'000'000;

struct Member {
  pid_t thread = 0;  // that came last time, as far as is known
  pid_t came = 0;
  int core = -1;  // where it ran last
  bool placed = false;
  cpu_set_t allowed;  // before it was placed
};

struct Team {
  pid_t process = 0;
  int64_t called_ns = 0;
  std::vector<Member> members;  // all but the calling thread
  Topology topology;
};

void count_team(void* given) { static_cast<std::atomic<size_t>*>(given)->fetch_add(1); }

// How many threads come when ``wanted`` are asked for.
size_t team_of(size_t wanted) {
  std::atomic<size_t> found{0};
  if (GOMP_parallel != nullptr) GOMP_parallel(count_team, &found, static_cast<unsigned>(wanted), 0);
  return found.load();
}

bool is_there(pid_t thread) { return thread != 0 && syscall(SYS_tgkill, getpid(), thread, 0) == 0; }

// Whether so many more threads can be started now, as far as one attempt tells: OpenMP ends the process where it cannot.
bool can_start(size_t count) {
  std::mutex waiting;
  std::vector<std::thread> trial;
  std::vector<pid_t> numbers(count);
  trial.reserve(count);
  waiting.lock();
  try {
    for (auto& number : numbers) {
      trial.emplace_back([&waiting, &number] {
        number = static_cast<pid_t>(syscall(SYS_gettid));
        std::lock_guard<std::mutex> guard(waiting);
      });
    }
  } catch (const std::system_error&) {
  }
  const bool all = trial.size() == count;
  waiting.unlock();
  for (auto& thread : trial) thread.join();
  // The team's are to find their places free, which they are a moment after that.
  const int64_t until = now_ns() + kAwakeNs;
  for (auto number : numbers) {
    while (is_there(number) && now_ns() < until) std::this_thread::yield();
  }
  return all;
}

// Bind each member that sleeps to a core of its own, and none to the caller's.
void place(Team& team) {
  cpu_set_t usable;
  const int callers = sched_getcpu();
  if (callers < 0 || sched_getaffinity(0, sizeof(usable), &usable) != 0) return;
  Cores cores(team.topology, usable, callers);
  for (auto& member : team.members) {
    // One that may only run on one core was put there by somebody else.
    if (member.thread == 0 || sched_getaffinity(member.thread, sizeof(member.allowed), &member.allowed) != 0) continue;
    if (CPU_COUNT(&member.allowed) < 2) continue;
    const int core = cores.take(member.allowed, member.core);
    if (core < 0) continue;
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(core, &one);
    member.placed = sched_setaffinity(member.thread, sizeof(one), &one) == 0;
  }
}

void unbind(Member& member) {
  if (member.placed) sched_setaffinity(member.thread, sizeof(member.allowed), &member.allowed);
  member.placed = false;
}

void arrive(void* given) {
  auto& members = static_cast<Team*>(given)->members;
  const auto number = static_cast<size_t>(omp_get_thread_num());
  if (number == 0 || number > members.size()) return;
  auto& member = members[number - 1];
  thread_local const auto self = static_cast<pid_t>(syscall(SYS_gettid));
  if (member.thread == self) unbind(member);
  member.came = self;
  member.core = sched_getcpu();
}

// Have a team of ``threads`` awake. Under a hypervisor, Linux takes an idle core for one that the host has taken away, and leaves a thread
// that is woken on the core of whoever woke it. There it waits until that one, which spins for it, has used up its share of time: for
// milliseconds (``available_idle_cpu`` and ``vcpu_is_preempted`` in kernel/sched/core.c). So each is bound to another core, until it is there.
// False if there is no such team, and its threads cannot be started.
bool muster(size_t threads) {
  thread_local Team team;
  const int64_t now = now_ns();
  if (now - team.called_ns < kAwakeNs || GOMP_parallel == nullptr) return true;
  if (const auto process = getpid(); team.process != process) {
    // A forked process has none of its parent's threads.
    team.members.clear();
    team.process = process;
  }
  team.members.resize(threads - 1);
  const auto& members = team.members;
  const auto gone = std::count_if(members.begin(), members.end(), [](const Member& member) { return !is_there(member.thread); });
  if (gone > 0 && !can_start(static_cast<size_t>(gone))) return false;
  team.called_ns = now;
  place(team);
  GOMP_parallel(arrive, &team, static_cast<unsigned>(threads), 0);
  for (auto& member : team.members) {
    unbind(member);  // if another one came
    member.thread = member.came;
  }
  return true;
}

}  // namespace
