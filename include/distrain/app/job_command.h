#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "distrain/app/devices.h"
#include "distrain/app/options.h"
#include "distrain/app/placement.h"
#include "distrain/base/clock.h"
#include "distrain/base/error.h"
#include "distrain/job/checkpoint_options.h"
#include "distrain/job/events.h"
#include "distrain/job/job.h"
#include "distrain/job/local_job.h"

namespace distrain::app {

/// The name of a subcommand and what it does in a line.
struct CommandLine {
  std::string name;
  std::string summary;
};

/// A command line, and what it shows.
struct Example {
  std::string command;
  std::string what;
};

/// A subcommand that is a job of ranks: what differs from one scenario to the next.
struct JobCommand {
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
  std::function<job::Outcome(const ParsedOptions&, const job::Job&, bool local, int threads,
                             job::EventSink&)>
      run;
};

/// A scenario's own functions, as `run` of a JobCommand needs them.
template <class Options>
struct ScenarioCalls {
  using Adopt = std::function<Options(const OptionMap& of_rank_0)>;

  Options (*options)(const ParsedOptions&);
  job::Outcome (*run)(const Options&, const job::Job&, const Adopt&, job::EventSink&);
  job::Outcome (*run_local)(const Options&, const job::Job&, job::EventSink&);
  /// Throws when this rank cannot do with what rank 0 told; may be null.
  void (*check_adopted)(const ParsedOptions&, const OptionMap& of_rank_0) = nullptr;
};

/// Parses `args`, finds out which ranks run here, and runs them. Gives back the exit code.
int run_job_command(const JobCommand& command, const std::vector<std::string>& args,
                    base::TimePoint started);

/// Rank 0's options over this rank's own, as `adopt` of the scenarios needs them: kRank options
/// stay this rank's, kInput ones too if they were given here. Throws `invalid`.
ParsedOptions adopt_options(const ParsedOptions& own, const OptionMap& of_rank_0);

template <class Options>
auto run_of(const ScenarioCalls<Options>& calls) {
  return [calls](const ParsedOptions& parsed, const job::Job& job, bool local, int threads,
                 job::EventSink& sink) {
    const auto options = [&calls, threads](const ParsedOptions& from) {
      Options result = calls.options(from);
      result.threads = threads;
      return result;
    };
    if (local) {
      return job::run_local_job(job, sink, [&] {
        job::Job placed = job;
        placed.devices = job.choose_devices("local", {});
        return calls.run_local(options(parsed), placed, sink);
      });
    }
    const auto adopt = [&](const OptionMap& of_rank_0) {
      const ParsedOptions adopted = adopt_options(parsed, of_rank_0);
      if (calls.check_adopted) calls.check_adopted(adopted, of_rank_0);
      return options(adopted);
    };
    return calls.run(options(parsed), job, adopt, sink);
  };
}

/// What the `--checkpoint` options say.
job::CheckpointOptions checkpoint_options(const ParsedOptions& parsed);

/// A scenario's Options with those that every scenario has; `threads` comes from run_of().
template <class Options>
Options common_options(const ParsedOptions& parsed) {
  Options options;
  options.seed = static_cast<uint64_t>(parsed.integer("seed"));
  options.log_interval = parsed.whole("log-interval");
  options.checkpoint = checkpoint_options(parsed);
  return options;
}

/// And with those that a scenario has whose trainers go through data in epochs.
template <class Options>
Options trainer_options(const ParsedOptions& parsed) {
  auto options = common_options<Options>(parsed);
  options.trainers = parsed.whole("trainers");
  options.epochs = parsed.whole("epochs");
  options.steps = parsed.integer("steps");
  options.batch_size = parsed.whole("batch-size");
  options.lr = parsed.real("lr");
  options.mode = parsed.text("mode");
  options.data = parsed.text("data");
  return options;
}

/// A failure before any rank ran: `error` and `end` on stdout, one line on stderr.
int report_failure(const std::string& cmd, const base::Error& error, base::TimePoint started);

/// Text that goes to stdout instead of JSON lines. Gives back the exit code.
int print_text(const std::string& text);

}  // namespace distrain::app
