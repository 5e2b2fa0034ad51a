// Runs a simulation that must satisfy the invariants; if it fails, prints how to repeat the run.
#pragma once

#include <filesystem>
#include <string>

#include "simulation.h"
#include "support/catch.h"

namespace distrain::fake_network {

inline std::string command_of(const Scenario& scenario) {
  return "DISTRAIN_SIMULATE='" + scenario.recipe + "' " +
         std::filesystem::read_symlink("/proc/self/exe").string() + " '[replay]'";
}

inline Result expect_good(const Scenario& scenario) {
  Result result = Simulation(scenario).run();
  if (!result.violations.empty()) {
    FAIL_CHECK(scenario.text() + '\n' + result.text() +
               "\nTo repeat it with all that was said:\n  " + command_of(scenario));
  }
  return result;
}

}  // namespace distrain::fake_network
