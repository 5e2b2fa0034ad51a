// Measures distrain rl over unix sockets: environment steps per second with one observer, and
// requests per second that the agent answers with ten observers. Prints a JSON line for each.
// Usage: bench_rl [episodes]
#include <cstdio>
#include <cstdlib>
#include <vector>

#include <ATen/Parallel.h>
#include <sys/wait.h>
#include <unistd.h>

#include "../cmd/jobs.h"
#include "distrain/net/socket.h"

using namespace distrain;
using job::Json;

namespace {

class SilentSink final : public job::EventSink {
 public:
  void emit(std::string_view, const Json&) override {}
  void joined(std::string_view, const job::OptionMap&) override {}
};

job::Outcome run_rank(const scenario::RlOptions& options, int rank, net::Fd& socket) {
  at::set_num_threads(1);
  job::Job job;
  job.rank = rank;
  job.master_port = net::local_name(socket.get()).port;
  job.started = std::chrono::steady_clock::now();
  if (rank == 0) job.listen_fd = socket.release();
  SilentSink sink;
  return cmd::rl_job().run(options, job, sink);
}

// Runs a job with a process for each rank, as a launcher would; this process is the agent.
bool measure(int observers, int64_t episodes, const char* name, const char* speed) {
  scenario::RlOptions options;
  options.observers = observers;
  options.max_episodes = episodes;
  options.threshold = 1e9;  // not reached in any episode
  options.log_interval = 0;
  net::Fd socket = std::move(net::listen_tcp("localhost", 0).value());
  std::vector<pid_t> children;
  for (int rank = 1; rank <= observers; ++rank) {
    children.push_back(fork());
    if (children.back() == 0) {
      run_rank(options, rank, socket);
      _exit(0);
    }
  }
  const Json fields = run_rank(options, 0, socket).fields;
  const Json line{{"event", "bench"},
                  {"name", name},
                  {"impl", "distrain-unix"},
                  {"world_size", observers + 1},
                  {"episodes", fields["episodes"]},
                  {"steps", fields["steps"]},
                  {"per_s", fields[speed]}};
  std::printf("%s\n", line.dump().c_str());
  std::fflush(stdout);
  bool good = true;
  for (const pid_t child : children) {
    int status = 0;
    good = waitpid(child, &status, 0) == child && status == 0 && good;
  }
  return good;
}

}  // namespace

int main(int argc, char** argv) {
  const int64_t episodes = argc > 1 ? std::atoll(argv[1]) : 150;
  const bool one = measure(1, episodes, "rl env_steps", "env_steps_per_s");
  const bool ten = measure(10, episodes, "rl requests", "requests_per_s");
  return one && ten ? 0 : 1;
}
