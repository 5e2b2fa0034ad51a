#include "distrain/ddp/distributed_data_parallel.h"

#include <ATen/ATen.h>
#include <c10/util/StringUtil.h>
#include <fmt/format.h>
#include <torch/nn/modules/embedding.h>

#include "distrain/base/random.h"
#include "distrain/base/text.h"
#include "distrain/wire/codec.h"

namespace distrain::ddp {

namespace {

using collective::DeviceNumbers;

std::string describe(const NamedParameter& parameter, DeviceNumbers& devices) {
  const at::Tensor& tensor = parameter.tensor;
  const size_t device = devices.number_of(tensor.device());
  return c10::str(parameter.name, ": ", tensor.scalar_type(), " ", tensor.sizes(),
                  tensor.requires_grad() ? "" : ", without gradient",
                  parameter.has_sparse_gradient ? ", with sparse gradients" : "",
                  device > 0 ? ", on the model's device number " + std::to_string(device + 1) : "");
}

std::string describe(const ReducerOptions& options) {
  return fmt::format(
      "options: buckets of {} and {} bytes, find_unused_parameters {}, static_graph "
      "{}, broadcast_buffers {}, hook '{}' with {} averages\n",
      options.first_bucket_bytes, options.bucket_cap_bytes, options.find_unused_parameters,
      options.static_graph, options.broadcast_buffers, options.hook.name, options.hook.averages);
}

[[noreturn]] void throw_protocol(int world_rank, const std::string& what) {
  throw base::Exception(base::Error{base::ErrorKind::kProtocol,
                                    fmt::format("rank {} {}", world_rank, what), world_rank,
                                    "DistributedDataParallel"});
}

/// Upper bound of the text that lists a model's parameters and buffers, in bytes.
constexpr int64_t kLongestText = int64_t{64} << 20;

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

int64_t padded_bytes(const at::Tensor& tensor) {
  return static_cast<int64_t>(wire::align_payload(tensor.nbytes()));
}

// Returns the bytes of `flat` from `begin` as a tensor of the shape and dtype of `like`.
at::Tensor shaped(const at::Tensor& flat, int64_t begin, const at::Tensor& like) {
  return flat.narrow(0, begin, static_cast<int64_t>(like.nbytes()))
      .view(like.scalar_type())
      .view(like.sizes());
}

void broadcast_on_device(const std::vector<at::Tensor>& tensors, collective::ReduceGroup& group,
                         int root) {
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
  const bool sends = group.rank() == root;
  if (sends) for_each([](const at::Tensor& tensor, at::Tensor place) { place.copy_(tensor); });
  group.broadcast(flat, root)->wait();
  if (sends) return;
  // Write through aliases, because new tensor versions would make in-flight graphs fail.
  for_each([](const at::Tensor& tensor, const at::Tensor& place) {
    tensor.variable_data().copy_(place);
  });
}

}  // namespace

void check_same_everywhere(const std::vector<NamedParameter>& tensors,
                           collective::ReduceGroup& group, const ReducerOptions* options) {
  std::string text = options ? describe(*options) : "";
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
                     fmt::format("describes its model in {} bytes", values[1]));
    }
    equal = equal && values[0] == mine.data_ptr<int64_t>()[0] &&
            values[1] == static_cast<int64_t>(text.size());
    longest = std::max(longest, values[1]);
  }
  if (equal) return;

  // All ranks compare the same hashes, so either all ranks get here or none.
  const at::Tensor padded = at::zeros({longest}, at::kByte);
  std::copy(text.begin(), text.end(), padded.data_ptr<uint8_t>());
  std::vector<std::string> texts;
  for (const at::Tensor& theirs : gather(padded, group)) {
    const auto* bytes = reinterpret_cast<const char*>(theirs.data_ptr<uint8_t>());
    texts.emplace_back(bytes, strnlen(bytes, static_cast<size_t>(longest)));
  }
  const auto other =
      std::ranges::find_if(texts, [&](const auto& each) { return each != texts[0]; });
  if (other == texts.end()) {
    throw_protocol(group.world_rank(0), "has told another sum than that of its model");
  }
  const int rank = group.world_rank(static_cast<int>(other - texts.begin()));
  for (const auto* each : {&texts[0], &*other}) {
    if (each->empty() || each->ends_with('\n')) continue;
    throw_protocol(group.world_rank(static_cast<int>(each - texts.data())),
                   "describes its model in lines that do not end");
  }
  const auto lines = base::split(texts[0], '\n'), others = base::split(*other, '\n');
  const auto [expected, found] = std::ranges::mismatch(lines, others);
  const auto shown = [](const auto& all, auto line) {
    return line == all.end() || line->empty() ? "nothing" : "'" + std::string(*line) + "'";
  };
  throw base::Exception(base::Error{
      base::ErrorKind::kInvalid,
      fmt::format("the ranks have different models: rank {} has {} where rank {} has {}", rank,
                  shown(others, found), group.world_rank(0), shown(lines, expected)),
      rank, "DistributedDataParallel"});
}

void mark_sparse(std::vector<NamedParameter>& parameters, const torch::nn::Module& module) {
  const auto mark = [&](const auto* embedding) {
    for (NamedParameter& each : parameters) {
      if (!embedding || !each.tensor.is_same(embedding->weight)) continue;
      each.has_sparse_gradient = embedding->options.sparse();
    }
  };
  for (const auto& each : module.modules()) {
    mark(each->template as<torch::nn::EmbeddingImpl>());
    mark(each->template as<torch::nn::EmbeddingBagImpl>());
  }
}

void broadcast_values(const std::vector<at::Tensor>& tensors, collective::ReduceGroup& group,
                      int root) {
  const at::NoGradGuard no_grad;
  DeviceNumbers devices;
  std::vector<std::vector<at::Tensor>> by_device;
  for (const at::Tensor& tensor : tensors) {
    const size_t number = devices.number_of(tensor.device());
    if (number == by_device.size()) by_device.emplace_back();
    by_device[number].push_back(tensor);
  }
  for (const auto& some : by_device) broadcast_on_device(some, group, root);
}

}  // namespace distrain::ddp
