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

/// The texts about a whole program in its help, man page and --version.
struct About {
  std::string summary;                 ///< one line
  std::string description;             ///< a paragraph
  std::vector<job::Example> examples;  ///< help shows the first three, the man page all of them
  std::string version = {};            ///< of the program, not of distrain
};

/// Runs a program whose subcommands are jobs: parses the command line and runs the launcher or a
/// rank. Ends the process with the exit code; returns only if stdout is closed. Call it first in
/// main(): if the process already has threads, such as LibTorch's after a parallel operation, each
/// rank is a new process that runs main() from its start, which takes longer than a fork.
///
/// The program's name is the file name of argv[0]. Its other subcommands are help, man, completion
/// and schema. If there is only one job, its name can be left out.
int main(int argc, char** argv, const std::vector<JobCommand>& commands, const About& about = {});

}  // namespace distrain::app
