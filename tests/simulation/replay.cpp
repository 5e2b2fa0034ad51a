// One run, with all that happens in it, by the recipe in DISTRAIN_SIMULATE: what a failed test
// says.
#include <cstdlib>
#include <iostream>

#include "expect.h"

namespace distrain::simulation {

TEST_CASE("a run by its recipe", "[.][replay]") {
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

}  // namespace distrain::simulation
