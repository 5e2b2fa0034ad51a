#pragma once

#include <algorithm>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "distrain/cuda/device_choice.h"
#include "distrain/job/events.h"
#include "distrain/job/job.h"
#include "distrain/job/local_training.h"
#include "distrain/job/option_list.h"
#include "distrain/job/options.h"
#include "distrain/job/predictions.h"
#include "distrain/job/rank.h"
#include "distrain/nn/remote_module.h"

namespace distrain::job {

/// A command line, and what it shows.
struct Example {
  std::string command;
  std::string what;
};

/// What can be known of a job before any rank starts, to check its options by.
struct Preflight {
  const ParsedOptions& options;          ///< as they were given here
  bool local = false;                    ///< the whole job is in this process
  bool has_rank_0 = false;               ///< it runs in or under this process
  std::vector<int> ranks;                ///< those that do
  const OptionMap* of_rank_0 = nullptr;  ///< they have come from rank 0, which has these
  std::function<void(const std::string&)> warn = [](const std::string&) {};
  Roles roles = {};  ///< see to starts()

  /// Whether a rank of this role runs in or under this process.
  bool starts(const std::string& role) const;
  bool given(std::string_view option) const { return options.given(option); }
  /// The value of an option, one that every job has included.
  std::string text(std::string_view option) const { return options.text(option); }
};

/// What is known of a kind of job before its options are.
struct JobInfo {
  std::string name;
  std::string summary;      ///< in a line
  std::string description;  ///< a paragraph for the help text and the man page
  std::string details;      ///< what the man page alone says besides; for its form see app/man.cpp
  std::vector<Example> examples;
  /// The job's own lines, and what it adds to those that any job prints.
  std::vector<Event> events;
  OptionTable table;
  /// Changes rows of the whole table, those that every job has included; may be empty.
  std::function<void(OptionTable&)> change;
  std::vector<cuda::DeviceRole> roles;
  std::string count_option;  ///< says how many ranks there are of one of the roles
  int fixed_ranks = 0;       ///< those of the other roles
  bool has_local = false;
  bool has_predict = false;
  bool has_stages = false;  ///< `--inject stage=...` has something to do
  /// The first mistake of the job's author in the declaration, which main() reports; empty if there
  /// is none. Such a job does not run.
  std::string mistake;
};

/// A Definition, whatever its options are.
class AnyDefinition {
 public:
  virtual ~AnyDefinition() = default;

  const JobInfo& info() const { return info_; }
  /// Derives the defaults that follow from other options.
  virtual void complete(ParsedOptions& parsed) const = 0;
  /// Throws for options that do not go together, and for what they name and is not there.
  virtual void check(const Preflight& preflight) const = 0;
  /// A text to print in place of running the job.
  virtual std::optional<std::string> answer(const ParsedOptions& parsed) const = 0;
  /// GPUs, 0 and on, that a rank takes in place of its `--device`; none: as that says.
  virtual std::optional<int> gpus(const ParsedOptions& parsed, const std::string& rank) const = 0;
  virtual Roles roles(const ParsedOptions& parsed) const = 0;

  /// One rank of the job, to its end. Throws base::Exception, as the others do.
  virtual Outcome run(const ParsedOptions& parsed, const Job& job, EventSink& sink) const = 0;
  /// The whole job in this process.
  virtual Outcome run_local(const ParsedOptions& parsed, const Job& job, EventSink& sink) const = 0;
  /// What the checkpoint's model makes of the examples in `input`.
  virtual Outcome run_predict(const ParsedOptions& parsed, const Job& job,
                              const std::string& checkpoint, const std::string& input,
                              EventSink& sink) const = 0;

 protected:
  JobInfo info_;
};

/// One rank of a job, whatever job: see Definition::run().
struct RankBody {
  std::string cmd;
  Roles roles;  ///< rank 0's hold
  std::vector<std::function<void(rpc::Agent&)>> exposures;
  /// Once rank 0's options are known: what they make of the job.
  struct Known {
    Roles roles;
    CheckpointOptions checkpoint;
    OptionMap options;                    ///< as a checkpoint remembers them
    std::vector<std::string> must_agree;  ///< those that have to be the same
    int min_trainers = 1;                 ///< as `--min-trainers`
  };
  std::function<Known(int rank, const OptionMap& of_rank_0)> adopt;
  std::function<void(Rank&)> prepare, run;
};
Outcome run_rank(const Job& job, EventSink& sink, const RankBody& body);
/// The whole job in this process.
Outcome run_local(const Job& job, EventSink& sink, const std::string& cmd,
                  const RankBody::Known& known, const std::function<void(Local&)>& run);

/// The options that a checkpoint remembers, of these values.
RankBody::Known known_options(const OptionTable& table, const OptionMap& values);

/// A kind of job: its options, its ranks by their roles and what each of them does. What Options
/// declares by
///
///   static void describe(job::OptionList<Options>& list);
///
/// and what it inherits (see options.h) is the command line. See src/README.md, "The job kit".
template <class Options>
class Definition final : public AnyDefinition {
 public:
  using Main = std::function<void(Rank&, const Options&)>;
  using Count = std::variant<int, int Options::*>;
  using Use = cuda::DeviceRole::Use;
  /// Tells what the user gave.
  using Given = std::function<bool(std::string_view option)>;

  Definition(std::string name, std::string summary) {
    info_.name = std::move(name);
    info_.summary = std::move(summary);
    declare([this] {
      describe_inherited(list_);
      list_.group("Model and data");
      Options::describe(list_);
    });
    info_.table = list_.table();
    if constexpr (std::is_base_of_v<TrainerOptions, Options>) {
      info_.events = trainer_events(find_option(info_.table, "min-trainers") != nullptr);
    }
  }

  // What is said is kept as JobInfo has it.

  Definition& describe(std::string text) { return set(info_.description, std::move(text)); }
  Definition& details(std::string text) { return set(info_.details, std::move(text)); }
  Definition& example(std::string command, std::string what) {
    info_.examples.push_back({std::move(command), std::move(what)});
    return *this;
  }
  Definition& events(std::vector<Event> events) { return set(info_.events, std::move(events)); }

  Definition& has_stages() { return set(info_.has_stages, true); }
  Definition& change(std::function<void(OptionTable&)> change) {
    return set(info_.change, std::move(change));
  }
  /// One more; without `when`, more fields of one that there is.
  Definition& event(std::string name, std::string when, std::vector<Field> fields) {
    info_.events = with_events(std::move(info_.events),
                               {{std::move(name), std::move(when), std::move(fields)}});
    return *this;
  }

  /// Declares a metric of the job's evaluations: see nn::Evaluation. Call it after events().
  Definition& metric(const std::string& name, std::string what) {
    return declare([&] { add_metric(info_.events, name, std::move(what)); });
  }

  /// Adds the next ranks. If `count` is an option, which one role may have, or above 1, they are
  /// numbered by their rank, as in trainer3. `main` is what each does; without `main` a rank serves
  /// the others until they are done. A second role of that name, a fixed count below 1, and a
  /// member that no option sets are mistakes: see JobInfo.
  Definition& role(std::string name, Count count, Main main = {}, Use use = Use::kCompute,
                   std::string alias = {}) {
    return declare([&] {
      const auto refuse_if = [&name](bool wrong, const char* why) {
        if (wrong) base::invalid("the role " + name + ": " + why);
      };
      refuse_if(std::ranges::find(roles_, name, &RoleRow::name) != roles_.end(), "declared twice");
      if (const int* fixed = std::get_if<int>(&count)) {
        refuse_if(*fixed < 1, "it needs at least one rank");
        info_.fixed_ranks += *fixed;
      } else {
        refuse_if(!info_.count_option.empty(), "an option already sets another role's ranks");
        info_.count_option = list_.name_of(std::get<int Options::*>(count));
        refuse_if(info_.count_option.empty(), "no option sets its number of ranks");
      }
      info_.roles.push_back({name, std::move(alias), use});
      roles_.push_back({std::move(name), count, std::move(main)});
    });
  }

  /// Makes Module usable as nn::RemoteModule<Module>.
  template <class Module>
  Definition& expose(std::string name) {
    return expose(
        [name = std::move(name)](rpc::Agent& agent) { nn::expose_module<Module>(agent, name); });
  }
  /// Exposes functions and modules; on every rank, before it joins.
  Definition& expose(std::function<void(rpc::Agent&)> exposure) {
    exposures_.push_back(std::move(exposure));
    return *this;
  }

  /// On every rank, before the others are there: reads what may be wrong, so that nobody waits for
  /// it, and provides what its functions need.
  Definition& prepare(Main prepare) { return set(prepare_, std::move(prepare)); }

  /// What `--local` does; without it there is no such option.
  Definition& local(std::function<void(Local&, const Options&)> run) {
    info_.has_local = true;
    return set(local_, std::move(run));
  }
  /// What the command `predict` does with a checkpoint of the job: tells of each example in a file.
  /// The options are those that the checkpoint was saved with, without those that may change.
  /// `fields` are those of the job's `prediction` lines. To be called after events().
  Definition& predict(std::function<void(Predictions&, const Options&)> predict,
                      std::vector<Field> fields = label_fields()) {
    info_.has_predict = true;
    info_.events = with_events(std::move(info_.events), prediction_events(std::move(fields)));
    return set(predict_, std::move(predict));
  }
  /// Settles defaults that follow from other options.
  Definition& settle(std::function<void(Options&, const Given& given)> settle) {
    return set(settle_, std::move(settle));
  }

  // What the functions of these names do in AnyDefinition; without them they do nothing.

  Definition& check(std::function<void(const Options&, const Preflight&)> check) {
    return set(check_, std::move(check));
  }
  Definition& gpus(std::function<std::optional<int>(const Options&, const std::string& rank)> of) {
    return set(gpus_, std::move(of));
  }
  Definition& answer(std::function<std::optional<std::string>(const Options&)> answer) {
    return set(answer_, std::move(answer));
  }

  void complete(ParsedOptions& parsed) const override {
    for (const auto& [name, value] : list_.write(read(parsed))) {
      if (!parsed.given(name)) parsed.derive(name, value);
    }
  }
  void check(const Preflight& preflight) const override {
    check_options(read(preflight.options), preflight);
  }
  std::optional<std::string> answer(const ParsedOptions& parsed) const override {
    return answer_ ? answer_(read(parsed)) : std::nullopt;
  }
  std::optional<int> gpus(const ParsedOptions& parsed, const std::string& rank) const override {
    return gpus_ ? gpus_(read(parsed), rank) : std::nullopt;
  }

  Roles roles(const ParsedOptions& parsed) const override { return roles(read(parsed)); }
  Roles roles(const Options& options) const {
    Roles roles;
    for (const RoleRow& row : roles_) {
      const auto* member = std::get_if<int Options::*>(&row.count);
      const int count = member ? options.**member : std::get<int>(row.count);
      roles.add(row.name, count, member != nullptr || count > 1);
    }
    return roles;
  }

  Outcome run(const ParsedOptions& parsed, const Job& job, EventSink& sink) const override {
    return run(read(parsed), job, sink, [&](int rank, const OptionMap& of_rank_0) {
      const Options options = read(parsed.adopting(of_rank_0));
      check_options(options, {.options = parsed, .ranks = {rank}, .of_rank_0 = &of_rank_0});
      return options;
    });
  }
  /// The same without a command line. `adopt` makes another rank's options of rank 0's, if given.
  Outcome run(
      Options options, const Job& job, EventSink& sink,
      const std::function<Options(int rank, const OptionMap& of_rank_0)>& adopt = {}) const {
    RankBody body{.cmd = info_.name, .roles = roles(options), .exposures = exposures_};
    body.adopt = [&](int rank, const OptionMap& of_rank_0) {
      if (adopt && rank != 0) options = adopt(rank, of_rank_0);
      RankBody::Known known = known_of(options);
      known.roles = roles(options);
      return known;
    };
    body.prepare = [&](Rank& rank) {
      if (prepare_) prepare_(rank, options);
    };
    body.run = [&](Rank& rank) {
      for (const RoleRow& row : roles_) {
        if (row.name == rank.role() && row.main) row.main(rank, options);
      }
    };
    return run_rank(job, sink, body);
  }
  Outcome run_local(const ParsedOptions& parsed, const Job& job, EventSink& sink) const override {
    return run_local(read(parsed), job, sink);
  }
  Outcome run_local(const Options& options, const Job& job, EventSink& sink) const {
    return run_local_job(job, sink, [&](const Job& placed) {
      return job::run_local(placed, sink, info_.name, known_of(options),
                            [&](Local& local) { local_(local, options); });
    });
  }
  Outcome run_predict(const ParsedOptions& parsed, const Job& job, const std::string& checkpoint,
                      const std::string& input, EventSink& sink) const override {
    return run_local_job(job, sink, [&](const Job& placed) {
      return job::run_predict(placed, sink, checkpoint, input, [&](Predictions& predictions) {
        predict_(predictions, read(parsed));
      });
    });
  }

 private:
  struct RoleRow {
    std::string name;
    Count count;
    Main main;
  };

  /// Keeps the message of an exception of `part`, because main() is not there yet to catch it.
  Definition& declare(const auto& part) {
    try {
      part();
    } catch (const base::Exception& e) {
      if (info_.mistake.empty()) info_.mistake = e.error().message;
    }
    return *this;
  }

  template <class T>
  Definition& set(T& what, T value) {
    what = std::move(value);
    return *this;
  }

  Options read(const ParsedOptions& parsed) const {
    Options options = list_.read(parsed);
    if (settle_) {
      settle_(options, [&](std::string_view name) { return parsed.decided(std::string(name)); });
    }
    if constexpr (std::is_base_of_v<TrainerOptions, Options>) {
      settle_limits(options, parsed, Options().epochs);
    }
    return options;
  }

  void check_options(const Options& options, Preflight preflight) const {
    preflight.roles = roles(options);
    if constexpr (std::is_base_of_v<RuleOptions, Options>) options.rule();
    if constexpr (std::is_base_of_v<TrainerOptions, Options>) {
      if (options.epochs == 0 && options.steps == 0) base::invalid("--epochs 0 needs --steps");
      if (options.min_trainers > options.trainers) {
        base::invalid("--min-trainers " + std::to_string(options.min_trainers) +
                      ": the job has no more than --trainers " + std::to_string(options.trainers));
      }
      if (preflight.has_rank_0 && preflight.given("min-trainers") && options.mode == "sync") {
        preflight.warn(
            "--min-trainers has no effect with --mode sync: a trainer that is lost ends the job");
      }
    }
    if (check_) check_(options, preflight);
  }

  RankBody::Known known_of(const Options& options) const {
    RankBody::Known known = known_options(info_.table, list_.write(options));
    if constexpr (std::is_base_of_v<CommonOptions, Options>) known.checkpoint = options.checkpoint;
    if constexpr (std::is_base_of_v<TrainerOptions, Options>) {
      known.checkpoint.read_only = options.eval_only;
      known.min_trainers = options.min_trainers;
    }
    return known;
  }

  OptionList<Options> list_;
  std::vector<RoleRow> roles_;
  std::vector<std::function<void(rpc::Agent&)>> exposures_;
  Main prepare_;
  std::function<void(Local&, const Options&)> local_;
  std::function<void(Predictions&, const Options&)> predict_;
  std::function<void(Options&, const Given&)> settle_;
  std::function<void(const Options&, const Preflight&)> check_;
  std::function<std::optional<int>(const Options&, const std::string&)> gpus_;
  std::function<std::optional<std::string>(const Options&)> answer_;
};

template <class Options>
Definition<Options> define(std::string name, std::string summary) {
  return {std::move(name), std::move(summary)};
}

}  // namespace distrain::job
