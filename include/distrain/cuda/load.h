#pragma once

#include "distrain/cuda/plugin.h"

namespace distrain::cuda {

/// Loads LibTorch's CUDA library, its NVIDIA libraries and libdistrain_cuda.so at the first call,
/// so that c10 knows CUDA devices. Does not look for a GPU (see Plugin::device_count()). Throws
/// `resources` if a library is missing; the message says how to install the library. Throws
/// `invalid` if LibTorch has already looked for CUDA (in torch::manual_seed() or backward(), for
/// example), because LibTorch looks only once. Thread-safe. CUDA does not survive a fork, so the
/// process must not fork afterwards.
const Plugin& load();

}  // namespace distrain::cuda
