#include "distrain/store/safetensors.h"

#include <algorithm>
#include <array>
#include <optional>
#include <set>
#include <string_view>
#include <utility>

#include <ATen/Functions.h>
#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "distrain/base/error.h"
#include "distrain/base/text.h"
#include "distrain/store/file.h"
#include "distrain/wire/codec.h"

namespace distrain::store {
namespace {

using at::ScalarType;
using Json = nlohmann::ordered_json;

constexpr size_t kLengthBytes = 8;
constexpr uint64_t kMaxHeader = uint64_t{16} << 20;
constexpr std::string_view kMetadata = "__metadata__";

using DTypeName = std::pair<ScalarType, std::string_view>;
constexpr std::array kDTypes = {
    DTypeName{at::kBool, "BOOL"},
    DTypeName{at::kByte, "U8"},
    DTypeName{at::kChar, "I8"},
    DTypeName{at::kUInt16, "U16"},
    DTypeName{at::kShort, "I16"},
    DTypeName{at::kUInt32, "U32"},
    DTypeName{at::kInt, "I32"},
    DTypeName{at::kUInt64, "U64"},
    DTypeName{at::kLong, "I64"},
    DTypeName{at::kHalf, "F16"},
    DTypeName{at::kBFloat16, "BF16"},
    DTypeName{at::kFloat, "F32"},
    DTypeName{at::kDouble, "F64"},
    DTypeName{at::kComplexFloat, "C64"},
    DTypeName{at::kFloat8_e5m2, "F8_E5M2"},
    DTypeName{at::kFloat8_e4m3fn, "F8_E4M3"},
};

// Returns the size of a tensor in bytes, or nullopt if it overflows. Even if a size is 0, the
// product of the others must not overflow, because torch computes strides from that product.
std::optional<int64_t> bytes_of(ScalarType dtype, const std::vector<int64_t>& shape) {
  auto bytes = static_cast<int64_t>(c10::elementSize(dtype));
  bool empty = false;
  for (const int64_t size : shape) {
    if (size == 0) {
      empty = true;
    } else if (__builtin_mul_overflow(bytes, size, &bytes)) {
      return std::nullopt;
    }
  }
  return empty ? 0 : bytes;
}

struct Entry {
  std::string name;
  ScalarType dtype{};
  std::vector<int64_t> shape;
  std::vector<int64_t> offsets;  // begin and end of the tensor in the data after the header
};
constexpr std::array kEntryFields = {"dtype", "shape", "data_offsets"};

// Parses the header without building a JSON tree. Refuses a value as soon as it occurs in a place
// that the format does not allow, which also limits the nesting depth.
class HeaderReader : public nlohmann::json_sax<Json> {
 public:
  explicit HeaderReader(const std::string& file) : file_(file) {}

  std::vector<Entry> entries;

  bool key(string_t& name) override {
    const bool twice = !(place_ == Place::kFile ? names_ : fields_).insert(name).second;
    if (place_ == Place::kFile) {
      if (twice) fail(base::in_quotes(name) + " is there twice");
      entry_ = Entry{name, {}, {}, {}};
      fields_.clear();
    } else if (place_ == Place::kMetadata) {
      if (twice) fail(base::in_quotes(name) + " is twice in " + std::string(kMetadata));
    } else {
      if (std::ranges::find(kEntryFields, name) == kEntryFields.end()) {
        fail_entry("has an unknown field " + base::in_quotes(name));
      }
      if (twice) fail_entry("has its " + name + " twice");
    }
    key_ = name;
    return true;
  }

  bool start_object(std::size_t) override {
    if (place_ == Place::kStart) {
      place_ = Place::kFile;
    } else {
      if (place_ != Place::kFile) fail_value();
      place_ = key_ == kMetadata ? Place::kMetadata : Place::kTensor;
    }
    return true;
  }

  bool end_object() override {
    if (place_ == Place::kTensor) {
      for (const std::string field : kEntryFields) {
        if (!fields_.contains(field)) fail_entry("has no " + field);
      }
      entries.push_back(std::move(entry_));
    }
    place_ = Place::kFile;
    return true;
  }

  bool start_array(std::size_t) override {
    if (place_ != Place::kTensor || key_ == "dtype") fail_value();
    place_ = Place::kNumbers;
    return true;
  }

  bool end_array() override {
    if (key_ != "shape" && entry_.offsets.size() != 2) fail_value();
    place_ = Place::kTensor;
    return true;
  }

  bool string(string_t& text) override {
    if (place_ == Place::kMetadata) return true;
    if (place_ != Place::kTensor || key_ != "dtype") fail_value();
    const auto* const found = std::ranges::find(kDTypes, text, &DTypeName::second);
    if (found == kDTypes.end()) fail_entry("has the unknown dtype " + base::in_quotes(text));
    entry_.dtype = found->first;
    return true;
  }

  bool number_unsigned(number_unsigned_t number) override {
    if (place_ != Place::kNumbers || number > static_cast<uint64_t>(INT64_MAX)) fail_value();
    std::vector<int64_t>& numbers = key_ == "shape" ? entry_.shape : entry_.offsets;
    if (numbers.size() == wire::kMaxDimensions) fail_entry("has too many dimensions");
    numbers.push_back(static_cast<int64_t>(number));
    return true;
  }

  bool null() override { fail_value(); }
  bool boolean(bool) override { fail_value(); }
  bool number_integer(number_integer_t) override { fail_value(); }
  bool number_float(number_float_t, const string_t&) override { fail_value(); }
  bool binary(binary_t&) override { fail_value(); }
  bool parse_error(std::size_t position, const std::string&,
                   const nlohmann::detail::exception&) override {
    fail("its header is not JSON at byte " + std::to_string(kLengthBytes + position));
  }

 private:
  enum class Place { kStart, kFile, kTensor, kNumbers, kMetadata };

  [[noreturn]] void fail(const std::string& reason) const { base::bad_data(file_ + ": " + reason); }
  [[noreturn]] void fail_entry(const std::string& reason) const {
    fail("tensor " + base::in_quotes(entry_.name) + " " + reason);
  }
  [[noreturn]] void fail_value() const {
    if (place_ == Place::kTensor || place_ == Place::kNumbers) {
      fail_entry("has a " + key_ + " that is none");
    }
    fail("its header has a value that it cannot have, at " + base::in_quotes(key_));
  }

  const std::string& file_;
  Place place_ = Place::kStart;
  std::string key_;               // key of the current value
  Entry entry_;                   // the entry being parsed
  std::set<std::string> fields_;  // keys so far in this entry or in the metadata
  std::set<std::string> names_;
};

// Returns the length of the header of a file of `size` bytes that starts with `begin`.
uint64_t header_length(std::span<const uint8_t> begin, uint64_t size, const std::string& name) {
  const auto fail = [&](const char* reason) {
    base::bad_data(name + ": not a safetensors file: " + reason);
  };
  if (begin.size() < kLengthBytes) fail("shorter than 8 bytes");
  uint64_t length = 0;
  for (size_t i = kLengthBytes; i-- > 0;) length = length << 8 | begin[i];
  if (length > kMaxHeader) fail("a header of more than 16 MiB");
  if (length > size - kLengthBytes) fail("its header is longer than the file");
  return length;
}

// Parses the length and header in `begin`, which `size` bytes of tensor data follow. The tensors
// must fill the data without gaps. Sorts the entries by offset.
std::vector<Entry> read_header(std::span<const uint8_t> begin, int64_t size,
                               const std::string& name) {
  const auto fail = [&](const std::string& reason) { base::bad_data(name + ": " + reason); };
  const std::string_view header(reinterpret_cast<const char*>(begin.data()) + kLengthBytes,
                                begin.size() - kLengthBytes);
  // Refuses a byte order mark, which the JSON parser would skip, and a NUL, where it would stop.
  if (!header.starts_with('{')) fail("not a safetensors file: its header does not begin with '{'");
  if (header.find('\0') != header.npos) fail("not a safetensors file: a NUL in its header");
  HeaderReader reader(name);
  Json::sax_parse(header.begin(), header.end(), &reader);

  std::vector<Entry> entries = std::move(reader.entries);
  std::ranges::sort(entries, {}, &Entry::offsets);
  int64_t end = 0;
  for (const Entry& entry : entries) {
    const std::string tensor = "tensor " + base::in_quotes(entry.name);
    const int64_t first = entry.offsets[0];
    const int64_t last = entry.offsets[1];
    if (first > end) fail("nothing says what the bytes before " + tensor + " are");
    if (first < end) fail(tensor + " overlaps another one");
    if (last < first) fail(tensor + " ends before it begins");
    if (last > size) fail(tensor + " goes beyond the file's end");
    const auto bytes = bytes_of(entry.dtype, entry.shape);
    if (!bytes) fail(tensor + " has a shape that overflows");
    if (*bytes != last - first) {
      fail(fmt::format("{} has {} bytes, its dtype and shape need {}", tensor, last - first,
                       *bytes));
    }
    end = last;
  }
  if (end < size) fail(fmt::format("{} bytes too many after the last tensor", size - end));
  return entries;
}

}  // namespace

TensorInfo::TensorInfo(std::string tensor, ScalarType type, std::vector<int64_t> sizes)
    : name(std::move(tensor)), dtype(type), shape(std::move(sizes)) {
  const auto known = bytes_of(dtype, shape);
  if (!known) base::invalid("tensor " + base::in_quotes(name) + " has a shape that overflows");
  bytes = static_cast<uint64_t>(*known);
}

SafetensorsFile::SafetensorsFile(std::string path, uint64_t size, ReadAt read)
    : path_(std::move(path)), size_(size), read_(std::move(read)) {
  std::vector<uint8_t> begin(std::min<uint64_t>(kLengthBytes, size_));
  read_(0, begin);
  begin.resize(kLengthBytes + header_length(begin, size_, path_));
  read_(kLengthBytes, std::span(begin).subspan(kLengthBytes));
  for (Entry& entry : read_header(begin, static_cast<int64_t>(size_ - begin.size()), path_)) {
    TensorInfo& info = tensors_[entry.name];
    info = TensorInfo(entry.name, entry.dtype, std::move(entry.shape));
    info.offset = begin.size() + static_cast<uint64_t>(entry.offsets[0]);
  }
}

at::Tensor SafetensorsFile::tensor(const std::string& name) const {
  const TensorInfo& info = tensors_.at(name);
  return with_memory_for(path_, [&] {
    at::Tensor tensor = at::empty(info.shape, info.dtype);
    read_(info.offset, {static_cast<uint8_t*>(tensor.mutable_data_ptr()), info.bytes});
    return tensor;
  });
}

rpc::NamedTensors read_safetensors(const std::string& path) {
  const InputFile input(path, InputFile::Kind::kRegular);
  const SafetensorsFile file(path, input.size(), [&](auto... range) { input.read_at(range...); });
  rpc::NamedTensors tensors;
  for (const auto& [name, _] : file.tensors()) tensors[name] = file.tensor(name);
  return tensors;
}

std::string safetensors_header(std::span<TensorInfo> tensors) {
  std::string header(kLengthBytes, '\0');
  uint64_t offset = 0;
  for (TensorInfo& tensor : tensors) {
    const auto fail = [&](const char* reason) {
      base::invalid("tensor " + base::in_quotes(tensor.name) + " " + reason);
    };
    const auto* const found = std::ranges::find(kDTypes, tensor.dtype, &DTypeName::first);
    if (found == kDTypes.end()) fail("has a dtype that safetensors files cannot hold");
    if (tensor.name == kMetadata) fail("has a name that safetensors files use otherwise");
    if (tensor.shape.size() > wire::kMaxDimensions) fail("has too many dimensions");
    Json entry;
    entry["dtype"] = found->second;
    entry["shape"] = tensor.shape;
    entry["data_offsets"] = {offset, offset + tensor.bytes};
    header += header.size() == kLengthBytes ? '{' : ',';
    try {
      header += Json(tensor.name).dump() + ":" + entry.dump();
    } catch (const Json::exception&) {
      fail("has a name that is not UTF-8");
    }
    tensor.offset = std::exchange(offset, offset + tensor.bytes);
  }
  if (header.size() == kLengthBytes) header += '{';
  header += '}';
  header.resize((header.size() + 7) / 8 * 8, ' ');
  for (TensorInfo& tensor : tensors) tensor.offset += header.size();
  uint64_t length = header.size() - kLengthBytes;
  if (length > kMaxHeader) base::invalid("tensors with a header of more than 16 MiB");
  for (size_t i = 0; i < kLengthBytes; ++i, length >>= 8) header[i] = static_cast<char>(length);
  return header;
}

}  // namespace distrain::store
