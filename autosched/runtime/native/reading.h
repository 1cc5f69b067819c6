// A program from the numbers and tables that code.py writes.
#pragma once

#include "program.h"

#include <ATen/EmptyTensor.h>

#include <algorithm>
#include <memory>
#include <string>

namespace {

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
  if (made.kind == Kind::Run) {
    for (const auto address : reader.many()) made.fixed.push_back(reinterpret_cast<void*>(address));
    TORCH_CHECK(made.slots.size() + made.fixed.size() <= kMostPointers, "a kernel takes more than ", kMostPointers, " tensors");
  }
  if (made.kind == Kind::Allocate || made.kind == Kind::Window || made.kind == Kind::Expect) {
    made.size = reader.many();
    made.stride = reader.many();
    if (made.kind == Kind::Allocate) made.dtype = reader.dtype();
    if (made.kind == Kind::Expect && reader.next() != 0) made.dtype = reader.dtype();
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

Lane read_lane(Reader& reader) {
  Lane made;
  for (int64_t count = reader.next(); count > 0; --count) made.push_back(read_step(reader));
  return made;
}

std::unique_ptr<Program> read_program(Reader& reader, const std::vector<at::Tensor>& constants) {
  auto made = std::make_unique<Program>();
  made->slots = reader.next();
  made->operators = reader.next();
  made->spin_ns = reader.next();
  made->team = reader.next();
  made->inputs = reader.many();
  made->outputs = reader.many();
  auto filled = reader.many();
  TORCH_CHECK(filled.size() == constants.size(), "a native program has ", constants.size(), " constants for ", filled.size(), " slots");
  for (size_t place = 0; place < filled.size(); ++place) made->constants.emplace_back(filled[place], IValue(constants[place]));
  made->phases.resize(reader.next());
  for (auto& phase : made->phases) {
    phase.resize(reader.next());
    for (auto& lane : phase) lane = read_lane(reader);
  }
  TORCH_CHECK(reader.ended(), "the code of a native program goes on after its end");
  return made;
}

}  // namespace
