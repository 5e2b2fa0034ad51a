#pragma once

#include <string>
#include <vector>

#include "distrain/app/program.h"

namespace distrain::app {

/// The whole of a program whose subcommands are jobs: the command line, the launcher, the ranks. To
/// be called first in main(); does not come back once a job has run. Gives back the exit code.
/// The program has the name that it was called by, and besides the jobs the subcommands help, man,
/// completion and schema.
int main(int argc, char** argv, const std::vector<JobCommand>& commands, const About& about = {});

}  // namespace distrain::app
