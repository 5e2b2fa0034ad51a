#include "distrain/job/schedule.h"

#include <algorithm>
#include <numeric>

#include "distrain/base/error.h"

namespace distrain::job {

namespace {

constexpr uint64_t kMaxCount = uint64_t{1} << 40;

}  // namespace

Json Position::to_json() const { return {{"epoch", epoch}, {"steps", steps}, {"total", total}}; }

Position Position::from_json(const Json& json, int trainers) {
  const auto fail = [] {
    throw base::Exception(base::ErrorKind::kBadData, "the position is not what it should be");
  };
  const auto count = [&](const Json& value) {
    if (!value.is_number_unsigned() || value.get<uint64_t>() > kMaxCount) fail();
    return value.get<int64_t>();
  };
  Position position;
  if (!json.is_object() || json.size() != 3) fail();
  const Json steps = json.value("steps", Json());
  if (!steps.is_array() || steps.size() != static_cast<size_t>(trainers)) fail();
  for (const Json& value : steps) position.steps.push_back(count(value));
  position.epoch = count(json.value("epoch", Json()));
  position.total = count(json.value("total", Json()));
  const int64_t of_epoch =
      std::accumulate(position.steps.begin(), position.steps.end(), int64_t{0});
  if (position.epoch < 1 || position.total < of_epoch) fail();
  return position;
}

Schedule::Schedule(Terms terms, Hooks hooks)
    : terms_(terms), hooks_(std::move(hooks)), taken_(static_cast<size_t>(terms.trainers)) {
  position_.steps.resize(static_cast<size_t>(terms.trainers));
}

void Schedule::resume(Position position) {
  const auto fail = [](const char* why) {
    throw base::Exception(base::ErrorKind::kBadData, std::string("the position: ") + why);
  };
  const int64_t whole_epoch = terms_.steps_per_epoch * terms_.trainers;
  if (position.epoch - 1 > position.total / whole_epoch)
    fail("its steps are not those of its epochs");
  int64_t total = (position.epoch - 1) * whole_epoch;
  for (const int64_t steps : position.steps) {
    if (steps > terms_.steps_per_epoch) fail("beyond the end of the epoch");
    if (!terms_.take_over && steps != position.steps[0])
      fail("trainers that go at one pace differ");
    total += steps;
  }
  if (position.total != total) fail("its steps are not those of its epochs");
  position_ = std::move(position);
  saved_ = position_.total / terms_.trainers;
  std::fill(taken_.begin(), taken_.end(), saved_);
}

base::Future<Task> Schedule::next(int trainer, bool stop, int64_t wanted) {
  base::Future<Task> future;
  Waiting waiting;
  {
    std::lock_guard lock(mutex_);
    if (failed_) throw base::Exception(*failed_);
    if (stop && terms_.save && !stopped()) stop_at_ = furthest_locked();
    Task task;
    if (phase_ == Phase::kTraining && take_locked(trainer, wanted, task)) {
      return base::Future<Task>::ready(task);
    }
    const auto [it, is_new] = waiting_.try_emplace(trainer);
    if (!is_new) throw base::Exception(base::ErrorKind::kInvalid, "a trainer waits for two tasks");
    it->second.wanted = wanted;
    future = it->second.promise.future();
    if (static_cast<int>(waiting_.size()) < terms_.trainers) return future;
    waiting.swap(waiting_);
  }
  // All others wait, so nothing changes but here, and what is requested from outside.
  do {
    try {
      enter_next_phase();
    } catch (...) {
      const base::Error error = base::current_error(base::ErrorKind::kInternal);
      for (auto& [who, request] : waiting) request.promise.fail(error);
      return future;
    }
  } while (!hand_out(waiting));
  return future;
}

std::vector<rpc::Wait> Schedule::waits() const {
  std::lock_guard lock(mutex_);
  if (waiting_.empty()) return {};
  std::string missing;
  for (int trainer = 0; trainer < terms_.trainers; ++trainer) {
    if (waiting_.contains(trainer)) continue;
    missing += (missing.empty() ? "" : ", ") + std::to_string(trainer);
  }
  base::TimePoint since = base::kNever;
  for (const auto& [trainer, request] : waiting_) since = std::min(since, request.since);
  return {{"the next task of all, which wants trainer " + missing, since}};
}

// Steps of each trainer, a multiple of the interval whenever the last one was.
int64_t Schedule::next_save() const { return (saved_ / terms_.save_every + 1) * terms_.save_every; }

// How many steps each trainer may have made until all meet for something.
int64_t Schedule::gate_locked() const {
  const int64_t last = terms_.steps > 0 ? terms_.steps : kNever;
  const int64_t save = terms_.save && terms_.save_every > 0 ? next_save() : kNever;
  return std::min({last, save, save_at_, stop_at_, finish_at_});
}

// Where trainers wait for each other's steps, in sync and ssp, all of them must be allowed as many:
// otherwise one would wait here for one that waits for it.
int64_t Schedule::furthest_locked() const {
  return terms_.take_over ? 0 : *std::max_element(taken_.begin(), taken_.end());
}

void Schedule::request_save() {
  std::lock_guard lock(mutex_);
  if (terms_.save && save_at_ == kNever) save_at_ = furthest_locked();
}

void Schedule::fail(const base::Error& error) {
  Waiting waiting;
  {
    std::lock_guard lock(mutex_);
    failed_ = error;
    waiting.swap(waiting_);
  }
  for (auto& [who, request] : waiting) request.promise.fail(error);
}

void Schedule::finish() {
  std::lock_guard lock(mutex_);
  if (finish_at_ == kNever) finish_at_ = furthest_locked();
}

int64_t Schedule::remaining_locked(int shard) const {
  return terms_.steps_per_epoch - position_.steps[static_cast<size_t>(shard)];
}

bool Schedule::take_locked(int trainer, int64_t wanted, Task& task) {
  int64_t& taken = taken_[static_cast<size_t>(trainer)];
  const int64_t gate = gate_locked();
  int64_t allowed = kNever;
  if (gate != kNever) {
    allowed = terms_.take_over ? gate * terms_.trainers - position_.total : gate - taken;
  }
  int shard = trainer;
  if (remaining_locked(shard) == 0 && terms_.take_over) {
    for (int other = 0; other < terms_.trainers; ++other) {
      if (remaining_locked(other) > remaining_locked(shard)) shard = other;
    }
  }
  const int64_t count = std::min({wanted, allowed, remaining_locked(shard)});
  if (count <= 0) return false;
  int64_t& steps = position_.steps[static_cast<size_t>(shard)];
  task.kind = Task::Kind::kTrain;
  task.epoch = position_.epoch;
  task.shard = shard;
  task.step = steps;
  task.count = count;
  steps += count;
  taken += count;
  position_.total += count;
  return true;
}

bool Schedule::epoch_over() const {
  return std::all_of(position_.steps.begin(), position_.steps.end(),
                     [this](int64_t steps) { return steps >= terms_.steps_per_epoch; });
}

bool Schedule::job_over() const {
  if (finish_at_ != kNever && position_.total >= finish_at_ * terms_.trainers) return true;
  if (terms_.steps > 0) return position_.total >= terms_.steps * terms_.trainers;
  return position_.epoch > terms_.epochs;
}

bool Schedule::over_after_evaluation() const {
  return job_over() || (terms_.steps == 0 && epoch_over() && position_.epoch >= terms_.epochs);
}

Schedule::Phase Schedule::after_training() const {
  if (epoch_over() || job_over()) return Phase::kEvaluating;
  return stopped() || gate_locked() <= position_.total / terms_.trainers ? Phase::kSaving
                                                                         : Phase::kTraining;
}

Schedule::Phase Schedule::after_evaluation() {
  const bool whole_epoch = epoch_over();
  if (whole_epoch) {
    ++position_.epoch;
    std::fill(position_.steps.begin(), position_.steps.end(), 0);
  }
  const bool due =
      save_at_ != kNever ||
      (terms_.save_every == 0 ? whole_epoch : position_.total / terms_.trainers >= next_save());
  if (terms_.save && (due || job_over() || stopped())) return Phase::kSaving;
  return job_over() ? Phase::kEnding : Phase::kTraining;
}

void Schedule::enter_next_phase() {
  const Phase before = phase_;
  if (before == Phase::kBeginning && hooks_.on_begin) hooks_.on_begin();
  if (before == Phase::kEvaluating && hooks_.on_evaluated) {
    hooks_.on_evaluated(position_, epoch_over());
  }
  if (before == Phase::kSaving && hooks_.on_save) hooks_.on_save(position_);
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
        saved_ = position_.total / terms_.trainers;
        save_at_ = kNever;
        phase_ = job_over() || stopped() ? Phase::kEnding : Phase::kTraining;
        break;
      case Phase::kEnding:
        break;
    }
  }
  if (phase_ == Phase::kEnding && hooks_.on_end) hooks_.on_end(stopped());
}

// First it is settled for all who waits on and who does not: somebody with a task may come back
// with it done before the next one has his.
bool Schedule::hand_out(Waiting& waiting) {
  std::vector<std::pair<base::Promise<Task>, Task>> tasks;
  std::optional<base::Error> failed;
  {
    std::lock_guard lock(mutex_);
    failed = failed_;
    for (auto it = waiting.begin(); it != waiting.end();) {
      Task task;
      const bool has_task = task_locked(it->first, it->second.wanted, task);
      if (has_task) tasks.emplace_back(std::move(it->second.promise), task);
      it = has_task ? waiting.erase(it) : std::next(it);
    }
    // Somebody has asked for a save just now: all are to come to the next phase at once.
    if (tasks.empty() && !failed) return false;
    waiting_.merge(waiting);
  }
  for (auto& [promise, task] : tasks) promise.set(task);
  if (failed) fail(*failed);  // meanwhile, when nobody was there to be told
  return true;
}

bool Schedule::task_locked(int trainer, int64_t wanted, Task& task) {
  if (phase_ == Phase::kTraining) return take_locked(trainer, wanted, task);
  task.kind = phase_ == Phase::kEvaluating ? Task::Kind::kEvaluate
              : phase_ == Phase::kSaving   ? Task::Kind::kSave
                                           : Task::Kind::kEnd;
  task.epoch = position_.epoch;
  task.shard = trainer;
  task.last = phase_ == Phase::kEvaluating && over_after_evaluation();
  task.stopped = stopped();
  return true;
}

}  // namespace distrain::job
