#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>

#include <nlohmann/json.hpp>

#include "distrain/store/disk.h"

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
// The parent folder stays open as long as the job saves. These folders are accessed relative to the
// parent, without following links. The user's path to the parent may contain links.
inline constexpr std::string_view kUnfinished = ".tmp-step-";
inline constexpr std::string_view kWhole = "step-";
inline constexpr std::string_view kReplaced = ".replaced-step-";
inline constexpr std::string_view kOld = ".old-step-";

std::string name_of(std::string_view prefix, int64_t step);

/// Returns true if `name` is the folder name of a complete checkpoint.
bool is_checkpoint(std::string_view name);

/// The folders that jobs have written in a folder of checkpoints. Includes symbolic links that are
/// named like checkpoints, so that opening them reports an error. Excludes regular files.
struct Saves {
  std::set<std::string> remains;  ///< names of unfinished folders and of those being removed
  std::set<int64_t> whole;
  std::set<int64_t> replaced;
  std::optional<std::string> link;  ///< name of a symbolic link in place of a checkpoint

  /// Returns the folder name of the checkpoint of `step`.
  std::string name(int64_t step) const {
    return name_of(whole.contains(step) ? kWhole : kReplaced, step);
  }
  /// Returns the steps of the checkpoints that can be loaded.
  std::set<int64_t> steps() const {
    std::set<int64_t> all = whole;
    all.insert(replaced.begin(), replaced.end());
    return all;
  }
};

/// Finds the saves in `folder`. Returns nullopt and sets errno if the folder cannot be read.
std::optional<Saves> find_saves(const OpenFolder& folder);

/// Opens the folder of a checkpoint. Throws `bad_data` if it is not a folder or is a symbolic link.
OpenFolder open_save(const OpenFolder& folder, const std::string& name);

inline constexpr const char* kManifestName = "manifest.json";

/// The content of manifest.json: see checkpoint_store.h.
struct Manifest {
  int64_t generation = 0;  ///< of the saving job: Note [One job saves in a folder]
  int64_t step = 0;
  std::map<std::string, FileSum> files;
  nlohmann::ordered_json state = nlohmann::ordered_json::object();
  uint64_t hash = 0;  ///< the last `xxh64`, which parse_manifest() sets
};

/// Returns a manifest's text. Throws `invalid` if parse_manifest() would refuse the manifest.
std::string manifest_text(const Manifest& manifest);

/// Parses a manifest. Throws `bad_data` if it is invalid; error messages show `path`.
Manifest parse_manifest(std::string_view text, const std::string& path);

/// Reads the manifest of a checkpoint. Throws `bad_data` if it is missing or invalid.
Manifest read_manifest(const OpenFolder& checkpoint);

// Note [One job saves in a folder]
//
// Two jobs in one folder would remove each other's checkpoints, so a job locks a file in the
// folder. The lock ends with the process. The file stays, because removing it could take it from a
// job that has just opened it. A file is locked rather than the folder, because NFS shares locks
// only on files.
//
// Some file systems have no locks, and a server may lose them when it restarts or drop those of a
// disconnected machine. A rank 0 that was presumed dead may then continue beside its replacement.
// Each manifest therefore has a generation: one more than the highest that the job found when it
// claimed the folder. A job that finds a higher generation than expected has lost the folder, and
// writes and removes nothing more. Until its own first save, a job expects the highest generation
// that it found, because another job may have found and added one to the same. The job checks
// before each save, before it renames the save, and before each removal. Between a check and the
// action that follows, and before the new job's first save, only the lock protects the folder.

/// The treatment of a folder that does not exist: create it or throw.
enum class Missing { kMake, kRefuse };

/// A job's claim to be the only one that saves in a folder. A forked child would keep the lock.
class FolderClaim {
 public:
  /// Locks the folder. Throws `bad_data` if another job owns it, `resources` if opening it fails.
  FolderClaim(Disk::Probe before_system_call, const std::string& path, Missing missing);

  const OpenFolder& folder() const { return folder_; }
  int64_t generation() const { return generation_; }

  /// Returns the error message if the file system has no locks.
  const std::optional<std::string>& why_no_lock() const { return why_no_lock_; }

  /// Must be called before each change in the folder. Throws `bad_data` if another job has taken
  /// over the folder, and `resources` if the path no longer leads to it.
  void check();
  /// Must be called when a checkpoint of this job has been renamed to its final name.
  void has_saved() { highest_expected_ = generation_; }

 private:
  void lock();

  const Disk disk_;
  const OpenFolder folder_;
  net::Fd lock_;  // invalid if the file system has no locks
  std::optional<std::string> why_no_lock_;
  int64_t generation_ = 0;
  int64_t highest_expected_ = 0;  // highest generation in the folder while this job owns it
};

}  // namespace distrain::store
