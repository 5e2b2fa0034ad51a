#include "distrain/store/safetensors.h"

#include <algorithm>
#include <array>
#include <optional>
#include <set>
#include <string_view>
#include <utility>

#include <nlohmann/json.hpp>

#include "distrain/base/error.h"
#include "distrain/base/text.h"
#include "distrain/store/file.h"

namespace distrain::store {
namespace {

using wire::DType;
using Json = nlohmann::ordered_json;

constexpr size_t kLengthBytes = 8;
constexpr uint64_t kMaxHeader = uint64_t{16} << 20;
constexpr std::string_view kMetadata = "__metadata__";

using DTypeName = std::pair<DType, std::string_view>;
constexpr std::array kDTypes = {
    DTypeName{DType::kBool, "BOOL"},
    DTypeName{DType::kUInt8, "U8"},
    DTypeName{DType::kInt8, "I8"},
    DTypeName{DType::kUInt16, "U16"},
    DTypeName{DType::kInt16, "I16"},
    DTypeName{DType::kUInt32, "U32"},
    DTypeName{DType::kInt32, "I32"},
    DTypeName{DType::kUInt64, "U64"},
    DTypeName{DType::kInt64, "I64"},
    DTypeName{DType::kFloat16, "F16"},
    DTypeName{DType::kBFloat16, "BF16"},
    DTypeName{DType::kFloat32, "F32"},
    DTypeName{DType::kFloat64, "F64"},
    DTypeName{DType::kComplex64, "C64"},
    DTypeName{DType::kFloat8E5M2, "F8_E5M2"},
    DTypeName{DType::kFloat8E4M3, "F8_E4M3"},
};

// Returns the size of a tensor in bytes, or nullopt if it overflows. The product of the sizes other
// than 0 must not overflow, even if another size is 0, because torch computes strides from it.
std::optional<uint64_t> bytes_of(DType dtype, const std::vector<int64_t>& shape) {
  uint64_t bytes = wire::element_bytes(dtype);
  bool empty = false;
  for (const int64_t size : shape) {
    if (size < 0) return std::nullopt;
    if (size == 0) {
      empty = true;
    } else if (__builtin_mul_overflow(bytes, static_cast<uint64_t>(size), &bytes) ||
               bytes > static_cast<uint64_t>(INT64_MAX)) {
      return std::nullopt;
    }
  }
  return empty ? 0 : bytes;
}

struct Entry {
  std::string name;
  DType dtype{};
  std::vector<int64_t> shape;
  std::vector<int64_t> offsets;  // begin and end in the tensor data
};
constexpr std::array kEntryFields = {"dtype", "shape", "data_offsets"};

// Parses the header without building a JSON tree. Refuses a value as soon as it occurs in a place
// that the format does not allow, which also limits the nesting depth.
class HeaderReader : public nlohmann::json_sax<Json> {
 public:
  explicit HeaderReader(const std::string& file) : file_(file) {}

  std::vector<Entry> entries;
  std::map<std::string, std::string> metadata;

  bool key(string_t& name) override {
    switch (place_) {
      case Place::kFile:
        if (!names_.insert(name).second) fail(base::in_quotes(name) + " is there twice");
        entry_ = Entry{name, {}, {}, {}};
        fields_.clear();
        break;
      case Place::kMetadata:
        if (metadata.contains(name)) {
          fail(base::in_quotes(name) + " is twice in " + std::string(kMetadata));
        }
        break;
      default:
        if (std::ranges::find(kEntryFields, name) == kEntryFields.end()) {
          fail_entry("has an unknown field " + base::in_quotes(name));
        }
        if (!fields_.insert(name).second) fail_entry("has its " + name + " twice");
    }
    key_ = name;
    return true;
  }

  bool start_object(std::size_t) override {
    if (place_ == Place::kStart) {
      place_ = Place::kFile;
    } else if (place_ == Place::kFile) {
      place_ = key_ == kMetadata ? Place::kMetadata : Place::kTensor;
    } else {
      fail_value();
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
    if (place_ == Place::kMetadata) {
      metadata.emplace(key_, text);
      return true;
    }
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
  std::set<std::string> fields_;  // fields of `entry_` so far
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
HeaderReader read_header(std::span<const uint8_t> begin, uint64_t size, const std::string& name) {
  const auto fail = [&](const std::string& reason) { base::bad_data(name + ": " + reason); };
  const std::string_view header(reinterpret_cast<const char*>(begin.data()) + kLengthBytes,
                                begin.size() - kLengthBytes);
  // The JSON parser would skip a byte order mark and stop at a NUL.
  if (!header.starts_with('{')) fail("not a safetensors file: its header does not begin with '{'");
  if (header.find('\0') != std::string_view::npos) {
    fail("not a safetensors file: a NUL in its header");
  }
  HeaderReader reader(name);
  Json::sax_parse(header.begin(), header.end(), &reader);

  auto& entries = reader.entries;
  std::sort(entries.begin(), entries.end(),
            [](const Entry& a, const Entry& b) { return a.offsets < b.offsets; });
  int64_t end = 0;
  for (const Entry& entry : entries) {
    const std::string tensor = "tensor " + base::in_quotes(entry.name);
    const int64_t first = entry.offsets[0];
    const int64_t last = entry.offsets[1];
    if (first > end) fail("nothing says what the bytes before " + tensor + " are");
    if (first < end) fail(tensor + " overlaps another one");
    if (last < first) fail(tensor + " ends before it begins");
    if (static_cast<uint64_t>(last) > size) fail(tensor + " goes beyond the file's end");
    const auto bytes = bytes_of(entry.dtype, entry.shape);
    if (!bytes) fail(tensor + " has a shape that overflows");
    if (*bytes != static_cast<uint64_t>(last - first)) {
      fail(tensor + " has " + std::to_string(last - first) + " bytes, its dtype and shape need " +
           std::to_string(*bytes));
    }
    end = last;
  }
  if (static_cast<uint64_t>(end) < size) {
    fail(std::to_string(size - static_cast<uint64_t>(end)) +
         " bytes too many after the last tensor");
  }
  return reader;
}

// Appends the next `count` bytes of the file, or all that are left.
void read_more(InputFile& file, uint64_t count, std::vector<uint8_t>& bytes) {
  size_t used = bytes.size();
  bytes.resize(used + count);
  while (used < bytes.size()) {
    const size_t got = file.read(bytes.data() + used, bytes.size() - used);
    if (got == 0) bytes.resize(used);
    used += got;
  }
}

}  // namespace

// Checks the header before it allocates the rest: the file may be a large one of another format.
Safetensors Safetensors::read(const std::string& path) {
  return with_memory_for(path, [&] {
    InputFile file(path, InputFile::Kind::kRegular);
    std::vector<uint8_t> bytes;
    read_more(file, std::min<uint64_t>(kLengthBytes, file.size()), bytes);
    const uint64_t length = header_length(bytes, file.size(), path);
    read_more(file, length, bytes);
    const uint64_t rest = file.size() - kLengthBytes - length;
    read_header(bytes, rest, path);
    read_more(file, rest, bytes);
    return parse(std::move(bytes), path);
  });
}

Safetensors Safetensors::parse(std::vector<uint8_t> bytes, const std::string& name) {
  const uint64_t begin = kLengthBytes + header_length(bytes, bytes.size(), name);
  const auto all = std::span<const uint8_t>(bytes);
  HeaderReader header = read_header(all.first(begin), bytes.size() - begin, name);
  Safetensors result;
  result.metadata_ = std::move(header.metadata);
  for (Entry& entry : header.entries) {
    const auto first = static_cast<size_t>(entry.offsets[0]);
    const auto last = static_cast<size_t>(entry.offsets[1]);
    result.tensors_.emplace(std::move(entry.name),
                            StoredTensor{entry.dtype, std::move(entry.shape),
                                         all.subspan(begin + first, last - first)});
  }
  result.bytes_ = std::make_shared<const std::vector<uint8_t>>(std::move(bytes));
  return result;
}

std::string safetensors_header(const std::map<std::string, StoredTensor>& tensors,
                               const std::map<std::string, std::string>& metadata) {
  const auto fail = [](const std::string& name, const char* reason) {
    base::invalid("tensor " + base::in_quotes(name) + " " + reason);
  };
  std::string header(kLengthBytes, '\0');
  const auto put = [&](const std::string& name, const Json& value) {
    header += header.size() == kLengthBytes ? '{' : ',';
    try {
      header += Json(name).dump() + ":" + value.dump();
    } catch (const Json::exception&) {
      fail(name, "has a name or metadata that are not UTF-8");
    }
  };
  if (!metadata.empty()) put(std::string(kMetadata), Json(metadata));
  uint64_t offset = 0;
  for (const auto& [name, tensor] : tensors) {
    const auto* const found = std::ranges::find(kDTypes, tensor.dtype, &DTypeName::first);
    if (found == kDTypes.end()) fail(name, "has a dtype that safetensors files cannot hold");
    if (name == kMetadata) fail(name, "has a name that safetensors files use otherwise");
    if (tensor.shape.size() > wire::kMaxDimensions) fail(name, "has too many dimensions");
    if (bytes_of(tensor.dtype, tensor.shape) != tensor.bytes.size()) {
      fail(name, "has bytes that do not fit its shape");
    }
    Json entry;
    entry["dtype"] = found->second;
    entry["shape"] = tensor.shape;
    entry["data_offsets"] = {offset, offset + tensor.bytes.size()};
    put(name, entry);
    offset += tensor.bytes.size();
  }
  if (header.size() == kLengthBytes) header += '{';
  header += '}';
  header.resize((header.size() + 7) / 8 * 8, ' ');
  uint64_t length = header.size() - kLengthBytes;
  if (length > kMaxHeader) base::invalid("tensors with a header of more than 16 MiB");
  for (size_t i = 0; i < kLengthBytes; ++i, length >>= 8) header[i] = static_cast<char>(length);
  return header;
}

}  // namespace distrain::store
