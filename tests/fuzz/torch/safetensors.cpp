#include "distrain/store/safetensors.h"

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "distrain/base/error.h"
#include "support/tensor_infos.h"
#include "targets.h"

namespace distrain::fuzz {

namespace {

const std::string kHeader =
    R"({"__metadata__":{"k":"v"},"a":{"dtype":"U8","shape":[2,2],"data_offsets":[0,4]},)"
    R"("b":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}})";

// Checks that a file either yields tensors that do not overlap or is refused with `bad_data`.
void parse_safetensors(const Bytes& bytes) {
  const MemoryLimit limit(kSmall + 64 * bytes.size(), "a multiple of the file");
  try {
    const auto tensors = testing::parse_safetensors(bytes, "fuzz");
    size_t total = 0;
    volatile unsigned sum = 0;  // reads each byte
    for (const auto& [name, tensor] : tensors) {
      const auto* const data = static_cast<const uint8_t*>(tensor.const_data_ptr());
      for (size_t i = 0; i < tensor.nbytes(); ++i) sum = sum + data[i];
      total += tensor.nbytes();
    }
    check(total <= bytes.size(), "tensors do not overlap");
    std::vector<store::TensorInfo> infos = testing::infos_of(tensors);
    store::safetensors_header(infos);
  } catch (const base::Exception& e) {
    check(e.kind() == base::ErrorKind::kBadData, "what does not fit is refused as 'bad_data'");
  }
}

Bytes with_length(std::string_view header, size_t length) {
  Bytes bytes;
  for (int i = 0; i < 8; ++i) bytes.push_back(static_cast<uint8_t>(length >> 8 * i));
  bytes.insert(bytes.end(), header.begin(), header.end());
  return bytes;
}

void run_safetensors(Input input) {
  const uint8_t* const data = input.data();
  const size_t size = input.size();
  parse_safetensors({input.begin(), input.end()});
  if (size == 0) return;
  // Prepends a header length of at most the text's size. The first byte of the input selects it.
  const std::string_view text(reinterpret_cast<const char*>(data) + 1, size - 1);
  parse_safetensors(with_length(text, text.size() * data[0] / 255));

  // Changes a valid header at up to four places, because random bytes are hardly ever JSON.
  static const std::vector<std::string> kPieces = {"[",
                                                   "]",
                                                   "{",
                                                   "}",
                                                   ",",
                                                   ":",
                                                   "0",
                                                   "1",
                                                   "4",
                                                   "8",
                                                   "-1",
                                                   "\"a\"",
                                                   "\"b\"",
                                                   "\"U8\"",
                                                   "\"F32\"",
                                                   "\"dtype\"",
                                                   "\"k\":",
                                                   "null",
                                                   "\"shape\"",
                                                   " ",
                                                   "\\u0061",
                                                   "1e9",
                                                   "9223372036854775807",
                                                   "18446744073709551615"};
  std::string header = kHeader;
  for (size_t i = 0; i + 2 < size && i < 12; i += 3) {
    const size_t at = data[i] % header.size();
    if (data[i + 1] % 2 == 0) {
      header.insert(at, kPieces[data[i + 2] % kPieces.size()]);
    } else if (data[i + 1] % 4 == 1) {
      header[at] = static_cast<char>(data[i + 2]);
    } else {
      header.replace(at, data[i + 1] % 8, kPieces[data[i + 2] % kPieces.size()]);
    }
  }
  parse_safetensors(with_length(header + "12345678", header.size()));
}

std::vector<Bytes> safetensors_seeds() {
  return {with_length(kHeader + "12345678", kHeader.size()), with_length("{}", 2)};
}

}  // namespace

const Target kSafetensors{"safetensors", run_safetensors, safetensors_seeds};

}  // namespace distrain::fuzz
