// How often dictionaries were written to, of which the interpreter (from Python 3.12 on) tells whoever asks it to.
#pragma once

#include <cstdint>
#include <unordered_map>

namespace {

constexpr int kDeallocated = 5;  // the last of PyDict_WatchEvent

// Never destroyed: dictionaries die after whatever a library has at its end. A count stays where it is, whichever come and go beside it.
std::unordered_map<const void*, uint64_t>& counts_of_writes() {
  static auto& counts = *new std::unordered_map<const void*, uint64_t>();
  return counts;
}

}  // namespace

// What the interpreter calls before each write to a dictionary, with its lock. Another one may be made later where this one was.
extern "C" __attribute__((visibility("default"))) int autosched_written(int event, const void* dictionary, const void*, const void*) {
  auto& counts = counts_of_writes();
  if (const auto found = counts.find(dictionary); found == counts.end()) {
    // Nobody asked for its count.
  } else if (event == kDeallocated) {
    counts.erase(found);
  } else {
    ++found->second;
  }
  return 0;
}

// Where the count of a dictionary's writes is, as long as that lives. With the interpreter's lock.
extern "C" __attribute__((visibility("default"))) const uint64_t* autosched_writes(const void* dictionary) {
  return &counts_of_writes()[dictionary];
}
