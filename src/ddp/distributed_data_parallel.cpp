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
  const std::vector<int64_t> sum_and_size = {static_cast<int64_t>(base::hash_of(text)),
                                             std::ssize(text)};
  const at::Tensor own = at::tensor(sum_and_size, at::kLong), of_first = own.clone();
  group.broadcast(of_first, 0)->wait();
  const at::Tensor differs = at::zeros({group.size()}, at::kDouble);
  if (!own.equal(of_first)) differs[group.rank()] = 1;
  group.average_async(differs)->wait();
  if (!differs.any().item<bool>()) return;

  // All ranks have the same averages, so either all ranks get here or none.
  const auto other = static_cast<int>(differs.nonzero()[0].item<int64_t>());
  const int rank = group.world_rank(other);
  const auto text_of = [&](int from) {
    const at::Tensor length = own[1].clone();
    group.broadcast(length, from)->wait();
    const auto size = length.item<int64_t>();
    if (size < 0 || size > kLongestText) {
      throw_protocol(group.world_rank(from), fmt::format("describes its model in {} bytes", size));
    }
    const at::Tensor bytes = at::empty({size}, at::kByte);
    if (from == group.rank()) std::ranges::copy(text, bytes.data_ptr<uint8_t>());
    group.broadcast(bytes, from)->wait();
    std::string its(reinterpret_cast<const char*>(bytes.data_ptr<uint8_t>()), bytes.nbytes());
    if (its.empty() || its.ends_with('\n')) return its;
    throw_protocol(group.world_rank(from), "describes its model in lines that do not end");
  };
  const std::string first = text_of(0), second = text_of(other);
  if (first == second)
    throw_protocol(rank, "says that its model differs, but describes the same model");
  const auto lines = base::split(first, '\n'), others = base::split(second, '\n');
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
