#pragma once

#include "distrain/ddp/reducer.h"
#include "distrain/job/checkpoints.h"
#include "distrain/job/option_list.h"
#include "distrain/optim/distributed_optimizer.h"
#include "distrain/optim/update_rule.h"

namespace distrain::job {

/// Options of every job.
struct CommonOptions {
  uint64_t seed = 1;
  std::optional<int> log_interval;  ///< steps between `step` lines, as StepLines defines them
  CheckpointOptions checkpoint;

  static void describe_common(auto& list) {
    list.integer("seed", &CommonOptions::seed, "seed the parameters, data and shuffling")
        .range(0, 9007199254740991.0);
    list.integer_or("log-interval", &CommonOptions::log_interval, "auto",
                    "print a line every N steps; 0 prints none; auto prints one every 5 s")
        .details("`auto` also prints a line for the first and the last step.")
        .may_change();
    list.group("Checkpoints");
    const auto of = [](auto member) {
      return [member](auto& options) -> auto& { return options.checkpoint.*member; };
    };
    list.text("checkpoint", of(&CheckpointOptions::dir), "DIR",
              "save checkpoints in DIR, each in a folder of its own")
        .may_be_empty()
        .details(R"(
The job also saves at its end and on SIGINT, SIGTERM or SIGHUP. Only one job at a time can save in
DIR; a second one is refused.)")
        .may_change();
    list.integer("checkpoint-every", of(&CheckpointOptions::every),
                 "save every N steps; 0 saves at the end of each epoch")
        .range(0, 1e12)
        .needs("checkpoint")
        .details("Needs --checkpoint.")
        .may_change();
    list.choice("on-save-error", of(&CheckpointOptions::on_save_error), {"continue", "stop"},
                "continue: train on after a failed save and try the next one; stop: end the job")
        .needs("checkpoint")
        .details(R"(
Needs --checkpoint. A failed save prints a `warn` line and keeps the older checkpoints. The job ends
with exit status 9 if its last save fails.)")
        .may_change();
    list.text(
            "resume", of(&CheckpointOptions::resume), "auto|PATH",
            "resume from this checkpoint; auto resumes from the newest one in --checkpoint, if any")
        .details(R"(
PATH is a checkpoint, or a folder of checkpoints, which means its newest one. `auto` needs
--checkpoint and starts a new job if that folder has no checkpoint. Options that are not given keep
their saved values, except a limit of steps that the saved job has reached. Some options, such as --lr
and --epochs, may be given another value; a `warn` line reports the change.)")
        .offers({"auto"})
        .may_change();
    list.integer("keep", of(&CheckpointOptions::keep),
                 "keep the newest N checkpoints and remove older ones")
        .range(1, kMaxInt)
        .needs("checkpoint")
        .may_change();
  }
};

struct RuleOptions : optim::RuleText {
  /// Returns the help of `--lr-schedule`. `lengths` names the units of LENGTH, `more` the schedules
  /// that need evaluations.
  static std::string lr_schedule_help(const std::string& lengths, const std::string& more = {}) {
    return "vary the learning rate: constant, step:SIZE[,GAMMA]" + more +
           " or cosine:LENGTH[,FLOOR]; lengths are in " + lengths;
  }

  optim::Rule rule() const { return optim::make_rule(*this); }  ///< may throw `invalid`

  static void describe_rule(auto& list) {
    list.choice("optimizer", &RuleOptions::optimizer,
                {"sgd", "adagrad", "adam", "adamw", "rmsprop"},
                "update all parameters, remote and local, with this rule")
        .of_training();
    list.real("lr", &RuleOptions::lr, "set the learning rate").may_change();
    list.real("momentum", &RuleOptions::momentum, "set momentum for sgd and rmsprop").of_training();
    list.real("weight-decay", &RuleOptions::weight_decay, "set the weight decay")
        .by_default("0.01 for adamw, otherwise 0")
        .of_training();
    list.text("lr-schedule", &RuleOptions::lr_schedule, "SCHEDULE",
              lr_schedule_help("steps, or epochs (5e)", ", plateau:PATIENCE[,FACTOR]"))
        .details(R"(
`warmup:LENGTH+` before a schedule first raises the rate linearly, as in `warmup:100+step:1000`. The
schedules are torch.optim's LinearLR (warmup), StepLR, CosineAnnealingLR and, in jobs that evaluate,
ReduceLROnPlateau. FLOOR is a fraction of --lr.)")
        .may_change();
    list.real("clip", &RuleOptions::clip, "clip the gradient norm to X; 0 disables clipping")
        .of_training();
  }

  /// Removes update rules that the job does not offer from the help of describe_rule()'s options.
  static void name_rules(OptionTable& table);
};

/// Options of jobs whose trainers train in epochs.
struct TrainerOptions : CommonOptions, RuleOptions {
  int trainers = 2;
  // Training ends when it reaches one of the next two limits.
  int epochs = 1;     ///< 0: no limit
  int64_t steps = 0;  ///< steps of each trainer; 0: no limit
  int batch_size = 32;
  int accumulate = 1;  ///< batches of a step
  static constexpr auto kAccumulateHelp = "add up the gradients of N batches in each step";
  std::string gradient_dtype = "float32";  ///< in which replicas average: or float16, bfloat16
  static constexpr auto kGradientDtypeHelp = "send the gradients of replicas in this type";
  std::string mode = "async";  ///< async, sync, or ssp if the job offers it
  int64_t staleness = 1;       ///< ssp: maximum lead over the slowest trainer, in steps
  bool eval_only = false;      ///< only evaluate the checkpoint of `--resume`
  int min_trainers = 1;        ///< the job ends if fewer trainers are left

  int64_t step_size() const { return int64_t{batch_size} * accumulate; }  ///< examples of a step
  /// Returns the options of the job's DistributedDataParallel.
  ddp::ReducerOptions replicas() const {
    if (gradient_dtype == "float32") return {};
    return {.hook = ddp::compress_hook(gradient_dtype == "float16" ? at::kHalf : at::kBFloat16)};
  }

  /// Returns the settings by which trainer `participant` (from 0) shares parameters with others.
  optim::Sharing sharing(int participant) const {
    using Mode = optim::Sharing::Mode;
    return {.mode = mode == "sync"  ? Mode::kSync
                    : mode == "ssp" ? Mode::kSsp
                                    : Mode::kAsync,
            .participants = trainers,
            .participant = participant,
            .staleness = staleness};
  }

  static void describe_trainer(auto& list) {
    list.integer("trainers", &TrainerOptions::trainers, "run N trainers").range(1, 1022);
    list.integer("epochs", &TrainerOptions::epochs, "train for N epochs; 0 sets no limit")
        .details(
            R"(If --steps is given, too, training ends at the limit that comes first; --steps alone sets no
limit of epochs.)")
        .may_change();
    list.integer("steps", &TrainerOptions::steps,
                 "stop after N steps of each trainer; 0 sets no limit")
        .range(0, 1e12)
        .step_limit();
    list.integer("batch-size", &TrainerOptions::batch_size, "use N examples per trainer and batch")
        .range(1, kMaxInt);
    list.choice("mode", &TrainerOptions::mode, {"async", "sync"},
                "async: apply each update as it arrives; sync: apply one averaged update per step");
    list.integer("min-trainers", &TrainerOptions::min_trainers,
                 "continue without lost trainers as long as N are left")
        .range(1, kMaxInt)
        .may_change()
        .details(R"(
A lost trainer's steps go to the others. A new process with the same --rank, or with --rank auto,
replaces the trainer; with --max-restarts the launcher starts that process. With --mode sync, or if
trainers keep replicas, the loss of a trainer ends the job in any case.)");
  }
};

/// If the user gave only one of `--epochs` and `--steps`, removes the limit of the other option. If
/// that leaves no limit and `--epochs` was not given, sets `epochs` to `default_epochs`.
void derive_limits(TrainerOptions& options, const ParsedOptions& parsed, int default_epochs);

/// Declares the options that `Options` inherits from the structures above.
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
              "evaluate the checkpoint of --resume; train nothing and save nothing")
        .needs("resume");
  }
}

}  // namespace distrain::job
