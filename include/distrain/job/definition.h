#pragma once

#include <algorithm>
#include <variant>

#include "distrain/job/device_choice.h"
#include "distrain/job/predictions.h"
#include "distrain/job/single_process_training.h"

namespace distrain::job {

/// An example command line and its description, for the help text.
struct Example {
  std::string command;
  std::string what;
};

/// The input of a job's `check` function, which the command calls before any rank starts or joins.
struct Preflight {
  const ParsedOptions& options;          ///< the options that this process was given
  bool local = false;                    ///< the whole job runs in this process
  bool has_rank_0 = false;               ///< rank 0 is this process or its child
  std::vector<int> ranks;                ///< the ranks that are this process or its children
  const OptionMap* of_rank_0 = nullptr;  ///< rank 0's options if this rank has received them
  std::function<void(const std::string&)> warn = [](const std::string&) {};
  Roles roles = {};  ///< the roles of the job, for starts()

  /// Returns true if this process or one of its children runs a rank of `role`.
  bool starts(const std::string& role) const {
    return local ||
           std::ranges::any_of(ranks, [&](int rank) { return roles.named(role).has(rank); });
  }
  bool given(std::string_view option) const { return options.given(option); }
  /// Returns the value of any option, including those that every job has.
  std::string text(std::string_view option) const { return options.text(option); }
};

/// The part of a job's definition that does not depend on the type of its options.
struct JobInfo {
  std::string name;
  std::string summary;      ///< one line
  std::string description;  ///< a paragraph for the help text and the man page
  std::string details;      ///< further text for the man page only; see app/man.cpp for its format
  std::vector<Example> examples;
  std::vector<Event> events;  ///< the job's own events, and fields it adds to common_events()
  OptionTable table;
  /// If not null, called to change the full option table, which has the options of every job, too.
  std::function<void(OptionTable&)> change;
  std::vector<DeviceRole> roles;
  std::string count_option;  ///< the option from which, or for which, `--world-size` is computed
  bool has_local = false;
  bool has_predict = false;
  bool has_stages = false;  ///< `--inject stage=...` has an effect
  /// The first mistake in the declaration, or empty. main() reports it instead of running the job.
  std::string mistake;
};

/// The interface of Definition<Options> that does not depend on the type Options.
class AnyDefinition {
 public:
  virtual ~AnyDefinition() = default;

  const JobInfo& info() const { return info_; }
  /// Sets those defaults in `parsed` that depend on other options.
  virtual void complete(ParsedOptions& parsed) const = 0;
  /// Throws if options conflict, or if an option names something missing, such as a file.
  virtual void check(const Preflight& preflight) const = 0;
  /// Returns a text to print instead of running the job, if the options ask for one.
  virtual std::optional<std::string> answer(const ParsedOptions& parsed) const = 0;
  /// Returns N if the rank uses GPUs 0 to N - 1, 0 for the CPU, or nullopt if `--device` decides.
  virtual std::optional<int> gpus(const ParsedOptions& parsed, const std::string& rank) const = 0;
  virtual Roles roles(const ParsedOptions& parsed) const = 0;
  /// Returns the role whose ranks write parts of checkpoints; empty if only rank 0 writes.
  virtual std::string saving_role(const ParsedOptions& parsed) const = 0;
  /// Returns true if the ranks compute in turns, each of them waiting for the one that computes.
  virtual bool takes_turns(const ParsedOptions& parsed) const = 0;

  /// Runs one rank of the job to its end. This and the next two functions throw base::Exception.
  virtual Outcome run(const ParsedOptions& parsed, const Job& job, EventSink& sink) const = 0;
  /// Runs the whole job in this process.
  virtual Outcome run_local(const ParsedOptions& parsed, const Job& job, EventSink& sink) const = 0;
  /// Applies the checkpoint's model to the examples in `input`.
  virtual Outcome run_predict(const ParsedOptions& parsed, const Job& job,
                              const std::string& checkpoint, const std::string& input,
                              EventSink& sink) const = 0;

 protected:
  JobInfo info_;
};

/// The job-specific functions and settings that run_rank() needs; see Definition::run().
struct RankBody {
  std::string cmd;
  Roles roles;  ///< the roles by this rank's own options; Known::roles replaces them
  std::vector<std::function<void(rpc::Agent&)>> exposures;
  /// The settings that `adopt` derives from rank 0's options.
  struct Known {
    Roles roles;
    CheckpointOptions checkpoint;
    OptionMap options;     ///< the options that checkpoints store
    OptionMap must_agree;  ///< the defaults of the options that a resumed job must not change
    int min_trainers = 1;  ///< `--min-trainers`
  };
  std::function<Known(int rank, const OptionMap& of_rank_0)> adopt;
  std::function<void(Rank&)> prepare, run;
};
Outcome run_rank(const Job& job, EventSink& sink, const RankBody& body);
Outcome run_local(const Job& job, EventSink& sink, const std::string& cmd,
                  const RankBody::Known& known, const std::function<void(SingleProcess&)>& run);

/// Returns a Known with only `options` and `must_agree` set. `values` has the value of each option.
RankBody::Known known_options(const OptionTable& table, const OptionMap& values);

/// Defines a job: its options, its roles and the function of each role. The command line has the
/// options that Options inherits (see options.h) and those that Options declares in its function
///
///   static void describe(job::OptionList<Options>& list);
///
/// See src/README.md, "The job kit".
template <class Options>
class Definition final : public AnyDefinition {
 public:
  using Main = std::function<void(Rank&, const Options&)>;
  using Count = std::variant<int, int Options::*>;
  using Use = DeviceRole::Use;
  /// A function that returns true if the user gave the option or a checkpoint has its value.
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
    if constexpr (std::is_base_of_v<RuleOptions, Options>) RuleOptions::name_rules(info_.table);
    if constexpr (std::is_base_of_v<TrainerOptions, Options>) {
      info_.events = trainer_events(find_option(info_.table, "min-trainers") != nullptr);
    }
  }

  // Each of the next functions sets, or adds to, the member of JobInfo that its name refers to.

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
  /// Adds an event. If the description `when` is empty, adds `fields` to the existing event.
  Definition& event(std::string name, std::string when, std::vector<Field> fields) {
    info_.events = with_events(std::move(info_.events),
                               {{std::move(name), std::move(when), std::move(fields)}});
    return *this;
  }
  /// Declares a metric of the job's evaluations (see Evaluation). Call metric() after events().
  Definition& metric(const std::string& name, std::string what) {
    return declare([&] { add_metric(info_.events, name, std::move(what)); });
  }

  /// Adds a role with the next `count` ranks, a number or an option. `--world-size` sets the first
  /// such option of a role with a `main`, or else the first one. The ranks' names end in their
  /// number, as in trainer3, if there are several or `--world-size` sets the role's option. Each
  /// rank runs `main` or, if `main` is empty, serves calls until the other ranks are done.
  Definition& role(std::string name, Count count, Main main = {}, Use use = Use::kCompute,
                   std::string alias = {}) {
    return declare([&] {
      const auto refuse_if = [&name](bool wrong, const char* why) {
        if (wrong) base::invalid("the role " + name + ": " + why);
      };
      refuse_if(std::ranges::find(roles_, name, &RoleRow::name) != roles_.end(), "declared twice");
      if (const int* fixed = std::get_if<int>(&count)) {
        refuse_if(*fixed < 1, "it needs at least one rank");
      } else {
        std::string option = list_.name_of(std::get<int Options::*>(count));
        refuse_if(option.empty(), "no option sets its number of ranks");
        const bool is_main = info_.count_option.empty() || (main && !has_main_count_);
        if (main) has_main_count_ = true;
        if (is_main) info_.count_option = std::move(option);
      }
      info_.roles.push_back({name, std::move(alias), use});
      roles_.push_back({std::move(name), count, std::move(main)});
    });
  }

  /// Lets ranks create a `Module` on other ranks by nn::RemoteModule<Module>.
  template <class Module>
  Definition& expose(std::string name) {
    return expose(
        [name = std::move(name)](rpc::Agent& agent) { nn::expose_module<Module>(agent, name); });
  }
  /// Calls `exposure`, which exposes functions to other ranks, on every rank before the rank joins.
  Definition& expose(std::function<void(rpc::Agent&)> exposure) {
    exposures_.push_back(std::move(exposure));
    return *this;
  }

  /// Calls `prepare` on every rank while the rank joins. `prepare` reads inputs, so that their
  /// errors are reported early, and provides the objects that exposed functions need.
  Definition& prepare(Main prepare) { return set(prepare_, std::move(prepare)); }

  /// Adds the option `--local`, which calls `run`.
  Definition& local(std::function<void(SingleProcess&, const Options&)> run) {
    info_.has_local = true;
    return set(local_, std::move(run));
  }
  /// Adds the command `predict`, which calls `predict` with a checkpoint of the job and an input
  /// file. Its options come from the checkpoint, except those declared by may_change(). `fields`
  /// are the fields of `prediction` lines. Call predict() after events().
  Definition& predict(std::function<void(Predictions&, const Options&)> predict,
                      std::vector<Field> fields = label_fields()) {
    info_.has_predict = true;
    info_.events = with_events(std::move(info_.events), prediction_events(std::move(fields)));
    return set(predict_, std::move(predict));
  }
  /// Sets the function that computes defaults which depend on other options.
  Definition& derive_defaults(std::function<void(Options&, const Given& given)> derive_defaults) {
    return set(derive_defaults_, std::move(derive_defaults));
  }

  // Each of the next functions sets the implementation of the AnyDefinition function of its name.

  Definition& check(std::function<void(const Options&, const Preflight&)> check) {
    return set(check_, std::move(check));
  }
  Definition& gpus(std::function<std::optional<int>(const Options&, const std::string& rank)> of) {
    return set(gpus_, std::move(of));
  }
  Definition& saving_role(std::function<std::string(const Options&)> of) {
    return set(saving_role_, std::move(of));
  }
  /// Each rank of such a job runs one exposed function at a time, not counting functions that wait.
  Definition& takes_turns(std::function<bool(const Options&)> of) {
    return set(takes_turns_, std::move(of));
  }
  Definition& answer(std::function<std::optional<std::string>(const Options&)> answer) {
    return set(answer_, std::move(answer));
  }

  void complete(ParsedOptions& parsed) const override {
    for (const auto& [name, value] : list_.write(read(parsed))) {
      if (!parsed.given(name) && parsed.text(name) != value) parsed.derive(name, value);
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

  std::string saving_role(const ParsedOptions& parsed) const override {
    return saving_role_ ? saving_role_(read(parsed)) : "";
  }
  bool takes_turns(const ParsedOptions& parsed) const override {
    return takes_turns_ && takes_turns_(read(parsed));
  }
  Roles roles(const ParsedOptions& parsed) const override { return roles(read(parsed)); }
  Roles roles(const Options& options) const {
    Roles roles;
    for (const RoleRow& row : roles_) {
      const auto* member = std::get_if<int Options::*>(&row.count);
      const int count = member ? options.**member : std::get<int>(row.count);
      const bool is_main = member && list_.name_of(*member) == info_.count_option;
      roles.add(row.name, count, is_main || count > 1);
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
  /// Runs one rank. If `adopt` is set, each rank other than 0 calls it with rank 0's options and
  /// uses the returned options instead of `options`.
  Outcome run(
      Options options, const Job& job, EventSink& sink,
      const std::function<Options(int rank, const OptionMap& of_rank_0)>& adopt = {}) const {
    RankBody body{.cmd = info_.name, .roles = roles(options), .exposures = exposures_};
    body.adopt = [&](int rank, const OptionMap& of_rank_0) {
      if (adopt && rank != 0) options = adopt(rank, of_rank_0);
      return known_of(options);
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
    return job::run_local(job, sink, info_.name, known_of(options),
                          [&](SingleProcess& local) { local_(local, options); });
  }
  Outcome run_predict(const ParsedOptions& parsed, const Job& job, const std::string& checkpoint,
                      const std::string& input, EventSink& sink) const override {
    return job::run_predict(job, sink, checkpoint, input,
                            [&](Predictions& predictions) { predict_(predictions, read(parsed)); });
  }

 private:
  struct RoleRow {
    std::string name;
    Count count;
    Main main;
  };

  /// Calls `part`. Stores the first exception's message, because main() cannot catch it yet.
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
    if (derive_defaults_) {
      derive_defaults_(options,
                       [&](std::string_view name) { return parsed.decided(std::string(name)); });
    }
    if constexpr (std::is_base_of_v<TrainerOptions, Options>) {
      derive_limits(options, parsed, Options().epochs);
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
    known.roles = roles(options);
    if constexpr (std::is_base_of_v<CommonOptions, Options>) known.checkpoint = options.checkpoint;
    if constexpr (std::is_base_of_v<TrainerOptions, Options>) {
      known.checkpoint.read_only = options.eval_only;
      known.min_trainers = options.min_trainers;
    }
    return known;
  }

  OptionList<Options> list_;
  std::vector<RoleRow> roles_;
  bool has_main_count_ = false;  // a role with a `main` has info_.count_option
  std::vector<std::function<void(rpc::Agent&)>> exposures_;
  Main prepare_;
  std::function<void(SingleProcess&, const Options&)> local_;
  std::function<void(Predictions&, const Options&)> predict_;
  std::function<void(Options&, const Given&)> derive_defaults_;
  std::function<void(const Options&, const Preflight&)> check_;
  std::function<std::optional<int>(const Options&, const std::string&)> gpus_;
  std::function<std::string(const Options&)> saving_role_;
  std::function<bool(const Options&)> takes_turns_;
  std::function<std::optional<std::string>(const Options&)> answer_;
};

template <class Options>
Definition<Options> define(std::string name, std::string summary) {
  return {std::move(name), std::move(summary)};
}

}  // namespace distrain::job
