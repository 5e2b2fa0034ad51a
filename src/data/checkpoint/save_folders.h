#pragma once

#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <string_view>

#include "files/open_folder.h"

namespace distrain::data {

// Note [Folders of a save]
//
//   .tmp-step-N        being written. Only when all of it is on the disk is it renamed to
//   step-N             a whole checkpoint, always: it comes and goes by rename only.
//   .replaced-step-N   what step-N was while the same step is saved again: whole, too. Where there
//                      is no step-N it counts as step-N; otherwise it is of no use.
//   .old-step-N        being removed.
//
// Two renames replace a step rather than an exchange in one, which not all file systems have.
// A save that is interrupted leaves some of these; the next one begins by clearing them away.
//
// Beside them is the lock's file: Note [One job saves in a folder].
//
// The folder above is opened once for as long as the job saves, and all of these by their names in
// it; no link is followed there. The user's own path to the folder may have links.
inline constexpr std::string_view kUnfinished = ".tmp-step-";
inline constexpr std::string_view kWhole = "step-";
inline constexpr std::string_view kReplaced = ".replaced-step-";
inline constexpr std::string_view kOld = ".old-step-";

std::string name_of(std::string_view prefix, int64_t step);

/// Whether it is the name of a whole checkpoint.
bool is_checkpoint(std::string_view name);

/// What there is of saves in a folder, by step. A link in place of a checkpoint is among them, so
/// that whoever opens it refuses it; a file is not.
struct Saves {
  std::set<int64_t> unfinished;
  std::set<int64_t> whole;
  std::set<int64_t> replaced;
  std::set<int64_t> old;

  /// Of the checkpoint that stands for this step.
  std::string name(int64_t step) const;
  /// Of all that can be loaded.
  std::set<int64_t> steps() const;
};

/// None, and errno, if the folder cannot be read.
std::optional<Saves> find_saves(const OpenFolder& folder);

/// A checkpoint's folder. Throws `bad_data` for what is none, and for a link.
OpenFolder open_save(const OpenFolder& folder, const std::string& name);

}  // namespace distrain::data
