#include "parameter_set.h"

#include <fmt/format.h>

#include "distrain/base/error.h"

namespace distrain::optim {

Gradients mean_of(const std::vector<Gradients>& gathered) {
  if (gathered.size() == 1) return gathered[0];
  Gradients means;
  for (size_t i = 0; i < gathered[0].size(); ++i) {
    at::Tensor sum;
    for (const Gradients& gradients : gathered) sum = sum_of(sum, gradients[i]);
    means.push_back(sum.defined() ? sum / static_cast<double>(gathered.size()) : sum);
  }
  return means;
}

void check_each_once(const std::vector<at::Tensor>& parameters,
                     const std::vector<uint64_t>& groups) {
  std::map<const void*, uint64_t> by_storage;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const void* storage = parameters[i].storage().unsafeGetStorageImpl();
    const auto [known, is_first] = by_storage.emplace(storage, groups[i]);
    if (is_first) continue;
    base::invalid(
        known->second == groups[i]
            ? fmt::format("two of the parameters of group {} share their memory: give a tied one "
                          "once",
                          groups[i])
            : fmt::format("a parameter of group {} is in group {}, too", groups[i], known->second));
  }
}

}  // namespace distrain::optim
