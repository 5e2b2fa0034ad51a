#include "distrain/app/main.h"

#include <algorithm>

#include <fmt/format.h>

#include "distrain/app/help.h"
#include "distrain/app/options.h"
#include "distrain/base/error.h"
#include "process/output.h"
#include "process/process_setup.h"
#include "process/tensor_memory.h"

namespace distrain::app {
namespace {

int run_command(const std::vector<JobCommand>& commands, const std::vector<std::string>& args,
                base::TimePoint started) {
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

int main(int argc, char** argv, const std::vector<JobCommand>& commands) {
  const auto started = process_start();
  const bool stdout_open = secure_standard_fds();
  set_up_process();
  reuse_tensor_memory();
  if (!stdout_open) {
    say("stdout is closed");
    return 9;
  }
  const int code = run_command(commands, {argv + 1, argv + argc}, started);
  // Destroying what LibTorch set up takes time and serves nobody.
  leave_process(code);
}

}  // namespace distrain::app
