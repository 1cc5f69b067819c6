// Streams and events: queues with a virtual clock each. What is enqueued happens at once on the host's memory, or, late, when something waits for it.
#include "core.h"

#include <dlfcn.h>
#include <pthread.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace emu {
namespace {

constexpr double CALL_NS = 2000;     // the host's time for one call that enqueues
constexpr double LATENCY_NS = 2000;  // from the call to the start on an idle device
constexpr double QUERY_NS = 1000;

double start_on(World& w, Stream* stream) {
    double start = std::max(stream->clock_ns, w.host_ns + LATENCY_NS);
    if (stream->legacy) {
        for (Stream* other : w.streams) {
            if (!other->non_blocking) start = std::max(start, other->clock_ns);
        }
    } else if (!stream->non_blocking) {
        start = std::max(start, w.legacy.clock_ns);
    }
    return start;
}

void wait_for(World& w, double time_ns) { w.host_ns = std::max(w.host_ns, time_ns) + QUERY_NS; }

}  // namespace

thread_local CUcontext current_context = nullptr;

World::World() {
    legacy.legacy = true;
    streams = {&legacy, &per_thread};
    pthread_atfork(nullptr, nullptr, [] {
        World& w = world();
        w.forked = w.contexts != 0;
    });
}

World& world() {
    static World* one = new World;  // never destroyed: threads may still call at exit
    return *one;
}

CUcontext primary_context(int device) { return reinterpret_cast<CUcontext>(reinterpret_cast<char*>(&world()) + device); }

// Read once, as CUDA does.
static const std::vector<int>& visible() {
    static const std::vector<int> found = [] {
        const int made = getenv("EMULATED_CUDA_DEVICES") ? atoi(getenv("EMULATED_CUDA_DEVICES")) : 1;
        const char* wanted = getenv("CUDA_VISIBLE_DEVICES");
        std::vector<int> devices;
        for (int device = 0; !wanted && device < made; ++device) devices.push_back(device);
        for (const char* at = wanted; at && *at; at = strchr(at, ',') ? strchr(at, ',') + 1 : at + strlen(at)) {
            if (*at < '0' || *at > '9' || atoi(at) >= made) break;
            devices.push_back(atoi(at));
        }
        return devices;
    }();
    return found;
}

int device_count() { return int(visible().size()); }

int physical(int device) { return device >= 0 && device < device_count() ? visible()[size_t(device)] : 0; }

int current_device() {
    return current_context ? int(reinterpret_cast<char*>(current_context) - reinterpret_cast<char*>(&world())) : 0;
}

int wrong_device(int device) { return device == ANY_DEVICE || device == current_device() ? 0 : CUDA_ERROR_INVALID_HANDLE; }

void activate() {
    if (!current_context) current_context = primary_context(0);
    world().contexts |= 1ull << current_device();
}

int health() {
    if (world().forked) return CUDA_ERROR_NOT_INITIALIZED;
    return world().sticky;
}

void trace(const char* name, int result) {
    static const char* wanted = getenv("EMULATED_CUDA_TRACE");
    if (wanted && (result || *wanted == '2')) fprintf(stderr, "[emulated cuda] %s -> %d\n", name, result);
}

// Late: streams as queues of what has not happened. One thread at a time lets things happen; effects may call back into Python.
bool late() {
    static const bool found = getenv("EMULATED_CUDA_LATE") != nullptr;
    return found;
}

void put_off(Stream* stream, Effect effect) {
    stream->pending.push_back(std::move(effect));
    ++stream->enqueued;
}

void put_off_wait(Stream* stream, Stream* other, uint64_t position) {
    if (!other || other == stream || other->happened >= position) return;
    put_off(stream, [other, position] { return happen(other, position); });
}

// What streams that are not non-blocking wait for beside their own.
static void put_off_implicit_waits(World& w, Stream* stream) {
    if (stream->legacy) {
        for (Stream* other : w.streams) {
            if (!other->non_blocking) put_off_wait(stream, other, other->enqueued);
        }
    } else if (!stream->non_blocking) {
        put_off_wait(stream, &w.legacy, w.legacy.enqueued);
    }
}

// Who has the turn may need Python's lock for an effect, and so nobody may keep that while waiting for the turn.
static std::unique_lock<std::recursive_mutex> take_turn() {
    static std::recursive_mutex turn;
    static auto* has_python = reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, "PyGILState_Check"));
    static auto* leave = reinterpret_cast<void* (*)()>(dlsym(RTLD_DEFAULT, "PyEval_SaveThread"));
    static auto* enter_again = reinterpret_cast<void (*)(void*)>(dlsym(RTLD_DEFAULT, "PyEval_RestoreThread"));
    static auto* alive = reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, "Py_IsInitialized"));
    std::unique_lock<std::recursive_mutex> taken(turn, std::try_to_lock);
    if (taken.owns_lock()) return taken;
    void* state = alive && alive() && has_python && has_python() ? leave() : nullptr;
    taken.lock();
    if (state) enter_again(state);
    return taken;
}

int happen(Stream* stream, uint64_t position) {
    if (!stream) return 0;
    auto mine = take_turn();
    int code = 0;
    while (true) {
        Effect effect;
        {
            std::lock_guard<std::recursive_mutex> held(world().lock);
            if (stream->happened >= position || stream->pending.empty()) return code;
            effect = std::move(stream->pending.front());
            stream->pending.pop_front();
        }
        if (int found = effect()) code = found;
        std::lock_guard<std::recursive_mutex> held(world().lock);
        ++stream->happened;
    }
}

int happen_all() {
    std::vector<std::pair<Stream*, uint64_t>> all;
    {
        std::lock_guard<std::recursive_mutex> held(world().lock);
        for (Stream* stream : world().streams) all.push_back({stream, stream->enqueued});
    }
    for (auto& [stream, position] : all) happen(stream, position);
    return world().sticky;
}

Stream* stream_of(const void* handle) {
    World& w = world();
    auto number = reinterpret_cast<uintptr_t>(handle);
    if (number <= 1) return &w.legacy;
    if (number == 2) return &w.per_thread;
    std::lock_guard<std::recursive_mutex> held(w.lock);
    auto* stream = static_cast<Stream*>(const_cast<void*>(handle));
    return w.streams.count(stream) ? stream : nullptr;
}

int stream_create(Stream** out, unsigned flags, int priority) {
    if (int code = health()) return code;
    World& w = world();
    std::lock_guard<std::recursive_mutex> held(w.lock);
    auto* stream = new Stream;
    stream->id = w.next_id++;
    stream->device = current_device();
    stream->non_blocking = flags & CU_STREAM_NON_BLOCKING;
    stream->priority = std::max(-5, std::min(0, priority));
    w.streams.insert(stream);
    *out = stream;
    return 0;
}

int stream_destroy(Stream* stream) {
    World& w = world();
    if (!stream || stream->legacy || stream == &w.per_thread) return CUDA_ERROR_INVALID_HANDLE;
    std::lock_guard<std::recursive_mutex> held(w.lock);
    if (stream->capture) invalidate(*stream->capture);
    w.streams.erase(stream);  // the object stays: captures and events may still point to it
    return 0;
}

// What asks a stream for its state may not happen during a capture, and ends the stream's own.
static int outside_capture(Stream* stream) {
    if (stream->capture) {
        invalidate(*stream->capture);
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    }
    if (int code = legacy_use(stream)) return code;
    if (int code = unsafe_call()) return code;
    return 0;
}

int stream_synchronize(Stream* stream) {
    if (int code = health()) return code;
    if (!stream) return CUDA_ERROR_INVALID_HANDLE;
    World& w = world();
    {
        std::lock_guard<std::recursive_mutex> held(w.lock);
        if (int code = outside_capture(stream)) return code;
        wait_for(w, start_on(w, stream) - LATENCY_NS);
        if (!late()) return w.sticky;
        put_off_implicit_waits(w, stream);
    }
    happen(stream, stream->enqueued);
    return w.sticky;
}

int stream_query(Stream* stream) {
    if (int code = health()) return code;
    if (!stream) return CUDA_ERROR_INVALID_HANDLE;
    World& w = world();
    std::lock_guard<std::recursive_mutex> held(w.lock);
    if (int code = outside_capture(stream)) return code;
    w.host_ns += QUERY_NS;
    if (late()) return stream->happened == stream->enqueued ? 0 : CUDA_ERROR_NOT_READY;
    return stream->clock_ns <= w.host_ns ? 0 : CUDA_ERROR_NOT_READY;
}

int device_synchronize() {
    if (int code = health()) return code;
    World& w = world();
    if (late() && w.captures.empty()) happen_all();
    std::lock_guard<std::recursive_mutex> held(w.lock);
    bool refused = false;
    for (auto& capture : w.captures) {  // a context cannot be waited for while anything in it is being captured
        invalidate(*capture);
        refused = true;
    }
    if (refused) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    double latest = 0;
    for (Stream* stream : w.streams) latest = std::max(latest, stream->clock_ns);
    wait_for(w, latest);
    return w.sticky;
}

int stream_wait(Stream* stream, Event* event, unsigned flags) {
    if (int code = health()) return code;
    if (!stream || !event) return CUDA_ERROR_INVALID_HANDLE;
    World& w = world();
    if (flags & CU_EVENT_WAIT_EXTERNAL) {
        Operation operation;
        operation.kind = CU_GRAPH_NODE_TYPE_WAIT_EVENT;
        operation.event = event;
        return stream->capture ? enqueue(stream, std::move(operation)) : CUDA_ERROR_INVALID_VALUE;
    }
    std::lock_guard<std::recursive_mutex> held(w.lock);
    if (!w.events.count(event)) return CUDA_ERROR_INVALID_HANDLE;
    if (stream->capture && stream->capture->state == CaptureState::INVALID) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    if (event->mark->capture || stream->capture) return join_capture(stream, *event->mark);
    w.host_ns += CALL_NS / 4;
    stream->clock_ns = std::max(stream->clock_ns, event->mark->time_ns);
    if (late()) put_off_wait(stream, event->mark->stream, event->mark->position);
    return 0;
}

int event_create(Event** out, unsigned flags) {
    if (int code = health()) return code;
    World& w = world();
    std::lock_guard<std::recursive_mutex> held(w.lock);
    auto* event = new Event;
    event->timing = !(flags & CU_EVENT_DISABLE_TIMING);
    event->device = current_device();
    w.events.insert(event);
    *out = event;
    return 0;
}

int event_destroy(Event* event) {
    World& w = world();
    std::lock_guard<std::recursive_mutex> held(w.lock);
    if (!w.events.erase(event)) return CUDA_ERROR_INVALID_HANDLE;
    delete event;
    return 0;
}

int event_record(Event* event, Stream* stream, unsigned flags) {
    if (int code = health()) return code;
    World& w = world();
    if (!stream || !event) return CUDA_ERROR_INVALID_HANDLE;
    if (stream->device != ANY_DEVICE && stream->device != event->device) return CUDA_ERROR_INVALID_HANDLE;
    if (flags & CU_EVENT_RECORD_EXTERNAL) {
        if (!stream->capture) return CUDA_ERROR_ILLEGAL_STATE;
        Operation operation;
        operation.kind = CU_GRAPH_NODE_TYPE_EVENT_RECORD;
        operation.event = event;
        return enqueue(stream, std::move(operation));
    }
    std::lock_guard<std::recursive_mutex> held(w.lock);
    if (!w.events.count(event)) return CUDA_ERROR_INVALID_HANDLE;
    if (int code = legacy_use(stream)) return code;
    if (stream->capture && stream->capture->state == CaptureState::INVALID) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    Recorded& mark = *event->mark;
    mark = Recorded();
    mark.ever = true;
    if (stream->capture) {
        mark.capture = stream->capture;
        mark.nodes = stream->frontier;
        mark.known = stream->known;
        return 0;
    }
    w.host_ns += CALL_NS / 4;
    mark.time_ns = start_on(w, stream);
    stream->clock_ns = mark.time_ns;
    if (late()) {
        put_off_implicit_waits(w, stream);
        mark.stream = stream;
        mark.position = stream->enqueued;
    }
    return 0;
}

static int event_ready(Event* event, bool wait) {
    if (int code = health()) return code;
    World& w = world();
    std::shared_ptr<Recorded> mark;
    {
        std::lock_guard<std::recursive_mutex> held(w.lock);
        if (!w.events.count(event)) return CUDA_ERROR_INVALID_HANDLE;
        if (event->mark->capture) {
            invalidate(*event->mark->capture);
            return CUDA_ERROR_CAPTURED_EVENT;
        }
        if (int code = unsafe_call()) return code;
        mark = event->mark;
    }
    if (late() && mark->stream) {
        if (wait) happen(mark->stream, mark->position);
        if (mark->stream->happened < mark->position) return CUDA_ERROR_NOT_READY;
    }
    std::lock_guard<std::recursive_mutex> held(w.lock);
    if (wait) wait_for(w, event->mark->time_ns);
    w.host_ns += QUERY_NS;
    if (w.sticky) return w.sticky;
    return event->mark->time_ns <= w.host_ns ? 0 : CUDA_ERROR_NOT_READY;
}

int event_query(Event* event) { return event_ready(event, false); }

int event_synchronize(Event* event) { return event_ready(event, true); }

int event_elapsed(float* out_ms, Event* start, Event* end) {
    if (int code = health()) return code;
    World& w = world();
    std::lock_guard<std::recursive_mutex> held(w.lock);
    for (Event* event : {start, end}) {
        if (!w.events.count(event) || !event->timing) return CUDA_ERROR_INVALID_HANDLE;
        if (event->device != start->device) return CUDA_ERROR_INVALID_HANDLE;
        if (event->mark->capture) return CUDA_ERROR_CAPTURED_EVENT;
        if (!event->mark->ever) return CUDA_ERROR_INVALID_HANDLE;
        if (event->mark->time_ns > w.host_ns) return CUDA_ERROR_NOT_READY;
    }
    *out_ms = float((end->mark->time_ns - start->mark->time_ns) * 1e-6);
    return 0;
}

int enqueue(Stream* stream, Operation operation) {
    if (int code = health()) return code;
    if (!stream) return CUDA_ERROR_INVALID_HANDLE;
    World& w = world();
    {
        std::lock_guard<std::recursive_mutex> held(w.lock);
        activate();
        if (operation.kind == CU_GRAPH_NODE_TYPE_KERNEL) {
            if (int code = wrong_device(stream->device)) return code;
        }
        if (int code = legacy_use(stream)) return code;
        if (stream->capture) {
            if (!operation.host_waits || operation.kind != CU_GRAPH_NODE_TYPE_MEMCPY) return capture_operation(stream, operation);
            invalidate(*stream->capture);  // a call that has to wait cannot be captured
            return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
        }
        w.host_ns += CALL_NS;
        stream->clock_ns = start_on(w, stream) + operation.duration_ns;
        if (operation.host_waits) wait_for(w, stream->clock_ns);
        if (late()) {
            put_off_implicit_waits(w, stream);
            if (operation.effect) put_off(stream, std::move(operation.effect));
            if (!operation.host_waits) return 0;
        }
    }
    if (late()) return happen(stream, stream->enqueued);
    return operation.effect ? operation.effect() : 0;
}

int attach(Stream* stream, Effect effect) {
    if (!stream) return CUDA_ERROR_INVALID_HANDLE;
    {
        std::lock_guard<std::recursive_mutex> held(world().lock);
        if (stream->capture) {
            if (stream->capture->state != CaptureState::ACTIVE || stream->frontier.size() != 1) return CUDA_ERROR_ILLEGAL_STATE;
            stream->frontier[0]->effects.push_back(std::move(effect));
            return 0;
        }
        if (late()) {
            put_off(stream, std::move(effect));
            return 0;
        }
    }
    return effect();
}

}  // namespace emu
