
#include <c10/util/StringUtil.h>
#include <fmt/format.h>

#include "distrain/base/thread_state.h"
#include "distrain/collective/backend.h"
#include "distrain/rpc/error.h"
#include "operations.h"

namespace distrain::collective {

using base::Error;
using base::ErrorKind;

static bool is_active(OperationState state) {
  return state == OperationState::kStarting || state == OperationState::kRunning;
}

bool Operation::expects(int, int from) const { return from != core_->rank(); }

void Operation::transition_locked(OperationState to) {
  using enum OperationState;
  static constexpr std::pair<OperationState, OperationState> kAllowed[] = {
      {kStarting, kCollecting}, {kStarting, kReady}, {kStarting, kDone},    {kRunning, kCollecting},
      {kRunning, kReady},       {kRunning, kDone},   {kCollecting, kReady}, {kCollecting, kDone},
      {kReady, kRunning},       {kReady, kDone}};
  const OperationState from = state_locked();
  if (std::ranges::find(kAllowed, std::pair(from, to)) == std::end(kAllowed)) {
    throw base::Exception(
        ErrorKind::kInternal,
        fmt::format("{}: impossible change of state {} to {}", name(), int(from), int(to)));
  }
  if (is_active(to)) ++core_->active_;
  if (is_active(from) && --core_->active_ == 0) core_->idle_.notify_all();
  state_.store(to, std::memory_order_release);
  // close() must end an operation that sends messages in its last step.
  const bool complete = to == kReady && step_ + 1 == steps_ && (is_shared() || !is_awaited(step_));
  if (complete || to == kDone) core_->pending_.erase(number_);
  if (to == kReady || to == kDone) changed_.notify_all();
}

void Operation::open_locked(std::shared_ptr<Core> core, uint64_t number) {
  core_ = std::move(core);
  number_ = number;
  if (core_->tracer() && core_->tracer()->on()) traced_from_ = base::Tracer::now();
  if (!is_shared()) {
    inbox_.resize(static_cast<size_t>(steps_) * static_cast<size_t>(core_->size()));
  }
  has_heard_.resize(static_cast<size_t>(core_->size()));
  on_open_locked();
  ++core_->active_;  // counts this operation in Starting
}

std::span<const uint8_t> Operation::input(int step, int from) const {
  const size_t slot = static_cast<size_t>(step * core_->size() + from);
  return inbox_[slot].payload.subspan(kHeaderBytes);
}

std::optional<Error> Operation::check_locked(int from, const rpc::ChannelMessage& message) const {
  const int world_rank = core_->world_rank(from);
  const std::optional<OpSpec> theirs = decode_header(message.payload);
  if (theirs && theirs->kind == OpKind::kRefusal) {
    Error error = decode_refusal(message.payload);
    if (core_->group_rank(error.rank) < 0) error.rank = world_rank;
    // The sender has waited for this rank, which waits for others.
    const bool is_blamed = error.rank == core_->world_rank(core_->rank());
    if (spec_.kind == OpKind::kAllreduceOverHosts && error.kind == ErrorKind::kDeadline &&
        is_blamed && state_locked() == OperationState::kCollecting) {
      return deadline_error_locked();
    }
    error.op = describe(spec_);
    return error;
  }
  if (theirs) {
    if (auto error = mismatch(from, *theirs)) return error;
  }
  const auto step =
      static_cast<int>(std::min<uint64_t>(message.tag.c, static_cast<uint64_t>(steps_)));
  if (theirs && spec_.kind == OpKind::kAllToAll && step == 0 && lacks(0, from) &&
      message.payload.size() - kHeaderBytes != expected_bytes(0, from)) {
    return Error{
        ErrorKind::kInvalid,
        fmt::format("rank {} sent {} bytes where rank {} expected {} in {} ({} of the group)",
                    world_rank, message.payload.size() - kHeaderBytes,
                    core_->world_rank(core_->rank()), expected_bytes(0, from), describe(spec_),
                    number_text()),
        world_rank, describe(spec_)};
  }
  if (!theirs || is_shared() || step >= steps_ || !lacks(step, from) ||
      message.payload.size() - kHeaderBytes != expected_bytes(step, from)) {
    return Error{ErrorKind::kProtocol,
                 name() + ": a malformed message from rank " + std::to_string(world_rank),
                 world_rank, describe(spec_)};
  }
  return std::nullopt;
}

std::optional<Error> Operation::mismatch(int from, const OpSpec& theirs) const {
  const int world_rank = core_->world_rank(from);
  const int own_rank = core_->world_rank(core_->rank());
  OpSpec same = theirs;
  same.pass = spec_.pass;
  same.place = spec_.place;
  if (spec_.kind == OpKind::kAllToAll) same.bytes = spec_.bytes;
  if (same != spec_) {
    return Error{
        ErrorKind::kInvalid,
        fmt::format("rank {} called {} where rank {} called {} ({} of the group)", world_rank,
                    describe(theirs), own_rank, describe(spec_), number_text()),
        world_rank, describe(spec_)};
  }
  auto error = pass_error({world_rank, theirs.pass}, {own_rank, spec_.pass});
  if (error) error->op = describe(spec_);
  return error;
}

void Operation::deliver_locked(int from, rpc::ChannelMessage message) {
  has_heard_[static_cast<size_t>(from)] = true;
  if (auto error = check_locked(from, message)) {
    // The other ranks of a shared operation have sent this rank nothing, so nor has this rank.
    const auto theirs = decode_header(message.payload);
    const bool is_refusal = theirs && theirs->kind == OpKind::kRefusal;
    if (is_shared() && !is_refusal) core_->answer_locked(number_, spec_, from, *error);
    is_told_ = true;
    return fail_locked(std::move(*error));
  }
  const auto step = static_cast<int>(message.tag.c);
  inbox_[static_cast<size_t>(step * core_->size() + from)] = std::move(message);
  if (state_locked() == OperationState::kCollecting && step == step_ && --missing_ == 0) {
    transition_locked(OperationState::kReady);
  }
}

void Operation::fail_locked(Error error) {
  const OperationState state = state_locked();
  if (is_active(state)) {
    if (!failure_) failure_ = std::move(error);
  } else if (state != OperationState::kDone) {
    end_locked(std::move(error));
  }
}

void Operation::end_locked(std::optional<Error> error) {
  error_ = std::move(error);
  transition_locked(OperationState::kDone);
  on_end_locked();
  if (error_ && (tells_others() || !has_started_)) core_->relay_locked(number_, *error_);
  if (traced_from_ == 0) return;
  base::Tracer& tracer = *core_->tracer();
  const auto rank = static_cast<uint64_t>(core_->world_rank(core_->rank()));
  tracer.record({base::TraceEvent::Kind::kAsync, kind_name(spec_.kind), "collective", "bytes",
                 static_cast<int64_t>(spec_.bytes), traced_from_, base::Tracer::now(),
                 rank << 40 | tracer.next_id()});
}

// Moves the operation from Starting or Running to Done if it has failed or all steps have run, else
// to Ready or Collecting, because step `step_` is next.
void Operation::settle_locked() {
  if (failure_) return end_locked(std::move(failure_));
  if (step_ == steps_) return end_locked(std::nullopt);
  missing_ = 0;
  for (int from = 0; from < core_->size(); ++from) {
    if (lacks(step_, from)) ++missing_;
  }
  transition_locked(missing_ == 0 ? OperationState::kReady : OperationState::kCollecting);
}

void Operation::run_locked(std::unique_lock<std::mutex>& lock) {
  transition_locked(OperationState::kRunning);
  const int step = step_;
  lock.unlock();
  std::optional<Error> error;
  try {
    run_step(step);
  } catch (...) {
    error = rpc::error_in_flight(ErrorKind::kInternal);
  }
  lock.lock();
  if (error && !failure_) failure_ = std::move(error);
  ++step_;
  settle_locked();
}

void Operation::run_ready() {
  std::unique_lock lock(core_->mutex_);
  while (state_locked() == OperationState::kReady) run_locked(lock);
}

bool Operation::done() {
  std::unique_lock lock(core_->mutex_);
  look_locked();
  while (state_locked() == OperationState::kReady) run_locked(lock);
  ask_awaited_locked();
  if (base::Clock::now() >= deadline_) expire_locked();
  return state_locked() == OperationState::kDone;
}

void Operation::expire() {
  std::lock_guard lock(core_->mutex_);
  expire_locked();
}

void Operation::fail(Error error) {
  std::lock_guard lock(core_->mutex_);
  fail_locked(std::move(error));
}

bool Operation::wants_executor_locked() const {
  return state_locked() == OperationState::kReady && waiters_ == 0 &&
         (is_awaited(step_) || spec_.bytes > kDirectBytes);
}

bool Operation::wait_until(base::TimePoint limit) {
  base::check_may_wait("waiting for a collective");
  std::unique_lock lock(core_->mutex_);
  ++waiters_;
  bool overtaken = false;
  try {
    while (!overtaken) {
      const OperationState state = state_locked();
      if (state == OperationState::kDone) break;
      if (state == OperationState::kReady) {
        run_locked(lock);
        continue;
      }
      const base::TimePoint now = base::Clock::now();
      if (now < std::min(limit, deadline_)) {
        await_change(lock, std::min(limit, deadline_));
      } else if (now < deadline_) {
        overtaken = true;
      } else if (state == OperationState::kCollecting) {
        fail_locked(deadline_error_locked());
      } else {
        await_change(lock, base::kNever);  // another thread computes the step, which is short
      }
    }
  } catch (...) {  // `overloaded`: this thread may not block, so an executor thread must compute
    if (!lock.owns_lock()) lock.lock();
    look_locked();
    --waiters_;
    const bool post = wants_executor_locked();
    lock.unlock();
    if (post) core_->post(shared_from_this());
    throw;
  }
  --waiters_;
  if (overtaken) return false;
  if (error_) throw base::Exception(*error_);
  return true;
}

// Returns when the state may have changed to Ready or Done, or `limit` has passed.
void Operation::await_change(std::unique_lock<std::mutex>& lock, base::TimePoint limit) {
  const int step = step_;
  const bool shared = is_shared();
  lock.unlock();
  watch(step, true);
  const bool seen = base::thread_state().poll.poll([&] {
    const bool collects = state_.load(std::memory_order_acquire) == OperationState::kCollecting;
    return ready_or_done() || (shared && collects && !lacks_any(step));
  });
  watch(step, false);
  // While this thread was watching, no message came for a later operation in the slot.
  if (shared && is_done()) core_->on_look();
  if (!seen) {
    base::BlockingScope blocking;
    lock.lock();
    look_locked();
    const auto over = [this] { return ready_or_done(); };
    if (shared) base::wait_until(changed_, lock, std::min(limit, begun_ + kPatience), over);
    ask_awaited_locked();
    base::wait_until(changed_, lock, limit, over);
    lock.unlock();
  }
  lock.lock();
  look_locked();
}

// Sends kLook to the ranks that an old operation in shared memory waits for and has not met,
// because a rank that has closed the group answers.
void Operation::ask_awaited_locked() {
  const bool waits = is_shared() && state_locked() == OperationState::kCollecting;
  if (!waits || base::Clock::now() < begun_ + kPatience) return;
  std::vector<int> unmet = core_->others();
  std::erase_if(unmet, [this](int rank) { return !waits_for_locked(rank) || core_->meet(rank); });
  if (!unmet.empty()) core_->post_control(std::move(unmet), kLook, 0);
}

Error Operation::deadline_error_locked() const {
  const std::vector<int> missing = missing_ranks_locked();
  return Error{
      ErrorKind::kDeadline,
      fmt::format(
          "{}: the deadline passed, nothing came from rank {}{}", name(), c10::Join(", ", missing),
          steps_ > 1 && !is_shared() ? fmt::format(" (step {} of {})", step_ + 1, steps_) : ""),
      missing.empty() ? -1 : missing.front(), describe(spec_)};
}

std::vector<int> Operation::missing_ranks_locked() const {
  std::vector<int> ranks;
  for (int from = 0; from < core_->size(); ++from) {
    if (is_missing(step_, from)) ranks.push_back(core_->world_rank(from));
  }
  return ranks;
}

bool Operation::lacks(int step, int from) const {
  const size_t slot = static_cast<size_t>(step * core_->size() + from);
  return expects(step, from) && inbox_[slot].from < 0;
}

bool Operation::lacks_any(int step) const {
  for (int from = 0; from < core_->size(); ++from) {
    if (lacks(step, from)) return true;
  }
  return false;
}

void Operation::run_first_steps(std::unique_lock<std::mutex>& lock) {
  while (state_locked() == OperationState::kReady && step_ + 1 < steps_ &&
         (step_ == 0 || spec_.bytes <= SharedSpace::kSlotBytes)) {
    run_locked(lock);
  }
}

rpc::Wait Operation::wait_locked() const {
  const std::vector<int> missing = missing_ranks_locked();
  return {name() + (missing.empty() ? ": every rank has sent its part"
                                    : ": nothing yet from rank " + c10::Join(", ", missing)),
          begun_};
}

std::string Operation::number_text() const {
  const uint32_t sequence = sequence_of(number_);
  return fmt::format("collective number {}{}", number_ - first_number(sequence),
                     sequence == 0          ? ""
                     : is_transfer(number_) ? " with this tag"
                                            : fmt::format(" in sequence {}", sequence));
}

bool Pending::done() const { return operation_->done(); }
void Pending::wait() const { static_cast<void>(operation_->wait_until(base::kNever)); }
bool Pending::wait_until(base::TimePoint limit) const { return operation_->wait_until(limit); }
void Pending::expire() const { operation_->expire(); }
void Pending::fail(base::Error error) const { operation_->fail(std::move(error)); }

base::Future<void> Pending::future() const {
  auto promise = std::make_shared<base::Promise<void>>();
  base::Future<void> future = promise->future();
  auto complete = [operation = operation_, promise] {
    try {
      static_cast<void>(operation->wait_until(base::kNever));
      promise->set();
    } catch (...) {
      promise->fail(rpc::error_in_flight(base::ErrorKind::kInternal));
    }
  };
  if (operation_->done()) {
    complete();
  } else {
    operation_->core().executor().post(std::move(complete));
  }
  return future;
}

}  // namespace distrain::collective
