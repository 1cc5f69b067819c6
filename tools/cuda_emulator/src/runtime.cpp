// The runtime's face: libcudart.so.13. The same objects as the driver's.
#include "core.h"

#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <algorithm>
#include <cstdio>
#include <cstring>

using namespace emu;

#define CALL extern "C" __attribute__((visibility("default"))) cudaError_t
static thread_local cudaError_t last_error = cudaSuccess;

static cudaError_t finish(const char* name, int code) {
    trace(name, code);
    // Not-ready is an answer, not an error that is remembered.
    if (code && code != cudaErrorNotReady) last_error = static_cast<cudaError_t>(code);
    return static_cast<cudaError_t>(code);
}
#define DONE(value) return finish(__func__, (value))
#define DRIVER(call) DONE(int(call))
#define ACTIVE                          \
    if (int code = health()) DONE(code); \
    activate()
#define S(handle) reinterpret_cast<CUstream>(handle)

namespace {

struct Configuration {
    dim3 grid, block;
    size_t shared;
    void* stream;
};
thread_local std::vector<Configuration> configurations;

Function* function_at(const void* entry) {
    std::lock_guard<std::recursive_mutex> held(world().lock);
    auto found = world().by_entry.find(reinterpret_cast<uint64_t>(entry));
    return found == world().by_entry.end() ? nullptr : found->second.get();
}

Launch described(Function* function, dim3 grid, dim3 block, size_t shared) {
    Launch launch;
    launch.function = function;
    unsigned g[] = {grid.x, grid.y, grid.z}, b[] = {block.x, block.y, block.z};
    memcpy(launch.grid, g, sizeof g);
    memcpy(launch.block, b, sizeof b);
    launch.shared = unsigned(shared);
    return launch;
}

// cudaKernel_t and the address of a host stub are both accepted where a kernel is meant.
Function* function_of(const void* kernel) {
    if (Function* found = function_at(kernel)) return found;
    return static_cast<Function*>(const_cast<void*>(kernel));
}

}  // namespace

// For what build.py generates: functions that this version of PyTorch imports and nothing here emulates.
extern "C" int emulated_unsupported(const char* name) { return finish(name, cudaErrorNotSupported); }

// What the compiler's start-up code calls.

extern "C" __attribute__((visibility("default"))) void** __cudaRegisterFatBinary(void*) {
    static void* handle = nullptr;
    return &handle;
}
extern "C" __attribute__((visibility("default"))) void __cudaRegisterFatBinaryEnd(void**) {}
extern "C" __attribute__((visibility("default"))) void __cudaUnregisterFatBinary(void**) {}
extern "C" __attribute__((visibility("default"))) char __cudaInitModule(void**) { return 1; }
extern "C" __attribute__((visibility("default"))) void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
extern "C" __attribute__((visibility("default"))) void __cudaRegisterFunction(void**, const char* entry, char*, const char* name, int, uint3*,
                                                                            uint3*, dim3*, dim3*, int*) {
    std::lock_guard<std::recursive_mutex> held(world().lock);
    auto& function = world().by_entry[reinterpret_cast<uint64_t>(entry)];
    if (function) return;
    function = std::make_unique<Function>();
    function->name = name;
}
extern "C" __attribute__((visibility("default"))) unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, CUstream_st* stream) {
    configurations.push_back({grid, block, shared, stream});
    return 0;
}
CALL __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
    if (configurations.empty()) DONE(cudaErrorMissingConfiguration);
    Configuration top = configurations.back();
    configurations.pop_back();
    *grid = top.grid;
    *block = top.block;
    *shared = top.shared;
    *static_cast<void**>(stream) = top.stream;
    return cudaSuccess;
}
CALL __cudaGetKernel(cudaKernel_t* out, const void* entry) {
    *out = reinterpret_cast<cudaKernel_t>(function_at(entry));
    DONE(*out ? 0 : cudaErrorInvalidDeviceFunction);
}

// Kernels.

static int launch_one(const void* kernel, dim3 grid, dim3 block, void** arguments, size_t shared, cudaStream_t stream) {
    if (int code = health()) return code;
    activate();
    if (!kernel) return cudaErrorInvalidDeviceFunction;
    return launch_kernel(stream_of(stream), described(function_of(kernel), grid, block, shared), arguments);
}
CALL __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void** arguments, size_t shared, cudaStream_t stream) {
    DONE(launch_one(kernel, grid, block, arguments, shared, stream));
}
CALL cudaLaunchKernel(const void* kernel, dim3 grid, dim3 block, void** arguments, size_t shared, cudaStream_t stream) {
    DONE(launch_one(kernel, grid, block, arguments, shared, stream));
}
CALL cudaLaunchCooperativeKernel(const void* kernel, dim3 grid, dim3 block, void** arguments, size_t shared, cudaStream_t stream) {
    DONE(launch_one(kernel, grid, block, arguments, shared, stream));
}
CALL cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* kernel, void** arguments) {
    ACTIVE;
    Launch launch = described(function_of(kernel), config->gridDim, config->blockDim, config->dynamicSmemBytes);
    for (unsigned i = 0; i < config->numAttrs; ++i) {
        if (config->attrs[i].id == cudaLaunchAttributeClusterDimension) memcpy(launch.cluster, &config->attrs[i].val.clusterDim, 12);
    }
    DONE(launch_kernel(stream_of(config->stream), launch, arguments));
}
CALL cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
    ACTIVE;
    DRIVER(cuLaunchHostFunc(S(stream), function, data));
}
CALL cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t function, void* data, unsigned) {
    ACTIVE;
    if (stream_of(stream)->capture) DONE(cudaErrorStreamCaptureUnsupported);
    function(stream, cudaSuccess, data);
    DONE(0);
}
CALL cudaFuncGetAttributes(cudaFuncAttributes* out, const void* kernel) {
    ACTIVE;
    const Function& function = *function_of(kernel);
    memset(out, 0, sizeof *out);
    out->numRegs = function.registers;
    out->sharedSizeBytes = size_t(function.static_shared);
    out->maxThreadsPerBlock = 1024;
    out->maxDynamicSharedSizeBytes = function_attribute(function, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES);
    out->binaryVersion = out->ptxVersion = 90;
    DONE(0);
}
CALL cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute attribute, int value) {
    ACTIVE;
    DRIVER(cuFuncSetAttribute(reinterpret_cast<CUfunction>(function_of(kernel)), CUfunction_attribute(attribute), value));
}
CALL cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* out, const void* kernel, int threads, size_t shared) {
    ACTIVE;
    *out = resident_blocks(*function_of(kernel), threads, shared);
    DONE(0);
}
CALL cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* out, const void* kernel, int threads, size_t shared, unsigned) {
    ACTIVE;
    *out = resident_blocks(*function_of(kernel), threads, shared);
    DONE(0);
}
static void* symbol_memory(const void* symbol) {
    static std::recursive_mutex lock;
    static std::map<const void*, void*> made;
    std::lock_guard<std::recursive_mutex> held(lock);
    void*& entry = made[symbol];
    if (!entry) allocate(&entry, 1 << 20);
    return entry;
}
CALL cudaGetSymbolAddress(void** out, const void* symbol) {
    ACTIVE;
    *out = symbol_memory(symbol);
    DONE(0);
}
CALL cudaMemcpyToSymbol(const void* symbol, const void* from, size_t bytes, size_t offset, cudaMemcpyKind) {
    ACTIVE;
    DONE(memory_copy(stream_of(nullptr), static_cast<char*>(symbol_memory(symbol)) + offset, from, bytes, true));
}

// Devices and errors.

CALL cudaGetDeviceCount(int* out) {
    cuInit(0);
    cuDeviceGetCount(out);
    if (world().forked) DONE(cudaErrorInitializationError);
    int driver = 0;
    cuDriverGetVersion(&driver);
    if (driver / 1000 < CUDART_VERSION / 1000) DONE(cudaErrorInsufficientDriver);  // a driver serves runtimes of its own major version
    DONE(*out ? 0 : cudaErrorNoDevice);
}
CALL cudaGetDevice(int* out) {
    *out = current_device();
    DONE(0);
}
CALL cudaSetDevice(int device) {
    if (device < 0 || device >= device_count()) DONE(cudaErrorInvalidDevice);
    current_context = primary_context(device);  // before: no other device gets a context by this
    ACTIVE;
    DONE(0);
}
CALL cudaDeviceGetAttribute(int* out, cudaDeviceAttr attribute, int device) {
    *out = device_attribute(attribute, device);
    DONE(0);
}
CALL cudaDeviceCanAccessPeer(int* out, int, int) {
    *out = 0;
    DONE(0);
}
CALL cudaDeviceEnablePeerAccess(int, unsigned) { DONE(cudaErrorPeerAccessUnsupported); }
CALL cudaDeviceGetDefaultMemPool(cudaMemPool_t* out, int) {
    *out = nullptr;
    DONE(cudaErrorNotSupported);
}
CALL cudaDeviceGetPCIBusId(char* out, int size, int device) { DRIVER(cuDeviceGetPCIBusId(out, size, device)); }
CALL cudaDeviceGetStreamPriorityRange(int* least, int* greatest) { DRIVER(cuCtxGetStreamPriorityRange(least, greatest)); }
CALL cudaDeviceSynchronize() {
    ACTIVE;
    DONE(device_synchronize());
}
CALL cudaDriverGetVersion(int* out) { DRIVER(cuDriverGetVersion(out)); }
CALL cudaRuntimeGetVersion(int* out) {
    *out = CUDART_VERSION;
    DONE(0);
}
CALL cudaGetDeviceProperties(cudaDeviceProp* out, int device) {
    memset(out, 0, sizeof *out);
    snprintf(out->name, sizeof out->name, "%s", device_name(device));
    memcpy(out->uuid.bytes, "emulated-device", 16);
    out->uuid.bytes[15] = char(physical(device));
    memory_info(nullptr, &out->totalGlobalMem);
    auto value = [device](cudaDeviceAttr attribute) { return device_attribute(attribute, device); };
    out->sharedMemPerBlock = size_t(value(cudaDevAttrMaxSharedMemoryPerBlock));
    out->sharedMemPerBlockOptin = size_t(value(cudaDevAttrMaxSharedMemoryPerBlockOptin));
    out->sharedMemPerMultiprocessor = size_t(value(cudaDevAttrMaxSharedMemoryPerMultiprocessor));
    out->reservedSharedMemPerBlock = size_t(value(cudaDevAttrReservedSharedMemoryPerBlock));
    out->regsPerBlock = value(cudaDevAttrMaxRegistersPerBlock);
    out->regsPerMultiprocessor = value(cudaDevAttrMaxRegistersPerMultiprocessor);
    out->warpSize = value(cudaDevAttrWarpSize);
    out->memPitch = size_t(value(cudaDevAttrMaxPitch));
    out->maxThreadsPerBlock = value(cudaDevAttrMaxThreadsPerBlock);
    out->maxThreadsDim[0] = value(cudaDevAttrMaxBlockDimX);
    out->maxThreadsDim[1] = value(cudaDevAttrMaxBlockDimY);
    out->maxThreadsDim[2] = value(cudaDevAttrMaxBlockDimZ);
    out->maxGridSize[0] = value(cudaDevAttrMaxGridDimX);
    out->maxGridSize[1] = value(cudaDevAttrMaxGridDimY);
    out->maxGridSize[2] = value(cudaDevAttrMaxGridDimZ);
    out->totalConstMem = size_t(value(cudaDevAttrTotalConstantMemory));
    out->major = value(cudaDevAttrComputeCapabilityMajor);
    out->minor = value(cudaDevAttrComputeCapabilityMinor);
    out->textureAlignment = 512;
    out->multiProcessorCount = value(cudaDevAttrMultiProcessorCount);
    out->canMapHostMemory = out->concurrentKernels = out->unifiedAddressing = out->ECCEnabled = 1;
    out->asyncEngineCount = value(cudaDevAttrAsyncEngineCount);
    out->memoryBusWidth = value(cudaDevAttrGlobalMemoryBusWidth);
    out->l2CacheSize = value(cudaDevAttrL2CacheSize);
    out->maxThreadsPerMultiProcessor = value(cudaDevAttrMaxThreadsPerMultiProcessor);
    out->maxBlocksPerMultiProcessor = value(cudaDevAttrMaxBlocksPerMultiprocessor);
    out->streamPrioritiesSupported = out->cooperativeLaunch = out->managedMemory = 1;
    out->clusterLaunch = value(cudaDevAttrClusterLaunch);
    DONE(0);
}
CALL cudaGetLastError() {
    cudaError_t code = last_error;
    last_error = cudaSuccess;
    return world().sticky ? static_cast<cudaError_t>(world().sticky) : code;
}
CALL cudaPeekAtLastError() { return world().sticky ? static_cast<cudaError_t>(world().sticky) : last_error; }

struct Named {
    int code;
    const char *name, *text;
};
static const Named NAMES[] = {
    {0, "cudaSuccess", "no error"},
    {1, "cudaErrorInvalidValue", "invalid argument"},
    {2, "cudaErrorMemoryAllocation", "out of memory"},
    {3, "cudaErrorInitializationError", "initialization error"},
    {98, "cudaErrorInvalidDeviceFunction", "invalid device function"},
    {100, "cudaErrorNoDevice", "no CUDA-capable device is detected"},
    {101, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {400, "cudaErrorInvalidResourceHandle", "invalid resource handle"},
    {401, "cudaErrorIllegalState", "the operation cannot be performed in the present state"},
    {600, "cudaErrorNotReady", "device not ready"},
    {700, "cudaErrorIllegalAddress", "an illegal memory access was encountered"},
    {710, "cudaErrorAssert", "device-side assert triggered"},
    {801, "cudaErrorNotSupported", "operation not supported"},
    {900, "cudaErrorStreamCaptureUnsupported", "operation not permitted when stream is capturing"},
    {901, "cudaErrorStreamCaptureInvalidated", "operation failed due to a previous error during capture"},
    {902, "cudaErrorStreamCaptureMerge", "operation would result in a merge of separate capture sequences"},
    {903, "cudaErrorStreamCaptureUnmatched", "capture was not ended in the same stream as it began"},
    {904, "cudaErrorStreamCaptureUnjoined", "capturing stream has unjoined work"},
    {905, "cudaErrorStreamCaptureIsolation", "dependency created on uncaptured work in another stream"},
    {906, "cudaErrorStreamCaptureImplicit", "operation would make the legacy stream depend on a capturing blocking stream"},
    {907, "cudaErrorCapturedEvent", "operation not permitted on an event last recorded in a capturing stream"},
    {908, "cudaErrorStreamCaptureWrongThread", "attempt to terminate a thread-local capture sequence from another thread"},
};
static const Named& named(int code) {
    for (const Named& entry : NAMES) {
        if (entry.code == code) return entry;
    }
    static const Named other{-1, "cudaErrorUnknown", "an error the emulator has no words for"};
    return other;
}
extern "C" __attribute__((visibility("default"))) const char* cudaGetErrorName(cudaError_t code) { return named(code).name; }
extern "C" __attribute__((visibility("default"))) const char* cudaGetErrorString(cudaError_t code) { return named(code).text; }

CALL cudaGetDriverEntryPointByVersion(const char* symbol, void** out, unsigned version, unsigned long long flags,
                                      cudaDriverEntryPointQueryResult* status) {
    if (status) *status = cudaDriverEntryPointSuccess;
    DRIVER(cuGetProcAddress(symbol, out, int(version), flags, nullptr));
}
CALL cudaProfilerStart() { DONE(0); }
CALL cudaProfilerStop() { DONE(0); }

// Memory.

CALL cudaMalloc(void** out, size_t bytes) {
    ACTIVE;
    DONE(allocate(out, bytes));
}
CALL cudaFree(void* address) {
    ACTIVE;
    DONE(release(address));
}
CALL cudaMallocAsync(void**, size_t, cudaStream_t) { DONE(cudaErrorNotSupported); }
CALL cudaFreeAsync(void*, cudaStream_t) { DONE(cudaErrorNotSupported); }
CALL cudaMemPoolGetAttribute(cudaMemPool_t, cudaMemPoolAttr, void*) { DONE(cudaErrorNotSupported); }
CALL cudaMemPoolSetAttribute(cudaMemPool_t, cudaMemPoolAttr, void*) { DONE(cudaErrorNotSupported); }
CALL cudaMemPoolSetAccess(cudaMemPool_t, const cudaMemAccessDesc*, size_t) { DONE(cudaErrorNotSupported); }
CALL cudaMemPoolTrimTo(cudaMemPool_t, size_t) { DONE(cudaErrorNotSupported); }
CALL cudaMemGetInfo(size_t* free_bytes, size_t* total) {
    ACTIVE;
    memory_info(free_bytes, total);
    DONE(0);
}
CALL cudaHostAlloc(void** out, size_t bytes, unsigned) {
    ACTIVE;
    DONE(allocate_pinned(out, bytes));
}
CALL cudaFreeHost(void* address) { DONE(release_pinned(address)); }
CALL cudaHostRegister(void* address, size_t bytes, unsigned) {
    ACTIVE;
    DONE(register_pinned(address, bytes));
}
CALL cudaHostUnregister(void* address) { DONE(unregister_pinned(address)); }
CALL cudaHostGetDevicePointer(void** out, void* address, unsigned) {
    *out = address;
    DONE(0);
}
CALL cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
    ACTIVE;
    DONE(memory_copy(stream_of(nullptr), to, from, bytes, true));
}
CALL cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
    ACTIVE;
    DONE(memory_copy(stream_of(stream), to, from, bytes, false));
}
CALL cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t bytes, cudaStream_t stream) {
    ACTIVE;
    DONE(memory_copy(stream_of(stream), to, from, bytes, false));
}
CALL cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width, size_t height, cudaMemcpyKind,
                       cudaStream_t stream) {
    ACTIVE;
    DONE(memory_copy_2d(stream_of(stream), to, to_pitch, from, from_pitch, width, height));
}
CALL cudaMemset(void* to, int value, size_t bytes) {
    ACTIVE;
    DONE(memory_fill(stream_of(nullptr), to, unsigned(value), 1, bytes));
}
CALL cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t stream) {
    ACTIVE;
    DONE(memory_fill(stream_of(stream), to, unsigned(value), 1, bytes));
}
CALL cudaPointerGetAttributes(cudaPointerAttributes* out, const void* address) {
    ACTIVE;
    std::lock_guard<std::recursive_mutex> held(world().lock);
    Memory kind = kind_of(address, 1);
    memset(out, 0, sizeof *out);
    out->type = kind == Memory::DEVICE ? cudaMemoryTypeDevice : kind == Memory::PINNED ? cudaMemoryTypeHost : cudaMemoryTypeUnregistered;
    out->device = kind == Memory::DEVICE || kind == Memory::PINNED ? device_of(address) : -2;
    if (kind == Memory::DEVICE || kind == Memory::PINNED) out->devicePointer = const_cast<void*>(address);
    if (kind == Memory::PINNED || kind == Memory::PAGEABLE) out->hostPointer = const_cast<void*>(address);
    DONE(0);
}
CALL cudaIpcGetMemHandle(cudaIpcMemHandle_t*, void*) { DONE(cudaErrorNotSupported); }
CALL cudaIpcOpenMemHandle(void**, cudaIpcMemHandle_t, unsigned) { DONE(cudaErrorNotSupported); }
CALL cudaIpcCloseMemHandle(void*) { DONE(cudaErrorNotSupported); }
CALL cudaIpcGetEventHandle(cudaIpcEventHandle_t*, cudaEvent_t) { DONE(cudaErrorNotSupported); }
CALL cudaIpcOpenEventHandle(cudaEvent_t*, cudaIpcEventHandle_t) { DONE(cudaErrorNotSupported); }

// Streams, events, graphs.

CALL cudaStreamCreate(cudaStream_t* out) {
    ACTIVE;
    DONE(stream_create(reinterpret_cast<Stream**>(out), 0, 0));
}
CALL cudaStreamCreateWithFlags(cudaStream_t* out, unsigned flags) {
    ACTIVE;
    DONE(stream_create(reinterpret_cast<Stream**>(out), flags, 0));
}
CALL cudaStreamCreateWithPriority(cudaStream_t* out, unsigned flags, int priority) {
    ACTIVE;
    DONE(stream_create(reinterpret_cast<Stream**>(out), flags, priority));
}
CALL cudaStreamDestroy(cudaStream_t stream) { DONE(stream_destroy(stream_of(stream))); }
CALL cudaStreamGetPriority(cudaStream_t stream, int* out) { DRIVER(cuStreamGetPriority(S(stream), out)); }
CALL cudaStreamSynchronize(cudaStream_t stream) {
    ACTIVE;
    DONE(stream_synchronize(stream_of(stream)));
}
CALL cudaStreamQuery(cudaStream_t stream) {
    ACTIVE;
    DONE(stream_query(stream_of(stream)));
}
CALL cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
    ACTIVE;
    DONE(stream_wait(stream_of(stream), reinterpret_cast<Event*>(event), flags));
}
CALL cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
    ACTIVE;
    DRIVER(cuStreamBeginCapture(S(stream), CUstreamCaptureMode(mode)));
}
CALL cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* out) { DRIVER(cuStreamEndCapture(S(stream), reinterpret_cast<CUgraph*>(out))); }
CALL cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* out) {
    DRIVER(cuStreamIsCapturing(S(stream), reinterpret_cast<CUstreamCaptureStatus*>(out)));
}
CALL cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status, unsigned long long* id, cudaGraph_t* graph,
                              const cudaGraphNode_t** nodes, const cudaGraphEdgeData** edges, size_t* count) {
    cuuint64_t number = 0;
    int code = cuStreamGetCaptureInfo(S(stream), reinterpret_cast<CUstreamCaptureStatus*>(status), &number, reinterpret_cast<CUgraph*>(graph),
                                      reinterpret_cast<const CUgraphNode**>(nodes), reinterpret_cast<const CUgraphEdgeData**>(edges), count);
    if (id) *id = number;
    DONE(code);
}
CALL cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) { DONE(exchange_mode(reinterpret_cast<CUstreamCaptureMode*>(mode))); }

#define EV(event) reinterpret_cast<Event*>(event)
CALL cudaEventCreate(cudaEvent_t* out) {
    ACTIVE;
    DONE(event_create(reinterpret_cast<Event**>(out), 0));
}
CALL cudaEventCreateWithFlags(cudaEvent_t* out, unsigned flags) {
    ACTIVE;
    DONE(event_create(reinterpret_cast<Event**>(out), flags));
}
CALL cudaEventDestroy(cudaEvent_t event) { DONE(event_destroy(EV(event))); }
CALL cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    ACTIVE;
    DONE(event_record(EV(event), stream_of(stream), 0));
}
CALL cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) {
    ACTIVE;
    DONE(event_record(EV(event), stream_of(stream), flags));
}
CALL cudaEventQuery(cudaEvent_t event) { DONE(event_query(EV(event))); }
CALL cudaEventSynchronize(cudaEvent_t event) { DONE(event_synchronize(EV(event))); }
CALL cudaEventElapsedTime(float* out, cudaEvent_t start, cudaEvent_t end) { DONE(event_elapsed(out, EV(start), EV(end))); }

#define GR(graph) reinterpret_cast<CUgraph>(graph)
CALL cudaGraphDestroy(cudaGraph_t graph) { DRIVER(cuGraphDestroy(GR(graph))); }
CALL cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t* nodes, size_t* count) {
    DRIVER(cuGraphGetNodes(GR(graph), reinterpret_cast<CUgraphNode*>(nodes), count));
}
CALL cudaGraphNodeGetDependencies(cudaGraphNode_t node, cudaGraphNode_t* nodes, cudaGraphEdgeData* data, size_t* count) {
    DRIVER(cuGraphNodeGetDependencies(reinterpret_cast<CUgraphNode>(node), reinterpret_cast<CUgraphNode*>(nodes),
                                      reinterpret_cast<CUgraphEdgeData*>(data), count));
}
CALL cudaGraphInstantiateWithFlags(cudaGraphExec_t* out, cudaGraph_t graph, unsigned long long flags) {
    ACTIVE;
    DRIVER(cuGraphInstantiateWithFlags(reinterpret_cast<CUgraphExec*>(out), GR(graph), flags));
}
CALL cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream) {
    ACTIVE;
    DRIVER(cuGraphLaunch(reinterpret_cast<CUgraphExec>(executable), S(stream)));
}
CALL cudaGraphExecDestroy(cudaGraphExec_t executable) { DRIVER(cuGraphExecDestroy(reinterpret_cast<CUgraphExec>(executable))); }
CALL cudaGraphDebugDotPrint(cudaGraph_t graph, const char* path, unsigned flags) { DRIVER(cuGraphDebugDotPrint(GR(graph), path, flags)); }
