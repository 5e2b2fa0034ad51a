#pragma once

#include <functional>
#include <map>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

namespace distrain::data {

/// Parameters by the names that PyTorch's modules give them.
using NamedTensors = std::map<std::string, at::Tensor>;

/// Their values on the CPU, without a graph: for checkpoints.
NamedTensors on_host(const NamedTensors& tensors);
/// The same in memory of their own: they stay as they are when the tensors change. Copies of
/// tensors that require a gradient do so, too.
NamedTensors copies_on_host(const NamedTensors& tensors);

/// Of a module, under `name`: parameters and buffers, as in "name.weight".
NamedTensors named_tensors(const std::string& name, const torch::nn::Module& module);
/// Copies values into tensors of these names, shapes and dtypes. `bad_data` for another set.
void copy_into(const NamedTensors& live, const NamedTensors& saved);
/// Runs `use`, of what was read from `path`; what it throws as `bad_data` names that.
void naming_file(const std::string& path, const std::function<void()>& use);

/// Words, none of which has a line break in it, as a tensor of bytes; and back.
at::Tensor tensor_of_words(const std::vector<std::string>& words);
std::vector<std::string> words_of_tensor(const at::Tensor& text);

}  // namespace distrain::data
