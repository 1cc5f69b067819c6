// Products in sixteen and in eight bits.

#include "byte_products.h"
#include "entries.h"
#include "half_products.h"

extern "C" {

// Whether weights in bfloat16 are laid out in pairs of channels.
AUTOSCHED_KERNEL int64_t autosched_pairs() { return kInPairs<OfBfloat16> ? 1 : 0; }

// Whether products in bfloat16 are computed by tiles, where channels fill them.
AUTOSCHED_KERNEL int64_t autosched_tiles() {
#if defined(AUTOSCHED_TILES)
  return may_use_tiles() ? 1 : 0;
#else
  return 0;
#endif
}

// Whether there are products in eight bits.
AUTOSCHED_KERNEL int64_t autosched_has_bytes() {
#if defined(AUTOSCHED_BYTES)
  return 1;
#else
  return 0;
#endif
}

AUTOSCHED_KERNEL void autosched_halves(const Half* source, Half* made, const Half* weights, const int64_t* numbers) {
  multiply_halves(source, made, nullptr, weights, numbers);
}

AUTOSCHED_KERNEL void autosched_halves_bias(
    const Half* source, Half* made, const Half* bias, const Half* weights, const int64_t* numbers) {
  multiply_halves(source, made, bias, weights, numbers);
}

AUTOSCHED_KERNEL void autosched_bytes0(const int8_t* source, void* made, const Half* weights, const int64_t* numbers) {
  multiply_bytes(source, made, nullptr, weights, numbers);
}

AUTOSCHED_KERNEL void autosched_bytes1(
    const int8_t* source, void* made, const void* one, const Half* weights, const int64_t* numbers) {
  const void* const beside[] = {one};
  multiply_bytes(source, made, beside, weights, numbers);
}

AUTOSCHED_KERNEL void autosched_bytes2(
    const int8_t* source, void* made, const void* one, const void* two, const Half* weights, const int64_t* numbers) {
  const void* const beside[] = {one, two};
  multiply_bytes(source, made, beside, weights, numbers);
}

AUTOSCHED_KERNEL void autosched_bytes3(
    const int8_t* source, void* made, const void* one, const void* two, const void* three, const Half* weights, const int64_t* numbers) {
  const void* const beside[] = {one, two, three};
  multiply_bytes(source, made, beside, weights, numbers);
}

}
