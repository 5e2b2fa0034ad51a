#pragma once

#include <atomic>
#include <thread>
#include <tuple>

#include "distrain/base/future.h"
#include "distrain/job/job.h"
#include "distrain/rpc/agent.h"
#include "distrain/rpc/rref.h"
#include "distrain/store/checkpoint_store.h"
#include "distrain/store/named_tensors.h"

namespace distrain::job {

class TableParts;

/// The name and file of a part of a checkpoint.
struct PartName {
  std::string name{};  ///< prefix of its tensors' names, as "fc" of "fc.weight"; empty: no prefix
  std::string file = "model";  ///< model, optimizer or state
  bool each_own = false;  ///< each trainer has a part of its own; otherwise the first one's is kept
  std::vector<std::string> tensors{};  ///< if not empty: the part has only these tensors
  static constexpr auto kFields =
      std::tuple(&PartName::name, &PartName::file, &PartName::each_own, &PartName::tensors);

  /// Returns true if the stored `tensor` belongs to this part and, if `each_own`, to `trainer`.
  bool has(const std::string& tensor, int trainer) const {
    if (!name.empty() && !tensor.starts_with(name + ".")) return false;
    if (!tensors.empty() && std::ranges::find(tensors, tensor) == tensors.end()) return false;
    return tensor.ends_with(stored("", trainer));
  }
  /// Returns the name under which the checkpoint stores a tensor of `trainer`.
  std::string stored(const std::string& tensor, int trainer) const {
    return each_own ? tensor + "." + std::to_string(trainer) : tensor;
  }
  bool operator==(const PartName&) const = default;
};

/// A snapshot of tensors. Nothing writes to them, so training can continue while they are fetched.
struct Held {
  rpc::NamedTensors here;
  std::vector<rpc::RRef<rpc::NamedTensors>> elsewhere;  ///< tensors that other ranks hold
  std::vector<std::string> trained;                     ///< names of tensors that must be finite
  static constexpr auto kFields = std::tuple(&Held::here, &Held::elsewhere, &Held::trained);

  Held() = default;
  /// Sets `trained` to the names of the tensors that require a gradient.
  Held(rpc::NamedTensors tensors) : here(std::move(tensors)) {  // NOLINT: implicit by design
    for (const auto& [name, tensor] : here) {
      if (tensor.defined() && tensor.requires_grad()) trained.push_back(name);
    }
  }
  Held(std::vector<rpc::RRef<rpc::NamedTensors>> owned)  // NOLINT
      : elsewhere(std::move(owned)) {}

  /// Moves the tensors in `here` to `agent` and adds references to them to `elsewhere`.
  void leave_at(rpc::Agent& agent) {
    if (!here.empty())
      elsewhere.push_back(agent.make_rref(store::on_host(std::exchange(here, {}))));
  }
};

/// A part of a checkpoint, and the functions that save and load it.
struct Part : PartName {
  bool once = false;  ///< the trainers share one object, which the first trainer saves and loads
  /// Takes a snapshot while all trainers wait. Must copy tensors that training will change, as
  /// store::copies_on_host does.
  std::function<Held(int trainer)> take;
  /// Loads the saved tensors of this part. Throws `bad_data` if their names or shapes do not match.
  std::function<void(int trainer, const rpc::NamedTensors& saved)> give;
};

/// Returns a part that saves `live` and loads it in place.
Part part_of(rpc::NamedTensors live, std::string file = "model");
/// Returns a part for each trainer's own tensors, which `live` returns at each save and load.
Part part_of_each(std::function<rpc::NamedTensors(int trainer)> live);
/// Returns a part with the model's vocabulary: named lists of words. A word has no line breaks.
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
/// which returns rpc::NamedTensors. Call this function on every rank before the rank joins.
template <class T>
void expose_parameters(rpc::Agent& agent, const std::string& name) {
  agent.expose<&detail::hold_parameters<T>>(name + ".hold_parameters");
  agent.expose<&detail::give_parameters<T>>(name + ".give_parameters");
}

/// The checkpoint options that every job has, such as `--checkpoint` and `--resume`.
struct CheckpointOptions {
  std::string dir;     ///< empty: nothing is saved
  int64_t every = 0;   ///< steps of each trainer; 0: at the end of each epoch
  std::string resume;  ///< empty: start afresh; "auto": the newest in `dir`, if any; else a path
  int64_t keep = 2;    ///< checkpoints that are left in `dir`
  bool read_only = false;                  ///< nothing is saved: another job may save in `dir`
  std::string on_save_error = "continue";  ///< or "stop"
};

/// The end of messages about a checkpoint that does not fit the job's options.
inline constexpr const char* kTrainAnew =
    ", or train anew without --resume, in another --checkpoint folder";

/// A checkpoint on disk. Its `files` have names without the suffix: `model`, `optimizer`, …. All
/// functions throw `bad_data` with the checkpoint's path.
struct Snapshot : store::LoadedCheckpoint {
  [[noreturn]] void refuse(const std::string& why) const { base::bad_data(path + ": " + why); }
  /// Throws unless the job `cmd` saved the checkpoint.
  void expect_cmd(const std::string& cmd) const {
    const Json was = state.value("cmd", Json());
    if (!was.is_string()) refuse("it does not say its job");
    if (was != cmd) refuse("a checkpoint of " + was.get<std::string>() + ", not of " + cmd);
  }
  /// Returns the saved value of an option in canonical form, if there is one.
  std::optional<std::string> option(const std::string& name) const;
  /// Throws unless the saved value is `value`. A checkpoint of a version without the option counts
  /// as saved with the default `initial`. The message says "saved with --trainers 2, not 3: leave
  /// --trainers out", followed by `otherwise`.
  void expect_option(const std::string& name, const std::string& value, const std::string& initial,
                     const std::string& otherwise = kTrainAnew) const;
  /// Returns the saved value that a trainer passed to TrainingPlan::agree() with this `name`.
  std::string agreed(const std::string& name) const {
    const Json values = state.value("agreed", Json::object());
    const auto value = values.find(name);
    if (value == values.end() || !value->is_string()) refuse("it does not say its " + name);
    return value->get<std::string>();
  }
  const store::SafetensorsFile& file(const std::string& name) const;
  /// Returns the words that part_of_words() saved under the name `list`.
  std::vector<std::string> words(const std::string& list) const;
};

/// Opens a checkpoint, or the newest one in a folder. Throws `bad_data`. If the checkpoint is
/// damaged, the message recommends the option `use` with the newest intact older checkpoint.
Snapshot read_checkpoint(const std::string& path, const char* use = "--resume",
                         store::Depth depth = store::Depth::kFiles);

/// Returns the checkpoint that the job resumes from, if any.
std::optional<std::string> checkpoint_to_resume(const CheckpointOptions& options);

/// A tensor that is being saved. It is read in pieces, so that a tensor of another rank is never
/// whole in this process. Nothing writes to the tensor.
struct HeldTensor {
  store::TensorInfo info;  ///< with the name in the checkpoint
  bool trained = false;    ///< the save fails if the tensor is not finite
  /// Returns the tensor's elements `first` to `first` + `count` - 1 on the CPU.
  std::function<base::Future<at::Tensor>(int64_t first, int64_t count)> read;

  /// Returns a tensor of this process, which must be defined.
  static HeldTensor of(const std::string& name, const at::Tensor& tensor, bool trained = false);
};

/// The content of a checkpoint that is being saved.
struct Content {
  int64_t step = 0;
  Json state = Json::object();
  std::map<std::string, std::vector<HeldTensor>> files{};  ///< by name without the suffix
};

/// Reads and writes the checkpoints of a job, on rank 0. A thread writes them, one at a time, while
/// the job continues.
class Checkpoints {
 public:
  /// Called on the writing thread when a save fails. Not called for `resources` errors, such as a
  /// full disk, unless `on_save_error` is "stop".
  using Failed = std::function<void(const base::Error&)>;

  /// Locks the folder and checks that it can be written. Throws `bad_data` if another job saves
  /// there. Throws `invalid` if it has checkpoints of another run, or newer checkpoints than the
  /// one that this job resumes from.
  /// `tables`, which may be null, writes the job's tables.
  Checkpoints(CheckpointOptions options, const Job& job, EventSink& sink, Failed failed = {},
              TableParts* tables = nullptr);

  bool saving() const { return store_ != nullptr; }

  /// Returns the checkpoint that the job resumes from, if any, and emits a `checkpoint` line.
  std::optional<Snapshot> load(const char* use = "--resume");
  /// Starts a save, and emits a `checkpoint` line when the checkpoint is on disk. `fill`, if set,
  /// finds further tensors. Begins the save of the tables before it returns. Training has paused
  /// since `since`. Call save() after idle() has completed, on one thread at a time.
  void save(Content content, std::function<void(Content&)> fill, base::TimePoint since);
  /// Completes when no save is in progress, even if the save failed.
  base::Future<void> idle() const {
    std::lock_guard lock(mutex_);
    return idle_.shared();  // one caller's cancel() must not affect others
  }
  /// Waits until no save is in progress. Throws the error of the last save, if it failed.
  void finish() const {
    idle().wait();
    std::lock_guard lock(mutex_);
    if (error_) throw base::Exception(*error_);
  }
  /// Returns a message about the last save; empty if there was none.
  std::string last_saved() const {
    std::lock_guard lock(mutex_);
    return last_saved_;
  }

 private:
  struct Save;
  void begin(Save& save);
  void run(Save& save);
  void write(Save& save);
  void write_file(store::Saving& saving, const std::string& name, std::vector<HeldTensor> tensors,
                  int64_t step) const;

  const CheckpointOptions options_;
  EventSink& sink_;
  const Failed failed_;
  const std::function<bool()> before_save_;  // Injection::before_save; may be empty
  const c10::Device device_;                 // of this rank
  TableParts* const tables_;
  std::unique_ptr<store::CheckpointStore> store_;
  // Used by thread_ and by threads that write pieces of servers.
  std::atomic<bool> in_first_save_ = false;
  std::atomic<int64_t> calls_ = 0;  // system calls of the first save
  std::string last_good_;           // path of the checkpoint saved or loaded last; used by thread_

  mutable std::mutex mutex_;  // guards what follows
  base::Future<void> idle_ = base::Future<void>::ready({});
  std::optional<base::Error> error_;  // of the last save
  std::string last_saved_;
  /// The thread of the last save. It comes last, because the save uses the other members. Its
  /// destructor waits for the save, because the save is newer than all checkpoints on disk.
  std::jthread thread_;
};

}  // namespace distrain::job
