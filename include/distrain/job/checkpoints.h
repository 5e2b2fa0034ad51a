#pragma once

#include <set>
#include <thread>
#include <tuple>

#include "distrain/base/future.h"
#include "distrain/job/job.h"
#include "distrain/rpc/agent.h"
#include "distrain/rpc/rref.h"
#include "distrain/store/checkpoint_store.h"
#include "distrain/store/named_tensors.h"

namespace distrain::job {

/// The name and file of a part of a checkpoint.
struct PartName {
  std::string name{};  ///< prefix of its tensors' names, as "fc" of "fc.weight"; empty: no prefix
  std::string file = "model";  ///< model, optimizer or state
  bool each_own = false;  ///< each trainer has a part of its own; otherwise the first one's is kept
  static constexpr auto kFields = std::tuple(&PartName::name, &PartName::file, &PartName::each_own);

  /// Returns true if the stored name `tensor` belongs to this part (of `trainer`, if `each_own`).
  bool has(const std::string& tensor, int trainer) const;
  /// Returns the name under which the checkpoint stores a tensor of `trainer`.
  std::string stored(const std::string& tensor, int trainer) const;
  bool operator==(const PartName&) const = default;
};

/// A snapshot of tensors, which nothing writes to. They are fetched while training continues.
struct Held {
  rpc::NamedTensors here;
  std::vector<rpc::RRef<rpc::NamedTensors>> elsewhere;  ///< tensors that other ranks hold
  std::vector<std::string> trained;                     ///< names of tensors that must be finite
  static constexpr auto kFields = std::tuple(&Held::here, &Held::elsewhere, &Held::trained);

  Held() = default;
  /// Adds the tensors that require a gradient to `trained`.
  Held(rpc::NamedTensors tensors);                       // NOLINT: implicit by design
  Held(std::vector<rpc::RRef<rpc::NamedTensors>> owned)  // NOLINT
      : elsewhere(std::move(owned)) {}

  /// Moves `here` to references in `elsewhere` that `agent` holds until they are fetched.
  void leave_at(rpc::Agent& agent);
};

/// A part of a checkpoint.
struct Part : PartName {
  bool once = false;  ///< the trainers share one object, which the first trainer saves and loads
  /// Takes a snapshot while all trainers wait; store::copies_on_host copies tensors that will
  /// change.
  std::function<Held(int trainer)> take;
  /// Loads saved tensors. Throws `bad_data` if they do not fit.
  std::function<void(int trainer, const rpc::NamedTensors& saved)> give;
};

/// Returns a part that saves `live` and loads it in place.
Part part_of(rpc::NamedTensors live, std::string file = "model");
/// Returns a part for each trainer's own tensors, which `live` returns at each save and load.
Part part_of_each(std::function<rpc::NamedTensors(int trainer)> live);
/// Returns a part with the model's vocabulary: named lists of words, which have no line breaks.
Part part_of_words(const std::map<std::string, std::vector<std::string>>& lists);

namespace detail {

template <class T>
Held hold_parameters(rpc::CallContext& call, const rpc::RRef<T>& object) {
  Held held(store::copies_on_host(object.local_value().named_parameters()));
  held.leave_at(call.agent);
  return held;
}
template <class T>
void give_parameters(const rpc::RRef<T>& object, const rpc::NamedTensors& saved) {
  store::copy_into(object.local_value().named_parameters(), saved);
}

}  // namespace detail

/// Enables Training::keep() for references to a T on another rank. T needs named_parameters(),
/// which returns rpc::NamedTensors. Call it on every rank before it joins.
template <class T>
void expose_parameters(rpc::Agent& agent, const std::string& name) {
  agent.expose<&detail::hold_parameters<T>>(name + ".hold_parameters");
  agent.expose<&detail::give_parameters<T>>(name + ".give_parameters");
}

/// `--checkpoint`, `--checkpoint-every`, `--resume`, `--keep` and `--on-save-error` of every job.
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

/// The content of a checkpoint. Its `files` have names without the suffix: `model`, `optimizer`, ….
/// All functions throw `bad_data` with the checkpoint's path.
struct Snapshot : store::Checkpoint {
  /// Names of the trained tensors, by file. A save fails if one of these tensors is not finite.
  std::map<std::string, std::set<std::string>> trained{};
  std::string path{};  ///< of the folder that it was read from

  [[noreturn]] void refuse(const std::string& why) const;
  /// Throws unless the job `cmd` saved the checkpoint.
  void expect_cmd(const std::string& cmd) const;
  /// Returns the saved value of an option in canonical form, if there is one.
  std::optional<std::string> option(const std::string& name) const;
  /// Throws unless the saved value is `value`: "saved with --trainers 2, not 3: leave --trainers
  /// out", and `otherwise`.
  void expect_option(const std::string& name, const std::string& value,
                     const std::string& otherwise = kTrainAnew) const;
  /// Returns the value of TrainingPlan::agree().
  std::string agreed(const std::string& name) const;
  const rpc::NamedTensors& file(const std::string& name) const;
  /// Returns a list of part_of_words().
  std::vector<std::string> words(const std::string& list) const;
};

/// Reads a checkpoint, or the newest one in a folder. Throws `bad_data`; if the checkpoint is
/// damaged, the message says to give the intact one before it to `use`.
Snapshot read_checkpoint(const std::string& path, const char* use = "--resume");
/// As read_checkpoint(), but quickly and without tensors.
Snapshot read_manifest(const std::string& path, const char* use = "--resume");

/// Returns the checkpoint that the job resumes from, if any.
std::optional<std::string> checkpoint_to_resume(const CheckpointOptions& options);

/// Reads and writes the checkpoints of a job, on rank 0. A thread writes them, one at a time, while
/// the job continues.
class Checkpoints {
 public:
  /// Called on that thread when a save fails, except with `resources` errors such as a full disk:
  /// these end the job only if `on_save_error` is "stop".
  using Failed = std::function<void(const base::Error&)>;

  /// Locks the folder and checks that it can be written. Throws `bad_data` if another job saves
  /// there, and `invalid` if it has checkpoints that are not those of this job or newer ones than
  /// the one that this job resumes from.
  Checkpoints(CheckpointOptions options, const Job& job, EventSink& sink, Failed failed = {});
  /// Waits for the current save, because it is newer than all checkpoints on disk.
  ~Checkpoints();

  bool saving() const { return store_ != nullptr; }

  /// Returns the checkpoint that the job resumes from, if any, and emits a `checkpoint` line.
  std::optional<Snapshot> load(const char* use = "--resume");
  /// Begins to save, and emits a `checkpoint` line when the checkpoint is on disk. `fill`, if any,
  /// fetches further tensors; nothing may write to the snapshot's. Training has paused since
  /// `since`. Call it after idle() is done, on one thread at a time.
  void save(Snapshot snapshot, std::function<void(Snapshot&)> fill, base::TimePoint since);
  /// Completes when no save is in progress, even if the save failed.
  base::Future<void> idle() const;
  /// Waits for idle(). Throws the error of the last save, if it failed.
  void finish() const;
  /// Returns a message about the last save; empty if there was none.
  std::string last_saved() const;

 private:
  struct Save;
  void run(Save& save);
  void write(const Save& save);

  const CheckpointOptions options_;
  EventSink& sink_;
  const Failed failed_;
  const std::function<bool()> before_save_;  // Injection::before_save; may be empty
  const c10::Device device_;                 // of this rank
  std::unique_ptr<store::CheckpointStore> store_;
  std::thread thread_;          // of the last save
  bool in_first_save_ = false;  // used by thread_
  std::string last_good_;       // path of the checkpoint saved or loaded last; used by thread_

  mutable std::mutex mutex_;  // guards what follows
  base::Future<void> idle_ = base::Future<void>::ready({});
  std::optional<base::Error> error_;  // of the last save
  std::string last_saved_;
};

}  // namespace distrain::job
