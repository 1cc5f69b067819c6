// Memory that a thread works in.
#pragma once

#include <cstddef>
#include <cstdint>
#include <new>

namespace {

constexpr size_t kAlignment = 64;

// Memory that a thread keeps from call to call.
class Scratch {
 public:
  Scratch() = default;
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch() { give_back(); }

  float* of(int64_t count) {
    if (count > count_) {
      give_back();
      memory_ = static_cast<float*>(::operator new(count * sizeof(float), std::align_val_t{kAlignment}));
      count_ = count;
    }
    return memory_;
  }

 private:
  void give_back() {
    if (memory_ != nullptr) ::operator delete(memory_, std::align_val_t{kAlignment});
    memory_ = nullptr;
    count_ = 0;
  }

  float* memory_ = nullptr;
  int64_t count_ = 0;
};

}  // namespace

// For so many numbers: one for all kernels, until the next is asked for.
extern "C" float* autosched_scratch(int64_t count);
