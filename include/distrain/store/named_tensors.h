#pragma once

#include <functional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include "distrain/rpc/named_tensors.h"
#include "distrain/store/safetensors.h"

namespace distrain::store {

/// Returns the tensors detached and on the CPU. Tensors already on the CPU share their memory.
rpc::NamedTensors on_host(const rpc::NamedTensors& tensors);
/// Returns copies on the CPU, which later updates of `tensors` do not change. Keeps requires_grad.
rpc::NamedTensors copies_on_host(const rpc::NamedTensors& tensors);

/// Returns the parameters and buffers of a module, prefixed by `name`, as in "name.weight".
rpc::NamedTensors named_tensors(const std::string& name, const torch::nn::Module& module);
/// Copies `saved` into `live`. Throws `bad_data` if names, shapes or dtypes differ.
void copy_into(const rpc::NamedTensors& live, const rpc::NamedTensors& saved);
/// Does the same, and reads one tensor of the file at a time.
void copy_into(const rpc::NamedTensors& live, const SafetensorsFile& saved);
/// Calls `use`. If it throws `bad_data`, puts `path` before the message and rethrows the error.
void naming_file(const std::string& path, const std::function<void()>& use);

/// Encodes words, which must have no line breaks, as bytes. words_of_tensor() decodes them.
at::Tensor tensor_of_words(const std::vector<std::string>& words);
std::vector<std::string> words_of_tensor(const at::Tensor& text);

}  // namespace distrain::store
