// Stream capture: who is captured, what is forbidden meanwhile, and how a capture ends. The rules are those of the
// "CUDA Graphs / stream capture" chapter of the CUDA programming guide and of the descriptions of the API calls.
#include "core.h"

#include <algorithm>

namespace emu {

static thread_local CUstreamCaptureMode thread_mode = CU_STREAM_CAPTURE_MODE_GLOBAL;

int exchange_mode(CUstreamCaptureMode* mode) {
    if (!mode) return CUDA_ERROR_INVALID_VALUE;
    std::swap(thread_mode, *mode);
    return 0;
}

void invalidate(Capture& capture) {
    if (capture.state == CaptureState::ACTIVE) capture.state = CaptureState::INVALID;
}

// A call that might wait for captured work, or that changes memory under it (cudaMalloc, cudaEventQuery and others).
int unsafe_call() {
    if (thread_mode == CU_STREAM_CAPTURE_MODE_RELAXED) return 0;
    bool refused = false;
    for (auto& capture : world().captures) {
        if (capture->state == CaptureState::ENDED) continue;
        bool mine = capture->thread == std::this_thread::get_id() && capture->mode != CU_STREAM_CAPTURE_MODE_RELAXED;
        bool others = thread_mode == CU_STREAM_CAPTURE_MODE_GLOBAL && capture->mode == CU_STREAM_CAPTURE_MODE_GLOBAL;
        if (mine || others) {
            invalidate(*capture);
            refused = true;
        }
    }
    return refused ? CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED : 0;
}

// The legacy stream waits for every blocking stream: a dependency that a capture of one of them cannot hold.
int legacy_use(Stream* stream) {
    if (!stream->legacy) return 0;
    bool refused = false;
    for (auto& capture : world().captures) {
        bool blocking = std::any_of(capture->streams.begin(), capture->streams.end(), [](Stream* s) { return !s->non_blocking; });
        if (blocking) {
            invalidate(*capture);
            refused = true;
        }
    }
    return refused ? CUDA_ERROR_STREAM_CAPTURE_IMPLICIT : 0;
}

static void enter(Stream* stream, const std::shared_ptr<Capture>& capture) {
    stream->capture = capture;
    stream->frontier.clear();
    stream->known.clear();
    stream->known[stream] = ++stream->version;  // a stream that came in has to be joined, even if it launches nothing
    capture->streams.push_back(stream);
}

int capture_begin(Stream* stream, CUstreamCaptureMode mode, Graph*) {
    World& w = world();
    if (stream->legacy) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    if (stream->capture) return CUDA_ERROR_ILLEGAL_STATE;
    auto capture = std::make_shared<Capture>();
    capture->id = w.next_id++;
    capture->graph = std::make_unique<Graph>();
    capture->graph->id = w.next_id++;
    adopt(capture->graph.get());
    capture->mode = mode;
    capture->thread = std::this_thread::get_id();
    capture->origin = stream;
    enter(stream, capture);
    w.captures.push_back(capture);
    return 0;
}

int capture_end(Stream* stream, Graph** out) {
    World& w = world();
    *out = nullptr;
    auto capture = stream->capture;
    if (!capture) return CUDA_ERROR_ILLEGAL_STATE;
    if (capture->origin != stream) {
        invalidate(*capture);
        return CUDA_ERROR_STREAM_CAPTURE_UNMATCHED;
    }
    if (capture->mode != CU_STREAM_CAPTURE_MODE_RELAXED && capture->thread != std::this_thread::get_id()) {
        return CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD;
    }
    int code = capture->state == CaptureState::INVALID ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED : 0;
    for (Stream* side : capture->streams) {
        if (!code && side != stream && stream->known[side] < side->version) code = CUDA_ERROR_STREAM_CAPTURE_UNJOINED;
    }
    for (Stream* side : capture->streams) {
        side->capture.reset();
        side->frontier.clear();
        side->known.clear();
    }
    capture->state = CaptureState::ENDED;
    w.captures.erase(std::find(w.captures.begin(), w.captures.end(), capture));
    if (code) {
        forget(capture->graph.get());
        capture->graph.reset();
        return code;
    }
    w.graphs.insert(capture->graph.get());
    *out = capture->graph.release();
    return 0;
}

int capture_status(Stream* stream, CUstreamCaptureStatus* status) {
    *status = CU_STREAM_CAPTURE_STATUS_NONE;
    if (int code = legacy_use(stream)) return code;
    if (!stream->capture) return 0;
    bool active = stream->capture->state == CaptureState::ACTIVE;
    *status = active ? CU_STREAM_CAPTURE_STATUS_ACTIVE : CU_STREAM_CAPTURE_STATUS_INVALIDATED;
    return 0;
}

int join_capture(Stream* stream, const Recorded& mark) {
    auto capture = stream->capture;
    if (!mark.capture) {
        if (!capture || !mark.ever) return 0;
        invalidate(*capture);
        return CUDA_ERROR_STREAM_CAPTURE_ISOLATION;
    }
    if (mark.capture->state == CaptureState::INVALID) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    if (mark.capture->state == CaptureState::ENDED) {
        if (capture) invalidate(*capture);
        return CUDA_ERROR_CAPTURED_EVENT;
    }
    if (capture && capture != mark.capture) {
        invalidate(*capture);
        invalidate(*mark.capture);
        return CUDA_ERROR_STREAM_CAPTURE_MERGE;
    }
    if (!capture) {
        if (stream->legacy) {
            invalidate(*mark.capture);
            return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
        }
        enter(stream, mark.capture);
    }
    for (Node* node : mark.nodes) {
        auto& frontier = stream->frontier;
        if (std::find(frontier.begin(), frontier.end(), node) == frontier.end()) frontier.push_back(node);
    }
    for (auto& [other, version] : mark.known) stream->known[other] = std::max(stream->known[other], version);
    return 0;
}

int capture_operation(Stream* stream, Operation& operation) {
    Capture& capture = *stream->capture;
    if (capture.state != CaptureState::ACTIVE) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    Node* node = capture.graph->add(operation.kind, stream->frontier);
    node->duration_ns = operation.duration_ns;
    node->priority = stream->priority;
    node->launch = operation.launch;
    node->event = operation.event;
    if (operation.event) node->mark = operation.event->mark;
    if (operation.effect) node->effects.push_back(std::move(operation.effect));
    stream->frontier = {node};
    stream->known[stream] = ++stream->version;
    return 0;
}

}  // namespace emu
