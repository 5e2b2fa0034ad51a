#pragma once

#include <vector>

#include "distrain/app/job_command.h"

namespace distrain::app {

/// The whole of a program whose subcommands are jobs: the command line, the launcher, the ranks. To
/// be called first in main(); does not come back once a job has run. Gives back the exit code.
int main(int argc, char** argv, const std::vector<JobCommand>& commands);

}  // namespace distrain::app
