#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <numbers>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <torch/optim/schedulers/reduce_on_plateau_scheduler.h>
#include <torch/optim/schedulers/step_lr.h>
#include <torch/optim/sgd.h>

#include "distrain/base/error.h"
#include "distrain/optim/learning_rate_schedule.h"
#include "distrain/rpc/serialize.h"
#include "support/catch.h"
#include "support/cluster.h"

namespace distrain::optim {
namespace {

using base::ErrorKind;
using testing::error_of;

constexpr auto kEpochs = ScheduleUnit::kEpochs;
constexpr double kLr = 0.3;

std::unique_ptr<torch::optim::SGD> torch_sgd() {
  return std::make_unique<torch::optim::SGD>(std::vector<at::Tensor>{at::zeros({1})},
                                             torch::optim::SGDOptions(kLr));
}
double lr_of(torch::optim::Optimizer& optimizer) {
  return optimizer.param_groups()[0].options().get_lr();
}

double cosine(double floor, double part) {
  return floor + 0.5 * (1 - floor) * (1 + std::cos(std::numbers::pi * part));
}

// Checks that parse() refuses `text` with an `invalid` error of one line. Returns its message.
std::string refused(const std::string& text) {
  const base::Error error = error_of([&] { LearningRateSchedule::parse(text); });
  CAPTURE(text, error.message);
  CHECK(error.kind == ErrorKind::kInvalid);
  CHECK(error.message.find('\n') == std::string::npos);
  return error.message;
}

}  // namespace

static_assert(rpc::Serializable<ScheduleState>);

TEST_CASE("A schedule is constant by default") {
  const LearningRateSchedule schedule;
  CHECK(schedule.text() == "constant");
  for (const int64_t step : {0, 1, 1000000}) CHECK(schedule.factor(step, step) == 1);
}

TEST_CASE("The step schedule equals torch's StepLR") {
  const auto optimizer = torch_sgd();
  torch::optim::StepLR reference(*optimizer, 3, 0.5);
  reference.step();  // LibTorch's class counts from the first call, not from its construction
  const LearningRateSchedule by_steps(StepDecay{3, 0.5}), by_epochs(StepDecay{3, 0.5, kEpochs});
  for (int64_t behind = 0; behind < 20; ++behind) {
    CAPTURE(behind);
    CHECK(kLr * by_steps.factor(behind, 77) == Approx(lr_of(*optimizer)).epsilon(1e-12));
    CHECK(kLr * by_epochs.factor(77, behind) == Approx(lr_of(*optimizer)).epsilon(1e-12));
    reference.step();
  }
}

TEST_CASE("The cosine schedule equals its closed form and stays at its floor") {
  const double floor = GENERATE(0.0, 0.1, 1.0);
  const LearningRateSchedule schedule(Cosine{50, floor});
  for (int64_t step = 0; step <= 50; ++step) {
    CHECK(schedule.factor(step, 0) ==
          Approx(cosine(floor, static_cast<double>(step) / 50)).margin(1e-15));
  }
  CHECK(schedule.factor(0, 99) == 1);
  for (const int64_t step : {50, 51, 100, 1000}) CHECK(schedule.factor(step, 0) == floor);

  // The recursive formula in PyTorch's documentation of CosineAnnealingLR.
  double lr = kLr;
  for (int64_t t = 1; t < 50; ++t) {
    const auto term = [](int64_t at) {
      return 1 + std::cos(std::numbers::pi * static_cast<double>(at) / 50);
    };
    lr = floor * kLr + (lr - floor * kLr) * term(t) / term(t - 1);
    CHECK(kLr * schedule.factor(t, 0) == Approx(lr).epsilon(1e-9));
  }
}

TEST_CASE("A warm-up equals torch's LinearLR, and the schedule after it begins when it ends") {
  // The recursive formula in PyTorch's documentation of LinearLR, start_factor 1/8, total_iters 7.
  const int64_t length = 8, total = length - 1;
  const double start = 1.0 / static_cast<double>(length);
  const LearningRateSchedule alone(Constant{}, {length});
  double lr = kLr * start;
  for (int64_t t = 0; t <= 12; ++t) {
    if (t > 0 && t <= total) {
      lr *= 1 + (1 - start) /
                    (static_cast<double>(total) * start + static_cast<double>(t - 1) * (1 - start));
    }
    CHECK(kLr * alone.factor(t, 0) == Approx(lr).epsilon(1e-12));
  }
  const LearningRateSchedule by_steps(Cosine{20, 0.1}, {length});
  const LearningRateSchedule by_epochs(Cosine{20, 0.1, kEpochs}, {length, kEpochs});
  for (int64_t t = 0; t < 40; ++t) {
    CAPTURE(t);
    const double expected = t < length
                                ? static_cast<double>(t + 1) / 8
                                : cosine(0.1, std::min(1.0, static_cast<double>(t - 8) / 20));
    CHECK(by_steps.factor(t, 3) == Approx(expected).epsilon(1e-12));
    CHECK(by_epochs.factor(3, t) == Approx(expected).epsilon(1e-12));
  }
  const LearningRateSchedule stairs(StepDecay{5, 0.5}, {2});
  const std::vector<double> expected = {0.5, 1, 1, 1, 1, 1, 1, 0.5, 0.5};
  for (size_t t = 0; t < expected.size(); ++t) {
    CHECK(stairs.factor(static_cast<int64_t>(t), 0) == expected[t]);
  }
}

TEST_CASE("The plateau schedule equals torch's ReduceLROnPlateau") {
  struct Case {
    Plateau plateau;
    float factor;
  };
  const Case each = GENERATE(Case{{2, 0.25, 0, 0}, 0.25F}, Case{{0, 0.5, 0.1, 1e-4}, 0.5F},
                             Case{{1, 0.5, 0, 0.1}, 0.5F}, Case{{0, 0.25, 0, 0}, 0.25F});
  const auto optimizer = torch_sgd();
  using Reference = torch::optim::ReduceLROnPlateauScheduler;
  Reference reference(*optimizer, Reference::min, each.factor,
                      static_cast<int>(each.plateau.patience), each.plateau.threshold,
                      Reference::rel, 0, {static_cast<float>(each.plateau.floor * kLr)}, 0);
  LearningRateSchedule schedule(each.plateau), resumed;
  CHECK(schedule.observes());
  at::manual_seed(1);
  bool reduced = false;
  for (int evaluation = 0; evaluation < 40; ++evaluation) {
    CAPTURE(evaluation);
    // The metric is a float, because torch rounds its best metric to float before it compares.
    const float metric =
        3.0F / static_cast<float>(1 + evaluation / 3) + at::rand({1}).item<float>();
    schedule.observe(metric);
    reference.step(metric);
    // The tolerance is that of a float, because torch stores the minimum learning rate as a float.
    CHECK(kLr * schedule.factor(evaluation * 10, evaluation) ==
          Approx(lr_of(*optimizer)).epsilon(1e-6));
    reduced = reduced || schedule.factor(0, 0) < 1;
    // A schedule that is saved and loaded after each metric gives the same rates.
    LearningRateSchedule next(each.plateau);
    next.load_state(resumed.state());
    next.observe(metric);
    resumed = next;
    CHECK(resumed == schedule);
  }
  CHECK(reduced);
}

TEST_CASE("A metric that is not a number is never better, and other schedules ignore metrics") {
  LearningRateSchedule plateau(Plateau{1, 0.5, 0, 0}, {10});
  CHECK(plateau.factor(4, 0) == 0.5);
  for (int i = 0; i < 2; ++i) plateau.observe(std::numeric_limits<double>::quiet_NaN());
  CHECK(plateau.factor(10, 0) == 0.5);
  CHECK(plateau.factor(4, 0) == 0.25);
  CHECK_FALSE(plateau.state().best);
  LearningRateSchedule cosine(Cosine{10});
  for (int i = 0; i < 20; ++i) cosine.observe(1);
  CHECK(cosine == LearningRateSchedule(Cosine{10}));
  CHECK_FALSE(cosine.observes());
}

TEST_CASE("A state that the schedule cannot reach is refused") {
  const auto refuse = [](LearningRateSchedule schedule, const ScheduleState& state) {
    const base::Error error = error_of([&] { schedule.load_state(state); });
    CHECK(error.kind == ErrorKind::kBadData);
    return error.message;
  };
  const LearningRateSchedule plateau(Plateau{});
  CHECK(refuse(plateau, {1.5, {}, 0}) == "the state of another schedule than plateau:10");
  refuse(plateau, {-1, {}, 0});
  refuse(plateau, {1, std::nan(""), 0});
  refuse(plateau, {1, 0.5, -1});
  refuse(LearningRateSchedule(Cosine{10}), {0.5, {}, 0});
  LearningRateSchedule constant;
  CHECK_NOTHROW(constant.load_state({}));
}

TEST_CASE("A schedule is parsed from its text and printed as it") {
  struct Case {
    std::string text;
    LearningRateSchedule schedule;
    std::string printed;  // empty: the same as the text
  };
  const Case each =
      GENERATE(Case{"constant", LearningRateSchedule(), ""},
               Case{"step:30,0.1", LearningRateSchedule(StepDecay{30, 0.1}), ""},
               Case{"step:30", LearningRateSchedule(StepDecay{30, 0.1}), "step:30,0.1"},
               Case{"step:3e,0.5", LearningRateSchedule(StepDecay{3, 0.5, kEpochs}), ""},
               Case{"cosine:100", LearningRateSchedule(Cosine{100}), ""},
               Case{"cosine:100e,0.01", LearningRateSchedule(Cosine{100, 0.01, kEpochs}), ""},
               Case{"cosine:100,0", LearningRateSchedule(Cosine{100}), "cosine:100"},
               Case{"warmup:500+cosine:10000", LearningRateSchedule(Cosine{10000}, {500}), ""},
               Case{"warmup:5e+step:30e,1e-1",
                    LearningRateSchedule(StepDecay{30, 0.1, kEpochs}, {5, kEpochs}),
                    "warmup:5e+step:30e,0.1"},
               Case{"warmup:500", LearningRateSchedule(Constant{}, {500}), ""},
               Case{"warmup:500+constant", LearningRateSchedule(Constant{}, {500}), "warmup:500"},
               Case{"plateau:2,0.25", LearningRateSchedule(Plateau{2, 0.25}), ""},
               Case{"plateau:10,0.1,0,0.0001", LearningRateSchedule(Plateau{}), "plateau:10"},
               Case{"plateau:0,0.25,0,0", LearningRateSchedule(Plateau{0, 0.25, 0, 0}), ""},
               Case{"plateau:3,0.1,0.125", LearningRateSchedule(Plateau{3, 0.1, 0.125}), ""},
               Case{"warmup:1e+plateau:1,5e-1", LearningRateSchedule(Plateau{1, 0.5}, {1, kEpochs}),
                    "warmup:1e+plateau:1,0.5"});
  CAPTURE(each.text);
  const LearningRateSchedule parsed = LearningRateSchedule::parse(each.text);
  CHECK(parsed == each.schedule);
  CHECK(parsed.text() == (each.printed.empty() ? each.text : each.printed));
  CHECK(LearningRateSchedule::parse(parsed.text()) == parsed);
}

TEST_CASE("A schedule counts epochs if its lengths are in epochs") {
  for (const char* text : {"step:3e", "cosine:3e,0.1", "warmup:2e", "warmup:2e+step:3e"}) {
    CHECK(LearningRateSchedule::parse(text).counts_epochs());
  }
  for (const char* text : {"constant", "step:3", "warmup:2+cosine:3", "plateau:3"}) {
    CHECK_FALSE(LearningRateSchedule::parse(text).counts_epochs());
  }
}

TEST_CASE("An invalid text is refused with a reason in one line") {
  const std::string forms =
      ": must be constant, step:SIZE[,GAMMA], cosine:LENGTH[,FLOOR] or "
      "plateau:PATIENCE[,FACTOR[,FLOOR[,THRESHOLD]]], optionally after warmup:LENGTH+";
  CHECK(refused("") == "--lr-schedule: unknown schedule ''" + forms);
  CHECK(refused("linear:5") == "--lr-schedule: unknown schedule 'linear'" + forms);
  CHECK(refused("warmup:5+warmup:5") == "--lr-schedule: unknown schedule 'warmup'" + forms);
  CHECK(refused("warmup:5+") == "--lr-schedule: unknown schedule ''" + forms);
  CHECK(refused("cosine:5+warmup:5") ==
        "--lr-schedule cosine:5+warmup:5: its length is '5+warmup:5', not a whole number of steps "
        "(500) or of epochs (5e)");
  CHECK(refused("step") == "--lr-schedule step: it wants a size");
  CHECK(refused("step:") ==
        "--lr-schedule step:: its size is '', not a whole number of steps (500) or of epochs (5e)");
  refused("step:1.5");
  refused("step:99999999999999999999");
  CHECK(refused("step:5,x") == "--lr-schedule step:5,x: its gamma is 'x', not a number");
  CHECK(refused("step:5,0.1,7") == "--lr-schedule step:5,0.1,7: 7 is one value too many");
  CHECK(refused("constant:1") == "--lr-schedule constant:1: 1 is one value too many");
  CHECK(refused("step:0") == "--lr-schedule: a step schedule's size cannot be 0: at least 1");
  CHECK(refused("step:5,0") == "--lr-schedule: a step schedule's gamma cannot be 0: above 0");
  refused("step:5,inf");
  refused("step:5,nan");
  CHECK(refused("cosine:5,2") ==
        "--lr-schedule: a cosine schedule's floor cannot be 2: from 0 to 1, as a part of the "
        "learning rate");
  CHECK(refused("warmup:0+cosine:5") ==
        "--lr-schedule: a warm-up's length cannot be 0: at least 1");
  CHECK(refused("plateau:2e") ==
        "--lr-schedule plateau:2e: its patience is '2e', not a whole number");
  CHECK(refused("plateau:-1") ==
        "--lr-schedule: a plateau schedule's patience cannot be -1: at least 0");
  CHECK(refused("plateau:1,1") ==
        "--lr-schedule: a plateau schedule's factor cannot be 1: between 0 and 1");
  refused("plateau:1,0.5,-1");
  refused("plateau:1,0.5,0,1");
  CHECK(refused("warmup:500+step:30e,0.1") ==
        "--lr-schedule warmup:500+step:30e,0.1: give both in steps or both in epochs (5e), as one "
        "begins where the other ends");
}

}  // namespace distrain::optim
