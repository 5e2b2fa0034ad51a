// A fake libcuda.so.1 of CUDA 12.4, complete enough for CUDA 13's runtime to refuse it.
#include <cstring>

extern "C" {

int cuInit(unsigned) { return 0; }
int cuDriverGetVersion(int* version) {
  *version = 12040;
  return 0;
}
int cuUnknown() { return 999; }

int cuGetProcAddress_v2(const char* name, void** function, int, unsigned long long, void*) {
  *function = reinterpret_cast<void*>(&cuUnknown);
  if (!std::strcmp(name, "cuInit")) *function = reinterpret_cast<void*>(&cuInit);
  if (!std::strcmp(name, "cuDriverGetVersion")) {
    *function = reinterpret_cast<void*>(&cuDriverGetVersion);
  }
  if (!std::strcmp(name, "cuGetProcAddress")) {
    *function = reinterpret_cast<void*>(&cuGetProcAddress_v2);
  }
  return 0;
}
}
