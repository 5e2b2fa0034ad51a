#define DISTRAIN_ISA baseline
#include "kernels_isa.h"
