// Tells ThreadSanitizer, which sees nothing of GNU's OpenMP, what that promises of a parallel region: all that was done before it comes
// before it, and all of it before what follows; and of a barrier within a region that all threads have come to it before one goes on. Of
// two threads of one region it says nothing else: that is what is looked for.

#include <cstdio>
#include <cstdlib>

#include <dlfcn.h>

extern "C" void __tsan_acquire(void*);
extern "C" void __tsan_release(void*);

namespace {

using Region = void (*)(void*);
using Parallel = void (*)(Region, void*, unsigned, unsigned);
using Barrier = void (*)();

struct Told {
  Region region;
  void* given;
  char begin, meeting, end;
};

thread_local char* meeting = nullptr;

void run(void* given) {
  auto& told = *static_cast<Told*>(given);
  meeting = &told.meeting;
  __tsan_acquire(&told.begin);
  told.region(told.given);
  __tsan_release(&told.end);
}

void* find_openmp(const char* name) {
  if (void* found = dlsym(RTLD_NEXT, name)) return found;
  std::fputs("PyTorch's OpenMP is not GNU's\n", stderr);
  std::abort();
}

}  // namespace

extern "C" void GOMP_parallel(Region region, void* given, unsigned threads, unsigned flags) {
  static const auto parallel = reinterpret_cast<Parallel>(find_openmp("GOMP_parallel"));
  Told told{region, given, 0, 0, 0};
  __tsan_release(&told.begin);
  parallel(run, &told, threads, flags);
  __tsan_acquire(&told.end);
}

extern "C" void GOMP_barrier() {
  static const auto barrier = reinterpret_cast<Barrier>(find_openmp("GOMP_barrier"));
  if (meeting != nullptr) __tsan_release(meeting);
  barrier();
  if (meeting != nullptr) __tsan_acquire(meeting);
}
