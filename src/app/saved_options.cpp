#include "saved_options.h"

#include <string>

#include <fmt/format.h>

#include "distrain/app/checks.h"
#include "distrain/base/error.h"

namespace distrain::app {

std::string canonical(const Option& option, const std::string& text, const job::Snapshot& saved) {
  if (text.empty()) return text;
  try {
    return canonical_value(option, text, "its --" + option.name);
  } catch (const base::Exception& e) {
    saved.refuse(e.error().message);
  }
}

std::string take_options(ParsedOptions& options, const job::Snapshot& saved, Take take) {
  std::string changed;
  for (const Option& option : options.table()) {
    if (!is_job_option(option) || (take != Take::kAll && option.may_change)) continue;
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
    if (!option.may_change) saved.expect_option(option.name, now);
    changed += fmt::format("{}--{} {} in place of {}", changed.empty() ? "" : ", ", option.name,
                           now, was.empty() ? "none" : was);
  }
  return changed;
}

std::string take_resumed_options(ParsedOptions& options, const std::string& cmd) {
  const std::string resume = options.text("resume");
  const std::string folder = options.text("checkpoint");
  if (resume == "auto" && folder.empty()) return {};  // which is refused
  if (resume != "auto") check_folder(options, "resume");
  const auto path = job::checkpoint_to_resume({folder, 0, resume});
  if (!path) return {};
  const job::Snapshot saved = job::read_manifest(*path);
  saved.expect_cmd(cmd);
  const std::string changed = take_options(options, saved, Take::kAll);
  if (changed.empty()) return {};
  return fmt::format("the job goes on from {} with {}", saved.path, changed);
}

}  // namespace distrain::app
