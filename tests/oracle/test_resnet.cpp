// ctest: timeout=180
// Compares our ResNets with recorded values of torchvision's. torchvision.cpp runs torchvision.
#include <cmath>
#include <string>

#include <ATen/ATen.h>

#include "distrain/base/random.h"
#include "oracle/resnet_checks.h"
#include "oracle/torchvision_recorded.h"
#include "support/catch.h"

namespace distrain::oracle {

namespace {

uint64_t hash_of(const ResNetStage::Named& named) {
  std::string text;
  for (const auto& [name, tensor] : named) {
    text += name + "[";
    for (int64_t d = 0; d < tensor.dim(); ++d) {
      text += (d > 0 ? "," : "") + std::to_string(tensor.size(d));
    }
    text += "]\n";
  }
  return base::hash_of(text);
}

// Returns the same bits as `numbers` in tests/python/resnet.py.
at::Tensor made_up_numbers(const std::string& name, at::IntArrayRef shape) {
  at::Tensor tensor = at::empty(shape, at::kFloat);
  const auto start = static_cast<uint32_t>(base::hash_of(name) >> 32);
  auto* value = tensor.mutable_data_ptr<float>();
  for (int64_t i = 0; i < tensor.numel(); ++i) {
    uint32_t x = static_cast<uint32_t>(i) * 0x9E3779B1 + start;
    x = (x ^ x >> 16) * 0x85EBCA6B;
    x = (x ^ x >> 13) * 0xC2B2AE35;
    x ^= x >> 16;
    value[i] = static_cast<float>(x >> 8) * 0x1p-23F - 1;
  }
  return tensor;
}

// Returns the same values as `made_up` in tests/python/resnet.py.
at::Tensor made_up_weight(const std::string& name, const at::Tensor& like) {
  if (name.ends_with("num_batches_tracked")) return at::zeros({}, at::kLong);
  const at::Tensor numbers = made_up_numbers(name, like.sizes());
  if (like.dim() > 1) {
    return numbers * std::sqrt(6 / static_cast<double>(like[0].numel()));
  }
  if (name.ends_with("running_var")) return numbers * 0.25 + 1;
  if (name.ends_with("weight")) return numbers * 0.25 + 0.5;
  return numbers * 0.25;
}

at::Tensor scores(const std::vector<double>& recorded) {
  return at::tensor(recorded, at::kDouble).view({2, -1});
}

}  // namespace

TEST_CASE("our ResNets match the recorded values of torchvision's") {
  for (const RecordedResNet& recorded : kRecordedResNets) {
    const std::string model = recorded.model;
    CAPTURE(model);
    ResNetStage net(model, 10, scenario::whole_resnet(model), 1);
    CHECK(net.parameters().size() == recorded.parameters);
    CHECK(hash_of(net.parameters()) == recorded.parameters_hash);
    CHECK(net.buffers().size() == recorded.buffers);
    CHECK(hash_of(net.buffers()) == recorded.buffers_hash);

    NamedTensors weights = net.state();
    for (auto& [name, tensor] : weights) tensor = made_up_weight(name, tensor);
    net.load(weights);
    const at::Tensor images = made_up_numbers("images", {2, 3, 64, 64});
    check_near(net.forward(images, false), scores(recorded.evaluated), kTolerance);
    check_near(net.forward(images), scores(recorded.trained), kTrainingTolerance);

    net.load(weights);
    make_double(net);
    const at::Tensor trained = net.forward(images.to(at::kDouble));
    check_near(trained, scores(recorded.trained), kDoubleTolerance);
    at::cross_entropy_loss(trained, at::tensor({3, 7}, at::kLong)).backward();
    const NamedTensors parameters = net.state();
    for (size_t i = 0; i < std::size(kGradientNames); ++i) {
      CAPTURE(kGradientNames[i]);
      const double norm = parameters.at(kGradientNames[i]).grad().norm().item<double>();
      CHECK(norm == Approx(recorded.gradient_norms.at(i)).epsilon(kDoubleTolerance));
    }
    double running_sum = 0;
    for (const auto& [name, buffer] : net.buffers()) {
      if (buffer.dim() > 0) running_sum += buffer.abs().sum().item<double>();
    }
    CHECK(running_sum == Approx(recorded.running_sum).epsilon(kDoubleTolerance));
  }
}

}  // namespace distrain::oracle
