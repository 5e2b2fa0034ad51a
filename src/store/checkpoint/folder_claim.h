#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "distrain/net/socket.h"
#include "distrain/store/open_folder.h"

namespace distrain::store {

struct Checkpoint;

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
// writes and removes nothing more. Before its own first save, the expected generation is the
// highest that it found, since two jobs that found the same have the same number. The job checks
// before each save, before it renames the save, and before each removal. Between a check and the
// action that follows, and before the new job's first save, only the lock protects the folder.

/// A claim of a job on its folder of checkpoints. A forked child would keep the folder locked.
class FolderClaim {
 public:
  enum class Missing { kMake, kRefuse };
  /// Throws `bad_data` if another job has it, `resources` if it cannot be opened or created.
  FolderClaim(Disk::Probe before_system_call, const std::string& path, Missing missing);

  const OpenFolder& folder() const { return folder_; }
  int64_t generation() const { return generation_; }

  /// The error message of a file system without locks.
  const std::optional<std::string>& why_no_lock() const { return why_no_lock_; }

  /// Performs CheckpointStore::save(). Returns the path of the checkpoint.
  std::string save(const Checkpoint& checkpoint, int64_t keep);
  /// Checks that the folder can be written. Throws `bad_data` if a checkpoint is a symbolic link.
  void try_folder() const;

  /// Must be called before each change in the folder. Throws `bad_data` if another job has taken
  /// over the folder, and `resources` if the path no longer leads to it.
  void check();
  /// Must be called when a checkpoint of this generation has been renamed to its final name.
  void has_saved() { highest_expected_ = generation_; }

 private:
  void lock();

  const Disk disk_;
  const OpenFolder folder_;
  net::Fd lock_;  // invalid if the file system has no locks
  std::optional<std::string> why_no_lock_;
  int64_t generation_ = 0;
  int64_t highest_expected_ = 0;  // highest that the folder may have while this job owns it
};

}  // namespace distrain::store
