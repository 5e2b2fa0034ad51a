#include "save_folders.h"

#include <cerrno>
#include <cstring>
#include <utility>

#include "distrain/base/error.h"
#include "distrain/base/text.h"
#include "distrain/store/file.h"

namespace distrain::store {
namespace {

constexpr size_t kStepDigits = 12;

// Returns the step in `name` if it has this prefix.
std::optional<int64_t> step_of(std::string_view prefix, std::string_view name) {
  if (!name.starts_with(prefix) || name.size() != prefix.size() + kStepDigits) return std::nullopt;
  const std::string_view digits = name.substr(prefix.size());
  if (digits.find_first_not_of("0123456789") != std::string_view::npos) return std::nullopt;
  return base::number<int64_t>(digits);
}

}  // namespace

std::string name_of(std::string_view prefix, int64_t step) {
  const std::string digits = std::to_string(step);
  return std::string(prefix).append(kStepDigits - digits.size(), '0') + digits;
}

bool is_checkpoint(std::string_view name) { return step_of(kWhole, name).has_value(); }

std::string Saves::name(int64_t step) const {
  return name_of(whole.contains(step) ? kWhole : kReplaced, step);
}

std::set<int64_t> Saves::steps() const {
  std::set<int64_t> all = whole;
  all.insert(replaced.begin(), replaced.end());
  return all;
}

std::optional<Saves> find_saves(const OpenFolder& folder) {
  const auto names = folder.names();
  if (!names) return std::nullopt;
  Saves saves;
  for (const std::string& name : *names) {
    if (const auto step = step_of(kUnfinished, name)) saves.unfinished.insert(*step);
    if (const auto step = step_of(kOld, name)) saves.old.insert(*step);
    for (const auto& [prefix, steps] :
         {std::pair(kWhole, &saves.whole), std::pair(kReplaced, &saves.replaced)}) {
      const auto step = step_of(prefix, name);
      if (!step) continue;
      const auto kind = folder.kind_of(name);
      const bool is_link = kind == OpenFolder::Kind::kLink;
      // The least name, because names() has no order.
      if (is_link && (!saves.link || name < *saves.link)) saves.link = name;
      if (is_link || kind == OpenFolder::Kind::kFolder) steps->insert(*step);
    }
  }
  return saves;
}

OpenFolder open_save(const OpenFolder& folder, const std::string& name) {
  if (auto save = folder.open(name)) return *std::move(save);
  const std::string reason = std::strerror(errno);
  if (folder.kind_of(name) == OpenFolder::Kind::kLink) {
    base::bad_data(folder.path_of(name) + kNotFollowed);
  }
  base::bad_data("cannot open " + folder.path_of(name) + ": " + reason);
}

}  // namespace distrain::store
