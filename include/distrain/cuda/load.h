#pragma once

#include "distrain/cuda/plugin.h"

namespace distrain::cuda {

/// Loads LibTorch's CUDA library, its NVIDIA libraries and libdistrain_cuda.so at the first call.
/// From then on c10 knows CUDA devices. Does not look for a GPU (see Plugin::device_count()).
/// Throws `resources` if a library is missing; the message says how to get it. Throws `invalid` if
/// torch::manual_seed(), backward() or the like ran before, because LibTorch then finds no CUDA in
/// this process. Thread-safe. CUDA does not survive a fork, so the process must not fork
/// afterwards.
const Plugin& load();

}  // namespace distrain::cuda
