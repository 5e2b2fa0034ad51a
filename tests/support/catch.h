// Includes Catch2 v2 (Debian 12) or v3, whichever is installed.
#pragma once

#include <string>

#if DISTRAIN_CATCH2_MAJOR >= 3
#include <catch2/catch_all.hpp>
using Catch::Approx;
using Catch::Matchers::ContainsSubstring;
#else
#include <catch2/catch.hpp>
// Gives the matcher its name in Catch2 v3.
inline auto ContainsSubstring(const std::string& part) { return Catch::Contains(part); }
#endif

namespace distrain::testing {

/// True under a sanitizer. A test may then skip combinations of cases that it also runs one by one.
#ifdef DISTRAIN_SANITIZED
inline constexpr bool kSanitized = true;
#else
inline constexpr bool kSanitized = false;
#endif

inline bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

}  // namespace distrain::testing
