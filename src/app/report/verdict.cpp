#include <fmt/format.h>
#include <fmt/ranges.h>

#include "process/output.h"
#include "run_log.h"

namespace distrain::app {
namespace {

std::optional<int> rank_in(const Json& line, const char* field) {
  const auto rank = number_in(line, field);
  return rank && *rank >= 0 && *rank < 1e6 ? std::optional(static_cast<int>(*rank)) : std::nullopt;
}

/// Returns true if a rank or a command reports a failure by the line.
bool is_failure(const Json& line) {
  return text_in(line, "event") == "error" || text_in(line, "status") == "failed";
}

}  // namespace

Json verdict_of(const LoggedRun& run) {
  std::map<int, std::string> roles;
  std::vector<const Json*> failures;
  const Json* end = nullptr;
  for (const Json& line : run.events) {
    const std::string event = text_in(line, "event");
    const bool is_of_job = text_in(line, "scope") == "job";
    if (const auto rank = rank_in(line, "rank")) roles[*rank] = text_in(line, "role");
    if (event == "restart") failures.clear();  // the job has recovered from them
    if (is_failure(line)) failures.push_back(&line);
    // Prefers the `end` of the whole job, then that of a rank that failed.
    const bool is_settled = end && (text_in(*end, "scope") == "job" || is_failure(*end));
    if (event == "end" && (is_of_job || !is_settled)) end = &line;
  }
  const bool has_failed = end ? is_failure(*end) : !failures.empty();
  if (!has_failed) {
    const std::string open =
        fmt::format("No end line: the run goes on, or was killed; the last line is from {:.4g} s",
                    run.end - run.begin);
    return {{"state", end ? "ok" : "open"},
            {"title", end ? "Finished" : open},
            {"details", Json::array()}};
  }

  const Json* root = end ? end : failures.front();
  const auto first = rank_in(*root, "cause_rank");
  std::map<int, std::string> followers;
  for (const Json* each : failures) {
    const auto rank = rank_in(*each, "rank");
    // The others report only that rank `first` is lost; its own `error` has the reason.
    if (rank && rank == first && text_in(*root, "kind") == "peer_lost") root = each;
    if (rank && rank != first) followers[*rank] = rank_name(*rank, roles[*rank]);
  }
  const Cause cause{.rank = first,
                    .role = first ? roles[*first] : "",
                    .kind = text_in(*root, "kind"),
                    .message = text_in(*root, "message")};
  const bool is_stopped = cause.kind == "cancelled", is_missed = cause.kind == kGoalNotReached;
  const char* const words = is_stopped  ? "Stopped: "
                            : is_missed ? "Goal not reached: "
                                        : "Failed: ";
  const std::string signal = text_in(*root, "signal"), host = text_in(*root, "host");
  Json details{fmt::format(
      "Kind {}{}, exit code {:.0f}{}.", cause.kind, signal.empty() ? "" : ", by " + signal,
      number_in(end ? *end : *root, "exit_code").value_or(1), host.empty() ? "" : ", on " + host)};
  constexpr size_t kMostNames = 4;
  std::vector<std::string> names;
  for (const auto& [rank, name] : followers) names.push_back(name);
  if (names.size() > kMostNames) {
    names.resize(kMostNames);
    names.push_back(fmt::format("{} more", followers.size() - kMostNames));
  }
  if (!names.empty() && !is_stopped)
    details.push_back(fmt::format("Then failed: {}.", fmt::join(names, ", ")));
  for (const Json& line : root->value("stderr_tail", Json::array())) details.push_back(line);
  return {{"state", is_stopped  ? "stopped"
                    : is_missed ? "missed"
                                : "failed"},
          {"title", words + message_of(cause)},
          {"details", details}};
}

}  // namespace distrain::app
