#pragma once

#include <memory>
#include <string>
#include <vector>

#include "distrain/job/definition.h"

namespace distrain::app {

/// A subcommand that is a job of ranks. Its table has the options of every job, too.
struct JobCommand : job::JobInfo {
  template <class Options>
  JobCommand(const job::Definition<Options>& definition)  // NOLINT: implicit by design
      : JobCommand(std::make_shared<const job::Definition<Options>>(definition)) {}
  explicit JobCommand(std::shared_ptr<const job::AnyDefinition> definition);

  std::shared_ptr<const job::AnyDefinition> definition;
};

/// Describes a program as a whole in its help, man page and --version.
struct About {
  std::string summary;                 ///< in a line
  std::string description;             ///< a paragraph
  std::vector<job::Example> examples;  ///< the help has the first three, the man page all
  std::string version = {};            ///< the program's own
};

/// The whole of a program whose subcommands are jobs: the command line, the launcher, the ranks.
/// Does not come back once a job has run. Gives back the exit code. Best called first in main():
/// where there are threads by then, as torch's are after a parallel operation, each rank is a new
/// process that goes through main() from the start, which takes longer than a fork.
///
/// The program has the name that it was called by, and besides the jobs the subcommands help, man,
/// completion and schema. With one job, whose name can be left out, it is that job.
int main(int argc, char** argv, const std::vector<JobCommand>& commands, const About& about = {});

}  // namespace distrain::app
