#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "distrain/job/checkpoints.h"
#include "distrain/job/option_list.h"
#include "distrain/optim/distributed_optimizer.h"
#include "distrain/optim/rule.h"

namespace distrain::job {

// What the options of a job are made of: structures to derive one's own from.

/// Of every job.
struct CommonOptions {
  uint64_t seed = 1;
  std::optional<int> log_interval;  ///< steps between `step` lines, 0: none; see StepLines
  CheckpointOptions checkpoint;

  template <class Options>
  static void describe_common(OptionList<Options>& list) {
    list.integer("seed", &CommonOptions::seed, "of parameters, data and shuffling")
        .range(0, 9007199254740991.0);
    list.integer_or("log-interval", &CommonOptions::log_interval, "auto",
                    "steps between 'step' lines; 0: none; auto: by time")
        .details(
            "`auto` prints a line for the first and the last one, and at most one line every 5 s "
            "between\nthem.")
        .may_change();
    list.group("Checkpoints");
    const auto of = [](auto member) {
      return [member](auto& options) -> auto& { return options.checkpoint.*member; };
    };
    list.text("checkpoint", of(&CheckpointOptions::dir), "DIR",
              "save here, so that the job can be taken up again")
        .may_be_empty()
        .details(
            "It saves at the end, too, and on SIGINT, SIGTERM or SIGHUP. One job at a time saves "
            "in "
            "a folder:\nanother one is refused.")
        .may_change();
    list.integer("checkpoint-every", of(&CheckpointOptions::every), "steps between two saves")
        .range(0, 1e12)
        .by_default("each epoch's end")
        .needs("checkpoint")
        .details("Needs --checkpoint.")
        .may_change();
    list.text("resume", of(&CheckpointOptions::resume), "auto|PATH",
              "go on from this checkpoint; auto: from the newest of --checkpoint, if any")
        .details(
            "A folder of checkpoints stands for the newest in it. `auto` needs --checkpoint; if "
            "there\nis none yet, the job starts afresh. Options that are not given are those that "
            "it was saved\nwith, but for a limit of steps that it has reached. Of those that are "
            "given, some may be others\n(--lr, --epochs), which a `warn` line tells.")
        .offers({"auto"})
        .may_change();
    list.integer("keep", of(&CheckpointOptions::keep),
                 "checkpoints that are left; older ones are removed")
        .range(1, kMaxInt)
        .needs("checkpoint")
        .may_change();
  }
};

/// How parameters are updated.
struct RuleOptions : optim::RuleText {
  /// What `--lr-schedule` takes, with what its lengths are; `more`: where epochs are evaluated.
  static std::string lr_schedule_help(const std::string& lengths, const std::string& more = {}) {
    return "of the learning rate: constant, step:SIZE[,GAMMA]" + more +
           " or cosine:LENGTH[,FLOOR], after warmup:LENGTH+ if there is one; lengths are " +
           lengths;
  }

  /// Throws `invalid` for what no rule can be made of.
  optim::Rule rule() const { return optim::make_rule(*this); }

  template <class Options>
  static void describe_rule(OptionList<Options>& list) {
    list.choice("optimizer", &RuleOptions::optimizer,
                {"sgd", "adagrad", "adam", "adamw", "rmsprop"},
                "of all parameters, remote and local")
        .of_training();
    list.real("lr", &RuleOptions::lr, "learning rate").may_change();
    list.real("momentum", &RuleOptions::momentum, "of sgd and rmsprop").of_training();
    list.real("weight-decay", &RuleOptions::weight_decay, "of the optimizer")
        .by_default("0.01 of adamw, else 0")
        .of_training();
    list.text(
            "lr-schedule", &RuleOptions::lr_schedule, "SCHEDULE",
            lr_schedule_help("steps, with an e behind them epochs", ", plateau:PATIENCE[,FACTOR]"))
        .may_change();
    list.real("clip", &RuleOptions::clip, "limit of the gradient's norm; 0: none").of_training();
  }
};

/// Of a job whose trainers go through data in epochs.
struct TrainerOptions : CommonOptions, RuleOptions {
  int trainers = 2;
  // Training ends at the smaller of these two limits.
  int epochs = 1;     ///< 0: no limit
  int64_t steps = 0;  ///< of each trainer; 0: no limit
  int batch_size = 32;
  std::string mode = "async";  ///< async, sync, and ssp where a job offers it
  int64_t staleness = 1;       ///< ssp: steps that a trainer may be ahead of the slowest
  bool eval_only = false;      ///< of the checkpoint that the job would go on from
  int min_trainers = 1;        ///< that are to be left where the job goes on without some

  /// How trainer `participant`, from 0, shares parameters with the others.
  optim::Sharing sharing(int participant) const;

  template <class Options>
  static void describe_trainer(OptionList<Options>& list) {
    list.integer("trainers", &TrainerOptions::trainers, "ranks that train").range(1, 1022);
    list.integer("epochs", &TrainerOptions::epochs, "passes over the data; 0: as --steps says")
        .details(
            "With --steps alone there is no limit of epochs. With both, training ends at whichever "
            "comes\nfirst.")
        .may_change();
    list.integer("steps", &TrainerOptions::steps, "end after N steps of each trainer")
        .range(0, 1e12)
        .by_default("as many as the epochs have")
        .step_limit();
    list.integer("batch-size", &TrainerOptions::batch_size, "examples a batch and trainer")
        .range(1, kMaxInt);
    list.choice("mode", &TrainerOptions::mode, {"async", "sync"},
                "async: each trainer's update as it comes; sync: one mean update a step");
    list.integer("min-trainers", &TrainerOptions::min_trainers,
                 "go on without trainers that are lost as long as N are left")
        .range(1, kMaxInt)
        .may_change()
        .details(
            "Not with --mode sync, nor where trainers keep replicas: there one that is lost ends "
            "the job.\nIts steps go to the others. A process that is started with its --rank, "
            "or with --rank auto,\ntakes its place again, and with --max-restarts the launcher "
            "starts one.");
  }
};

/// Drops the limit of training that the user has not given if the user has given the other one, and
/// falls back on `default_epochs` if neither limit is left.
void settle_limits(TrainerOptions& options, const ParsedOptions& parsed, int default_epochs);

/// Throws `invalid` for more trainers that are to be left than there are. `told`: whether the user
/// has said how many; `warn` hears of what has no effect.
void check_min_trainers(const TrainerOptions& options, bool told,
                        const std::function<void(const std::string&)>& warn);

/// All rows that `Options` has from the structures above, in the order of the help.
template <class Options>
void describe_inherited(OptionList<Options>& list) {
  list.group("Training");
  if constexpr (std::is_base_of_v<TrainerOptions, Options>) {
    TrainerOptions::describe_trainer(list);
  }
  if constexpr (std::is_base_of_v<RuleOptions, Options>) RuleOptions::describe_rule(list);
  if constexpr (std::is_base_of_v<CommonOptions, Options>) CommonOptions::describe_common(list);
  if constexpr (std::is_base_of_v<TrainerOptions, Options>) {
    list.flag("eval-only", &TrainerOptions::eval_only,
              "evaluate the model of --resume, train nothing and save nothing")
        .needs("resume");
  }
}

}  // namespace distrain::job
