// What a step does: calls through PyTorch's dispatcher, and the kernels that Inductor wrote.
#pragma once

#include "program.h"

#include <algorithm>

#include <ATen/EmptyTensor.h>
#include <torch/csrc/inductor/inductor_ops.h>

namespace {

template <size_t... Places>
void call_with(void* function, void** pointers, std::index_sequence<Places...>) {
  reinterpret_cast<void (*)(decltype(static_cast<void>(Places), static_cast<void*>(nullptr))...)>(function)(pointers[Places]...);
}

using Caller = void (*)(void*, void**);

template <size_t Count>
void call_given(void* function, void** pointers) {
  call_with(function, pointers, std::make_index_sequence<Count>());
}

template <size_t... Counts>
std::vector<Caller> make_callers(std::index_sequence<Counts...>) {
  return {call_given<Counts>...};
}

// For more than these, which the tables of a recommender's embeddings make, there is not a function for each number: a kernel is given some
// null pointers behind its own. It never looks at them, and its caller is who takes arguments off the stack in every calling convention
// that these lanes run under (System V x86-64, section 3.2.3; AArch64 procedure call standard, section 6.8).
constexpr size_t kExactPointers = 128;
constexpr size_t kManyPointers = 256;

void run_kernel(const Instruction& todo, std::vector<IValue>& slots) {
  static const std::vector<Caller> callers = make_callers(std::make_index_sequence<kExactPointers + 1>());
  void* pointers[kMostPointers];
  const size_t given = todo.slots.size(), count = given + todo.fixed.size();
  for (size_t place = 0; place < given; ++place) pointers[place] = slots[todo.slots[place]].toTensor().mutable_data_ptr();
  std::copy(todo.fixed.begin(), todo.fixed.end(), pointers + given);
  if (count <= kExactPointers) return callers[count](todo.function, pointers);
  std::fill(pointers + count, pointers + kMostPointers, nullptr);
  (count <= kManyPointers ? call_given<kManyPointers> : call_given<kMostPointers>)(todo.function, pointers);
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

// As assert_size_stride and assert_tensor_metadata do in code that Inductor wrote: before that code indexes memory by shapes that come
// from a file. Of what an operator made the dtype is looked at, too, and it may be nothing at all.
void expect(const Instruction& todo, const std::vector<IValue>& slots) {
  if (todo.dtype.has_value()) {
    if (slots[todo.slots[0]].isNone()) return;
    auto dtype = slots[todo.slots[0]].toTensor().scalar_type();
    TORCH_CHECK(dtype == *todo.dtype, "a region was given ", dtype, "; expected ", *todo.dtype);
  }
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
      slots[todo.slots[0]] = IValue(at::Tensor(at::detail::empty_strided_cpu(todo.size, todo.stride, *todo.dtype)));
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

}  // namespace
