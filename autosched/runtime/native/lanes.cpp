// Lanes of a plan without the interpreter: one call from Python for each run, with the interpreter's lock released; or, where lanes have
// threads of their own, one for each lane.
//
// Python's side is lanes.py, and code.py writes what compile() reads. Operators are reached through PyTorch's dispatcher, as
// they are from Python, so results are equal to the bit. The operators of the namespace autosched_lanes and three functions are all that is
// visible; programs and watches are handed to Python as addresses, and each belongs to one Python object, which gives it back.

#include "dictionaries.h"
#include "reading.h"
#include "walk.h"
#include "watch.h"

#include <ATen/ops/from_blob.h>
#include <torch/library.h>

#include <memory>
#include <utility>
#include <vector>

namespace {

std::unique_ptr<Run> begin_run(const Program& program, const c10::List<at::Tensor>& inputs, const IValue& trace) {
  auto run = std::make_unique<Run>(program);
  TORCH_CHECK(inputs.size() == program.inputs.size(), "a schedule of ", program.inputs.size(), " inputs was given ", inputs.size());
  for (const auto& [slot, constant] : program.constants) run->slots[slot] = constant;
  for (size_t place = 0; place < program.inputs.size(); ++place) run->slots[program.inputs[place]] = IValue(inputs.get(place));
  if (trace.isTensor()) run->trace = trace.toTensor();
  return run;
}

// The outputs, or the first lane's error; nothing is held any longer.
c10::List<at::Tensor> finish_run(Run& run) {
  c10::List<at::Tensor> made;
  if (!run.failure) {
    for (auto slot : run.program.outputs) made.push_back(run.slots[slot].isTensor() ? run.slots[slot].toTensor() : at::Tensor());
  }
  run.slots.clear();
  if (run.failure) std::rethrow_exception(std::exchange(run.failure, nullptr));
  return made;
}

template <typename T>
T& at_address(const IValue& address) {
  return *reinterpret_cast<T*>(address.toInt());
}

template <typename T>
IValue address_of(std::unique_ptr<T> thing) {
  return IValue(static_cast<int64_t>(reinterpret_cast<intptr_t>(thing.release())));
}

std::vector<IValue> taken(Stack& stack, size_t count) { return torch::jit::pop(stack, count); }

void compile(const c10::OperatorHandle&, Stack* stack) {
  auto given = taken(*stack, 5);
  Reader reader(given[0].toIntList(), given[1].toDoubleList(), given[2].toListRef().vec(), given[3].toTensorVector());
  stack->push_back(address_of(read_program(reader, given[4].toTensorVector())));
}

// What a call returns to Python an interrupt may take away, before anything there refers to it, and one that comes while a line of Python
// gives something back is lost. So a run is the memory of a tensor, which goes with the last reference; or it stays here, with the thread
// that walks it.
thread_local std::vector<Run*> paused;

Run& run_in(const IValue& tensor) { return *static_cast<Run*>(tensor.toTensor().mutable_data_ptr()); }

void begin(const c10::OperatorHandle&, Stack* stack) {
  auto given = taken(*stack, 3);
  auto* run = begin_run(at_address<Program>(given[0]), given[1].toTensorList(), given[2]).release();
  // Of some size: a tensor without elements has no address.
  stack->push_back(IValue(at::from_blob(run, {1}, [](void* ended) { delete static_cast<Run*>(ended); }, at::kByte)));
}

void walk(const c10::OperatorHandle&, Stack* stack) {
  auto given = taken(*stack, 2);
  auto& run = run_in(given[0]);
  bool ended = true;
  if (run.enter()) {
    ended = walk_turn(run, given[1].toInt());
    run.leave();
  }
  stack->push_back(IValue(ended));
}

void finish(const c10::OperatorHandle&, Stack* stack) {
  auto given = taken(*stack, 1);
  stack->push_back(IValue(finish_run(run_in(given[0]))));
}

void walk_here(std::unique_ptr<Run> run, Stack* stack) {
  const auto outcome = walk_phases(*run);
  const bool ended = outcome == Outcome::Ended || outcome == Outcome::Late;
  stack->push_back(ended ? IValue(finish_run(*run)) : IValue(c10::List<at::Tensor>()));
  stack->push_back(IValue(static_cast<int64_t>(outcome)));
  if (outcome == Outcome::Paused) paused.push_back(run.release());
}

// The run that paused last on this thread, if it is one of that program.
std::unique_ptr<Run> take_paused(const IValue& program) {
  if (paused.empty() || &paused.back()->program != &at_address<Program>(program)) return nullptr;
  std::unique_ptr<Run> run(paused.back());
  paused.pop_back();
  return run;
}

// All of a run by the calling thread and its team: the outputs, and how it went.
void run_here(const c10::OperatorHandle&, Stack* stack) {
  auto given = taken(*stack, 3);
  walk_here(begin_run(at_address<Program>(given[0]), given[1].toTensorList(), given[2]), stack);
}

void resume(const c10::OperatorHandle&, Stack* stack) {
  auto given = taken(*stack, 1);
  auto run = take_paused(given[0]);
  TORCH_CHECK(run != nullptr, "a native run was resumed that has not paused");
  walk_here(std::move(run), stack);
}

void forget(const c10::OperatorHandle&, Stack* stack) {
  auto given = taken(*stack, 1);
  take_paused(given[0]);
}

void team(const c10::OperatorHandle&, Stack* stack) {
  auto given = taken(*stack, 1);
  stack->push_back(IValue(static_cast<int64_t>(team_of(given[0].toInt()))));
}

void stop(const c10::OperatorHandle&, Stack* stack) {
  auto given = taken(*stack, 1);
  run_in(given[0]).stop(nullptr);
}

void abandon(const c10::OperatorHandle&, Stack* stack) {
  auto given = taken(*stack, 1);
  run_in(given[0]).abandon();
}

// Where the objects are that tensors of Python's stand for.
void implementations(const c10::OperatorHandle&, Stack* stack) {
  auto given = taken(*stack, 1);
  c10::List<int64_t> found;
  for (const at::Tensor& tensor : given[0].toTensorVector()) found.push_back(reinterpret_cast<intptr_t>(tensor.unsafeGetTensorImpl()));
  stack->push_back(IValue(found));
}

void watch(const c10::OperatorHandle&, Stack* stack) {
  auto given = taken(*stack, 4);
  auto placed = given[1].toTensorVector(), counted = given[2].toTensorVector();
  stack->push_back(address_of(std::make_unique<Watch>(given[0].toIntVector(), placed, counted, given[3].toIntVector())));
}

}  // namespace

TORCH_LIBRARY(autosched_lanes, library) {
  using torch::CppFunction;
  library.def("compile(int[] code, float[] reals, str[] texts, Tensor[] dtypes, Tensor[] constants) -> int", CppFunction::makeFromBoxedFunction<&compile>());
  library.def("begin(int program, Tensor[] inputs, Tensor? trace) -> Tensor", CppFunction::makeFromBoxedFunction<&begin>());
  library.def("walk(Tensor run, int lane) -> bool", CppFunction::makeFromBoxedFunction<&walk>());
  library.def("finish(Tensor run) -> Tensor[]", CppFunction::makeFromBoxedFunction<&finish>());
  library.def("run_here(int program, Tensor[] inputs, Tensor? trace) -> (Tensor[], int)", CppFunction::makeFromBoxedFunction<&run_here>());
  library.def("resume(int program) -> (Tensor[], int)", CppFunction::makeFromBoxedFunction<&resume>());
  library.def("forget(int program) -> ()", CppFunction::makeFromBoxedFunction<&forget>());
  library.def("team(int threads) -> int", CppFunction::makeFromBoxedFunction<&team>());
  library.def("stop(Tensor run) -> ()", CppFunction::makeFromBoxedFunction<&stop>());
  library.def("abandon(Tensor run) -> ()", CppFunction::makeFromBoxedFunction<&abandon>());
  library.def("implementations(Tensor[] tensors) -> int[]", CppFunction::makeFromBoxedFunction<&implementations>());
  library.def("watch(int[] addresses, Tensor[] placed, Tensor[] counted, int[] inner) -> int", CppFunction::makeFromBoxedFunction<&watch>());
}

// No operator, like those of dictionaries.h: PyTorch gives up the interpreter's lock for operators.
extern "C" __attribute__((visibility("default"))) int autosched_unchanged(const Watch* watch) {
  try {
    return watch->unchanged() ? 1 : 0;
  } catch (...) {
    return 0;  // memory that may not be asked for any more
  }
}

// Nor are these: the interpreter collects garbage when it likes, and an operator that is called while a model is traced becomes part of
// what was traced, with the address in it.
extern "C" __attribute__((visibility("default"))) void autosched_delete_program(const Program* program) { delete program; }

extern "C" __attribute__((visibility("default"))) void autosched_delete_watch(const Watch* watch) { delete watch; }
