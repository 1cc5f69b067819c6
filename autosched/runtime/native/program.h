// A program: phases of lanes of steps, each with what its operator does.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

namespace {

using c10::IValue;
using c10::Stack;

constexpr size_t kMostPointers = 1024;

struct Argument {
  enum class Kind { Fixed, Slot, Tensors, OptionalTensors };
  Kind kind = Kind::Fixed;
  IValue fixed;
  std::vector<int64_t> slots;
};

// The numbers are those of code.py.
enum class Kind : int64_t { Call = 0, Allocate = 1, Window = 2, Same = 3, Run = 4, Release = 5, Expect = 6 };

struct Instruction {
  Kind kind = Kind::Release;
  std::optional<c10::OperatorHandle> target;
  std::vector<Argument> arguments;
  std::vector<int64_t> slots;  // results of a call, parameters of a kernel, what is released; else what is filled, and from what
  std::vector<int64_t> size;
  std::vector<int64_t> stride;
  int64_t offset = 0;
  std::optional<at::ScalarType> dtype;  // of what is allocated, or expected; nothing is expected of a dtype that is not there
  void* function = nullptr;
  std::vector<void*> fixed;  // parameters of a kernel behind those in slots
};

struct Step {
  int64_t index = 0;
  int width = 1;
  bool records = false;
  int64_t delay_ns = 0;
  int64_t repeats = 1;
  std::vector<int64_t> waits;
  std::vector<int64_t> frees;
  std::vector<Instruction> instructions;
};

using Lane = std::vector<Step>;

// Lanes that are walked at the same time, each by a thread; all have ended before the next phase begins. A phase of one lane is the
// calling thread's.
using Phase = std::vector<Lane>;

struct Program {
  size_t slots = 0;
  size_t operators = 0;
  int64_t spin_ns = 0;
  size_t team = 0;  // threads that walk a phase of several lanes, as many as its widest operator needs
  std::vector<Phase> phases;
  std::vector<int64_t> inputs;
  std::vector<int64_t> outputs;
  std::vector<std::pair<int64_t, IValue>> constants;
};

}  // namespace
