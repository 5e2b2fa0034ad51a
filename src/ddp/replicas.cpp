#include "distrain/ddp/replicas.h"

#include <algorithm>
#include <cstring>
#include <sstream>
#include <string>

#include <ATen/ATen.h>

namespace distrain::ddp {

namespace {

std::string describe(const NamedParameter& parameter) {
  std::ostringstream line;
  line << parameter.name << ": " << c10::toString(parameter.tensor.scalar_type()) << " "
       << parameter.tensor.sizes();
  if (!parameter.tensor.requires_grad()) line << ", without gradient";
  return line.str();
}

// FNV-1a
uint64_t hash_of(const std::string& text) {
  uint64_t hash = 0xcbf29ce484222325u;
  for (char c : text) hash = (hash ^ static_cast<uint8_t>(c)) * 0x100000001b3u;
  return hash;
}

std::string line_of(const std::string& text, size_t number) {
  std::istringstream lines(text);
  std::string line;
  for (size_t i = 0; i <= number; ++i) {
    if (!std::getline(lines, line)) return {};
  }
  return line;
}

std::vector<at::Tensor> gather(const at::Tensor& input, collective::Backend& backend) {
  std::vector<at::Tensor> outputs;
  for (int i = 0; i < backend.getSize(); ++i) outputs.push_back(at::empty_like(input));
  backend.allgather(input, outputs).wait();
  return outputs;
}

constexpr int64_t kAlignment = 64;

int64_t padded_bytes(const at::Tensor& tensor) {
  return (static_cast<int64_t>(tensor.nbytes()) + kAlignment - 1) / kAlignment * kAlignment;
}

// `bytes` of a flat tensor as a tensor of the shape of `like`.
at::Tensor shaped(uint8_t* bytes, const at::Tensor& like) {
  return at::from_blob(bytes, like.sizes(), like.options().requires_grad(false));
}

}  // namespace

void check_same_everywhere(const std::vector<NamedParameter>& tensors,
                           collective::Backend& backend) {
  std::string text;
  for (const NamedParameter& tensor : tensors) text += describe(tensor) + "\n";
  const at::Tensor mine = at::empty({2}, at::kLong);
  mine.data_ptr<int64_t>()[0] = static_cast<int64_t>(hash_of(text));
  mine.data_ptr<int64_t>()[1] = static_cast<int64_t>(text.size());
  int64_t longest = 0;
  bool equal = true;
  for (const at::Tensor& theirs : gather(mine, backend)) {
    const auto* values = theirs.data_ptr<int64_t>();
    equal = equal && values[0] == mine.data_ptr<int64_t>()[0] &&
            values[1] == static_cast<int64_t>(text.size());
    longest = std::max(longest, values[1]);
  }
  if (equal) return;

  // Every rank has seen the same hashes, so all come here or none.
  const at::Tensor padded = at::zeros({longest}, at::kByte);
  std::copy(text.begin(), text.end(), padded.data_ptr<uint8_t>());
  std::vector<std::string> texts;
  for (const at::Tensor& theirs : gather(padded, backend)) {
    const auto* bytes = reinterpret_cast<const char*>(theirs.data_ptr<uint8_t>());
    texts.emplace_back(bytes, strnlen(bytes, static_cast<size_t>(longest)));
  }
  const auto other =
      std::find_if(texts.begin(), texts.end(), [&](const std::string& t) { return t != texts[0]; });
  const auto rank = static_cast<int>(other - texts.begin());
  size_t line = 0;
  while (line_of(texts[0], line) == line_of(*other, line)) ++line;
  const auto shown = [line](const std::string& t) {
    const std::string found = line_of(t, line);
    return found.empty() ? "nothing" : "'" + found + "'";
  };
  throw base::Exception(base::Error{
      base::ErrorKind::kInvalid,
      "the ranks have different models: rank " + std::to_string(backend.world_rank(rank)) +
          " has " + shown(*other) + " where rank " + std::to_string(backend.world_rank(0)) +
          " has " + shown(texts[0]) + " (number " + std::to_string(line + 1) +
          " of the parameters and buffers)",
      backend.world_rank(rank), "DistributedDataParallel"});
}

void broadcast_values(const std::vector<at::Tensor>& tensors, collective::Backend& backend) {
  const at::NoGradGuard no_grad;
  int64_t total = 0;
  for (const at::Tensor& tensor : tensors) total += padded_bytes(tensor);
  const at::Tensor flat = at::empty({total}, at::kByte);
  uint8_t* bytes = flat.data_ptr<uint8_t>();
  if (backend.getRank() == 0) {
    for (const at::Tensor& tensor : tensors) {
      shaped(bytes, tensor).copy_(tensor);
      bytes += padded_bytes(tensor);
    }
  }
  backend.broadcast(flat, 0).wait();
  if (backend.getRank() == 0) return;
  for (const at::Tensor& tensor : tensors) {
    // Of contiguous ones only the bytes change: the version counter would fail a graph in flight.
    if (tensor.is_contiguous() && tensor.nbytes() > 0) {
      std::memcpy(tensor.data_ptr(), bytes, tensor.nbytes());
    } else {
      tensor.copy_(shaped(bytes, tensor));
    }
    bytes += padded_bytes(tensor);
  }
}

}  // namespace distrain::ddp
