#pragma once

#include <memory>
#include <string>
#include <vector>

#include "distrain/job/definition.h"

namespace distrain::app {

/// A subcommand that runs a job. Its option table includes the options that all jobs share.
struct JobCommand : job::JobInfo {
  template <class Options>
  JobCommand(const job::Definition<Options>& definition)  // NOLINT: implicit by design
      : JobCommand(std::make_shared<const job::Definition<Options>>(definition)) {}
  explicit JobCommand(std::shared_ptr<const job::AnyDefinition> definition);

  std::shared_ptr<const job::AnyDefinition> definition;
};

/// Texts about the whole program, which its help, its man page and --version show.
struct About {
  std::string summary;                 ///< one line
  std::string description;             ///< a paragraph
  std::vector<job::Example> examples;  ///< help shows the first three, the man page all of them
  std::string version = {};            ///< the version of the program, not of distrain
};

/// Runs a program whose subcommands are jobs: parses the command line and runs the launcher or a
/// rank. Ends the process with the exit code; returns only if stdout is closed. Call it first in
/// main(), before LibTorch starts threads in its first parallel operation. If the process has other
/// threads, each forked rank executes the program again from the start, which takes longer.
///
/// The program's name is the file name of argv[0]. Its other subcommands are help, man, completion,
/// schema and, if a job supports it, predict. A user of a program with one job may omit its name.
int main(int argc, char** argv, const std::vector<JobCommand>& commands, const About& about = {});

}  // namespace distrain::app
