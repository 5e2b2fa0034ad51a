// Checks of options before any rank starts, against checkpoints and the file system.

#include <filesystem>

#include <errno.h>
#include <fmt/format.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "distrain/base/error.h"
#include "distrain/base/text.h"
#include "distrain/membership/slot.h"
#include "options.h"

namespace distrain::app {
namespace {

/// Returns `text`, the option's value in `saved`, in canonical form; empty if it was not set.
std::string canonical(const Option& option, const std::string& text, const job::Snapshot& saved) {
  if (text.empty()) return text;
  try {
    return canonical_value(option, text, "its --" + option.name);
  } catch (const base::Exception& e) {
    saved.refuse(e.error().message);
  }
}

/// Replaces the values of options that were not given by the saved values. Returns a text that
/// lists the given options whose values differ from the saved ones.
std::string take_options(ParsedOptions& options, const job::Snapshot& saved, bool of_model_only) {
  std::string changed;
  for (const Option& option : options.table()) {
    if (!is_job_option(option) || (of_model_only && option.may_change)) continue;
    const auto text = saved.option(option.name);
    if (!text) continue;
    const std::string was = canonical(option, *text, saved);
    if (!options.given(option.name)) {
      const bool reached = option.step_limit && !was.empty() && saved.step >= std::stoll(was);
      if (!reached) options.take(option.name, was);
      continue;
    }
    const std::string now = options.text(option.name);
    if (now == was) continue;
    if (!option.may_change) {
      saved.expect_option(option.name, now, of_model_only ? "" : job::kTrainAnew);
    }
    // Rank 0 compares the content of these files with the checkpoint, so their paths may differ.
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

void check_required(const ParsedOptions& options) {
  std::string missing;
  for (const Option& option : options.table()) {
    const bool is_taken = options.decided(option.name) && !options.text(option.name).empty();
    if (!option.is_required || options.given(option.name) || is_taken) continue;
    missing += fmt::format("{}--{}", missing.empty() ? "" : ", ", option.name);
  }
  if (!missing.empty()) invalid(missing + " must be given");
}

void check_trace(const std::string& path) {
  try {
    job::check_trace_path(path);
  } catch (const base::Exception& e) {
    throw base::Exception(e.kind(), "--trace: " + e.error().message);
  }
}

/// Throws `invalid` if --max-restarts has no effect. Only a launcher restarts ranks: all of them
/// from a checkpoint, or a lost trainer that the job continues without.
void check_restarts(const ParsedOptions& options, const Placement& placement) {
  if (!options.given("max-restarts")) return;
  if (placement.mode == Placement::Mode::kSpawn) {
    const bool may_lose = find_option(options.table(), "min-trainers");
    const bool is_sync = options.text("mode") == "sync";
    const bool saves = !options.text("checkpoint").empty() || !placement.has_rank_0();
    const bool has_spare =
        may_lose && options.integer("min-trainers") < options.integer("trainers");
    if (saves || (has_spare && !is_sync)) return;
    invalid("--max-restarts needs --checkpoint{}",
            !may_lose ? ""
            : is_sync ? " in --mode sync"
                      : ", or more --trainers than --min-trainers");
  }
  if (placement.mode == Placement::Mode::kLocal) invalid("--max-restarts has no effect on --local");
  const std::string& source = placement.source;
  const bool is_unassigned = placement.rank == membership::kUnassignedRank;
  const std::string rank = is_unassigned ? "auto" : std::to_string(placement.rank);
  invalid("--max-restarts needs a launcher: --ranks {} in place of {}",
          is_unassigned ? "LIST" : rank, source == "--rank" ? "--rank " + rank : source);
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
  const job::Snapshot saved = job::read_manifest(*path);
  saved.expect_cmd(cmd);
  const std::string changed = take_options(options, saved, false);
  if (changed.empty()) return {};
  return fmt::format("the job goes on from {} with {}", saved.path, changed);
}

void take_model_options(ParsedOptions& options, const job::Snapshot& saved) {
  for (const Option& option : options.table()) {
    const bool of_model = is_job_option(option) && option.group != "Checkpoints" &&
                          !option.may_change && !option.of_training;
    if (options.given(option.name) && !of_model && !option.of_predict) {
      invalid("--{} has no effect on predict", option.name);
    }
  }
  if (options.given("trace")) check_trace(options.text("trace"));
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
  // Returns true if the option has a path: given, from a checkpoint, or found by the job itself.
  const auto has = [&](const std::string& name) {
    const Option* const option = find_option(options.table(), name);
    const std::string text = options.text(name);
    if (!option || !is_path(*option, text)) return false;
    return option->kind == ValueKind::kText || options.decided(name) || text != option->initial;
  };
  // The word for data that the job generates, if it does.
  const std::string made = has("data") ? "" : options.text("data");
  for (const Option& option : options.table()) {
    const bool given = options.given(option.name);
    if (has_rank_0 && given && !option.needs.empty() && !has(option.needs)) {
      invalid("--{} needs --{}{}", option.name, option.needs,
              made.empty() || option.needs != "data" ? "" : " FILE, not " + made);
    }
    // A joining rank skips the rest, because rank 0 may set the data.
    if (placement.mode == Placement::Mode::kJoin) continue;
    const bool idle = has("data") ? option.random_only : option.data_only;
    if (has_rank_0 && given && idle) {
      const std::string data = made.empty() ? "" : ' ' + made;
      placement.warn(fmt::format("--{} has no effect {} --data{}", option.name,
                                 has("data") || !data.empty() ? "with" : "without", data));
    }
    const bool has_path =
        option.path != Option::Path::kAny && is_path(option, options.text(option.name));
    if (has_path && (has_rank_0 || given)) {
      check_path(options, option.name, option.path == Option::Path::kFolder,
                 placement.mode == Placement::Mode::kSpawn);
    }
  }
  if (!has_rank_0) return;
  if (options.text("resume") != "auto") {
    check_path(options, "resume", true);
  } else if (options.text("checkpoint").empty()) {
    invalid("--resume auto needs --checkpoint");
  }
  if (options.given("trace")) check_trace(options.text("trace"));
}

}  // namespace distrain::app
