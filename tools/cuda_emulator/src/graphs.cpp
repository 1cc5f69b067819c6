// Graphs: nodes in the order of their creation, executables as copies, and a launch as a list schedule in virtual time.
#include "core.h"

#include <algorithm>
#include <cstdio>

namespace emu {

Node* Graph::add(CUgraphNodeType kind, std::vector<Node*> before) {
    nodes.push_back(std::make_unique<Node>());
    Node* node = nodes.back().get();
    node->kind = kind;
    node->graph = this;
    node->id = world().next_id++;
    node->before = std::move(before);
    world().nodes.insert(node);
    return node;
}

void adopt(Graph* graph) { world().graphs.insert(graph); }

void forget(Graph* graph) {
    world().graphs.erase(graph);
    for (auto& node : graph->nodes) world().nodes.erase(node.get());
}

std::unique_ptr<Graph> graph_copy(const Graph& graph) {
    auto copy = std::make_unique<Graph>();
    copy->id = world().next_id++;
    std::unordered_map<const Node*, Node*> twin;
    for (auto& node : graph.nodes) {
        std::vector<Node*> before;
        for (Node* one : node->before) before.push_back(twin.at(one));
        Node* made = copy->add(node->kind, std::move(before));
        Graph* home = made->graph;
        uint64_t id = made->id;
        std::vector<Node*> edges = std::move(made->before);
        *made = *node;
        made->graph = home;
        made->id = id;
        made->before = std::move(edges);
        twin[node.get()] = made;
    }
    return copy;
}

int graph_instantiate(Executable** out, Graph* graph) {
    if (int code = health()) return code;
    World& w = world();
    std::lock_guard<std::recursive_mutex> held(w.lock);
    if (!w.graphs.count(graph)) return CUDA_ERROR_INVALID_VALUE;
    auto* made = new Executable;
    made->graph = graph_copy(*graph);
    w.executables.insert(made);
    w.host_ns += 20000.0 + 1000.0 * double(graph->nodes.size());
    *out = made;
    return 0;
}

int graph_launch(Executable* executable, Stream* stream) {
    if (int code = health()) return code;
    if (!stream) return CUDA_ERROR_INVALID_HANDLE;
    World& w = world();
    constexpr double LAUNCH_NS = 6000, EDGE_NS = 1000;
    std::vector<std::pair<double, Node*>> order;
    {
        std::lock_guard<std::recursive_mutex> held(w.lock);
        if (!w.executables.count(executable)) return CUDA_ERROR_INVALID_VALUE;
        if (int code = legacy_use(stream)) return code;
        if (stream->capture) {
            Operation operation;
            operation.kind = CU_GRAPH_NODE_TYPE_GRAPH;
            return capture_operation(stream, operation);
        }
        w.host_ns += LAUNCH_NS;
        double begin = std::max({stream->clock_ns, w.host_ns + EDGE_NS, executable->free_at_ns});
        double last = begin;
        std::unordered_map<Node*, double> end;
        for (auto& node : executable->graph->nodes) {
            double start = begin;
            for (Node* one : node->before) start = std::max(start, end[one] + (node->before.size() > 1 ? EDGE_NS : 0));
            end[node.get()] = start + node->duration_ns;
            last = std::max(last, end[node.get()]);
            order.push_back({start, node.get()});
            if (node->kind == CU_GRAPH_NODE_TYPE_EVENT_RECORD && node->mark) {
                *node->mark = Recorded();
                node->mark->ever = true;
                node->mark->time_ns = start;
            }
        }
        stream->clock_ns = executable->free_at_ns = last;
        if (late()) {
            std::stable_sort(order.begin(), order.end(), [](auto& a, auto& b) { return a.first < b.first; });
            std::vector<Effect> effects;  // copies: the executable may be gone before they happen
            for (auto& [start, node] : order) effects.insert(effects.end(), node->effects.begin(), node->effects.end());
            put_off_wait(stream, executable->last_on, executable->last_position);
            put_off(stream, [effects] {
                for (auto& effect : effects) {
                    if (int code = effect()) return code;
                }
                return 0;
            });
            executable->last_on = stream;
            executable->last_position = stream->enqueued;
            return 0;
        }
    }
    // What an edge does not order happens in the order of virtual time, so a missing edge can show.
    std::stable_sort(order.begin(), order.end(), [](auto& a, auto& b) { return a.first < b.first; });
    for (auto& [start, node] : order) {
        for (auto& effect : node->effects) {
            if (int code = effect()) return code == CUDA_ERROR_ILLEGAL_ADDRESS ? 0 : code;  // shows at the next call
        }
    }
    return 0;
}

int graph_dot(Graph* graph, const char* path) {
    static const char* kinds[] = {"KERNEL", "MEMCPY", "MEMSET", "HOST", "GRAPH", "EMPTY", "WAIT_EVENT", "EVENT_RECORD"};
    FILE* file = fopen(path, "w");
    if (!file) return CUDA_ERROR_OPERATING_SYSTEM;
    fprintf(file, "digraph dot {\n");
    for (auto& node : graph->nodes) {
        const char* kind = size_t(node->kind) < 8 ? kinds[node->kind] : "OTHER";
        const char* name = node->launch.function ? node->launch.function->name.c_str() : "";
        fprintf(file, "\"n%llu\" [label=\"%s %s\"];\n", (unsigned long long)node->id, kind, name);
        for (Node* one : node->before) fprintf(file, "\"n%llu\" -> \"n%llu\";\n", (unsigned long long)one->id, (unsigned long long)node->id);
    }
    fprintf(file, "}\n");
    fclose(file);
    return 0;
}

}  // namespace emu
