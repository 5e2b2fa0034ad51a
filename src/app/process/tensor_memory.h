#pragma once

namespace distrain::app {

/// From now on big tensors of this process come from blocks that earlier ones of their size left.
///
/// A training step asks for the same sizes again and again, from several threads at a time. malloc
/// would cut and join its free memory in an order that differs from step to step, so that the
/// process goes on growing for thousands of steps; this way it has what one step needs, of each
/// size as many blocks as were ever in use at once. Before any thread and any tensor.
void reuse_tensor_memory();

}  // namespace distrain::app
