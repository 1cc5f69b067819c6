// What the device says of itself, and what a launch costs in virtual time. No kernel runs.
#include "core.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace emu {
namespace {

constexpr int MULTIPROCESSORS = 132, THREADS_PER_SM = 2048, BLOCKS_PER_SM = 32, SHARED_PER_SM = 233472, REGISTERS_PER_SM = 65536;
constexpr double CYCLES_PER_NS = 1.98;  // for kernels that count cycles, like torch.cuda._sleep's

double kernel_ns(const Launch& launch, void** arguments) {
    const std::string& name = launch.function->name;
    if (arguments && arguments[0] && name.find("spin_kernel") != std::string::npos) {
        int64_t cycles;
        memcpy(&cycles, arguments[0], sizeof cycles);
        return std::max(0.0, double(cycles) / CYCLES_PER_NS);
    }
    double blocks = double(launch.grid[0]) * launch.grid[1] * launch.grid[2];
    int threads = int(launch.block[0] * launch.block[1] * launch.block[2]);
    int resident = std::max(1, resident_blocks(*launch.function, threads, launch.shared));
    return 2000.0 + 1500.0 * std::ceil(blocks / (double(resident) * MULTIPROCESSORS));
}

}  // namespace

const char* device_name() { return "Emulated sm_90, no kernels run"; }

int device_attribute(int number) {
    switch (number) {
        case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK: return 1024;
        case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X: return 1024;
        case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y: return 1024;
        case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z: return 64;
        case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X: return 2147483647;
        case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y: return 65535;
        case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z: return 65535;
        case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK: return 49152;
        case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: return 232448;
        case CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK: return 1024;
        case CU_DEVICE_ATTRIBUTE_TOTAL_CONSTANT_MEMORY: return 65536;
        case CU_DEVICE_ATTRIBUTE_WARP_SIZE: return 32;
        case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK: return 65536;
        case CU_DEVICE_ATTRIBUTE_CLOCK_RATE: return 1980000;
        case CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE: return 3201000;
        case CU_DEVICE_ATTRIBUTE_TEXTURE_ALIGNMENT: return 512;
        case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: return MULTIPROCESSORS;
        case CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY: return 1;
        case CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS: return 1;
        case CU_DEVICE_ATTRIBUTE_ECC_ENABLED: return 1;
        case CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT: return 3;
        case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING: return 1;
        case CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH: return 6144;
        case CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE: return 62914560;
        case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR: return THREADS_PER_SM;
        case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: return 9;
        case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: return 0;
        case CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED: return 1;
        case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR: return SHARED_PER_SM;
        case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR: return REGISTERS_PER_SM;
        case CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY: return 1;
        case CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH: return 1;
        case CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR: return BLOCKS_PER_SM;
        case CU_DEVICE_ATTRIBUTE_CLUSTER_LAUNCH: return 1;
        case CU_DEVICE_ATTRIBUTE_TENSOR_MAP_ACCESS_SUPPORTED: return 1;
        case CU_DEVICE_ATTRIBUTE_MAX_PITCH: return 2147483647;
        case CU_DEVICE_ATTRIBUTE_COMPUTE_PREEMPTION_SUPPORTED: return 1;
        case CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED: return 1;
        default: return 0;  // peer access, virtual memory, memory pools, multicast: not there
    }
}

int resident_blocks(const Function& function, int threads, size_t dynamic_shared) {
    if (threads < 1 || threads > 1024) return 0;
    int warps = (threads + 31) / 32;
    int by_threads = THREADS_PER_SM / (warps * 32);
    int by_registers = REGISTERS_PER_SM / (function.registers * warps * 32);
    int by_shared = int(SHARED_PER_SM / (dynamic_shared + size_t(function.static_shared) + 1024));
    return std::max(0, std::min({by_threads, by_registers, by_shared, BLOCKS_PER_SM}));
}

int function_attribute(const Function& function, int number) {
    auto set = function.attributes.find(number);
    switch (number) {
        case CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK: return 1024;
        case CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES: return function.static_shared;
        case CU_FUNC_ATTRIBUTE_NUM_REGS: return function.registers;
        case CU_FUNC_ATTRIBUTE_PTX_VERSION:
        case CU_FUNC_ATTRIBUTE_BINARY_VERSION: return 90;
        case CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES: return set != function.attributes.end() ? set->second : 49152;
        default: return set != function.attributes.end() ? set->second : 0;
    }
}

int launch_kernel(Stream* stream, Launch launch, void** arguments) {
    double blocks = double(launch.grid[0]) * launch.grid[1] * launch.grid[2];
    double threads = double(launch.block[0]) * launch.block[1] * launch.block[2];
    if (blocks < 1 || threads < 1 || threads > 1024 || launch.grid[1] > 65535 || launch.grid[2] > 65535) return CUDA_ERROR_INVALID_VALUE;
    int allowed = function_attribute(*launch.function, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES);
    if (int(launch.shared) > std::max(allowed, 49152) || launch.shared > 232448) return CUDA_ERROR_INVALID_VALUE;
    Operation operation;
    operation.kind = CU_GRAPH_NODE_TYPE_KERNEL;
    operation.duration_ns = kernel_ns(launch, arguments);
    operation.launch = launch;
    return enqueue(stream, std::move(operation));
}

int launch_library(Stream* stream, const char* name, double work, unsigned blocks, unsigned threads, unsigned shared) {
    static std::recursive_mutex lock;
    static std::map<std::string, Function*> made;
    Function* function;
    {
        std::lock_guard<std::recursive_mutex> held(lock);
        Function*& entry = made[name];
        if (!entry) {
            entry = new Function;
            entry->name = name;
            entry->registers = 128;
            entry->of_library = true;
            entry->attributes[CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES] = 232448;
        }
        function = entry;
    }
    Operation operation;
    operation.kind = CU_GRAPH_NODE_TYPE_KERNEL;
    operation.launch.function = function;
    operation.launch.grid[0] = std::max(1u, blocks);
    operation.launch.block[0] = threads;
    operation.launch.shared = shared;
    operation.duration_ns = 3000.0 + work / 2.0e5;  // operations; some 200 of them a picosecond
    return enqueue(stream, std::move(operation));
}

}  // namespace emu
