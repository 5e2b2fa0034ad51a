#pragma once

#include <utility>

#include "distrain/optim/step_target.h"
#include "distrain/optim/update_rule.h"

namespace torch::nn {
class Module;
}

namespace distrain::optim {

using NamedParameters = std::vector<std::pair<std::string, at::Tensor>>;
NamedParameters named(const std::vector<std::string>& names,
                      const std::vector<at::Tensor>& parameters);

/// Makes the same updates in one process as the DistributedOptimizers of all trainers together:
///
///   job::SingleProcessOptimizer optimizer(*net, options.rule());  // `net` is replicated
///   training.keep(optimizer);
///   training.run(optimizer, [&](const job::Step& step) { ...; return job::Result{loss, n}; });
class SingleProcessOptimizer {
 public:
  /// If `mode` is "sync", step() updates `shared` once with the mean of the trainers' gradients,
  /// otherwise once with each trainer's gradients. Always updates `replicated` with the mean.
  SingleProcessOptimizer(const Rule& rule, const std::string& mode, NamedParameters shared,
                         NamedParameters replicated = {});
  /// Updates the parameters of `module` as replicas under DDP or, if `mode` is given, as parameters
  /// of a RemoteModule that trainers share. Names parameters by number, as Training::keep() does by
  /// default, so a job and its `--local` run can resume from each other's checkpoints.
  SingleProcessOptimizer(const torch::nn::Module& module, const Rule& rule,
                         const std::string& mode = {});
  ~SingleProcessOptimizer();

  /// Sets a target, such as the tables of a ShardedEmbedding, which is updated as `shared` is.
  void add(std::shared_ptr<StepTarget> target) { target_ = std::move(target); }

  /// Moves the `.grad` of every parameter to this object. Call it after each trainer's backward().
  void gather();
  /// Updates the parameters with the gathered gradients and clears these gradients.
  void step();
  void set_lr_factor(double factor);

  std::vector<std::string> names() const;
  std::vector<ParameterState> state() const;
  void load_state(const std::vector<ParameterState>& state);
  bool has_replicas() const;
  /// Returns true if no update combines several trainers' gradients, so each trainer calls step().
  bool each_trainer_steps() const { return !sync_ && !has_replicas(); }
  int64_t updates() const { return updates_; }  ///< number of updates of the shared parameters

 private:
  struct Parameters;
  const double max_norm_;
  const bool sync_;
  const std::unique_ptr<Parameters> shared_, replicated_;
  std::shared_ptr<StepTarget> target_;  // may be null
  std::vector<uint64_t> gathered_;      // by trainer: StepTarget::gather()
  double lr_factor_ = 1;
  int64_t updates_ = 0;
};

}  // namespace distrain::optim
