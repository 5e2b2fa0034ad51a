#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <tuple>
#include <vector>

#include <c10/core/ScalarType.h>

#include "distrain/rpc/named_tensors.h"

namespace distrain::store {

/// The place of a tensor in a safetensors file.
struct TensorInfo {
  std::string name;
  at::ScalarType dtype = at::kByte;
  std::vector<int64_t> shape;
  uint64_t offset = 0;  ///< of its first byte in the file
  uint64_t bytes = 0;
  static constexpr auto kFields =
      std::tuple(&TensorInfo::name, &TensorInfo::dtype, &TensorInfo::shape, &TensorInfo::offset,
                 &TensorInfo::bytes);

  TensorInfo() = default;
  /// Sets `bytes` but not `offset`, which safetensors_header() sets.
  TensorInfo(std::string tensor, at::ScalarType type, std::vector<int64_t> sizes);
};

/// Reads all of `out` from `offset` of a file on. Throws `bad_data` if the file ends before.
using ReadAt = std::function<void(uint64_t offset, std::span<uint8_t> out)>;

/// A file in the safetensors format (github.com/huggingface/safetensors): the header's length in 8
/// bytes, a JSON header, and the tensors' bytes, row-major and little-endian. The file stays open,
/// and tensors are read on demand. Thread-safe if `read` is.
class SafetensorsFile {
 public:
  /// Reads the header of a file of `size` bytes. Ignores `__metadata__`. Errors show `path`.
  ///
  /// Throws `bad_data`, with the file and the reason, for a header longer than 16 MiB or than the
  /// file, invalid JSON, duplicate keys, unknown fields or dtypes, a shape that overflows, offsets
  /// that overlap, leave gaps, are out of bounds or do not match dtype and shape, and bytes after
  /// the last tensor.
  SafetensorsFile(std::string path, uint64_t size, ReadAt read);

  const std::string& path() const { return path_; }
  uint64_t size() const { return size_; }
  const std::map<std::string, TensorInfo>& tensors() const { return tensors_; }
  void read_at(uint64_t offset, std::span<uint8_t> out) const { read_(offset, out); }
  /// Reads a tensor, which must exist.
  at::Tensor tensor(const std::string& name) const;

 private:
  std::string path_;
  uint64_t size_;
  ReadAt read_;
  std::map<std::string, TensorInfo> tensors_;
};

/// Reads all tensors of a file. Throws as SafetensorsFile does.
rpc::NamedTensors read_safetensors(const std::string& path);

/// Returns the beginning of a file with `tensors`: the header's length and the header, padded with
/// blanks to a multiple of 8 bytes. The caller writes the bytes of each tensor at its offset, which
/// this function sets. Throws `invalid` if a dtype, name or number of dimensions is not allowed, or
/// if the header exceeds 16 MiB.
std::string safetensors_header(std::span<TensorInfo> tensors);

}  // namespace distrain::store
