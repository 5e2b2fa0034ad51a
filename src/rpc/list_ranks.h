#pragma once

#include <string>
#include <vector>

#include <c10/util/StringUtil.h>

#include "distrain/wire/handshake.h"

namespace distrain::rpc {

/// Returns "rank 3", or "a new rank" if the number is kAnyRank.
inline std::string rank_text(int rank) {
  return rank == wire::kAnyRank ? "a new rank" : "rank " + std::to_string(rank);
}

/// Returns a list such as "1, 2".
inline std::string list_ranks(const std::vector<int>& ranks) { return c10::Join(", ", ranks); }

}  // namespace distrain::rpc
