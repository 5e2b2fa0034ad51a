// Checks the options against checkpoints and the file system before any rank starts.

#include <cstdlib>
#include <filesystem>
#include <thread>

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "distrain/base/text.h"
#include "distrain/data/stream.h"
#include "distrain/membership/slot.h"
#include "distrain/net/socket.h"
#include "distrain/store/named_tensors.h"
#include "program.h"

namespace distrain::app {
namespace {

/// Returns the canonical form of `text`, the saved value of `option`; empty if `text` is empty.
std::string canonical(const Option& option, const std::string& text, const job::Snapshot& saved) {
  if (text.empty()) return text;
  try {
    return canonical_value(option, text, "its --" + option.name);
  } catch (const base::Exception& e) {
    saved.refuse(e.error().message);
  }
}

/// Sets the options that the user did not give to the saved values. Returns a text that lists the
/// given options whose values differ from the saved ones.
std::string take_options(ParsedOptions& options, const job::Snapshot& saved, bool of_model_only) {
  std::string changed;
  for (const Option& option : options.table()) {
    if (!is_job_option(option) || (of_model_only && option.may_change)) continue;
    const auto text = saved.option(option.name);
    if (!text) continue;
    const std::string was = canonical(option, *text, saved);
    if (!options.values().contains(option.name)) {
      const bool reached = option.step_limit && !was.empty() && saved.step >= std::stoll(was);
      if (!reached) options.take(option.name, was, "checkpoint " + saved.path);
      continue;
    }
    const std::string now = options.text(option.name);
    if (now == was) continue;
    if (!option.may_change) {
      saved.expect_option(option.name, now, option.initial, of_model_only ? "" : job::kTrainAnew);
    }
    // Do not report the paths of files in `agreed`, because rank 0 compares the files' content.
    if (saved.state.value("agreed", Json::object()).contains(option.name)) continue;
    changed += fmt::format("{}--{} {} in place of {}", changed.empty() ? "" : ", ", option.name,
                           now, was.empty() ? "none" : was);
  }
  return changed;
}

/// Throws `bad_data` unless the option's path, if set, leads to a readable folder or nonempty file.
/// If `starts_ranks`, each rank opens the file, so pipes and open descriptors are refused.
void check_path(const ParsedOptions& options, const std::string& name, bool is_folder,
                bool starts_ranks = false) {
  const std::string path = options.text(name);
  if (path.empty()) return;
  const auto refuse = [&](const std::string& why) {
    base::bad_data(fmt::format("--{} {}: {}", name, path, why));
  };
  struct stat info {};
  if (stat(path.c_str(), &info) != 0 || access(path.c_str(), R_OK) != 0) {
    const std::string why = strerror(errno);
    const auto meant = base::did_you_mean(path, {find_option(options.table(), name)->path_word});
    refuse(why + (meant ? "; did you mean " + *meant + "?" : ""));
  }
  if (is_folder && !S_ISDIR(info.st_mode)) refuse("is a file, a folder is needed");
  if (!is_folder && S_ISDIR(info.st_mode)) refuse("is a folder, a file is needed");
  const bool is_open_here =
      path == "/dev/stdin" || path.starts_with("/dev/fd/") || path.starts_with("/proc/");
  if (starts_ranks && !is_folder && (!S_ISREG(info.st_mode) || is_open_here)) {
    refuse(
        "not a regular file that each rank can open: save what comes from there in a file, or "
        "use --local");
  }
  if (S_ISREG(info.st_mode) && info.st_size == 0) refuse("the file is empty");
}

/// Does the same for each file of an option with several files. Its job checks pipes.
void check_files(const ParsedOptions& options, const std::string& name,
                 const Placement& placement) {
  struct stat info {};
  const std::string text = options.text(name);
  if (text.find_first_of(",*?[") == text.npos && text != "-" &&
      (stat(text.c_str(), &info) != 0 || S_ISREG(info.st_mode) || S_ISDIR(info.st_mode))) {
    return check_path(options, name, false, placement.spawns());
  }
  store::naming_file("--" + name, [&] { data::expand_paths(data::split_paths(text)); });
}

void check_required(const ParsedOptions& options) {
  std::string missing;
  for (const Option& option : options.table()) {
    const bool is_taken = options.decided(option.name) && !options.text(option.name).empty();
    if (!option.is_required || options.given(option.name) || is_taken) continue;
    missing += fmt::format("{}--{}", missing.empty() ? "" : ", ", option.name);
  }
  if (!missing.empty()) invalid(missing + " must be given");
}

void check_trace(const ParsedOptions& options) try {
  if (options.given("trace")) job::check_trace_path(options.text("trace"));
} catch (const base::Exception& e) {
  throw base::Exception(e.kind(), "--trace: " + e.error().message);
}

/// Throws `invalid` if --max-restarts has no effect. Only a launcher restarts ranks: all ranks from
/// a checkpoint, or a single lost trainer while the job continues.
void check_restarts(const ParsedOptions& options, const Placement& placement) {
  if (!options.given("max-restarts")) return;
  if (placement.spawns()) {
    const bool may_lose = find_option(options.table(), "min-trainers");
    const bool is_sync = options.text("mode") == "sync";
    const bool saves = !options.text("checkpoint").empty() || !placement.has_rank_0();
    const bool has_spare = options.integer("min-trainers") < options.integer("trainers");
    if (saves || (may_lose && has_spare && !is_sync)) return;
    invalid("--max-restarts needs --checkpoint{}",
            !may_lose ? ""
            : is_sync ? " in --mode sync"
                      : ", or more --trainers than --min-trainers");
  }
  if (placement.is_local()) invalid("--max-restarts has no effect on --local");
  const std::string& source = placement.source;
  const bool is_unassigned = placement.rank == membership::kUnassignedRank;
  const std::string rank = is_unassigned ? "auto" : std::to_string(placement.rank);
  invalid("--max-restarts needs a launcher: --ranks {} in place of {}",
          is_unassigned ? "LIST" : rank, source == "--rank" ? "--rank " + rank : source);
}

constexpr char kVariable[] = "DISTRAIN_TOKEN";
constexpr size_t kShortest = 16;
constexpr size_t kLongest = 4096;
constexpr char kOrMake[] =
    "; make one with `(umask 077; head -c 32 /dev/urandom | base64 > job.token)`";

/// Strips white space, such as the last newline, from a token. Throws `invalid` if it is too short.
std::string checked(const std::string& text, const std::string& where) {
  constexpr char kSpace[] = " \t\r\n";
  const size_t begin = std::min(text.find_first_not_of(kSpace), text.size());
  const std::string token = text.substr(begin, text.find_last_not_of(kSpace) + 1 - begin);
  if (token.size() >= kShortest) return token;
  invalid("{}: a token has at least {} characters{}", where, kShortest, kOrMake);
}

std::string read_token(const std::string& path) {
  const std::string where = "--token-file " + path;
  const net::Fd file(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  struct stat info {};
  if (!file.valid() || fstat(file.get(), &info) != 0) {
    const int error = errno;
    invalid("{}: {}{}", where, strerror(error), error == ENOENT ? kOrMake : "");
  }
  if (!S_ISREG(info.st_mode)) invalid(where + ": is not a file");
  const auto refuse = [&where](const std::string& why) {
    throw base::Exception(base::ErrorKind::kAuth, where + ": " + why);
  };
  if (info.st_uid != geteuid() && info.st_uid != 0) refuse("belongs to another user");
  if ((info.st_mode & 077) != 0) refuse("others may read or change it; chmod 600 " + path);
  std::string text(kLongest + 1, '\0');
  const ssize_t size = read(file.get(), text.data(), text.size());
  if (size < 0) invalid("{}: {}", where, strerror(errno));
  if (static_cast<size_t>(size) > kLongest) {
    invalid("{}: a token has at most {} bytes", where, kLongest);
  }
  text.resize(static_cast<size_t>(size));
  return checked(text, where);
}

/// A fault of --inject. `delay=50ms` delays each call. `stage=100ms` makes a pipeline stage sleep
/// instead of computing. `fail=checkpoint.3` kills rank 0, or a rank that writes a part of
/// the checkpoint, at the third system call of its first save. `save=200ms` delays saves.
struct InjectedFault {
  std::string text;         // as the user gave it
  std::string kind;         // delay, stage, fail or save
  double seconds = 0;       // for all kinds but `fail`
  int64_t system_call = 0;  // for `fail`
  std::optional<int> rank;  // if unset: every rank that can have the fault
};

/// Parses a whole number from `min` to `max`. Throws `invalid` with a message that names `where`.
int64_t parse_number(std::string_view text, const std::string& where, double min, double max) {
  const Option option = {.kind = ValueKind::kInteger, .min = min, .max = max};
  return std::stoll(canonical_value(option, text, where));
}

InjectedFault parse_fault(std::string_view rest) {
  constexpr std::string_view kRank = "@rank=", kCheckpoint = "checkpoint.";
  InjectedFault fault;
  fault.text = rest;
  const std::string where = "--inject " + fault.text;
  if (const size_t at = rest.find('@'); at != std::string_view::npos) {
    const std::string_view mark = rest.substr(at);
    if (!mark.starts_with(kRank)) invalid(where + ": @ must be followed by rank=N");
    const std::string_view number = mark.substr(kRank.size());
    fault.rank = static_cast<int>(parse_number(number, where + ": the rank", 0, 1023));
    rest = rest.substr(0, at);
  }
  const size_t equals = rest.find('=');
  if (equals == std::string_view::npos) invalid(where + ": a fault has the form KIND=VALUE");
  fault.kind = rest.substr(0, equals);
  const std::string_view value = rest.substr(equals + 1);
  if (fault.kind == "fail") {
    if (!value.starts_with(kCheckpoint)) {
      invalid("{}: what fails must be checkpoint.N, not '{}'", where, value);
    }
    const std::string_view number = value.substr(kCheckpoint.size());
    fault.system_call = parse_number(number, where + ": what fails", 1, job::kMaxInt);
  } else if (fault.kind == "delay" || fault.kind == "stage" || fault.kind == "save") {
    const char* const what = fault.kind == "delay" ? ": the delay" : ": the time";
    const Option time = {
        .kind = ValueKind::kReal, .max = 1e6, .above_min = true, .is_duration = true};
    fault.seconds = std::stod(canonical_value(time, value, where + what));
  } else {
    invalid(where + ": unknown fault '" + fault.kind +
            "'; the faults are delay, stage, fail and save");
  }
  return fault;
}

std::vector<InjectedFault> faults_of(const ParsedOptions& options) {
  const std::string text = options.text("inject");
  std::vector<InjectedFault> faults;
  if (text.empty()) return faults;
  for (const auto part : base::split(text, ',')) faults.push_back(parse_fault(part));
  return faults;
}

}  // namespace

std::string take_resumed_options(ParsedOptions& options, const std::string& cmd) {
  const std::string resume = options.text("resume");
  const std::string folder = options.text("checkpoint");
  if (resume == "auto" && folder.empty()) return {};  // check_options() refuses this
  std::error_code error;
  if (std::filesystem::exists(folder, error)) check_path(options, "checkpoint", true);
  if (resume != "auto") check_path(options, "resume", true);
  const auto path = job::checkpoint_to_resume({folder, 0, resume});
  if (!path) return {};
  const job::Snapshot saved = job::read_checkpoint(*path, "--resume", store::Depth::kManifest);
  saved.expect_cmd(cmd);
  const std::string changed = take_options(options, saved, false);
  return changed.empty() ? "" : "the job goes on from " + saved.path + " with " + changed;
}

void take_model_options(ParsedOptions& options, const job::Snapshot& saved) {
  for (const Option& option : options.table()) {
    const bool of_model = is_job_option(option) && option.group != "Checkpoints" &&
                          !option.may_change && !option.of_training;
    if (options.given(option.name) && !of_model && !option.of_predict) {
      invalid("--{} has no effect on predict", option.name);
    }
  }
  check_trace(options);
  take_options(options, saved, true);
  // Use the saved job's number of threads, because the rounding of sums depends on it.
  const Json threads = saved.state.value("threads", Json());
  if (threads.is_number_integer()) {
    const Option& option = *find_option(options.table(), "threads");
    options.derive(option.name, canonical(option, threads.dump(), saved));
  }
}

void check_options(const ParsedOptions& options, Placement& placement) {
  check_restarts(options, placement);
  const bool has_rank_0 = placement.has_rank_0();
  if (has_rank_0) check_required(options);
  // Returns true if the option has a path: from the user, a checkpoint, or the job's own search.
  const auto has = [&](const std::string& name) {
    const Option* const option = find_option(options.table(), name);
    const std::string text = options.text(name);
    if (!option || !is_path(*option, text)) return false;
    return option->kind == ValueKind::kText || options.decided(name) || text != option->initial;
  };
  // The value of --data that names generated data, such as "random"; empty for a path.
  const std::string made = has("data") ? "" : options.text("data");
  for (const Option& option : options.table()) {
    const bool given = options.given(option.name);
    if (has_rank_0 && given && !option.needs.empty() && !has(option.needs)) {
      invalid("--{} needs --{}{}", option.name, option.needs,
              made.empty() || option.needs != "data" ? "" : " FILE, not " + made);
    }
    // Skip the other checks on a joining rank, because rank 0 may send another value of --data.
    if (placement.joins()) continue;
    const bool idle = has("data") ? option.random_only : option.data_only;
    if (has_rank_0 && given && idle) {
      const std::string data = made.empty() ? "" : ' ' + made;
      placement.warn(fmt::format("--{} has no effect {} --data{}", option.name,
                                 has("data") || !data.empty() ? "with" : "without", data));
    }
    if (option.path == Option::Path::kAny || !(has_rank_0 || given)) continue;
    const std::string text = options.text(option.name);
    if (!is_path(option, text)) continue;
    if (option.path == Option::Path::kFiles) {
      check_files(options, option.name, placement);
    } else {
      check_path(options, option.name, option.path == Option::Path::kFolder, placement.spawns());
    }
  }
  if (!has_rank_0) return;
  if (options.text("resume") != "auto") {
    check_path(options, "resume", true);
  } else if (options.text("checkpoint").empty()) {
    invalid("--resume auto needs --checkpoint");
  }
  check_trace(options);
}

std::string take_token(const ParsedOptions& options, Placement& placement) {
  const char* const variable = std::getenv(kVariable);
  const std::string in_environment = variable ? variable : "";
  unsetenv(kVariable);  // child processes must not inherit it
  if (options.given("token-file")) {
    if (options.flag("insecure")) invalid("--token-file excludes --insecure");
    return read_token(options.text("token-file"));
  }
  if (in_environment.empty() || placement.is_local()) return {};
  if (options.flag("insecure")) {
    placement.warn(fmt::format("--insecure overrides {} of the environment", kVariable));
    return {};
  }
  std::string token = checked(in_environment, kVariable);
  placement.warn(fmt::format(
      "{}: root and other processes of this user can read it; --token-file is safer", kVariable));
  return token;
}

void check_injections(const ParsedOptions& options, const job::AnyDefinition& job,
                      Placement& placement) {
  const std::string saving_role = job.saving_role(options);
  const job::Roles roles = job.roles(options);
  const auto saves = [&](int rank, bool has_part) {
    return rank == 0 || (has_part && !saving_role.empty() && !placement.is_local() &&
                         roles.named(saving_role).has(rank));
  };
  for (const InjectedFault& fault : faults_of(options)) {
    const std::string where = "--inject " + fault.text;
    const bool is_stage = fault.kind == "stage";
    const bool of_saves = fault.kind == "fail" || fault.kind == "save";
    const int rank = fault.rank.value_or(is_stage ? 1 : 0);
    if (fault.rank && placement.joins() && placement.rank == membership::kUnassignedRank) {
      invalid(where + ": with --rank auto, rank 0 assigns the rank later");
    }
    placement.check_rank(rank, where);
    if (is_stage && !job.info().has_stages) invalid(where + ": this job has no stages");
    if (is_stage && rank == 0) invalid(where + ": rank 0 is the master, not a stage");
    if (of_saves && !saves(rank, fault.kind == "fail")) {
      invalid(where + ": only rank 0 saves checkpoints" +
              (fault.kind == "fail" && !saving_role.empty() ? ", and the ranks of " + saving_role
                                                            : ""));
    }
    if (of_saves && options.text("checkpoint").empty()) {
      placement.warn(where + " has no effect without --checkpoint");
    }
    if (is_stage && !placement.is_local() && placement.here().back() == 0) {
      placement.warn(where + " has no effect: no stage runs here");
    }
    if (!of_saves && placement.is_local()) {
      placement.warn(where + " has no effect with --local: there are no " +
                     (is_stage ? "stages" : "calls"));
    }
  }
}

job::Injection injection_of(const ParsedOptions& options, int rank) {
  job::Injection injection;
  for (const InjectedFault& fault : faults_of(options)) {
    const bool of_saves = fault.kind == "fail" || fault.kind == "save";
    if (fault.rank.value_or(of_saves ? 0 : rank) != rank) continue;
    if (fault.kind == "fail") {
      injection.fail_checkpoint = fault.system_call;
    } else if (fault.kind == "save") {
      injection.before_save = [seconds = fault.seconds, left = fault.seconds]() mutable {
        std::this_thread::sleep_for(std::chrono::duration<double>(std::min(left, 0.1)));
        if ((left -= 0.1) > 0) return true;
        left = seconds;
        return false;
      };
    } else {
      (fault.kind == "stage" ? injection.stage_sleep_s : injection.call_delay_s) = fault.seconds;
    }
  }
  return injection;
}

}  // namespace distrain::app
