#if defined(__x86_64__)
#define DISTRAIN_ISA avx512
#include "kernels_isa.h"
#endif
