#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "distrain/app/devices.h"
#include "distrain/app/options.h"
#include "distrain/app/placement.h"
#include "distrain/base/clock.h"
#include "distrain/base/error.h"
#include "distrain/job/definition.h"
#include "distrain/job/job.h"

namespace distrain::app {

/// The name of a subcommand and what it does in a line.
struct CommandLine {
  std::string name;
  std::string summary;
};

using job::Example;

/// A subcommand that is a job of ranks: what a job::Definition says, for the command line.
struct JobCommand {
  JobCommand() = default;
  template <class Options>
  JobCommand(const job::Definition<Options>& definition);  // NOLINT: implicit by design

  CommandLine line;
  std::string description;  ///< a paragraph for the help text and the man page
  std::string details;      ///< what the man page alone says besides; for its form see app/man.cpp
  std::vector<Example> examples;
  /// The job's own lines, and what it adds to those that any job prints.
  std::vector<job::Event> events;
  OptionTable table;
  SizeRule size;
  /// Throws for options that do not go together and for files that are not there; may warn.
  std::function<void(const ParsedOptions&, Placement&)> check;
  /// Derives defaults that follow from other options; may be empty. Comes before `check`.
  std::function<void(ParsedOptions&)> complete;
  /// A text to print in place of running the job; may be empty.
  std::function<std::optional<std::string>(const ParsedOptions&)> answer;
  bool has_stages = false;  ///< for `--inject stage=...`
  DeviceRules devices;
  std::function<std::string(const ParsedOptions&, int rank)> role;
  /// One rank, or the whole job in this process when `local`.
  std::function<job::Outcome(const ParsedOptions&, const job::Job&, bool local, job::EventSink&)>
      run;
  /// What the checkpoint's model makes of the examples in `input`; empty: the job has no such
  /// thing.
  std::function<job::Outcome(const ParsedOptions&, const job::Job&, const std::string& checkpoint,
                             const std::string& input, job::EventSink&)>
      predict;
};

/// Parses `args`, finds out which ranks run here, and runs them. Gives back the exit code.
int run_job_command(const JobCommand& command, const std::vector<std::string>& args,
                    base::TimePoint started);

/// The command `predict`: CHECKPOINT [FILE] [OPTION]..., of whichever of the jobs saved it.
int run_predict_command(const std::vector<JobCommand>& commands,
                        const std::vector<std::string>& args, base::TimePoint started);

/// Rank 0's options over this rank's own, as `adopt` of the scenarios needs them: kRank options
/// stay this rank's, kInput ones too if they were given here. Throws `invalid`.
ParsedOptions adopt_options(const ParsedOptions& own, const OptionMap& of_rank_0);

namespace detail {

/// Rows of every job after the job's own.
OptionTable whole_table(OptionTable own, bool has_local);
/// Paths that must be there, options without effect.
void check_table(const ParsedOptions& options, Placement& placement);
job::Preflight preflight_of(const ParsedOptions& options, Placement& placement,
                            const job::Roles& roles);

}  // namespace detail

template <class Options>
JobCommand::JobCommand(const job::Definition<Options>& definition) {
  const auto job = std::make_shared<const job::Definition<Options>>(definition);
  line = {job->name(), job->summary()};
  description = job->description();
  details = job->details();
  events = job->events();
  examples = job->examples();
  table = detail::whole_table(job->options().table(), job->has_local());
  job->change(table);
  size = {job->count_option(), job->fixed_ranks()};
  has_stages = job->with_stages();
  const auto read = [job](const ParsedOptions& parsed) {
    Options options = job->options().read(parsed);
    job->settle(options, [&](std::string_view name) { return parsed.decided(std::string(name)); });
    return options;
  };
  complete = [job, read](ParsedOptions& parsed) {
    for (const auto& [name, value] : job->options().write(read(parsed))) {
      if (!parsed.given(name)) parsed.derive(name, value);
    }
  };
  check = [job, read](const ParsedOptions& parsed, Placement& placement) {
    detail::check_table(parsed, placement);
    const Options options = read(parsed);
    job->check(options, detail::preflight_of(parsed, placement, job->roles(options)));
  };
  answer = [job, read](const ParsedOptions& parsed) { return job->answer(read(parsed)); };
  devices.roles = job->device_roles();
  devices.gpus_of = [job, read](const ParsedOptions& parsed, const std::string& rank_name) {
    return job->gpus_of(read(parsed), rank_name);
  };
  role = [job, read](const ParsedOptions& parsed, int rank) {
    return job->roles(read(parsed)).name_of(rank);
  };
  const auto alone = [](const job::Job& own, job::EventSink& sink, const auto& run_placed) {
    return job::run_local_job(own, sink, [&] {
      job::Job placed = own;
      placed.devices = own.choose_devices("local", {});
      return run_placed(placed);
    });
  };
  if (job->has_predict()) {
    predict = [job, read, alone](const ParsedOptions& parsed, const job::Job& own,
                                 const std::string& checkpoint, const std::string& input,
                                 job::EventSink& sink) {
      return alone(own, sink, [&](const job::Job& placed) {
        return job->run_predict(read(parsed), placed, checkpoint, input, sink);
      });
    };
  }
  run = [job, read, alone](const ParsedOptions& parsed, const job::Job& own, bool local,
                           job::EventSink& sink) {
    if (local) {
      return alone(own, sink, [&](const job::Job& placed) {
        return job->run_local(read(parsed), placed, sink);
      });
    }
    const auto adopt = [&](const OptionMap& of_rank_0) {
      const ParsedOptions adopted = adopt_options(parsed, of_rank_0);
      const Options options = read(adopted);
      job::Preflight preflight;
      preflight.of_rank_0 = &of_rank_0;
      preflight.starts = [role = job->roles(options).of(own.rank).name](std::string_view name) {
        return name == role;
      };
      preflight.given = [&](std::string_view name) { return parsed.given(name); };
      preflight.text = [&](std::string_view name) { return parsed.text(name); };
      job->check(options, preflight);
      return options;
    };
    return job->run(read(parsed), own, adopt, sink);
  };
}

/// A failure before any rank ran: `error` and `end` on stdout, one line on stderr.
int report_failure(const std::string& cmd, const base::Error& error, base::TimePoint started);

/// Text that goes to stdout instead of JSON lines. Gives back the exit code.
int print_text(const std::string& text);

}  // namespace distrain::app
