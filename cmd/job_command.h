#pragma once

#include <functional>
#include <string>
#include <vector>

#include "distrain/base/error.h"
#include "distrain/scenario/job.h"
#include "help.h"
#include "options.h"
#include "placement.h"
#include "process_setup.h"

namespace distrain::cmd {

/// A subcommand that is a job of ranks: what differs from one scenario to the next.
struct JobCommand {
  CommandLine line;
  std::string description;  ///< for the help text
  std::vector<std::string> examples;
  OptionTable table;
  SizeRule size;
  /// Throws for options that do not go together and for files that are not there; may warn.
  std::function<void(const ParsedOptions&, Placement&)> check;
  std::function<std::string(const ParsedOptions&, int rank)> role;
  /// One rank, or the whole job in this process when `local`.
  std::function<scenario::Outcome(const ParsedOptions&, const scenario::Job&, bool local,
                                  int threads, scenario::EventSink&)>
      run;
};

/// Parses `args`, finds out which ranks run here, and runs them. Gives back the exit code.
int run_job_command(const JobCommand& command, const std::vector<std::string>& args,
                    TimePoint started);

/// Rank 0's options over this rank's own, as `adopt` of the scenarios needs them: kRank options
/// stay this rank's, kInput ones too if they were given here. Throws `invalid`.
ParsedOptions adopt_options(const ParsedOptions& own, const OptionMap& of_rank_0);

/// A failure before any rank ran: `error` and `end` on stdout, one line on stderr.
int report_failure(const std::string& cmd, const base::Error& error, TimePoint started);

/// Text that goes to stdout instead of JSON lines. Gives back the exit code.
int print_text(const std::string& text);

}  // namespace distrain::cmd
