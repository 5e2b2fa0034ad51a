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

// Opens a file of a checkpoint and compares its size and hash with the manifest.
std::shared_ptr<const InputFile> open_listed(const OpenFolder& checkpoint, const std::string& name,
                                             const FileSum& listed) {
  auto file = std::make_shared<InputFile>(checkpoint, name);
  if (file->size() != listed.bytes) {
    bad_data(file->path() + ": of " + std::to_string(file->size()) + " bytes, the manifest says " +
             std::to_string(listed.bytes));
  }
  std::vector<uint8_t> piece(std::min<uint64_t>(kPieceBytes, listed.bytes));
  ContentHasher hasher;
  for (uint64_t done = 0; done < listed.bytes; done += piece.size()) {
    piece.resize(std::min<uint64_t>(piece.size(), listed.bytes - done));
    file->read_at(done, piece);
    hasher.add(piece);
  }
  if (hasher.value() != listed.hash) {
    bad_data(file->path() + ": damaged: its checksum differs from the one in manifest.json");
  }
  return file;
}

SafetensorsFile safetensors_of(const std::shared_ptr<const InputFile>& file) {
  return {file->path(), file->size(), [file](auto... range) { file->read_at(range...); }};
}

LoadedCheckpoint load_one(const OpenFolder& folder, Depth depth) {
  Manifest manifest = read_manifest(folder);
  LoadedCheckpoint loaded{folder.path(), manifest.step, std::move(manifest.state), manifest.hash};
  if (depth == Depth::kManifest) return loaded;
  for (const auto& [name, listed] : manifest.files) {
    const auto file = open_listed(folder, name, listed);
    if (!name.ends_with(".json")) loaded.files.emplace(name, safetensors_of(file));
  }
  return loaded;
}

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

// Throws if no file can be written. If the process dies, the next save removes the trial's folder.
void try_to_write(const OpenFolder& folder) {
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

Saving::Saving(FolderClaim& claim, int64_t step, nlohmann::ordered_json state, int64_t keep)
    : claim_(claim), step_(step), state_(std::move(state)), keep_(keep) {
  manifest();  // throws early if load() would refuse the checkpoint
  claim_.check();
  clean_up();
  unfinished_ = make_and_open(folder(), own_name(kUnfinished));
}

Saving::~Saving() {
  if (!unfinished_) return;
  try {
    // Frees disk space, unless another job has put its own folder under this name.
    const std::string name = own_name(kUnfinished);
    if (folder().leads_to(name, unfinished_->fd())) folder().remove_folder(name);
  } catch (const std::exception&) {
  }
}

std::string Saving::manifest() const {
  return manifest_text({claim_.generation(), step_, files_, state_});
}

OutputFile Saving::create(const std::string& name) const {
  manifest_text({0, 0, {{name, {}}}, nlohmann::ordered_json::object()});  // checks the name
  return unfinished_->create(name);
}

OutputFile Saving::create(const std::string& name, std::span<TensorInfo> tensors) const {
  const std::string header = safetensors_header(tensors);
  OutputFile file = create(name);
  file.write({reinterpret_cast<const uint8_t*>(header.data()), header.size()});
  return file;
}

SafetensorsFile Saving::open(const std::string& name) const {
  return safetensors_of(std::make_shared<InputFile>(*unfinished_, name));
}

void Saving::adopt(const std::string& name, const FileSum& sum) {
  const InputFile file(*unfinished_, name);
  if (file.size() != sum.bytes) {
    bad_data(file.path() + ": of " + std::to_string(file.size()) + " bytes, its writer says " +
             std::to_string(sum.bytes));
  }
  files_[name] = sum;
}

std::string Saving::commit() {
  const std::string text = manifest();
  OutputFile file = unfinished_->create(kManifestName);
  file.write({reinterpret_cast<const uint8_t*>(text.data()), text.size()});
  file.finish();
  unfinished_->sync();
  publish();
  unfinished_.reset();
  retire(own_name(kReplaced), step_);
  remove_old();
  return folder().path_of(own_name(kWhole));
}

const OpenFolder& Saving::folder() const { return claim_.folder(); }
std::string Saving::own_name(std::string_view prefix) const { return name_of(prefix, step_); }

void Saving::clean_up() const {
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

void Saving::publish() {
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
void Saving::remove_old() const {
  auto others = real_saves(folder()).whole;
  others.erase(others.lower_bound(step_), others.end());
  while (static_cast<int64_t>(others.size()) >= keep_) {
    const int64_t step = *others.begin();
    others.erase(others.begin());
    retire(name_of(kWhole, step), step);
  }
}

// Removes an old checkpoint. Ignores errors, because the new checkpoint is safe already and the
// next save retries. Throws only if another job has taken over the folder.
void Saving::retire(const std::string& name, int64_t step) const {
  claim_.check();
  const std::string old = name_of(kOld, step);
  try {
    if (folder().rename(name, old)) folder().remove_folder(old);
  } catch (const Exception&) {
  }
}

CheckpointStore::CheckpointStore(std::string folder, Probe before_system_call, int64_t keep)
    : folder_(without_slashes(std::move(folder))),
      probe_(std::move(before_system_call)),
      keep_(keep) {}

CheckpointStore::~CheckpointStore() = default;

void CheckpointStore::prepare() {
  if (!claim_) claim_ = std::make_unique<FolderClaim>(probe_, folder_, Missing::kMake);
  real_saves(claim_->folder());
  try_to_write(claim_->folder());
}

std::optional<std::string> CheckpointStore::why_no_lock() const {
  return claim_ ? claim_->why_no_lock() : std::nullopt;
}

std::unique_ptr<Saving> CheckpointStore::begin(int64_t step, nlohmann::ordered_json state) {
  if (!claim_) claim_ = std::make_unique<FolderClaim>(probe_, folder_, Missing::kRefuse);
  return std::make_unique<Saving>(*claim_, step, std::move(state), keep_);
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

LoadedCheckpoint CheckpointStore::load(const std::string& path, Depth depth) {
  return with_memory_for(path, [&] {
    const Disk disk;
    const UserPath named(path);
    const auto opened = OpenFolder::at(disk, named.folder);
    if (!opened) fail_open(path);
    if (!named.checkpoint.empty()) return load_one(open_save(*opened, named.checkpoint), depth);
    if (opened->kind_of(kManifestName) != OpenFolder::Kind::kNothing) {
      return load_one(*opened, depth);
    }
    const auto name = newest_in(*opened);
    if (!name) bad_data(path + ": no checkpoint in this folder");
    return load_one(open_save(*opened, *name), depth);
  });
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
      load_one(open_save(*folder, name), Depth::kFiles);
      return folder->path_of(name);
    } catch (const Exception&) {
    }
  }
  return std::nullopt;
}

}  // namespace distrain::store
