// Functions that Python calls. There is one for each set of tensors that there may be, since whoever calls a kernel hands over all of its pointers,
// and none that is null.
#pragma once

#define AUTOSCHED_KERNEL __attribute__((visibility("default")))
