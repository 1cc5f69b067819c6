// Whether words in memory, and where tensors lie and how often they were changed, are what they were when they were looked at first.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/TensorImpl.h>
#include <c10/util/DimVector.h>

#include <cstdint>
#include <vector>

namespace {

struct Word {
  const uint64_t* place;
  uint64_t was;
};

std::vector<Word> words_at(const std::vector<int64_t>& addresses) {
  std::vector<Word> found;
  found.reserve(addresses.size());
  for (auto address : addresses) {
    auto* place = reinterpret_cast<const uint64_t*>(address);
    found.push_back({place, *place});
  }
  return found;
}

// Tensors are neither held nor referred to weakly: PyTorch swaps no two tensors of which somebody else does either. The object in Python
// is held by whoever watches, and one of the words says whether it still stands for the same tensor.
struct Placed {
  explicit Placed(const at::Tensor& given)
      : tensor(given.unsafeGetTensorImpl()), storage(given.storage()), data(storage.data()), offset(given.storage_offset()),
        sizes(given.sizes()), strides(given.strides()) {}

  bool moved() const {
    return tensor->unsafe_storage().unsafeGetStorageImpl() != storage.unsafeGetStorageImpl() || storage.data() != data ||
        tensor->storage_offset() != offset || tensor->sizes() != c10::IntArrayRef(sizes) || tensor->strides() != c10::IntArrayRef(strides);
  }

  const c10::TensorImpl* tensor;
  c10::Storage storage;  // its memory may not become another's
  const void* data;
  int64_t offset;
  c10::DimVector sizes, strides;
};

struct Counted {
  explicit Counted(const at::Tensor& given) : tensor(given.unsafeGetTensorImpl()), version(now()) {}

  uint32_t now() const { return tensor->version_counter().current_version(); }

  const c10::TensorImpl* tensor;
  uint32_t version;
};

struct Watch {
  Watch(const std::vector<int64_t>& addresses, const std::vector<at::Tensor>& in_memory, const std::vector<at::Tensor>& versioned,
        const std::vector<int64_t>& inner_addresses)
      : words(words_at(addresses)), placed(in_memory.begin(), in_memory.end()), counted(versioned.begin(), versioned.end()),
        inner(words_at(inner_addresses)) {}

  // With the interpreter's lock, so that no tensor is another's between two reads. Of the reads of one loop none waits for another: where
  // none of this is in the caches, a core has a dozen under way at a time.
  bool unchanged() const {
    uint64_t different = 0;
    for (const auto& word : words) different |= *word.place ^ word.was;
    if (different != 0) return false;
    for (const auto& each : placed) different |= each.moved();
    for (const auto& each : counted) different |= each.now() != each.version;
    // These may be gone where any of the others is another one.
    if (different != 0) return false;
    for (const auto& word : inner) different |= *word.place ^ word.was;
    return different == 0;
  }

  std::vector<Word> words;
  std::vector<Placed> placed;
  std::vector<Counted> counted;
  std::vector<Word> inner;
};

}  // namespace
