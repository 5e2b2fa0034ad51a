// Tests schedules in which trainers are lost at random times; a lost trainer may return.
#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "lease_scheduler_simulation.h"
#include "support/cluster.h"

using namespace distrain;
using namespace distrain::job;

namespace {

// Models how the optimizers of a job make trainers wait: a trainer waits while it is more than
// `lead` steps ahead of the slowest trainer that is neither resting nor lost.
class Pace {
 public:
  Pace(int trainers, int64_t lead) : lead_(lead), all_(static_cast<size_t>(trainers)) {}

  bool may_go_on(int t) const { return at(t).steps - slowest(-1) <= lead_; }
  void step(int t) {
    if (at(t).state == State::kResting) begin(t);
    ++at(t).steps;
  }
  void rest(int t) {
    if (at(t).state == State::kStepping) at(t).state = State::kResting;
  }
  void lose(int t) { at(t).state = State::kLost; }
  void begin(int t) {
    at(t).steps = std::max(at(t).steps, slowest(t));
    at(t).state = State::kStepping;
  }

 private:
  enum class State : uint8_t { kStepping, kResting, kLost };
  struct Each {
    State state = State::kStepping;
    int64_t steps = 0;
  };
  Each& at(int t) { return all_[static_cast<size_t>(t)]; }
  const Each& at(int t) const { return all_[static_cast<size_t>(t)]; }
  int64_t slowest(int but) const {
    int64_t slowest = kUnbounded, fastest = 0;
    for (int t = 0; t < static_cast<int>(all_.size()); ++t) {
      fastest = std::max(fastest, at(t).steps);
      if (t != but && at(t).state == State::kStepping) slowest = std::min(slowest, at(t).steps);
    }
    return std::min(slowest, fastest);
  }

  const int64_t lead_;
  std::vector<Each> all_;
};

struct Chances {
  int64_t loss = 0;         // probability of a loss, per thousand events
  int64_t unknown = 0;      // losses in ten after which the trainer's steps are unknown
  int64_t most_losses = 0;  // per run
  bool come_back = true;
};

// Simulates a job with losses: one event at a time, in an order drawn from a seed.
class LossSimulation {
 public:
  LossSimulation(const LeaseScheduler::Options& options, int64_t lead, const Chances& chances,
                 uint64_t seed)
      : options_(options),
        lead_(lead),
        chances_(chances),
        seed_(seed),
        random_({seed}),
        pace_(options.trainers, lead),
        schedule_(options, hooks()),
        trainers_(static_cast<size_t>(options.trainers)) {
    for (int t = 0; t < options.trainers; ++t) trainer(t).seat = t;
  }

  void resume(const Saved& saved) {
    done_ = saved.done;
    schedule_.resume(read_back(saved.position, options_.trainers));
  }

  void run(int64_t stop_at = kUnbounded) {
    INFO(text() << ", stop at call " << stop_at);
    stop_at_ = stop_at;
    for (int t = 0; t < options_.trainers; ++t) ask(t);
    while (!is_over()) {
      if (one_in(1000, chances_.loss)) lose_somebody();
      std::vector<int> able;
      for (int t = 0; t < options_.trainers; ++t) {
        if (can_go_on(t)) able.push_back(t);
      }
      if (to_tell_ > 0) able.push_back(-1);
      if (able.empty()) FAIL("everybody waits: " << whereabouts());
      const int t = able[random_.below(able.size())];
      t >= 0 ? go_on(t) : tell();
    }
    bring_back_all_in_the_end();
    for (const std::string& error : errors_) FAIL(error);
    REQUIRE(ends_ == 1);
    REQUIRE(saves.empty() == !options_.save);
    if (!saves.empty()) REQUIRE((saves.back().done == done_));
    REQUIRE(twice_ <= in_doubt_);
    if (chances_.unknown == 0) REQUIRE(twice_ == 0);
  }

  void check_complete() const {
    INFO(text());
    REQUIRE(static_cast<int64_t>(done_.size()) == steps_of_each(options_) * options_.trainers);
  }

  std::string text() const {
    return describe(options_) + ", lead " + std::to_string(lead_) + ", seed " +
           std::to_string(seed_);
  }
  int64_t losses() const { return losses_; }
  int64_t returns() const { return returns_; }
  int64_t again() const { return again_; }

  std::vector<Saved> saves;
  bool stopped = false;

 private:
  enum class At : uint8_t { kAsking, kWorking, kStepped, kGone, kEnded };
  struct Trainer {
    At at = At::kAsking;
    Seat seat;
    base::Future<Task> asked;
    Task task;
    int64_t of_lease = 0;  // completed steps of the lease
    int64_t of_seat = 0;
    bool stops = false;
  };

  LeaseScheduler::Hooks hooks() {
    LeaseScheduler::Hooks hooks;
    hooks.on_evaluated = [this](const Position&, bool) {
      expect_meeting("evaluated");
      maybe_lose_in_hook();
    };
    hooks.on_save = [this](const Position& position) {
      expect_meeting("saved");
      expect(position.total == static_cast<int64_t>(done_.size()), "saved another total");
      std::vector<int64_t> steps(static_cast<size_t>(options_.trainers));
      for (const auto& [epoch, shard, step] : done_) {
        if (epoch == position.epoch) ++steps[static_cast<size_t>(shard)];
      }
      expect(position.steps == steps, "saved other steps");
      saves.push_back({position, done_});
      maybe_lose_in_hook();
    };
    hooks.on_end = [this](bool by_signal) {
      ++ends_;
      stopped = by_signal;
    };
    hooks.on_again = [this] {
      ++again_;
      parts_.clear();
    };
    hooks.on_rest = [this](int t) { pace_.rest(t); };
    return hooks;
  }

  Trainer& trainer(int t) { return trainers_[static_cast<size_t>(t)]; }
  const Trainer& trainer(int t) const { return trainers_[static_cast<size_t>(t)]; }
  bool one_in(uint64_t of, int64_t chance) {
    return static_cast<int64_t>(random_.below(of)) < chance;
  }
  void expect(bool right, const std::string& what) {
    if (!right) errors_.push_back(what);
  }

  // Checks that no trainer holds a lease and that each trainer has sent its part of the save or
  // evaluation exactly once.
  void expect_meeting(const std::string& what) {
    for (const Trainer& each : trainers_) {
      expect(each.at == At::kAsking || each.at == At::kGone, what + " while one was at work");
    }
    std::set<int32_t> parts;
    for (const auto& [part, of] : parts_) {
      parts.insert(part);
      expect(of == static_cast<int32_t>(parts_.size()), what + " by another number of parts");
    }
    expect(!parts_.empty() && parts.size() == parts_.size(), what + " without a part");
    parts_.clear();
  }

  // ---- the state of one trainer ----

  bool can_go_on(int t) const {
    switch (trainer(t).at) {
      case At::kAsking:
        return trainer(t).asked.done();
      case At::kStepped:
        return pace_.may_go_on(t);
      case At::kGone:
        return chances_.come_back && ends_ == 0;
      case At::kWorking:
        return true;
      case At::kEnded:
        return false;
    }
    return false;
  }

  void go_on(int t) {
    Trainer& its = trainer(t);
    switch (its.at) {
      case At::kAsking:
        its.task = its.asked.wait();
        its.of_lease = 0;
        its.at = its.task.kind == Task::Kind::kEnd ? At::kEnded : At::kWorking;
        return;
      case At::kWorking:
        return its.task.kind == Task::Kind::kTrain ? make_step(t) : bring_part(t);
      case At::kStepped:
        its.at = At::kWorking;
        if (its.of_lease == its.task.count) ask(t);
        return;
      case At::kGone:
        return come_back(t);
      case At::kEnded:
        return;
    }
  }

  void ask(int t) {
    Trainer& its = trainer(t);
    if (++calls_ == stop_at_) its.stops = true;
    its.at = At::kAsking;
    in_next_ = t;
    its.asked = schedule_.next(its.seat, its.stops, 1 + static_cast<int64_t>(random_.below(4)));
    in_next_ = -1;
    if (its.at == At::kGone) expect_failed(its);  // the trainer was lost in a hook of next()
  }

  void make_step(int t) {
    Trainer& its = trainer(t);
    const StepKey key(its.task.epoch, its.task.shard, its.task.step + its.of_lease);
    expect(std::get<2>(key) < options_.steps_per_epoch && its.task.shard < options_.trainers,
           "no such step");
    if (!done_.insert(key).second) {
      ++twice_;
      expect(doubted_.contains(key), "a step twice that nobody doubted");
    }
    ++its.of_lease;
    ++its.of_seat;
    pace_.step(t);
    its.at = At::kStepped;
  }

  void bring_part(int t) {
    parts_.emplace_back(trainer(t).task.part, trainer(t).task.parts);
    ask(t);
  }

  // ---- losses ----

  std::vector<int> who(At at) const {
    std::vector<int> some;
    for (int t = 0; t < options_.trainers; ++t) {
      if (trainer(t).at == at) some.push_back(t);
    }
    return some;
  }
  int here() const { return options_.trainers - static_cast<int>(who(At::kGone).size()); }
  std::string whereabouts() const {
    std::string all;
    for (int t = 0; t < options_.trainers; ++t) {
      const Trainer& its = trainer(t);
      all += std::to_string(t) + (its.at == At::kAsking    ? " asks"
                                  : its.at == At::kStepped ? " is ahead"
                                  : its.at == At::kGone    ? " is gone"
                                  : its.at == At::kEnded   ? " has ended"
                                                           : " works");
      all += " after " + std::to_string(its.of_lease) + " of " + std::to_string(its.task.count) +
             " steps; ";
    }
    return all;
  }
  bool is_over() const {
    return std::ranges::all_of(
        trainers_, [](const Trainer& its) { return its.at == At::kGone || its.at == At::kEnded; });
  }

  void lose_somebody() {
    const int t = static_cast<int>(random_.below(static_cast<uint64_t>(options_.trainers)));
    Trainer& its = trainer(t);
    // Never loses the last trainer, because a job without any trainer does not continue.
    if (losses_ >= chances_.most_losses || here() < 2 || its.at == At::kGone ||
        its.at == At::kEnded) {
      return;
    }
    ++losses_;
    const bool asks = its.at == At::kAsking;
    const bool was_told = asks && t != in_next_ && its.asked.done();
    if (was_told) {  // the scheduler has handed out a task that the trainer has not read
      its.task = its.asked.wait();
      its.of_lease = 0;
    }
    const bool has_lease = (!asks || was_told) && its.task.kind == Task::Kind::kTrain;
    const bool is_known = !one_in(10, chances_.unknown);
    const int64_t of_lease = has_lease ? its.of_lease : 0;
    const int64_t leased = has_lease ? its.task.count : 0;
    if (!is_known) {
      for (int64_t i = 0; i < of_lease; ++i) {
        doubted_.emplace(its.task.epoch, its.task.shard, its.task.step + i);
      }
    }
    const LeaseScheduler::Lost lost =
        schedule_.lose(t, is_known ? std::optional(its.of_seat) : std::nullopt);
    const int64_t known = is_known ? of_lease : 0;
    expect(lost.back == leased - known, "gave back other steps");
    expect(lost.in_doubt == (is_known ? 0 : leased), "other steps in doubt");
    expect(lost.made == its.of_seat - of_lease + known, "made other steps");
    in_doubt_ += lost.in_doubt;
    if (asks && !was_told && t != in_next_) expect_failed(its);
    pace_.lose(t);
    its.at = At::kGone;
    expect_refused(its.seat);
    expect(schedule_.trainers_left() == here(), "another number of them is left");
    ++to_tell_;
  }

  void maybe_lose_in_hook() {
    if (!one_in(1000, chances_.loss)) return;
    lose_somebody();
    if (to_tell_ > 0 && one_in(2, 1)) tell();
  }

  void tell() {
    --to_tell_;
    schedule_.go_on();
  }

  void expect_failed(const Trainer& its) {
    expect(its.asked.done() && !its.asked.wait_result().ok(), "lost, and still waits");
  }

  void expect_refused(const Seat& seat) {
    const base::Error error = testing::error_of([&] { (void)schedule_.next(seat, false); });
    expect(error.kind == base::ErrorKind::kPeerLost, "a lost trainer got something");
  }

  void come_back(int t) {
    ++returns_;
    Trainer& its = trainer(t);
    const Seat before = its.seat;
    its = Trainer{};
    its.seat = schedule_.take_seat(t);
    expect(its.seat.before == before.before + 1, "another seat");
    expect_refused(before);
    pace_.begin(t);
    ask(t);
  }

  void bring_back_all_in_the_end() {
    for (const int t : who(At::kGone)) {
      come_back(t);
      expect(trainer(t).asked.done() && trainer(t).asked.wait().kind == Task::Kind::kEnd,
             "came late, and waits");
    }
  }

  const LeaseScheduler::Options options_;
  const int64_t lead_;
  const Chances chances_;
  const uint64_t seed_;
  base::Random random_;
  Pace pace_;
  LeaseScheduler schedule_;
  std::vector<Trainer> trainers_;
  std::vector<std::pair<int32_t, int32_t>> parts_;  // parts of the current save or evaluation
  Steps done_;
  Steps doubted_;
  std::vector<std::string> errors_;
  int64_t stop_at_ = kUnbounded;
  int64_t calls_ = 0;
  int64_t losses_ = 0;
  int64_t returns_ = 0;
  int64_t again_ = 0;
  int64_t twice_ = 0;
  int64_t in_doubt_ = 0;
  int in_next_ = -1;  // the trainer that is in next() now, or -1
  int to_tell_ = 0;   // losses after which go_on() has not been called yet
  int ends_ = 0;
};

const uint64_t kRuns = testing::kSanitized ? 300 : 2000;

struct Case {
  LeaseScheduler::Options options;
  int64_t lead = kUnbounded;
};

Case some_job(base::Random& random) {
  const auto one_of = [&random](const std::vector<int64_t>& values) {
    return values[random.below(values.size())];
  };
  Case job;
  job.options.trainers = static_cast<int>(one_of({2, 3, 4}));
  job.options.steps_per_epoch = one_of({1, 3, 5, 8});
  job.options.epochs = one_of({1, 2, 3});
  job.options.steps = one_of({0, 0, 2, 7, 11});
  job.options.take_over = one_of({0, 1}) == 1;
  const int64_t save_every = one_of({-1, 0, 2, 3, 5});
  job.options.save = save_every >= 0;
  job.options.save_every = std::max<int64_t>(save_every, 0);
  job.options.may_lose = true;
  if (!job.options.take_over) job.lead = one_of({0, 1, 3});
  return job;
}

}  // namespace

TEST_CASE("each step is made once, however many trainers are lost and return") {
  int64_t losses = 0, returns = 0, again = 0;
  for (uint64_t seed = 0; seed < kRuns; ++seed) {
    base::Random random({seed, 1});
    const Case job = some_job(random);
    const Chances chances{.loss = static_cast<int64_t>(20 + 20 * random.below(5)),
                          .most_losses = 12,
                          .come_back = random.below(3) > 0};
    LossSimulation simulation(job.options, job.lead, chances, seed);
    simulation.run();
    simulation.check_complete();
    losses += simulation.losses();
    returns += simulation.returns();
    again += simulation.again();
  }
  CHECK(losses > static_cast<int64_t>(kRuns));
  CHECK(returns > losses / 2);
  CHECK(again > static_cast<int64_t>(kRuns / 20));
}

TEST_CASE("a step is made twice only if it is unknown whether a lost trainer made it") {
  for (uint64_t seed = 0; seed < kRuns; ++seed) {
    base::Random random({seed, 2});
    const Case job = some_job(random);
    const Chances chances{.loss = 60,
                          .unknown = static_cast<int64_t>(1 + random.below(10)),
                          .most_losses = 8,
                          .come_back = random.below(3) > 0};
    LossSimulation simulation(job.options, job.lead, chances, seed);
    simulation.run();
    simulation.check_complete();
  }
}

TEST_CASE("a job that loses trainers can be stopped at any moment and resumed") {
  for (uint64_t seed = 0; seed < kRuns; ++seed) {
    base::Random random({seed, 3});
    Case job = some_job(random);
    job.options.save = true;
    const Chances chances{.loss = 60, .most_losses = 6, .come_back = random.below(3) > 0};
    const int64_t stop_at = 1 + static_cast<int64_t>(random.below(30));
    LossSimulation simulation(job.options, job.lead, chances, seed);
    simulation.run(stop_at);
    REQUIRE_FALSE(simulation.saves.empty());
    LossSimulation rest(job.options, job.lead, chances, seed);
    rest.resume(simulation.saves.back());
    rest.run();
    rest.check_complete();
  }
}

TEST_CASE("the steps of a lost trainer are handed out first, also to waiting trainers") {
  LeaseScheduler schedule(
      {.trainers = 2, .steps_per_epoch = 5, .take_over = true, .may_lose = true}, {});
  const base::Future<Task> first = schedule.next(0, false, 5);
  const Task lost = schedule.next(1, false, 4).wait();
  REQUIRE(first.wait().count == 5);
  CHECK(lost.count == 4);
  const Task last = schedule.next(0, false, 5).wait();  // a step of the other trainer's shard
  CHECK(last.shard == 1);
  CHECK(last.step == 4);
  const base::Future<Task> waits = schedule.next(0, false, 2);
  REQUIRE_FALSE(waits.done());
  const LeaseScheduler::Lost what = schedule.lose(1, 1);
  CHECK(what.made == 1);
  CHECK(what.back == 3);
  CHECK(what.in_doubt == 0);
  CHECK_FALSE(waits.done());
  schedule.go_on();
  const Task back = waits.wait();
  CHECK(back.shard == 1);
  CHECK(back.step == 1);
  CHECK(back.count == 2);
  const Task rest = schedule.next(0, false, 2).wait();
  CHECK(rest.step == 3);
  CHECK(rest.count == 1);
  CHECK(schedule.next(0, false).wait().kind == Task::Kind::kEvaluate);
}

TEST_CASE("a replaced seat gets no task, and only an empty seat can be taken") {
  LeaseScheduler schedule(
      {.trainers = 2, .steps_per_epoch = 5, .take_over = true, .may_lose = true}, {});
  CHECK(testing::error_of([&] { schedule.take_seat(1); }).kind == base::ErrorKind::kInvalid);
  const base::Future<Task> waits = schedule.next(1, false);
  REQUIRE_FALSE(waits.done());
  const LeaseScheduler::Lost lost = schedule.lose(1, std::nullopt);
  CHECK(lost.back == 0);
  CHECK(testing::error_of([&] { (void)waits.wait(); }).kind == base::ErrorKind::kPeerLost);
  CHECK(schedule.lose(1, 7).made == 0);  // a loss counts once
  const Seat next = schedule.take_seat(1);
  CHECK(next.before == 1);
  CHECK(testing::error_of([&] { (void)schedule.next(1, false); }).kind ==
        base::ErrorKind::kPeerLost);
  (void)schedule.next(0, false);
  CHECK(schedule.next(next, false).wait().kind == Task::Kind::kTrain);
}
