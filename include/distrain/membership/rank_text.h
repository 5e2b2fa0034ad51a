#pragma once

#include <string>
#include <vector>

namespace distrain::membership {

/// Returns "rank 3", or "a new rank" if the number is wire::kUnassignedRank.
std::string rank_text(int rank);

/// Returns "rank 3 (trainer 2)".
std::string rank_text(int rank, const std::string& name);

/// Returns a list such as "1, 2".
std::string list_ranks(const std::vector<int>& ranks);

}  // namespace distrain::membership
