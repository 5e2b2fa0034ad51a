// ctest: timeout=120
#include <algorithm>
#include <atomic>
#include <functional>
#include <mutex>
#include <thread>

#include "distrain/job/training.h"
#include "lease_scheduler_simulation.h"
#include "support/cluster.h"

using namespace distrain;
using namespace distrain::job;

namespace {

// Calls `fn` for many small jobs, each with several leads (how many steps trainers may be ahead).
void for_each_job(const std::function<void(const LeaseScheduler::Options&, int64_t lead)>& fn) {
  for (const int trainers : {1, 2, 3}) {
    for (const int64_t steps_per_epoch : {1, 3, 4}) {
      for (const auto& [epochs, steps] :
           std::vector<std::pair<int64_t, int64_t>>{{1, 0}, {3, 0}, {1, 2}, {1, 7}}) {
        for (const int64_t save_every : {-1, 0, 2, 3, 5}) {
          LeaseScheduler::Options options{
              trainers,           epochs,          steps,
              steps_per_epoch,
              /*take_over=*/true, save_every >= 0, std::max<int64_t>(save_every, 0)};
          fn(options, kUnbounded);
          options.take_over = false;
          for (const int64_t lead : {int64_t{0}, int64_t{1}, kUnbounded}) fn(options, lead);
        }
      }
    }
  }
}

std::vector<int64_t> totals_of(const std::vector<Saved>& saves, int trainers) {
  std::vector<int64_t> totals;
  for (const Saved& saved : saves) {
    CHECK(saved.position.total % trainers == 0);
    totals.push_back(saved.position.total / trainers);
  }
  return totals;
}

}  // namespace

TEST_CASE("a share of an evaluation is a contiguous part of the examples") {
  const auto batches = [](const Share& share, int64_t n, int64_t size) {
    std::vector<std::vector<int64_t>> all;
    share.each_batch(n, size, [&](std::span<const int64_t> batch) {
      all.emplace_back(batch.begin(), batch.end());
    });
    return all;
  };
  CHECK(batches({0, 1}, 3, 2) == std::vector<std::vector<int64_t>>{{0, 1}, {2}});
  CHECK(batches({1, 2}, 7, 2) == std::vector<std::vector<int64_t>>{{3, 4}, {5, 6}});
  CHECK(batches({0, 3}, 2, 2).empty());
}

TEST_CASE("every step is handed out once, with an evaluation after each epoch and saves in time") {
  for_each_job([](const LeaseScheduler::Options& options, int64_t lead) {
    for (uint64_t seed = 0; seed < 3; ++seed) {
      Simulation job(options, lead, seed);
      job.run();
      job.check_complete();
      INFO(describe(options));
      REQUIRE_FALSE(job.stopped);
      REQUIRE(totals_of(job.saves, options.trainers) == expected_saves(options));
      // If a job ends within an epoch, it also evaluates the incomplete epoch.
      const int64_t whole = steps_of_each(options) / options.steps_per_epoch;
      std::vector<bool> evaluations(static_cast<size_t>(whole), true);
      if (steps_of_each(options) % options.steps_per_epoch > 0) evaluations.push_back(false);
      REQUIRE(job.evaluations == evaluations);
    }
  });
}

TEST_CASE("a job resumes from each of its checkpoints and completes") {
  for_each_job([](const LeaseScheduler::Options& options, int64_t lead) {
    Simulation job(options, lead, 1);
    job.run();
    for (const Saved& saved : job.saves) {
      Simulation rest(options, lead, 2);
      rest.resume(saved);
      rest.run();
      rest.check_complete();
      INFO(describe(options) << " from " << saved.position.to_json().dump());
      REQUIRE(totals_of(rest.saves, options.trainers) ==
              expected_saves(options, saved.position.total / options.trainers));
    }
  });
}

TEST_CASE("a stop at any call saves all completed steps, and the rest can be made later") {
  for_each_job([](const LeaseScheduler::Options& options, int64_t lead) {
    for (int64_t at = 1;; at += testing::kSanitized ? 5 : 1) {
      const auto seed = static_cast<uint64_t>(at);
      Simulation job(options, lead, seed);
      job.run(at);
      if (job.calls() < at) break;  // the job ended before the stop
      INFO(describe(options) << ", lead " << lead << ", stop at call " << at);
      REQUIRE(job.stopped == options.save);
      if (!options.save) {  // without saves a stop has no effect
        job.check_complete();
        continue;
      }
      const Saved& last = job.saves.back();
      Simulation rest(options, lead, seed + 1);
      rest.resume(last);
      rest.run();
      rest.check_complete();
    }
  });
}

TEST_CASE("a stopped job can be stopped again before it has made a step") {
  LeaseScheduler::Options options{3, 2, 0, 4, GENERATE(false, true), true, 0};
  Saved saved{{1, {0, 0, 0}, 0}, {}};
  for (int64_t times = 0; times < 40; ++times) {
    Simulation job(options, 0, static_cast<uint64_t>(times));
    job.resume(saved);
    job.run(times % 5 + 1);
    REQUIRE(job.stopped);
    saved = job.saves.back();
  }
  Simulation last(options, 0, 1);
  last.resume(saved);
  last.run();
  last.check_complete();
}

TEST_CASE("a trainer that has completed its shard takes over steps of a slow trainer") {
  LeaseScheduler::Options options{2, 1, 0, 5, true, false, 0};
  LeaseScheduler schedule(
      options, {[] {}, [](const Position&, bool) {}, [](const Position&) {}, [](bool) {}});
  const base::Future<Task> slow = schedule.next(1, false);
  CHECK_FALSE(slow.done());  // waits for the other trainer
  std::map<int32_t, int> made;
  for (int i = 0; i < 9; ++i) ++made[schedule.next(0, false).wait().shard];
  CHECK(slow.wait().shard == 1);
  CHECK(made == std::map<int32_t, int>{{0, 5}, {1, 4}});
  const base::Future<Task> fast = schedule.next(0, false);
  CHECK_FALSE(fast.done());  // waits for the slow trainer
  CHECK(schedule.next(1, false).wait().kind == Task::Kind::kEvaluate);
  CHECK(fast.wait().kind == Task::Kind::kEvaluate);
}

TEST_CASE("trainers on several threads get every step once, stopped or not") {
  constexpr int kTrainers = 4;
  base::Random random({17});
  for (int round = 0; round < 200; ++round) {
    const LeaseScheduler::Options options{
        kTrainers, random.between(1, 4), 0, random.between(1, 6), round % 2 == 0,
        true,      random.between(0, 3)};
    const int64_t stop_at = round % 4 < 2 ? kUnbounded : random.between(1, 20);
    std::mutex mutex;
    Steps done;
    Position last;
    std::atomic<int> twice = 0, ends = 0, stopped = 0, in_work = 0, disturbed = 0;
    LeaseScheduler schedule(options, {[] {}, [&](const Position&, bool) { disturbed += in_work; },
                                      [&](const Position& position) {
                                        disturbed += in_work;
                                        last = position;
                                      },
                                      [&](bool) { ++ends; }});
    std::vector<std::thread> threads;
    for (int t = 0; t < kTrainers; ++t) {
      threads.emplace_back([&, t] {
        for (int64_t calls = 1;; ++calls) {
          const Task task = schedule.next(t, t == 2 && calls >= stop_at).wait();
          if (task.kind == Task::Kind::kEnd) {
            stopped += task.stopped ? 1 : 0;
            return;
          }
          if (task.kind != Task::Kind::kTrain) continue;
          ++in_work;
          {
            std::lock_guard lock(mutex);
            if (!done.emplace(task.epoch, task.shard, task.step).second) ++twice;
          }
          --in_work;
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    INFO(describe(options) << ", stop at " << stop_at);
    REQUIRE(twice == 0);
    REQUIRE(disturbed == 0);
    REQUIRE(ends == 1);
    REQUIRE((stopped == 0 || stopped == kTrainers));
    REQUIRE(last.total == static_cast<int64_t>(done.size()));
    if (stopped == 0) REQUIRE(last.total == steps_of_each(options) * kTrainers);
  }
}

TEST_CASE("an error in a hook reaches all trainers") {
  const std::string where = GENERATE("evaluated", "save", "end");
  CAPTURE(where);
  const auto fail_at = [&where](const std::string& hook) {
    if (hook == where) throw base::Exception(base::ErrorKind::kResources, "no " + hook);
  };
  LeaseScheduler schedule(
      {3, 1, 0, 1, false, true, 0},
      {[] {}, [&](const Position&, bool) { fail_at("evaluated"); },
       [&](const Position&) { fail_at("save"); }, [&](bool) { fail_at("end"); }});
  for (int step = 0;; ++step) {
    REQUIRE(step < 6);
    std::vector<base::Future<Task>> tasks;
    for (int t = 0; t < 3; ++t) tasks.push_back(schedule.next(t, false));
    int failed = 0;
    for (const base::Future<Task>& task : tasks) {
      REQUIRE(task.done());
      if (task.wait_result().ok()) continue;
      ++failed;
      CHECK(task.wait_result().error().kind == base::ErrorKind::kResources);
      CHECK(task.wait_result().error().message == "no " + where);
    }
    CHECK((failed == 0 || failed == 3));
    if (failed > 0) break;
  }
}

TEST_CASE("the error that ends a schedule reaches waiting and later callers") {
  LeaseScheduler schedule({2, 1, 0, 1, false, false, 0}, {});
  const base::Future<Task> waits = schedule.next(0, false);
  REQUIRE_FALSE(waits.done());
  schedule.fail({base::ErrorKind::kPeerLost, "rank 1 is lost", 1, {}});
  for (const auto& ask : {std::function<void()>([&] { (void)waits.wait(); }),
                          std::function<void()>([&] { (void)schedule.next(1, false); })}) {
    CHECK(testing::error_of(ask).message == "rank 1 is lost");
  }
}

TEST_CASE("a second concurrent call of a trainer is refused") {
  LeaseScheduler schedule({2, 1, 0, 1, false, false, 0}, {});
  const base::Future<Task> waits = schedule.next(0, false);
  CHECK(testing::error_of([&] { (void)schedule.next(0, false); }).kind ==
        base::ErrorKind::kInvalid);
  CHECK_FALSE(waits.done());
}

TEST_CASE("a position is converted to JSON and back; invalid JSON is refused") {
  const Position position{3, {4, 0, 2}, 30};
  const Position back = read_back(position, 3);
  CHECK(back.epoch == 3);
  CHECK(back.steps == position.steps);
  CHECK(back.total == 30);
  for (const char* text : {
           "null",
           "7",
           "\"x\"",
           "[]",
           "{}",
           R"({"steps":[0,0,0],"total":0})",
           R"({"epoch":1,"total":0})",
           R"({"epoch":1,"steps":[0,0,0]})",
           R"({"epoch":"1","steps":[0,0,0],"total":0})",
           R"({"epoch":1,"steps":{},"total":0})",
           R"({"epoch":1,"steps":3,"total":0})",
           R"({"epoch":1,"steps":[0,"0",0],"total":0})",
           R"({"epoch":1,"steps":[0,null,0],"total":0})",
           R"({"epoch":1,"steps":[0,0,0],"total":null})",
           R"({"epoch":0,"steps":[0,0,0],"total":0})",
           R"({"epoch":-1,"steps":[0,0,0],"total":0})",
           R"({"epoch":1,"steps":[0,0],"total":0})",
           R"({"epoch":1,"steps":[0,0,0,0],"total":0})",
           R"({"epoch":1,"steps":[0,-1,0],"total":0})",
           R"({"epoch":1,"steps":[0,0,0],"total":-1})",
       }) {
    CAPTURE(text);
    CHECK(testing::error_of([&] { Position::from_json(Json::parse(text), 3); }).kind ==
          base::ErrorKind::kBadData);
  }
}

TEST_CASE("a position beyond the end of the epoch is refused") {
  LeaseScheduler schedule({2, 1, 0, 5, false, true, 0}, {});
  CHECK(testing::error_of([&] {
          schedule.resume({1, {5, 6}, 11});
        }).kind == base::ErrorKind::kBadData);
  schedule.resume({1, {5, 5}, 10});
}

TEST_CASE("a schedule names the trainer that the others wait for") {
  LeaseScheduler schedule({.trainers = 3, .steps_per_epoch = 1}, {});
  CHECK(schedule.waits().empty());
  std::vector<base::Future<Task>> tasks{schedule.next(2, false), schedule.next(0, false)};
  CHECK(schedule.waits().at(0).what == "the next task of all, which wants trainer 1");
  tasks.push_back(schedule.next(1, false));
  base::wait_all(tasks);
  CHECK(schedule.waits().empty());
}
