#include "distrain/ddp/replicas.h"

#include <algorithm>
#include <sstream>
#include <string>

#include <ATen/ATen.h>

#include "distrain/base/error.h"
#include "distrain/base/random.h"
#include "distrain/collective/device_numbers.h"

namespace distrain::ddp {

namespace {

using collective::DeviceNumbers;

std::string describe(const NamedParameter& parameter, DeviceNumbers& devices) {
  std::ostringstream line;
  line << parameter.name << ": " << c10::toString(parameter.tensor.scalar_type()) << " "
       << parameter.tensor.sizes();
  if (!parameter.tensor.requires_grad()) line << ", without gradient";
  const size_t device = devices.number_of(parameter.tensor.device());
  if (device > 0) line << ", on the model's device number " << device + 1;
  return line.str();
}

[[noreturn]] void throw_protocol(int world_rank, const std::string& what) {
  throw base::Exception(base::Error{base::ErrorKind::kProtocol,
                                    "rank " + std::to_string(world_rank) + " " + what, world_rank,
                                    "DistributedDataParallel"});
}

/// Upper bound of the text that lists a model's parameters and buffers, in bytes.
constexpr int64_t kLongestText = int64_t{64} << 20;

std::string line_of(const std::string& text, size_t number) {
  std::istringstream lines(text);
  std::string line;
  for (size_t i = 0; i <= number; ++i) {
    if (!std::getline(lines, line)) return {};
  }
  return line;
}

std::vector<at::Tensor> gather(const at::Tensor& input, collective::ReduceGroup& group) {
  std::vector<at::Tensor> outputs;
  std::vector<collective::ReduceGroup::WorkPtr> works;
  for (int rank = 0; rank < group.size(); ++rank) {
    outputs.push_back(rank == group.rank() ? input : at::empty_like(input));
    works.push_back(group.broadcast(outputs.back(), rank));
  }
  for (const auto& work : works) work->wait();
  return outputs;
}

constexpr int64_t kAlignment = 64;

int64_t padded_bytes(const at::Tensor& tensor) {
  return (static_cast<int64_t>(tensor.nbytes()) + kAlignment - 1) / kAlignment * kAlignment;
}

// Returns the bytes of `flat` from `begin` as a tensor of the shape and dtype of `like`.
at::Tensor shaped(const at::Tensor& flat, int64_t begin, const at::Tensor& like) {
  return flat.narrow(0, begin, static_cast<int64_t>(like.nbytes()))
      .view(like.scalar_type())
      .view(like.sizes());
}

void broadcast_on_device(const std::vector<at::Tensor>& tensors, collective::ReduceGroup& group) {
  int64_t total = 0;
  for (const at::Tensor& tensor : tensors) total += padded_bytes(tensor);
  const at::Tensor flat = at::empty({total}, tensors[0].options().dtype(at::kByte));
  const auto for_each = [&](auto fn) {
    int64_t begin = 0;
    for (const at::Tensor& tensor : tensors) {
      if (tensor.nbytes() > 0) fn(tensor, shaped(flat, begin, tensor));
      begin += padded_bytes(tensor);
    }
  };
  const bool sends = group.rank() == 0;
  if (sends) for_each([](const at::Tensor& tensor, at::Tensor place) { place.copy_(tensor); });
  group.broadcast(flat, 0)->wait();
  if (sends) return;
  // Writes through aliases, because new tensor versions would make in-flight graphs fail.
  for_each([](const at::Tensor& tensor, const at::Tensor& place) {
    tensor.variable_data().copy_(place);
  });
}

}  // namespace

void check_same_everywhere(const std::vector<NamedParameter>& tensors,
                           collective::ReduceGroup& group) {
  std::string text;
  DeviceNumbers devices;
  for (const NamedParameter& tensor : tensors) text += describe(tensor, devices) + "\n";
  const at::Tensor mine = at::empty({2}, at::kLong);
  mine.data_ptr<int64_t>()[0] = static_cast<int64_t>(base::hash_of(text));
  mine.data_ptr<int64_t>()[1] = static_cast<int64_t>(text.size());
  int64_t longest = 0;
  bool equal = true;
  const std::vector<at::Tensor> all = gather(mine, group);
  for (int rank = 0; rank < group.size(); ++rank) {
    const auto* values = all[static_cast<size_t>(rank)].data_ptr<int64_t>();
    if (values[1] < 0 || values[1] > kLongestText) {
      throw_protocol(group.world_rank(rank),
                     "describes its model in " + std::to_string(values[1]) + " bytes");
    }
    equal = equal && values[0] == mine.data_ptr<int64_t>()[0] &&
            values[1] == static_cast<int64_t>(text.size());
    longest = std::max(longest, values[1]);
  }
  if (equal) return;

  // All ranks have seen the same hashes, so all ranks get here or none does.
  const at::Tensor padded = at::zeros({longest}, at::kByte);
  std::copy(text.begin(), text.end(), padded.data_ptr<uint8_t>());
  std::vector<std::string> texts;
  for (const at::Tensor& theirs : gather(padded, group)) {
    const auto* bytes = reinterpret_cast<const char*>(theirs.data_ptr<uint8_t>());
    texts.emplace_back(bytes, strnlen(bytes, static_cast<size_t>(longest)));
  }
  const auto other =
      std::find_if(texts.begin(), texts.end(), [&](const std::string& t) { return t != texts[0]; });
  const auto rank = static_cast<int>(other - texts.begin());
  if (other == texts.end()) {
    throw_protocol(group.world_rank(0), "has told another sum than that of its model");
  }
  size_t line = 0;
  const auto lines = std::count(other->begin(), other->end(), '\n');
  while (line_of(texts[0], line) == line_of(*other, line)) {
    if (static_cast<int64_t>(++line) > lines) {
      throw_protocol(group.world_rank(rank), "describes its model in lines that do not end");
    }
  }
  const auto shown = [line](const std::string& t) {
    const std::string found = line_of(t, line);
    return found.empty() ? "nothing" : "'" + found + "'";
  };
  throw base::Exception(base::Error{
      base::ErrorKind::kInvalid,
      "the ranks have different models: rank " + std::to_string(group.world_rank(rank)) + " has " +
          shown(*other) + " where rank " + std::to_string(group.world_rank(0)) + " has " +
          shown(texts[0]) + " (number " + std::to_string(line + 1) +
          " of the parameters and buffers)",
      group.world_rank(rank), "DistributedDataParallel"});
}

void broadcast_values(const std::vector<at::Tensor>& tensors, collective::ReduceGroup& group) {
  const at::NoGradGuard no_grad;
  DeviceNumbers devices;
  std::vector<std::vector<at::Tensor>> by_device;
  for (const at::Tensor& tensor : tensors) {
    const size_t number = devices.number_of(tensor.device());
    if (number == by_device.size()) by_device.emplace_back();
    by_device[number].push_back(tensor);
  }
  for (const auto& some : by_device) broadcast_on_device(some, group);
}

}  // namespace distrain::ddp
