#include "turns.h"

#include <algorithm>

namespace distrain::nn {

namespace {

base::Error cancelled(const char* why) { return {base::ErrorKind::kCancelled, why, -1, {}}; }

}  // namespace

Turns::Turn::~Turn() {
  if (state_) state_->fail(cancelled("a step of this stage was abandoned"));
}

void Turns::Turn::done() { std::exchange(state_, nullptr)->finish(); }

void Turns::Turn::fail(const base::Error& error) {
  if (const auto state = std::exchange(state_, nullptr)) state->fail(error);
}

std::shared_ptr<Turns::State> Turns::state() const {
  std::lock_guard lock(mutex_);
  return state_;
}

void Turns::begin(std::vector<PipelineStep> row) {
  auto next = std::make_shared<State>();
  next->row = std::move(row);
  {
    std::lock_guard lock(mutex_);
    next.swap(state_);
  }
  next->fail(cancelled("another batch has begun"));
}

base::Future<Turns::TurnPtr> Turns::enter(const PipelineStep& step) {
  const std::shared_ptr<State> own = this->state();
  State& state = *own;
  {
    std::lock_guard lock(state.mutex);
    if (state.error) return base::Future<TurnPtr>::failed(*state.error);
    const size_t first = std::min(state.next + (state.taken ? 1 : 0), state.row.size());
    const auto left = state.row.begin() + static_cast<std::ptrdiff_t>(first);
    if (std::find(left, state.row.end(), step) == state.row.end()) {
      return base::Future<TurnPtr>::failed(
          {base::ErrorKind::kInvalid, "the schedule of this stage has no such step left", -1, {}});
    }
    if (state.taken || !(state.row[state.next] == step)) {
      return state.waiting[{step.kind, step.micro_batch}].future();
    }
    state.taken = true;
  }
  return base::Future<TurnPtr>::ready(std::make_shared<Turn>(own));
}

void Turns::State::finish() {
  std::optional<base::Promise<TurnPtr>> promise;
  {
    std::lock_guard lock(mutex);
    taken = false;
    ++next;
    if (error || next >= row.size()) return;
    const auto it = waiting.find({row[next].kind, row[next].micro_batch});
    if (it == waiting.end()) return;
    promise = std::move(it->second);
    waiting.erase(it);
    taken = true;
  }
  promise->set(std::make_shared<Turn>(shared_from_this()));
}

void Turns::State::fail(const base::Error& why) {
  decltype(waiting) failing;
  base::Error first;
  {
    std::lock_guard lock(mutex);
    if (!error) error = why;
    first = *error;
    failing.swap(waiting);
  }
  for (auto& [key, promise] : failing) promise.fail(first);
}

}  // namespace distrain::nn
