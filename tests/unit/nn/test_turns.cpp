#include <algorithm>
#include <random>
#include <thread>

#include "../src/nn/turns.h"
#include "distrain/base/thread_pool.h"
#include "pipeline_steps.h"
#include "support/catch.h"

using namespace distrain;
using namespace distrain::nn;
using namespace distrain::nn::steps;

namespace {

std::shared_ptr<Turns> make_turns(std::vector<PipelineStep> row) {
  return std::make_shared<Turns>(std::move(row));
}

base::Future<Turns::TurnPtr> enter(const std::shared_ptr<Turns>& turns, const PipelineStep& step) {
  return turns->enter(step.kind, step.micro_batch);
}

base::ErrorKind failure(const base::Future<Turns::TurnPtr>& turn) {
  REQUIRE(turn.done());
  REQUIRE_FALSE(turn.wait_result().ok());
  return turn.wait_result().error().kind;
}

}  // namespace

TEST_CASE("steps have their turn in the order of the row") {
  const auto turns = make_turns({F0, B0, F1, B1});
  const auto b0 = enter(turns, B0);
  const auto f1 = enter(turns, F1);
  CHECK(failure(enter(turns, F1)) == base::ErrorKind::kInvalid);  // the step waits already
  CHECK_FALSE(b0.done());
  const auto f0 = enter(turns, F0);
  REQUIRE(f0.done());
  CHECK_FALSE(b0.done());
  f0.wait()->done();
  REQUIRE(b0.done());
  CHECK_FALSE(f1.done());
  b0.wait()->done();
  REQUIRE(f1.done());
  CHECK(failure(enter(turns, F0)) == base::ErrorKind::kInvalid);  // the step has ended
  CHECK(failure(enter(turns, {Kind::kForward, 7})) == base::ErrorKind::kInvalid);
}

TEST_CASE("when a step fails in its turn no later step gets one") {
  const auto turns = make_turns({F0, B0});
  auto b0 = enter(turns, B0);
  enter(turns, F0).take().reset();
  CHECK(failure(b0) == base::ErrorKind::kCancelled);
  CHECK(failure(enter(turns, B0)) == base::ErrorKind::kCancelled);
}

TEST_CASE("all waiters and later callers get the first failure") {
  const auto turns = make_turns({F0, B0, F1, B1});
  const auto b0 = enter(turns, B0);
  const auto f0 = enter(turns, F0);
  f0.wait()->fail({base::ErrorKind::kBadData, "the first", 3, "op"});
  turns->fail({base::ErrorKind::kInternal, "the second", 4, {}});
  for (const auto& turn : {b0, enter(turns, F1), enter(turns, B1)}) {
    CHECK(failure(turn) == base::ErrorKind::kBadData);
    CHECK(turn.wait_result().error().message == "the first");
    CHECK(turn.wait_result().error().rank == 3);
  }
}

TEST_CASE("a turn may outlive its Turns") {
  base::Future<Turns::TurnPtr> f0;
  {
    const auto turns = make_turns({F0, B0});
    f0 = enter(turns, F0);
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
      const auto turns = make_turns(row);
      std::vector<PipelineStep> arrivals = row;
      std::shuffle(arrivals.begin(), arrivals.end(), random);
      base::ThreadPool pool({.name = "turns", .size = 4});
      std::vector<base::Future<void>> done;
      for (const PipelineStep& step : arrivals) {
        done.push_back(enter(turns, step).then(pool, [&, step](Turns::TurnPtr& turn) {
          if (inside.fetch_add(1) == 0) ran.push_back(step);
          inside.fetch_sub(1);
          turn->done();
        }));
      }
      base::wait_all(done);
    }
    CHECK((ran == row));
  }
}
