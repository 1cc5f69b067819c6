// What the device says of itself, and what a launch costs in virtual time. No kernel runs.
#include "core.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <sstream>
#include <string>
#include <vector>

namespace emu {
namespace {

// What GPUs say of themselves, as their makers publish it. The first is meant where none is chosen, and has no name of its own.
struct Model {
    const char *chosen, *name;
    int major, minor, multiprocessors, threads_per_sm, blocks_per_sm, shared_per_sm, shared_per_block, l2_bytes, bus_bits, clock_khz;
};
constexpr Model MODELS[] = {
    {"h200", "Emulated sm_90, no kernels run", 9, 0, 132, 2048, 32, 233472, 232448, 62914560, 6144, 1980000},
    {"h100", "Emulated H100, no kernels run", 9, 0, 132, 2048, 32, 233472, 232448, 52428800, 5120, 1980000},
    {"a100", "Emulated A100, no kernels run", 8, 0, 108, 2048, 32, 167936, 166912, 41943040, 5120, 1410000},
    {"l4", "Emulated L4, no kernels run", 8, 9, 58, 1536, 24, 102400, 101376, 50331648, 192, 2040000},
    {"rtx4090", "Emulated RTX 4090, no kernels run", 8, 9, 128, 1536, 24, 102400, 101376, 75497472, 384, 2520000},
};
constexpr int REGISTERS_PER_SM = 65536;

// EMULATED_CUDA_DEVICE names the first device, the second after a comma, and so on; where it ends, the others are like the last.
const Model& model(int device) {
    static const std::vector<const Model*> chosen = [] {
        std::vector<const Model*> found;
        std::istringstream wanted(getenv("EMULATED_CUDA_DEVICE") ? getenv("EMULATED_CUDA_DEVICE") : "");
        for (std::string name; std::getline(wanted, name, ',');) {
            for (const Model& item : MODELS) {
                if (name == item.chosen) found.push_back(&item);
            }
        }
        if (found.empty()) found.push_back(&MODELS[0]);
        return found;
    }();
    return *chosen[std::min(size_t(physical(device)), chosen.size() - 1)];
}

double cycles_per_ns() { return model(current_device()).clock_khz * 1e-6; }  // for kernels that count cycles, like torch.cuda._sleep's

double kernel_ns(const Launch& launch, void** arguments) {
    const std::string& name = launch.function->name;
    if (arguments && arguments[0] && name.find("spin_kernel") != std::string::npos) {
        int64_t cycles;
        memcpy(&cycles, arguments[0], sizeof cycles);
        return std::max(0.0, double(cycles) / cycles_per_ns());
    }
    double blocks = double(launch.grid[0]) * launch.grid[1] * launch.grid[2];
    int threads = int(launch.block[0] * launch.block[1] * launch.block[2]);
    int resident = std::max(1, resident_blocks(*launch.function, threads, launch.shared));
    return 2000.0 + 1500.0 * std::ceil(blocks / (double(resident) * model(current_device()).multiprocessors));
}

}  // namespace

const char* device_name(int device) { return model(device).name; }

int device_attribute(int number, int device) {
    const Model& gpu = model(device);
    switch (number) {
        case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK: return 1024;
        case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X: return 1024;
        case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y: return 1024;
        case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z: return 64;
        case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X: return 2147483647;
        case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y: return 65535;
        case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z: return 65535;
        case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK: return 49152;
        case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: return gpu.shared_per_block;
        case CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK: return 1024;
        case CU_DEVICE_ATTRIBUTE_TOTAL_CONSTANT_MEMORY: return 65536;
        case CU_DEVICE_ATTRIBUTE_WARP_SIZE: return 32;
        case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK: return 65536;
        case CU_DEVICE_ATTRIBUTE_CLOCK_RATE: return gpu.clock_khz;
        case CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE: return 3201000;
        case CU_DEVICE_ATTRIBUTE_TEXTURE_ALIGNMENT: return 512;
        case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: return gpu.multiprocessors;
        case CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY: return 1;
        case CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS: return 1;
        case CU_DEVICE_ATTRIBUTE_ECC_ENABLED: return 1;
        case CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT: return 3;
        case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING: return 1;
        case CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH: return gpu.bus_bits;
        case CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE: return gpu.l2_bytes;
        case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR: return gpu.threads_per_sm;
        case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: return gpu.major;
        case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: return gpu.minor;
        case CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED: return 1;
        case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR: return gpu.shared_per_sm;
        case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR: return REGISTERS_PER_SM;
        case CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY: return 1;
        case CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH: return 1;
        case CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR: return gpu.blocks_per_sm;
        case CU_DEVICE_ATTRIBUTE_CLUSTER_LAUNCH: return gpu.major >= 9;
        case CU_DEVICE_ATTRIBUTE_TENSOR_MAP_ACCESS_SUPPORTED: return gpu.major >= 9;
        case CU_DEVICE_ATTRIBUTE_MAX_PITCH: return 2147483647;
        case CU_DEVICE_ATTRIBUTE_COMPUTE_PREEMPTION_SUPPORTED: return 1;
        case CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED: return 1;
        default: return 0;  // peer access, virtual memory, memory pools, multicast: not there
    }
}

int resident_blocks(const Function& function, int threads, size_t dynamic_shared) {
    if (threads < 1 || threads > 1024) return 0;
    int warps = (threads + 31) / 32;
    const Model& gpu = model(current_device());
    int by_threads = gpu.threads_per_sm / (warps * 32);
    int by_registers = REGISTERS_PER_SM / (function.registers * warps * 32);
    int by_shared = int(size_t(gpu.shared_per_sm) / (dynamic_shared + size_t(function.static_shared) + 1024));
    return std::max(0, std::min({by_threads, by_registers, by_shared, gpu.blocks_per_sm}));
}

int function_attribute(const Function& function, int number) {
    auto set = function.attributes.find(number);
    switch (number) {
        case CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK: return 1024;
        case CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES: return function.static_shared;
        case CU_FUNC_ATTRIBUTE_NUM_REGS: return function.registers;
        case CU_FUNC_ATTRIBUTE_PTX_VERSION:
        case CU_FUNC_ATTRIBUTE_BINARY_VERSION: return 10 * model(current_device()).major + model(current_device()).minor;
        case CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES: return set != function.attributes.end() ? set->second : 49152;
        default: return set != function.attributes.end() ? set->second : 0;
    }
}

int launch_kernel(Stream* stream, Launch launch, void** arguments) {
    double blocks = double(launch.grid[0]) * launch.grid[1] * launch.grid[2];
    double threads = double(launch.block[0]) * launch.block[1] * launch.block[2];
    if (blocks < 1 || threads < 1 || threads > 1024 || launch.grid[1] > 65535 || launch.grid[2] > 65535) return CUDA_ERROR_INVALID_VALUE;
    int allowed = function_attribute(*launch.function, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES);
    if (int(launch.shared) > std::max(allowed, 49152) || int(launch.shared) > model(current_device()).shared_per_block) return CUDA_ERROR_INVALID_VALUE;
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
            entry->attributes[CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES] = model(current_device()).shared_per_block;
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
