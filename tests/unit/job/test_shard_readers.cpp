// Simulates trainers that read shards of streamed data which other trainers have left: after
// losses, and after a resume with another number of trainers. One event at a time, in an order
// drawn from a seed.
#include <algorithm>
#include <map>
#include <vector>

#include "distrain/base/random.h"
#include "distrain/job/training.h"
#include "lease_scheduler_simulation.h"

using namespace distrain;
using namespace distrain::job;

namespace {

// The times that each batch of each pass over the data was used.
using Used = std::map<std::pair<int64_t, int64_t>, int>;

struct SavedStreams {
  Position position;
  Used used;
};

// The first batch of a shard; shards are uneven, and some are empty if there are few batches.
int64_t first_batch(int64_t shard, int64_t shards, int64_t batches) {
  return batches * shard * (shard + 1) / (shards * (shards + 1));
}

class PoolOfTrainers {
 public:
  PoolOfTrainers(LeaseScheduler::Options options, uint64_t seed)
      : options_(with_pool(options)),
        batches_(seed % 3 == 0 ? 2 : 23),
        random_({seed}),
        schedule_(options_, {.on_save =
                                 [this](const Position& position) {
                                   saves.push_back({position, used});
                                 },
                             .on_end = [this](bool is_stopped) { stopped = is_stopped; }}),
        trainers_(static_cast<size_t>(options.trainers)) {}

  void resume(const SavedStreams& saved) {
    used = saved.used;
    const Position position = read_back(saved.position, options_.trainers);
    begins_epoch_ = std::ranges::count(position.steps, 0) == std::ssize(position.steps);
    schedule_.resume(position);
  }

  // Runs to the end. Each event is a loss or a return with a probability of `losses` in 1,000.
  void run(int64_t losses = 0, bool knows_steps = true, int64_t stop_at = -1) {
    stop_at_ = stop_at;
    for (int t = 0; t < options_.trainers; ++t) {
      Trainer& trainer = at(t);
      trainer.seat = t;
      go_to(trainer, schedule_.start_of(t));
      const auto& from = trainer.reads.from;
      trainer.begins_epoch = begins_epoch_ && from != data::StreamPosition{.epoch = from.epoch};
    }
    for (int t = 0; t < options_.trainers; ++t) ask(t);
    while (std::ranges::any_of(trainers_, [](auto& t) { return t.is_here && !t.has_ended; })) {
      if (random_.below(1000) < static_cast<uint64_t>(losses)) lose_or_return(knows_steps);
      std::vector<int> able;
      for (int t = 0; t < options_.trainers; ++t) {
        const Trainer& trainer = at(t);
        if (!trainer.is_here || trainer.has_ended) continue;
        if (trainer.steps_left > 0 || trainer.task.done()) able.push_back(t);
      }
      if (able.empty()) FAIL("everybody waits");
      go_on(able[random_.below(able.size())]);
    }
  }

  void check_all_used(int64_t epochs, bool twice_allowed = false) const {
    REQUIRE(std::ssize(used) == epochs * batches_);
    for (const auto& [batch, times] : used) REQUIRE((times == 1 || (twice_allowed && times > 0)));
  }

  Used used;
  std::vector<SavedStreams> saves;
  bool stopped = false;

 private:
  struct Trainer {
    base::Future<Task> task;
    Seat seat;
    bool is_here = true, has_ended = false;
    bool asks_for_steps = true, begins_epoch = false;
    ShardStart reads;
    int64_t steps_left = 0;
    bool has_data = true;
    int64_t made = 0;
  };

  static LeaseScheduler::Options with_pool(LeaseScheduler::Options options) {
    options.streams = true;
    options.reading = LeaseScheduler::Reading::kAnyShard;
    options.steps_per_epoch = Plan::kEndless;
    options.may_lose = options.take_over;
    return options;
  }

  Trainer& at(int t) { return trainers_[static_cast<size_t>(t)]; }

  int64_t left(const Trainer& trainer) const {
    const ShardStart& reads = trainer.reads;
    if (reads.shards == 0) return 0;
    return first_batch(reads.shard + 1, reads.shards, batches_) -
           first_batch(reads.shard, reads.shards, batches_) - reads.from.used;
  }

  void go_to(Trainer& trainer, const ShardStart& start) {
    if (start.shards == 0) return;
    trainer.begins_epoch = false;
    trainer.reads = start;
    trainer.reads.from.used += start.skip;
    REQUIRE(left(trainer) >= 0);
  }

  void ask(int t) {
    Trainer& trainer = at(t);
    Demand demand(random_.between(1, 4));
    if (trainer.asks_for_steps) {
      if (trainer.begins_epoch && trainer.reads.shards > 0 && left(trainer) == 0) {
        trainer.reads.from = {.epoch = trainer.reads.from.epoch + 1};
      }
      trainer.begins_epoch = false;
      const int64_t batches = left(trainer);
      demand.ready = batches == 0 ? 0 : random_.between(1, std::min<int64_t>(batches, 5));
    }
    demand.position = trainer.reads.from;
    trainer.task = schedule_.next(trainer.seat, stop_at_ >= 0 && requests_++ >= stop_at_, demand);
  }

  void go_on(int t) {
    Trainer& trainer = at(t);
    if (trainer.steps_left == 0) {
      const Task task = trainer.task.wait();
      trainer.asks_for_steps = task.kind == Task::Kind::kTrain;
      trainer.has_ended = task.kind == Task::Kind::kEnd;
      if (task.kind == Task::Kind::kEvaluate && !task.partial) trainer.begins_epoch = true;
      if (task.kind == Task::Kind::kTrain) {
        go_to(trainer, task.start);
        trainer.steps_left = task.count;
        trainer.has_data = task.has_data;
      }
    } else {
      --trainer.steps_left;
      ++trainer.made;
      if (trainer.has_data) {
        REQUIRE(left(trainer) > 0);
        const ShardStart& reads = trainer.reads;
        ++used[{reads.from.epoch,
                first_batch(reads.shard, reads.shards, batches_) + trainer.reads.from.used++}];
      }
    }
    if (!trainer.has_ended && trainer.steps_left == 0) ask(t);
  }

  void lose_or_return(bool knows_steps) {
    const int t = static_cast<int>(random_.below(trainers_.size()));
    Trainer& trainer = at(t);
    if (std::ranges::any_of(trainers_, &Trainer::has_ended)) return;
    if (trainer.is_here) {
      if (schedule_.trainers_left() == 1) return;
      trainer.is_here = false;
      schedule_.lose(t, knows_steps ? std::optional(trainer.made) : std::nullopt);
      schedule_.go_on();
    } else {
      trainer = {.seat = schedule_.take_seat(t)};
      ask(t);
    }
  }

  const LeaseScheduler::Options options_;
  const int64_t batches_;  // of an epoch
  base::Random random_;
  LeaseScheduler schedule_;
  std::vector<Trainer> trainers_;
  bool begins_epoch_ = false;
  int64_t stop_at_ = -1, requests_ = 0;
};

}  // namespace

TEST_CASE("each batch of streams is used once an epoch in async mode, also after losses") {
  for (uint64_t seed = 0; seed < 300; ++seed) {
    INFO("seed " << seed);
    LeaseScheduler::Options options{.trainers = 1 + static_cast<int>(seed % 4), .epochs = 3};
    options.take_over = true;
    options.save = seed % 2 == 0;
    options.save_every = static_cast<int64_t>(seed % 3);
    PoolOfTrainers trainers(options, seed);
    trainers.run(static_cast<int64_t>(seed % 5) * 10);
    trainers.check_all_used(3);
  }
}

TEST_CASE("batches of a lost trainer whose steps are unknown may be used twice, but none is lost") {
  for (uint64_t seed = 0; seed < 100; ++seed) {
    LeaseScheduler::Options options{.trainers = 3, .epochs = 2, .take_over = true};
    PoolOfTrainers trainers(options, seed);
    trainers.run(30, /*knows_steps=*/false);
    trainers.check_all_used(2, /*twice_allowed=*/true);
  }
}

TEST_CASE("a checkpoint of streams resumes with any number of trainers, and no batch is repeated") {
  for (uint64_t seed = 0; seed < 300; ++seed) {
    INFO("seed " << seed);
    LeaseScheduler::Options options{.trainers = 1 + static_cast<int>(seed % 4), .epochs = 3};
    options.take_over = seed % 2 == 0;
    options.save = true;
    PoolOfTrainers first(options, seed);
    first.run(options.take_over ? 20 : 0, true, static_cast<int64_t>(seed / 4) % 40);
    if (!first.stopped) continue;
    options.trainers = 1 + static_cast<int>(seed / 7 % 4);
    PoolOfTrainers second(options, seed);
    second.resume(first.saves.back());
    second.run(0, true, static_cast<int64_t>(seed % 9));
    if (!second.stopped) {
      second.check_all_used(3);
      continue;
    }
    options.trainers = 1 + static_cast<int>(seed / 3 % 4);
    PoolOfTrainers third(options, seed);
    third.resume(second.saves.back());
    third.run();
    third.check_all_used(3);
  }
}

TEST_CASE("trainers that read one stream in turn resume at the position of the furthest") {
  LeaseScheduler::Options options{.trainers = 3, .epochs = 9};
  options.streams = true;
  options.steps_per_epoch = Plan::kEndless;
  options.reading = LeaseScheduler::Reading::kOneStream;
  LeaseScheduler schedule(options, {});
  schedule.resume({1, {4, 4}, 8, {{1, 0, 90, 2, 3}, {1, 0, 70, 1, 6}}});
  for (int trainer = 0; trainer < 3; ++trainer) {
    CHECK((schedule.start_of(trainer).from == data::StreamPosition{1, 0, 90, 2, 3}));
  }
  CHECK(schedule.steps_of_each() == 4);
}

TEST_CASE(
    "a checkpoint of streams is refused if trainers read only their own shards and their number "
    "differs") {
  LeaseScheduler::Options options{.trainers = 3, .epochs = 9};
  options.streams = true;
  options.steps_per_epoch = Plan::kEndless;
  const Position of_two{1, {4, 4}, 8, {{1, 0, 90, 2, 3}, {1, 0, 70, 1, 6}}};
  CHECK_THROWS_AS(LeaseScheduler(options, {}).resume(of_two), base::Exception);
}
