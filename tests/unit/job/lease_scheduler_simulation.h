// Simulates the trainers of a LeaseScheduler: one event at a time, in an order drawn from a seed.
#pragma once

#include <limits>
#include <map>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "distrain/base/random.h"
#include "distrain/job/lease_scheduler.h"
#include "support/catch.h"

namespace distrain::job {

using StepKey = std::tuple<int64_t, int32_t, int64_t>;  // epoch, shard, step
using Steps = std::set<StepKey>;

inline constexpr int64_t kUnbounded = std::numeric_limits<int64_t>::max();

inline std::string describe(const LeaseScheduler::Options& options) {
  return "trainers " + std::to_string(options.trainers) + " epochs " +
         std::to_string(options.epochs) + " steps " + std::to_string(options.steps) + " of " +
         std::to_string(options.steps_per_epoch) + (options.take_over ? " take_over" : "") +
         (options.save ? " save_every " : " no save, ") + std::to_string(options.save_every);
}

inline int64_t steps_of_each(const LeaseScheduler::Options& options) {
  return options.steps > 0 ? options.steps : options.epochs * options.steps_per_epoch;
}

// Returns how many steps each trainer has made at each save, for a job that is not stopped.
inline std::vector<int64_t> expected_saves(const LeaseScheduler::Options& options,
                                           int64_t from = 0) {
  std::vector<int64_t> saves;
  if (!options.save) return saves;
  const int64_t every = options.save_every > 0 ? options.save_every : options.steps_per_epoch;
  const int64_t last = steps_of_each(options);
  for (int64_t at = every; at < last; at += every) {
    if (at > from) saves.push_back(at);
  }
  saves.push_back(last);
  return saves;
}

// Returns `position` after a round trip through its JSON form, as in a checkpoint.
inline Position read_back(const Position& position, int trainers) {
  return Position::from_json(Json::parse(position.to_json().dump()), trainers);
}

struct Saved {
  Position position;
  Steps done;
};

class Simulation {
 public:
  // After a step, a trainer waits while another trainer is more than `lead` steps behind.
  Simulation(const LeaseScheduler::Options& options, int64_t lead, uint64_t seed)
      : options_(options),
        lead_(options.take_over ? kUnbounded : lead),
        random_({seed}),
        schedule_(options, hooks()),
        trainers_(static_cast<size_t>(options.trainers)) {}

  void resume(const Saved& saved) {
    done_ = saved.done;
    schedule_.resume(read_back(saved.position, options_.trainers));
  }

  // Runs the job. The trainer that makes the `stop_at`-th call to next() then requests a stop.
  void run(int64_t stop_at = kUnbounded) {
    INFO(describe(options_) << ", lead " << lead_ << ", stop at call " << stop_at);
    stop_at_ = stop_at;
    for (int t = 0; t < options_.trainers; ++t) ask(t);
    while (ended_ < options_.trainers) {
      std::vector<int> able;
      for (int t = 0; t < options_.trainers; ++t) {
        if (can_go_on(t)) able.push_back(t);
      }
      if (able.empty()) FAIL("everybody waits");
      go_on(able[random_.below(able.size())]);
    }
    for (const std::string& error : errors) FAIL(error);
    REQUIRE(outstanding_ == 0);
    REQUIRE(ends_ == 1);
    REQUIRE(stopped_says_ == (stopped ? options_.trainers : 0));
    REQUIRE((saves.empty() || saves.back().done == done_));  // all completed steps are saved
    REQUIRE(saves.empty() == !options_.save);
  }

  void check_complete() const {
    INFO(describe(options_));
    REQUIRE(static_cast<int64_t>(done_.size()) == steps_of_each(options_) * options_.trainers);
    REQUIRE_FALSE((stopped && !options_.save));
    const int64_t whole = steps_of_each(options_) / options_.steps_per_epoch;
    for (int64_t epoch = 1; epoch <= whole; ++epoch) {
      REQUIRE(steps_in(done_, epoch) == std::vector<int64_t>(static_cast<size_t>(options_.trainers),
                                                             options_.steps_per_epoch));
    }
  }

  int64_t calls() const { return calls_; }

  std::vector<Saved> saves;
  std::vector<bool> evaluations;  // true: the evaluation of a whole epoch
  bool stopped = false;
  std::vector<std::string> errors;

 private:
  struct Trainer {
    base::Future<Task> task;
    int64_t made = 0;
    bool asks = false;  // has completed its task and waits for slower trainers
    bool stops = false;
    bool ended = false;
  };

  LeaseScheduler::Hooks hooks() {
    return {[] {}, [this](const Position&, bool whole) { on_evaluated(whole); },
            [this](const Position& position) { on_save(position); },
            [this](bool by_signal) {
              ++ends_;
              stopped = by_signal;
            }};
  }

  void expect(bool right, const char* what) {
    if (!right) errors.emplace_back(what);
  }

  static std::vector<int64_t> counts(const Steps& done, int64_t epoch, size_t shards) {
    std::vector<int64_t> counts(shards);
    for (const auto& [e, shard, step] : done) {
      if (e == epoch) ++counts[static_cast<size_t>(shard)];
    }
    return counts;
  }
  std::vector<int64_t> steps_in(const Steps& done, int64_t epoch) const {
    return counts(done, epoch, static_cast<size_t>(options_.trainers));
  }

  void on_evaluated(bool whole) {
    expect(outstanding_ == 0, "evaluated while a step was made");
    expect(evaluating_ == options_.trainers, "evaluated without a trainer");
    evaluating_ = 0;
    evaluations.push_back(whole);
  }

  void on_save(const Position& position) {
    expect(outstanding_ == 0, "saved while a step was made");
    expect(saving_ == options_.trainers, "saved without a trainer");
    expect(position.total == static_cast<int64_t>(done_.size()), "saved another total");
    expect(position.steps == steps_in(done_, position.epoch), "saved other steps");
    saving_ = 0;
    saves.push_back({position, done_});
  }

  bool can_go_on(int t) const {
    const Trainer& trainer = trainers_[static_cast<size_t>(t)];
    if (trainer.ended) return false;
    if (!trainer.asks) return trainer.task.done();
    int64_t slowest = kUnbounded;
    for (const Trainer& other : trainers_) slowest = std::min(slowest, other.made);
    return trainer.made - slowest <= lead_;
  }

  void ask(int t) {
    Trainer& trainer = trainers_[static_cast<size_t>(t)];
    trainer.asks = false;
    if (++calls_ == stop_at_) trainer.stops = true;
    trainer.task = schedule_.next(t, trainer.stops);
  }

  void go_on(int t) {
    Trainer& trainer = trainers_[static_cast<size_t>(t)];
    if (trainer.asks) return ask(t);
    const Task task = trainer.task.wait();
    switch (task.kind) {
      case Task::Kind::kTrain:
        return make_step(trainer, task);
      case Task::Kind::kEvaluate:
        ++evaluating_;
        break;
      case Task::Kind::kSave:
        ++saving_;
        break;
      case Task::Kind::kEnd:
        trainer.ended = true;
        ++ended_;
        stopped_says_ += task.stopped ? 1 : 0;
        return;
    }
    trainer.asks = true;
  }

  // Begins the step or, if it has begun, ends it. Other trainers' events may come in between.
  void make_step(Trainer& trainer, const Task& task) {
    const StepKey key(task.epoch, task.shard, task.step);
    if (in_hand_.insert(key).second) {
      ++outstanding_;
      expect(!done_.contains(key), "a step twice");
      expect(task.step < options_.steps_per_epoch && task.shard < options_.trainers,
             "no such step");
      expect(options_.take_over || &trainers_[static_cast<size_t>(task.shard)] == &trainer,
             "a step of another's shard");
      return;
    }
    in_hand_.erase(key);
    --outstanding_;
    expect(done_.insert(key).second, "a step twice");
    ++trainer.made;
    trainer.asks = true;
  }

  const LeaseScheduler::Options options_;
  const int64_t lead_;
  base::Random random_;
  LeaseScheduler schedule_;
  std::vector<Trainer> trainers_;
  int64_t stop_at_ = kUnbounded;
  int64_t calls_ = 0;
  Steps in_hand_;
  Steps done_;
  int outstanding_ = 0;
  int evaluating_ = 0;
  int saving_ = 0;
  int ended_ = 0;
  int ends_ = 0;
  int stopped_says_ = 0;
};

}  // namespace distrain::job
