#include "distrain/optim/distributed_optimizer.h"

#include <fmt/format.h>
#include <torch/csrc/autograd/variable.h>

#include "updater_registry.h"

namespace distrain::optim {

namespace {

using base::Future;
using rpc::RRef;

rpc::ProcessNumber own_process(rpc::Agent& agent) {
  return rpc::process_number(agent.rank(), agent.incarnation());
}
rpc::ProcessNumber caller_of(const rpc::CallContext& context) {
  return rpc::process_number(context.caller.rank, context.caller.incarnation);
}

// Exposed functions, which run on the owner of the parameters.

RRef<ParameterUpdater> attach(rpc::CallContext& context,
                              const std::vector<RRef<at::Tensor>>& parameters,
                              const UpdaterOptions& options, int participant) {
  std::vector<at::Tensor> values;
  for (const auto& parameter : parameters) values.push_back(parameter.local_value());
  const auto updater = context.agent.local<UpdaterRegistry>().find_or_make(values, options);
  updater->take_part(participant, caller_of(context));
  return context.agent.make_rref(updater);
}

std::vector<at::Tensor> gradients_of(rpc::Agent& agent, const ParameterUpdater& updater,
                                     const std::vector<uint64_t>& contexts) {
  std::vector<at::Tensor> gradients;
  for (const at::Tensor& parameter : updater.parameters()) {
    at::Tensor sum;
    for (const uint64_t context : contexts) {
      sum = sum_of(sum, autograd::gradient(agent, context, parameter));
    }
    gradients.push_back(std::move(sum));
  }
  return gradients;
}

Future<uint64_t> step_here(rpc::CallContext& context, const RRef<ParameterUpdater>& updater,
                           const std::vector<uint64_t>& contexts, const StepOptions& options) {
  const at::NoGradGuard no_grad;
  ParameterUpdater& here = updater.local_value();
  return here.step(options, gradients_of(context.agent, here, contexts), caller_of(context));
}

Future<Norms> norms_here(rpc::CallContext& context, const RRef<ParameterUpdater>& updater,
                         const std::vector<uint64_t>& contexts, const NormArguments& arguments) {
  const at::NoGradGuard no_grad;
  ParameterUpdater& here = updater.local_value();
  return here.norms_squared(arguments, gradients_of(context.agent, here, contexts));
}

RRef<rpc::NamedTensors> snapshot_here(rpc::CallContext& context,
                                      const RRef<ParameterUpdater>& updater,
                                      const std::vector<std::string>& names) {
  return context.agent.make_rref(flatten(names, updater.local_value().state()));
}

template <class T>
std::vector<T> select(const std::vector<T>& from, const std::vector<size_t>& indices) {
  std::vector<T> some;
  for (const size_t index : indices) some.push_back(from[index]);
  return some;
}

// Throws `invalid` if `value` is a DDP replica. Each trainer steps its own replica, so a step of a
// shared parameter may wait forever for the other trainers.
void refuse_replica(const at::Tensor& value, uint64_t group) {
  if (!value.defined()) return;
  const auto& hook = torch::autograd::impl::post_acc_grad_hooks(value);
  if (!dynamic_cast<const autograd::LeafHook*>(hook.get())) return;
  base::invalid(
      fmt::format("a shared parameter of group {} is this rank's replica of a "
                  "DistributedDataParallel: it goes among the rank's own parameters",
                  group));
}

// The parameters that one rank owns, and their groups.
struct OwnerPart {
  std::vector<size_t> indices;  // indices in state()
  std::vector<GroupOptions> groups;

  void add(size_t index, const GroupOptions& group) {
    indices.push_back(index);
    if (groups.empty() || groups.back().number != group.number) groups.push_back(group);
    ++groups.back().parameters;
  }
};

}  // namespace

/// The parameters that one rank owns. Their updater is on another rank (`remote`) or this one.
class DistributedOptimizer::Owner final : public StepTarget {
 public:
  Owner(rpc::Agent& agent, int rank, std::vector<size_t> its_indices,
        std::shared_ptr<ParameterUpdater> local, RRef<ParameterUpdater> remote,
        const Sharing& sharing)
      : indices(std::move(its_indices)),
        agent_(agent),
        rank_(rank),
        local_(std::move(local)),
        remote_(std::move(remote)),
        steps_wait_(sharing.steps_wait()),
        norms_wait_(sharing.mode == Sharing::Mode::kSync && sharing.participants > 1) {}

  std::string where() const override { return fmt::format("rank {}", rank_); }
  Future<Norms> norm(const std::vector<uint64_t>& contexts,
                     const NormArguments& arguments) override {
    if (local_) return local_->norms_squared(arguments, gradients_of(agent_, *local_, contexts));
    return agent_.rpc_async<&norms_here>(to(norms_wait_), remote_, contexts, arguments);
  }
  Future<uint64_t> apply(const std::vector<uint64_t>& contexts,
                         const StepOptions& options) override {
    if (!local_) {
      return agent_.rpc_async<&step_here>(to(steps_wait_), remote_, contexts, options);
    }
    return local_->step(options, gradients_of(agent_, *local_, contexts), own_process(agent_));
  }
  std::vector<ParameterState> state() const {
    if (local_) return local_->state();
    return agent_.rpc_sync<&ParameterUpdater::state>(to(true), remote_);
  }
  Future<RRef<rpc::NamedTensors>> snapshot(const std::vector<std::string>& names) const {
    if (!local_) return agent_.rpc_async<&snapshot_here>(to(true), remote_, names);
    return Future<RRef<rpc::NamedTensors>>::ready(
        agent_.make_rref(flatten(names, local_->state())));
  }
  void load_state(const std::vector<ParameterState>& state) const {
    if (local_) return local_->load_state(state);
    agent_.rpc_sync<&ParameterUpdater::load_state>(to(true), remote_, state);
  }

  const std::vector<size_t> indices;  // of the parameters in DistributedOptimizer::state()

 private:
  // Returns the owner's address, without a deadline if `waits`: a call that waits for participants
  // or moves a whole state may take any time. The loss of the owner or a participant ends the call.
  rpc::To to(bool waits) const {
    rpc::To owner(rank_);
    if (waits) owner.without_deadline();
    return owner;
  }

  rpc::Agent& agent_;
  const int rank_;
  const std::shared_ptr<ParameterUpdater> local_;
  const RRef<ParameterUpdater> remote_;
  const bool steps_wait_, norms_wait_;
};

UpdateCount install(rpc::Agent& agent) {
  const auto updaters = std::make_shared<UpdaterRegistry>(agent.lasting());
  agent.provide(updaters);
  agent.expose<&attach>("distrain.optim.attach");
  agent.expose<&step_here>("distrain.optim.step");
  agent.expose<&norms_here>("distrain.optim.norm");
  agent.expose<&ParameterUpdater::state>("distrain.optim.state");
  agent.expose<&snapshot_here>("distrain.optim.hold_state");
  agent.expose<&ParameterUpdater::load_state>("distrain.optim.load_state");
  agent.expose<&leave_here>("distrain.optim.leave");
  agent.add_layer(updaters);
  return updaters->updates();
}

void keep_updaters(rpc::Agent& agent) { agent.local<UpdaterRegistry>().keep_all(); }

void leave_here(rpc::CallContext& call) {
  for (const auto& updater : call.agent.local<UpdaterRegistry>().all()) {
    updater->leave(caller_of(call));
  }
}

void rest(rpc::Agent& agent, rpc::ProcessNumber process) {
  for (const auto& updater : agent.local<UpdaterRegistry>().all()) updater->rest(process);
}

std::optional<int64_t> last_step_of(rpc::Agent& agent, rpc::ProcessNumber process) {
  std::optional<int64_t> last;
  for (const auto& updater : agent.local<UpdaterRegistry>().all()) {
    if (!updater->has(process)) continue;
    const std::optional<int64_t> its = updater->last_step_of(process);
    if (!its || (last && last != its)) return std::nullopt;  // unknown, or a step is half applied
    last = its;
  }
  return last;
}

Progress progress_of(rpc::Agent& agent, const at::Tensor& parameter, int participant) {
  const auto updater = agent.local<UpdaterRegistry>().find(parameter);
  if (!updater) {
    throw base::Exception(base::ErrorKind::kNotFound, "this parameter has no optimizer");
  }
  return updater->progress(participant);
}

DistributedOptimizer::DistributedOptimizer(rpc::Agent& agent,
                                           const std::vector<ParameterGroup>& groups,
                                           double max_norm, Sharing sharing)
    : agent_(agent), sharing_(sharing), max_norm_(max_norm) {
  std::map<int, OwnerPart> by_owner;
  OwnerPart own;
  std::vector<RRef<at::Tensor>> rrefs;  // by index in state(); empty for `own` parameters
  std::vector<at::Tensor> tensors;      // by index in state(); undefined on other ranks
  std::vector<at::Tensor> here;         // the defined tensors
  std::vector<uint64_t> groups_here;    // the groups of `here`
  for (const ParameterGroup& group : groups) {
    const GroupOptions options{to_fields(group.options), 0,
                               static_cast<uint64_t>(&group - &groups[0])};
    from_fields(options.options);  // checks the options of empty groups, too
    const auto add = [&](OwnerPart& part, const RRef<at::Tensor>& rref, const at::Tensor& value) {
      part.add(rrefs.size(), options);
      rrefs.push_back(rref);
      tensors.push_back(value);
      if (&part != &own && rref.owner() != agent.rank()) return;
      if (!value.defined()) {
        base::invalid(
            fmt::format("a parameter of group {} is an undefined tensor", options.number));
      }
      here.push_back(value);
      groups_here.push_back(options.number);
    };
    for (const auto& rref : group.shared) {
      const at::Tensor value = rref.is_owner() ? rref.local_value() : at::Tensor();
      refuse_replica(value, options.number);
      add(by_owner[rref.owner()], rref, value);
    }
    for (const at::Tensor& parameter : group.own) add(own, {}, parameter);
  }
  parameters_ = rrefs.size();
  check_each_once(here, groups_here);

  auto& updaters = agent.local<UpdaterRegistry>();
  UpdaterOptions options{{}, sharing.mode, sharing.participants, sharing.staleness};
  const auto make = [&](int rank, OwnerPart& part, std::shared_ptr<ParameterUpdater> local,
                        RRef<ParameterUpdater> remote = {}) {
    return std::make_shared<Owner>(agent, rank, std::move(part.indices), std::move(local),
                                   std::move(remote), sharing);
  };
  std::shared_ptr<Owner> here_last;
  for (auto& [rank, part] : by_owner) {
    ranks_.insert(rank);
    options.groups = std::move(part.groups);
    if (rank == agent.rank()) {
      const auto local = updaters.find_or_make(select(tensors, part.indices), options);
      local->take_part(sharing.participant, own_process(agent));
      here_last = make(rank, part, local);
    } else {
      owners_.push_back(make(rank, part, nullptr,
                             agent.rpc_sync<&attach>(rank, select(rrefs, part.indices), options,
                                                     sharing.participant)));
    }
  }
  if (here_last) owners_.push_back(std::move(here_last));
  if (sharing.steps_wait() && sharing.participant != Sharing::kOnlooker)
    updaters.note_steps(ranks_);
  if (own.indices.empty()) return;
  const auto local =
      updaters.find_or_make(select(tensors, own.indices), UpdaterOptions{std::move(own.groups)},
                            UpdaterRegistry::Counts::kNo);
  own_ = make(agent.rank(), own, local);
}

uint64_t DistributedOptimizer::step(const std::vector<uint64_t>& contexts,
                                    std::optional<double> max_norm) {
  const at::NoGradGuard no_grad;
  const rpc::ContextScope outside(0);  // updates are not recorded in the autograd context
  StepOptions options{participant(), 1, *lr_factor_, *step_number_};
  const double limit = max_norm.value_or(max_norm_);
  for (const auto& target : targets_) target->check(contexts);
  const Scales scales = limit > 0 ? scales_for(contexts, limit) : Scales{};
  options.scale = scales.shared * mean_factor();
  if (sharing_.steps_wait()) agent_.local<UpdaterRegistry>().note_steps(ranks_);
  std::vector<Step> steps;
  const auto add_step = [&](StepTarget& target, const StepOptions& how, const char* which = "") {
    Step& step = steps.emplace_back(Step{target.where() + which, target.only_sends(), {}});
    // A failure here becomes a failed future, so that step() still waits for the other owners.
    try {
      step.done = target.apply(contexts, how);
    } catch (...) {
      step.done = Future<uint64_t>::failed(rpc::error_in_flight(base::ErrorKind::kInternal));
    }
  };
  if (*has_data_ || sharing_.mode == Sharing::Mode::kSync) {
    for (const auto& owner : owners_) add_step(*owner, options);
    for (const auto& target : targets_) add_step(*target, options);
  }
  options.participant = 0;  // `own_` has one participant
  options.scale = scales.own;
  if (own_) add_step(*own_, options, " (its own)");
  std::vector<Future<uint64_t>> all;
  for (const Step& step : steps) all.push_back(step.done);
  try {
    base::wait_all(all);
  } catch (...) {
    base::Error error = rpc::error_in_flight(base::ErrorKind::kInternal);
    if (steps.size() > 1) error.message += "; " + outcome_of(steps);
    throw base::Exception(std::move(error));
  }
  return steps.empty() ? 0 : steps.front().done.wait();
}

// Describes, after a failure, on which ranks the step was made, sent, failed or is in flight. Waits
// for the owners' results, unless Sharing::steps_wait(): then an owner may wait for other ranks'
// step().
std::string DistributedOptimizer::outcome_of(const std::vector<Step>& steps) const {
  std::string made, sent, failed, open;
  for (const Step& step : steps) {
    const bool is_open = sharing_.steps_wait() && !step.done.done();
    std::string& list = is_open                         ? open
                        : !step.done.wait_result().ok() ? failed
                        : step.is_only_sent             ? sent
                                                        : made;
    list += (list.empty() ? "" : ", ") + step.where;
  }
  std::string text = "the step failed on " + failed;
  if (!made.empty()) text += ", is made on " + made;
  if (!sent.empty()) text += ", is sent to " + sent;
  if (!open.empty()) text += ", has not been made yet on " + open;
  return text;
}

// Returns the clipping factors. Adds norms in rank order, those of other targets last, so that all
// participants get equal bits.
DistributedOptimizer::Scales DistributedOptimizer::scales_for(const std::vector<uint64_t>& contexts,
                                                              double max_norm) const {
  const double own = own_ ? own_->norm(contexts, {}).wait().shared : 0;
  const NormArguments arguments{participant(), own};
  const bool is_sync = sharing_.mode == Sharing::Mode::kSync;
  const double factor = mean_factor();
  std::vector<Future<Norms>> all;
  for (const auto& owner : owners_) all.push_back(owner->norm(contexts, arguments));
  if (const auto here = ranks_.find(agent_.rank()); here != ranks_.end()) {
    std::rotate(all.begin() + std::distance(ranks_.begin(), here), all.end() - 1, all.end());
  }
  for (const auto& target : targets_) all.push_back(target->norm(contexts, arguments));
  base::wait_all(all);
  double shared = 0;
  for (const auto& norms : all) shared += norms.wait().shared;
  const double total = shared * factor * factor + (all.empty() ? own : all.front().wait().own);
  const double scale = clip_scale(total, max_norm);
  // Outside kSync, `total` differs between participants, so it must not scale the replicas.
  const bool is_everyones = is_sync || sharing_.participants <= 1;
  return {scale, is_everyones ? scale : clip_scale(own, max_norm)};
}

std::vector<ParameterState> DistributedOptimizer::state() const {
  std::vector<ParameterState> all(parameters_);
  for (const auto& owner : all_owners()) {
    std::vector<ParameterState> its = owner->state();
    for (size_t i = 0; const size_t index : owner->indices) all[index] = std::move(its.at(i++));
  }
  return all;
}

std::vector<RRef<rpc::NamedTensors>> DistributedOptimizer::snapshot(
    const std::vector<std::string>& names) const {
  std::vector<Future<RRef<rpc::NamedTensors>>> states;
  for (const auto& owner : all_owners()) {
    states.push_back(owner->snapshot(select(names, owner->indices)));
  }
  base::wait_all(states);
  std::vector<RRef<rpc::NamedTensors>> held;
  for (const auto& state : states) held.push_back(state.wait());
  return held;
}

std::vector<ParameterState> DistributedOptimizer::own_state() const {
  return own_ ? own_->state() : std::vector<ParameterState>();
}

void DistributedOptimizer::load_own_state(const std::vector<ParameterState>& state) {
  if (own_) own_->load_state(state);
}

void DistributedOptimizer::load_state(const std::vector<ParameterState>& state) {
  if (state.size() != parameters_) {
    base::bad_data(fmt::format("the state of {} parameters, not of {}", state.size(), parameters_));
  }
  for (const auto& owner : all_owners()) owner->load_state(select(state, owner->indices));
}

}  // namespace distrain::optim
