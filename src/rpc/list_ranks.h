#pragma once

#include <string>
#include <vector>

namespace distrain::rpc {

/// "1, 2".
inline std::string list_ranks(const std::vector<int>& ranks) {
  std::string text;
  for (const int rank : ranks) text += (text.empty() ? "" : ", ") + std::to_string(rank);
  return text;
}

}  // namespace distrain::rpc
