#pragma once

#include "operations.h"

namespace distrain::collective {

/// The tensors of an exchange, each list by group rank. An undefined tensor stands for no data. All
/// ranks exchange messages, or only the root and each other rank if the operation has a root.
struct ExchangePlan {
  bool rooted = false;
  Tensors sends;
  Tensors outputs;    ///< hold the data of the ranks afterwards
  at::Tensor result;  ///< if defined, holds the reduction of the ranks' data instead
};

/// Creates an operation in which each rank sends and receives at most one message to and from each
/// other rank; see Note [Algorithms].
std::shared_ptr<Operation> make_exchange(const OpSpec& spec, base::TimePoint deadline, int rank,
                                         ExchangePlan plan);

}  // namespace distrain::collective
