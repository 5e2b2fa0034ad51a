#include "process/launcher.h"

#include <algorithm>
#include <cstdio>

#include <errno.h>
#include <fmt/format.h>
#include <poll.h>
#include <signal.h>
#include <string.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include "distrain/base/clock.h"
#include "distrain/job/stop_signal.h"
#include "process/json_sink.h"

namespace distrain::app {
namespace {

constexpr auto kTermGrace = std::chrono::seconds(2);  // after SIGTERM of ours
constexpr std::chrono::seconds kSignalGrace(5);       // after a signal that we passed on
constexpr double kExtraGrace = 2;                     // beyond the peer timeout
constexpr std::chrono::seconds kMeetingGrace(1);      // before all ranks are there

/// Whether the program itself went wrong, rather than somebody ending it.
bool is_crash(int signal) {
  return signal == SIGABRT || signal == SIGSEGV || signal == SIGBUS || signal == SIGFPE ||
         signal == SIGILL;
}

bool is_secondary(const Child& child) {
  if (child.exit_code() == base::exit_code(base::ErrorKind::kPeerLost)) return true;
  const std::string kind = child.error() ? child.error()->value("kind", "") : "";
  return kind == base::kind_name(base::ErrorKind::kPeerLost) ||
         kind == base::kind_name(base::ErrorKind::kCancelled);
}

/// The other rank that it names as the cause.
std::optional<int> blamed_rank(const Child& child) {
  const auto& told = child.error() ? child.error() : child.rank_end();
  if (!told) return std::nullopt;
  const auto rank = told->find("cause_rank");
  if (rank == told->end() || !rank->is_number() || *rank == child.rank()) return std::nullopt;
  return rank->get<int>();
}

}  // namespace

Launcher::Launcher(LaunchPlan plan)
    : plan_(std::move(plan)),
      output_(STDOUT_FILENO),
      progress_(plan_.progress, plan_.epochs),
      handlers_{[this](std::string line) {
                  if (write_error_) return;
                  progress_.on_line(line);
                  output_.push(std::move(line));
                },
                [this](std::string line) { show_text(line); }} {}

int Launcher::run() {
  block_signals();
  if (!plan_.warning.empty()) {
    tell("warn", {{"kind", "invalid"}, {"message", plan_.warning}});
  }
  start_children();
  wait_for_children();
  return finish();
}

void Launcher::block_signals() {
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGCHLD);
  sigaddset(&set, kSaveSignal);
  for (const int number : ending_signals()) sigaddset(&set, number);
  block_in_all_threads(set);
  signal_fd_ = signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
}

void Launcher::start_children() {
  try {
    const bool by_exec = !other_threads().empty();
    for (const int rank : plan_.ranks) start_child(rank, by_exec);
  } catch (const base::Exception& e) {
    start_error_ = e.error();
    send_to_all(SIGKILL);
    enter(Phase::kKilled);
  }
  if (plan_.listen_fd >= 0) close(plan_.listen_fd);
}

void Launcher::start_child(int rank, bool by_exec) {
  auto child = std::make_unique<Child>(rank, plan_.role(rank));
  std::vector<int> inherited{signal_fd_};
  for (const auto& other : children_) {
    inherited.push_back(other->out_fd());
    inherited.push_back(other->err_fd());
  }
  if (rank != 0 && plan_.listen_fd >= 0) inherited.push_back(plan_.listen_fd);
  const auto make_body = [&](int out_fd) -> Child::Body {
    const SpawnedRank spawned{.rank = rank,
                              .out_fd = out_fd,
                              .listen_fd = rank == 0 ? plan_.listen_fd : -1,
                              .master_addr = plan_.master_addr,
                              .master_port = plan_.master_port,
                              .started = plan_.started,
                              .run_id = plan_.run_id};
    if (!by_exec) return [this, spawned] { return plan_.rank_main(spawned); };
    const auto image = std::make_shared<RankImage>(spawned);
    return [image]() -> int { image->exec(); };
  };
  child->start(make_body, inherited);
  children_.push_back(std::move(child));
}

void Launcher::wait_for_children() {
  std::vector<pollfd> items;
  while (any_alive()) {
    items.clear();
    items.push_back({signal_fd_, POLLIN, 0});
    // Without events it still tells of errors: of a reader that is gone.
    const bool waiting = !output_.empty();
    const bool full = output_.full() && !write_error_;
    items.push_back(
        {write_error_ ? -1 : output_.fd(), static_cast<short>(waiting ? POLLOUT : 0), 0});
    for (const auto& child : children_) {
      if (child->out_fd() >= 0 && !full) items.push_back({child->out_fd(), POLLIN, 0});
      if (child->err_fd() >= 0) items.push_back({child->err_fd(), POLLIN, 0});
    }
    poll(items.data(), items.size(), poll_timeout_ms());
    if (items[1].revents & (POLLERR | POLLHUP | POLLNVAL)) on_write_error(EPIPE);
    for (const auto& child : children_) {
      if (!child->alive()) continue;
      if (output_.full() && !write_error_) {
        child->read_stderr(handlers_);
      } else {
        child->read_pipes(handlers_);
      }
    }
    on_signals();
    reap_children();
    pump();
    if (base::Clock::now() >= deadline_) on_deadline();
  }
}

int Launcher::poll_timeout_ms() const {
  if (deadline_ == base::TimePoint::max()) return -1;
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline_ - base::Clock::now());
  return static_cast<int>(std::max<int64_t>(0, left.count()));
}

void Launcher::enter(Phase phase) {
  if (phase <= phase_) return;  // it only ever gets more serious
  phase_ = phase;
  deadline_ = phase == Phase::kGrace         ? base::deadline_after(failure_grace())
              : phase == Phase::kTerminating ? base::deadline_after(kTermGrace)
                                             : base::TimePoint::max();
}

void Launcher::on_deadline() {
  const bool again = phase_ != Phase::kGrace;
  send_to_all(again ? SIGKILL : SIGTERM);
  enter(again ? Phase::kKilled : Phase::kTerminating);
}

void Launcher::on_signals() {
  signalfd_siginfo info;
  while (read(signal_fd_, &info, sizeof(info)) == sizeof(info)) {
    const int number = static_cast<int>(info.ssi_signo);
    if (number == SIGCHLD) continue;
    if (number == kSaveSignal) {
      children_.front()->tell(number);  // any rank will do
      continue;
    }
    const bool saving = plan_.save_grace > kSignalGrace;
    if (saving && ended_by_signal_ && base::Clock::now() - signalled_at_ < job::kSameSignal) {
      continue;
    }
    if (ended_by_signal_) {
      stop_waiting_ = true;
      send_to_all(SIGKILL);
      enter(Phase::kKilled);
      continue;
    }
    ended_by_signal_ = number;
    signalled_at_ = base::Clock::now();
    send_to_all(number);
    enter(Phase::kTerminating);
    const auto grace = std::max(kSignalGrace, plan_.save_grace);
    if (phase_ == Phase::kTerminating) deadline_ = base::deadline_after(grace);
  }
}

void Launcher::reap_children() {
  for (const auto& child : children_) {
    if (child->reap(handlers_) && child->failed()) on_failure(*child);
  }
}

/// How long the others may take to notice that a rank failed.
std::chrono::nanoseconds Launcher::failure_grace() const {
  const bool met = std::any_of(children_.begin(), children_.end(),
                               [](const auto& child) { return child->ready(); });
  // One that others blame is about to say what happened.
  const bool told = std::none_of(children_.begin(), children_.end(), [this](const auto& child) {
    return child->failed() && is_alive(blamed_rank(*child));
  });
  // Those that look for each other would do so until the join timeout.
  if (!met && told) return kMeetingGrace;
  return std::chrono::nanoseconds(static_cast<int64_t>((plan_.peer_timeout_s + kExtraGrace) * 1e9));
}

void Launcher::on_failure(const Child& child) {
  if (child.stopped_by()) {
    // Somebody sent a signal to a rank: the others stop, too, once rank 0 has saved.
    if (phase_ != Phase::kRunning) return;
    enter(Phase::kGrace);
    deadline_ = std::max(deadline_, base::deadline_after(plan_.save_grace));
    return;
  }
  enter(Phase::kGrace);
  // While it waits for a save: there will be none now.
  if (phase_ == Phase::kGrace || phase_ == Phase::kTerminating) {
    deadline_ = std::min(deadline_, base::deadline_after(failure_grace()));
  }
}

void Launcher::pump() {
  if (write_error_) return;
  if (const int error = output_.pump()) on_write_error(error);
}

void Launcher::on_write_error(int error) {
  if (write_error_) return;
  write_error_ = error;
  if (phase_ >= Phase::kTerminating) return;
  send_to_all(SIGTERM);
  enter(Phase::kTerminating);
  deadline_ = std::max(deadline_, base::deadline_after(plan_.save_grace));
}

void Launcher::tell(const char* event, const Json& fields) {
  output_.push(json_line(event, plan_.run_id, plan_.cmd, std::nullopt, "launcher", fields));
}

void Launcher::show_text(const std::string& line) {
  progress_.clear();
  write_all(STDERR_FILENO, line);
}

bool Launcher::is_alive(std::optional<int> rank) const {
  return std::any_of(children_.begin(), children_.end(),
                     [rank](const auto& child) { return child->rank() == rank && child->alive(); });
}

bool Launcher::any_alive() const {
  return std::any_of(children_.begin(), children_.end(), [](const auto& c) { return c->alive(); });
}

void Launcher::send_to_all(int signal) {
  for (const auto& child : children_) child->send(signal);
}

/// Whether its failure is what we asked for. A save that failed is not.
bool Launcher::is_excused(const Child& child) const {
  const bool failed_to_save = plan_.save_grace.count() > 0 && child.error() && !is_secondary(child);
  return child.ended_by_us() && !failed_to_save;
}

/// By a signal, in good order, and for no other reason.
bool Launcher::all_stopped() const {
  return !children_.empty() && std::all_of(children_.begin(), children_.end(),
                                           [](const auto& child) { return child->stopped_by(); });
}

/// The end of a job by a signal to us, or else to a rank that made the others stop, too.
std::optional<Cause> Launcher::stop_cause() const {
  const auto first = std::find_if(children_.begin(), children_.end(),
                                  [](const auto& child) { return child->stopped_by(); });
  int number = ended_by_signal_;
  for (auto child = first; !ended_by_signal_ && child != children_.end(); ++child) {
    // Ranks that another one told to stop call that SIGTERM.
    if (number == 0 || number == SIGTERM) number = (*child)->stopped_by();
  }
  if (!number) return std::nullopt;
  Cause cause = cause_by_signal(number);
  // Rank 0 tells where it saved.
  if (first != children_.end()) {
    cause.message = (*first)->rank_end()->value("message", cause.message);
  }
  return cause;
}

/// Whether it blames another of our ranks, which has a reason of its own: even if that ends later.
bool Launcher::blames_another(const Child& child) const {
  const auto blamed = blamed_rank(child);
  return std::any_of(children_.begin(), children_.end(), [&](const auto& other) {
    return other->rank() == blamed && other->failed() && !is_excused(*other) &&
           !is_secondary(*other);
  });
}

const Child* Launcher::root_cause() const {
  const Child* cause = nullptr;
  const auto before = [this](const Child& a, const Child& b) {
    if (is_secondary(a) != is_secondary(b)) return is_secondary(b);
    if (blames_another(a) != blames_another(b)) return blames_another(b);
    return a.ended_at() < b.ended_at();
  };
  for (const auto& child : children_) {
    if (!child->failed() || is_excused(*child)) continue;
    if (!cause || before(*child, *cause)) cause = child.get();
  }
  return cause;
}

Cause Launcher::cause_from(const Child& child) const {
  Cause cause;
  cause.rank = child.rank();
  cause.role = child.role();
  cause.host = host_name();
  cause.exit_code = child.exit_code();
  const std::string name = child.role().empty()
                               ? fmt::format("rank {}", child.rank())
                               : fmt::format("rank {} ({})", child.rank(), child.role());
  // The `error` line names a cause elsewhere; the last line alone tells of a signal it took.
  const auto& told = child.error() ? child.error() : child.rank_end();
  if (child.error() && (child.signal() || child.stopped_by())) {
    // It had said what went wrong before the signal came.
    cause.exit_code = child.error()->value("exit_code", cause.exit_code);
  }
  if (const int number = child.signal(); number && !child.error()) {
    cause.signal = signal_name(number);
    cause.kind =
        base::kind_name(is_crash(number) ? base::ErrorKind::kInternal : base::ErrorKind::kPeerLost);
    cause.message = fmt::format("{} was killed by {}{}", name, cause.signal,
                                number == SIGKILL ? " (kill -9, or out of memory)" : "");
  } else if (told && told->contains("kind") && told->contains("message")) {
    cause.kind = told->value("kind", "");
    cause.message = told->value("message", "");
    if (const auto other = blamed_rank(child)) {
      cause.rank = other;
      cause.role = plan_.role(*cause.rank);
      const bool here =
          std::find(plan_.ranks.begin(), plan_.ranks.end(), *cause.rank) != plan_.ranks.end();
      if (!here) cause.host.clear();
    }
  } else {
    cause.kind = base::kind_name(base::ErrorKind::kInternal);
    cause.message = fmt::format("{} left without its last line", name);
  }
  for (const auto& each : children_) {
    if (each->rank() != cause.rank) continue;
    cause.stderr_tail.assign(each->stderr_tail().begin(), each->stderr_tail().end());
  }
  return cause;
}

std::optional<Cause> Launcher::find_cause() {
  if (start_error_) return cause_of(*start_error_);
  if (all_stopped()) return stop_cause();
  const Child* const child = root_cause();
  if (!child) return stop_cause();
  Cause cause = cause_from(*child);
  // A rank that threw has said so in its own line, best the one that is the cause itself; for one
  // that cannot we do.
  const Child* teller = child;
  for (const auto& each : children_) {
    if (each->rank() == cause.rank && each->error()) teller = each.get();
  }
  if (teller->error()) {
    output_.push(teller->error_line());
    return cause;
  }
  const base::Error error{base::ErrorKind::kPeerLost, cause.message, child->rank(), {}};
  Json fields = error_fields(error, base::seconds_since(plan_.started));
  fields["kind"] = cause.kind;
  fields["exit_code"] = cause.exit_code;
  tell("error", fields);
  return cause;
}

int Launcher::finish() {
  const std::optional<Cause> cause = find_cause();
  if (start_error_) {
    tell("error", error_fields(*start_error_, base::seconds_since(plan_.started)));
  }
  Summary summary;
  for (const auto& child : children_) {
    if (child->rank_end()) summary.add(*child->rank_end());
    summary.add_rss(child->rss_mb());
  }
  const int code = cause ? cause->exit_code : 0;
  Json end = summary.end_fields(code, base::seconds_since(plan_.started), cause);
  tell_config(plan_.config, end);
  tell("end", end);

  pump();
  while (!output_.empty() && !write_error_ && !stop_waiting_) {
    pollfd items[] = {{signal_fd_, POLLIN, 0}, {output_.fd(), POLLOUT, 0}};
    poll(items, 2, -1);
    // The ranks are gone; a signal now means that nobody will read the rest.
    if (items[0].revents) {
      signalfd_siginfo info;
      while (read(signal_fd_, &info, sizeof(info)) == sizeof(info)) {
        stop_waiting_ |= info.ssi_signo != SIGCHLD && info.ssi_signo != kSaveSignal;
      }
    }
    pump();
  }
  progress_.finish(end);
  // The signal that ended us may have ended stdout's reader, too, or a terminal's end was both.
  const bool took_reader =
      cause && ended_by_signal_ && (write_error_ == EPIPE || write_error_ == EIO);
  if (write_error_ && !took_reader) {
    if (write_error_ != EPIPE) say(fmt::format("stdout: {}", strerror(write_error_)));
    return exit_code_of_write_error(write_error_);
  }
  if (cause) say(cause->message);
  return code;
}

}  // namespace distrain::app
