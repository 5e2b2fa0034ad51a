#pragma once

#include <cstdint>
#include <string>

#include "distrain/data/checkpoint_store.h"
#include "folder_claim.h"

namespace distrain::data {

/// CheckpointStore::save() in a folder that is claimed. Gives back the checkpoint's path.
std::string save_checkpoint(FolderClaim& claim, const Checkpoint& checkpoint, int64_t keep);

/// Tries whether the folder can be saved in, and refuses links in place of checkpoints.
void try_folder(const FolderClaim& claim);

}  // namespace distrain::data
