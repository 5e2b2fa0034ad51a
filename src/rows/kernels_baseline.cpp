#define DISTRAIN_KERNELS kBaselineKernels
#include "kernels_isa.h"
