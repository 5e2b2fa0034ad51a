#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "distrain/optim/rule.h"

namespace torch::nn {
class Module;
}

namespace distrain::optim {

/// Parameters with their names, in order.
using NamedParameters = std::vector<std::pair<std::string, at::Tensor>>;
NamedParameters named(const std::vector<std::string>& names,
                      const std::vector<at::Tensor>& parameters);

/// What the DistributedOptimizers of all trainers do together, in one process.
///
///   job::LocalUpdates updates(*net, options.rule());  // the net is replicated, as under DDP
///   training.keep(updates);
///   training.run(updates, [&](const job::Step& step) { ...; return job::Result{loss, samples}; });
class LocalUpdates {
 public:
  using Named = NamedParameters;

  /// `shared` is updated by the mean over the trainers in `sync` mode, otherwise by one after the
  /// other; `replicated` by the mean always, as under DDP.
  LocalUpdates(const Rule& rule, const std::string& mode, Named shared, Named replicated = {});
  /// Updates the parameters of `module` as replicas under DDP or, if `mode` is given, as parameters
  /// of a RemoteModule that trainers share. Names them by number, as Training::keep() does without
  /// names, so that a job and its `--local` run can resume from each other's checkpoints.
  LocalUpdates(const torch::nn::Module& module, const Rule& rule, const std::string& mode = {});
  ~LocalUpdates();

  /// After one trainer's backward(): takes the `.grad` of all.
  void gather();
  /// By what has been gathered.
  void step();
  void set_lr_factor(double factor);

  std::vector<std::string> names() const;
  std::vector<ParameterState> state() const;
  void load_state(const std::vector<ParameterState>& state);
  bool has_replicas() const;
  /// Each trainer's update comes before the next one's forward pass: nothing waits for others.
  bool in_turns() const { return !sync_ && !has_replicas(); }
  /// Updates by now of what is shared.
  int64_t updates() const { return updates_; }

 private:
  struct Some;
  const double max_norm_;
  const bool sync_;
  const std::unique_ptr<Some> shared_, replicated_;
  int64_t updates_ = 0;
};

}  // namespace distrain::optim
