// The driver's face, graphs: what cuda-bindings reads and what a launch needs.
#include "face.h"

#include <algorithm>
#include <cstring>

using namespace emu;

#define NEED_GRAPH(handle) \
    if (!world().graphs.count(reinterpret_cast<Graph*>(handle))) DONE(CUDA_ERROR_INVALID_VALUE)
#define NEED_NODE(handle) \
    if (!world().nodes.count(reinterpret_cast<Node*>(handle))) DONE(CUDA_ERROR_INVALID_VALUE)

namespace {

Graph* G(CUgraph handle) { return reinterpret_cast<Graph*>(handle); }
Node* N(CUgraphNode handle) { return reinterpret_cast<Node*>(handle); }
CUgraphNode H(Node* node) { return reinterpret_cast<CUgraphNode>(node); }

// The convention of every list: a null array asks for the count; a larger array is filled up with nulls.
template <class T>
void give(const std::vector<T>& items, T* out, size_t* count) {
    if (!out) {
        *count = items.size();
        return;
    }
    size_t room = *count;
    for (size_t i = 0; i < room; ++i) out[i] = i < items.size() ? items[i] : T{};
    *count = std::min(room, items.size());
}

// What an edge carries: a kernel launched early, after one other kernel, does not wait for its end.
CUgraphEdgeData edge(const Node* before, const Node* after) {
    CUgraphEdgeData data{};
    if (after->launch.early && after->before.size() == 1 && before->kind == CU_GRAPH_NODE_TYPE_KERNEL) {
        data.type = CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC;
        data.from_port = CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC;
    }
    return data;
}

bool lossy(const std::vector<CUgraphEdgeData>& found) {
    return std::any_of(found.begin(), found.end(), [](const CUgraphEdgeData& data) { return data.type != 0; });
}

}  // namespace

CALL cuGraphCreate(CUgraph* out, unsigned) {
    LOCKED;
    auto* made = new Graph;
    made->id = world().next_id++;
    adopt(made);
    *out = reinterpret_cast<CUgraph>(made);
    DONE(0);
}
CALL cuGraphDestroy(CUgraph graph) {
    LOCKED;
    NEED_GRAPH(graph);
    forget(G(graph));
    delete G(graph);
    DONE(0);
}
CALL cuGraphClone(CUgraph* out, CUgraph graph) {
    LOCKED;
    NEED_GRAPH(graph);
    Graph* made = graph_copy(*G(graph)).release();
    adopt(made);
    *out = reinterpret_cast<CUgraph>(made);
    DONE(0);
}
CALL cuGraphGetNodes(CUgraph graph, CUgraphNode* nodes, size_t* count) {
    LOCKED;
    NEED_GRAPH(graph);
    std::vector<CUgraphNode> found;
    for (auto& node : G(graph)->nodes) found.push_back(H(node.get()));
    give(found, nodes, count);
    DONE(0);
}
CALL cuGraphGetRootNodes(CUgraph graph, CUgraphNode* nodes, size_t* count) {
    LOCKED;
    NEED_GRAPH(graph);
    std::vector<CUgraphNode> found;
    for (auto& node : G(graph)->nodes) {
        if (node->before.empty()) found.push_back(H(node.get()));
    }
    give(found, nodes, count);
    DONE(0);
}
CALL cuGraphGetEdges(CUgraph graph, CUgraphNode* from, CUgraphNode* to, CUgraphEdgeData* data, size_t* count) {
    LOCKED;
    NEED_GRAPH(graph);
    std::vector<CUgraphNode> sources, targets;
    std::vector<CUgraphEdgeData> carried;
    for (auto& node : G(graph)->nodes) {
        for (Node* one : node->before) {
            sources.push_back(H(one));
            targets.push_back(H(node.get()));
            carried.push_back(edge(one, node.get()));
        }
    }
    if (from && !data && lossy(carried)) DONE(CUDA_ERROR_LOSSY_QUERY);
    size_t room = *count, again = *count;
    give(sources, from, count);
    if (to) give(targets, to, &room);
    if (data) give(carried, data, &again);
    DONE(0);
}
CALL cuGraphNodeGetDependencies(CUgraphNode node, CUgraphNode* nodes, CUgraphEdgeData* data, size_t* count) {
    LOCKED;
    NEED_NODE(node);
    std::vector<CUgraphNode> found;
    std::vector<CUgraphEdgeData> carried;
    for (Node* one : N(node)->before) {
        found.push_back(H(one));
        carried.push_back(edge(one, N(node)));
    }
    // Strictly: no document says that asking for the count alone is no loss.
    if (!data && lossy(carried)) DONE(CUDA_ERROR_LOSSY_QUERY);
    size_t room = *count;
    give(found, nodes, count);
    if (data && nodes) give(carried, data, &room);
    DONE(0);
}
CALL cuGraphNodeGetDependentNodes(CUgraphNode node, CUgraphNode* nodes, CUgraphEdgeData* data, size_t* count) {
    LOCKED;
    NEED_NODE(node);
    std::vector<CUgraphNode> found;
    for (auto& other : N(node)->graph->nodes) {
        auto& before = other->before;
        if (std::find(before.begin(), before.end(), N(node)) != before.end()) found.push_back(H(other.get()));
    }
    if (data && nodes) memset(data, 0, sizeof *data * *count);
    give(found, nodes, count);
    DONE(0);
}
CALL cuGraphNodeGetType(CUgraphNode node, CUgraphNodeType* out) {
    LOCKED;
    NEED_NODE(node);
    *out = N(node)->kind;
    DONE(0);
}
CALL cuGraphKernelNodeGetParams(CUgraphNode node, CUDA_KERNEL_NODE_PARAMS* out) {
    LOCKED;
    NEED_NODE(node);
    if (N(node)->kind != CU_GRAPH_NODE_TYPE_KERNEL) DONE(CUDA_ERROR_INVALID_VALUE);
    const Launch& launch = N(node)->launch;
    memset(out, 0, sizeof *out);  // no arguments: their sizes are not known
    if (launch.function->of_library) {
        out->kern = reinterpret_cast<CUkernel>(launch.function);
    } else {
        out->func = reinterpret_cast<CUfunction>(launch.function);
    }
    out->gridDimX = launch.grid[0];
    out->gridDimY = launch.grid[1];
    out->gridDimZ = launch.grid[2];
    out->blockDimX = launch.block[0];
    out->blockDimY = launch.block[1];
    out->blockDimZ = launch.block[2];
    out->sharedMemBytes = launch.shared;
    DONE(0);
}
CALL cuGraphKernelNodeGetAttribute(CUgraphNode node, CUkernelNodeAttrID attribute, CUkernelNodeAttrValue* out) {
    LOCKED;
    NEED_NODE(node);
    if (N(node)->kind != CU_GRAPH_NODE_TYPE_KERNEL) DONE(CUDA_ERROR_INVALID_VALUE);
    memset(out, 0, sizeof *out);
    if (attribute == CU_LAUNCH_ATTRIBUTE_PRIORITY) out->priority = N(node)->priority;
    if (attribute == CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION) memcpy(&out->clusterDim, N(node)->launch.cluster, 12);
    if (attribute == CU_LAUNCH_ATTRIBUTE_COOPERATIVE) out->cooperative = N(node)->launch.cooperative;
    DONE(0);
}
CALL cuGraphKernelNodeSetAttribute(CUgraphNode node, CUkernelNodeAttrID attribute, const CUkernelNodeAttrValue* value) {
    LOCKED;
    NEED_NODE(node);
    if (attribute == CU_LAUNCH_ATTRIBUTE_PRIORITY) N(node)->priority = value->priority;
    DONE(0);
}
CALL cuGraphAddEmptyNode(CUgraphNode* out, CUgraph graph, const CUgraphNode* before, size_t count) {
    LOCKED;
    NEED_GRAPH(graph);
    std::vector<Node*> dependencies;
    for (size_t i = 0; i < count; ++i) dependencies.push_back(N(before[i]));
    *out = H(G(graph)->add(CU_GRAPH_NODE_TYPE_EMPTY, std::move(dependencies)));
    DONE(0);
}
CALL cuGraphInstantiateWithFlags(CUgraphExec* out, CUgraph graph, unsigned long long) {
    DONE(graph_instantiate(reinterpret_cast<Executable**>(out), G(graph)));
}
CALL cuGraphLaunch(CUgraphExec executable, CUstream stream) {
    DONE(graph_launch(reinterpret_cast<Executable*>(executable), stream_of(stream)));
}
CALL cuGraphUpload(CUgraphExec, CUstream) { DONE(0); }
CALL cuGraphExecDestroy(CUgraphExec handle) {
    LOCKED;
    auto* executable = reinterpret_cast<Executable*>(handle);
    if (!world().executables.erase(executable)) DONE(CUDA_ERROR_INVALID_VALUE);
    forget(executable->graph.get());
    delete executable;
    // No document says so: an H200 (driver 580) frees the graph, and ends the captures of others.
    unsafe_call();
    DONE(0);
}
CALL cuGraphDebugDotPrint(CUgraph graph, const char* path, unsigned) {
    LOCKED;
    NEED_GRAPH(graph);
    DONE(graph_dot(G(graph), path));
}

// Hooks of the emulator itself: work for the host at the end of what was enqueued last, and which of it no graph holds any more.

static std::vector<size_t> released;

extern "C" __attribute__((visibility("default"))) int emulated_attach_owned(void* stream, void (*function)(size_t), size_t number) {
    std::shared_ptr<void> owner(nullptr, [number](void*) {
        LOCKED;
        released.push_back(number);
    });
    return attach(stream_of(stream), [function, number, owner] {
        function(number);
        return 0;
    });
}
extern "C" __attribute__((visibility("default"))) size_t emulated_released() {
    LOCKED;
    if (released.empty()) return 0;
    size_t number = released.back();
    released.pop_back();
    return number;
}
extern "C" __attribute__((visibility("default"))) void emulated_break(int error) { world().sticky = error; }
extern "C" __attribute__((visibility("default"))) const char* emulated_cuda() { return device_name(0); }
