#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include <nlohmann/json.hpp>

#include "distrain/store/disk.h"
#include "distrain/store/safetensors.h"

namespace distrain::store {

class FolderClaim;

/// A checkpoint on disk. Its files are open, so it can be read even after it has been removed.
///
/// On disk a checkpoint is a folder `step-<12 digits>` with safetensors files
/// (`model.safetensors`, `optimizer.safetensors`, …) and `manifest.json`:
///
///   {"format":"distrain-checkpoint","version":1,"generation":1,"step":20,
///    "files":{"model.safetensors":{"bytes":4800312,"xxh64":"0123456789abcdef"},…},
///    "state":{…},"xxh64":"…"}
///
/// The `xxh64` of a file is the content_hash() of its bytes. The last `xxh64` is the content_hash()
/// of the manifest's text before `,"xxh64"`. The text is one line, with the keys in this order.
/// `generation` counts the jobs that have saved in the folder so far; if missing, it is 0.
///
/// `state` is set by the job: its options, its position in the data, the learning rate and so on.
/// Numbers in `state` that are not finite are read back as null.
struct LoadedCheckpoint {
  std::string path;  ///< path of the checkpoint folder
  int64_t step = 0;
  nlohmann::ordered_json state = nlohmann::ordered_json::object();
  uint64_t hash = 0;                               ///< of its manifest, and so of its whole content
  std::map<std::string, SafetensorsFile> files{};  ///< without those whose names end in ".json"
};

/// A checkpoint that is being written, which becomes visible in commit(). Destroying it before
/// removes what has been written. commit() is atomic, even if the process or the machine stops: it
/// fsyncs a temporary folder, renames it and fsyncs its parent.
///
///   auto saving = store.begin(step, state);
///   std::vector<TensorInfo> tensors = …;
///   OutputFile file = saving->create("model.safetensors", tensors);
///   file.write_at(tensors[0].offset, bytes);  // the pieces of all tensors, in any order
///   saving->add("model.safetensors", file);
///   saving->commit();
///
/// All functions throw `resources`, naming the file, if writing fails (disk full, no permission,
/// folder removed); earlier checkpoints stay. They throw `bad_data` if another job has since saved
/// there, which is possible without locks; then nothing more is written or removed, except the
/// temporary folder. They throw `invalid` for a checkpoint that load() would refuse: a step below 0
/// or of more than twelve digits, a file name with a '/' or a leading '.', a state that is not an
/// object, is nested 64 deep, has an object of more than 4096 keys, or exceeds 64 MiB.
class Saving {
 public:
  Saving(FolderClaim& claim, int64_t step, nlohmann::ordered_json state, int64_t keep);
  ~Saving();

  /// Returns the path of the temporary folder, in which other processes may create files.
  const std::string& path() const { return unfinished_->path(); }
  /// Returns the state of the checkpoint, to which the caller may add until commit().
  nlohmann::ordered_json& state() { return state_; }
  OutputFile create(const std::string& name) const;
  /// Opens a safetensors file in the temporary folder for reading. Throws `bad_data` if it is none.
  SafetensorsFile open(const std::string& name) const;
  /// Creates a safetensors file, writes its header, and sets the offsets of `tensors`.
  OutputFile create(const std::string& name, std::span<TensorInfo> tensors) const;
  /// Finishes a file that create() returned.
  void add(const std::string& name, OutputFile& file) { files_[name] = file.finish_with_sum(); }
  /// Adds a file that another process has created in the temporary folder, and synced to disk.
  /// Throws `bad_data` if it is not a regular file of the size that `sum` has.
  void adopt(const std::string& name, const FileSum& sum);
  /// Publishes the checkpoint, removes old ones, and returns its path.
  std::string commit();

 private:
  std::string manifest() const;
  const OpenFolder& folder() const;
  std::string own_name(std::string_view prefix) const;
  void clean_up() const;
  void publish();
  void remove_old() const;
  void retire(const std::string& name, int64_t step) const;

  FolderClaim& claim_;
  const int64_t step_;
  nlohmann::ordered_json state_;
  const int64_t keep_;
  std::map<std::string, FileSum> files_;
  std::optional<OpenFolder> unfinished_;  // null after commit()
};

/// The parts of a checkpoint that are read.
enum class Depth { kManifest, kFiles };

/// The folder in which a job saves its checkpoints. From prepare() or the first begin() until this
/// object is destroyed, it owns the folder: a save by another job, in any process, throws
/// `bad_data`, "another job saves in this folder: …". The folder itself may be a symbolic link, but
/// saves and load() throw `bad_data` if they find a link inside it. The process must not fork,
/// because the child would keep the folder locked. Not thread-safe.
class CheckpointStore {
 public:
  /// Called before each system call of a save with the call's name. Tests end the process in it.
  using Probe = std::function<void(const char* name)>;

  /// `keep` is the number of checkpoints that remain after a save, at least one.
  explicit CheckpointStore(std::string folder, Probe before_system_call = {}, int64_t keep = 2);

  ~CheckpointStore();

  /// Creates the folder if it does not exist, and checks that it can be written, so that a job does
  /// not fail hours later. Throws `resources` if the folder cannot be created or written, and
  /// `bad_data` if another job saves in it or its lock file is a symbolic link.
  void prepare();

  /// Returns the error message if the file system does not support locks. Two jobs can then save in
  /// the folder until one of them finds the other's checkpoint. Returns nullopt if this object has
  /// a lock, or before the first use of the folder.
  std::optional<std::string> why_no_lock() const;

  /// Begins to write a checkpoint. Only one may be written at a time. Removes the remains of
  /// interrupted saves. commit() replaces a checkpoint of the same step, and keeps the newest
  /// `keep` checkpoints of those that are not newer than this one.
  std::unique_ptr<Saving> begin(int64_t step, nlohmann::ordered_json state);

  /// Returns true if `path` is `folder` itself or has the form of a checkpoint's path in it.
  static bool holds(const std::string& folder, const std::string& path);

  /// Returns the checkpoint of the highest step in `folder`, or nullopt if there is none. Throws
  /// `bad_data` if the folder exists and cannot be read.
  static std::optional<std::string> newest(const std::string& folder);

  /// Opens a checkpoint, or the newest one in a folder of checkpoints, and verifies it. Throws
  /// `bad_data`, with the file and the reason, if the manifest is invalid, or if a file is missing,
  /// differs from the manifest in size or hash, or is not a safetensors file. With kManifest, reads
  /// only the manifest, which is fast.
  static LoadedCheckpoint load(const std::string& path, Depth depth = Depth::kFiles);
  /// Returns the newest intact checkpoint that is older than the one that load(path) would read.
  static std::optional<std::string> intact_before(const std::string& path);

 private:
  const std::string folder_;
  const Probe probe_;
  const int64_t keep_;
  std::unique_ptr<FolderClaim> claim_;  // null until the first use of the folder
};

}  // namespace distrain::store
