#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "distrain/rpc/named_tensors.h"

namespace distrain::store {

/// Reads the tensors of a file in the safetensors format (github.com/huggingface/safetensors): the
/// header's length in 8 bytes, a JSON header, and the tensors' bytes, row-major and little-endian.
/// Ignores `__metadata__`.
///
/// Throws `bad_data`, with the file and the reason, for a header longer than 16 MiB or than the
/// file, invalid JSON, duplicate keys, unknown fields or dtypes, a shape that overflows, offsets
/// that overlap, leave gaps, are out of bounds or do not match dtype and shape, and bytes after
/// the last tensor.
rpc::NamedTensors read_safetensors(const std::string& path);
/// Does the same as read_safetensors() for bytes in memory. Errors show `name` as the path.
rpc::NamedTensors parse_safetensors(const std::vector<uint8_t>& bytes, const std::string& name);

/// Returns the beginning of a file with `tensors`: the header's length and the header, padded with
/// blanks to a multiple of 8 bytes. The caller writes the bytes of the tensors after it, in the
/// order of `tensors`, without gaps. Throws `invalid` if a tensor is not contiguous on the CPU or
/// has a dtype, name or number of dimensions that is not allowed, or if the header exceeds 16 MiB.
std::string safetensors_header(const rpc::NamedTensors& tensors);

}  // namespace distrain::store
