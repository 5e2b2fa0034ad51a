#include "distrain/membership/rank_text.h"

#include "distrain/wire/handshake.h"

namespace distrain::membership {

std::string rank_text(int rank) {
  return rank == wire::kUnassignedRank ? "a new rank" : "rank " + std::to_string(rank);
}

std::string rank_text(int rank, const std::string& name) {
  return "rank " + std::to_string(rank) + " (" + name + ")";
}

std::string list_ranks(const std::vector<int>& ranks) {
  std::string text;
  for (const int rank : ranks) text += (text.empty() ? "" : ", ") + std::to_string(rank);
  return text;
}

}  // namespace distrain::membership
