#pragma once

#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <string_view>

#include "distrain/store/open_folder.h"

namespace distrain::store {

// Note [Folders of a save]
//
//   .tmp-step-N        being written; renamed to step-N when all of it is on disk
//   step-N             a complete checkpoint; it appears and disappears only by rename
//   .replaced-step-N   the previous step-N while step N is saved again; counts as step-N if that is
//                      missing, otherwise obsolete
//   .old-step-N        being removed
//
// Two renames replace a step, because not all file systems can exchange two folders. An interrupted
// save leaves some of these folders; the next save starts by removing them.
//
// The lock file is beside them: Note [One job saves in a folder].
//
// The parent folder stays open as long as the job saves, and these folders are accessed relative to
// it without following links. The user's path to the parent folder may contain links.
inline constexpr std::string_view kUnfinished = ".tmp-step-";
inline constexpr std::string_view kWhole = "step-";
inline constexpr std::string_view kReplaced = ".replaced-step-";
inline constexpr std::string_view kOld = ".old-step-";

std::string name_of(std::string_view prefix, int64_t step);

/// Returns true if `name` is that of a complete checkpoint.
bool is_checkpoint(std::string_view name);

/// The steps that have folders of saves. A symbolic link in place of a checkpoint is included, so
/// that opening it reports it; a file is not.
struct Saves {
  std::set<int64_t> unfinished;
  std::set<int64_t> whole;
  std::set<int64_t> replaced;
  std::set<int64_t> old;
  std::optional<std::string> link;  ///< name of a symbolic link in place of a checkpoint

  /// Returns the folder name of the checkpoint of `step`.
  std::string name(int64_t step) const;
  /// Returns the steps that can be loaded.
  std::set<int64_t> steps() const;
};

/// Returns nullopt and sets errno if the folder cannot be read.
std::optional<Saves> find_saves(const OpenFolder& folder);

/// Opens the folder of a checkpoint. Throws `bad_data` if it is not a folder or is a symbolic link.
OpenFolder open_save(const OpenFolder& folder, const std::string& name);

}  // namespace distrain::store
