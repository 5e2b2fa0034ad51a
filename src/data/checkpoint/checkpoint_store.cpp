#include "distrain/data/checkpoint_store.h"

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <set>
#include <string_view>
#include <utility>
#include <vector>

#include <sys/stat.h>

#include "checkpoint/checkpoint_manifest.h"
#include "content_hasher.h"
#include "distrain/base/error.h"
#include "distrain/data/hash.h"
#include "files/disk.h"
#include "files/file.h"

namespace distrain::data {
namespace {

using base::ErrorKind;
using base::Exception;

// Note [Folders of a save]
//
//   .tmp-step-N        being written. Only when all of it is on the disk is it renamed to
//   step-N             a whole checkpoint, always: it comes and goes by rename only.
//   .replaced-step-N   what step-N was while the same step is saved again: whole, too. Where there
//   is
//                      no step-N it counts as step-N; otherwise it is of no use.
//   .old-step-N        being removed.
//
// Two renames replace a step rather than an exchange in one, which not all file systems have.
// A save that is interrupted leaves some of these; the next one begins by clearing them away.
constexpr std::string_view kUnfinished = ".tmp-step-";
constexpr std::string_view kWhole = "step-";
constexpr std::string_view kReplaced = ".replaced-step-";
constexpr std::string_view kOld = ".old-step-";

constexpr size_t kStepDigits = 12;
constexpr size_t kPiece = size_t{4} << 20;  // hashed and written while it is in the cache

std::string name_of(std::string_view prefix, int64_t step) {
  char digits[24];
  std::snprintf(digits, sizeof digits, "%0*lld", static_cast<int>(kStepDigits),
                static_cast<long long>(step));
  return std::string(prefix) + digits;
}

// The steps that have a folder with this prefix.
std::set<int64_t> steps_of(std::string_view prefix, const std::vector<std::string>& names) {
  std::set<int64_t> steps;
  for (const std::string_view name : names) {
    if (!name.starts_with(prefix)) continue;
    const std::string_view digits = name.substr(prefix.size());
    if (digits.size() != kStepDigits) continue;
    int64_t step = 0;
    for (const char c : digits) step = c < '0' || c > '9' || step < 0 ? -1 : step * 10 + (c - '0');
    if (step >= 0) steps.insert(step);
  }
  return steps;
}

bool is_folder(const std::string& path) {
  struct stat status {};
  return stat(path.c_str(), &status) == 0 && S_ISDIR(status.st_mode);
}

class Save {
 public:
  Save(const Disk& disk, const std::string& folder, const Checkpoint& checkpoint, int64_t keep)
      : disk_(disk), folder_(folder), checkpoint_(checkpoint), keep_(keep) {
    manifest_.step = checkpoint.step;
    manifest_.state = checkpoint.state;
    for (const auto& [name, tensors] : checkpoint.files) {
      const std::string& header = headers_[name] = safetensors_header(tensors);
      uint64_t bytes = header.size();
      for (const auto& [_, tensor] : tensors) bytes += tensor.bytes.size();
      manifest_.files[name].bytes = bytes;
    }
    manifest_text(manifest_);  // refuses what could not be loaded, before anything is written
  }

  std::string run() {
    clean_up();
    const std::string unfinished = path_of(kUnfinished);
    try {
      write(unfinished);
      const bool have_another = !found_.empty() && *found_.begin() <= checkpoint_.step;
      if (have_another) remove_abandoned();
      publish(unfinished);
      if (!have_another) remove_abandoned();
    } catch (const Exception&) {
      disk_.remove_folder(unfinished);  // a full disk needs it
      throw;
    }
    retire(path_of(kReplaced), checkpoint_.step);
    remove_old();
    return path_of(kWhole);
  }

 private:
  std::string path_of(std::string_view prefix) const { return path_of(prefix, checkpoint_.step); }
  std::string path_of(std::string_view prefix, int64_t step) const {
    return folder_ + "/" + name_of(prefix, step);
  }

  std::vector<std::string> list() const {
    auto names = disk_.list(folder_);
    if (!names) Disk::fail("cannot open", folder_);
    return *std::move(names);
  }

  void clean_up() {
    const auto names = list();
    for (const std::string_view prefix : {kUnfinished, kOld}) {
      for (const int64_t step : steps_of(prefix, names)) disk_.remove_folder(path_of(prefix, step));
    }
    found_ = steps_of(kWhole, names);
    for (const int64_t step : steps_of(kReplaced, names)) {
      if (found_.contains(step)) {
        retire(path_of(kReplaced, step), step);
      } else {
        disk_.rename(path_of(kReplaced, step), path_of(kWhole, step));
        found_.insert(step);
      }
    }
  }

  void write(const std::string& unfinished) {
    if (!disk_.make_folder(unfinished)) {
      errno = EEXIST;
      Disk::fail("cannot make", unfinished);
    }
    for (const auto& [name, tensors] : checkpoint_.files) {
      manifest_.files[name].hash = write_file(unfinished + "/" + name, headers_[name], tensors);
    }
    const std::string text = manifest_text(manifest_);
    write_file(unfinished + "/" + kManifestName, text, {});
    disk_.sync_folder(unfinished);
  }

  // Gives back the hash of what was written.
  uint64_t write_file(const std::string& path, std::string_view begin,
                      const std::map<std::string, StoredTensor>& tensors) const {
    OutputFile file(disk_, path);
    ContentHasher hasher;
    const auto put = [&](std::span<const uint8_t> bytes) {
      while (!bytes.empty()) {
        const auto piece = bytes.first(std::min(bytes.size(), kPiece));
        hasher.add({reinterpret_cast<const char*>(piece.data()), piece.size()});
        file.write(piece);
        bytes = bytes.subspan(piece.size());
      }
    };
    put({reinterpret_cast<const uint8_t*>(begin.data()), begin.size()});
    for (const auto& [_, tensor] : tensors) put(tensor.bytes);
    file.finish();
    return hasher.value();
  }

  void publish(const std::string& unfinished) const {
    const std::string whole = path_of(kWhole);
    const bool replaces = disk_.rename(whole, path_of(kReplaced));
    try {
      if (!disk_.rename(unfinished, whole)) Disk::fail("cannot rename", unfinished);
    } catch (const Exception&) {
      if (replaces) disk_.rename(path_of(kReplaced), whole);
      throw;
    }
    disk_.sync_folder(folder_);
  }

  // Steps of a run only grow: higher ones are of a run that was resumed from before them, and would
  // be taken for the newest. Before this one is there, if there is yet another to fall back on.
  void remove_abandoned() const {
    for (const int64_t step : found_) {
      if (step > checkpoint_.step) retire(path_of(kWhole, step), step);
    }
  }

  void remove_old() const {
    auto others = steps_of(kWhole, list());
    others.erase(checkpoint_.step);
    while (static_cast<int64_t>(others.size()) >= keep_) {
      const int64_t step = *others.begin();
      others.erase(others.begin());
      retire(path_of(kWhole, step), step);
    }
  }

  // The new checkpoint is safe whether this works or not, and the next save tries again: no error.
  void retire(const std::string& path, int64_t step) const {
    const std::string old = path_of(kOld, step);
    try {
      if (disk_.rename(path, old)) disk_.remove_folder(old);
    } catch (const Exception&) {
    }
  }

  const Disk& disk_;
  const std::string& folder_;
  const Checkpoint& checkpoint_;
  const int64_t keep_;
  std::map<std::string, std::string> headers_;
  Manifest manifest_;
  std::set<int64_t> found_;  // whole checkpoints before this save
};

void make_folders(const Disk& disk, const std::string& folder) {
  if (is_folder(folder)) return;
  const size_t slash = folder.find_last_of('/');
  const std::string parent = slash == std::string::npos ? "." : folder.substr(0, slash);
  if (!parent.empty() && parent != ".") make_folders(disk, parent);
  if (disk.make_folder(folder)) disk.sync_folder(parent.empty() ? "/" : parent);
}

bool is_checkpoint(const std::string& name) { return !steps_of(kWhole, {name}).empty(); }

// The paths of a folder's checkpoints, the newest first.
std::vector<std::string> checkpoints_of(const std::string& folder,
                                        const std::vector<std::string>& names) {
  std::vector<std::string> paths;
  auto steps = steps_of(kWhole, names);
  const auto whole = steps;
  steps.merge(steps_of(kReplaced, names));
  for (auto step = steps.rbegin(); step != steps.rend(); ++step) {
    std::string path = folder + (folder.ends_with('/') ? "" : "/") +
                       name_of(whole.contains(*step) ? kWhole : kReplaced, *step);
    if (is_folder(path)) paths.push_back(std::move(path));
  }
  return paths;
}

std::vector<uint8_t> read_listed(const std::string& path, const Manifest::File& listed) {
  InputFile file(path, InputFile::Kind::kRegular);
  const auto fail = [&](const std::string& reason) {
    throw Exception(ErrorKind::kBadData, path + ": " + reason);
  };
  const auto check_size = [&](uint64_t size) {
    if (size != listed.bytes) {
      fail("of " + std::to_string(size) + " bytes, the manifest says " +
           std::to_string(listed.bytes));
    }
  };
  check_size(file.size());
  auto bytes = read_to_end<std::vector<uint8_t>>(file, path, listed.bytes);
  check_size(bytes.size());
  if (content_hash({reinterpret_cast<const char*>(bytes.data()), bytes.size()}) != listed.hash) {
    fail("damaged: its xxh64 is not the manifest's");
  }
  return bytes;
}

enum class Depth { kManifest, kTensors };

LoadedCheckpoint load_one(const std::string& path, Depth depth) {
  LoadedCheckpoint loaded;
  loaded.path = path;
  const std::string manifest_path = path + "/" + kManifestName;
  InputFile file(manifest_path, InputFile::Kind::kRegular);
  const auto text = read_to_end<std::string>(file, manifest_path, kMaxManifestBytes);
  Manifest manifest = parse_manifest(text, manifest_path);
  loaded.checkpoint.step = manifest.step;
  loaded.checkpoint.state = std::move(manifest.state);
  if (depth == Depth::kManifest) return loaded;
  for (const auto& [name, listed] : manifest.files) {
    const std::string file_path = path + "/" + name;
    auto content = with_memory_for(file_path, [&, &listed = listed] {
      return Safetensors::parse(read_listed(file_path, listed), file_path);
    });
    loaded.checkpoint.files.emplace(name, content.tensors());
    loaded.contents.emplace(name, std::move(content));
  }
  return loaded;
}

LoadedCheckpoint load_from(const std::string& path, Depth depth) {
  return with_memory_for(path, [&] {
    struct stat status {};
    if (stat((path + "/" + kManifestName).c_str(), &status) == 0) return load_one(path, depth);
    const auto found = CheckpointStore::newest(path);
    if (!found) throw Exception(ErrorKind::kBadData, path + ": no checkpoint in this folder");
    return load_one(*found, depth);
  });
}

}  // namespace

CheckpointStore::CheckpointStore(std::string folder, Probe before_system_call, int64_t keep)
    : folder_(std::move(folder)), before_system_call_(std::move(before_system_call)), keep_(keep) {}

void CheckpointStore::prepare() {
  const Disk disk(before_system_call_);
  make_folders(disk, folder_);
  // A name that the next save clears away, should this process end here.
  const std::string trial = folder_ + "/" + name_of(kUnfinished, 0);
  disk.remove_folder(trial);
  if (!disk.make_folder(trial)) Disk::fail("cannot make", trial);
  try {
    OutputFile file(disk, trial + "/trial");
    const uint8_t byte = 0;
    file.write({&byte, 1});
    file.finish();
  } catch (const Exception&) {
    disk.remove_folder(trial);
    throw;
  }
  disk.remove_folder(trial);
}

std::string CheckpointStore::save(const Checkpoint& checkpoint) {
  const Disk disk(before_system_call_);
  return Save(disk, folder_, checkpoint, keep_).run();
}

bool CheckpointStore::holds(const std::string& folder, const std::string& path) {
  const auto own = std::filesystem::weakly_canonical(folder);
  const auto other = std::filesystem::weakly_canonical(path);
  return other == own || (other.parent_path() == own && is_checkpoint(other.filename()));
}

std::optional<std::string> CheckpointStore::newest(const std::string& folder) {
  const Disk::Probe no_probe;
  const auto names = Disk(no_probe).list(folder);
  if (names) {
    const auto paths = checkpoints_of(folder, *names);
    return paths.empty() ? std::nullopt : std::optional(paths.front());
  }
  if (errno == ENOENT) return std::nullopt;
  throw Exception(ErrorKind::kBadData, "cannot open " + folder + ": " + errno_text());
}

LoadedCheckpoint CheckpointStore::load(const std::string& path) {
  return load_from(path, Depth::kTensors);
}

LoadedCheckpoint CheckpointStore::look(const std::string& path) {
  return load_from(path, Depth::kManifest);
}

std::optional<std::string> CheckpointStore::intact_before(const std::string& path) {
  std::string own = path;
  while (own.size() > 1 && own.ends_with('/')) own.pop_back();
  const size_t slash = own.find_last_of('/');
  const std::string name = own.substr(slash + 1);  // of the whole if there is none
  const std::string parent = slash == std::string::npos ? "." : own.substr(0, slash + 1);
  const bool is_one = is_checkpoint(name);
  const std::string& folder = is_one ? parent : own;
  const Disk::Probe no_probe;
  const auto names = Disk(no_probe).list(folder);
  const auto paths = names ? checkpoints_of(folder, *names) : std::vector<std::string>();
  auto it = paths.begin();
  if (is_one) it = std::find_if(it, paths.end(), [&](auto& p) { return p.ends_with('/' + name); });
  while (it != paths.end() && ++it != paths.end()) {
    try {
      load_one(*it, Depth::kTensors);
      return *it;
    } catch (const Exception&) {
    }
  }
  return std::nullopt;
}

}  // namespace distrain::data
