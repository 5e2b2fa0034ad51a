#include <algorithm>
#include <chrono>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include <fmt/format.h>

#include "distrain/job/option_list.h"
#include "distrain/membership/slot.h"
#include "options.h"

namespace distrain::app {
namespace {

/// `delay=50ms` delays each call. `stage=100ms` makes a pipeline stage sleep instead of computing.
/// `fail=checkpoint.3` fails the third system call of the first save. `save=200ms` delays the
/// writing of each checkpoint.
struct InjectedFault {
  std::string text;         // as the user gave it
  std::string kind;         // delay, stage, fail or save
  double seconds = 0;       // for all kinds but `fail`
  int64_t system_call = 0;  // for `fail`
  std::optional<int> rank;  // if unset: all ranks where the fault is possible
};

/// Parses a whole number. Throws `invalid`, with a message that begins with `where`, if `text` is
/// not a whole number from `min` to `max`.
int64_t parse_number(std::string_view text, const std::string& where, double min, double max) {
  const Option option = {.kind = ValueKind::kInteger, .min = min, .max = max};
  return std::stoll(canonical_value(option, text, where));
}

/// Parses a time such as "50ms" and returns seconds. Throws `invalid` unless it is above 0.
double parse_time(std::string_view value, const std::string& where) {
  constexpr std::pair<std::string_view, double> kUnits[] = {{"us", 1e-6}, {"ms", 1e-3}, {"s", 1}};
  const Option option = {.kind = ValueKind::kReal, .max = 1e6, .above_min = true};
  for (const auto& [unit, seconds] : kUnits) {
    if (!value.ends_with(unit)) continue;
    value.remove_suffix(unit.size());
    return std::stod(canonical_value(option, value, where)) * seconds;
  }
  invalid("{} must be a time in us, ms or s (50ms), not '{}'", where, value);
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
    fault.system_call =
        parse_number(value.substr(kCheckpoint.size()), where + ": what fails", 1, job::kMaxInt);
  } else if (fault.kind == "delay") {
    fault.seconds = parse_time(value, where + ": the delay");
  } else if (fault.kind == "stage" || fault.kind == "save") {
    fault.seconds = parse_time(value, where + ": the time");
  } else {
    invalid("{}: unknown fault '{}'; the faults are delay, stage, fail and save", where,
            fault.kind);
  }
  return fault;
}

std::vector<InjectedFault> faults_of(const ParsedOptions& options) {
  std::vector<InjectedFault> faults;
  const std::string text = options.text("inject");
  if (text.empty()) return faults;
  for (const auto part : base::split(text, ',')) faults.push_back(parse_fault(part));
  return faults;
}

}  // namespace

void check_injections(const ParsedOptions& options, bool has_stages, Placement& placement) {
  const bool local = placement.mode == Placement::Mode::kLocal;
  for (const InjectedFault& fault : faults_of(options)) {
    const std::string where = "--inject " + fault.text;
    const bool is_stage = fault.kind == "stage";
    const bool of_saves = fault.kind == "fail" || fault.kind == "save";
    const int rank = fault.rank.value_or(is_stage ? 1 : 0);
    if (fault.rank && placement.mode == Placement::Mode::kJoin &&
        placement.rank == membership::kUnassignedRank) {
      invalid(where + ": with --rank auto, rank 0 assigns the rank later");
    }
    placement.check_rank(rank, where);
    if (is_stage && !has_stages) invalid(where + ": this job has no stages");
    if (is_stage && rank == 0) invalid(where + ": rank 0 is the master, not a stage");
    if (of_saves && rank != 0) invalid(where + ": only rank 0 saves checkpoints");
    if (of_saves && options.text("checkpoint").empty()) {
      placement.warn(where + " has no effect without --checkpoint");
    }
    const bool stage_here = placement.mode == Placement::Mode::kSpawn ? placement.ranks.back() > 0
                                                                      : placement.rank != 0;
    if (is_stage && !local && !stage_here) {
      placement.warn(where + " has no effect: no stage runs here");
    }
    if (!of_saves && local) {
      placement.warn(fmt::format("{} has no effect with --local: there are no {}", where,
                                 is_stage ? "stages" : "calls"));
    }
  }
}

job::Injection injection_of(const ParsedOptions& options, int rank) {
  job::Injection injection;
  for (const InjectedFault& fault : faults_of(options)) {
    if (fault.kind == "fail") {
      if (rank == 0) injection.fail_checkpoint = fault.system_call;
    } else if (fault.kind == "save") {
      if (rank != 0) continue;
      injection.before_save = [seconds = fault.seconds, left = fault.seconds]() mutable {
        std::this_thread::sleep_for(std::chrono::duration<double>(std::min(left, 0.1)));
        if ((left -= 0.1) > 0) return true;
        left = seconds;
        return false;
      };
    } else if (fault.rank.value_or(rank) == rank) {
      (fault.kind == "stage" ? injection.stage_sleep_s : injection.call_delay_s) = fault.seconds;
    }
  }
  return injection;
}

}  // namespace distrain::app
