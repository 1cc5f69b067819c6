// Which cores the threads of a team are woken on: each its own, two threads of one physical core last, and the caller's socket first.
#pragma once

#include <fstream>
#include <map>
#include <string>

#include <sched.h>

namespace {

// The numbers in a file such as "0-3,64"; none if it cannot be read.
cpu_set_t listed(const std::string& path) {
  cpu_set_t found;
  CPU_ZERO(&found);
  std::ifstream file(path);
  for (int first = 0; file >> first;) {
    int last = first;
    if (file.peek() == '-') file.ignore() >> last;
    for (int core = first; core <= last && core < CPU_SETSIZE; ++core) CPU_SET(core, &found);
    if (file.peek() == ',') file.ignore();
  }
  return found;
}

// What Linux calls a core is a thread of a physical one: with which others it shares that, and its socket.
class Topology {
 public:
  explicit Topology(std::string folder = "/sys/devices/system/cpu") : folder_(std::move(folder)) {}

  const cpu_set_t& siblings(int core) { return asked(siblings_, core, "thread_siblings_list"); }
  const cpu_set_t& socket(int core) { return asked(sockets_, core, "core_siblings_list"); }

 private:
  const cpu_set_t& asked(std::map<int, cpu_set_t>& known, int core, const char* file) {
    // Once: each takes microseconds, and there may be hundreds.
    const auto found = known.find(core);
    if (found != known.end()) return found->second;
    return known[core] = listed(folder_ + "/cpu" + std::to_string(core) + "/topology/" + file);
  }

  std::string folder_;
  std::map<int, cpu_set_t> siblings_, sockets_;
};

// Hands out the cores of ``usable``, but for the caller's.
class Cores {
 public:
  Cores(Topology& topology, const cpu_set_t& usable, int callers)
      : topology_(topology), left_(usable), whole_(usable), near_(topology.socket(callers)) {
    taken(callers);
  }

  // One of ``allowed``, ``last`` if that is as good as another; -1 if none is left.
  int take(const cpu_set_t& allowed, int last) {
    cpu_set_t open, whole;
    CPU_AND(&open, &left_, &allowed);
    CPU_AND(&whole, &whole_, &allowed);
    int core = chosen(whole, last);
    if (core < 0) core = chosen(open, last);
    if (core >= 0) taken(core);
    return core;
  }

 private:
  int chosen(const cpu_set_t& open, int last) const {
    if (last >= 0 && CPU_ISSET(last, &open)) return last;
    cpu_set_t near;
    CPU_AND(&near, &near_, &open);
    const int core = lowest(near);
    return core >= 0 ? core : lowest(open);
  }

  static int lowest(const cpu_set_t& open) {
    for (int core = 0; core < CPU_SETSIZE; ++core) {
      if (CPU_ISSET(core, &open)) return core;
    }
    return -1;
  }

  void taken(int core) {
    const cpu_set_t& shared = topology_.siblings(core);
    CPU_CLR(core, &left_);
    CPU_CLR(core, &whole_);
    for (int other = 0; other < CPU_SETSIZE; ++other) {
      if (CPU_ISSET(other, &shared)) CPU_CLR(other, &whole_);
    }
  }

  Topology& topology_;
  cpu_set_t left_, whole_;  // those that nobody has; of these, those whose physical core nobody has
  const cpu_set_t near_;
};

}  // namespace
