#pragma once

#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

namespace distrain::nn {

// Checks of modules that several ranks use as a RemoteModule. They throw `invalid` with the reason.

/// A parameter or buffer of a module. If a tensor has several names, `name` is the first.
struct NamedTensor {
  std::string name;
  at::Tensor tensor;
};

/// Returns the tensor's dtype and shape as text.
std::string text_of(const at::Tensor& tensor);

/// Refuses modules with running statistics. SharedModule::check_unchanged() might miss a change,
/// because some of torch's kernels write the statistics without incrementing the tensor's version.
void refuse_running_statistics(const torch::nn::Module& root, const std::string& name);
/// Refuses parameters and buffers that an update cannot replace. `module` is the module's name.
void refuse_parameters(const std::vector<NamedTensor>& parameters,
                       const std::vector<NamedTensor>& buffers, const std::string& module);
/// Returns true if an Embedding(Bag) in `root` has sparse gradients. Refuses tables with max_norm.
bool has_row_gradients(const torch::nn::Module& root, const std::string& name);
/// Refuses a replica whose tensors `again` differ from those of the first replica.
void check_alike(const std::vector<NamedTensor>& first, const std::vector<NamedTensor>& again,
                 const std::string& module);
/// Calls `check` with the indices and the weight if `module` is, or begins with, an Embedding(Bag).
void check_lookup(const torch::nn::Module& module, const std::vector<at::Tensor>& inputs,
                  void (*check)(const at::Tensor& index, const at::Tensor& table));

}  // namespace distrain::nn
