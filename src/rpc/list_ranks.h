#pragma once

#include <string>
#include <vector>

#include <c10/util/StringUtil.h>

#include "distrain/wire/handshake.h"

namespace distrain::rpc {

/// "rank 3", or who has yet to get a number.
inline std::string rank_text(int rank) {
  return rank == wire::kAnyRank ? "a new rank" : "rank " + std::to_string(rank);
}

/// "1, 2".
inline std::string list_ranks(const std::vector<int>& ranks) { return c10::Join(", ", ranks); }

}  // namespace distrain::rpc
