#pragma once

#include <string>
#include <vector>

#include "distrain/app/program.h"

namespace distrain::app {

/// The whole of a program whose subcommands are jobs: the command line, the launcher, the ranks.
/// Does not come back once a job has run. Gives back the exit code. Best called first in main():
/// where there are threads by then, as torch's are after a parallel operation, each rank is a new
/// process that goes through main() from the start, which takes longer than a fork.
///
/// The program has the name that it was called by, and besides the jobs the subcommands help, man,
/// completion and schema. With one job, whose name can be left out, it is that job.
int main(int argc, char** argv, const std::vector<JobCommand>& commands, const About& about = {});

}  // namespace distrain::app
