#include "held_parts.h"

#include <chrono>
#include <string>
#include <utility>

#include "distrain/base/error.h"

namespace distrain::job {

namespace {

data::NamedTensors fetched(const rpc::RRef<data::NamedTensors>& held) {
  if (held.is_owner()) return held.local_value();
  return held.to_here_async(std::chrono::nanoseconds::max()).take();
}

void put(const HeldPart& of, const data::NamedTensors& tensors, Snapshot& into) {
  auto& file = into.files[of.part.file];
  for (const auto& [name, tensor] : tensors) {
    const std::string stored = of.part.stored(name, of.trainer);
    if (of.part.has(stored, of.trainer) && file.emplace(stored, tensor).second) continue;
    throw base::Exception(base::ErrorKind::kInternal,
                          "a checkpoint's part '" + of.part.name + "' has the tensor " + name +
                              ", which is not named by it or is another's, too");
  }
}

}  // namespace

void fetch(std::vector<HeldPart>& parts, Snapshot& into, const std::function<void()>& got_one) {
  for (HeldPart& part : parts) {
    for (const std::string& name : part.tensors.trained) {
      into.trained[part.part.file].insert(part.part.stored(name, part.trainer));
    }
    put(part, part.tensors.here, into);
    for (auto& held : part.tensors.elsewhere) {
      put(part, fetched(held), into);
      held = {};
      got_one();
    }
  }
  parts.clear();
}

}  // namespace distrain::job
