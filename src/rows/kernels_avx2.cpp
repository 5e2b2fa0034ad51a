#if defined(__x86_64__)
#define DISTRAIN_KERNELS kAvx2Kernels
#include "kernels_isa.h"
#endif
