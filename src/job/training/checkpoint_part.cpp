#include "distrain/job/checkpoint_part.h"

#include "distrain/job/checkpoints.h"

namespace distrain::job {

namespace {

std::string own_suffix(int trainer) { return "." + std::to_string(trainer); }

}  // namespace

Held::Held(rpc::NamedTensors tensors) : here(std::move(tensors)) {
  for (const auto& [name, tensor] : here) {
    if (tensor.defined() && tensor.requires_grad()) trained.push_back(name);
  }
}

void Held::leave_at(rpc::Agent& agent) {
  if (!here.empty()) elsewhere.push_back(agent.make_rref(store::on_host(std::exchange(here, {}))));
}

bool PartName::has(const std::string& tensor, int trainer) const {
  if (!name.empty() && !tensor.starts_with(name + ".")) return false;
  return !each_own || tensor.ends_with(own_suffix(trainer));
}

std::string PartName::stored(const std::string& tensor, int trainer) const {
  return each_own ? tensor + own_suffix(trainer) : tensor;
}

Part part_of(rpc::NamedTensors live, std::string file) {
  Part part = part_of_each([live = std::move(live)](int) { return live; });
  part.file = std::move(file);
  part.each_own = false;
  return part;
}

Part part_of_each(std::function<rpc::NamedTensors(int trainer)> live) {
  Part part;
  part.file = "state";
  part.each_own = true;
  part.take = [live](int trainer) { return store::copies_on_host(live(trainer)); };
  part.give = [live](int trainer, const rpc::NamedTensors& saved) {
    store::copy_into(live(trainer), saved);
  };
  return part;
}

Part part_of_words(const std::map<std::string, std::vector<std::string>>& lists) {
  rpc::NamedTensors texts;
  for (const auto& [name, words] : lists) texts[name] = store::tensor_of_words(words);
  Part part = part_of(std::move(texts), kVocabulary);
  part.once = true;
  return part;
}

}  // namespace distrain::job
