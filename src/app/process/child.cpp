#include "process/child.h"

#include <errno.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <signal.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "distrain/base/error.h"
#include "process/json_lines.h"
#include "process/process_setup.h"

namespace distrain::app {
namespace {

constexpr size_t kTailLines = 20;

[[noreturn]] void no_resources(const char* what) {
  throw base::Exception(base::ErrorKind::kResources, fmt::format("{}: {}", what, strerror(errno)));
}

/// Sets up the child process after fork(). Redirects stdout to the stderr pipe: JSON lines have a
/// descriptor of their own, so output of libraries cannot mix with them.
void become_rank(pid_t launcher, int err_fd) {
  setpgid(0, 0);
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != launcher) _exit(128 + SIGKILL);  // the launcher died before prctl()
  const int null = open("/dev/null", O_RDONLY | O_CLOEXEC);
  dup2(null, STDIN_FILENO);
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

std::string LinePipe::close() {
  fd_.reset();
  return std::exchange(pending_, {});
}

Child::Child(int rank, std::string role, const Handlers& handlers)
    : rank_(rank),
      role_(std::move(role)),
      handlers_(&handlers),
      lines_end_(out_.open()),
      text_end_(err_.open()) {}

void Child::start(const std::function<int()>& body) {
  const pid_t launcher = getpid();
  pid_ = fork();
  if (pid_ < 0) no_resources("cannot start a rank");
  if (pid_ == 0) {
    // This must not allocate, because a thread of the parent may have held the heap's lock.
    become_rank(launcher, text_end_.get());
    text_end_.reset();
    out_.close();
    err_.close();
    _exit(body());
  }
  setpgid(pid_, pid_);  // also in become_rank(), because either process may be first
  lines_end_.reset();
  text_end_.reset();
}

void Child::read_pipes(bool lines) {
  if (lines) out_.read([this](std::string line) { take_line(std::move(line)); });
  err_.read([this](std::string line) { take_text(std::move(line)); });
}

void Child::take_line(std::string line) {
  Json json = Json::parse(line, nullptr, false);
  const std::string event = text_in(json, "event");
  may_be_lost_ = may_be_lost_ || event == kMayBeLost;
  is_saving_ = is_saving_ || event == kSaving;
  if (event == kFigures) figures_ = std::move(json["ranks"]);
  if (event == kMayBeLost || event == kSaving || event == kFigures) return;
  const bool is_ready = event == "ready", is_error = event == "error";
  if (is_ready || is_error || event == "rank_end") {
    if (const std::string role = text_in(json, "role"); !role.empty()) role_ = role;
    if (const std::string run = text_in(json, "run"); !run.empty()) run_id_ = run;
    ready_ = ready_ || is_ready;
    if (!is_ready) (is_error ? error_ : rank_end_) = json;
    if (is_error) return;  // the launcher prints only the root cause's error
  }
  handlers_->on_event(json, std::move(line));
}

void Child::take_text(std::string line) {
  tail_.push_back(line.substr(0, line.size() - 1));
  if (tail_.size() > kTailLines) tail_.erase(tail_.begin());
  handlers_->on_text(std::move(line));
}

bool Child::reap() {
  if (!alive()) return false;
  int status = 0;
  rusage usage{};
  do {
    if (wait4(pid_, &status, WNOHANG | WUNTRACED | WCONTINUED, &usage) != pid_) return false;
    stopped_since_ = std::nullopt;
    if (WIFSTOPPED(status)) stopped_since_ = base::Clock::now();
  } while (WIFSTOPPED(status) || WIFCONTINUED(status));
  ended_at_ = base::Clock::now();
  status_ = status;
  rss_mb_ = static_cast<double>(usage.ru_maxrss) / 1024;
  read_pipes(true);
  out_.close();  // drops a truncated line, which is not JSON
  if (const std::string rest = err_.close(); !rest.empty()) take_text(rest + '\n');
  return true;
}

void Child::send(int signal) {
  if (!alive()) return;
  ended_by_us_ = ended_by_us_ || error_.empty();
  killed_ = killed_ || signal == SIGKILL;
  kill(-pid_, signal);
}

void Child::stop(bool stopped) {
  if (alive()) kill(-pid_, stopped ? SIGSTOP : SIGCONT);
}

void Child::tell(int signal) {
  if (alive()) kill(pid_, signal);
}

int Child::signal() const { return status_ && WIFSIGNALED(*status_) ? WTERMSIG(*status_) : 0; }

int Child::stopped_by() const {
  if (!status_ || signal() || !error_.empty() || !rank_end_.contains("signal")) return 0;
  return rank_end_["signal"].is_string() && exit_code() > 128 ? exit_code() - 128 : 0;
}

int Child::exit_code() const {
  if (!status_) return 0;
  if (const int number = signal()) return 128 + number;
  const int code = WEXITSTATUS(*status_);
  return code == 0 && rank_end_.empty() ? 1 : code;
}

}  // namespace distrain::app
