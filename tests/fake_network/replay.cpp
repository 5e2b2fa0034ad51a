// Runs the recipe in DISTRAIN_SIMULATE, as printed by a failed test, and prints all events.
#include <cstdlib>
#include <iostream>

#include "expect.h"

namespace distrain::fake_network {

TEST_CASE("a run is replayed by its recipe", "[.][replay]") {
  const char* recipe = std::getenv("DISTRAIN_SIMULATE");
  REQUIRE(recipe != nullptr);
  const Scenario scenario = Scenario::parse(recipe);
  std::cout << scenario.text() << '\n';
  const Result result = Simulation(scenario, Bug::kNone, [](const std::string& line) {
                          std::cout << line << '\n';
                        }).run();
  std::cout << result.text() << '\n';
  CHECK(result.violations.empty());
}

}  // namespace distrain::fake_network
