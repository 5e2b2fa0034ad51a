#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "distrain/wire/tensor_desc.h"

namespace distrain::data {

/// A dense, contiguous tensor in memory that somebody else owns.
struct StoredTensor {
  wire::DType dtype = wire::DType::kFloat32;
  std::vector<int64_t> shape;
  std::span<const uint8_t> bytes;  ///< row-major, little-endian
};

/// The tensors of a file in the safetensors format (github.com/huggingface/safetensors): 8 bytes
/// header length, a JSON header, the tensors' bytes. Torch-free; nothing in the bytes can run.
class Safetensors {
 public:
  /// Throws `bad_data`, with the file and the reason, for whatever is not whole and exact: a header
  /// longer than 16 MiB or than the file, JSON that is none or has a key twice, unknown fields or
  /// dtypes, shapes whose product overflows, offsets that overlap, leave holes or are out of
  /// bounds, sizes that do not fit dtype and shape, bytes after the last tensor.
  static Safetensors read(const std::string& path);
  /// As read(), of bytes in memory; `name` stands for the file in errors.
  static Safetensors parse(std::vector<uint8_t> bytes, const std::string& name);

  /// By name. Their bytes are valid as long as this object or a copy of it.
  const std::map<std::string, StoredTensor>& tensors() const { return tensors_; }
  /// `__metadata__`
  const std::map<std::string, std::string>& metadata() const { return metadata_; }

 private:
  std::shared_ptr<const std::vector<uint8_t>> bytes_;  // shared by copies
  std::map<std::string, StoredTensor> tensors_;
  std::map<std::string, std::string> metadata_;
};

/// What comes before the tensors' bytes in a file with these tensors, which follow in the order of
/// `tensors` without gaps. The header is padded with blanks to a multiple of 8 bytes. Throws
/// `invalid` for what the format does not have: the dtype kComplex128, names that are not UTF-8, a
/// header of over 16 MiB; and for a tensor whose bytes do not fit its shape.
std::string safetensors_header(const std::map<std::string, StoredTensor>& tensors,
                               const std::map<std::string, std::string>& metadata = {});

}  // namespace distrain::data
