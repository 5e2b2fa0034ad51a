#pragma once

#include <string>

#include "distrain/base/clock.h"

namespace distrain::membership {

/// An operation that a rank waits for, described for people: see rpc::Agent::waits().
struct Wait {
  std::string what;  ///< names the ranks that are waited for
  base::TimePoint since;
};

}  // namespace distrain::membership
