#include <optional>
#include <string>

#include "distrain/base/trace.h"
#include "distrain/job/training.h"
#include "support/catch.h"
#include "support/trace_path.h"

using namespace distrain;
using namespace distrain::job;
using testing::TracePath;

namespace {

class NoSink final : public EventSink {
 public:
  void emit(std::string_view event, const Json&) override { FAIL(event); }
  void joined(std::string_view, const OptionMap&) override {}
};

}  // namespace

TEST_CASE("Training ends at the smaller of two limits that are given") {
  const job::OptionTable table = {{.name = "epochs", .kind = ValueKind::kInteger},
                                  {.name = "steps", .kind = ValueKind::kInteger}};
  // Returns the epochs and steps that limit a plan with 10 steps per epoch. 0 stands for no limit.
  // `taken` has the options of the checkpoint, or the defaults.
  const auto planned = [&](TrainerOptions taken, std::optional<int> epochs,
                           std::optional<int64_t> steps) {
    ParsedOptions parsed(table);
    if (epochs) parsed.set("epochs", std::to_string(taken.epochs = *epochs));
    if (steps) parsed.set("steps", std::to_string(taken.steps = *steps));
    derive_limits(taken, parsed, 100);
    const Plan plan = Plan::of(taken, 10);
    CHECK(plan.limit == (plan.steps > 0 ? "--steps" : "--epochs"));
    return std::pair(plan.epochs, plan.steps);
  };
  using Limits = std::pair<int64_t, int64_t>;
  TrainerOptions fresh;
  fresh.epochs = 100;
  CHECK(planned(fresh, {}, {}) == Limits{100, 0});
  CHECK(planned(fresh, 3, 1000) == Limits{3, 0});
  CHECK(planned(fresh, 3, 5) == Limits{3, 5});
  CHECK(planned(fresh, {}, 5000) == Limits{0, 5000});  // a default is no limit
  CHECK(planned(fresh, 3, 0) == Limits{3, 0});
  TrainerOptions resumed = fresh;
  resumed.epochs = 3;
  resumed.steps = 50;  // as if both limits had been given
  CHECK(planned(resumed, {}, {}) == Limits{3, 0});
  CHECK(planned(resumed, {}, 40) == Limits{0, 40});
  CHECK(planned(resumed, 6, {}) == Limits{6, 0});
  resumed.epochs = 0;  // as after a run with --steps alone
  resumed.steps = 0;
  CHECK(planned(resumed, {}, {}) == Limits{100, 0});
}

TEST_CASE("The progress of a process is known when its job has ended") {
  Progress progress;
  CHECK(progress.fields().empty());
  int calls = 1;
  progress.report([&](Json& fields) { fields["calls"] = calls; });
  progress.add(2, base::Clock::now());
  calls = 5;
  CHECK(progress.fields()["calls"] == 5);
  progress.report({});
  calls = 7;
  CHECK(progress.fields()["calls"] == 5);
  CHECK(progress.fields()["steps"] == 2);
}

TEST_CASE("--log-interval selects the steps that print a line") {
  struct Sink final : EventSink {
    void emit(std::string_view event, const Json& fields) override {
      CHECK(event == "step");
      steps.push_back(fields["step"]);
    }
    void joined(std::string_view, const OptionMap&) override {}
    std::vector<int64_t> steps;
  };
  const auto printed = [](std::optional<int> interval) {
    Sink sink;
    StepLines lines(sink, "step", interval);
    for (int run = 0; run < 2; ++run) {
      for (int64_t step = 1; step <= 5; ++step) {
        lines.add(step, [step] { return Json{{"step", step}}; });
      }
      lines.end();
      lines.end();
    }
    return sink.steps;
  };
  using Steps = std::vector<int64_t>;
  CHECK(printed(2) == Steps{2, 4, 2, 4});
  CHECK(printed(5) == Steps{5, 5});
  CHECK(printed(0).empty());
  const base::TimePoint begun = base::Clock::now();
  const Steps by_time = printed({});
  if (base::seconds_since(begun) < 5) CHECK(by_time == Steps{1, 5, 1, 5});
  CHECK(by_time.front() == 1);
  CHECK(by_time.back() == 5);
}

TEST_CASE("An evaluation has an accuracy only if the job counts correct answers") {
  Evaluation evaluation;
  Evaluation share{.samples = 4, .loss_sum = 2, .means = {{"abs_error", 1}}};
  evaluation.add(share);
  CHECK(fields_of(evaluation, Unit::kSamples) ==
        Json{{"loss", 0.5}, {"samples", 4}, {"abs_error", 0.25}});
  share.right = 0;
  evaluation.add(share);
  CHECK(fields_of(evaluation, Unit::kSamples)["accuracy"] == 0);
}

TEST_CASE("A local job that fails writes its trace and its error", "[trace]") {
  const TracePath path;
  NoSink sink;
  Job job;
  job.effective["trace"] = path.text();
  const auto fails = [](const Job&) {
    const base::TraceScope scope("failing");
    throw base::Exception(base::ErrorKind::kNotFinite, "the loss is NaN");
    return Outcome();
  };
  CHECK_THROWS_WITH(run_local_job(job, sink, fails), "the loss is NaN");
  CHECK(path.read()["traceEvents"].back()["name"] == "failing");
  // If the trace cannot be written either, the error of the job is thrown.
  job.effective["trace"] = "/nowhere/t.json";
  CHECK_THROWS_WITH(run_local_job(job, sink, fails), "the loss is NaN");
  const auto works = [](const Job&) { return Outcome(); };
  const Outcome outcome = run_local_job(job, sink, works);
  REQUIRE(outcome.afterwards);
  CHECK(outcome.afterwards->kind == base::ErrorKind::kResources);
  CHECK(outcome.afterwards->message == "cannot write /nowhere/t.json: No such file or directory");
}

TEST_CASE("a loss that is not a scalar is refused with its epoch and step") {
  CHECK(checked_loss(at::full({1}, 0.5), 1, 1) == 0.5);
  CHECK_THROWS_WITH(checked_loss(at::zeros({32}), 2, 7),
                    "the loss at epoch 2, step 7 is not one number: return its mean or sum, such "
                    "as loss.mean()");
  CHECK_THROWS(checked_loss({}, 1, 1));
}
