#include <algorithm>
#include <random>
#include <thread>

#include "../src/nn/stage_order.h"
#include "distrain/base/thread_pool.h"
#include "pipeline_steps.h"
#include "support/catch.h"

using namespace distrain;
using namespace distrain::nn;
using namespace distrain::nn::steps;

namespace {

std::shared_ptr<StageOrder> make_order(std::vector<PipelineStep> row) {
  return std::make_shared<StageOrder>(std::move(row));
}

base::Future<StageOrder::AdmissionPtr> admit(const std::shared_ptr<StageOrder>& order,
                                             const PipelineStep& step) {
  return order->admit(step.kind, step.micro_batch);
}

base::ErrorKind failure(const base::Future<StageOrder::AdmissionPtr>& admission) {
  REQUIRE(admission.done());
  REQUIRE_FALSE(admission.wait_result().ok());
  return admission.wait_result().error().kind;
}

}  // namespace

TEST_CASE("steps are admitted in the order of the row") {
  const auto order = make_order({F0, B0, F1, B1});
  const auto b0 = admit(order, B0);
  const auto f1 = admit(order, F1);
  CHECK(failure(admit(order, F1)) == base::ErrorKind::kInvalid);  // the step waits already
  CHECK_FALSE(b0.done());
  const auto f0 = admit(order, F0);
  REQUIRE(f0.done());
  CHECK_FALSE(b0.done());
  f0.wait()->done();
  REQUIRE(b0.done());
  CHECK_FALSE(f1.done());
  b0.wait()->done();
  REQUIRE(f1.done());
  CHECK(failure(admit(order, F0)) == base::ErrorKind::kInvalid);  // the step has ended
  CHECK(failure(admit(order, {Kind::kForward, 7})) == base::ErrorKind::kInvalid);
}

TEST_CASE("after a step has failed no later step is admitted") {
  const auto order = make_order({F0, B0});
  auto b0 = admit(order, B0);
  admit(order, F0).take().reset();
  CHECK(failure(b0) == base::ErrorKind::kCancelled);
  CHECK(failure(admit(order, B0)) == base::ErrorKind::kCancelled);
}

TEST_CASE("all waiters and later callers get the first failure") {
  const auto order = make_order({F0, B0, F1, B1});
  const auto b0 = admit(order, B0);
  const auto f0 = admit(order, F0);
  f0.wait()->fail({base::ErrorKind::kBadData, "the first", 3, "op"});
  order->fail({base::ErrorKind::kInternal, "the second", 4, {}});
  for (const auto& admission : {b0, admit(order, F1), admit(order, B1)}) {
    CHECK(failure(admission) == base::ErrorKind::kBadData);
    CHECK(admission.wait_result().error().message == "the first");
    CHECK(admission.wait_result().error().rank == 3);
  }
}

TEST_CASE("an admission may outlive its StageOrder") {
  base::Future<StageOrder::AdmissionPtr> f0;
  {
    const auto order = make_order({F0, B0});
    f0 = admit(order, F0);
  }
  f0.take().reset();
}

TEST_CASE("only one step runs at a time, whatever their order of arrival") {
  constexpr int64_t kMicroBatches = 40;
  std::mt19937 random(1);
  for (int round = 0; round < 20; ++round) {
    std::vector<PipelineStep> row = make_schedule("1f1b", 3, kMicroBatches).stages[0];
    std::vector<PipelineStep> ran;
    std::atomic<int> inside{0};
    {
      const auto order = make_order(row);
      std::vector<PipelineStep> arrivals = row;
      std::shuffle(arrivals.begin(), arrivals.end(), random);
      base::ThreadPool pool({.name = "steps", .size = 4});
      std::vector<base::Future<void>> done;
      for (const PipelineStep& step : arrivals) {
        done.push_back(
            admit(order, step).then(pool, [&, step](StageOrder::AdmissionPtr& admission) {
              if (inside.fetch_add(1) == 0) ran.push_back(step);
              inside.fetch_sub(1);
              admission->done();
            }));
      }
      base::wait_all(done);
    }
    CHECK((ran == row));
  }
}
