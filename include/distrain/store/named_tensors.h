#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include "distrain/rpc/named_tensors.h"

namespace distrain::store {

/// Returns the tensors detached, on the CPU; those that are there already share their memory.
rpc::NamedTensors on_host(const rpc::NamedTensors& tensors);
/// Returns copies on the CPU, which later updates do not change. Copies keep requires_grad.
rpc::NamedTensors copies_on_host(const rpc::NamedTensors& tensors);

/// Returns the parameters and buffers of a module, prefixed by `name`, as in "name.weight".
rpc::NamedTensors named_tensors(const std::string& name, const torch::nn::Module& module);
/// Copies `saved` into `live`. Throws `bad_data` if names, shapes or dtypes differ.
void copy_into(const rpc::NamedTensors& live, const rpc::NamedTensors& saved);
/// Calls `use`, and adds `path` to the message if it throws `bad_data`.
void naming_file(const std::string& path, const std::function<void()>& use);

/// Encodes words without line breaks as a tensor of bytes, and decodes them.
at::Tensor tensor_of_words(const std::vector<std::string>& words);
std::vector<std::string> words_of_tensor(const at::Tensor& text);

/// Reads the tensors of a file in the safetensors format (github.com/huggingface/safetensors): 8
/// bytes header length, a JSON header, the tensors' bytes, row-major and little-endian. Ignores
/// `__metadata__`.
///
/// Throws `bad_data`, with the file and the reason, for a header longer than 16 MiB or than the
/// file, invalid JSON, duplicate keys, unknown fields or dtypes, a shape that overflows, offsets
/// that overlap, leave gaps, are out of bounds or do not match dtype and shape, and bytes after
/// the last tensor.
rpc::NamedTensors read_safetensors(const std::string& path);
/// As read_safetensors(), for bytes in memory; error messages show `name` as the path.
rpc::NamedTensors parse_safetensors(const std::vector<uint8_t>& bytes, const std::string& name);

/// Returns the header of a file with these tensors, preceded by its length and padded with blanks
/// to a multiple of 8 bytes. The bytes of the tensors follow in the order of `tensors`, without
/// gaps. Throws `invalid` for a dtype that the format does not have, a name that is not UTF-8, and
/// a header of over 16 MiB.
std::string safetensors_header(const rpc::NamedTensors& tensors);

}  // namespace distrain::store
