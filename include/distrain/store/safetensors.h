#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "distrain/rpc/named_tensors.h"

namespace distrain::store {

/// Reads the tensors of a file in the safetensors format (github.com/huggingface/safetensors): 8
/// bytes header length, a JSON header, the tensors' bytes, row-major and little-endian. Ignores
/// `__metadata__`.
///
/// Throws `bad_data`, with the file and the reason, for a header longer than 16 MiB or than the
/// file, invalid JSON, duplicate keys, unknown fields or dtypes, a shape that overflows, offsets
/// that overlap, leave gaps, are out of bounds or do not match dtype and shape, and bytes after
/// the last tensor.
rpc::NamedTensors read_safetensors(const std::string& path);
/// Does the same as read_safetensors() for bytes in memory. Errors show `name` as the path.
rpc::NamedTensors parse_safetensors(const std::vector<uint8_t>& bytes, const std::string& name);

/// Returns the header of a file with these tensors, preceded by its length and padded with blanks
/// to a multiple of 8 bytes. The bytes of the tensors follow in the order of `tensors`, without
/// gaps. Throws `invalid` for a dtype that the format does not have, a name that is not UTF-8, and
/// a header of over 16 MiB.
std::string safetensors_header(const rpc::NamedTensors& tensors);

}  // namespace distrain::store
