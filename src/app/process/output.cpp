#include "process/output.h"

#include <cmath>
#include <filesystem>
#include <regex>

#include <errno.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <limits.h>
#include <poll.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "process/process_setup.h"

namespace distrain::app {
namespace {

double rounded(double value, double parts) { return std::round(value * parts) / parts; }

/// Adds each field's value to the sum of the same name, if `sums` has one.
void sum_up(const Json& fields, Json& sums) {
  for (const auto& [name, sum] : sums.items()) {
    const auto value = fields.find(name);
    if (value == fields.end() || !value->is_number()) continue;
    sum = sum.get<int64_t>() + value->get<int64_t>();
  }
}

/// Fields of a rank's last JSON line (`rank_end` or `end`) that are not metrics of the job.
constexpr std::string_view kCommon[] = {
    "v",       "ts",         "run",           "seed",        "config", "event",
    "cmd",     "rank",       "role",          "status",      "wall_s", "exit_code",
    "train_s", "steps",      "steps_per_s",   "rpc",         "rss_mb", "kind",
    "signal",  "live_rrefs", "live_contexts", "message",     "host",   "cause_rank",
    "op",      "cause_role", "scope",         "stderr_tail", "device", "device_mem_mb",
    "cpu_s"};

}  // namespace

int write_all(int fd, std::string_view text) {
  while (!text.empty()) {
    const ssize_t written = write(fd, text.data(), text.size());
    if (written >= 0) {
      text.remove_prefix(static_cast<size_t>(written));
    } else if (errno == EAGAIN) {  // another process made the shared descriptor non-blocking
      pollfd item{fd, POLLOUT, 0};
      poll(&item, 1, -1);
    } else if (errno != EINTR) {
      return errno;
    }
  }
  return 0;
}

bool is_writable(int fd) {
  pollfd item{fd, POLLOUT, 0};
  return poll(&item, 1, 0) > 0;
}

void say(std::string_view message) {
  std::string line = program_invocation_short_name;
  line.append(": ").append(message).push_back('\n');
  write_all(STDERR_FILENO, line);
}

int exit_code_of_write_error(int error, bool say_so) {
  if (error == EPIPE) return 141;
  if (say_so) say(std::string("stdout: ") + strerror(error));
  return 9;
}

OutputQueue::OutputQueue(int fd) : fd_(fd) {
  struct stat info {};
  if (fstat(fd, &info) != 0 || !S_ISFIFO(info.st_mode)) return;
  pipe_ = static_cast<size_t>(std::max(fcntl(fd, F_GETPIPE_SZ), PIPE_BUF));
}

int OutputQueue::pump() {
  while (!lines_.empty() && is_writable(fd_)) {
    // A writable pipe accepts PIPE_BUF bytes without blocking; an empty pipe accepts its capacity.
    int waiting = 0;
    const bool is_empty = ioctl(fd_, FIONREAD, &waiting) == 0 && waiting == 0;
    const size_t at_once = pipe_ == 0 ? std::string::npos : is_empty ? pipe_ : PIPE_BUF;
    const auto next = std::string_view(lines_.front()).substr(written_, at_once);
    const ssize_t taken = write(fd_, next.data(), next.size());
    if (taken < 0) return errno == EAGAIN || errno == EINTR ? 0 : errno;
    written_ += static_cast<size_t>(taken);
    taken_at_ = base::Clock::now();
    if (written_ < lines_.front().size()) continue;
    bytes_ -= written_;
    written_ = 0;
    lines_.pop_front();
  }
  return 0;
}

void LogFile::open(const std::string& path) {
  if (path.empty()) return;
  const auto refuse = [&path](const char* why) { base::invalid("--log " + path + ": " + why); };
  struct stat info {};
  const bool exists = stat(path.c_str(), &info) == 0;
  if (exists && !S_ISREG(info.st_mode) && !S_ISCHR(info.st_mode)) refuse("is not a file");
  std::error_code ignored;  // open() fails, too
  if (S_ISREG(info.st_mode) && std::filesystem::equivalent(path, "/proc/self/fd/1", ignored)) {
    refuse("standard output goes there already");
  }
  std::filesystem::create_directories(std::filesystem::path(path).parent_path(), ignored);
  fd_ = net::Fd(::open(path.c_str(), O_RDWR | O_APPEND | O_CREAT | O_CLOEXEC | O_NOCTTY, 0666));
  if (!fd_.valid()) refuse(strerror(errno));
  path_ = path;
  // A process that was killed, or a crash of the host, may have left a part of a line.
  char last = 0;
  if (exists && pread(fd_.get(), &last, 1, info.st_size - 1) == 1 && last != '\n') write("\n");
}

Json LogFile::write(std::string_view line) {
  if (!fd_.valid()) return nullptr;
  ssize_t done = ::write(fd_.get(), line.data(), line.size());
  if (done == std::ssize(line)) return nullptr;
  if (done > 0) {  // the disk is full: remove the part, unless another process has written since
    const off_t end = lseek(fd_.get(), 0, SEEK_CUR);
    if (lseek(fd_.get(), 0, SEEK_END) == end) done = ftruncate(fd_.get(), end - done);
    errno = ENOSPC;
  }
  if (std::exchange(has_failed_, true)) return nullptr;
  return {
      {"kind", base::kind_name(base::ErrorKind::kResources)},
      {"message", fmt::format("--log {}: {}: lines are missing there", path_, strerror(errno))}};
}

Json json_event(std::string_view event, const std::string& run_id, const std::string& cmd,
                std::optional<int> rank, const std::string& role, const Json& fields) {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  const auto us = std::chrono::duration_cast<std::chrono::microseconds>(now).count();
  Json line{{"v", 1},
            {"ts", static_cast<double>(us) / 1e6},
            {"run", or_null(run_id)},
            {"event", event},
            {"cmd", or_null(cmd)},
            {"rank", or_null(rank)},
            {"role", or_null(role)}};
  if (fields.is_object()) line.update(fields);
  return line;
}

std::string line_of(const Json& event) {
  // File names and messages may contain invalid UTF-8, for which dump() would throw.
  return event.dump(-1, ' ', false, Json::error_handler_t::replace) + '\n';
}

std::optional<double> number_in(const Json& fields, const std::string& name) {
  const auto value = fields.find(name);
  if (value == fields.end() || !value->is_number()) return std::nullopt;
  return value->get<double>();
}

std::string text_in(const Json& fields, const char* name) {
  const auto value = fields.find(name);
  return value != fields.end() && value->is_string() ? value->get<std::string>() : std::string();
}

Cause cause_of(const base::Error& error) {
  return {.rank = error.rank >= 0 ? std::optional(error.rank) : std::nullopt,
          .kind = std::string(base::kind_name(error.kind)),
          .message = error.message,
          .op = error.op,
          .exit_code = base::exit_code(error.kind)};
}

Cause cause_by_signal(int number, std::optional<int> rank) {
  const std::string name = signal_name(number);
  return {.rank = rank,
          .host = host_name(),
          .signal = name,
          .kind = std::string(base::kind_name(base::ErrorKind::kCancelled)),
          .message = "ended by " + name,
          .exit_code = 128 + number};
}

std::string rank_name(int rank, const std::string& role) {
  return fmt::format("rank {}{}", rank, role.empty() ? "" : " (" + role + ")");
}

std::string message_of(const Cause& cause) {
  const bool is_of_job = !cause.rank || cause.role == "local" || cause.kind == kGoalNotReached ||
                         cause.kind == base::kind_name(base::ErrorKind::kCancelled);
  const bool is_named =
      is_of_job || std::regex_search(cause.message, std::regex(rank_name(*cause.rank, "") + "\\b"));
  return is_named ? cause.message : rank_name(*cause.rank, cause.role) + ": " + cause.message;
}

std::string signal_name(int number) {
  const char* name = sigabbrev_np(number);
  return name ? fmt::format("SIG{}", name) : fmt::format("signal {}", number);
}

Json error_fields(const Cause& cause, base::TimePoint started) {
  return {{"kind", cause.kind},
          {"message", cause.message},
          {"cause_rank", or_null(cause.rank)},
          {"op", or_null(cause.op)},
          {"elapsed_s", rounded(base::seconds_since(started), 1e6)},
          {"exit_code", cause.exit_code}};
}

void Summary::add(const Json& fields) {
  sum_up(fields, sums_);
  sum_up(fields.value("rpc", Json()), rpc_);
  for (const char* name : {"train_s", "rss_mb", "device_mem_mb"}) {
    if (const auto value = number_in(fields, name)) most_[name] = std::max(most_[name], *value);
  }
  most_["cpu_s"] += number_in(fields, "cpu_s").value_or(0);
  const Json devices = fields.value("device", Json());
  for (const Json& device : devices.is_array() ? devices : Json::array({devices})) {
    if (!device.is_string()) continue;
    const auto& name = device.get_ref<const std::string&>();
    if (std::ranges::find(devices_, name) == devices_.end()) devices_.push_back(name);
  }
  for (const auto& [name, value] : fields.items()) {
    if (name == "updates" && value.is_number() && metrics_.contains(name)) {
      metrics_[name] = metrics_[name].get<int64_t>() + value.get<int64_t>();
    }
    const bool is_metric = std::ranges::find(kCommon, name) == std::end(kCommon);
    if (is_metric && !metrics_.contains(name) && !value.is_null()) metrics_[name] = value;
  }
}

Json Summary::end_fields(const char* scope, base::TimePoint started,
                         const std::optional<Cause>& cause) const {
  const auto most = [this](const char* name) {
    const auto found = most_.find(name);
    return found == most_.end() ? 0 : found->second;
  };
  const double train_s = most("train_s");
  Json fields{{"status", cause ? "failed" : "ok"},
              {"exit_code", cause ? cause->exit_code : 0},
              {"scope", scope},
              {"wall_s", rounded(base::seconds_since(started), 1e6)},
              {"train_s", most_.contains("train_s") ? Json(rounded(train_s, 1e6)) : Json()},
              {"steps", sums_["steps"]},
              {"steps_per_s", train_s > 0 ? Json(sums_["steps"].get<double>() / train_s) : Json()},
              {"cpu_s", rounded(most("cpu_s"), 1e3)},
              {"rpc", rpc_},
              {"rss_mb", rounded(most("rss_mb"), 1e3)}};
  if (!devices_.empty()) {
    fields["device"] = devices_.size() == 1 ? Json(devices_.front()) : Json(devices_);
    fields["device_mem_mb"] = rounded(most("device_mem_mb"), 1e3);
  }
  fields.update(sums_);
  fields.update(metrics_);
  if (cause) {
    fields.update({{"kind", cause->kind},
                   {"message", cause->message},
                   {"cause_rank", or_null(cause->rank)},
                   {"cause_role", or_null(cause->role)},
                   {"host", or_null(cause->host)},
                   {"signal", or_null(cause->signal)},
                   {"stderr_tail", cause->stderr_tail}});
  }
  return fields;
}

}  // namespace distrain::app
