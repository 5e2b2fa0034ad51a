#include "host/held_part.h"

#include <algorithm>
#include <set>

namespace distrain::job {

namespace {

using Tensors = rpc::RRef<rpc::NamedTensors>;

// Describes the tensors of a snapshot on this rank, and makes them contiguous.
std::vector<store::TensorInfo> describe(const Tensors& held) {
  std::vector<store::TensorInfo> infos;
  for (auto& [name, tensor] : held.local_value()) {
    tensor = tensor.detach().contiguous();
    infos.emplace_back(name, tensor.scalar_type(), tensor.sizes().vec());
  }
  return infos;
}

// Returns some elements of a tensor that describe() has described.
at::Tensor read_held(const Tensors& held, const std::string& name, int64_t first, int64_t count) {
  const at::Tensor piece = held.local_value().at(name).view(-1).narrow(0, first, count);
  return store::on_host({{name, piece}}).at(name);
}

}  // namespace

void expose_held_parts(rpc::Agent& agent) {
  agent.expose<&describe>("job.describe");
  agent.expose<&read_held>("job.read_held");
}

void add_to_content(Content& content, std::vector<HeldPart> parts, rpc::Agent* agent,
                    EventSink& sink) {
  std::set<std::pair<std::string, std::string>> known;
  for (HeldPart& held : parts) {
    const PartName& part = held.part;
    const auto add = [&](HeldTensor tensor) {
      std::string& name = tensor.info.name;
      tensor.trained = std::ranges::count(held.tensors.trained, name) > 0;
      const std::string stored = part.stored(name, held.trainer);
      if (!part.has(stored, held.trainer) || !known.emplace(part.file, stored).second) {
        throw base::Exception(base::ErrorKind::kInternal,
                              "a checkpoint's part '" + part.name + "' has the tensor " + name +
                                  ", which is not named by it or is another's, too");
      }
      name = stored;
      content.files[part.file].push_back(std::move(tensor));
    };
    content.files[part.file];
    for (const auto& [name, tensor] : held.tensors.here) add(HeldTensor::of(name, tensor));
    for (auto& there : held.tensors.elsewhere) {
      const rpc::To owner = rpc::To(there.owner()).without_deadline();
      for (store::TensorInfo& info :
           there.is_owner() ? describe(there) : agent->rpc_sync<&describe>(owner, there)) {
        const auto read = [agent, owner, there, name = info.name](int64_t first, int64_t count) {
          if (!there.is_owner()) {
            return agent->rpc_async<&read_held>(owner, there, name, first, count);
          }
          return base::Future<at::Tensor>::ready(read_held(there, name, first, count));
        };
        add({std::move(info), false, read});
      }
      there = {};
      sink.saving();
    }
  }
}

}  // namespace distrain::job
