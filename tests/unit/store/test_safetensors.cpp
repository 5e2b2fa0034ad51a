// ctest: labels=notsan
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include <ATen/Functions.h>

#include "distrain/base/random.h"
#include "distrain/store/safetensors.h"
#include "distrain/store/stored_tensors.h"
#include "support/catch.h"
#include "support/files.h"

namespace distrain::store {

using namespace testing;
namespace {

using wire::DType;
using namespace std::string_literals;

template <class T>
std::vector<uint8_t> bytes_of(const std::vector<T>& values) {
  std::vector<uint8_t> bytes(values.size() * sizeof(T));
  std::memcpy(bytes.data(), values.data(), bytes.size());
  return bytes;
}

template <class T>
std::vector<T> values_of(const StoredTensor& tensor) {
  std::vector<T> values(tensor.bytes.size() / sizeof(T));
  std::memcpy(values.data(), tensor.bytes.data(), tensor.bytes.size());
  return values;
}

std::vector<uint8_t> file_of(const std::map<std::string, StoredTensor>& tensors,
                             const std::map<std::string, std::string>& metadata = {}) {
  const std::string header = safetensors_header(tensors, metadata);
  std::vector<uint8_t> file(header.begin(), header.end());
  for (const auto& [_, tensor] : tensors) {
    file.insert(file.end(), tensor.bytes.begin(), tensor.bytes.end());
  }
  return file;
}

// Returns a file with `header`, which may be invalid.
std::vector<uint8_t> file_of(std::string_view header, std::string_view data = {}) {
  std::vector<uint8_t> file(8);
  const uint64_t length = header.size();
  std::memcpy(file.data(), &length, sizeof length);
  file.insert(file.end(), header.begin(), header.end());
  file.insert(file.end(), data.begin(), data.end());
  return file;
}

std::string refused(const std::vector<uint8_t>& file) {
  return bad_data([&] { Safetensors::parse(file, "f"); });
}

// Returns the reason for which a file with `header` and four bytes of data is refused.
std::string refused(std::string_view header) { return refused(file_of(header, "abcd")); }

std::vector<uint8_t> from_hex(std::string_view hex) {
  std::vector<uint8_t> bytes;
  for (; !hex.empty(); hex.remove_prefix(2)) {
    bytes.push_back(static_cast<uint8_t>(std::stoi(std::string(hex.substr(0, 2)), nullptr, 16)));
  }
  return bytes;
}

const std::string kOne = R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}})";

const auto kFloats = bytes_of<float>({1.5F, -2.0F, 0.25F, 3.0F, 4.0F, 5.0F});
const auto kInts = bytes_of<int64_t>({7, -1});
const std::vector<uint8_t> kMask = {1, 0, 1};

std::map<std::string, StoredTensor> some_tensors() {
  return {{"mask", {DType::kBool, {3}, kMask}},
          {"none", {DType::kFloat16, {0, 4}, {}}},
          {"steps", {DType::kInt64, {2}, kInts}},
          {"w\"é\n", {DType::kFloat32, {2, 3}, kFloats}}};
}

void check_same(const std::map<std::string, StoredTensor>& a,
                const std::map<std::string, StoredTensor>& b) {
  REQUIRE(a.size() == b.size());
  for (const auto& [name, tensor] : a) {
    REQUIRE(b.contains(name));
    CHECK(tensor.dtype == b.at(name).dtype);
    CHECK(tensor.shape == b.at(name).shape);
    CHECK(std::ranges::equal(tensor.bytes, b.at(name).bytes));
  }
}

}  // namespace

TEST_CASE("A written file is read back") {
  const auto tensors = some_tensors();
  const std::map<std::string, std::string> metadata = {{"by", "distrain"}, {"x", "\"\\\n"}};
  const auto file = file_of(tensors, metadata);
  CHECK(safetensors_header(tensors, metadata).size() % 8 == 0);
  const auto read = Safetensors::parse(file, "f");
  check_same(read.tensors(), tensors);
  CHECK(read.metadata() == metadata);
  const Folder folder;
  const auto path = folder.write("f", {reinterpret_cast<const char*>(file.data()), file.size()});
  check_same(Safetensors::read(path).tensors(), tensors);
  // DISTRAIN_KEEP_SAFETENSORS=<file> keeps a file for inspection by other readers.
  if (const char* keep = std::getenv("DISTRAIN_KEEP_SAFETENSORS")) {
    write_text(keep, read_text(path));
  }
}

TEST_CASE("Copies and moved-to objects keep the bytes") {
  std::vector<Safetensors> files;
  {
    const auto first = Safetensors::parse(file_of(some_tensors()), "f");
    files.push_back(first);
  }
  for (int i = 0; i < 10; ++i) files.push_back(files.front());
  check_same(files.back().tensors(), some_tensors());
}

TEST_CASE("A file may have no tensors") {
  const auto read = Safetensors::parse(file_of(std::map<std::string, StoredTensor>{}), "f");
  CHECK(read.tensors().empty());
  CHECK(read.metadata().empty());
}

TEST_CASE("Each dtype of the format is read and written") {
  const std::vector<uint8_t> bytes(8 * 3);
  for (int number = 1; number <= 15; ++number) {
    const auto dtype = static_cast<DType>(number);
    if (dtype == DType::kComplex128) continue;
    const auto part = std::span(bytes).first(3 * wire::element_bytes(dtype));
    const std::map<std::string, StoredTensor> tensors = {{"x", {dtype, {1, 3}, part}}};
    check_same(Safetensors::parse(file_of(tensors), "f").tensors(), tensors);
  }
}

TEST_CASE("Contents that cannot be written are invalid") {
  const auto invalid = [](const std::string& name, const StoredTensor& tensor) {
    return error_of(base::ErrorKind::kInvalid, [&] { safetensors_header({{name, tensor}}); });
  };
  const std::vector<uint8_t> bytes(16);
  CHECK(invalid("x", {DType::kComplex128, {1}, bytes}) ==
        "tensor 'x' has a dtype that safetensors files cannot hold");
  CHECK(invalid("x", {static_cast<DType>(99), {1}, bytes}) ==
        "tensor 'x' has a dtype that safetensors files cannot hold");
  CHECK(invalid("x", {DType::kUInt8, {15}, bytes}) ==
        "tensor 'x' has bytes that do not fit its shape");
  invalid("x", {DType::kUInt8, {-16}, bytes});
  invalid("x", {DType::kUInt8, {INT64_MAX, INT64_MAX, 0}, {}});
  invalid("x", {DType::kUInt8, std::vector<int64_t>(65, 1), {bytes.data(), 1}});
  invalid("\xFF", {DType::kUInt8, {16}, bytes});
  invalid("__metadata__", {DType::kUInt8, {16}, bytes});
  error_of(base::ErrorKind::kInvalid, [] { safetensors_header({}, {{"a", "\xFF"}}); });
}

// Written by safetensors 0.8.0 for Python from numpy arrays.
TEST_CASE("A file that Python's library wrote is read") {
  const auto file = Safetensors::parse(
      from_hex(
          "50010000000000007b225f5f6d657461646174615f5f223a7b226d616465206279223a22507974686f6e20c3"
          "a9227d2c227374657073223a7b226474797065223a22493634222c227368617065223a5b325d2c2264617461"
          "5f6f666673657473223a5b302c31365d7d2c227363616c6172223a7b226474797065223a22463634222c2273"
          "68617065223a5b5d2c22646174615f6f666673657473223a5b31362c32345d7d2c2277223a7b226474797065"
          "223a22463332222c227368617065223a5b322c335d2c22646174615f6f666673657473223a5b32342c34385d"
          "7d2c226e6f6e65223a7b226474797065223a22463136222c227368617065223a5b302c345d2c22646174615f"
          "6f666673657473223a5b34382c34385d7d2c226d61736b223a7b226474797065223a22424f4f4c222c227368"
          "617065223a5b335d2c22646174615f6f666673657473223a5b34382c35315d7d7d2020200700000000000000"
          "ffffffffffffffff00000000000004400000c03f000000c00000803e00004040000080400000a04001"
          "0001"),
      "f");
  CHECK(file.metadata() == std::map<std::string, std::string>{{"made by", "Python é"}});
  const auto& tensors = file.tensors();
  REQUIRE(tensors.size() == 5);
  CHECK(values_of<float>(tensors.at("w")) == std::vector<float>{1.5F, -2.0F, 0.25F, 3, 4, 5});
  CHECK(tensors.at("w").shape == std::vector<int64_t>{2, 3});
  CHECK(values_of<int64_t>(tensors.at("steps")) == std::vector<int64_t>{7, -1});
  CHECK(values_of<double>(tensors.at("scalar")) == std::vector<double>{2.5});
  CHECK(tensors.at("scalar").shape.empty());
  CHECK(values_of<uint8_t>(tensors.at("mask")) == std::vector<uint8_t>{1, 0, 1});
  CHECK(tensors.at("mask").dtype == DType::kBool);
  CHECK(tensors.at("none").shape == std::vector<int64_t>{0, 4});
  CHECK(tensors.at("none").dtype == DType::kFloat16);
}

TEST_CASE("A file that is not a safetensors file is refused") {
  const std::string begin = "f: not a safetensors file: ";
  CHECK(refused(std::vector<uint8_t>{}) == begin + "shorter than 8 bytes");
  CHECK(refused(std::vector<uint8_t>(7)) == begin + "shorter than 8 bytes");
  CHECK(refused(from_hex("0100000100000000")) == begin + "a header of more than 16 MiB");
  CHECK(refused(from_hex("ffffffffffffffff")) == begin + "a header of more than 16 MiB");
  CHECK(refused(from_hex("0300000000000000"
                         "7b7d")) == begin + "its header is longer than the file");
  for (const auto& header : {""s, " {}"s, "[]"s, "null"s, "\xEF\xBB\xBF{}"s, "\0{}"s}) {
    CHECK(refused(header) == begin + "its header does not begin with '{'");
  }
  CHECK(refused("{}\0x"s) == begin + "a NUL in its header");
}

TEST_CASE("A header that is not JSON is refused") {
  for (const auto& header :
       {"{"s, "{}}"s, "{},"s, "{\"a\"}"s, "{'a':1}"s, "{\"\xFF\":{}}"s, "{\"__metadata__\":{},}"s,
        "{/**/}"s, "{\"a\":{\"shape\":[01]}}"s, "{\"a\":{\"shape\":[1,]}}"s, "{\"a\nb\":{}}"s}) {
    CHECK(refused(header).starts_with("f: its header is not JSON at byte "));
  }
}

TEST_CASE("A header with unknown contents is refused") {
  const auto entry = [](const std::string& fields) { return refused("{\"a\":{" + fields + "}}"); };
  const std::string none = "f: tensor 'a' has ";
  CHECK(entry(R"("shape":[4],"data_offsets":[0,4])") == none + "no dtype");
  CHECK(entry(R"("dtype":"U8","data_offsets":[0,4])") == none + "no shape");
  CHECK(entry(R"("dtype":"U8","shape":[4])") == none + "no data_offsets");
  CHECK(entry(R"("dtype":"U8","dtype":"U8")") == none + "its dtype twice");
  CHECK(entry(R"("shape":[],"shape":[])") == none + "its shape twice");
  CHECK(entry(R"("data_offsets":[0,0],"data_offsets":[0,0])") == none + "its data_offsets twice");
  CHECK(entry(R"("x":1)") == none + "an unknown field 'x'");
  CHECK(entry(R"("dtype":"F7")") == none + "the unknown dtype 'F7'");
  CHECK(entry(R"("dtype":"u8")") == none + "the unknown dtype 'u8'");
  for (const auto* value : {"1", "null", "[\"U8\"]", "{}", "true"}) {
    CHECK(entry("\"dtype\":"s + value) == none + "a dtype that is none");
  }
  for (const auto* value :
       {"4", "null", "\"4\"", "{}", "[-1]", "[1.0]", "[1e3]", "[[1]]", "[null]", "[\"1\"]", "[{}]",
        "[9223372036854775808]", "[true]", "[-0]", "[99999999999999999999]"}) {
    CHECK(entry("\"shape\":"s + value) == none + "a shape that is none");
  }
  for (const auto* value : {"0", "[]", "[0]", "[0,4,4]", "[0,-4]"}) {
    CHECK(entry("\"data_offsets\":"s + value) == none + "a data_offsets that is none");
  }
  std::string dimensions = "1";
  for (int i = 0; i < 64; ++i) dimensions += ",1";
  CHECK(entry("\"shape\":[" + dimensions + "]") == none + "too many dimensions");
  for (const auto* value : {"1", "null", "[]", "\"x\""}) {
    CHECK(refused("{\"a\":"s + value + "}") ==
          "f: its header has a value that it cannot have, at 'a'");
  }
  for (const auto* value : {"1", "null", "[]", "\"x\"", "{\"a\":1}", "{\"a\":{}}", "{\"a\":[]}"}) {
    CHECK(refused("{\"__metadata__\":"s + value + "}")
              .starts_with("f: its header has a value that it cannot have"));
  }
  CHECK(refused(R"({"__metadata__":{"x":"1","x":"1"}})") == "f: 'x' is twice in __metadata__");
  CHECK(refused(R"({"__metadata__":{},"__metadata__":{}})") == "f: '__metadata__' is there twice");
  const std::string empty = R"({"dtype":"U8","shape":[0],"data_offsets":[0,0]})";
  CHECK(refused(R"({"a":)" + empty + R"(,"a":)" + empty + "}") == "f: 'a' is there twice");
  // An escape sequence does not hide a duplicate key.
  CHECK(refused(R"({"a":)" + empty + R"(,"\u0061":)" + empty + "}") == "f: 'a' is there twice");
}

TEST_CASE("A deep header is refused at its first level beyond the limit") {
  const std::string many(10'000'000, '[');
  CHECK(refused("{\"a\":{\"shape\":" + many).ends_with("has a shape that is none"));
  std::string objects;
  for (int i = 0; i < 100'000; ++i) objects += "{\"shape\":";
  CHECK(refused("{\"a\":" + objects).ends_with("has a shape that is none"));
}

TEST_CASE("Tensors that are not contiguous in the file are refused") {
  const auto entry = [](const char* name, const char* shape, const char* offsets) {
    return "\""s + name + R"(":{"dtype":"U8","shape":)" + shape + R"(,"data_offsets":)" + offsets +
           "}";
  };
  const auto one = [&](const char* shape, const char* offsets) {
    return refused("{" + entry("a", shape, offsets) + "}");
  };
  const auto two = [&](const char* a, const char* b) {
    return refused("{" + entry("a", "[2]", a) + "," + entry("b", "[2]", b) + "}");
  };
  CHECK(Safetensors::parse(file_of(kOne, "abcd"), "f").tensors().at("a").bytes[3] == 'd');
  CHECK(one("[3]", "[1,4]") == "f: nothing says what the bytes before tensor 'a' are");
  CHECK(one("[3]", "[0,3]") == "f: 1 bytes too many after the last tensor");
  CHECK(one("[5]", "[0,5]") == "f: tensor 'a' goes beyond the file's end");
  CHECK(one("[5]", "[0,9223372036854775807]") == "f: tensor 'a' goes beyond the file's end");
  CHECK(one("[5]", "[0,4]") == "f: tensor 'a' has 4 bytes, its dtype and shape need 5");
  CHECK(one("[0]", "[0,4]") == "f: tensor 'a' has 4 bytes, its dtype and shape need 0");
  CHECK(one("[4294967296,4294967296]", "[0,4]") == "f: tensor 'a' has a shape that overflows");
  CHECK(one("[9223372036854775807,3,0]", "[0,0]") == "f: tensor 'a' has a shape that overflows");
  CHECK(two("[0,2]", "[1,3]") == "f: tensor 'b' overlaps another one");
  CHECK(two("[0,2]", "[0,2]").ends_with("overlaps another one"));
  CHECK(two("[0,2]", "[3,4]") == "f: nothing says what the bytes before tensor 'b' are");
  CHECK(two("[0,2]", "[2,1]") == "f: tensor 'b' ends before it begins");
  CHECK(refused("{}") == "f: 4 bytes too many after the last tensor");
  const auto both =
      file_of("{" + entry("b", "[2]", "[2,4]") + "," + entry("a", "[2]", "[0,2]") + "}", "abcd");
  CHECK(Safetensors::parse(both, "f").tensors().at("a").bytes[0] == 'a');
}

TEST_CASE("A file truncated at any byte is refused") {
  const auto file = file_of(some_tensors(), {{"a", "b"}});
  for (size_t size = 0; size < file.size(); ++size) {
    CHECK(refused({file.begin(), file.begin() + static_cast<ptrdiff_t>(size)}).starts_with("f: "));
  }
}

TEST_CASE("A file with a changed byte is read or refused without a crash") {
  const auto file = file_of(some_tensors(), {{"a", "b"}});
  int read = 0;
  for (size_t at = 0; at < file.size(); ++at) {
    for (int value = 0; value < 256; ++value) {
      auto changed = file;
      changed[at] = static_cast<uint8_t>(value);
      try {
        const auto parsed = Safetensors::parse(changed, "f");
        ++read;
        for (const auto& [_, tensor] : parsed.tensors()) {
          uint64_t bytes = wire::element_bytes(tensor.dtype);
          for (const int64_t size : tensor.shape) bytes *= static_cast<uint64_t>(size);
          REQUIRE(bytes == tensor.bytes.size());
        }
      } catch (const base::Exception& exception) {
        REQUIRE(exception.kind() == base::ErrorKind::kBadData);
      }
    }
  }
  CHECK(read > 1000);
}

TEST_CASE("A message is short and on one line, whatever the file contains") {
  const auto message = refused("{\"" + std::string(100'000, 'x') + "\\n\":{\"y\\u001b\":1}}");
  CHECK(message.size() < 200);
  for (const char c : message) CHECK(static_cast<unsigned char>(c) >= 0x20);
}

TEST_CASE("A safetensors file that cannot be opened is an error with its name") {
  const Folder folder;
  const auto missing = folder.path("missing");
  CHECK(bad_data([&] { Safetensors::read(missing); }) ==
        "cannot open " + missing + ": No such file or directory");
  CHECK(bad_data([&] { Safetensors::read(folder.path()); }) ==
        folder.path() + ": not a regular file");
  const auto path = folder.write("short", "abc");
  CHECK(bad_data([&] { Safetensors::read(path); }) ==
        path + ": not a safetensors file: shorter than 8 bytes");
}

TEST_CASE("Tensors are read from a safetensors file") {
  const Folder folder;
  const std::vector<float> values = {1, 2, 3};
  const auto* bytes = reinterpret_cast<const uint8_t*>(values.data());
  const std::string header =
      safetensors_header({{"a.b", {wire::DType::kFloat32, {3, 1}, {bytes, 12}}}});
  const std::string text = header + std::string(reinterpret_cast<const char*>(bytes), 12);
  const rpc::NamedTensors read = read_tensors(folder.write("weights", text));
  REQUIRE(read.size() == 1);
  CHECK(at::equal(read.at("a.b"), at::tensor({1.0F, 2.0F, 3.0F}).view({3, 1})));
  const std::string path = folder.write("bad", text.substr(0, text.size() - 1));
  CHECK(bad_data([&] { read_tensors(path); }).starts_with(path + ": "));
  CHECK_THROWS(read_tensors(folder.path("missing")));
}

}  // namespace distrain::store
