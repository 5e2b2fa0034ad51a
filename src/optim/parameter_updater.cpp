#include "parameter_updater.h"

#include <limits>

#include <c10/util/StringUtil.h>
#include <fmt/format.h>

#include "distrain/autograd/parameter_versions.h"

namespace distrain::optim {

namespace {

// Throws `invalid` if two participants of one update have different learning rates or scales.
void check_same_options(const StepOptions& a, const StepOptions& b) {
  const auto check = [&](double of_a, double of_b, const char* what, const char* unit) {
    if (of_a == of_b) return;
    base::invalid(fmt::format("participants {} and {} step with {} {:g} and {:g} of {}",
                              a.participant, b.participant, what, of_a, of_b, unit));
  };
  check(a.lr_factor, b.lr_factor, "different learning rates:", "the groups' own");
  check(a.scale, b.scale, "gradients that are clipped differently: to", "themselves");
}

base::Error participant_lost(rpc::ProcessNumber process) {
  return {base::ErrorKind::kPeerLost, "this participant is lost", rpc::rank_of(process)};
}

// Returns mean gradients, added in participant order, so that the order of arrival has no effect.
template <class Parts>
Gradients means(const Parts& by_participant) {
  std::vector<Gradients> in_order;
  for (const auto& [participant, part] : by_participant) in_order.push_back(part.gradients);
  return mean_of(in_order);
}

}  // namespace

ParameterUpdater::ParameterUpdater(rpc::Agent& agent, const std::vector<at::Tensor>& parameters,
                                   UpdaterOptions options,
                                   std::shared_ptr<std::atomic<uint64_t>> updates)
    : agent_(agent),
      options_(std::move(options)),
      updates_(std::move(updates)),
      participants_(static_cast<size_t>(std::max(options_.participants, 0))) {
  const auto check = [](bool good) {
    if (!good) base::invalid("the groups are not those of the parameters");
  };
  std::span<const at::Tensor> rest(parameters);
  std::vector<uint64_t> groups;  // the group of each parameter
  for (const GroupOptions& group : options_.groups) {
    check(group.parameters <= rest.size());
    set_.add_group(from_fields(group.options), rest.first(group.parameters));
    rest = rest.subspan(group.parameters);
    groups.resize(groups.size() + group.parameters, group.number);
  }
  check(rest.empty());
  check_each_once(parameters, groups);
}

void ParameterUpdater::take_part(int participant, rpc::ProcessNumber process) {
  // Ignore kOnlooker, which makes no steps, and invalid numbers, for which step() throws.
  if (participant < 0 || participant >= options_.participants) return;
  const std::unique_lock guard = lock();
  if (lost_processes_.contains(process)) throw base::Exception(participant_lost(process));
  Participant& its = participants_[static_cast<size_t>(participant)];
  if (its.is_lost()) {
    its.processes.clear();
    its.steps = std::max(its.steps, slowest_locked(participant));
  }
  its.processes.try_emplace(process);
  its.state = Participant::State::kStepping;
}

// Collects one call of each participant, with its gradients, in `gathering`. The last call runs
// `compute` once to get the result for all. A participant that clips its gradients calls
// norms_squared() before step(). `others` collects the calls of whichever of the two functions this
// is not. If both have calls, only some participants clip, so all calls fail with `invalid`.
template <class R, class Arguments, class Others, class Compute>
base::Future<R> ParameterUpdater::together(Gathering<R, Arguments>& gathering, Others& others,
                                           const Arguments& arguments, Gradients gradients,
                                           const Compute& compute) {
  base::DeferredTasks done;
  const std::unique_lock guard = lock();
  if (!others.parts.empty()) {
    const base::Error error{base::ErrorKind::kInvalid,
                            fmt::format("participants {} and {} step together, but only one of "
                                        "them clips its gradients",
                                        others.parts.begin()->first, arguments.participant)};
    done.complete(std::exchange(others, {}).waiting, error);
    throw base::Exception(error);
  }
  if (lost_ && options_.participants > 1) throw base::Exception(*lost_);
  const auto [part, is_new] = gathering.parts.try_emplace(arguments.participant);
  if (!is_new) {
    base::invalid(fmt::format("participant {} made two steps before all had made one",
                              arguments.participant));
  }
  part->second = {arguments, std::move(gradients)};
  if (gathering.parts.size() == 1) gathering.since = base::Clock::now();
  const auto future = gathering.waiting.emplace_back().future();
  fail_if_needed_left_locked(gathering, done);
  if (static_cast<int>(gathering.parts.size()) < options_.participants) return future;
  auto all = std::exchange(gathering, {});
  const auto busy = mark_busy();
  try {
    const R result = compute(all.parts);
    done.complete(std::move(all.waiting), result);
  } catch (...) {
    done.complete(std::move(all.waiting), rpc::error_in_flight(base::ErrorKind::kInternal));
  }
  return future;
}

base::Future<uint64_t> ParameterUpdater::step(const StepOptions& options, Gradients gradients,
                                              rpc::ProcessNumber process) {
  check_participant(options.participant, gradients);
  if (options_.mode != Sharing::Mode::kSync) return step_alone(options, gradients, process);
  return together(stepping_, measuring_, options, std::move(gradients), [this](const auto& all) {
    const StepOptions& first = all.begin()->second.arguments;
    for (const auto& [other, part] : all) check_same_options(first, part.arguments);
    apply_locked(means(all), first);
    for (Participant& each : participants_) ++each.steps;
    return applied_;
  });
}

base::Future<uint64_t> ParameterUpdater::step_alone(const StepOptions& options,
                                                    const Gradients& gradients,
                                                    rpc::ProcessNumber process) {
  base::DeferredTasks done;
  const std::unique_lock guard = lock();
  Participant& its = participants_[static_cast<size_t>(options.participant)];
  if (!its.processes.empty() && !its.has(process)) {  // a late step of a lost process
    throw base::Exception(participant_lost(process));
  }
  const auto busy = mark_busy();
  apply_locked(gradients, options);
  if (its.state == Participant::State::kResting) {  // other participants did not wait for it
    its.steps = std::max(its.steps, slowest_locked(options.participant));
    its.state = Participant::State::kStepping;
  }
  ++its.steps;
  if (its.has(process)) {
    Participant::Process& of_process = its.processes[process];
    of_process.is_numbered = of_process.is_numbered && options.number > 0;
    of_process.last_step = std::max(of_process.last_step, options.number);
  }
  WaitingStep& step =
      waiting_steps_.emplace(options.participant, WaitingStep{{}, applied_, base::Clock::now()})
          ->second;
  const auto future = step.waiting.emplace_back().future();
  complete_waiting_steps_locked(done);
  return future;
}

// Completes the steps in `waiting_steps_` whose participants may begin their next step. Fails the
// steps whose participant is lost and those that wait for a participant that has left.
void ParameterUpdater::complete_waiting_steps_locked(base::DeferredTasks& done) {
  for (auto it = waiting_steps_.begin(); it != waiting_steps_.end();) {
    const Participant& its = participants_[static_cast<size_t>(it->first)];
    const int64_t needed = its.steps - options_.staleness;  // steps needed of each participant
    std::optional<base::Error> error;
    if (its.state == Participant::State::kLost) {
      error = participant_lost(its.processes.begin()->first);
    } else if (options_.mode == Sharing::Mode::kSsp && slowest_locked(kNobody) < needed) {
      error = lost_ ? lost_ : left_error_locked([&](int other) {
        return participants_[static_cast<size_t>(other)].steps < needed;
      });
      if (!error) {
        ++it;
        continue;
      }
    }
    done.complete(std::move(it->second.waiting),
                  error ? base::Result<uint64_t>(*error) : it->second.updates);
    it = waiting_steps_.erase(it);
  }
}

// Returns an error if a participant for which `is_needed` returns true has left.
template <class IsNeeded>
std::optional<base::Error> ParameterUpdater::left_error_locked(const IsNeeded& is_needed) const {
  for (int number = 0; number < options_.participants; ++number) {
    const Participant& its = participants_[static_cast<size_t>(number)];
    if (its.state != Participant::State::kLeft || !is_needed(number)) continue;
    const int rank = rpc::rank_of(its.processes.begin()->first);
    return base::Error{
        base::ErrorKind::kPeerLost,
        fmt::format("participant {} (rank {}) has entered shutdown() after {} steps, "
                    "and a step waits for one more of it",
                    number, rank, its.steps),
        rank};
  }
  return std::nullopt;
}

base::Future<Norms> ParameterUpdater::norms_squared(const NormArguments& arguments,
                                                    Gradients gradients) {
  check_participant(arguments.participant, gradients);
  if (options_.mode != Sharing::Mode::kSync) {
    return base::Future<Norms>::ready({optim::norm_squared(gradients), arguments.own});
  }
  return together(measuring_, stepping_, arguments, std::move(gradients), [](const auto& all) {
    Norms norms{optim::norm_squared(means(all)), 0};
    for (const auto& [participant, part] : all) norms.own += part.arguments.own;
    norms.own /= static_cast<double>(all.size());
    return norms;
  });
}

void ParameterUpdater::apply_locked(const Gradients& gradients, const StepOptions& options) {
  // Check all gradients before changing a parameter, so that all parameters are updated or none.
  set_.check(gradients);
  if (!(options.scale >= 0 && std::isfinite(options.scale))) {
    base::invalid(fmt::format("gradients cannot be multiplied by {:f}", options.scale));
  }
  set_.set_lr_factor(options.lr_factor);
  const autograd::ParameterUpdate update(agent_);
  for (size_t i = 0; i < gradients.size(); ++i) {
    if (gradients[i].defined()) update.unshare(parameters()[i]);
  }
  for (size_t i = 0; i < gradients.size(); ++i) {
    try {
      set_.apply(i, gradients[i], options.scale);
    } catch (...) {
      base::Error error = rpc::error_in_flight(base::ErrorKind::kInternal);
      error.message = fmt::format(
          "the update of rank {}'s parameters is half made: it failed at parameter {} of {}, those "
          "before it are updated: {}",
          agent_.rank(), i, gradients.size(), error.message);
      throw base::Exception(std::move(error));
    }
  }
  ++applied_;
  if (updates_) updates_->fetch_add(1);
}

// Returns the number of steps of the slowest participant, ignoring `but` and participants that rest
// or are lost. If no participant is left, returns the number of steps of the fastest participant.
int64_t ParameterUpdater::slowest_locked(int but) const {
  int64_t slowest = std::numeric_limits<int64_t>::max();
  int64_t fastest = 0;
  for (int each = 0; each < options_.participants; ++each) {
    const Participant& its = participants_[static_cast<size_t>(each)];
    fastest = std::max(fastest, its.steps);
    using State = Participant::State;
    if (each == but || (its.state != State::kStepping && its.state != State::kLeft)) continue;
    slowest = std::min(slowest, its.steps);
  }
  return std::min(slowest, fastest);
}

void ParameterUpdater::check_same(const std::vector<at::Tensor>& parameters,
                                  const UpdaterOptions& options) const {
  const auto differ = [](const std::string& what) {
    base::invalid("these parameters have an optimizer already, with other " + what);
  };
  const auto is_same = [](const at::Tensor& a, const at::Tensor& b) { return a.is_same(b); };
  if (!std::ranges::equal(parameters, set_.parameters(), is_same)) differ("parameters beside them");
  if (!std::ranges::equal(options.groups, options_.groups, {}, &GroupOptions::parameters,
                          &GroupOptions::parameters)) {
    differ("groups");
  }
  if (options.groups != options_.groups) differ("options");
  if (!(options == options_)) differ("participants, mode or staleness");
}

void ParameterUpdater::leave(rpc::ProcessNumber process) {
  if (options_.mode == Sharing::Mode::kAsync) return;
  base::DeferredTasks done;
  const std::unique_lock guard = lock();
  stop_stepping_locked(process, Participant::State::kLeft);
  fail_if_needed_left_locked(stepping_, done);
  fail_if_needed_left_locked(measuring_, done);
  complete_waiting_steps_locked(done);
}

void ParameterUpdater::on_rank_lost(const rpc::Loss& loss) {
  base::DeferredTasks done;
  std::lock_guard lock(mutex_);
  if (loss.job_goes_on && options_.mode != Sharing::Mode::kSync) {
    lost_processes_.insert(loss.process());
    for (Participant& its : participants_) {
      if (!its.has(loss.process())) continue;
      its.processes[loss.process()].is_lost = true;
      if (its.is_lost()) its.state = Participant::State::kLost;
    }
  } else {
    if (!lost_) lost_ = loss.error;
    done.complete(std::exchange(stepping_, {}).waiting, loss.error);
    done.complete(std::exchange(measuring_, {}).waiting, loss.error);
  }
  complete_waiting_steps_locked(done);
}

std::vector<rpc::Wait> ParameterUpdater::waits() const {
  std::unique_lock lock(mutex_, std::try_to_lock);
  for (; !lock; static_cast<void>(lock.try_lock())) {
    const base::TimePoint since = busy_since_;
    if (since != base::TimePoint{}) return {{"an update under way here", since}};
    std::this_thread::yield();  // a holder that is not busy releases the lock soon
  }
  std::vector<rpc::Wait> all;
  const auto tell = [&](const auto& gathering, const char* what) {
    if (gathering.parts.empty()) return;
    std::vector<int> missing;
    for (int participant = 0; participant < options_.participants; ++participant) {
      if (!gathering.parts.contains(participant)) missing.push_back(participant);
    }
    all.push_back({fmt::format("{} that wants participant {}", what, c10::Join(", ", missing)),
                   gathering.since});
  };
  tell(stepping_, "an update here");
  tell(measuring_, "a gradient norm here");
  for (const auto& [participant, waiting] : waiting_steps_) {
    all.push_back(
        {fmt::format("participant {} is ahead by {} steps", participant, lead_locked(participant)),
         waiting.since});
  }
  return all;
}

std::vector<ParameterState> ParameterUpdater::state() const {
  const std::unique_lock guard = lock();
  const auto busy = mark_busy();
  // On an accelerator read.version() orders the copies after the parameter's last update.
  const autograd::ParameterRead read(agent_);
  for (const at::Tensor& parameter : parameters()) read.version(parameter);
  std::vector<ParameterState> all = set_.state();
  for (ParameterState& state : all) {
    // The next step writes to these tensors, so return copies. Checkpoints need them on the CPU.
    for (auto& [name, value] : state) value = value.is_cpu() ? value.clone() : value.cpu();
  }
  return all;
}

void ParameterUpdater::load_state(const std::vector<ParameterState>& state) {
  if (state.size() != parameters().size()) {
    base::bad_data(
        fmt::format("the state of {} parameters, not of {}", state.size(), parameters().size()));
  }
  const std::unique_lock guard = lock();
  const auto busy = mark_busy();
  const autograd::ParameterUpdate update(agent_);
  for (const at::Tensor& parameter : parameters()) update.unshare(parameter);
  set_.adopt(set_.load(state));
}

}  // namespace distrain::optim
