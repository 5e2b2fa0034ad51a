#pragma once

#include <string>
#include <vector>

#include "distrain/wire/handshake.h"

namespace distrain::membership {

/// Returns "rank 3", or "a new rank" if the number is wire::kUnassignedRank.
inline std::string rank_text(int rank) {
  return rank == wire::kUnassignedRank ? "a new rank" : "rank " + std::to_string(rank);
}

/// Returns "rank 3 (trainer 2)".
inline std::string rank_text(int rank, const std::string& name) {
  return "rank " + std::to_string(rank) + " (" + name + ")";
}

/// Returns a list such as "1, 2".
inline std::string list_ranks(const std::vector<int>& ranks) {
  std::string text;
  for (const int rank : ranks) text += (text.empty() ? "" : ", ") + std::to_string(rank);
  return text;
}

}  // namespace distrain::membership
