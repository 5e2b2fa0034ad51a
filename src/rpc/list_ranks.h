#pragma once

#include <string>
#include <vector>

#include "distrain/wire/handshake.h"

namespace distrain::rpc {

/// "rank 3", or who has yet to get a number.
inline std::string rank_text(int rank) {
  return rank == wire::kAnyRank ? "a new rank" : "rank " + std::to_string(rank);
}

/// "1, 2".
inline std::string list_ranks(const std::vector<int>& ranks) {
  std::string text;
  for (const int rank : ranks) text += (text.empty() ? "" : ", ") + std::to_string(rank);
  return text;
}

}  // namespace distrain::rpc
