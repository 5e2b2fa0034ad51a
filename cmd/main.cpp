#include <algorithm>
#include <cstdio>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <unistd.h>

#include "distrain/base/error.h"
#include "help.h"
#include "hybrid.h"
#include "job_command.h"
#include "options.h"
#include "output.h"
#include "pipeline.h"
#include "process_setup.h"
#include "ps.h"
#include "rl.h"
#include "rnn.h"
#include "tensor_memory.h"

namespace distrain::cmd {
namespace {

int main_with(const std::vector<std::string>& args, TimePoint started) {
  const std::vector<JobCommand> commands = {hybrid_command(), ps_command(), rnn_command(),
                                            rl_command(), pipeline_command()};
  std::vector<CommandLine> lines;
  std::vector<std::string> names;
  for (const JobCommand& command : commands) {
    lines.push_back(command.line);
    names.push_back(command.line.name);
  }
  const auto refuse = [started](const std::string& message) {
    return report_failure("", base::Error{base::ErrorKind::kInvalid, message, -1, {}}, started);
  };
  if (args.empty()) return refuse("no command given; see distrain --help");

  std::string name = args[0];
  std::vector<std::string> rest(args.begin() + 1, args.end());
  if (name == "--version") return print_text(version_text());
  if (name == "--help" || name == "-h") return print_text(main_help(lines));
  if (name == "help") {
    if (rest.empty()) return print_text(main_help(lines));
    if (rest.size() > 1) return refuse(fmt::format("unexpected argument '{}'", rest[1]));
    name = rest[0];
    rest = {"--help"};
  }
  for (const JobCommand& command : commands) {
    if (command.line.name == name) return run_job_command(command, rest, started);
  }
  std::string message = fmt::format("unknown {} '{}'", name[0] == '-' ? "option" : "command", name);
  names.push_back("help");
  if (const auto meant = did_you_mean(name, names)) {
    message += fmt::format("; did you mean {}?", *meant);
  } else {
    message += "; see distrain --help";
  }
  return refuse(message);
}

}  // namespace
}  // namespace distrain::cmd

int main(int argc, char** argv) {
  const auto started = distrain::cmd::process_start();
  const bool stdout_open = distrain::cmd::secure_standard_fds();
  distrain::cmd::set_up_process();
  distrain::cmd::reuse_tensor_memory();
  if (!stdout_open) {
    distrain::cmd::say("stdout is closed");
    return 9;
  }
  const int code = distrain::cmd::main_with({argv + 1, argv + argc}, started);
  // Destroying what LibTorch set up takes time and serves nobody.
  distrain::cmd::leave_process(code);
}
