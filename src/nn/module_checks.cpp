#include "module_checks.h"

#include <map>

#include <c10/util/StringUtil.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/instancenorm.h>

#include "distrain/base/error.h"

namespace distrain::nn {

namespace {

using base::invalid;

template <class... Norms>
bool keeps_statistics(const torch::nn::Module& module) {
  const auto does = [](const auto* norm) { return norm && norm->options.track_running_stats(); };
  return (does(dynamic_cast<const Norms*>(&module)) || ...);
}

}  // namespace

std::string text_of(const at::Tensor& tensor) {
  return std::string(c10::toString(tensor.scalar_type())) + " " + c10::str(tensor.sizes());
}

void refuse_running_statistics(const torch::nn::Module& root, const std::string& name) {
  for (const auto& item : root.named_modules(name)) {
    using namespace torch::nn;
    if (!keeps_statistics<BatchNorm1dImpl, BatchNorm2dImpl, BatchNorm3dImpl, InstanceNorm1dImpl,
                          InstanceNorm2dImpl, InstanceNorm3dImpl>(*item.value())) {
      continue;
    }
    invalid(
        "module " + item.key() + " (" + item.value()->name() +
        ") writes its running statistics in training: trainers that share it would write them at "
        "the same time; use GroupNorm or LayerNorm, or track_running_stats(false)");
  }
}

void refuse_parameters(const std::vector<NamedTensor>& parameters,
                       const std::vector<NamedTensor>& buffers, const std::string& module) {
  std::map<const void*, std::string> by_memory;
  for (const auto& [name, tensor] : parameters) {
    const std::string who = "parameter " + module + "." + name;
    if (tensor.layout() != at::kStrided) invalid(who + " is sparse: it must be dense");
    if (!tensor.is_leaf()) invalid(who + " is computed from others: it must be a leaf");
    if (!tensor.is_non_overlapping_and_dense()) {
      invalid(who + " (" + text_of(tensor) + ") has elements that share their memory");
    }
    if (tensor.device().is_meta()) invalid(who + " has no memory: it is on the meta device");
  }
  const auto look = [&](const NamedTensor& item) {
    const auto [it, is_new] =
        by_memory.emplace(item.tensor.storage().unsafeGetStorageImpl(), item.name);
    if (is_new) return;
    invalid("module " + module + ": " + it->second + " and " + item.name +
            " share their memory: register the same tensor twice, or two tensors");
  };
  for (const NamedTensor& parameter : parameters) look(parameter);
  for (const NamedTensor& buffer : buffers) {
    if (by_memory.contains(buffer.tensor.storage().unsafeGetStorageImpl())) look(buffer);
  }
}

bool has_row_gradients(const torch::nn::Module& root, const std::string& name) {
  bool has_rows = false;
  const auto look = [&](const auto& item, const auto* table) {
    if (!table) return;
    has_rows = has_rows || table->options.sparse();
    if (!table->options.max_norm()) return;
    invalid("module " + item.key() + " (" + item.value()->name() +
            ") rescales its rows in forward(): trainers that share it would write them at the same "
            "time; leave out max_norm");
  };
  for (const auto& item : root.named_modules(name)) {
    look(item, item.value()->template as<torch::nn::EmbeddingImpl>());
    look(item, item.value()->template as<torch::nn::EmbeddingBagImpl>());
  }
  return has_rows;
}

void check_alike(const std::vector<NamedTensor>& first, const std::vector<NamedTensor>& again,
                 const std::string& module) {
  const auto differ = [&](const std::string& how) {
    invalid("module " + module + ": make() gave another one than at first: " + how);
  };
  if (first.size() != again.size()) {
    differ(std::to_string(again.size()) + " parameters or buffers, not " +
           std::to_string(first.size()));
  }
  for (size_t i = 0; i < first.size(); ++i) {
    if (first[i].name != again[i].name) differ(again[i].name + ", not " + first[i].name);
    const auto expected = text_of(first[i].tensor), found = text_of(again[i].tensor);
    if (expected != found) differ(first[i].name + " is " + found + ", not " + expected);
  }
}

void check_lookup(const torch::nn::Module& module, const std::vector<at::Tensor>& inputs,
                  void (*check)(const at::Tensor& index, const at::Tensor& table)) {
  if (inputs.empty() || !inputs[0].defined()) return;
  if (const auto* all = module.as<torch::nn::SequentialImpl>()) {
    return check_lookup(*all->begin()->ptr(), inputs, check);
  }
  const auto* table = module.as<torch::nn::EmbeddingImpl>();
  const auto* bag = module.as<torch::nn::EmbeddingBagImpl>();
  if (table || bag) check(inputs[0], table ? table->weight : bag->weight);
}

}  // namespace distrain::nn
