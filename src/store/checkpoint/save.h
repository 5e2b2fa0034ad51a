#pragma once

#include <cstdint>
#include <string>

#include "distrain/store/checkpoint_store.h"
#include "folder_claim.h"

namespace distrain::store {

/// Performs CheckpointStore::save() in a claimed folder. Returns the path of the checkpoint.
std::string save_checkpoint(FolderClaim& claim, const Checkpoint& checkpoint, int64_t keep);

/// Checks that the folder can be written, and throws `bad_data` if a checkpoint is a symbolic link.
void try_folder(const FolderClaim& claim);

}  // namespace distrain::store
