#pragma once

#include "distrain/job/checkpoints.h"
#include "distrain/job/events.h"
#include "distrain/table/sharded_embedding.h"

namespace distrain::job {

inline constexpr const char* kStandardInput = "/dev/stdin";

/// The argument of a job's `predict` function: a checkpoint, the input, and the output lines.
class Predictions {
 public:
  Predictions(const Snapshot& snapshot, std::string input, c10::Device device, EventSink& sink)
      : snapshot_(snapshot), input_(std::move(input)), device_(device), sink_(sink) {}

  const Snapshot& snapshot() const { return snapshot_; }
  /// Returns the path of the examples. It may be a pipe, so read it only once.
  const std::string& input() const { return input_; }
  c10::Device device() const { return device_; }

  /// Copies the checkpoint's parameters into `model`. Throws `bad_data` if they do not fit.
  void load(const rpc::NamedTensors& model) const {
    const store::SafetensorsFile& saved = snapshot_.file("model");
    store::naming_file(snapshot_.path, [&] { store::copy_into(model, saved); });
  }
  /// Loads the rows of tables of this process, without the state of their optimizer.
  void load(const table::ShardedEmbedding& tables) const;

  /// Emits the `prediction` line of the next example.
  void tell(const Json& fields) {
    Json line{{"index", told_++}};
    line.update(fields);
    sink_.emit("prediction", line);
  }
  /// Emits a `prediction` line with the best label and the softmax for each row of `scores`
  /// [n, labels]. `targets` [n] has the index of each expected label; an index below 0 means that
  /// it is unknown. `labels` has the labels' names; if empty, the lines show label indices.
  void tell_labels(const at::Tensor& scores, const at::Tensor& targets,
                   const std::vector<std::string>& labels = {});
  /// Adds a field, which the job declares, to the `end` line.
  void add(const std::string& name, const Json& value) { added_[name] = value; }
  /// Sets the evaluation in the `end` line. Not needed with tell_labels(), which computes accuracy.
  void evaluated(const Evaluation& evaluation, Unit unit) {
    evaluation_ = evaluation;
    unit_ = unit;
  }

  /// Returns the fields of `predict` in the `end` line, such as the number of predictions.
  Json fields() const;

 private:
  const Snapshot& snapshot_;
  const std::string input_;
  const c10::Device device_;
  EventSink& sink_;
  int64_t told_ = 0;
  Json added_ = Json::object();
  Evaluation evaluation_;
  Unit unit_ = Unit::kSamples;
};

/// Returns the fields of the lines that tell_labels() emits.
std::vector<Field> label_fields();
/// Returns the events of `predict`: `prediction` with `fields`, and additional fields of `end`.
std::vector<Event> prediction_events(std::vector<Field> fields);

/// Runs a job's `predict` function with a checkpoint and the examples in `input`.
Outcome run_predict(const Job& job, EventSink& sink, const std::string& checkpoint,
                    const std::string& input, const std::function<void(Predictions&)>& predict);

}  // namespace distrain::job
