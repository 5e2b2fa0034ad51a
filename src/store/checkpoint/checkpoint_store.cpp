#include "distrain/store/checkpoint_store.h"

#include <cerrno>
#include <filesystem>
#include <utility>
#include <vector>

#include "checkpoint_manifest.h"
#include "distrain/base/error.h"
#include "distrain/store/file.h"
#include "distrain/store/hash.h"
#include "distrain/store/open_folder.h"
#include "distrain/store/safetensors.h"
#include "folder_claim.h"
#include "save_folders.h"

namespace distrain::store {
namespace {

using base::bad_data;
using base::Exception;

std::string without_slashes(std::string path) {
  while (path.size() > 1 && path.ends_with('/')) path.pop_back();
  return path;
}

// A path from the user, which may contain symbolic links; a checkpoint at its end must not be one.
struct UserPath {
  explicit UserPath(const std::string& path) : folder(without_slashes(path)) {
    const std::filesystem::path split(folder);
    if (!is_checkpoint(split.filename().string())) return;
    checkpoint = split.filename();
    folder = split.has_parent_path() ? split.parent_path().string() : ".";
  }
  std::string folder;
  std::string checkpoint;  // name in `folder`; empty: the newest
};

std::optional<std::string> newest_in(const OpenFolder& folder) {
  const auto saves = find_saves(folder);
  if (!saves) fail_open(folder.path());
  const auto steps = saves->steps();
  return steps.empty() ? std::nullopt : std::optional(saves->name(*steps.rbegin()));
}

std::vector<uint8_t> read_listed(const OpenFolder& checkpoint, const std::string& name,
                                 const Manifest::File& listed) {
  InputFile file(checkpoint, name);
  const auto check_size = [&](uint64_t size) {
    if (size == listed.bytes) return;
    bad_data(file.path() + ": of " + std::to_string(size) + " bytes, the manifest says " +
             std::to_string(listed.bytes));
  };
  check_size(file.size());
  auto bytes = read_to_end<std::vector<uint8_t>>(file, listed.bytes);
  check_size(bytes.size());
  if (content_hash({reinterpret_cast<const char*>(bytes.data()), bytes.size()}) != listed.hash) {
    bad_data(file.path() + ": damaged: its checksum differs from the one in manifest.json");
  }
  return bytes;
}

enum class Depth { kManifest, kTensors };

LoadedCheckpoint load_one(const OpenFolder& folder, Depth depth) {
  LoadedCheckpoint loaded;
  loaded.path = folder.path();
  Manifest manifest = read_manifest(folder);
  loaded.checkpoint.step = manifest.step;
  loaded.checkpoint.state = std::move(manifest.state);
  if (depth == Depth::kManifest) return loaded;
  for (const auto& [name, listed] : manifest.files) {
    const std::string path = folder.path_of(name);
    loaded.checkpoint.files[name] = with_memory_for(path, [&, &name = name, &listed = listed] {
      return parse_safetensors(read_listed(folder, name, listed), path);
    });
  }
  return loaded;
}

LoadedCheckpoint load_from(const std::string& path, Depth depth) {
  return with_memory_for(path, [&] {
    const Disk disk;
    const UserPath named(path);
    const auto opened = OpenFolder::at(disk, named.folder);
    if (!opened) fail_open(path);
    if (!named.checkpoint.empty()) return load_one(open_save(*opened, named.checkpoint), depth);
    if (opened->kind_of(kManifestName) != OpenFolder::Kind::kNothing) {
      return load_one(*opened, depth);
    }
    const auto newest = newest_in(*opened);
    if (!newest) bad_data(path + ": no checkpoint in this folder");
    return load_one(open_save(*opened, *newest), depth);
  });
}

}  // namespace

CheckpointStore::CheckpointStore(std::string folder, Probe before_system_call, int64_t keep)
    : folder_(without_slashes(std::move(folder))),
      before_system_call_(std::move(before_system_call)),
      keep_(keep) {}

CheckpointStore::~CheckpointStore() = default;

void CheckpointStore::prepare() {
  if (!claim_) {
    claim_ =
        std::make_unique<FolderClaim>(before_system_call_, folder_, FolderClaim::Missing::kMake);
  }
  claim_->try_folder();
}

std::optional<std::string> CheckpointStore::why_no_lock() const {
  return claim_ ? claim_->why_no_lock() : std::nullopt;
}

std::string CheckpointStore::save(const Checkpoint& checkpoint) {
  if (!claim_) {
    claim_ =
        std::make_unique<FolderClaim>(before_system_call_, folder_, FolderClaim::Missing::kRefuse);
  }
  return claim_->save(checkpoint, keep_);
}

bool CheckpointStore::holds(const std::string& folder, const std::string& path) {
  const auto own = std::filesystem::weakly_canonical(folder);
  const auto other = std::filesystem::weakly_canonical(path);
  return other == own || (other.parent_path() == own && is_checkpoint(other.filename().string()));
}

std::optional<std::string> CheckpointStore::newest(const std::string& folder) {
  const Disk disk;
  const auto opened = OpenFolder::at(disk, folder);
  if (!opened && errno == ENOENT) return std::nullopt;
  if (!opened) fail_open(folder);
  const auto name = newest_in(*opened);
  return name ? std::optional(opened->path_of(*name)) : std::nullopt;
}

LoadedCheckpoint CheckpointStore::load(const std::string& path) {
  return load_from(path, Depth::kTensors);
}

LoadedCheckpoint CheckpointStore::look(const std::string& path) {
  return load_from(path, Depth::kManifest);
}

std::optional<std::string> CheckpointStore::intact_before(const std::string& path) {
  const Disk disk;
  const UserPath named(path);
  const auto folder = OpenFolder::at(disk, named.folder);
  const auto saves = folder ? find_saves(*folder) : std::nullopt;
  if (!saves) return std::nullopt;
  const auto steps = saves->steps();
  bool before = false;
  for (auto step = steps.rbegin(); step != steps.rend(); ++step) {
    const std::string name = saves->name(*step);
    // Skips the named checkpoint, or the newest if none is named, and all newer ones.
    if (!std::exchange(before, before || named.checkpoint.empty() || name == named.checkpoint)) {
      continue;
    }
    try {
      load_one(open_save(*folder, name), Depth::kTensors);
      return folder->path_of(name);
    } catch (const Exception&) {
    }
  }
  return std::nullopt;
}

}  // namespace distrain::store
