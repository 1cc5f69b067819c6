// What every function of the driver's face begins and ends with.
#pragma once

#include "core.h"

#define CALL extern "C" __attribute__((visibility("default"))) CUresult
#define DONE(value)                          \
    do {                                     \
        int code_ = (value);                 \
        emu::trace(__func__, code_);         \
        return static_cast<CUresult>(code_); \
    } while (0)
#define LOCKED std::lock_guard<std::recursive_mutex> held_(emu::world().lock)
