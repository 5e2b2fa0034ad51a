#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "distrain/wire/tensor_desc.h"

namespace distrain::store {

/// A dense, contiguous tensor in memory that another object owns.
struct StoredTensor {
  wire::DType dtype = wire::DType::kFloat32;
  std::vector<int64_t> shape;
  std::span<const uint8_t> bytes;  ///< row-major, little-endian
};

/// The tensors of a file in the safetensors format (github.com/huggingface/safetensors): 8 bytes
/// header length, a JSON header, the tensors' bytes. Does not need torch.
class Safetensors {
 public:
  /// Throws `bad_data`, with the file and the reason, for a header longer than 16 MiB or than the
  /// file, invalid JSON, duplicate keys, unknown fields or dtypes, a shape that overflows, offsets
  /// that overlap, leave gaps, are out of bounds or do not match dtype and shape, and bytes after
  /// the last tensor.
  static Safetensors read(const std::string& path);
  /// As read(), for bytes in memory; error messages show `name` as the path.
  static Safetensors parse(std::vector<uint8_t> bytes, const std::string& name);

  /// The bytes of the tensors are valid as long as this object or a copy of it.
  const std::map<std::string, StoredTensor>& tensors() const { return tensors_; }
  /// The entries of `__metadata__`.
  const std::map<std::string, std::string>& metadata() const { return metadata_; }

 private:
  std::shared_ptr<const std::vector<uint8_t>> bytes_;  // shared by copies
  std::map<std::string, StoredTensor> tensors_;
  std::map<std::string, std::string> metadata_;
};

/// Returns the header of a file with these tensors, preceded by its length and padded with blanks
/// to a multiple of 8 bytes. The bytes of the tensors follow in the order of `tensors`, without
/// gaps. Throws `invalid` for the dtype kComplex128, a name that is not UTF-8, a header of over 16
/// MiB, and a tensor whose bytes do not match its shape.
std::string safetensors_header(const std::map<std::string, StoredTensor>& tensors,
                               const std::map<std::string, std::string>& metadata = {});

}  // namespace distrain::store
