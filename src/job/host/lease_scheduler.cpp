#include "distrain/job/lease_scheduler.h"

#include <numeric>

#include <fmt/format.h>

namespace distrain::job {

Position Position::from_json(const Json& json, int trainers) {
  constexpr uint64_t kMaxCount = uint64_t{1} << 50;
  const auto expect = [](bool is_good) {
    if (!is_good) base::bad_data("the position is not what it should be");
  };
  const auto count = [&](const Json& value) {
    expect(value.is_number_unsigned() && value.get<uint64_t>() <= kMaxCount);
    return value.get<int64_t>();
  };
  expect(json.is_object());
  const bool has_streams = json.contains("streams");
  const Json steps = json.value("steps", Json()), streams = json.value("streams", Json());
  expect(json.size() == (has_streams ? 4 : 3) && steps.is_array() && !steps.empty());
  expect(has_streams || steps.size() == static_cast<size_t>(trainers));
  Position position{count(json.value("epoch", Json())), {}, count(json.value("total", Json()))};
  int64_t of_epoch = 0;
  for (const Json& value : steps) of_epoch += position.steps.emplace_back(count(value));
  expect(position.epoch >= 1 && position.total >= of_epoch);
  if (!has_streams) return position;
  expect(streams.is_array() && !streams.empty());
  for (const Json& at : streams) {
    expect(at.is_array() && at.size() == 5);
    position.streams.push_back(
        {count(at[0]), count(at[1]), count(at[2]), count(at[3]), count(at[4])});
  }
  return position;
}

LeaseScheduler::LeaseScheduler(Options options, Hooks hooks)
    : options_(options),
      hooks_(std::move(hooks)),
      trainers_(static_cast<size_t>(options.trainers)),
      shards_(options.trainers),
      takes_over_(options.take_over) {
  position_.steps.resize(static_cast<size_t>(options.trainers));
}

void LeaseScheduler::resume(Position position) {
  const auto fail = [](const char* why) { base::bad_data(std::string("the position: ") + why); };
  if (options_.streams != !position.streams.empty()) fail("of data that was read in another way");
  const int64_t whole_epoch = options_.steps_per_epoch * options_.trainers;
  if (!options_.streams && position.epoch - 1 > position.total / whole_epoch) {
    fail("its steps are not those of its epochs");
  }
  int64_t total = options_.streams ? 0 : (position.epoch - 1) * whole_epoch;
  for (const int64_t steps : position.steps) {
    if (steps > options_.steps_per_epoch) fail("beyond the end of the epoch");
    if (steps != position.steps[0]) takes_over_ = true;
    if (takes_over_ && !options_.take_over && !options_.may_lose) {
      fail("trainers that go at one pace differ");
    }
    total += steps;
  }
  if (!options_.streams && position.total != total) fail("its steps are not those of its epochs");
  if (options_.streams) resume_streams(position);
  position_ = std::move(position);
  saved_ = position_.total / options_.trainers;
  for (TrainerState& each : trainers_) each.handed_out = saved_;
}

// Adapts the position of streams to the number of trainers, and gives each trainer its shard.
void LeaseScheduler::resume_streams(Position& position) {
  const auto trainers = static_cast<int64_t>(options_.trainers);
  const auto before = std::ssize(position.steps);
  const int64_t of_epoch = std::accumulate(position.steps.begin(), position.steps.end(), int64_t{});
  std::vector<data::StreamPosition>& streams = position.streams;
  if (options_.reading == Reading::kOwnShard && std::ssize(streams) != trainers) {
    base::bad_data(fmt::format("the position: {} shards, and the {} trainers read only their own",
                               streams.size(), trainers));
  }
  if (before != trainers) {
    const auto of_each = [before](int64_t steps) { return (steps + before - 1) / before; };
    position.total = of_each(position.total) * trainers;
    position.steps.assign(static_cast<size_t>(trainers), of_each(of_epoch));
  }
  if (before != trainers && options_.reading == Reading::kOneStream) {
    const auto how_far = [](const auto& at) { return std::tuple(at.epoch, at.block, at.used); };
    const data::StreamPosition furthest = *std::ranges::max_element(streams, {}, how_far);
    streams.assign(static_cast<size_t>(trainers), furthest);
  }
  shards_.resume(streams, of_epoch == 0);
}

base::Future<Task> LeaseScheduler::next(Seat seat, bool stop, const Demand& demand) {
  base::Future<Task> future;
  {
    std::lock_guard lock(mutex_);
    if (failed_) throw base::Exception(*failed_);
    TrainerState& its = state_of(seat.trainer);
    if (!its.is_here || its.before != seat.before) {
      throw base::Exception(base::ErrorKind::kPeerLost, "another trainer has this place by now");
    }
    if (waiting_.contains(seat.trainer)) base::invalid("a trainer waits for two tasks");
    last_request_ = base::Clock::now();
    const bool has_read = its.lease.count > 0 || shards_.start_of(seat.trainer).skip > 0;
    if (options_.streams && (has_read || demand.ready != Demand::kUnknown)) {
      shards_.note(seat.trainer, demand.position, demand.ready == 0);
    }
    its.made += its.lease.count;
    its.lease = {};
    its.has_task = false;
    its.ready = demand.ready;
    if (stop && options_.save && !stopped()) stop_at_ = furthest_locked();
    // In kTraining, replies at once unless another thread is handing out tasks. In kEnding, always
    // replies at once: a replacement must not wait for trainers that have already ended.
    if (phase_ == Phase::kEnding ||
        (!is_advancing_ && phase_ == Phase::kTraining && !has_rounds())) {
      if (auto task = task_locked(seat.trainer, demand.wanted)) {
        return base::Future<Task>::ready(*task);
      }
    }
    Request& request = waiting_[seat.trainer];
    request.wanted = demand.wanted;
    future = request.promise.future();
  }
  advance();
  tell_who_rests();
  return future;
}

// Enters the next phase while all trainers wait. The hooks run without the lock. This is safe,
// because no other thread changes `phase_` or `position_` while `is_advancing_`.
void LeaseScheduler::advance() {
  for (;;) {
    Phase before{};
    bool again = false;
    {
      std::lock_guard lock(mutex_);
      const bool all_wait = static_cast<int>(waiting_.size()) == here_locked();
      if (failed_ || is_advancing_ || waiting_.empty() || !all_wait) return;
      is_advancing_ = true;
      before = phase_;
      again = std::exchange(again_, false);
    }
    try {
      enter_next_phase(before, again);
    } catch (...) {
      return fail(base::current_error(base::ErrorKind::kInternal));
    }
    hand_out();
  }
}

// Notifies all ranks of the trainers that wait for a task, so that no rank waits for steps of these
// trainers. Not needed before a loss, because all trainers then make equally many steps. Not needed
// with options_.take_over, because ranks then never wait for other trainers' steps.
void LeaseScheduler::tell_who_rests() {
  if (options_.take_over) return;
  std::vector<int> resting;
  {
    std::lock_guard lock(mutex_);
    if (!takes_over_ || failed_) return;
    for (const auto& [trainer, request] : waiting_) resting.push_back(trainer);
  }
  for (const int trainer : resting) hooks_.on_rest(trainer);
}

// ---- lost trainers and their replacements ----

LeaseScheduler::Lost LeaseScheduler::lose(int trainer, std::optional<int64_t> made) {
  std::map<int, Request>::node_type request;
  Lost lost;
  {
    std::lock_guard lock(mutex_);
    TrainerState& its = state_of(trainer);
    if (!its.is_here) return lost;
    its.is_here = false;
    takes_over_ = true;
    Range& lease = its.lease;
    const int64_t known = std::clamp<int64_t>(made.value_or(0) - its.made, 0, lease.count);
    lost.made = its.made + known;
    lost.back = lease.count - known;
    if (!made) lost.in_doubt = lost.back;
    if (options_.streams) {  // the next trainer that reads the shard gets new leases for it
      shards_.leave(trainer, known);
      if (lost.back > 0) {
        position_.steps[static_cast<size_t>(trainer)] -= lost.back;
        position_.total -= lost.back;
      }
    } else if (lost.back > 0) {
      returned_.push_back({lease.shard, lease.step + known, lost.back});
    }
    if (its.has_task && lease.count == 0) again_ = true;
    its.lease = {};
    its.has_task = false;
    request = waiting_.extract(trainer);
  }
  if (request) request.mapped().promise.fail({base::ErrorKind::kPeerLost, "it is lost"});
  return lost;
}

// Hands the unfinished steps or shards of lost trainers to trainers that wait for a task, because
// the job cannot go on without these steps. Then enters the next phase if all trainers wait.
void LeaseScheduler::go_on() {
  const auto may_hand_out = [this] {
    std::lock_guard lock(mutex_);
    if (failed_ || is_advancing_ || phase_ != Phase::kTraining) return false;
    const auto can_move = [this](const auto& each) { return shards_.can_move(each.first); };
    return is_advancing_ = (!returned_.empty() && !waiting_.empty()) ||
                           (options_.streams && std::ranges::any_of(waiting_, can_move));
  };
  if (may_hand_out()) hand_out();
  advance();
  tell_who_rests();
}

std::vector<rpc::Wait> LeaseScheduler::waits() const {
  std::lock_guard lock(mutex_);
  if (waiting_.empty()) return {};
  std::string missing;
  for (int trainer = 0; trainer < options_.trainers; ++trainer) {
    if (waiting_.contains(trainer) || !trainers_[static_cast<size_t>(trainer)].is_here) continue;
    missing += (missing.empty() ? "" : ", ") + std::to_string(trainer);
  }
  base::TimePoint since = base::kNever;
  for (const auto& [trainer, request] : waiting_) since = std::min(since, request.since);
  // A trainer whose stream has ended may wait for long, as long as the others train.
  if (options_.streams && !has_rounds()) since = std::max(since, last_request_);
  return {{"the next task of all, which wants trainer " + missing, since}};
}

std::optional<Task> LeaseScheduler::take_locked(int trainer, int64_t wanted) {
  TrainerState& its = state_of(trainer);
  if (options_.streams) {
    if (const auto start = shards_.move(trainer)) {
      return Task{.epoch = position_.epoch, .count = 0, .start = *start};
    }
  }
  if (returned_.empty()) {
    its.lease = take_new_locked(trainer, wanted);
  } else {  // these steps were counted when first handed out
    Range& first = returned_.front();
    its.lease = {first.shard, first.step, std::min(wanted, first.count)};
    first.step += its.lease.count;
    first.count -= its.lease.count;
    if (first.count == 0) returned_.erase(returned_.begin());
  }
  its.has_task = its.lease.count > 0;
  const bool asks_again = has_rounds() || (options_.streams && its.ready == Demand::kUnknown &&
                                           allowed_locked(trainer) > 0);
  if (!its.has_task && !asks_again) return std::nullopt;
  return Task{.epoch = position_.epoch,
              .shard = its.lease.shard,
              .step = its.lease.step,
              .count = its.lease.count,
              .has_data = !options_.streams || its.ready != 0,
              .with_data = round_.with_data};
}

// Returns the next steps of all trainers, which all wait for a task.
LeaseScheduler::Round LeaseScheduler::round_locked() const {
  Round round{options_.steps_per_epoch - position_.steps[0]};
  for (const auto& [trainer, request] : waiting_) {
    const TrainerState& its = trainers_[static_cast<size_t>(trainer)];
    round.count = std::min(round.count, gate_locked() - its.handed_out);
    if (its.ready == Demand::kUnknown || shards_.can_move(trainer)) return {};
    if (its.ready == 0) continue;
    round.count = std::min({round.count, request.wanted, its.ready});
    ++round.with_data;
  }
  return round;
}

LeaseScheduler::Range LeaseScheduler::take_new_locked(int trainer, int64_t wanted) {
  TrainerState& its = state_of(trainer);
  auto steps = position_.steps.begin() + trainer;
  if (takes_over_ && *steps == options_.steps_per_epoch) {
    steps = std::ranges::min_element(position_.steps);
  }
  const int64_t known = options_.streams ? its.ready : options_.steps_per_epoch - *steps;
  const int64_t count =
      has_rounds() ? round_.count : std::min({wanted, allowed_locked(trainer), known});
  if (count <= 0) return {};
  const Range lease = {static_cast<int>(steps - position_.steps.begin()), *steps, count};
  its.handed_out += count;
  *steps += count;
  position_.total += count;
  return lease;
}

LeaseScheduler::Phase LeaseScheduler::after_evaluation() {
  const bool whole_epoch = epoch_over();
  if (whole_epoch) {
    ++position_.epoch;
    data_ended_ = false;
    shards_.begin_epoch();
    std::fill(position_.steps.begin(), position_.steps.end(), 0);
  }
  const bool due =
      save_at_ != kNever ||
      (options_.save_every == 0 ? whole_epoch : position_.total / options_.trainers >= next_save());
  if (options_.save && (due || over() || stopped())) return Phase::kSaving;
  return over() ? Phase::kEnding : Phase::kTraining;
}

void LeaseScheduler::enter_next_phase(Phase before, bool again) {
  if (again) return hooks_.on_again();
  if (before == Phase::kBeginning) hooks_.on_begin();
  if (before == Phase::kEvaluating) hooks_.on_evaluated(position_, epoch_over());
  if (before == Phase::kSaving) {
    {
      std::lock_guard lock(mutex_);
      if (options_.streams) position_.streams = shards_.positions();
    }
    hooks_.on_save(position_);
  }
  bool is_stopped = false;
  {
    std::lock_guard lock(mutex_);
    switch (before) {
      case Phase::kBeginning:  // a resumed job may have nothing left to train
      case Phase::kTraining:
        phase_ = after_training();
        break;
      case Phase::kEvaluating:
        phase_ = after_evaluation();
        break;
      case Phase::kSaving:
        saved_ = position_.total / options_.trainers;
        save_at_ = kNever;
        phase_ = over() || stopped() ? Phase::kEnding : Phase::kTraining;
        break;
      case Phase::kEnding:
        break;
    }
    is_stopped = stopped();
  }
  if (phase_ == Phase::kEnding) hooks_.on_end(is_stopped);
}

// Assigns all tasks before it delivers any. Otherwise a trainer could finish its task and request
// another before the other trainers have theirs.
void LeaseScheduler::hand_out() {
  std::vector<std::pair<base::Promise<Task>, Task>> tasks;
  {
    std::lock_guard lock(mutex_);
    const auto all = static_cast<int32_t>(waiting_.size());
    int32_t part = 0;
    if (has_rounds()) round_ = round_locked();
    for (auto it = waiting_.begin(); it != waiting_.end();) {  // none after fail()
      std::optional<Task> task = task_locked(it->first, it->second.wanted);
      if (task) {
        task->part = part;
        task->parts = all;
        tasks.emplace_back(std::move(it->second.promise), *task);
      }
      ++part;
      it = task ? waiting_.erase(it) : std::next(it);
    }
    is_advancing_ = false;
  }
  for (auto& [promise, task] : tasks) promise.set(task);
}

std::optional<Task> LeaseScheduler::task_locked(int trainer, int64_t wanted) {
  if (phase_ == Phase::kTraining) return take_locked(trainer, wanted);
  state_of(trainer).has_task = true;
  const bool is_last =
      over() || (counts_epochs() && epoch_over() && position_.epoch >= options_.epochs);
  return Task{.kind = phase_ == Phase::kEvaluating ? Task::Kind::kEvaluate
                      : phase_ == Phase::kSaving   ? Task::Kind::kSave
                                                   : Task::Kind::kEnd,
              .epoch = position_.epoch,
              .shard = trainer,
              .last = phase_ == Phase::kEvaluating && is_last,
              .partial = !epoch_over(),
              .stopped = stopped()};
}

}  // namespace distrain::job
