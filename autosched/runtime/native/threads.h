// How many threads the operators of one thread have.
#pragma once

#include <ATen/Config.h>
#include <ATen/Context.h>
#include <ATen/Parallel.h>

// OpenMP's and MKL's own, each for the calling thread alone; absent where PyTorch was built without them or hides them.
extern "C" {
__attribute__((weak)) void omp_set_num_threads(int threads);
__attribute__((weak)) int MKL_Set_Num_Threads_Local(int threads);
__attribute__((weak)) void MKL_Set_Dynamic(int dynamic);
}

namespace {

// What at::set_num_threads does for the calling thread, without what it does for others: it also leaves the number to every thread that
// first asks for one later, and a thread of a server's that first did so while lanes run would keep the number of a lane for life.
void tell_threads(int threads) {
#if AT_PARALLEL_OPENMP
  if (omp_set_num_threads != nullptr && (!at::hasMKL() || MKL_Set_Num_Threads_Local != nullptr)) {
    omp_set_num_threads(threads);
    if (MKL_Set_Num_Threads_Local != nullptr) MKL_Set_Num_Threads_Local(threads);
    if (MKL_Set_Dynamic != nullptr) MKL_Set_Dynamic(0);
    return;
  }
#endif
  at::set_num_threads(threads);
}

// MKL's number cannot be asked for: a thread of a team inherits PyTorch's, but not MKL's. To ask for PyTorch's comes first: a thread's first
// question is when it takes the number that others left.
void use_threads(int threads) {
  thread_local int said = 0;
  if (at::get_num_threads() != threads || said != threads) tell_threads(said = threads);
}

// Has the caller's operators use, when this ends, as many threads as they did when it began. Not left to Python, where an interrupt may
// come in between.
struct CallersThreads {
  const int threads = at::get_num_threads();
  ~CallersThreads() { use_threads(threads); }
};

}  // namespace
