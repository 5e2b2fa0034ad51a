#include <cstdlib>
#include <fstream>

#include <errno.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "process/rank_group.h"

namespace distrain::net {
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(PortRange, first, last)
}  // namespace distrain::net

namespace distrain::app {

// Must name every field of Contact except token, generation and meeting_name, which rank_image()
// and run_spawned() set. In a rank that exec starts, a field that is missing here has its default.
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(SpawnedRank, rank, world_size, out_fd, listen_fd, master_addr,
                                   master_port, listen_addr, ports, transport, insecure, run_id,
                                   rank_0_unix_name, job_id, rejoins, shows_progress, resume,
                                   options)

namespace {

constexpr char kCannotStart[] = "cannot start a rank";
constexpr char kVariable[] = "DISTRAIN_SPAWNED_RANK";
constexpr char kProgram[] = "/proc/self/exe";  // works even if the program's file was replaced

[[noreturn]] void no_resources(const char* what, const char* why = strerror(errno)) {
  throw base::Exception(base::ErrorKind::kResources, fmt::format("{}: {}", what, why));
}

/// Sets up the child process after fork(). Redirects stdout to the stderr pipe: JSON lines have a
/// descriptor of their own, so output of libraries cannot mix with them. Rank 0 may read data from
/// the launcher's stdin, unless that is a terminal.
void become_rank(pid_t launcher, int err_fd, int rank) {
  setpgid(0, 0);
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != launcher) _exit(128 + SIGKILL);  // the launcher died before prctl()
  const int null = open("/dev/null", O_RDONLY | O_CLOEXEC);
  if (rank != 0 || isatty(STDIN_FILENO)) dup2(null, STDIN_FILENO);
  dup2(err_fd, STDOUT_FILENO);
  dup2(err_fd, STDERR_FILENO);
  close(null);
  const sigset_t set = base::signal_set({SIGCHLD, SIGTSTP});
  sigprocmask(SIG_UNBLOCK, &set, nullptr);
}

}  // namespace

net::Fd LinePipe::open() {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) no_resources("cannot make a pipe for a rank");
  fcntl(ends[0], F_SETFL, O_NONBLOCK);
  fd_ = net::Fd(ends[0]);
  return net::Fd(ends[1]);
}

void LinePipe::read(const std::function<void(std::string)>& take) {
  char buffer[65536];
  for (int reads = 0; fd_.valid() && reads < 64; ++reads) {
    const ssize_t got = ::read(fd_.get(), buffer, sizeof(buffer));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && errno == EAGAIN) return;
    if (got <= 0) return fd_.reset();
    std::string_view bytes(buffer, static_cast<size_t>(got));
    for (size_t end; (end = bytes.find('\n')) != bytes.npos; bytes.remove_prefix(end + 1)) {
      pending_.append(bytes.substr(0, end + 1));
      take(std::exchange(pending_, {}));
    }
    pending_.append(bytes);
  }
}

void Child::start(const std::function<int()>& body) {
  const pid_t launcher = getpid();
  pid_ = fork();
  if (pid_ < 0) no_resources(kCannotStart);
  if (pid_ == 0) {
    // Must not allocate, because another thread of the parent may have held the heap's lock.
    become_rank(launcher, text_end_.get(), rank);
    text_end_.reset();
    out_.close();
    err_.close();
    _exit(body());
  }
  setpgid(pid_, pid_);  // become_rank() does so, too, because either process may run first
  lines_end_.reset();
  text_end_.reset();
}

void Child::take_line(std::string line) {
  Json json = Json::parse(line, nullptr, false);
  const std::string event = text_in(json, "event");
  may_be_lost_ = may_be_lost_ || event == kMayBeLost;
  is_saving_ = is_saving_ || event == kSaving;
  if (event == kFigures) figures = std::move(json["ranks"]);
  if (event == kMayBeLost || event == kSaving || event == kFigures) return;
  const bool is_ready = event == "ready", is_error = event == "error";
  if (is_ready || is_error || event == "rank_end") {
    if (const std::string told = text_in(json, "role"); !told.empty()) role = told;
    if (const std::string told = text_in(json, "run"); !told.empty()) run_id = told;
    ready = ready || is_ready;
    if (!is_ready) (is_error ? error : rank_end) = json;
    if (is_error) return;  // the launcher prints only the root cause's error
  }
  handlers_->on_event(json, std::move(line));
}

bool Child::reap() {
  if (!alive()) return false;
  int status = 0;
  rusage usage{};
  do {
    if (wait4(pid_, &status, WNOHANG | WUNTRACED | WCONTINUED, &usage) != pid_) return false;
    stopped_since = std::nullopt;
    if (WIFSTOPPED(status)) stopped_since = base::Clock::now();
  } while (WIFSTOPPED(status) || WIFCONTINUED(status));
  ended_at = base::Clock::now();
  status_ = status;
  rss_mb = static_cast<double>(usage.ru_maxrss) / 1024;
  read_pipes(true);
  out_.close();  // drops a truncated line, which is not JSON
  if (const std::string rest = err_.close(); !rest.empty()) take_text(rest + '\n');
  return true;
}

int Child::signal() const { return status_ && WIFSIGNALED(*status_) ? WTERMSIG(*status_) : 0; }

int Child::exit_code() const {
  if (!status_) return 0;
  if (const int number = signal()) return 128 + number;
  const int code = WEXITSTATUS(*status_);
  return code == 0 && rank_end.empty() ? 1 : code;
}

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
  if (texts->arguments.empty()) no_resources(kCannotStart, "/proc/self/cmdline is empty");
  // The token is in a memory file and not in the environment, which other processes can read.
  texts->token = net::Fd(memfd_create("token", MFD_CLOEXEC));
  if (!texts->token.valid() || write_all(texts->token.get(), rank.token) != 0) {
    no_resources(kCannotStart);
  }
  nlohmann::json told = rank;
  told["launcher"] = getpid();  // the rank's parent; child processes of the rank have another one
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
    for (const char* text :
         std::initializer_list<const char*>{program_invocation_short_name, ": ", kCannotStart, ": ",
                                            strerrordesc_np(errno), "\n"}) {
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
    // The launcher's time is valid here, because all processes of a machine share the steady clock.
    rank.started = base::TimePoint(base::Duration(told.at("started").get<int64_t>()));
    if (told.contains("generation")) rank.generation = told["generation"].get<uint32_t>();
    const net::Fd token(told.at("token_fd"));
    std::ifstream file("/proc/self/fd/" + std::to_string(token.get()));
    rank.token.assign(std::istreambuf_iterator<char>(file), {});
  } catch (const nlohmann::json::exception&) {  // the variable is not a launcher's
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
