#pragma once

namespace distrain::app {

/// Makes large CPU tensors of this process reuse the memory blocks of freed tensors of about the
/// same size. Call it once, before any thread and any tensor exists.
///
/// Every training step allocates the same sizes, from several threads. malloc would split and join
/// free memory in varying orders, so the process would grow for thousands of steps.
void reuse_tensor_memory();

}  // namespace distrain::app
