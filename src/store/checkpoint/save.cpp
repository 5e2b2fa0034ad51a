#include <algorithm>
#include <cerrno>
#include <map>
#include <optional>
#include <span>
#include <string_view>

#include "checkpoint_manifest.h"
#include "distrain/base/error.h"
#include "distrain/store/checkpoint_store.h"
#include "distrain/store/file.h"
#include "distrain/store/hash.h"
#include "distrain/store/safetensors.h"
#include "folder_claim.h"
#include "save_folders.h"

namespace distrain::store {
namespace {

using base::Exception;

constexpr size_t kPiece = size_t{4} << 20;  // small enough to be hashed and written from the cache

// Lists the checkpoints. Throws `bad_data` if one is a symbolic link.
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
      : claim_(claim), checkpoint_(checkpoint), keep_(keep) {
    manifest_.generation = claim.generation();
    manifest_.step = checkpoint.step;
    manifest_.state = checkpoint.state;
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
      // Frees disk space, but keeps what another job has written under this name.
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
    for (const int64_t step : saves.unfinished) remove(name_of(kUnfinished, step));
    for (const int64_t step : saves.old) remove(name_of(kOld, step));
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

  // Returns the hash of the file.
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
    const std::string unfinished = own_name(kUnfinished);
    const std::string whole = own_name(kWhole);
    const std::string replaced = own_name(kReplaced);
    claim_.check();
    const bool replaces = folder().rename(whole, replaced);
    try {
      if (!folder().rename(unfinished, whole)) {
        Disk::fail("cannot rename", folder().path_of(unfinished));
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

  // Newer checkpoints belong to another run: they are neither counted nor removed.
  void remove_old() const {
    auto others = real_saves(folder()).whole;
    others.erase(others.lower_bound(checkpoint_.step), others.end());
    while (static_cast<int64_t>(others.size()) >= keep_) {
      const int64_t step = *others.begin();
      others.erase(others.begin());
      retire(name_of(kWhole, step), step);
    }
  }

  // Ignores errors, because the new checkpoint is safe in any case and the next save tries again.
  // Throws only if another job has taken over the folder.
  void retire(const std::string& name, int64_t step) const {
    claim_.check();
    const std::string old = name_of(kOld, step);
    try {
      if (folder().rename(name, old)) folder().remove_folder(old);
    } catch (const Exception&) {
    }
  }

  void remove(const std::string& name) const {
    claim_.check();
    folder().remove_folder(name);
  }

  FolderClaim& claim_;
  const Checkpoint& checkpoint_;
  const int64_t keep_;
  std::map<std::string, std::string> headers_;
  Manifest manifest_;
  std::optional<OpenFolder> unfinished_;
};

}  // namespace

std::string FolderClaim::save(const Checkpoint& checkpoint, int64_t keep) {
  return Save(*this, checkpoint, keep).run();
}

void FolderClaim::try_folder() const {
  real_saves(folder_);
  // If the process dies here, the next save removes this name.
  const std::string trial = name_of(kUnfinished, 0);
  folder_.remove_folder(trial);
  const OpenFolder made = make_and_open(folder_, trial);
  try {
    OutputFile file = made.create("trial");
    const uint8_t byte = 0;
    file.write({&byte, 1});
    file.finish();
  } catch (const Exception&) {
    folder_.remove_folder(trial);
    throw;
  }
  folder_.remove_folder(trial);
}

}  // namespace distrain::store
