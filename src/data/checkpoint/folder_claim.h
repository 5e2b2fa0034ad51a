#pragma once

#include <cstdint>
#include <string>

#include "files/open_folder.h"

namespace distrain::data {

// Note [One job saves in a folder]
//
// Two jobs on one folder would remove each other's checkpoints. So a job locks the folder, by its
// descriptor, for as long as it saves there: the lock ends with the process, however that ends, and
// leaves nothing behind.
//
// Some file systems keep locks on each machine by itself, or have none. There a rank 0 that was
// thought dead may go on beside the job that took its place. So a manifest has a generation: that
// of the job that saved it, one more than the highest it found when it took the folder over. A job
// that finds a higher one than its own has lost the folder: it neither writes nor removes anything
// more. It looks before each save, before the save gets its name and before each removal; between
// that and what it then does, and before the new job's first save, nothing keeps the two apart.

/// A folder of checkpoints that one job saves in. Only the process that saves may have it: a child
/// that it forks would keep the folder locked.
class FolderClaim {
 public:
  enum class Missing { kMake, kRefuse };
  /// Throws `bad_data` if another job has it, `resources` if it cannot be opened or made.
  FolderClaim(const Disk& disk, const std::string& path, Missing missing);

  const OpenFolder& folder() const { return folder_; }
  int64_t generation() const { return generation_; }

  /// To be called before anything in the folder is changed. Throws `bad_data` once another job has
  /// taken it over, `resources` if the path leads to it no more: nobody would find what is saved.
  void check() const;

 private:
  void lock() const;

  const OpenFolder folder_;
  int64_t generation_ = 0;
};

}  // namespace distrain::data
