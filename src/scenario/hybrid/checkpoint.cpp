#include "checkpoint.h"

#include <ATen/Functions.h>

#include "distrain/job/schedule.h"

namespace distrain::scenario {

namespace {

job::Json must_agree(const HybridOptions& options, const HybridDataInfo& data, bool from_file) {
  job::Json json{{"cmd", "hybrid"},
                 {"trainers", options.trainers},
                 {"mode", options.mode},
                 {"optimizer", options.optimizer},
                 {"embedding_dim", options.embedding_dim},
                 {"seed", options.seed},
                 {"rows", data.rows},
                 {"classes", data.classes},
                 {"data", std::to_string(data.hash)}};
  json[from_file ? "batch_size" : "batches"] = from_file ? options.batch_size : options.batches;
  return json;
}

job::Json must_agree(const HybridOptions& options, const HybridDataInfo& data) {
  return must_agree(options, data, !options.data.empty());
}

}  // namespace

bool HybridProgress::save_due(const HybridOptions& options) const {
  if (options.checkpoint.dir.empty()) return false;
  const bool due = options.checkpoint.every > 0 ? total % options.checkpoint.every == 0 : step == 0;
  return due || over(options);
}

const std::vector<std::string>& hybrid_parameter_names() {
  static const std::vector<std::string> kNames = {"embedding.weight", "fc.weight", "fc.bias"};
  return kNames;
}

job::Snapshot hybrid_snapshot(const HybridOptions& options, const HybridDataInfo& data,
                              const HybridProgress& progress, const data::NamedTensors& model,
                              const std::vector<optim::ParameterState>& optimizer) {
  job::Snapshot snapshot;
  snapshot.step = progress.total;
  snapshot.state = must_agree(options, data);
  snapshot.state["position"] =
      job::Position{progress.epoch, {progress.step}, progress.total}.to_json();
  snapshot.files["model"] = model;
  snapshot.files["optimizer"] = job::flatten(hybrid_parameter_names(), optimizer);
  return snapshot;
}

HybridResume read_hybrid(const job::Snapshot& snapshot, const HybridOptions& options,
                         const HybridDataInfo& data, int64_t steps_per_epoch) {
  const job::Json agreed = must_agree(options, data);
  for (const auto& [key, value] : agreed.items()) snapshot.expect(key.c_str(), value);
  HybridResume resume;
  resume.model = {{"embedding.weight", at::empty({data.rows, options.embedding_dim})},
                  {"fc.weight", at::empty({data.classes, options.embedding_dim})},
                  {"fc.bias", at::empty({data.classes})}};
  snapshot.copy_into("model", resume.model);
  snapshot.checked([&] {
    resume.optimizer = job::unflatten(hybrid_parameter_names(), snapshot.file("optimizer"));
    // As a schedule with one trainer has it: they go at one pace.
    const job::Position position =
        job::Position::from_json(snapshot.state.value("position", job::Json()), 1);
    resume.progress = {position.epoch, position.steps[0], position.total};
    if (position.steps[0] >= steps_per_epoch) snapshot.refuse("the position is out of range");
  });
  return resume;
}

}  // namespace distrain::scenario
