#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "distrain/base/clock.h"
#include "distrain/base/error.h"
#include "distrain/base/future.h"
#include "distrain/job/job.h"
#include "distrain/rpc/named_tensors.h"
#include "distrain/store/checkpoint_store.h"

namespace distrain::job {

/// `--checkpoint`, `--checkpoint-every`, `--resume`, `--keep` and `--on-save-error`, as every job
/// takes them. Rank 0 reads and writes the files; the other ranks only have to know whether and
/// when there are any.
struct CheckpointOptions {
  std::string dir;     ///< empty: nothing is saved
  int64_t every = 0;   ///< steps of each trainer; 0: at the end of each epoch
  std::string resume;  ///< empty: start afresh; "auto": the newest in `dir`, if any; else a path
  int64_t keep = 2;    ///< checkpoints that are left in `dir`
  bool read_only = false;                  ///< nothing is saved: another job may save in `dir`
  std::string on_save_error = "continue";  ///< or "stop"
};

/// The file of words, beside `model`, `optimizer` and `state`.
inline constexpr const char* kVocabulary = "vocabulary";

/// The end of messages about a checkpoint that does not fit the job's options.
inline constexpr const char* kTrainAnew =
    ", or train anew without --resume, in another --checkpoint folder";

/// What a checkpoint holds: tensors by file (`model`, `optimizer`, …) and name, and the rest.
struct Snapshot {
  int64_t step = 0;
  std::map<std::string, rpc::NamedTensors> files;
  /// Names of the trained tensors, by file. A save fails if one of these tensors is not finite.
  std::map<std::string, std::set<std::string>> trained;
  Json state = Json::object();
  std::string path;  ///< where it was read from

  /// `bad_data` naming the checkpoint, for whatever does not fit the job.
  [[noreturn]] void refuse(const std::string& why) const;
  /// Refuses one of another job.
  void expect_cmd(const std::string& cmd) const;
  /// An option that it was saved with, in canonical form; none: it does not say.
  std::optional<std::string> option(const std::string& name) const;
  /// Throws `bad_data` unless that is `value`: "saved with --trainers 2, not 3: leave --trainers
  /// out", and `otherwise`.
  void expect_option(const std::string& name, const std::string& value,
                     const std::string& otherwise = kTrainAnew) const;
  /// What all trainers agreed upon under this name; refuses if there was no such thing.
  std::string agreed(const std::string& name) const;
  /// The tensors of `file`; refuses if there are none.
  const rpc::NamedTensors& file(const std::string& name) const;
  /// A list that part_of_words() has kept; refuses if there is none.
  std::vector<std::string> words(const std::string& list) const;
};

/// A checkpoint, or the newest in a folder of them. Throws `bad_data`; of one that is damaged the
/// message names the intact one before it, to be used with `use`.
Snapshot read_checkpoint(const std::string& path, const char* use = "--resume");
/// The same without tensors, which takes no time.
Snapshot read_manifest(const std::string& path, const char* use = "--resume");

/// What a job is to go on from; none: it begins afresh.
std::optional<std::string> checkpoint_to_resume(const CheckpointOptions& options);

/// The checkpoints of one job, on the rank that reads and writes them. They are written by a thread
/// of its own, one at a time, while the job goes on.
class Checkpoints {
 public:
  /// Called on that thread with the error of a failed save. It is not called with a `resources`
  /// error, of a full disk for example, unless `on_save_error` is "stop", because the job goes on.
  using Failed = std::function<void(const base::Error&)>;

  /// Takes the folder for as long as this lives, and tries whether it can be written. Throws
  /// `bad_data` if another job saves there, `invalid` if it holds the checkpoints of a run that
  /// this one does not go on from, or newer ones than the one that this one goes on from.
  Checkpoints(CheckpointOptions options, const Job& job, EventSink& sink, Failed failed = {});
  /// Waits until what is being saved is on disk: no longer than the disk takes, and what other
  /// ranks are to give takes until their loss is known.
  ~Checkpoints();

  bool saving() const { return store_ != nullptr; }

  /// What the job is to go on from, if it is; emits a `checkpoint` line. `use`: read_checkpoint().
  std::optional<Snapshot> load(const char* use = "--resume");
  /// Begins to save; emits a `checkpoint` line once it is on disk. Nobody writes to the snapshot's
  /// tensors any more; `fill`, if there is one, adds what it takes time to fetch. The job has stood
  /// still since `since`, and goes on when this returns. Not before idle(); one thread at a time.
  void save(Snapshot snapshot, std::function<void(Snapshot&)> fill, base::TimePoint since);
  /// Done when nothing is being saved, whatever has come of it.
  base::Future<void> idle() const;
  /// Waits for that. Throws why the last save has failed, if it has.
  void finish() const;
  /// What was saved last, in words, for a job that ends before its time.
  std::string last_saved() const;

 private:
  struct Save;
  void run(Save& save);
  void write(const Save& save);

  const CheckpointOptions options_;
  EventSink& sink_;
  const Failed failed_;
  const std::function<bool()> before_save_;  // to try out a slow one; may be empty
  const c10::Device device_;                 // of this rank
  std::unique_ptr<store::CheckpointStore> store_;
  bool in_first_save_ = false;  // of the thread that saves
  std::thread thread_;          // of the last save; its end is waited for by the next one

  mutable std::mutex mutex_;  // of what follows
  base::Future<void> idle_ = base::Future<void>::ready({});
  std::optional<base::Error> error_;  // of the last save
  std::string last_saved_;
  std::string last_good_;  // path of the checkpoint saved or loaded last; for the saving thread
};

}  // namespace distrain::job
