// Lanes of a plan without the interpreter: each lane is one call from Python, made once for each run, with the interpreter's lock released.
//
// Python's side is native_lanes.py, which also writes the code that compile() reads. Operators are reached through PyTorch's dispatcher, as
// they are from Python, so results are equal to the bit. The operators of the namespace autosched_lanes are all that is visible; programs
// and runs are handed to Python as addresses, and each belongs to one Python object, which gives it back.

#include <ATen/EmptyTensor.h>
#include <ATen/Parallel.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/inductor/inductor_ops.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <time.h>

namespace {

using c10::IValue;
using c10::Stack;

// After so long a lane goes back to Python, which looks for signals (Ctrl-C) and calls again.
constexpr int64_t kTurnNs = 50'000'000;
// A waiting lane that has spun for so long lets others have its core between two looks.
constexpr int64_t kPoliteNs = 20'000;
constexpr int kPausesPerLook = 16;
constexpr size_t kMostPointers = 128;

int64_t now_ns() {
  timespec time{};
  clock_gettime(CLOCK_MONOTONIC, &time);  // what time.perf_counter_ns reads
  return int64_t{time.tv_sec} * 1'000'000'000 + time.tv_nsec;
}

void pause_briefly() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// ---- Programs ----------------------------------------------------------------------------------------------------------------------

struct Argument {
  enum class Kind { Fixed, Slot, Tensors, OptionalTensors };
  Kind kind = Kind::Fixed;
  IValue fixed;
  std::vector<int64_t> slots;
};

// The numbers are those of native_lanes.py.
enum class Kind : int64_t { Call = 0, Allocate = 1, Window = 2, Same = 3, Run = 4, Release = 5, Expect = 6 };

struct Instruction {
  Kind kind = Kind::Release;
  std::optional<c10::OperatorHandle> target;
  std::vector<Argument> arguments;
  std::vector<int64_t> slots;  // results of a call, parameters of a kernel, what is released; else what is filled, and from what
  std::vector<int64_t> size;
  std::vector<int64_t> stride;
  int64_t offset = 0;
  at::ScalarType dtype = at::kFloat;
  void* function = nullptr;
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

struct Program {
  size_t slots = 0;
  size_t operators = 0;
  int64_t spin_ns = 0;
  std::vector<std::vector<Step>> lanes;
  std::vector<int64_t> inputs;
  std::vector<int64_t> outputs;
  std::vector<std::pair<int64_t, IValue>> constants;
};

// ---- Reading a program -------------------------------------------------------------------------------------------------------------

struct Literal {
  enum class Tag : int64_t { None = 0, Bool = 1, Int = 2, Float = 3, String = 4, Slot = 5, List = 6, Dtype = 7, MemoryFormat = 8, Layout = 9, Device = 10 };
  Tag tag = Tag::None;
  int64_t number = 0;
  double real = 0;
  std::string text;
  at::ScalarType dtype = at::kFloat;
  std::vector<Literal> items;
};

class Reader {
 public:
  Reader(c10::List<int64_t> code, c10::List<double> reals, std::vector<IValue> texts, std::vector<at::Tensor> dtypes)
      : code_(code.vec()), reals_(reals.vec()), texts_(std::move(texts)), dtypes_(std::move(dtypes)) {}

  int64_t next() {
    TORCH_CHECK(at_ < code_.size(), "the code of a native program ends too early");
    return code_[at_++];
  }
  std::string text() { return texts_.at(next()).toStringRef(); }
  at::ScalarType dtype() { return dtypes_.at(next()).scalar_type(); }
  bool ended() const { return at_ == code_.size(); }

  std::vector<int64_t> many() {
    std::vector<int64_t> found(next());
    for (auto& item : found) item = next();
    return found;
  }

  Literal literal() {
    Literal made;
    made.tag = static_cast<Literal::Tag>(next());
    switch (made.tag) {
      case Literal::Tag::None:
      case Literal::Tag::Device:
        break;
      case Literal::Tag::Float:
        made.real = reals_.at(next());
        break;
      case Literal::Tag::String:
      case Literal::Tag::MemoryFormat:
      case Literal::Tag::Layout:
        made.text = text();
        break;
      case Literal::Tag::Dtype:
        made.dtype = dtype();
        break;
      case Literal::Tag::List:
        made.items.resize(next());
        for (auto& item : made.items) item = literal();
        break;
      default:
        made.number = next();
    }
    return made;
  }

 private:
  std::vector<int64_t> code_;
  std::vector<double> reals_;
  std::vector<IValue> texts_;
  std::vector<at::Tensor> dtypes_;
  size_t at_ = 0;
};

using Tag = Literal::Tag;

[[noreturn]] void unfit(const c10::Type& type) { TORCH_CHECK(false, "no argument of type ", type.str(), " can be made of what is given"); }

int64_t memory_format(const std::string& name) {
  if (name == "contiguous_format") return static_cast<int64_t>(at::MemoryFormat::Contiguous);
  if (name == "preserve_format") return static_cast<int64_t>(at::MemoryFormat::Preserve);
  if (name == "channels_last") return static_cast<int64_t>(at::MemoryFormat::ChannelsLast);
  TORCH_CHECK(name == "channels_last_3d", "memory format ", name, " is not known here");
  return static_cast<int64_t>(at::MemoryFormat::ChannelsLast3d);
}

int64_t whole(const Literal& given, const c10::Type& type) {
  switch (given.tag) {
    case Tag::Bool:
    case Tag::Int:
      return given.number;
    case Tag::Dtype:
      return static_cast<int64_t>(given.dtype);
    case Tag::MemoryFormat:
      return memory_format(given.text);
    case Tag::Layout:
      TORCH_CHECK(given.text == "strided", "layout ", given.text, " is not known here");
      return static_cast<int64_t>(at::kStrided);
    default:
      unfit(type);
  }
}

double real(const Literal& given, const c10::Type& type) {
  if (given.tag == Tag::Float) return given.real;
  if (given.tag != Tag::Int && given.tag != Tag::Bool) unfit(type);
  return static_cast<double>(given.number);
}

// A number where the schema has a tensor counts as one of Python's: it does not widen the result.
template <typename T>
IValue wrapped(T number) {
  at::Tensor made(at::detail::empty_cpu({}, c10::CppTypeToScalarType<T>::value, std::nullopt, std::nullopt, std::nullopt, std::nullopt));
  *made.mutable_data_ptr<T>() = number;
  made.unsafeGetTensorImpl()->set_wrapped_number(true);
  return IValue(std::move(made));
}

template <typename T, typename Get>
IValue listed(const Literal& given, size_t repeated, Get get) {
  c10::List<T> made;
  if (given.tag == Tag::List) {
    for (const auto& item : given.items) made.push_back(get(item));
  } else {
    for (size_t i = 0; i < repeated; ++i) made.push_back(get(given));
  }
  return IValue(std::move(made));
}

// What Python's binding makes of a literal for a parameter of ``type``; ``repeated`` is how long a list one number stands for.
IValue fixed(const Literal& given, const c10::Type& type, size_t repeated) {
  if (given.tag == Tag::None) return IValue();
  switch (type.kind()) {
    case c10::TypeKind::OptionalType:
      return fixed(given, *type.castRaw<c10::OptionalType>()->getElementType(), repeated);
    case c10::TypeKind::TensorType:
      if (given.tag == Tag::Float) return wrapped<double>(given.real);
      if (given.tag == Tag::Int) return wrapped<int64_t>(given.number);
      if (given.tag == Tag::Bool) return wrapped<bool>(given.number != 0);
      unfit(type);
    case c10::TypeKind::IntType:
    case c10::TypeKind::SymIntType:
      return IValue(whole(given, type));
    case c10::TypeKind::FloatType:
      return IValue(real(given, type));
    case c10::TypeKind::BoolType:
      if (given.tag != Tag::Bool) unfit(type);
      return IValue(given.number != 0);
    case c10::TypeKind::NumberType:
      if (given.tag == Tag::Float) return IValue(given.real);
      if (given.tag == Tag::Bool) return IValue(given.number != 0);
      return IValue(whole(given, type));
    case c10::TypeKind::StringType:
      if (given.tag != Tag::String) unfit(type);
      return IValue(given.text);
    case c10::TypeKind::DeviceObjType:
      if (given.tag != Tag::Device) unfit(type);
      return IValue(c10::Device(at::kCPU));
    case c10::TypeKind::ListType: {
      const c10::Type& item = *type.castRaw<c10::ListType>()->getElementType();
      if (given.tag != Tag::List && repeated == 0) unfit(type);
      switch (item.kind()) {
        case c10::TypeKind::IntType:
        case c10::TypeKind::SymIntType:
          return listed<int64_t>(given, repeated, [&](const Literal& one) { return whole(one, item); });
        case c10::TypeKind::FloatType:
          return listed<double>(given, repeated, [&](const Literal& one) { return real(one, item); });
        case c10::TypeKind::BoolType:
          return listed<bool>(given, repeated, [&](const Literal& one) {
            if (one.tag != Tag::Bool) unfit(item);
            return one.number != 0;
          });
        case c10::TypeKind::OptionalType: {
          // What follows a packed convolution or product, as oneDNN's operators are told.
          const c10::Type& inner = *item.castRaw<c10::OptionalType>()->getElementType();
          if (inner.kind() != c10::TypeKind::NumberType) unfit(type);
          return listed<std::optional<at::Scalar>>(given, repeated, [&](const Literal& one) -> std::optional<at::Scalar> {
            if (one.tag == Tag::None) return std::nullopt;
            return fixed(one, inner, 0).toScalar();
          });
        }
        default:
          unfit(type);
      }
    }
    default:
      unfit(type);
  }
}

bool holds_tensors(const c10::Type& type, bool optional) {
  if (type.kind() == c10::TypeKind::OptionalType) return holds_tensors(*type.castRaw<c10::OptionalType>()->getElementType(), optional);
  if (type.kind() != c10::TypeKind::ListType) return false;
  const c10::Type& item = *type.castRaw<c10::ListType>()->getElementType();
  if (!optional) return item.kind() == c10::TypeKind::TensorType;
  return item.kind() == c10::TypeKind::OptionalType &&
      item.castRaw<c10::OptionalType>()->getElementType()->kind() == c10::TypeKind::TensorType;
}

Argument prepared(const Literal& given, const c10::Argument& parameter) {
  Argument made;
  const c10::Type& type = *parameter.type();
  bool tensors = holds_tensors(type, false), optional = holds_tensors(type, true);
  if (given.tag == Tag::Slot) {
    made.kind = Argument::Kind::Slot;
    made.slots = {given.number};
  } else if (given.tag == Tag::List && (tensors || optional)) {
    made.kind = optional ? Argument::Kind::OptionalTensors : Argument::Kind::Tensors;
    for (const auto& item : given.items) {
      if (item.tag != Tag::Slot && !(optional && item.tag == Tag::None)) unfit(type);
      made.slots.push_back(item.tag == Tag::Slot ? item.number : -1);
    }
  } else {
    made.fixed = fixed(given, type, static_cast<size_t>(parameter.N().value_or(0)));
  }
  return made;
}

// name, overload, positional arguments, arguments by name, slots of the results
void read_call(Reader& reader, Instruction& made) {
  auto name = reader.text(), overload = reader.text();
  made.target = c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), overload.c_str());
  const auto& parameters = made.target->schema().arguments();
  std::vector<std::optional<Literal>> given(parameters.size());
  int64_t positional = reader.next();
  for (int64_t place = 0; place < positional; ++place) given.at(place) = reader.literal();
  for (int64_t named = reader.next(); named > 0; --named) {
    auto wanted = reader.text();
    auto found = std::find_if(parameters.begin(), parameters.end(), [&](const auto& item) { return item.name() == wanted; });
    TORCH_CHECK(found != parameters.end(), name, " has no parameter ", wanted);
    given[found - parameters.begin()] = reader.literal();
  }
  for (size_t place = 0; place < parameters.size(); ++place) {
    const auto& parameter = parameters[place];
    if (given[place].has_value()) {
      made.arguments.push_back(prepared(*given[place], parameter));
    } else {
      TORCH_CHECK(parameter.default_value().has_value(), name, " is given no ", parameter.name());
      made.arguments.push_back({Argument::Kind::Fixed, *parameter.default_value(), {}});
    }
  }
  made.slots = reader.many();
}

Instruction read_instruction(Reader& reader) {
  Instruction made;
  made.kind = static_cast<Kind>(reader.next());
  if (made.kind == Kind::Call) {
    read_call(reader, made);
    return made;
  }
  if (made.kind == Kind::Run) made.function = reinterpret_cast<void*>(reader.next());
  made.slots = reader.many();
  TORCH_CHECK(made.kind != Kind::Run || made.slots.size() <= kMostPointers, "a kernel takes more than ", kMostPointers, " tensors");
  if (made.kind == Kind::Allocate || made.kind == Kind::Window || made.kind == Kind::Expect) {
    made.size = reader.many();
    made.stride = reader.many();
    if (made.kind == Kind::Allocate) made.dtype = reader.dtype();
    if (made.kind == Kind::Window) made.offset = reader.next();
  }
  return made;
}

Step read_step(Reader& reader) {
  Step made;
  made.index = reader.next();
  made.width = static_cast<int>(reader.next());
  made.records = reader.next() != 0;
  made.delay_ns = reader.next();
  made.repeats = reader.next();
  made.waits = reader.many();
  made.frees = reader.many();
  for (int64_t count = reader.next(); count > 0; --count) made.instructions.push_back(read_instruction(reader));
  return made;
}

std::unique_ptr<Program> read_program(Reader& reader, const std::vector<at::Tensor>& constants) {
  auto made = std::make_unique<Program>();
  made->slots = reader.next();
  made->operators = reader.next();
  made->spin_ns = reader.next();
  made->inputs = reader.many();
  made->outputs = reader.many();
  auto filled = reader.many();
  TORCH_CHECK(filled.size() == constants.size(), "a native program has ", constants.size(), " constants for ", filled.size(), " slots");
  for (size_t place = 0; place < filled.size(); ++place) made->constants.emplace_back(filled[place], IValue(constants[place]));
  made->lanes.resize(reader.next());
  for (auto& lane : made->lanes) {
    for (int64_t count = reader.next(); count > 0; --count) lane.push_back(read_step(reader));
  }
  TORCH_CHECK(reader.ended(), "the code of a native program goes on after its end");
  return made;
}

// ---- Runs --------------------------------------------------------------------------------------------------------------------------

struct Place {
  size_t step = 0;
  bool ended = false;
};

struct Run {
  explicit Run(const Program& given)
      : program(given), slots(given.slots), raised(given.operators + given.lanes.size()), places(given.lanes.size()) {}

  const Program& program;
  std::vector<IValue> slots;
  std::vector<std::atomic<uint8_t>> raised;  // flags: one for each operator, then one for the end of each lane
  std::vector<Place> places;
  at::Tensor trace;  // int64 [2, operators], or undefined
  std::atomic<bool> stopped{false};
  std::atomic<int> sleepers{0};
  std::mutex mutex;
  std::condition_variable woken;
  std::exception_ptr failure;
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
  }
  run.sleepers.fetch_sub(1, std::memory_order_seq_cst);
  return outcome;
}

template <size_t... Places>
void call_with(void* function, void** pointers, std::index_sequence<Places...>) {
  reinterpret_cast<void (*)(decltype(static_cast<void>(Places), static_cast<void*>(nullptr))...)>(function)(pointers[Places]...);
}

using Caller = void (*)(void*, void**);

template <size_t... Counts>
std::vector<Caller> make_callers(std::index_sequence<Counts...>) {
  return {[](void* function, void** pointers) { call_with(function, pointers, std::make_index_sequence<Counts>()); }...};
}

void run_kernel(const Instruction& todo, std::vector<IValue>& slots) {
  static const std::vector<Caller> callers = make_callers(std::make_index_sequence<kMostPointers + 1>());
  void* pointers[kMostPointers];
  for (size_t place = 0; place < todo.slots.size(); ++place) pointers[place] = slots[todo.slots[place]].toTensor().mutable_data_ptr();
  callers[todo.slots.size()](todo.function, pointers);
}

void push(const Argument& argument, const std::vector<IValue>& slots, Stack& stack) {
  switch (argument.kind) {
    case Argument::Kind::Fixed:
      stack.push_back(argument.fixed);
      return;
    case Argument::Kind::Slot:
      stack.push_back(slots[argument.slots[0]]);
      return;
    case Argument::Kind::Tensors: {
      c10::List<at::Tensor> made;
      made.reserve(argument.slots.size());
      for (auto slot : argument.slots) made.push_back(slots[slot].toTensor());
      stack.emplace_back(std::move(made));
      return;
    }
    case Argument::Kind::OptionalTensors: {
      c10::List<std::optional<at::Tensor>> made;
      made.reserve(argument.slots.size());
      for (auto slot : argument.slots) {
        bool absent = slot < 0 || slots[slot].isNone();
        made.push_back(absent ? std::optional<at::Tensor>() : std::optional<at::Tensor>(slots[slot].toTensor()));
      }
      stack.emplace_back(std::move(made));
    }
  }
}

// An undefined tensor is None to Python, and so to whatever takes it next.
IValue kept(IValue result) { return result.isTensor() && !result.toTensor().defined() ? IValue() : std::move(result); }

void run_call(const Instruction& todo, std::vector<IValue>& slots, Stack& stack) {
  stack.clear();
  for (const auto& argument : todo.arguments) push(argument, slots, stack);
  todo.target->callBoxed(stack);
  const auto& into = todo.slots;
  // Several results, or one that is a list of them.
  if (stack.size() == 1 && stack[0].isTensorList()) {
    auto items = stack[0].toTensorVector();
    for (size_t place = 0; place < into.size(); ++place) {
      if (into[place] >= 0) slots[into[place]] = kept(IValue(items.at(place)));
    }
  } else {
    for (size_t place = 0; place < into.size(); ++place) {
      if (into[place] >= 0) slots[into[place]] = kept(std::move(stack.at(place)));
    }
  }
  stack.clear();
}

// As assert_size_stride does in code that Inductor wrote: before that code indexes memory by shapes that come from a file.
void expect(const Instruction& todo, const std::vector<IValue>& slots) {
  const at::Tensor& tensor = slots[todo.slots[0]].toTensor();
  TORCH_CHECK(tensor.sizes() == todo.size, "a region was given ", tensor.sizes(), "; expected ", at::IntArrayRef(todo.size));
  if (tensor.numel() == 0) return;
  for (size_t place = 0; place < todo.size.size(); ++place) {
    bool same = todo.size[place] == 1 || tensor.strides()[place] == todo.stride[place];
    TORCH_CHECK(same, "a region was given strides ", tensor.strides(), "; expected ", at::IntArrayRef(todo.stride));
  }
}

void run_instruction(const Instruction& todo, std::vector<IValue>& slots, Stack& stack) {
  switch (todo.kind) {
    case Kind::Call:
      return run_call(todo, slots, stack);
    case Kind::Allocate:
      slots[todo.slots[0]] = IValue(at::Tensor(at::detail::empty_strided_cpu(todo.size, todo.stride, todo.dtype)));
      return;
    case Kind::Window:
      slots[todo.slots[0]] = IValue(torch::inductor::_reinterpret_tensor(slots[todo.slots[1]].toTensor(), todo.size, todo.stride, todo.offset));
      return;
    case Kind::Same:
      slots[todo.slots[0]] = slots[todo.slots[1]];
      return;
    case Kind::Run:
      return run_kernel(todo, slots);
    case Kind::Expect:
      return expect(todo, slots);
    case Kind::Release:
      for (auto slot : todo.slots) slots[slot] = IValue();
  }
}

void wait_out(int64_t delay_ns) {
  for (const int64_t end_ns = now_ns() + delay_ns; now_ns() < end_ns;) std::this_thread::yield();
}

void run_step(Run& run, const Step& step, Stack& stack) {
  int64_t* times = run.trace.defined() ? run.trace.mutable_data_ptr<int64_t>() + step.index : nullptr;
  if (step.delay_ns > 0) wait_out(step.delay_ns);
  if (times != nullptr) times[0] = now_ns();
  for (int64_t turn = 0; turn < step.repeats; ++turn) {
    for (const auto& todo : step.instructions) run_instruction(todo, run.slots, stack);
  }
  if (times != nullptr) times[run.program.operators] = now_ns();
  if (step.records) run.raise(step.index);
  for (auto slot : step.frees) run.slots[slot] = IValue();
}

// Whether the lane has come to its end; false if its turn is over first.
bool walk_steps(Run& run, size_t lane, int64_t deadline_ns) {
  const auto& steps = run.program.lanes[lane];
  auto& place = run.places[lane];
  int width = at::get_num_threads();
  Stack stack;
  for (const size_t first = place.step; place.step < steps.size(); ++place.step) {
    const Step& step = steps[place.step];
    for (auto producer : step.waits) {
      auto waited = await(run, producer, deadline_ns, true);
      if (waited != Waited::Up) return waited == Waited::Stopped;
    }
    if (run.stopped.load(std::memory_order_relaxed)) return true;
    if (place.step > first && now_ns() > deadline_ns) return false;
    if (step.width != width) at::set_num_threads(width = step.width);
    run_step(run, step, stack);
  }
  return true;
}

// One turn of one lane; whether it is the last. The first lane ends after all others.
bool walk_turn(Run& run, size_t lane) {
  const int64_t deadline_ns = now_ns() + kTurnNs;
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

// ---- What Python sees --------------------------------------------------------------------------------------------------------------

template <typename T>
T& at_address(const IValue& address) {
  TORCH_CHECK(address.toInt() != 0, "a native program or run was used after its end");
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

void begin(const c10::OperatorHandle&, Stack* stack) {
  auto given = taken(*stack, 3);
  stack->push_back(address_of(begin_run(at_address<Program>(given[0]), given[1].toTensorList(), given[2])));
}

void walk(const c10::OperatorHandle&, Stack* stack) {
  auto given = taken(*stack, 2);
  auto& run = at_address<Run>(given[0]);
  bool ended = true;
  if (run.enter()) {
    ended = walk_turn(run, given[1].toInt());
    run.leave();
  }
  stack->push_back(IValue(ended));
}

void finish(const c10::OperatorHandle&, Stack* stack) {
  auto given = taken(*stack, 1);
  stack->push_back(IValue(finish_run(at_address<Run>(given[0]))));
}

// All of a run on the calling thread, if it is over within a turn; else the run, to be walked on.
void run_alone(const c10::OperatorHandle&, Stack* stack) {
  auto given = taken(*stack, 3);
  auto run = begin_run(at_address<Program>(given[0]), given[1].toTensorList(), given[2]);
  bool ended = walk_turn(*run, 0);
  stack->push_back(ended ? IValue(finish_run(*run)) : IValue(c10::List<at::Tensor>()));
  stack->push_back(ended ? IValue(int64_t{0}) : address_of(std::move(run)));
}

void stop(const c10::OperatorHandle&, Stack* stack) {
  auto given = taken(*stack, 1);
  at_address<Run>(given[0]).stop(nullptr);
}

void abandon(const c10::OperatorHandle&, Stack* stack) {
  auto given = taken(*stack, 1);
  at_address<Run>(given[0]).abandon();
}

void delete_run(const c10::OperatorHandle&, Stack* stack) {
  auto given = taken(*stack, 1);
  delete &at_address<Run>(given[0]);
}

void delete_program(const c10::OperatorHandle&, Stack* stack) {
  auto given = taken(*stack, 1);
  delete &at_address<Program>(given[0]);
}

}  // namespace

TORCH_LIBRARY(autosched_lanes, library) {
  using torch::CppFunction;
  library.def("compile(int[] code, float[] reals, str[] texts, Tensor[] dtypes, Tensor[] constants) -> int", CppFunction::makeFromBoxedFunction<&compile>());
  library.def("begin(int program, Tensor[] inputs, Tensor? trace) -> int", CppFunction::makeFromBoxedFunction<&begin>());
  library.def("walk(int run, int lane) -> bool", CppFunction::makeFromBoxedFunction<&walk>());
  library.def("finish(int run) -> Tensor[]", CppFunction::makeFromBoxedFunction<&finish>());
  library.def("run_alone(int program, Tensor[] inputs, Tensor? trace) -> (Tensor[], int)", CppFunction::makeFromBoxedFunction<&run_alone>());
  library.def("stop(int run) -> ()", CppFunction::makeFromBoxedFunction<&stop>());
  library.def("abandon(int run) -> ()", CppFunction::makeFromBoxedFunction<&abandon>());
  library.def("delete_run(int run) -> ()", CppFunction::makeFromBoxedFunction<&delete_run>());
  library.def("delete_program(int program) -> ()", CppFunction::makeFromBoxedFunction<&delete_program>());
}
