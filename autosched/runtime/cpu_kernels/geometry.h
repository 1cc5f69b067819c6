// What Python hands over beside addresses: whole numbers.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace {

// So many as ``T`` has.
template <typename T>
T read(const int64_t* numbers) {
  static_assert(std::is_trivially_copyable_v<T> && sizeof(T) % sizeof(int64_t) == 0);
  T made;
  std::memcpy(&made, numbers, sizeof(made));
  return made;
}

// The float of those bits.
float number_of(int64_t bits) {
  const auto low = static_cast<uint32_t>(bits);
  float made;
  std::memcpy(&made, &low, sizeof(made));
  return made;
}

// Of ``taps`` that are ``apart``, the first of them at pixel ``from``: those that lie inside of ``size`` pixels.
struct Inside {
  Inside(int64_t from, int64_t size, int64_t taps, int64_t apart)
      : begin(from >= 0 ? 0 : (-from + apart - 1) / apart), end(std::min(taps, from >= size ? 0 : (size - from + apart - 1) / apart)) {}
  int64_t begin, end;
};

}  // namespace
