// ctest: labels=notsan
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include <ATen/Functions.h>

#include "distrain/rpc/message.h"
#include "distrain/store/safetensors.h"
#include "support/catch.h"
#include "support/files.h"
#include "support/tensor_infos.h"

namespace distrain::store {

using namespace testing;
namespace {

using rpc::NamedTensors;
using namespace std::string_literals;

std::vector<uint8_t> bytes_of(const at::Tensor& tensor) {
  const auto* const first = static_cast<const uint8_t*>(tensor.const_data_ptr());
  return {first, first + tensor.nbytes()};
}

template <class T>
std::vector<T> values_of(const at::Tensor& tensor) {
  const T* const first = tensor.const_data_ptr<T>();
  return {first, first + tensor.numel()};
}

std::vector<int64_t> shape_of(const at::Tensor& tensor) { return tensor.sizes().vec(); }

std::string header_of(const NamedTensors& tensors) {
  std::vector<TensorInfo> infos = infos_of(tensors);
  return safetensors_header(infos);
}

std::vector<uint8_t> file_of(const NamedTensors& tensors) {
  const std::string header = header_of(tensors);
  std::vector<uint8_t> file(header.begin(), header.end());
  for (const auto& [_, tensor] : tensors) {
    const std::vector<uint8_t> bytes = bytes_of(tensor);
    file.insert(file.end(), bytes.begin(), bytes.end());
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
  return bad_data([&] { parse_safetensors(file, "f"); });
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

// Returns a file of two tensors and metadata.
std::vector<uint8_t> with_metadata() {
  return file_of(R"({"__metadata__":{"a":"b","c":"\"\\\n"},)"
                 R"("é\"":{"dtype":"U8","shape":[1,2],"data_offsets":[4,6]},)"
                 R"("w":{"dtype":"F32","shape":[],"data_offsets":[0,4]}})",
                 "abcdef");
}

const std::string kOne = R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}})";

NamedTensors some_tensors() {
  return {{"mask", at::tensor({1, 0, 1}).to(at::kBool)},
          {"none", at::empty({0, 4}, at::kHalf)},
          {"steps", at::tensor({7, -1}, at::kLong)},
          {"w\"é\n", at::tensor({1.5F, -2.0F, 0.25F, 3.0F, 4.0F, 5.0F}).view({2, 3})}};
}

void check_same(const NamedTensors& a, const NamedTensors& b) {
  REQUIRE(a.size() == b.size());
  for (const auto& [name, tensor] : a) {
    REQUIRE(b.contains(name));
    CHECK(tensor.scalar_type() == b.at(name).scalar_type());
    CHECK(shape_of(tensor) == shape_of(b.at(name)));
    CHECK(bytes_of(tensor) == bytes_of(b.at(name)));
  }
}

}  // namespace

TEST_CASE("A written file is read back") {
  const auto tensors = some_tensors();
  const auto file = file_of(tensors);
  CHECK(header_of(tensors).size() % 8 == 0);
  check_same(parse_safetensors(file, "f"), tensors);
  const Folder folder;
  const auto path = folder.write("f", {reinterpret_cast<const char*>(file.data()), file.size()});
  check_same(read_safetensors(path), tensors);
  // If DISTRAIN_KEEP_SAFETENSORS is set, copies the file there, so that other readers can read it.
  if (const char* keep = std::getenv("DISTRAIN_KEEP_SAFETENSORS")) {
    write_text(keep, read_text(path));
  }
}

TEST_CASE("A file may have no tensors") {
  CHECK(parse_safetensors(file_of(NamedTensors{}), "f").empty());
}

TEST_CASE("Each dtype of the format is read and written") {
  for (int number = 1; number <= 17; ++number) {
    const auto dtype = rpc::to_scalar_type(static_cast<wire::DType>(number));
    if (dtype == at::kComplexDouble) continue;
    const NamedTensors tensors = {{"x", at::empty({1, 3}, dtype)}};
    std::memset(tensors.at("x").mutable_data_ptr(), 1, tensors.at("x").nbytes());
    check_same(parse_safetensors(file_of(tensors), "f"), tensors);
  }
}

TEST_CASE("Contents that cannot be written are invalid") {
  const auto invalid = [](const std::string& name, const at::Tensor& tensor) {
    return error_of(base::ErrorKind::kInvalid, [&] { header_of({{name, tensor}}); });
  };
  for (const auto dtype : {at::kComplexDouble, at::kFloat8_e8m0fnu}) {
    CHECK(invalid("x", at::empty({1}, dtype)) ==
          "tensor 'x' has a dtype that safetensors files cannot hold");
  }
  invalid("x", at::empty(std::vector<int64_t>(65, 1), at::kByte));
  const at::Tensor bytes = at::empty({16}, at::kByte);
  invalid("\xFF", bytes);
  invalid("__metadata__", bytes);
}

// safetensors 0.8.0 for Python wrote these bytes from numpy arrays.
TEST_CASE("A file that Python's library wrote is read") {
  const auto tensors = parse_safetensors(
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
  REQUIRE(tensors.size() == 5);
  CHECK(values_of<float>(tensors.at("w")) == std::vector<float>{1.5F, -2.0F, 0.25F, 3, 4, 5});
  CHECK(shape_of(tensors.at("w")) == std::vector<int64_t>{2, 3});
  CHECK(values_of<int64_t>(tensors.at("steps")) == std::vector<int64_t>{7, -1});
  CHECK(values_of<double>(tensors.at("scalar")) == std::vector<double>{2.5});
  CHECK(shape_of(tensors.at("scalar")).empty());
  CHECK(bytes_of(tensors.at("mask")) == std::vector<uint8_t>{1, 0, 1});
  CHECK(tensors.at("mask").scalar_type() == at::kBool);
  CHECK(shape_of(tensors.at("none")) == std::vector<int64_t>{0, 4});
  CHECK(tensors.at("none").scalar_type() == at::kHalf);
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
  CHECK(bytes_of(parse_safetensors(file_of(kOne, "abcd"), "f").at("a"))[3] == 'd');
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
  CHECK(bytes_of(parse_safetensors(both, "f").at("a"))[0] == 'a');
}

TEST_CASE("A file truncated at any byte is refused") {
  const auto file = with_metadata();
  for (size_t size = 0; size < file.size(); ++size) {
    CHECK(refused({file.begin(), file.begin() + static_cast<ptrdiff_t>(size)}).starts_with("f: "));
  }
}

TEST_CASE("A file with a changed byte is read or refused without a crash") {
  const auto file = with_metadata();
  int read = 0;
  for (size_t at = 0; at < file.size(); ++at) {
    for (int value = 0; value < 256; ++value) {
      auto changed = file;
      changed[at] = static_cast<uint8_t>(value);
      try {
        const auto parsed = parse_safetensors(changed, "f");
        ++read;
        for (const auto& [_, tensor] : parsed) REQUIRE(tensor.nbytes() < changed.size());
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
  CHECK(bad_data([&] { read_safetensors(missing); }) ==
        "cannot open " + missing + ": No such file or directory");
  CHECK(bad_data([&] { read_safetensors(folder.path()); }) ==
        folder.path() + ": not a regular file");
  const auto path = folder.write("short", "abc");
  CHECK(bad_data([&] { read_safetensors(path); }) ==
        path + ": not a safetensors file: shorter than 8 bytes");
}

TEST_CASE("Tensors are read from a safetensors file") {
  const Folder folder;
  const NamedTensors written = {{"a.b", at::tensor({1.0F, 2.0F, 3.0F}).view({3, 1})}};
  const std::vector<uint8_t> file = file_of(written);
  const std::string text(file.begin(), file.end());
  const NamedTensors read = read_safetensors(folder.write("weights", text));
  REQUIRE(read.size() == 1);
  CHECK(at::equal(read.at("a.b"), written.at("a.b")));
  const std::string path = folder.write("bad", text.substr(0, text.size() - 1));
  CHECK(bad_data([&] { read_safetensors(path); }).starts_with(path + ": "));
}

}  // namespace distrain::store
