#include "process/child.h"

#include <cstdio>

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

namespace distrain::app {
namespace {

constexpr size_t kTailLines = 20;

[[noreturn]] void no_resources(const char* what) {
  throw base::Exception(base::ErrorKind::kResources, fmt::format("{}: {}", what, strerror(errno)));
}

struct Pipe {
  int read = -1;
  int write = -1;
};

Pipe open_pipe() {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) no_resources("cannot make a pipe for a rank");
  fcntl(ends[0], F_SETFL, O_NONBLOCK);
  return Pipe{ends[0], ends[1]};
}

/// The child's side of a fork. fd 1 goes where fd 2 goes: a library that prints cannot get between
/// the JSON lines, which have a descriptor of their own.
void become_rank(pid_t launcher, int err_fd) {
  setpgid(0, 0);
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != launcher) _exit(128 + SIGKILL);  // it died before the line above
  const int null = open("/dev/null", O_RDONLY | O_CLOEXEC);
  dup2(null, STDIN_FILENO);
  dup2(err_fd, STDOUT_FILENO);
  dup2(err_fd, STDERR_FILENO);
  close(null);
  close(err_fd);
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGCHLD);
  sigprocmask(SIG_UNBLOCK, &set, nullptr);
}

/// Calls `take` with what `fd` has; closes it at its end. Bounded, so that a rank that never stops
/// talking cannot keep the launcher from its signals; what a dead rank left fits well within.
void drain(int& fd, const std::function<void(std::string_view)>& take) {
  char buffer[65536];
  for (int reads = 0; fd >= 0 && reads < 64; ++reads) {
    const ssize_t got = read(fd, buffer, sizeof(buffer));
    if (got > 0) {
      take(std::string_view(buffer, static_cast<size_t>(got)));
      continue;
    }
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && errno == EAGAIN) return;
    close(fd);
    fd = -1;
  }
}

bool names_event(const std::string& line, const char* event) {
  // Our own lines only; the event stands among the first fields.
  return line.substr(0, 96).find(fmt::format("\"event\":\"{}\"", event)) != std::string::npos;
}

}  // namespace

void LineSplitter::feed(std::string_view bytes, const std::function<void(std::string)>& take) {
  while (!bytes.empty()) {
    const size_t newline = bytes.find('\n');
    const size_t length = newline == std::string_view::npos ? bytes.size() : newline + 1;
    pending_.append(bytes.substr(0, length));
    bytes.remove_prefix(length);
    if (newline == std::string_view::npos) return;
    take(std::exchange(pending_, {}));
  }
}

void Child::start(const std::function<Body(int out_fd)>& make_body,
                  const std::vector<int>& inherited) {
  const Pipe out = open_pipe();
  out_fd_ = out.read;
  const Pipe err = open_pipe();
  err_fd_ = err.read;
  const Body body = make_body(out.write);
  const pid_t launcher = getpid();
  pid_ = fork();
  if (pid_ < 0) no_resources("cannot start a rank");
  if (pid_ == 0) {
    become_rank(launcher, err.write);
    for (const int fd : inherited) close(fd);
    close(out.read);
    close(err.read);
    _exit(body());
  }
  setpgid(pid_, pid_);  // here too: whoever comes first
  close(out.write);
  close(err.write);
}

void Child::read_stdout(const Handlers& handlers) {
  drain(out_fd_, [&](std::string_view bytes) {
    out_.feed(bytes, [&](std::string line) { take_line(std::move(line), handlers); });
  });
}

void Child::read_stderr(const Handlers& handlers) {
  drain(err_fd_, [&](std::string_view bytes) {
    err_.feed(bytes, [&](std::string line) { take_text(std::move(line), handlers); });
  });
}

void Child::read_pipes(const Handlers& handlers) {
  read_stdout(handlers);
  read_stderr(handlers);
}

void Child::take_line(std::string line, const Handlers& handlers) {
  ready_ = ready_ || names_event(line, "ready");
  if (names_event(line, "rank_end") || names_event(line, "error")) {
    Json json = Json::parse(line, nullptr, false);
    if (json.is_object()) {
      if (const auto it = json.find("role"); it != json.end() && it->is_string()) {
        role_ = it->get<std::string>();
      }
      const bool is_error = names_event(line, "error");
      (is_error ? error_ : rank_end_) = std::move(json);
      if (is_error) {
        error_line_ = std::move(line);  // the launcher prints one in all: the root cause's
        return;
      }
    }
  }
  handlers.on_line(std::move(line));
}

void Child::take_text(std::string line, const Handlers& handlers) {
  tail_.push_back(line.ends_with('\n') ? line.substr(0, line.size() - 1) : line);
  if (tail_.size() > kTailLines) tail_.pop_front();
  handlers.on_text(std::move(line));
}

bool Child::reap(const Handlers& handlers) {
  if (!alive()) return false;
  int status = 0;
  rusage usage{};
  if (wait4(pid_, &status, WNOHANG, &usage) != pid_) return false;
  ended_at_ = std::chrono::steady_clock::now();
  status_ = status;
  rss_mb_ = static_cast<double>(usage.ru_maxrss) / 1024;
  read_pipes(handlers);
  for (int* fd : {&out_fd_, &err_fd_}) {
    if (*fd >= 0) close(*fd);
    *fd = -1;
  }
  // A line that was cut off by the end of the process is not JSON.
  out_.rest();
  if (std::string rest = err_.rest(); !rest.empty()) take_text(rest + '\n', handlers);
  return true;
}

void Child::send(int signal) {
  if (!alive()) return;
  ended_by_us_ = ended_by_us_ || !error_;
  kill(-pid_, signal);
}

void Child::tell(int signal) {
  if (alive()) kill(-pid_, signal);
}

int Child::signal() const { return status_ && WIFSIGNALED(*status_) ? WTERMSIG(*status_) : 0; }

int Child::stopped_by() const {
  if (!status_ || signal() || error_ || !rank_end_) return 0;
  const bool told = rank_end_->value("signal", Json()).is_string();
  return told && exit_code() > 128 ? exit_code() - 128 : 0;
}

int Child::exit_code() const {
  if (const int number = signal()) return 128 + number;
  const int code = status_ ? WEXITSTATUS(*status_) : 0;
  return code == 0 && left_early() ? 1 : code;
}

}  // namespace distrain::app
