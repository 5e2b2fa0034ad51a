#include "distrain/job/predictions.h"

#include <ATen/Functions.h>
#include <torch/csrc/autograd/grad_mode.h>

#include "host/table_parts.h"

namespace distrain::job {

void Predictions::load(const table::ShardedEmbedding& tables) const {
  load_tables(snapshot_, tables.table_names(), *tables.local_server());
}

void Predictions::tell_labels(const at::Tensor& scores, const at::Tensor& targets,
                              const std::vector<std::string>& labels) {
  const auto name_of = [&](int64_t label) {
    return labels.empty() ? std::to_string(label) : labels.at(static_cast<size_t>(label));
  };
  const at::Tensor best = scores.argmax(1).cpu();
  const at::Tensor shares = at::softmax(scores, 1).cpu().contiguous();
  const at::Tensor right = targets.cpu();
  for (int64_t row = 0; row < shares.size(0); ++row) {
    const auto label = best[row].item<int64_t>();
    const auto target = right[row].item<int64_t>();
    const float* first = shares.const_data_ptr<float>() + row * shares.size(1);
    Json fields{{"label", name_of(label)},
                {"scores", std::vector<float>(first, first + shares.size(1))}};
    if (target >= 0) {
      fields["expected"] = name_of(target);
      ++evaluation_.samples;
      evaluation_.right = evaluation_.right.value_or(0) + (label == target ? 1 : 0);
    }
    tell(fields);
  }
}

Json Predictions::fields() const {
  Json fields = added_;
  fields["predicted"] = told_;
  const Json found = fields_of(evaluation_, unit_);
  for (const char* name : {"accuracy", "auc", "perplexity"}) {
    if (found.contains(name)) fields[name] = found[name];
  }
  return fields;
}

std::vector<Field> label_fields() {
  using enum FieldType;
  return {{"label", kText, "most likely label"},
          {"scores", kNumbers, "probability of each label, ordered by name"},
          sometimes({"expected", kText, "label in the input, if there is one"})};
}

std::vector<Event> prediction_events(std::vector<Field> fields) {
  using enum FieldType;
  fields.insert(fields.begin(),
                Field{"index", kInteger, "number of the example in the input, from 0"});
  return {{"prediction", "printed by predict for each example", std::move(fields)},
          {"end", "", {sometimes({"predicted", kInteger, "number of predicted examples"})}}};
}

Outcome run_predict(const Job& job, EventSink& sink, const std::string& checkpoint,
                    const std::string& input, const std::function<void(Predictions&)>& predict) {
  return run_local_job(job, sink, [&](const Job& placed) -> Outcome {
    const at::NoGradGuard no_grad;
    const auto snapshot = Checkpoints({"", 0, checkpoint}, placed, sink).load("predict");
    Predictions predictions(snapshot.value(), input, placed.device(), sink);
    predict(predictions);
    return {.fields = predictions.fields()};
  });
}

}  // namespace distrain::job
