#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include <nlohmann/json.hpp>

#include "distrain/data/safetensors.h"

namespace distrain::data {

class FolderClaim;

/// What is saved, or was loaded: tensors by file and name, and a manifest beside them.
///
/// On disk a checkpoint is a folder `step-<12 digits>` with one safetensors file for each entry of
/// `files` (`model.safetensors`, `optimizer.safetensors`, …) and `manifest.json`:
///
///   {"format":"distrain-checkpoint","version":1,"generation":1,"step":20,
///    "files":{"model.safetensors":{"bytes":4800312,"xxh64":"0123456789abcdef"},…},
///    "state":{…},"xxh64":"…"}
///
/// each file with the content_hash() of its bytes, and at the end that of the manifest's own text
/// before `,"xxh64"`. The text is one line, with the keys in this order. `generation` counts the
/// jobs that have saved in the folder, one after the other; without it, it is 0.
///
/// `state` is the scenario's: counters, options that must agree, data position, RNG. Numbers in it
/// that are not finite are read back as null.
struct Checkpoint {
  int64_t step = 0;
  std::map<std::string, std::map<std::string, StoredTensor>> files;
  nlohmann::ordered_json state = nlohmann::ordered_json::object();
};

/// A checkpoint that was read: its tensors lie in `contents`.
struct LoadedCheckpoint {
  std::string path;  ///< of its folder
  Checkpoint checkpoint;
  std::map<std::string, Safetensors> contents;
};

/// Where the checkpoints of one job are. From prepare() or the first save() on until its end it is
/// the only one that saves there: that of another job, in this process or another, throws
/// `bad_data`, "another job saves in this folder: …". The folder itself may be a link; in it none
/// is followed, and one in place of a checkpoint or of a file of it is refused (`bad_data`), by
/// load() as well. Not to be forked: the child would keep the folder. One thread at a time.
class CheckpointStore {
 public:
  /// `before_system_call` hears each system call of a save by name: for tests that end the process.
  using Probe = std::function<void(const char* name)>;

  /// `keep`: so many checkpoints are left after a save, at least one.
  explicit CheckpointStore(std::string folder, Probe before_system_call = {}, int64_t keep = 2);

  ~CheckpointStore();

  /// Makes the folder if it is not there, and tries whether it can be written, so that a job does
  /// not find out after hours. Throws `resources`, or `bad_data` as above.
  void prepare();

  /// Where the file system has no locks, what it says: nothing keeps another job from saving there
  /// at the same time, until the one or the other finds the other's checkpoint. None: there is a
  /// lock, or the folder is not taken yet.
  std::optional<std::string> why_no_lock() const;

  /// Writes a checkpoint so that the folder holds it whole or not at all, whenever the process or
  /// the machine stops: into a temporary folder, each file and the folder fsynced, renamed, its
  /// parent fsynced. Removes what interrupted saves left. At the end the newest `keep` are left of
  /// those that are no newer than this one. Replaces the same step. Returns the path.
  ///
  /// Throws `resources` naming the file (disk full, no rights, the folder is gone); what was saved
  /// before stays. Throws `bad_data` when another job has saved there since, as on a file system
  /// without locks: then nothing more is written or removed, but for what this save has begun.
  /// Throws `invalid`, before anything is written, for what could not be loaded: a step below 0 or
  /// of more than twelve digits, file names with a '/' or a '.' in front, tensors that
  /// safetensors_header() refuses, a state that is no object, nested 64 deep, with an object of
  /// more than 4096 keys, or over 64 MiB.
  std::string save(const Checkpoint& checkpoint);

  /// Whether `path` is this folder of checkpoints, or would be one in it.
  static bool holds(const std::string& folder, const std::string& path);

  /// The newest checkpoint of `folder`, by its step; none if there is none or no folder. Throws
  /// `bad_data` for a folder that cannot be read.
  static std::optional<std::string> newest(const std::string& folder);

  /// Reads a checkpoint's folder, or the newest in a folder of checkpoints. Trusts nothing: throws
  /// `bad_data`, with the file and the reason, for a manifest that is not what it should be, files
  /// that are missing, of another size or hash, or not safetensors.
  static LoadedCheckpoint load(const std::string& path);
  /// The same without the tensors: what the manifest says, which takes no time.
  static LoadedCheckpoint look(const std::string& path);
  /// The newest one that can be loaded of those before `path`, which is as load() takes it.
  static std::optional<std::string> intact_before(const std::string& path);

 private:
  const std::string folder_;
  const Probe before_system_call_;
  const int64_t keep_;
  std::unique_ptr<FolderClaim> claim_;  // from the first use of the folder on
};

}  // namespace distrain::data
