#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "distrain/job/device_choice.h"
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
  bool local = false;                    ///< the whole job is in this process
  bool has_rank_0 = false;               ///< it runs in or under this process
  const OptionMap* of_rank_0 = nullptr;  ///< they have come from rank 0, which has these
  std::function<bool(std::string_view role)> starts = [](std::string_view) { return true; };
  std::function<bool(std::string_view option)> given = [](std::string_view) { return false; };
  /// The value of an option, one that every job has included.
  std::function<std::string(std::string_view option)> text;
  std::function<void(const std::string&)> warn = [](const std::string&) {};
};

/// Rank 0's options, made those of another rank, which may have paths of its own.
template <class Options>
using Adopt = std::function<Options(const OptionMap& of_rank_0)>;

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
  };
  std::function<Known(const OptionMap& of_rank_0)> adopt;
  std::function<void(Rank&)> prepare, run;
};
Outcome run_rank(const Job& job, EventSink& sink, const RankBody& body);
/// The whole job in this process.
Outcome run_local(const Job& job, EventSink& sink, const std::string& cmd,
                  const RankBody::Known& known, const std::function<void(Local&)>& run);

/// The options that a checkpoint remembers, of these values.
RankBody::Known known_options(const OptionTable& table, const OptionMap& values);

/// Throws `internal`: a second role whose number of ranks is an option.
[[noreturn]] void refuse_role(const std::string& name);

/// A kind of job: its options, its ranks by their roles and what each of them does. What Options
/// declares by
///
///   static void describe(job::OptionList<Options>& list);
///
/// and what it inherits (see options.h) is the command line. See src/README.md, "The job kit".
template <class Options>
class Definition {
 public:
  using Main = std::function<void(Rank&, const Options&)>;
  using Count = std::variant<int, int Options::*>;
  using Use = DeviceRole::Use;

  Definition(std::string name, std::string summary)
      : name_(std::move(name)), summary_(std::move(summary)) {
    if constexpr (std::is_base_of_v<TrainerOptions, Options>) events_ = trainer_events();
    describe_inherited(list_);
    list_.group("Model and data");
    Options::describe(list_);
  }

  /// For the help and the man page.
  Definition& describe(std::string text) {
    description_ = std::move(text);
    return *this;
  }
  /// What the man page alone says besides; for its form see app/man.cpp.
  Definition& details(std::string text) {
    details_ = std::move(text);
    return *this;
  }
  /// A command line, and what it shows.
  Definition& example(std::string command, std::string what) {
    examples_.push_back({std::move(command), std::move(what)});
    return *this;
  }
  /// The job's own lines, and what it adds to those that any job prints.
  Definition& events(std::vector<Event> events) {
    events_ = std::move(events);
    return *this;
  }
  /// One more; without `when`, more fields of one that there is.
  Definition& event(std::string name, std::string when, std::vector<Field> fields) {
    events_ =
        with_events(std::move(events_), {{std::move(name), std::move(when), std::move(fields)}});
    return *this;
  }

  /// The next ranks. With a count that is an option, which one role may have, they are numbered by
  /// their rank, as in trainer3. `main` is what each does; without one it serves
  /// the others until they are done.
  Definition& role(std::string name, Count count, Main main = {}, Use use = Use::kCompute,
                   std::string alias = {}) {
    if (std::holds_alternative<int Options::*>(count) && !count_option().empty()) {
      refuse_role(name);
    }
    roles_.push_back({std::move(name), count, std::move(main), use, std::move(alias)});
    return *this;
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
  Definition& prepare(Main prepare) {
    prepare_ = std::move(prepare);
    return *this;
  }

  /// What `--local` does; without it there is no such option.
  Definition& local(std::function<void(Local&, const Options&)> run) {
    local_ = std::move(run);
    return *this;
  }
  /// What the command `predict` does with a checkpoint of the job: tells of each example in a file.
  /// The options are those that the checkpoint was saved with, without those that may change.
  /// `fields` are those of the job's `prediction` lines. To be called after events().
  Definition& predict(std::function<void(Predictions&, const Options&)> predict,
                      std::vector<Field> fields = label_fields()) {
    predict_ = std::move(predict);
    events_ = with_events(std::move(events_), prediction_events(std::move(fields)));
    return *this;
  }
  /// Settles defaults that follow from other options. `given` tells what the user gave.
  Definition& settle(
      std::function<void(Options&, const std::function<bool(std::string_view)>& given)> settle) {
    settle_ = std::move(settle);
    return *this;
  }
  /// Throws for options that do not go together, and for what they name and is not there.
  Definition& check(std::function<void(const Options&, const Preflight&)> check) {
    check_ = std::move(check);
    return *this;
  }
  /// GPUs, 0 and on, that a rank takes in place of its `--device`; none: as that says.
  Definition& gpus(
      std::function<std::optional<int>(const Options&, const std::string& rank_name)> of) {
    gpus_ = std::move(of);
    return *this;
  }
  /// `--inject stage=...` has something to do.
  Definition& has_stages() {
    has_stages_ = true;
    return *this;
  }
  /// Changes rows of the whole table, those that every job has included.
  Definition& change(std::function<void(OptionTable&)> change) {
    change_ = std::move(change);
    return *this;
  }
  /// A text to print in place of running the job.
  Definition& answer(std::function<std::optional<std::string>(const Options&)> answer) {
    answer_ = std::move(answer);
    return *this;
  }

  const std::string& name() const { return name_; }
  const std::string& summary() const { return summary_; }
  const std::string& description() const { return description_; }
  const std::string& details() const { return details_; }
  const std::vector<Example>& examples() const { return examples_; }
  const std::vector<Event>& events() const { return events_; }
  const OptionList<Options>& options() const { return list_; }
  bool has_local() const { return local_ != nullptr; }
  bool has_predict() const { return predict_ != nullptr; }

  Roles roles(const Options& options) const {
    Roles roles;
    for (const RoleRow& row : roles_) {
      const auto* member = std::get_if<int Options::*>(&row.count);
      roles.add(row.name, member ? options.**member : std::get<int>(row.count), member != nullptr);
    }
    return roles;
  }
  std::vector<DeviceRole> device_roles() const {
    std::vector<DeviceRole> roles;
    for (const RoleRow& row : roles_) roles.push_back({row.name, row.alias, row.use});
    return roles;
  }
  /// How many ranks there are beside those of the role whose count is an option.
  int fixed_ranks() const {
    int fixed = 0;
    for (const RoleRow& row : roles_) {
      if (const int* count = std::get_if<int>(&row.count)) fixed += *count;
    }
    return fixed;
  }
  /// The name of that option.
  std::string count_option() const {
    for (const RoleRow& row : roles_) {
      if (const auto* member = std::get_if<int Options::*>(&row.count)) {
        return list_.name_of(*member);
      }
    }
    return {};
  }

  void settle(Options& options, const std::function<bool(std::string_view)>& given) const {
    if (settle_) settle_(options, given);
  }
  void check(const Options& options, const Preflight& preflight) const {
    if constexpr (std::is_base_of_v<RuleOptions, Options>) options.rule();
    if (check_) check_(options, preflight);
  }
  std::optional<int> gpus_of(const Options& options, const std::string& rank_name) const {
    return gpus_ ? gpus_(options, rank_name) : std::nullopt;
  }
  bool with_stages() const { return has_stages_; }
  void change(OptionTable& table) const {
    if (change_) change_(table);
  }
  std::optional<std::string> answer(const Options& options) const {
    return answer_ ? answer_(options) : std::nullopt;
  }

  /// One rank of the job, to its end. `own` are its options if it is rank 0; otherwise `adopt`
  /// makes them of rank 0's. Throws base::Exception.
  Outcome run(const Options& own, const Job& job, const Adopt<Options>& adopt,
              EventSink& sink) const {
    Options options = own;
    RankBody body;
    body.cmd = name_;
    body.roles = roles(own);
    body.exposures = exposures_;
    body.adopt = [&](const OptionMap& of_rank_0) {
      if (job.rank != 0) options = adopt(of_rank_0);
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
  Outcome run_local(const Options& options, const Job& job, EventSink& sink) const {
    return job::run_local(job, sink, name_, known_of(options),
                          [&](Local& local) { local_(local, options); });
  }
  Outcome run_predict(const Options& options, const Job& job, const std::string& checkpoint,
                      const std::string& input, EventSink& sink) const {
    return job::run_predict(job, sink, checkpoint, input,
                            [&](Predictions& predictions) { predict_(predictions, options); });
  }

 private:
  struct RoleRow {
    std::string name;
    Count count;
    Main main;
    Use use;
    std::string alias;
  };

  RankBody::Known known_of(const Options& options) const {
    RankBody::Known known = known_options(list_.table(), list_.write(options));
    if constexpr (std::is_base_of_v<CommonOptions, Options>) known.checkpoint = options.checkpoint;
    return known;
  }

  const std::string name_, summary_;
  std::string description_, details_;
  std::vector<Example> examples_;
  std::vector<Event> events_;
  OptionList<Options> list_;
  std::vector<RoleRow> roles_;
  std::vector<std::function<void(rpc::Agent&)>> exposures_;
  Main prepare_;
  std::function<void(Local&, const Options&)> local_;
  std::function<void(Predictions&, const Options&)> predict_;
  std::function<void(Options&, const std::function<bool(std::string_view)>&)> settle_;
  std::function<void(const Options&, const Preflight&)> check_;
  std::function<std::optional<int>(const Options&, const std::string&)> gpus_;
  bool has_stages_ = false;
  std::function<void(OptionTable&)> change_;
  std::function<std::optional<std::string>(const Options&)> answer_;
};

template <class Options>
Definition<Options> define(std::string name, std::string summary) {
  return {std::move(name), std::move(summary)};
}

}  // namespace distrain::job
