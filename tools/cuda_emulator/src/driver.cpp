// The driver's face: libcuda.so.1. Thin; every rule is in the core.
#include "face.h"

#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

using namespace emu;

#define NEED_CONTEXT \
    if (!current_context) DONE(CUDA_ERROR_INVALID_CONTEXT)

namespace {

bool initialised = false;

struct Module {
    std::map<std::string, std::unique_ptr<Function>> functions;
};

Stream* S(CUstream handle) { return stream_of(handle); }
Event* E(CUevent handle) { return reinterpret_cast<Event*>(handle); }
Function* F(CUfunction handle) { return reinterpret_cast<Function*>(handle); }

Function* function_named(Module* module, const char* name) {
    LOCKED;
    auto& entry = module->functions[name];
    if (!entry) {
        entry = std::make_unique<Function>();
        entry->name = name;
    }
    return entry.get();
}

int load(CUmodule* out, const void* image) {
    if (int code = health()) return code;
    if (!current_context) return CUDA_ERROR_INVALID_CONTEXT;
    if (!out || !image) return CUDA_ERROR_INVALID_VALUE;
    LOCKED;
    if (int code = unsafe_call()) return code;
    *out = reinterpret_cast<CUmodule>(new Module);
    return 0;
}

}  // namespace

// Devices and contexts.

CALL cuInit(unsigned) {
    initialised = true;
    DONE(world().forked ? CUDA_ERROR_NOT_INITIALIZED : device_count() ? 0 : CUDA_ERROR_NO_DEVICE);
}
CALL cuDriverGetVersion(int* out) {
    // Of the installed headers: a driver as new as the runtime, unless another is asked for.
    const char* asked = getenv("EMULATED_CUDA_DRIVER_VERSION");
    *out = asked ? atoi(asked) : CUDA_VERSION;
    DONE(0);
}
CALL cuDeviceGetCount(int* out) {
    *out = device_count();
    DONE(initialised ? 0 : CUDA_ERROR_NOT_INITIALIZED);
}
CALL cuDeviceGet(CUdevice* out, int ordinal) {
    *out = ordinal;
    DONE(!initialised ? CUDA_ERROR_NOT_INITIALIZED : ordinal >= 0 && ordinal < device_count() ? 0 : CUDA_ERROR_INVALID_DEVICE);
}
CALL cuDeviceGetName(char* out, int size, CUdevice device) {
    snprintf(out, size_t(size), "%s", device_name(device));
    DONE(0);
}
CALL cuDeviceGetUuid(CUuuid* out, CUdevice device) {
    memcpy(out->bytes, "emulated-device", 16);
    out->bytes[15] = char(physical(device));
    DONE(0);
}
CALL cuDeviceTotalMem(size_t* out, CUdevice) {
    memory_info(nullptr, out);
    DONE(0);
}
CALL cuDeviceGetAttribute(int* out, CUdevice_attribute number, CUdevice device) {
    *out = device_attribute(number, device);
    DONE(0);
}
CALL cuDeviceGetPCIBusId(char* out, int size, CUdevice device) {
    snprintf(out, size_t(size), "0000:%02x:00.0", physical(device));
    DONE(0);
}
CALL cuDevicePrimaryCtxRetain(CUcontext* out, CUdevice device) {
    if (int code = health()) DONE(code);
    world().contexts |= 1ull << device;
    *out = primary_context(device);
    DONE(0);
}
CALL cuDevicePrimaryCtxRelease(CUdevice) { DONE(0); }
CALL cuDevicePrimaryCtxGetState(CUdevice device, unsigned* flags, int* active) {
    if (flags) *flags = 0;
    if (active) *active = int(world().contexts >> device & 1);
    DONE(0);
}
CALL cuDevicePrimaryCtxSetFlags(CUdevice, unsigned) { DONE(0); }
CALL cuCtxGetCurrent(CUcontext* out) {
    *out = current_context;
    DONE(initialised || world().contexts ? 0 : CUDA_ERROR_NOT_INITIALIZED);
}
CALL cuCtxSetCurrent(CUcontext context) {
    current_context = context;
    DONE(0);
}
static thread_local std::vector<CUcontext> contexts_below;
CALL cuCtxPushCurrent(CUcontext context) {
    contexts_below.push_back(current_context);
    current_context = context;
    DONE(0);
}
CALL cuCtxPopCurrent(CUcontext* out) {
    NEED_CONTEXT;
    if (out) *out = current_context;
    current_context = contexts_below.empty() ? nullptr : contexts_below.back();
    if (!contexts_below.empty()) contexts_below.pop_back();
    DONE(0);
}
CALL cuCtxGetDevice(CUdevice* out) {
    NEED_CONTEXT;
    *out = current_device();
    DONE(0);
}
CALL cuCtxSynchronize() {
    NEED_CONTEXT;
    DONE(device_synchronize());
}
CALL cuCtxGetLimit(size_t* out, CUlimit) {
    *out = 1024;
    DONE(0);
}
CALL cuCtxSetLimit(CUlimit, size_t) { DONE(0); }
CALL cuCtxGetStreamPriorityRange(int* least, int* greatest) {
    if (least) *least = 0;
    if (greatest) *greatest = -5;
    DONE(0);
}
CALL cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode* mode) { DONE(exchange_mode(mode)); }
CALL cuGetErrorName(CUresult error, const char** out) {
    *out = error ? "CUDA_ERROR" : "CUDA_SUCCESS";
    DONE(0);
}
CALL cuGetErrorString(CUresult error, const char** out) {
    static thread_local char text[64];
    snprintf(text, sizeof text, error ? "emulated driver's error %d" : "no error", int(error));
    *out = text;
    DONE(0);
}
CALL cuGetExportTable(const void** out, const CUuuid*) {
    *out = nullptr;
    DONE(CUDA_ERROR_NOT_FOUND);
}
CALL cuProfilerStart() { DONE(0); }
CALL cuProfilerStop() { DONE(0); }

// Code.

CALL cuModuleLoadData(CUmodule* out, const void* image) { DONE(load(out, image)); }
CALL cuModuleLoadDataEx(CUmodule* out, const void* image, unsigned, CUjit_option*, void**) { DONE(load(out, image)); }
CALL cuModuleLoadFatBinary(CUmodule* out, const void* image) { DONE(load(out, image)); }
CALL cuModuleLoad(CUmodule* out, const char* path) {
    FILE* file = fopen(path, "rb");
    if (!file) DONE(CUDA_ERROR_FILE_NOT_FOUND);
    fclose(file);
    DONE(load(out, path));
}
CALL cuModuleUnload(CUmodule) {
    LOCKED;
    DONE(unsafe_call());  // the functions stay: a graph may still name them
}
CALL cuModuleGetFunction(CUfunction* out, CUmodule module, const char* name) {
    *out = reinterpret_cast<CUfunction>(function_named(reinterpret_cast<Module*>(module), name));
    DONE(0);
}
CALL cuLibraryLoadData(CUlibrary* out, const void* image, CUjit_option*, void**, unsigned, CUlibraryOption*, void**, unsigned) {
    activate();
    DONE(load(reinterpret_cast<CUmodule*>(out), image));
}
CALL cuLibraryUnload(CUlibrary) { DONE(0); }
CALL cuLibraryGetKernel(CUkernel* out, CUlibrary library, const char* name) {
    *out = reinterpret_cast<CUkernel>(function_named(reinterpret_cast<Module*>(library), name));
    DONE(0);
}
CALL cuKernelGetFunction(CUfunction* out, CUkernel kernel) {
    NEED_CONTEXT;
    LOCKED;
    auto* function = F(reinterpret_cast<CUfunction>(kernel));
    if (function->of_library) {
        if (!function->in_context) function->in_context = new Function(*function);
        function = function->in_context;
        function->of_library = false;
    }
    *out = reinterpret_cast<CUfunction>(function);
    DONE(0);
}
CALL cuKernelGetAttribute(int* out, CUfunction_attribute number, CUkernel kernel, CUdevice) {
    if (!kernel) DONE(CUDA_ERROR_INVALID_HANDLE);
    *out = function_attribute(*F(reinterpret_cast<CUfunction>(kernel)), number);
    DONE(0);
}
CALL cuKernelGetName(const char** out, CUkernel kernel) {
    *out = F(reinterpret_cast<CUfunction>(kernel))->name.c_str();
    DONE(0);
}
CALL cuFuncGetName(const char** out, CUfunction function) {
    *out = F(function)->name.c_str();
    DONE(0);
}
CALL cuFuncGetAttribute(int* out, CUfunction_attribute number, CUfunction function) {
    if (!function || F(function)->of_library) DONE(CUDA_ERROR_INVALID_HANDLE);
    *out = function_attribute(*F(function), number);
    DONE(0);
}
CALL cuFuncSetAttribute(CUfunction function, CUfunction_attribute number, int value) {
    if (!function) DONE(CUDA_ERROR_INVALID_HANDLE);
    if (number == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES && value > 232448) DONE(CUDA_ERROR_INVALID_VALUE);
    F(function)->attributes[number] = value;
    DONE(0);
}
CALL cuFuncSetCacheConfig(CUfunction, CUfunc_cache) { DONE(0); }
CALL cuOccupancyMaxActiveBlocksPerMultiprocessor(int* out, CUfunction function, int threads, size_t shared) {
    NEED_CONTEXT;
    *out = resident_blocks(*F(function), threads, shared);
    DONE(0);
}
CALL cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* out, CUfunction function, int threads, size_t shared, unsigned) {
    NEED_CONTEXT;
    *out = resident_blocks(*F(function), threads, shared);
    DONE(0);
}
CALL cuOccupancyMaxActiveClusters(int* out, CUfunction, const CUlaunchConfig*) {
    *out = 132;
    DONE(0);
}
CALL cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*,
                            const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion,
                            CUtensorMapFloatOOBfill) {
    memset(map, 0, sizeof *map);
    DONE(0);
}

static Launch described(CUfunction function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared) {
    Launch launch;
    launch.function = F(function);
    unsigned grid[] = {gx, gy, gz}, block[] = {bx, by, bz};
    memcpy(launch.grid, grid, sizeof grid);
    memcpy(launch.block, block, sizeof block);
    launch.shared = shared;
    return launch;
}

CALL cuLaunchKernel(CUfunction function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared,
                    CUstream stream, void** arguments, void**) {
    NEED_CONTEXT;
    if (!function) DONE(CUDA_ERROR_INVALID_HANDLE);
    DONE(launch_kernel(S(stream), described(function, gx, gy, gz, bx, by, bz, shared), arguments));
}
CALL cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction function, void** arguments, void**) {
    NEED_CONTEXT;
    if (!function || !config) DONE(CUDA_ERROR_INVALID_VALUE);
    Launch launch = described(function, config->gridDimX, config->gridDimY, config->gridDimZ, config->blockDimX, config->blockDimY,
                              config->blockDimZ, config->sharedMemBytes);
    for (unsigned i = 0; i < config->numAttrs; ++i) {
        if (config->attrs[i].id == CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION) memcpy(launch.cluster, &config->attrs[i].value.clusterDim, 12);
        if (config->attrs[i].id == CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION) {
            launch.early = config->attrs[i].value.programmaticStreamSerializationAllowed != 0;
        }
    }
    DONE(launch_kernel(S(config->hStream), launch, arguments));
}
CALL cuLaunchCooperativeKernel(CUfunction function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                               unsigned shared, CUstream stream, void** arguments) {
    NEED_CONTEXT;
    DONE(launch_kernel(S(stream), described(function, gx, gy, gz, bx, by, bz, shared), arguments));
}
CALL cuLaunchHostFunc(CUstream stream, CUhostFn function, void* data) {
    Operation operation;
    operation.kind = CU_GRAPH_NODE_TYPE_HOST;
    operation.duration_ns = 5000;
    operation.effect = [=] {
        function(data);
        return 0;
    };
    DONE(enqueue(S(stream), std::move(operation)));
}

// Memory.

CALL cuMemGetInfo(size_t* free_bytes, size_t* total) {
    NEED_CONTEXT;
    memory_info(free_bytes, total);
    DONE(0);
}
CALL cuMemAlloc(CUdeviceptr* out, size_t bytes) {
    NEED_CONTEXT;
    DONE(allocate(reinterpret_cast<void**>(out), bytes));
}
CALL cuMemFree(CUdeviceptr address) { DONE(release(reinterpret_cast<void*>(address))); }
CALL cuMemAllocHost(void** out, size_t bytes) { DONE(allocate_pinned(out, bytes)); }
CALL cuMemHostAlloc(void** out, size_t bytes, unsigned) { DONE(allocate_pinned(out, bytes)); }
CALL cuMemFreeHost(void* address) { DONE(release_pinned(address)); }
CALL cuMemHostRegister(void* address, size_t bytes, unsigned) { DONE(register_pinned(address, bytes)); }
CALL cuMemHostUnregister(void* address) { DONE(unregister_pinned(address)); }
CALL cuMemHostGetDevicePointer(CUdeviceptr* out, void* address, unsigned) {
    *out = reinterpret_cast<CUdeviceptr>(address);
    DONE(0);
}

static int memory_call(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream, bool waits) {
    return memory_copy(S(stream), reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), bytes, waits);
}
CALL cuMemcpy(CUdeviceptr to, CUdeviceptr from, size_t bytes) { DONE(memory_call(to, from, bytes, nullptr, true)); }
CALL cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) { DONE(memory_call(to, from, bytes, stream, false)); }
CALL cuMemcpyHtoD(CUdeviceptr to, const void* from, size_t bytes) { DONE(memory_call(to, CUdeviceptr(from), bytes, nullptr, true)); }
CALL cuMemcpyDtoH(void* to, CUdeviceptr from, size_t bytes) { DONE(memory_call(CUdeviceptr(to), from, bytes, nullptr, true)); }
CALL cuMemcpyHtoDAsync(CUdeviceptr to, const void* from, size_t bytes, CUstream stream) {
    DONE(memory_call(to, CUdeviceptr(from), bytes, stream, false));
}
CALL cuMemcpyDtoHAsync(void* to, CUdeviceptr from, size_t bytes, CUstream stream) {
    DONE(memory_call(CUdeviceptr(to), from, bytes, stream, false));
}
CALL cuMemcpyDtoDAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
    DONE(memory_call(to, from, bytes, stream, false));
}
CALL cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t count, CUstream stream) {
    DONE(memory_fill(S(stream), reinterpret_cast<void*>(to), value, 1, count));
}
CALL cuMemsetD32Async(CUdeviceptr to, unsigned value, size_t count, CUstream stream) {
    DONE(memory_fill(S(stream), reinterpret_cast<void*>(to), value, 4, count));
}
CALL cuPointerGetAttribute(void* out, CUpointer_attribute attribute, CUdeviceptr address) {
    LOCKED;
    void* base = nullptr;
    size_t size = 0;
    Memory kind = kind_of(reinterpret_cast<void*>(address), 1, &base, &size);
    if (kind != Memory::DEVICE && kind != Memory::PINNED) DONE(CUDA_ERROR_INVALID_VALUE);
    switch (attribute) {
        case CU_POINTER_ATTRIBUTE_CONTEXT: *static_cast<CUcontext*>(out) = primary_context(device_of(reinterpret_cast<void*>(address))); break;
        case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
            *static_cast<unsigned*>(out) = kind == Memory::DEVICE ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST;
            break;
        case CU_POINTER_ATTRIBUTE_DEVICE_POINTER: *static_cast<CUdeviceptr*>(out) = address; break;
        case CU_POINTER_ATTRIBUTE_HOST_POINTER: *static_cast<CUdeviceptr*>(out) = address; break;
        case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR: *static_cast<void**>(out) = base; break;
        case CU_POINTER_ATTRIBUTE_RANGE_SIZE: *static_cast<size_t*>(out) = size; break;
        case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: *static_cast<int*>(out) = 0; break;
        case CU_POINTER_ATTRIBUTE_IS_MANAGED: *static_cast<unsigned*>(out) = 0; break;
        default: DONE(CUDA_ERROR_INVALID_VALUE);
    }
    DONE(0);
}

// Streams and events.

static int device_of_stream(CUstream stream) {
    const Stream* found = S(stream);
    return found && found->device != ANY_DEVICE ? found->device : current_device();
}
CALL cuStreamCreateWithPriority(CUstream* out, unsigned flags, int priority) {
    DONE(stream_create(reinterpret_cast<Stream**>(out), flags, priority));
}
CALL cuStreamCreate(CUstream* out, unsigned flags) { DONE(stream_create(reinterpret_cast<Stream**>(out), flags, 0)); }
CALL cuStreamDestroy(CUstream stream) { DONE(stream_destroy(S(stream))); }
CALL cuStreamSynchronize(CUstream stream) { DONE(stream_synchronize(S(stream))); }
CALL cuStreamQuery(CUstream stream) { DONE(stream_query(S(stream))); }
CALL cuStreamWaitEvent(CUstream stream, CUevent event, unsigned flags) { DONE(stream_wait(S(stream), E(event), flags)); }
CALL cuStreamGetPriority(CUstream stream, int* out) {
    if (!S(stream)) DONE(CUDA_ERROR_INVALID_HANDLE);
    *out = S(stream)->priority;
    DONE(0);
}
CALL cuStreamGetFlags(CUstream stream, unsigned* out) {
    if (!S(stream)) DONE(CUDA_ERROR_INVALID_HANDLE);
    *out = S(stream)->non_blocking ? CU_STREAM_NON_BLOCKING : 0;
    DONE(0);
}
CALL cuStreamGetCtx(CUstream stream, CUcontext* out) {
    *out = primary_context(device_of_stream(stream));
    DONE(0);
}
CALL cuStreamGetDevice(CUstream stream, CUdevice* out) {
    *out = device_of_stream(stream);
    DONE(0);
}
CALL cuStreamBeginCapture(CUstream stream, CUstreamCaptureMode mode) {
    if (!S(stream)) DONE(CUDA_ERROR_INVALID_HANDLE);
    LOCKED;
    DONE(capture_begin(S(stream), mode, nullptr));
}
CALL cuStreamEndCapture(CUstream stream, CUgraph* out) {
    Stream* which = S(stream);
    if (!which) DONE(CUDA_ERROR_INVALID_HANDLE);
    LOCKED;
    DONE(capture_end(which, reinterpret_cast<Graph**>(out)));
}
CALL cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus* out) {
    Stream* which = S(stream);
    if (!which) DONE(CUDA_ERROR_INVALID_HANDLE);
    LOCKED;
    DONE(capture_status(which, out));
}
CALL cuStreamGetCaptureInfo(CUstream stream, CUstreamCaptureStatus* status, cuuint64_t* id, CUgraph* graph, const CUgraphNode** nodes,
                            const CUgraphEdgeData** edges, size_t* count) {
    Stream* which = S(stream);
    if (!which) DONE(CUDA_ERROR_INVALID_HANDLE);
    LOCKED;
    if (int code = capture_status(which, status)) DONE(code);
    if (*status != CU_STREAM_CAPTURE_STATUS_ACTIVE) DONE(0);
    if (id) *id = which->capture->id;
    if (graph) *graph = reinterpret_cast<CUgraph>(which->capture->graph.get());
    if (nodes) *nodes = reinterpret_cast<const CUgraphNode*>(which->frontier.data());
    if (edges) {
        static thread_local std::vector<CUgraphEdgeData> plain;
        plain.assign(which->frontier.size(), CUgraphEdgeData{});
        *edges = plain.data();
    }
    if (count) *count = which->frontier.size();
    DONE(0);
}
CALL cuEventCreate(CUevent* out, unsigned flags) { DONE(event_create(reinterpret_cast<Event**>(out), flags)); }
CALL cuEventDestroy(CUevent event) { DONE(event_destroy(E(event))); }
CALL cuEventRecord(CUevent event, CUstream stream) { DONE(event_record(E(event), S(stream), 0)); }
CALL cuEventRecordWithFlags(CUevent event, CUstream stream, unsigned flags) { DONE(event_record(E(event), S(stream), flags)); }
CALL cuEventQuery(CUevent event) { DONE(event_query(E(event))); }
CALL cuEventSynchronize(CUevent event) { DONE(event_synchronize(E(event))); }
CALL cuEventElapsedTime(float* out, CUevent start, CUevent end) { DONE(event_elapsed(out, E(start), E(end))); }

// Everything that is not emulated answers "not supported", as newer functions do on an older driver.
static CUresult not_supported() {
    trace("a function that is not emulated", CUDA_ERROR_NOT_SUPPORTED);
    return CUDA_ERROR_NOT_SUPPORTED;
}

CALL cuGetProcAddress_v2(const char* symbol, void** out, int, cuuint64_t, CUdriverProcAddressQueryResult* status) {
    static void* self = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
    void* found = nullptr;
    for (const char* suffix : {"_v4", "_v3", "_v2", ""}) {
        if (!found) found = dlsym(self, (std::string(symbol) + suffix).c_str());
    }
    if (!found) {
        const char* wanted = getenv("EMULATED_CUDA_TRACE");
        if (wanted && *wanted == '2') fprintf(stderr, "[emulated cuda] no %s\n", symbol);
    }
    *out = found ? found : reinterpret_cast<void*>(not_supported);
    if (status) *status = CU_GET_PROC_ADDRESS_SUCCESS;
    return CUDA_SUCCESS;
}
