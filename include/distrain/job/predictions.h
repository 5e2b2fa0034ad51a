#pragma once

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "distrain/data/named_tensors.h"
#include "distrain/job/checkpoints.h"
#include "distrain/job/events.h"
#include "distrain/job/job.h"

namespace distrain::job {

inline constexpr const char* kStandardInput = "/dev/stdin";

/// What a job's `predict` function works with: a checkpoint, examples, and where to tell of them.
class Predictions {
 public:
  Predictions(const Snapshot& snapshot, std::string input, c10::Device device, EventSink& sink)
      : snapshot_(snapshot), input_(std::move(input)), device_(device), sink_(sink) {}

  const Snapshot& snapshot() const { return snapshot_; }
  /// The path of the examples. It may be a pipe, so it can be read only once.
  const std::string& input() const { return input_; }
  c10::Device device() const { return device_; }

  /// Gives a model the checkpoint's parameters. Throws `bad_data`.
  void load(const data::NamedTensors& model) const;

  /// A `prediction` line, of the next example.
  void tell(const Json& fields);
  /// One for each row of `scores` [n, labels]: the best label, and the softmax. `targets` [n] are
  /// right, below 0: unknown. No `labels`: numbers.
  void tell_labels(const at::Tensor& scores, const at::Tensor& targets,
                   const std::vector<std::string>& labels = {});
  /// A field of the last line, which the job declares.
  void add(const std::string& name, const Json& value) { added_[name] = value; }
  /// How right the model is, where that is not told by tell_labels().
  void evaluated(const Evaluation& evaluation, Unit unit);

  /// Of the last line.
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

/// Of the lines of tell_labels().
std::vector<Field> label_fields();
/// What `predict` prints: `prediction` with these fields, and what it has in `end`.
std::vector<Event> prediction_events(std::vector<Field> fields);

/// Says what a checkpoint's model makes of the examples in `input`.
Outcome run_predict(const Job& job, EventSink& sink, const std::string& checkpoint,
                    const std::string& input, const std::function<void(Predictions&)>& predict);

}  // namespace distrain::job
