// Calls a function of a library with memory that a file holds: the other half of test_kernels_on_arm.py.
//
// Arguments: library, file, address of its memory, function, numbers; those with a point are floats (%a), all
// others integers or addresses. On AArch64 (AAPCS64) both kinds have registers of their own, so one signature fits all.

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include <dlfcn.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

using Function = int64_t (*)(int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t,
                             int64_t, int64_t, float, float, float, float);

int main(int count, char** words) {
  void* const library = dlopen(words[1], RTLD_NOW);
  if (!library) return std::fprintf(stderr, "%s\n", dlerror()), 1;
  const int file = open(words[2], O_RDWR);
  struct stat about;
  fstat(file, &about);
  void* const address = reinterpret_cast<void*>(std::strtoll(words[3], nullptr, 10));
  const int flags = MAP_SHARED | MAP_FIXED_NOREPLACE;
  if (mmap(address, about.st_size, PROT_READ | PROT_WRITE, flags, file, 0) != address) return std::perror("mmap"), 1;
  int64_t n[12] = {};
  float f[4] = {};
  int num_integers = 0, num_floats = 0;
  for (int word = 5; word < count; ++word) {
    if (std::strchr(words[word], '.')) {
      f[num_floats++] = std::strtof(words[word], nullptr);
    } else {
      n[num_integers++] = std::strtoll(words[word], nullptr, 10);
    }
  }
  const auto function = reinterpret_cast<Function>(dlsym(library, words[4]));
  if (!function) return std::fprintf(stderr, "%s\n", dlerror()), 1;
  const int64_t found = function(n[0], n[1], n[2], n[3], n[4], n[5], n[6], n[7], n[8], n[9], n[10], n[11], f[0], f[1],
                                 f[2], f[3]);
  std::printf("%lld\n", static_cast<long long>(found));
}
