#include "distrain/job/rank.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include <ATen/Functions.h>
#include <torch/csrc/autograd/grad_mode.h>

#include "distrain/base/error.h"
#include "distrain/cuda/nccl_reduce_group.h"

namespace distrain::job {

void Roles::add(const std::string& name, int count, bool numbered) {
  roles_.push_back({name, world_size(), count, numbered});
}

int Roles::world_size() const {
  return roles_.empty() ? 0 : roles_.back().first + roles_.back().count;
}

const Roles::Role& Roles::named(const std::string& name) const {
  const auto it = std::ranges::find(roles_, name, &Role::name);
  if (it != roles_.end()) return *it;
  throw base::Exception(base::ErrorKind::kInternal, "the job has no role " + name);
}

const Roles::Role& Roles::of(int rank) const {
  const auto it = std::ranges::find_if(roles_, [&](const Role& role) { return role.has(rank); });
  if (it != roles_.end()) return *it;
  throw base::Exception(base::ErrorKind::kInternal, "the job has no rank " + std::to_string(rank));
}

std::string Roles::name_of(int rank) const {
  const Role& role = of(rank);
  return role.numbered ? role.name + std::to_string(rank) : role.name;
}

std::vector<std::string> Roles::names() const {
  std::vector<std::string> names;
  for (int rank = 0; rank < world_size(); ++rank) names.push_back(name_of(rank));
  return names;
}

Rank::Rank(rpc::Agent& agent, const Job& job, const Roles& roles, EventSink& sink)
    : Process(job, sink), agent_(agent), roles_(roles), role_(roles.of(agent.rank())) {}

const Group& Rank::group(const std::string& role) {
  if (const auto it = groups_.find(role); it != groups_.end()) return it->second;
  const Roles::Role& ranks = roles_.named(role);
  if (!ranks.has(number())) {
    base::invalid(name() + " is not of the role " + role + ", so not in its group");
  }
  if (groups_closed_) {
    base::invalid("the group of the role " + role + " is to be made before the training");
  }
  std::vector<int> members(static_cast<size_t>(ranks.count));
  std::iota(members.begin(), members.end(), ranks.first);
  constexpr int kFirstGroupChannel = 16;  // the layers below use the lower channels
  collective::Backend::Settings settings;
  settings.timeout = std::chrono::milliseconds(std::llround(job().collective_timeout_s * 1000));
  const auto backend = c10::make_intrusive<collective::Backend>(
      agent_.open_channel(static_cast<uint16_t>(kFirstGroupChannel + ranks.first)),
      agent_.executor(), collective::Group{0, std::move(members)}, settings);
  auto [reduce, how] = cuda::make_reduce_group(agent_, backend);
  if (!how.empty()) {
    sink().emit("ddp", {{"ddp", how}});
    fields()["ddp"] = how;
  }
  return groups_.emplace(role, Group{backend, std::move(reduce)}).first->second;
}

void Predictions::load(const rpc::NamedTensors& model) const {
  const rpc::NamedTensors& saved = snapshot_.file("model");
  store::naming_file(snapshot_.path, [&] { store::copy_into(model, saved); });
}

void Predictions::tell(const Json& fields) {
  Json line{{"index", told_++}};
  line.update(fields);
  sink_.emit("prediction", line);
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

void Predictions::evaluated(const Evaluation& evaluation, Unit unit) {
  evaluation_ = evaluation;
  unit_ = unit;
}

Json Predictions::fields() const {
  Json fields = added_;
  fields["predicted"] = told_;
  const Json found = fields_of(evaluation_, unit_);
  for (const char* name : {"accuracy", "perplexity"}) {
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
