#include <algorithm>

#include "distrain/base/error.h"
#include "distrain/nn/pipeline.h"
#include "pipeline_steps.h"
#include "support/catch.h"

using namespace distrain;
using namespace distrain::nn;
using namespace distrain::nn::steps;

namespace {

std::string refusal(const PipelineSchedule& schedule) {
  try {
    simulate(schedule);
  } catch (const base::Exception& e) {
    CHECK(e.error().kind == base::ErrorKind::kInvalid);
    return e.error().message;
  }
  return "accepted";
}

PipelineSchedule one_micro_batch(std::vector<std::vector<PipelineStep>> stages) {
  return {"own", 1, std::move(stages)};
}

}  // namespace

TEST_CASE("the schedules have the duration and memory use of their papers") {
  for (int stages = 1; stages <= 6; ++stages) {
    for (int64_t m = 1; m <= 9; ++m) {
      CAPTURE(stages, m);
      const int64_t fill = stages - 1;
      const PipelineTimeline gpipe = simulate(make_schedule("gpipe", stages, m));
      const PipelineTimeline alternating = simulate(make_schedule("1f1b", stages, m));
      const PipelineTimeline naive = simulate(make_schedule("naive", stages, m));
      CHECK(gpipe.length == 2 * (m + fill));
      CHECK(alternating.length == 2 * (m + fill));
      CHECK(naive.length == 2 * m * stages);
      CHECK(gpipe.bubble == Approx(static_cast<double>(fill) / static_cast<double>(m + fill)));
      CHECK(naive.bubble == Approx(static_cast<double>(fill) / stages));
      for (int stage = 0; stage < stages; ++stage) {
        const auto at = static_cast<size_t>(stage);
        CHECK(gpipe.activations[at] == m);
        CHECK(alternating.activations[at] == std::min<int64_t>(m, stages - stage));
        CHECK(naive.activations[at] == 1);
      }
    }
  }
}

TEST_CASE("1f1b alternates as soon as a stage can") {
  const PipelineSchedule schedule = make_schedule("1f1b", 2, 2);
  CHECK((schedule.stages[0] == std::vector<PipelineStep>{F0, F1, B0, B1}));
  CHECK((schedule.stages[1] == std::vector<PipelineStep>{F0, B0, F1, B1}));
  CHECK(to_text(schedule) ==
        "1f1b, 2 stages, 2 micro-batches: 33.3 % bubble\n"
        "  stage 1  F0 F1 .  B0 .  B1  (holds 2)\n"
        "  stage 2  .  F0 B0 F1 B1 .  (holds 1)\n");
}

TEST_CASE("an invalid table is refused") {
  CHECK(refusal(one_micro_batch({{F0, B0}, {F0, B0}})) == "accepted");
  CHECK(refusal(one_micro_batch({})).find("no stage") != std::string::npos);
  CHECK(refusal(one_micro_batch({{F0, B0}, {F0}})).find("stage 2: B0 is missing") !=
        std::string::npos);
  CHECK(refusal(one_micro_batch({{}, {F0, B0}})).find("stage 1: F0 is missing") !=
        std::string::npos);
  CHECK(refusal(one_micro_batch({{B0, F0}})).find("B0 comes before its forward pass") !=
        std::string::npos);
  CHECK(refusal(one_micro_batch({{F0, F0, B0}})).find("F0 is there twice") != std::string::npos);
  CHECK(refusal(one_micro_batch({{F0, B0, B0}})).find("B0 is there twice") != std::string::npos);
  CHECK(refusal(one_micro_batch({{F0, B0, F1}})).find("F1 is of no micro-batch") !=
        std::string::npos);
  // The second stage needs the second micro-batch first, but the first stage sends it later.
  CHECK(refusal({"own", 2, {{F0, B0, F1, B1}, {F1, B1, F0, B0}}}).find("wait for each other") !=
        std::string::npos);
  CHECK_THROWS_AS(make_schedule("zigzag", 2, 2), base::Exception);
}

TEST_CASE("layers are split so that the slowest stage is as fast as possible") {
  using Cuts = std::vector<size_t>;
  CHECK(balanced_cuts({1, 2, 3}, 1) == Cuts{});
  CHECK(balanced_cuts({1, 2, 3}, 2) == Cuts{2});
  CHECK(balanced_cuts({1, 2, 3}, 3) == Cuts{1, 2});
  CHECK(balanced_cuts({9, 1, 1, 1, 9}, 3) == Cuts{1, 4});
  CHECK(balanced_cuts({2, 2, 2, 2, 2, 2}, 3) == Cuts{2, 4});
}
