#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "distrain/net/socket.h"
#include "files/open_folder.h"

namespace distrain::data {

// Note [One job saves in a folder]
//
// Two jobs on one folder would remove each other's checkpoints. So a job locks a file there, for as
// long as it saves: the lock ends with the process, however that ends, and the file stays, as it
// could not be removed without taking it from a job that has just opened it. A file rather than the
// folder, because NFS tells the other machines of locks on files only.
//
// Some file systems have no locks, and a server may forget them when it starts anew, or drop those
// of a machine that was cut off. There a rank 0 that was thought dead may go on beside the job that
// took its place. So a manifest has a generation: that of the job that saved it, one more than the
// highest it found when it took the folder. A job that finds a higher one than it should has lost
// the folder: it neither writes nor removes anything more. Before its own first save that is any
// that is higher than what it found, since two jobs that found the same have the same number. It
// looks before each save, before the save gets its name and before each removal; between that and
// what it then does, and before the new job's first save, only the lock keeps the two apart.

/// A folder of checkpoints that one job saves in. Only the process that saves may have it: a child
/// that it forks would keep the folder locked.
class FolderClaim {
 public:
  enum class Missing { kMake, kRefuse };
  /// Throws `bad_data` if another job has it, `resources` if it cannot be opened or made.
  FolderClaim(Disk::Probe before_system_call, const std::string& path, Missing missing);

  const OpenFolder& folder() const { return folder_; }
  int64_t generation() const { return generation_; }

  /// What the file system says that has no locks.
  const std::optional<std::string>& why_no_lock() const { return why_no_lock_; }

  /// To be called before anything in the folder is changed. Throws `bad_data` once another job has
  /// taken it over, `resources` if the path leads to it no more: nobody would find what is saved.
  void check();
  /// A checkpoint of this generation has its name.
  void has_saved() { highest_expected_ = generation_; }

 private:
  void lock();

  const Disk disk_;
  const OpenFolder folder_;
  net::Fd lock_;  // not valid where there are no locks
  std::optional<std::string> why_no_lock_;
  int64_t generation_ = 0;
  int64_t highest_expected_ = 0;  // of the generations in the folder, as long as it is ours
};

}  // namespace distrain::data
