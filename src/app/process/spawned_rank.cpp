#include "process/spawned_rank.h"

#include <cstdlib>
#include <fstream>
#include <iterator>

#include <errno.h>
#include <fcntl.h>
#include <nlohmann/json.hpp>
#include <string.h>
#include <sys/prctl.h>
#include <unistd.h>

#include "distrain/base/error.h"
#include "process/output.h"

namespace distrain::app {
namespace {

constexpr char kVariable[] = "DISTRAIN_SPAWNED_RANK";
constexpr char kProgram[] = "/proc/self/exe";  // even if its file was replaced meanwhile

/// As they were given to the process, whatever main() made of them.
std::vector<std::string> own_arguments() {
  std::ifstream file("/proc/self/cmdline", std::ios::binary);
  std::vector<std::string> arguments;
  for (std::string argument; std::getline(file, argument, '\0');) arguments.push_back(argument);
  if (arguments.empty()) {
    throw base::Exception(base::ErrorKind::kResources,
                          "cannot start a rank: /proc/self/cmdline is empty");
  }
  return arguments;
}

std::vector<std::string> environment_with(const std::string& name, const std::string& value) {
  std::vector<std::string> result;
  for (char** entry = environ; *entry; ++entry) {
    if (!std::string_view(*entry).starts_with(name + '=')) result.emplace_back(*entry);
  }
  result.push_back(name + '=' + value);
  return result;
}

std::vector<char*> pointers_to(std::vector<std::string>& texts) {
  std::vector<char*> pointers;
  for (std::string& text : texts) pointers.push_back(text.data());
  pointers.push_back(nullptr);
  return pointers;
}

/// The launcher's number tells a rank from a program that has inherited the variable otherwise.
std::string told_to(const SpawnedRank& rank) {
  return nlohmann::json{{"launcher", getpid()},
                        {"rank", rank.rank},
                        {"out_fd", rank.out_fd},
                        {"listen_fd", rank.listen_fd},
                        {"master_addr", rank.master_addr},
                        {"master_port", rank.master_port},
                        {"started", rank.started.time_since_epoch().count()},
                        {"run_id", rank.run_id}}
      .dump();
}

SpawnedRank spawned_rank_of(const nlohmann::json& told) {
  return {.rank = told.at("rank"),
          .out_fd = told.at("out_fd"),
          .listen_fd = told.at("listen_fd"),
          .master_addr = told.at("master_addr"),
          .master_port = told.at("master_port"),
          // One clock for all processes of the machine.
          .started = base::TimePoint(base::Duration(told.at("started").get<int64_t>())),
          .run_id = told.at("run_id")};
}

}  // namespace

RankImage::RankImage(const SpawnedRank& rank)
    : passed_on_{rank.out_fd, rank.listen_fd},
      arguments_(own_arguments()),
      environment_(environment_with(kVariable, told_to(rank))),
      argv_(pointers_to(arguments_)),
      envp_(pointers_to(environment_)) {}

void RankImage::exec() const {
  for (const int fd : passed_on_) {
    if (fd >= 0) fcntl(fd, F_SETFD, 0);
  }
  execve(kProgram, argv_.data(), envp_.data());
  write_all(STDERR_FILENO, program_invocation_short_name);
  write_all(STDERR_FILENO, ": cannot start a rank: ");
  write_all(STDERR_FILENO, strerrordesc_np(errno));
  write_all(STDERR_FILENO, "\n");
  _exit(base::exit_code(base::ErrorKind::kResources));
}

std::optional<SpawnedRank> take_spawned_rank() {
  const char* const text = std::getenv(kVariable);
  if (!text) return std::nullopt;
  SpawnedRank rank;
  try {
    const nlohmann::json told = nlohmann::json::parse(text);
    unsetenv(kVariable);
    if (told.at("launcher") != getppid()) return std::nullopt;
    rank = spawned_rank_of(told);
  } catch (const nlohmann::json::exception&) {  // what a launcher sets is whole
    unsetenv(kVariable);
    return std::nullopt;
  }
  for (const int fd : {rank.out_fd, rank.listen_fd}) {
    if (fd >= 0) fcntl(fd, F_SETFD, FD_CLOEXEC);
  }
  prctl(PR_SET_NAME, program_invocation_short_name);  // ps(1) would show "exe"
  return rank;
}

}  // namespace distrain::app
