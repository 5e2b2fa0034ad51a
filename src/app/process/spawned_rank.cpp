#include "process/spawned_rank.h"

#include <cstdlib>
#include <fstream>
#include <iterator>
#include <memory>
#include <vector>

#include <errno.h>
#include <fcntl.h>
#include <nlohmann/json.hpp>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <unistd.h>

#include "distrain/base/error.h"
#include "distrain/net/socket.h"
#include "process/output.h"

namespace distrain::net {
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(PortRange, first, last)
}  // namespace distrain::net

namespace distrain::app {

// Must name every field of Contact except those that rank_image() and run_spawned() set (token,
// generation, meeting_name), because a rank that exec starts gets the default of a field that is
// not here.
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(SpawnedRank, rank, world_size, out_fd, listen_fd, master_addr,
                                   master_port, listen_addr, ports, transport, insecure, run_id,
                                   rank_0_unix_name, job_id, rejoins, shows_progress, resume)

namespace {

constexpr char kVariable[] = "DISTRAIN_SPAWNED_RANK";
constexpr char kProgram[] = "/proc/self/exe";  // works even if the program's file was replaced

}  // namespace

std::function<int()> rank_image(const SpawnedRank& rank) {
  struct Texts {
    std::string arguments;  // the process's original arguments
    std::string variable;
    std::vector<char*> argv, envp;
    net::Fd token;
  };
  const auto texts = std::make_shared<Texts>();
  std::ifstream file("/proc/self/cmdline", std::ios::binary);
  texts->arguments.assign(std::istreambuf_iterator<char>(file), {});
  if (texts->arguments.empty()) {
    throw base::Exception(base::ErrorKind::kResources,
                          "cannot start a rank: /proc/self/cmdline is empty");
  }
  // The token is in a memory file and not in the environment, which other processes can read.
  texts->token = net::Fd(memfd_create("token", MFD_CLOEXEC));
  if (!texts->token.valid() || write_all(texts->token.get(), rank.token) != 0) {
    throw base::Exception(base::ErrorKind::kResources,
                          std::string("cannot start a rank: ") + strerror(errno));
  }
  nlohmann::json told = rank;
  told["launcher"] = getpid();  // distinguishes the rank from its child processes
  told["started"] = rank.started.time_since_epoch().count();
  told["token_fd"] = texts->token.get();
  if (rank.generation) told["generation"] = *rank.generation;
  texts->variable = std::string(kVariable) + '=' +
                    told.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  char* const end = texts->arguments.data() + texts->arguments.size();
  for (char* argument = texts->arguments.data(); argument < end; argument += strlen(argument) + 1) {
    texts->argv.push_back(argument);
  }
  for (char** entry = environ; *entry; ++entry) texts->envp.push_back(*entry);
  texts->envp.push_back(texts->variable.data());
  texts->argv.push_back(nullptr);
  texts->envp.push_back(nullptr);
  return [texts, out_fd = rank.out_fd, listen_fd = rank.listen_fd]() -> int {
    for (const int fd : {out_fd, listen_fd, texts->token.get()}) {
      if (fd >= 0) fcntl(fd, F_SETFD, 0);
    }
    execve(kProgram, texts->argv.data(), texts->envp.data());
    for (const char* text : std::initializer_list<const char*>{
             program_invocation_short_name, ": cannot start a rank: ", strerrordesc_np(errno),
             "\n"}) {
      write_all(STDERR_FILENO, text);
    }
    return base::exit_code(base::ErrorKind::kResources);
  };
}

std::optional<SpawnedRank> take_spawned_rank() {
  const char* const text = std::getenv(kVariable);
  if (!text) return std::nullopt;
  SpawnedRank rank;
  try {
    const nlohmann::json told = nlohmann::json::parse(text);
    unsetenv(kVariable);
    if (told.at("launcher") != getppid()) return std::nullopt;
    told.get_to(rank);
    // All processes of a machine share the steady clock.
    rank.started = base::TimePoint(base::Duration(told.at("started").get<int64_t>()));
    if (told.contains("generation")) rank.generation = told["generation"].get<uint32_t>();
    const net::Fd token(told.at("token_fd"));
    std::ifstream file("/proc/self/fd/" + std::to_string(token.get()));
    rank.token.assign(std::istreambuf_iterator<char>(file), {});
  } catch (const nlohmann::json::exception&) {  // not set by a launcher
    unsetenv(kVariable);
    return std::nullopt;
  }
  for (const int fd : {rank.out_fd, rank.listen_fd}) {
    if (fd >= 0) fcntl(fd, F_SETFD, FD_CLOEXEC);
  }
  prctl(PR_SET_NAME, program_invocation_short_name);  // otherwise ps(1) shows "exe"
  return rank;
}

}  // namespace distrain::app
