#include "distrain/store/checkpoint_store.h"

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "checkpoint_folder.h"
#include "distrain/base/error.h"
#include "distrain/store/file.h"
#include "distrain/store/hash.h"
#include "distrain/store/safetensors.h"

namespace distrain::store {
namespace {

using base::bad_data;
using base::Exception;

std::string without_slashes(std::string path) {
  while (path.size() > 1 && path.ends_with('/')) path.pop_back();
  return path;
}

// A user-supplied path. Its folders may be symbolic links, but a checkpoint at its end must not be.
struct UserPath {
  explicit UserPath(const std::string& path) : folder(without_slashes(path)) {
    const std::filesystem::path split(folder);
    if (!is_checkpoint(split.filename().string())) return;
    checkpoint = split.filename();
    folder = split.has_parent_path() ? split.parent_path().string() : ".";
  }
  std::string folder;
  std::string checkpoint;  // name in `folder`; empty if the path does not name a checkpoint
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
  Manifest manifest = read_manifest(folder);
  LoadedCheckpoint loaded{folder.path(), {manifest.step, {}, std::move(manifest.state)}};
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

constexpr size_t kPiece = size_t{4} << 20;  // write() finds a hashed piece in the CPU's cache

// Returns the saves in a folder. Throws `bad_data` if a checkpoint is a symbolic link.
Saves real_saves(const OpenFolder& folder) {
  auto saves = find_saves(folder);
  if (!saves) Disk::fail("cannot read", folder.path());
  if (saves->link) base::bad_data(folder.path_of(*saves->link) + kNotFollowed);
  return *std::move(saves);
}

OpenFolder make_and_open(const OpenFolder& folder, const std::string& name) {
  if (!folder.make_folder(name)) {
    errno = EEXIST;
    Disk::fail("cannot create", folder.path_of(name));
  }
  auto made = folder.open(name);
  if (!made) Disk::fail("cannot open", folder.path_of(name));
  return *std::move(made);
}

class Save {
 public:
  Save(FolderClaim& claim, const Checkpoint& checkpoint, int64_t keep)
      : claim_(claim),
        checkpoint_(checkpoint),
        keep_(keep),
        manifest_{claim.generation(), checkpoint.step, {}, checkpoint.state} {
    for (const auto& [name, tensors] : checkpoint.files) {
      const std::string& header = headers_[name] = safetensors_header(tensors);
      uint64_t bytes = header.size();
      for (const auto& [_, tensor] : tensors) bytes += tensor.nbytes();
      manifest_.files[name].bytes = bytes;
    }
    manifest_text(manifest_);  // throws early if load() would refuse the checkpoint
  }

  std::string run() {
    claim_.check();
    clean_up();
    try {
      write();
      publish();
    } catch (const Exception&) {
      // Frees disk space, unless another job has put its own folder under this name.
      const std::string name = own_name(kUnfinished);
      if (unfinished_ && folder().leads_to(name, unfinished_->fd())) folder().remove_folder(name);
      throw;
    }
    retire(own_name(kReplaced), checkpoint_.step);
    remove_old();
    return folder().path_of(own_name(kWhole));
  }

 private:
  const OpenFolder& folder() const { return claim_.folder(); }
  std::string own_name(std::string_view prefix) const { return name_of(prefix, checkpoint_.step); }

  void clean_up() const {
    const Saves saves = real_saves(folder());
    for (const std::string& name : saves.remains) {
      claim_.check();
      folder().remove_folder(name);
    }
    for (const int64_t step : saves.replaced) {
      const std::string replaced = name_of(kReplaced, step);
      if (!saves.whole.contains(step)) {
        folder().rename(replaced, name_of(kWhole, step));
      } else {
        retire(replaced, step);
      }
    }
  }

  void write() {
    unfinished_ = make_and_open(folder(), own_name(kUnfinished));
    for (const auto& [name, tensors] : checkpoint_.files) {
      manifest_.files[name].hash = write_file(name, headers_[name], tensors);
    }
    write_file(kManifestName, manifest_text(manifest_), {});
    unfinished_->sync();
  }

  // Writes a file of the checkpoint and returns its hash.
  uint64_t write_file(const std::string& name, std::string_view begin,
                      const rpc::NamedTensors& tensors) const {
    OutputFile file = unfinished_->create(name);
    ContentHasher hasher;
    const auto put = [&](const void* data, size_t size) {
      std::span<const uint8_t> bytes(static_cast<const uint8_t*>(data), size);
      while (!bytes.empty()) {
        const auto piece = bytes.first(std::min(bytes.size(), kPiece));
        hasher.add(piece);
        file.write(piece);
        bytes = bytes.subspan(piece.size());
      }
    };
    put(begin.data(), begin.size());
    for (const auto& [_, tensor] : tensors) put(tensor.const_data_ptr(), tensor.nbytes());
    file.finish();
    return hasher.value();
  }

  void publish() {
    const std::string whole = own_name(kWhole);
    const std::string replaced = own_name(kReplaced);
    claim_.check();
    const bool replaces = folder().rename(whole, replaced);
    try {
      if (!folder().rename(own_name(kUnfinished), whole)) {
        Disk::fail("cannot rename", unfinished_->path());
      }
      claim_.has_saved();
    } catch (const Exception&) {
      if (replaces) folder().rename(replaced, whole);
      throw;
    }
    folder().sync();
    // Another user who can write to the folder may have replaced the new checkpoint.
    if (!folder().leads_to(whole, unfinished_->fd())) {
      base::bad_data(folder().path_of(whole) + ": not the folder that was written");
    }
  }

  // Removes old checkpoints. Keeps checkpoints of later steps, because they belong to another run.
  void remove_old() const {
    auto others = real_saves(folder()).whole;
    others.erase(others.lower_bound(checkpoint_.step), others.end());
    while (static_cast<int64_t>(others.size()) >= keep_) {
      const int64_t step = *others.begin();
      others.erase(others.begin());
      retire(name_of(kWhole, step), step);
    }
  }

  // Removes an old checkpoint. Ignores errors, because the new checkpoint is safe already and the
  // next save retries. Throws only if another job has taken over the folder.
  void retire(const std::string& name, int64_t step) const {
    claim_.check();
    const std::string old = name_of(kOld, step);
    try {
      if (folder().rename(name, old)) folder().remove_folder(old);
    } catch (const Exception&) {
    }
  }

  FolderClaim& claim_;
  const Checkpoint& checkpoint_;
  const int64_t keep_;
  std::map<std::string, std::string> headers_;
  Manifest manifest_;
  std::optional<OpenFolder> unfinished_;
};

// Checks that the folder can be written.
void try_folder(const OpenFolder& folder) {
  real_saves(folder);
  // If the process dies before it removes the trial folder, the next save removes that folder.
  const std::string trial = name_of(kUnfinished, 0);
  folder.remove_folder(trial);
  const OpenFolder made = make_and_open(folder, trial);
  try {
    OutputFile file = made.create("trial");
    const uint8_t byte = 0;
    file.write({&byte, 1});
    file.finish();
  } catch (const Exception&) {
    folder.remove_folder(trial);
    throw;
  }
  folder.remove_folder(trial);
}

}  // namespace

CheckpointStore::CheckpointStore(std::string folder, Probe before_system_call, int64_t keep)
    : folder_(without_slashes(std::move(folder))),
      probe_(std::move(before_system_call)),
      keep_(keep) {}

CheckpointStore::~CheckpointStore() = default;

void CheckpointStore::prepare() {
  if (!claim_) claim_ = std::make_unique<FolderClaim>(probe_, folder_, Missing::kMake);
  try_folder(claim_->folder());
}

std::optional<std::string> CheckpointStore::why_no_lock() const {
  return claim_ ? claim_->why_no_lock() : std::nullopt;
}

std::string CheckpointStore::save(const Checkpoint& checkpoint) {
  if (!claim_) claim_ = std::make_unique<FolderClaim>(probe_, folder_, Missing::kRefuse);
  return Save(*claim_, checkpoint, keep_).run();
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
    // Skips the newest checkpoint or, if `path` names a checkpoint, that one and all newer ones.
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
