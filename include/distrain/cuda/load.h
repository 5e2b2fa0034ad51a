#pragma once

#include "distrain/cuda/plugin.h"

namespace distrain::cuda {

/// Loads LibTorch's CUDA library with NVIDIA's libraries that belong to it, then
/// libdistrain_cuda.so, the first time; from then on c10 knows CUDA devices. Throws `resources`,
/// and says how to get what is missing. That there is a GPU is for Plugin::device_count() to say.
/// Throws `invalid` if torch::manual_seed(), backward() or the like ran before: from then on
/// LibTorch finds no CUDA in this process. Thread-safe.
///
/// Not to be called by a process that forks afterwards: CUDA does not survive that.
const Plugin& load();

}  // namespace distrain::cuda
