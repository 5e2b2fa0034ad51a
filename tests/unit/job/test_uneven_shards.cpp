// The LeaseScheduler's rounds of trainers whose streams have different lengths.
#include <algorithm>
#include <map>
#include <vector>

#include "distrain/base/random.h"
#include "distrain/job/training.h"
#include "lease_scheduler_simulation.h"

using namespace distrain;
using namespace distrain::job;

namespace {

// Trainers whose shards have `lengths` batches. A shard's position is `used`, its next batch.
class Trainers {
 public:
  Trainers(LeaseScheduler::Options options, std::vector<int64_t> lengths, uint64_t seed)
      : lengths_(std::move(lengths)),
        random_({seed}),
        schedule_(with_streams(options, lengths_.size()),
                  {.on_evaluated = [this](const Position&, bool whole) { whole_.push_back(whole); },
                   .on_save = [this](const Position& position) { saved = position; },
                   .on_end = [this](bool is_stopped) { stopped = is_stopped; }}),
        streams_(lengths_.size()) {}

  void resume(const Position& position) {
    saved = read_back(position, static_cast<int>(lengths_.size()));
    streams_ = saved.streams;
    schedule_.resume(saved);
  }

  // Runs until the end. Trainer 0 requests a stop with its request number `stop_at`.
  void run(int64_t stop_at = -1) {
    for (int64_t request = 0;; ++request) {
      std::vector<base::Future<Task>> futures;
      for (size_t t = 0; t < lengths_.size(); ++t) {
        futures.push_back(
            schedule_.next(static_cast<int>(t), t == 0 && request == stop_at, demand(t)));
        REQUIRE(futures.back().done() == (t + 1 == lengths_.size()));
      }
      std::vector<Task> tasks;
      for (const auto& future : futures) tasks.push_back(future.wait());
      const Task& first = tasks[0];
      asks_for_steps_ = first.kind == Task::Kind::kTrain;
      for (const Task& task : tasks) REQUIRE(task.kind == first.kind);
      if (first.kind == Task::Kind::kEnd) return;
      if (first.kind == Task::Kind::kTrain && first.count > 0) train(tasks);
      if (first.kind == Task::Kind::kEvaluate) begin_epoch(first);
    }
  }

  std::map<std::pair<size_t, int64_t>, int> made;  // times that each (shard, batch) was used
  std::vector<int64_t> epoch_steps{0};             // steps of each epoch
  Position saved;
  bool stopped = false;

 private:
  static LeaseScheduler::Options with_streams(LeaseScheduler::Options options, size_t trainers) {
    options.streams = true;
    options.trainers = static_cast<int>(trainers);
    if (options.steps_per_epoch == 1) options.steps_per_epoch = Plan::kEndless;
    return options;
  }

  Demand demand(size_t t) {
    Demand demand(random_.between(1, 5));
    demand.position = streams_[t];
    if (!asks_for_steps_) return demand;
    const int64_t left = lengths_[t] - streams_[t].used;
    demand.ready = left == 0 ? 0 : random_.between(1, std::min<int64_t>(left, 7));
    return demand;
  }

  void train(const std::vector<Task>& tasks) {
    int32_t with_data = 0;
    for (size_t t = 0; t < tasks.size(); ++t) {
      REQUIRE(tasks[t].shard == static_cast<int>(t));
      REQUIRE(tasks[t].count == tasks[0].count);
      REQUIRE(tasks[t].step == tasks[0].step);
      REQUIRE(tasks[t].has_data == (streams_[t].used < lengths_[t]));
      with_data += tasks[t].has_data ? 1 : 0;
      for (int64_t i = 0; i < tasks[t].count && tasks[t].has_data; ++i) {
        REQUIRE(streams_[t].used < lengths_[t]);
        ++made[{t, streams_[t].used++}];
      }
    }
    REQUIRE(with_data >= 1);
    REQUIRE(tasks[0].with_data == with_data);
    epoch_steps.back() += tasks[0].count;
  }

  void begin_epoch(const Task& task) {
    if (task.partial || task.last) return;
    for (size_t t = 0; t < lengths_.size(); ++t) {
      if (streams_[t].used == lengths_[t]) streams_[t] = {.epoch = streams_[t].epoch + 1};
    }
    epoch_steps.push_back(0);
  }

  const std::vector<int64_t> lengths_;
  base::Random random_;
  std::vector<bool> whole_;
  LeaseScheduler schedule_;
  std::vector<data::StreamPosition> streams_;
  bool asks_for_steps_ = true;
};

const std::vector<std::vector<int64_t>> kLengths{{5},     {9, 9},     {0, 4},
                                                 {12, 3}, {3, 12, 7}, {1, 0, 0, 30}};

}  // namespace

TEST_CASE(
    "each batch of uneven shards is used once an epoch, and an epoch has the longest's steps") {
  for (const auto& lengths : kLengths) {
    for (uint64_t seed = 0; seed < 20; ++seed) {
      Trainers trainers({.epochs = 3}, lengths, seed);
      trainers.run();
      REQUIRE(trainers.epoch_steps == std::vector<int64_t>(3, std::ranges::max(lengths)));
      size_t batches = 0;
      for (const int64_t length : lengths) batches += static_cast<size_t>(length);
      REQUIRE(trainers.made.size() == batches);
      for (const auto& [batch, times] : trainers.made) REQUIRE(times == 3);
    }
  }
}

TEST_CASE("a job on streams that stops at any request goes on where it stopped") {
  for (const auto& lengths : kLengths) {
    for (int64_t stop_at = 0;; ++stop_at) {
      LeaseScheduler::Options options{.epochs = 2, .save = true};
      options.save_every = stop_at % 3;
      Trainers first(options, lengths, static_cast<uint64_t>(stop_at));
      first.run(stop_at);
      if (!first.stopped) break;
      Trainers rest(options, lengths, 7);
      rest.resume(first.saved);
      rest.made = first.made;
      rest.run();
      REQUIRE_FALSE(rest.stopped);
      for (const auto& [batch, times] : rest.made) REQUIRE(times == 2);
      REQUIRE(rest.saved.total == 2 * std::ranges::max(lengths) * std::ssize(lengths));
    }
  }
}

TEST_CASE("a number of steps per epoch cuts a stream, which the next epoch goes on with") {
  Trainers trainers({.epochs = 4, .steps_per_epoch = 5}, {12, 7}, 1);
  trainers.run();
  // In epoch 3, trainer 1 makes its second pass while trainer 0 ends its first after two steps.
  CHECK(trainers.epoch_steps == std::vector<int64_t>{5, 5, 5, 5});
  CHECK(trainers.made[{0, 0}] == 2);
  CHECK(trainers.made[{0, 4}] == 2);
  CHECK(trainers.made[{0, 11}] == 1);
}

TEST_CASE("with a number of steps per epoch, a job resumes in the same pass over each shard") {
  LeaseScheduler::Options options{.epochs = 3, .steps_per_epoch = 5, .save = true};
  Trainers undisturbed(options, {10, 4}, 1);
  undisturbed.run();
  // At the end of epoch 2, trainer 0 has made one pass and trainer 1 two.
  options.epochs = 2;
  Trainers first(options, {10, 4}, 1);
  first.run();
  options.epochs = 3;
  Trainers rest(options, {10, 4}, 1);
  rest.resume(first.saved);
  rest.run();
  CHECK((rest.saved.streams == undisturbed.saved.streams));
}

TEST_CASE("the limit of steps and the limit of epochs of streams hold together") {
  Trainers by_steps({.epochs = 9, .steps = 7}, {4, 2}, 1);
  by_steps.run();
  CHECK(by_steps.epoch_steps == std::vector<int64_t>{4, 3});
  Trainers by_epochs({.epochs = 2, .steps = 70}, {4, 2}, 1);
  by_epochs.run();
  CHECK(by_epochs.epoch_steps == std::vector<int64_t>{4, 4});
  Trainers without_epochs({.epochs = 0, .steps = 10}, {4, 2}, 1);
  without_epochs.run();
  CHECK(without_epochs.epoch_steps == std::vector<int64_t>{4, 4, 2});
}

TEST_CASE("a position of streams is refused unless it is complete") {
  const Position position{1, {2, 2}, 4, {{1, 0, 5, 0, 3}, {1, 1, 0, 2, 0}}};
  const Json json = Json::parse(position.to_json().dump());
  CHECK((Position::from_json(json, 2).streams == position.streams));
  for (const Json& streams : {Json(1), Json::array({Json::array({1, 0, 5, 0, 3})}),
                              Json::array({Json::array({1, 0}), Json::array({1, 0})})}) {
    Json other = json;
    other["streams"] = streams;
    CHECK_THROWS_AS(Position::from_json(other, 2), base::Exception);
  }
  LeaseScheduler::Options options{.trainers = 2};
  CHECK_THROWS_AS(LeaseScheduler(options, {}).resume(position), base::Exception);
}
