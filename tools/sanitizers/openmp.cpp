// Tells ThreadSanitizer, which sees nothing of GNU's OpenMP, what that promises of a parallel region: all that was done before it comes
// before it, and all of it before what follows. Of two threads of one region it says nothing: that is what is looked for.

#include <cstdio>
#include <cstdlib>

#include <dlfcn.h>

extern "C" void __tsan_acquire(void*);
extern "C" void __tsan_release(void*);

namespace {

using Region = void (*)(void*);
using Parallel = void (*)(Region, void*, unsigned, unsigned);

struct Told {
  Region region;
  void* given;
  char begin, end;
};

void run(void* given) {
  auto& told = *static_cast<Told*>(given);
  __tsan_acquire(&told.begin);
  told.region(told.given);
  __tsan_release(&told.end);
}

Parallel find_openmp() {
  if (void* found = dlsym(RTLD_NEXT, "GOMP_parallel")) return reinterpret_cast<Parallel>(found);
  std::fputs("PyTorch's OpenMP is not GNU's\n", stderr);
  std::abort();
}

}  // namespace

extern "C" void GOMP_parallel(Region region, void* given, unsigned threads, unsigned flags) {
  static const Parallel parallel = find_openmp();
  Told told{region, given, 0, 0};
  __tsan_release(&told.begin);
  parallel(run, &told, threads, flags);
  __tsan_acquire(&told.end);
}
