// The emulated device: one object model that the runtime's face, the driver's face and the library stubs share.
//
// Handles are the addresses of these objects, so a stream made by the runtime is a valid stream for the driver, as in CUDA.
// Errors are the numbers of CUresult; cudaError_t has the same numbers for all that are used here.
// Time is virtual, in nanoseconds: every queue has a clock, and so has the host. Nothing here measures anything.
#pragma once

#include <cuda.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <unordered_set>
#include <vector>

namespace __attribute__((visibility("default"))) emu {

using Effect = std::function<int()>;  // what really happens on the host's memory; returns an error number

constexpr int ANY_DEVICE = -1;  // the legacy streams, which are one for all devices here

struct Graph;
struct Stream;
struct Event;

struct Function {
    std::string name;
    std::map<int, int> attributes;  // set by cuFuncSetAttribute
    int registers = 32;
    int static_shared = 0;
    int max_dynamic_shared = 48 * 1024;
    bool of_library = false;         // a CUkernel: graphs show it as one, and calls that want a CUfunction refuse it
    Function* in_context = nullptr;  // its CUfunction, when asked for
};

struct Launch {
    Function* function = nullptr;
    unsigned grid[3] = {1, 1, 1};
    unsigned block[3] = {1, 1, 1};
    unsigned shared = 0;
    unsigned cluster[3] = {0, 0, 0};  // zeros: launched without
    bool cooperative = false;
    bool early = false;  // may start before the kernel before it in its stream has ended
};

struct Node {
    CUgraphNodeType kind = CU_GRAPH_NODE_TYPE_EMPTY;
    Graph* graph = nullptr;
    uint64_t id = 0;
    std::vector<Node*> before;
    double duration_ns = 0;
    int priority = 0;
    Launch launch;
    std::vector<Effect> effects;
    Event* event = nullptr;                 // of an event node
    std::shared_ptr<struct Recorded> mark;  // the event's state, which outlives the event
};

struct Graph {
    uint64_t id = 0;
    std::vector<std::unique_ptr<Node>> nodes;  // in the order of creation, which is topological
    Node* add(CUgraphNodeType kind, std::vector<Node*> before);
};

struct Executable {
    std::unique_ptr<Graph> graph;  // a copy: later edits of the original do not reach it
    double free_at_ns = 0;         // a graph never overlaps itself
    Stream* last_on = nullptr;     // late: its last launch
    uint64_t last_position = 0;
};

enum class CaptureState { ACTIVE, INVALID, ENDED };

struct Capture {
    uint64_t id = 0;
    std::unique_ptr<Graph> graph;
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
    std::thread::id thread;
    CaptureState state = CaptureState::ACTIVE;
    Stream* origin = nullptr;
    std::vector<Stream*> streams;
};

using Clock = std::map<Stream*, uint64_t>;  // which part of each stream's work is known to come before

struct Stream {
    uint64_t id = 0;
    int device = ANY_DEVICE;
    bool non_blocking = false;
    bool legacy = false;
    int priority = 0;
    double clock_ns = 0;
    std::shared_ptr<Capture> capture;
    std::vector<Node*> frontier;
    Clock known;          // in a capture
    uint64_t version = 0;  // rises with every captured operation
    std::deque<Effect> pending;         // late: what has been enqueued and not happened yet
    uint64_t enqueued = 0, happened = 0;  // late: how many ever
};

// What an event stands for since it was recorded last.
struct Recorded {
    bool ever = false;
    double time_ns = 0;
    Stream* stream = nullptr;  // late: happened when so much of this stream has
    uint64_t position = 0;
    std::shared_ptr<Capture> capture;  // null if recorded outside captures
    std::vector<Node*> nodes;
    Clock known;
};

struct Event {
    bool timing = true;
    int device = ANY_DEVICE;
    std::shared_ptr<Recorded> mark = std::make_shared<Recorded>();
};

struct Operation {
    CUgraphNodeType kind = CU_GRAPH_NODE_TYPE_EMPTY;
    double duration_ns = 0;
    bool host_waits = false;  // the call returns when it is done
    Launch launch;
    Effect effect;
    Event* event = nullptr;
};

// One lock for everything. Effects run after it is released: they may call back into Python.
struct World {
    std::recursive_mutex lock;
    double host_ns = 0;
    int sticky = 0;  // an error that only a new process cures
    bool forked = false;
    uint64_t contexts = 0;  // a bit for each device that has its primary context
    Stream legacy;
    Stream per_thread;
    std::unordered_set<Stream*> streams;
    std::unordered_set<Event*> events;
    std::unordered_set<Graph*> graphs;
    std::unordered_set<Executable*> executables;
    std::unordered_set<Node*> nodes;
    std::vector<std::shared_ptr<Capture>> captures;  // under way, or invalid and not ended
    std::unordered_map<uint64_t, std::unique_ptr<Function>> by_entry;  // runtime: address of the host's stub
    uint64_t next_id = 1;
    World();
};

World& world();
extern thread_local CUcontext current_context;
CUcontext primary_context(int device);
int device_count();           // EMULATED_CUDA_DEVICES, less what CUDA_VISIBLE_DEVICES hides
int physical(int device);     // which of those made a visible one is
int current_device();
int wrong_device(int device);  // the error of using what belongs to another device than the current one
void activate();              // as any runtime call that needs a device does
int health();                 // sticky errors, a forked child
void trace(const char* name, int result);

// memory.cpp
enum class Memory { DEVICE, PINNED, PAGEABLE, FREED };
int allocate(void** out, size_t bytes);
int release(void* address);
int allocate_pinned(void** out, size_t bytes);
int release_pinned(void* address);
int register_pinned(void* address, size_t bytes);
int unregister_pinned(void* address);
void memory_info(size_t* free_bytes, size_t* total_bytes);
Memory kind_of(const void* address, size_t bytes, void** base = nullptr, size_t* size = nullptr);
int device_of(const void* address);  // of memory of a device; else the current one
int copy_now(void* to, const void* from, size_t bytes);
int fill_now(void* to, unsigned value, size_t width, size_t count);
double copy_ns(const void* to, const void* from, size_t bytes);
int memory_copy(Stream* stream, void* to, const void* from, size_t bytes, bool host_waits);
int memory_copy_2d(Stream* stream, void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width, size_t height);
int memory_fill(Stream* stream, void* to, unsigned value, size_t width, size_t count);

// streams.cpp
Stream* stream_of(const void* handle);  // null for an invalid handle
int stream_create(Stream** out, unsigned flags, int priority);
int stream_destroy(Stream* stream);
int stream_synchronize(Stream* stream);
int stream_query(Stream* stream);
int stream_wait(Stream* stream, Event* event, unsigned flags);
int device_synchronize();
int event_create(Event** out, unsigned flags);
int event_destroy(Event* event);
int event_record(Event* event, Stream* stream, unsigned flags);
int event_query(Event* event);
int event_synchronize(Event* event);
int event_elapsed(float* out_ms, Event* start, Event* end);
int enqueue(Stream* stream, Operation operation);
int attach(Stream* stream, Effect effect);  // to what was enqueued last
bool late();                                // whether what is enqueued happens as late as its order allows, and not at once
void put_off(Stream* stream, Effect effect);
void put_off_wait(Stream* stream, Stream* other, uint64_t position);
int happen(Stream* stream, uint64_t position);  // without the lock: everything of a stream up to there
int happen_all();

// capture.cpp; all but `unsafe_call` are called with the lock held
int unsafe_call();
int exchange_mode(CUstreamCaptureMode* mode);
int capture_begin(Stream* stream, CUstreamCaptureMode mode, Graph* into);
int capture_end(Stream* stream, Graph** out);
int capture_status(Stream* stream, CUstreamCaptureStatus* status);
void invalidate(Capture& capture);
int join_capture(Stream* stream, const Recorded& mark);
int capture_operation(Stream* stream, Operation& operation);
int legacy_use(Stream* stream);
bool prohibited();

// graphs.cpp
int graph_instantiate(Executable** out, Graph* graph);
int graph_launch(Executable* executable, Stream* stream);
int graph_dot(Graph* graph, const char* path);
std::unique_ptr<Graph> graph_copy(const Graph& graph);
void adopt(Graph* graph);
void forget(Graph* graph);

// kernels.cpp
int device_attribute(int number, int device);
const char* device_name(int device);
int launch_kernel(Stream* stream, Launch launch, void** arguments);
int launch_library(Stream* stream, const char* name, double work, unsigned blocks, unsigned threads, unsigned shared);
int function_attribute(const Function& function, int number);
int resident_blocks(const Function& function, int threads, size_t dynamic_shared);

}  // namespace emu
