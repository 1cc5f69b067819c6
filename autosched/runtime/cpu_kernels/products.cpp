// What other kernels are made of; and what Python asks of the library as a whole.

#include "entries.h"
#include "products.h"
#include "scratch.h"

#include <new>

namespace {

template <bool Turned>
void blocks(int64_t count, const Rows& rows, const float* weights, int64_t channels, int64_t width, const End& end) {
  width == kBlock ? block<Floats, 2, Turned>(count, rows, weights, channels, end) : block<Floats, 1, Turned>(count, rows, weights, channels, end);
}

thread_local Scratch scratch;

}  // namespace

extern "C" {

float* autosched_scratch(int64_t count) { return scratch.of(count); }

void autosched_product(int64_t count, const Rows& rows, const float* weights, int64_t channels, int64_t width, const End& end) {
  rows.turned ? blocks<true>(count, rows, weights, channels, width, end) : blocks<false>(count, rows, weights, channels, width, end);
}

AUTOSCHED_KERNEL int64_t autosched_vector_lanes() { return kLanes; }

// For callers that no exception may reach: calls a kernel, and says whether there was memory for what it works in. Pointers behind
// its own it never looks at, as in native/operators.h.
AUTOSCHED_KERNEL int64_t autosched_call(
    void (*kernel)(void*, void*, void*, void*, void*, void*, void*), void* one, void* two, void* three, void* four, void* five, void* six,
    void* seven) {
  try {
    kernel(one, two, three, four, five, six, seven);
  } catch (const std::bad_alloc&) {
    return 0;
  }
  return 1;
}

}
