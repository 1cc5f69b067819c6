// Device memory: pieces of one reserved range of host addresses, full of NaN when allocated (of large ones the beginning), or of zeros where
// nothing is computed; unreadable again when freed.
#include "core.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

namespace emu {
namespace {

constexpr size_t ARENA_BYTES = size_t(4) << 40;  // addresses only: never handed out twice, so a late use is always seen
constexpr size_t PAGE = 2 << 20;                 // cudaMalloc's granularity
constexpr size_t FILLED_BYTES = 32 << 20;        // of one piece: a test that takes all memory of the device must not take the host's

struct Arena {
    char* start = nullptr;
    char* next = nullptr;
    size_t used = 0;
    size_t total = size_t(32) << 30;
    std::map<uintptr_t, size_t> live;
    std::map<uintptr_t, int> device;
    std::map<uintptr_t, size_t> pinned;
    std::map<uintptr_t, bool> pinned_owned;

    Arena() {
        if (const char* text = getenv("EMULATED_CUDA_MEMORY_BYTES")) total = strtoull(text, nullptr, 10);
        void* range = mmap(nullptr, ARENA_BYTES, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (range != MAP_FAILED) start = next = static_cast<char*>(range);
    }
};

Arena& arena() {
    static Arena* one = new Arena;
    return *one;
}

// A GPU's memory holds what was there before. All bits set are NaN in every floating type, and -1 in every integer.
bool left_over() {
    static const bool found = [] {
        const char* values = getenv("EMULATED_CUDA_VALUES");
        return !values || strcmp(values, "zeros");
    }();
    return found;
}

const std::pair<const uintptr_t, size_t>* covering(const std::map<uintptr_t, size_t>& ranges, uintptr_t address) {
    auto found = ranges.upper_bound(address);
    if (found == ranges.begin()) return nullptr;
    --found;
    return address < found->first + (found->second ? found->second : 1) ? &*found : nullptr;
}

}  // namespace

int allocate(void** out, size_t bytes) {
    if (int code = health()) return code;
    if (!out) return CUDA_ERROR_INVALID_VALUE;
    std::lock_guard<std::recursive_mutex> held(world().lock);
    if (int code = unsafe_call()) return code;
    Arena& a = arena();
    *out = nullptr;
    if (!bytes) return 0;
    size_t whole = (bytes + PAGE - 1) / PAGE * PAGE;
    if (!a.start || whole > a.total - a.used || whole > size_t(a.start + ARENA_BYTES - a.next)) return CUDA_ERROR_OUT_OF_MEMORY;
    if (mprotect(a.next, whole, PROT_READ | PROT_WRITE)) return CUDA_ERROR_OUT_OF_MEMORY;
    madvise(a.next, whole, MADV_NOHUGEPAGE);
    if (left_over()) memset(a.next, 0xff, std::min(whole, FILLED_BYTES));
    *out = a.next;
    a.live[reinterpret_cast<uintptr_t>(a.next)] = whole;
    a.device[reinterpret_cast<uintptr_t>(a.next)] = current_device();
    a.next += whole;
    a.used += whole;
    return 0;
}

int release(void* address) {
    if (!address) return 0;
    if (int code = health()) return code;
    if (late() && world().captures.empty()) happen_all();
    std::lock_guard<std::recursive_mutex> held(world().lock);
    if (int code = unsafe_call()) return code;
    Arena& a = arena();
    auto found = a.live.find(reinterpret_cast<uintptr_t>(address));
    if (found == a.live.end()) return CUDA_ERROR_INVALID_VALUE;
    madvise(address, found->second, MADV_DONTNEED);
    mprotect(address, found->second, PROT_NONE);
    a.used -= found->second;
    a.device.erase(found->first);
    a.live.erase(found);
    World& w = world();  // freeing waits for the device
    for (Stream* stream : w.streams) w.host_ns = std::max(w.host_ns, stream->clock_ns);
    return 0;
}

int device_of(const void* address) {
    auto* found = covering(arena().live, reinterpret_cast<uintptr_t>(address));
    return found ? arena().device[found->first] : current_device();
}

int allocate_pinned(void** out, size_t bytes) {
    if (int code = health()) return code;
    std::lock_guard<std::recursive_mutex> held(world().lock);
    if (int code = unsafe_call()) return code;
    void* made = nullptr;
    if (posix_memalign(&made, 4096, bytes ? bytes : 1)) return CUDA_ERROR_OUT_OF_MEMORY;
    memset(made, 0, bytes);
    arena().pinned[reinterpret_cast<uintptr_t>(made)] = bytes;
    arena().pinned_owned[reinterpret_cast<uintptr_t>(made)] = true;
    *out = made;
    return 0;
}

int release_pinned(void* address) {
    if (!address) return 0;
    std::lock_guard<std::recursive_mutex> held(world().lock);
    if (int code = unsafe_call()) return code;
    auto at = reinterpret_cast<uintptr_t>(address);
    if (!arena().pinned.count(at) || !arena().pinned_owned[at]) return CUDA_ERROR_INVALID_VALUE;
    arena().pinned.erase(at);
    arena().pinned_owned.erase(at);
    free(address);
    return 0;
}

int register_pinned(void* address, size_t bytes) {
    std::lock_guard<std::recursive_mutex> held(world().lock);
    if (int code = unsafe_call()) return code;
    auto at = reinterpret_cast<uintptr_t>(address);
    if (!address || !bytes) return CUDA_ERROR_INVALID_VALUE;
    if (covering(arena().pinned, at)) return CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
    arena().pinned[at] = bytes;
    arena().pinned_owned[at] = false;
    return 0;
}

int unregister_pinned(void* address) {
    std::lock_guard<std::recursive_mutex> held(world().lock);
    auto at = reinterpret_cast<uintptr_t>(address);
    if (!arena().pinned.count(at) || arena().pinned_owned[at]) return CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
    arena().pinned.erase(at);
    arena().pinned_owned.erase(at);
    return 0;
}

void memory_info(size_t* free_bytes, size_t* total_bytes) {
    std::lock_guard<std::recursive_mutex> held(world().lock);
    if (total_bytes) *total_bytes = arena().total;
    if (free_bytes) *free_bytes = arena().total - arena().used;
}

Memory kind_of(const void* address, size_t bytes, void** base, size_t* size) {
    Arena& a = arena();
    auto at = reinterpret_cast<uintptr_t>(address);
    auto first = reinterpret_cast<uintptr_t>(a.start);
    if (a.start && at >= first && at < first + ARENA_BYTES) {
        auto* found = covering(a.live, at);
        if (!found || at + bytes > found->first + found->second) return Memory::FREED;
        if (base) *base = reinterpret_cast<void*>(found->first);
        if (size) *size = found->second;
        return Memory::DEVICE;
    }
    auto* found = covering(a.pinned, at);
    if (!found) return Memory::PAGEABLE;
    if (base) *base = reinterpret_cast<void*>(found->first);
    if (size) *size = found->second;
    return Memory::PINNED;
}

namespace {

// Outside the lock, when the copy happens: an address that is no longer allocated breaks the device, as on a GPU.
bool reachable(const void* address, size_t bytes) {
    std::lock_guard<std::recursive_mutex> held(world().lock);
    if (kind_of(address, bytes) != Memory::FREED) return true;
    world().sticky = CUDA_ERROR_ILLEGAL_ADDRESS;
    return false;
}

// Without values nothing is ever written to the device, so that whatever comes from there is zero.
bool stays_zero(const void* address) {
    static const bool without = getenv("EMULATED_CUDA_VALUES") && !strcmp(getenv("EMULATED_CUDA_VALUES"), "zeros");
    if (!without) return false;
    std::lock_guard<std::recursive_mutex> held(world().lock);
    return kind_of(address, 1) == Memory::DEVICE;
}

}  // namespace

int copy_now(void* to, const void* from, size_t bytes) {
    if (!bytes) return 0;
    if (!reachable(to, bytes) || !reachable(from, bytes)) return CUDA_ERROR_ILLEGAL_ADDRESS;
    if (stays_zero(to)) return 0;
    memmove(to, from, bytes);
    return 0;
}

int fill_now(void* to, unsigned value, size_t width, size_t count) {
    if (!count) return 0;
    if (!reachable(to, width * count)) return CUDA_ERROR_ILLEGAL_ADDRESS;
    if (stays_zero(to)) return 0;
    if (width == 1) {
        memset(to, int(value), count);
    } else {
        for (size_t i = 0; i < count; ++i) memcpy(static_cast<char*>(to) + i * width, &value, width);
    }
    return 0;
}

double copy_ns(const void* to, const void* from, size_t bytes) {
    bool inside = kind_of(to, 1) == Memory::DEVICE && kind_of(from, 1) == Memory::DEVICE;
    return 3000.0 + double(bytes) / (inside ? 2000.0 : 25.0);
}

int memory_copy(Stream* stream, void* to, const void* from, size_t bytes, bool host_waits) {
    Operation operation;
    operation.kind = CU_GRAPH_NODE_TYPE_MEMCPY;
    {
        std::lock_guard<std::recursive_mutex> held(world().lock);
        operation.duration_ns = copy_ns(to, from, bytes);
        // From or to memory that is not pinned, the call returns when the copy is done (to it: when it is staged).
        operation.host_waits = host_waits || kind_of(to, 1) == Memory::PAGEABLE;
    }
    operation.effect = [=] { return copy_now(to, from, bytes); };
    if (late() && stream && !stream->capture && kind_of(from, 1) == Memory::PAGEABLE) {
        auto staged = std::make_shared<std::vector<char>>(static_cast<const char*>(from), static_cast<const char*>(from) + bytes);
        operation.effect = [=] { return copy_now(to, staged->data(), bytes); };
    }
    return enqueue(stream, std::move(operation));
}

int memory_copy_2d(Stream* stream, void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width, size_t height) {
    Operation operation;
    operation.kind = CU_GRAPH_NODE_TYPE_MEMCPY;
    {
        std::lock_guard<std::recursive_mutex> held(world().lock);
        operation.duration_ns = copy_ns(to, from, width * height);
    }
    operation.effect = [=] {
        for (size_t row = 0; row < height; ++row) {
            int code = copy_now(static_cast<char*>(to) + row * to_pitch, static_cast<const char*>(from) + row * from_pitch, width);
            if (code) return code;
        }
        return 0;
    };
    return enqueue(stream, std::move(operation));
}

int memory_fill(Stream* stream, void* to, unsigned value, size_t width, size_t count) {
    Operation operation;
    operation.kind = CU_GRAPH_NODE_TYPE_MEMSET;
    operation.duration_ns = 2000.0 + double(width * count) / 3000.0;
    operation.effect = [=] { return fill_now(to, value, width, count); };
    return enqueue(stream, std::move(operation));
}

}  // namespace emu
