#include "distrain/models/resnet.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include <ATen/Functions.h>
#include <torch/csrc/autograd/grad_mode.h>

#include "distrain/base/error.h"
#include "distrain/data/hash.h"
#include "distrain/data/safetensors.h"
#include "distrain/data/stored_tensors.h"
#include "distrain/models/dropout.h"
#include "distrain/rpc/placed.h"

namespace distrain::models {

namespace {

constexpr int64_t kStemWidth = 64;
constexpr int kLayers = 4;
// Multiply-adds that a CPU makes in the time in which it normalises, adds and clips one element.
constexpr double kElementCost = 60;
constexpr int64_t kImagesForOneDnn = 16;

[[noreturn]] void invalid(const std::string& message) {
  throw base::Exception(base::ErrorKind::kInvalid, message);
}

[[noreturn]] void bad_data(const std::string& message) {
  throw base::Exception(base::ErrorKind::kBadData, message);
}

struct Architecture {
  int64_t expansion;  // of a block's output over its width: 4 has three convolutions
  std::array<size_t, kLayers> depth;  // blocks of each layer
};

const Architecture& architecture(const std::string& model) {
  static const Architecture kResNet18 = {1, {2, 2, 2, 2}};
  static const Architecture kResNet50 = {4, {3, 4, 6, 3}};
  if (model == "resnet18") return kResNet18;
  if (model == "resnet50") return kResNet50;
  invalid("there is no model " + model + ": resnet18, resnet50");
}

ConvNorm stem() {
  ConvNorm layer;
  layer.conv_name = "conv1";
  layer.norm_name = "bn1";
  layer.in = 3;
  layer.out = kStemWidth;
  layer.kernel = 7;
  layer.stride = 2;
  return layer;
}

int64_t head_inputs(const Architecture& shape) {
  return (kStemWidth << (kLayers - 1)) * shape.expansion;
}

// Block `index` of layer `layer`, from 0 on, without its tensors.
ResidualBlock residual_block(const Architecture& shape, int layer, size_t index) {
  const std::string name = "layer" + std::to_string(layer + 1) + "." + std::to_string(index) + ".";
  const int64_t width = kStemWidth << layer;
  const int64_t out = width * shape.expansion;
  const bool narrows = layer > 0 && index == 0;
  const int64_t in = index > 0 ? out : layer == 0 ? kStemWidth : out / 2;
  ResidualBlock block;
  const auto add = [&](int64_t from, int64_t to, int64_t kernel, int64_t stride) {
    const std::string number = std::to_string(block.layers.size() + 1);
    block.layers.push_back({.conv_name = name + "conv" + number,
                            .norm_name = name + "bn" + number,
                            .in = from,
                            .out = to,
                            .kernel = kernel,
                            .stride = stride});
  };
  const int64_t stride = narrows ? 2 : 1;
  if (shape.expansion == 1) {
    add(in, width, 3, stride);
    add(width, out, 3, 1);
  } else {
    add(in, width, 1, 1);
    add(width, width, 3, stride);
    add(width, out, 1, 1);
  }
  if (narrows || in != out) {
    block.downsample = ConvNorm{.conv_name = name + "downsample.0",
                                .norm_name = name + "downsample.1",
                                .in = in,
                                .out = out,
                                .kernel = 1,
                                .stride = stride};
  }
  return block;
}

// What lies between stem and head.
std::vector<ResidualBlock> residual_blocks(const Architecture& shape) {
  std::vector<ResidualBlock> blocks;
  for (int layer = 0; layer < kLayers; ++layer) {
    for (size_t i = 0; i < shape.depth[layer]; ++i)
      blocks.push_back(residual_block(shape, layer, i));
  }
  return blocks;
}

// The side of what a convolution or a pool makes of images of this side: all of them are padded by
// half their kernel.
int64_t side_after(int64_t stride, int64_t side) { return (side - 1) / stride + 1; }

// Of `layer`, for images of this side; moves `side` on.
double cost(const ConvNorm& layer, int64_t& side) {
  side = side_after(layer.stride, side);
  const auto elements = static_cast<double>(layer.out * side * side);
  return elements * (static_cast<double>(layer.in * layer.kernel * layer.kernel) + kElementCost);
}

double cost(const ResidualBlock& block, int64_t& side) {
  double sum = 0;
  int64_t around = side;
  if (block.downsample) sum += cost(*block.downsample, around);
  for (const ConvNorm& layer : block.layers) sum += cost(layer, side);
  return sum;
}

struct TensorSpec {
  std::string name;
  std::vector<int64_t> shape;
  at::ScalarType dtype = at::kFloat;
};

void append_specs(const ConvNorm& layer, std::vector<TensorSpec>& specs) {
  specs.push_back({layer.conv_name + ".weight", {layer.out, layer.in, layer.kernel, layer.kernel}});
  for (const char* name : {".weight", ".bias", ".running_mean", ".running_var"}) {
    specs.push_back({layer.norm_name + name, {layer.out}});
  }
  specs.push_back({layer.norm_name + ".num_batches_tracked", {}, at::kLong});
}

// The state_dict of torchvision's model.
std::vector<TensorSpec> state_specs(const std::string& model, int64_t classes) {
  const Architecture& shape = architecture(model);
  std::vector<TensorSpec> specs;
  append_specs(stem(), specs);
  for (const ResidualBlock& block : residual_blocks(shape)) {
    for (const ConvNorm& layer : block.layers) append_specs(layer, specs);
    if (block.downsample) append_specs(*block.downsample, specs);
  }
  specs.push_back({"fc.weight", {classes, head_inputs(shape)}});
  specs.push_back({"fc.bias", {classes}});
  return specs;
}

std::string in_words(at::IntArrayRef shape) {
  std::string text = "[";
  for (const int64_t size : shape) text += (text.size() > 1 ? ", " : "") + std::to_string(size);
  return text + "]";
}

// What `weights` have for `expected`; null for a missing num_batches_tracked, which files of old
// versions of PyTorch lack.
const at::Tensor* find_weight(const data::NamedTensors& weights, const TensorSpec& expected) {
  const auto it = weights.find(expected.name);
  if (it == weights.end()) {
    if (expected.name.ends_with(".num_batches_tracked")) return nullptr;
    bad_data("no " + expected.name + " among the weights");
  }
  const at::Tensor& weight = it->second;
  if (weight.scalar_type() != expected.dtype) {
    bad_data(expected.name + " is of " + c10::toString(weight.scalar_type()) + ", not of " +
             c10::toString(expected.dtype));
  }
  if (weight.sizes() != at::IntArrayRef(expected.shape)) {
    bad_data(expected.name + " has the shape " + in_words(weight.sizes()) + ", not " +
             in_words(expected.shape));
  }
  return &weight;
}

std::string joined(const std::vector<std::string>& names) {
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? "" : ", ") + name;
  return text;
}

// The number of the block that `name` of --split means.
size_t find_block(const std::string& model, const std::vector<std::string>& blocks,
                  const std::string& name) {
  if (name == "conv1") return 0;
  for (size_t i = blocks.size(); i-- > 0;) {  // so that a layer is its last block
    if (blocks[i] == name || blocks[i].substr(0, blocks[i].rfind('.')) == name) return i;
  }
  invalid("--split: " + model + " has no block " + name + ", but " + joined(blocks) +
          " (layer2 is the last block of that layer)");
}

std::vector<BlockRange> cut_after(const std::vector<size_t>& last_blocks, size_t blocks) {
  std::vector<BlockRange> stages;
  size_t first = 0;
  for (const size_t last : last_blocks) {
    stages.push_back({first, last + 1});
    first = last + 1;
  }
  stages.push_back({first, blocks});
  return stages;
}

std::vector<size_t> named_cuts(const std::string& model, const std::vector<std::string>& blocks,
                               size_t stages, const std::vector<std::string>& split) {
  if (split.size() != stages - 1) {
    const auto plural = [](size_t count) { return count == 1 ? "" : "s"; };
    const size_t named = split.size();
    invalid("--split names " + std::to_string(named) + " block" + plural(named) +
            " to cut after, but " + std::to_string(stages) + " stage" + plural(stages) +
            (stages == 1 ? " needs " : " need ") + std::to_string(stages - 1));
  }
  std::vector<size_t> cuts;
  for (const std::string& name : split) {
    const size_t block = find_block(model, blocks, name);
    if (!cuts.empty() && block <= cuts.back()) {
      invalid("--split: " + name + " does not come after " + split[cuts.size() - 1]);
    }
    if (block + 1 == blocks.size()) {
      invalid("--split: nothing comes after " + name + " for the last stage");
    }
    cuts.push_back(block);
  }
  return cuts;
}

// The last block of each stage but the last so that the most expensive stage is as cheap as can be.
std::vector<size_t> balanced_cuts(const std::vector<double>& costs, size_t stages) {
  const size_t blocks = costs.size();
  std::vector<double> sums = {0};
  for (const double cost : costs) sums.push_back(sums.back() + cost);
  // best[s][n]: the most expensive of s + 1 stages of the first n blocks; begin[s][n]: where its
  // last stage begins.
  constexpr double kNone = std::numeric_limits<double>::infinity();
  std::vector<std::vector<double>> best(stages, std::vector<double>(blocks + 1, kNone));
  std::vector<std::vector<size_t>> begin(stages, std::vector<size_t>(blocks + 1, 0));
  best[0] = sums;
  for (size_t s = 1; s < stages; ++s) {
    for (size_t n = s + 1; n <= blocks; ++n) {
      for (size_t at = s; at < n; ++at) {
        const double worst = std::max(best[s - 1][at], sums[n] - sums[at]);
        if (worst < best[s][n]) {
          best[s][n] = worst;
          begin[s][n] = at;
        }
      }
    }
  }
  std::vector<size_t> cuts(stages - 1);
  size_t end = blocks;
  for (size_t s = stages - 1; s > 0; --s) {
    end = begin[s][end];
    cuts[s - 1] = end - 1;
  }
  return cuts;
}

}  // namespace

std::vector<std::string> resnet_blocks(const std::string& model) {
  std::vector<std::string> blocks = {"stem"};
  for (const ResidualBlock& block : residual_blocks(architecture(model))) {
    const std::string& conv = block.layers[0].conv_name;
    blocks.push_back(conv.substr(0, conv.rfind('.')));
  }
  blocks.push_back("head");
  return blocks;
}

std::vector<double> resnet_costs(const std::string& model, int64_t classes, int64_t image_size) {
  const Architecture& shape = architecture(model);
  int64_t side = image_size;
  std::vector<double> costs = {cost(stem(), side)};
  side = side_after(2, side);  // max pool
  for (const ResidualBlock& block : residual_blocks(shape)) costs.push_back(cost(block, side));
  const auto inputs = static_cast<double>(head_inputs(shape));
  costs.push_back(inputs * (static_cast<double>(side * side) + static_cast<double>(classes)));
  return costs;
}

BlockRange whole_resnet(const std::string& model) { return {0, resnet_blocks(model).size()}; }

std::vector<BlockRange> cut_resnet(const std::string& model, int stages,
                                   const std::vector<std::string>& split, int64_t classes,
                                   int64_t image_size) {
  const std::vector<std::string> blocks = resnet_blocks(model);
  if (stages < 1) invalid("--stages must be at least 1, not " + std::to_string(stages));
  const auto count = static_cast<size_t>(stages);
  if (count > blocks.size()) {
    invalid("--stages " + std::to_string(stages) + " is more than the " +
            std::to_string(blocks.size()) + " blocks of " + model);
  }
  if (!split.empty()) return cut_after(named_cuts(model, blocks, count, split), blocks.size());
  if (stages == 2) return cut_after({find_block(model, blocks, "layer2")}, blocks.size());
  return cut_after(balanced_cuts(resnet_costs(model, classes, image_size), count), blocks.size());
}

void check_resnet_input(int64_t image_size, int64_t smallest_micro_batch) {
  int64_t side = image_size;
  for (int halving = 0; halving < 5; ++halving) side = side_after(2, side);
  if (side * side * smallest_micro_batch > 1) return;
  invalid("a micro-batch of one image of " + std::to_string(image_size) +
          " pixels leaves batch norm one value a channel: larger micro-batches (--micro-batches, "
          "--batch-size), or --image-size 33 and above");
}

data::NamedTensors read_weights(const std::string& path) {
  data::NamedTensors weights;
  const data::Safetensors file = data::Safetensors::read(path);
  for (const auto& [name, stored] : file.tensors()) weights[name] = data::to_tensor(stored);
  return weights;
}

data::NamedTensors weights_of(const std::string& model, const BlockRange& blocks,
                              const data::NamedTensors& weights) {
  const std::vector<std::string> names = resnet_blocks(model);
  data::NamedTensors own;
  for (size_t i = blocks.first; i < blocks.last; ++i) {
    std::vector<std::string> beginnings = {names[i] + "."};
    if (i == 0) beginnings = {"conv1.", "bn1."};
    if (i + 1 == names.size()) beginnings = {"fc."};
    for (const auto& [name, tensor] : weights) {
      const bool belongs = std::any_of(beginnings.begin(), beginnings.end(),
                                       [&](const auto& b) { return name.starts_with(b); });
      if (belongs) own[name] = tensor;
    }
  }
  return own;
}

void check_weights(const std::string& model, int64_t classes, const data::NamedTensors& weights) {
  data::NamedTensors left = weights;
  for (const TensorSpec& spec : state_specs(model, classes)) {
    const at::Tensor* const weight = find_weight(weights, spec);
    if (weight && !weight->isfinite().all().item<bool>()) {
      bad_data(spec.name + " has numbers that are not finite");
    }
    left.erase(spec.name);
  }
  if (!left.empty()) bad_data("there is " + left.begin()->first + ", which " + model + " has not");
}

at::Tensor ConvNorm::convolve(const at::Tensor& x) const {
  const int64_t padding = kernel / 2;
  const int64_t samples = x.size(0), height = x.size(2), width = x.size(3);
  // LibTorch has a 1x1 convolution of fewer than 16 images on one thread made by a kernel that
  // takes half as long again as oneDNN's. So halves, quarters, … of images are given as images: it
  // is the same memory, and pixels have nothing to do with each other.
  int64_t parts = 1;
  while (x.is_cpu() && kernel == 1 && stride == 1 && samples * parts < kImagesForOneDnn &&
         height % (2 * parts) == 0) {
    parts *= 2;
  }
  if (parts == 1) return at::conv2d(x, weight, {}, {stride, stride}, {padding, padding});
  const auto as_images = [&](const at::Tensor& t, int64_t count, int64_t rows) {
    return t.permute({0, 2, 3, 1}).reshape({count, rows, width, t.size(1)}).permute({0, 3, 1, 2});
  };
  const at::Tensor y = at::conv2d(as_images(x, samples * parts, height / parts), weight);
  return as_images(y, samples, height);
}

at::Tensor ConvNorm::forward(const at::Tensor& x, bool training) const {
  const at::Tensor y = convolve(x);
  if (training) {
    if (y.numel() == y.size(1)) {
      invalid("batch norm " + norm_name + " cannot train on one value a channel");
    }
    const at::NoGradGuard no_grad;
    at::Tensor(batches_tracked).add_(1);
  }
  return at::batch_norm(y, scale, shift, running_mean, running_var, training, 0.1, 1e-5, false);
}

at::Tensor ResidualBlock::forward(const at::Tensor& x, bool training) const {
  at::Tensor y = x;
  for (size_t i = 0; i + 1 < layers.size(); ++i) y = layers[i].forward(y, training).relu_();
  y = layers.back().forward(y, training);
  return y.add_(downsample ? downsample->forward(x, training) : x).relu_();
}

ResNetStage::ResNetStage(const std::string& model, int64_t classes, BlockRange blocks,
                         uint64_t seed, c10::Device device)
    : device_(device) {
  const Architecture& shape = architecture(model);
  std::vector<ResidualBlock> all = residual_blocks(shape);
  const size_t head = all.size() + 1;  // its number; the stem's is 0
  if (blocks.first >= blocks.last || blocks.last > head + 1) {
    invalid("no blocks " + std::to_string(blocks.first) + " to " + std::to_string(blocks.last) +
            " in " + model);
  }
  if (blocks.first == 0) add(stem_.emplace(stem()), seed);
  for (size_t i = std::max<size_t>(blocks.first, 1); i < std::min(blocks.last, head); ++i) {
    ResidualBlock& block = blocks_.emplace_back(std::move(all[i - 1]));
    for (ConvNorm& layer : block.layers) add(layer, seed);
    if (block.downsample) add(*block.downsample, seed);
  }
  if (blocks.last == head + 1) add_head(head_inputs(shape), classes, seed);
}

void ResNetStage::add(ConvNorm& layer, uint64_t seed) {
  // As torchvision: He et al.'s initialisation by the fan out, for layers before a ReLU.
  const std::string name = layer.conv_name + ".weight";
  const double fan_out = static_cast<double>(layer.out * layer.kernel * layer.kernel);
  const at::Tensor drawn =
      at::empty({layer.out, layer.in, layer.kernel, layer.kernel}, at::kFloat)
          .normal_(0, std::sqrt(2 / fan_out), keyed_generator({seed, data::content_hash(name)}));
  layer.weight = rpc::placed(drawn.contiguous(at::MemoryFormat::ChannelsLast), device_);
  layer.scale = at::ones({layer.out}, device_);
  layer.shift = at::zeros({layer.out}, device_);
  layer.running_mean = at::zeros({layer.out}, device_);
  layer.running_var = at::ones({layer.out}, device_);
  layer.batches_tracked = at::zeros({}, at::kLong);  // nothing but a count: it stays on the CPU
  add_parameter(name, layer.weight);
  add_parameter(layer.norm_name + ".weight", layer.scale);
  add_parameter(layer.norm_name + ".bias", layer.shift);
  add_buffer(layer.norm_name + ".running_mean", layer.running_mean);
  add_buffer(layer.norm_name + ".running_var", layer.running_var);
  add_buffer(layer.norm_name + ".num_batches_tracked", layer.batches_tracked);
}

void ResNetStage::add_head(int64_t in, int64_t classes, uint64_t seed) {
  const double bound = 1 / std::sqrt(static_cast<double>(in));  // as torch.nn.Linear
  const auto draw = [&](const std::string& name, std::vector<int64_t> shape) {
    at::Tensor parameter = at::empty(shape, at::kFloat);
    parameter.uniform_(-bound, bound, keyed_generator({seed, data::content_hash(name)}));
    parameter = rpc::placed(parameter, device_);
    add_parameter(name, parameter);
    return parameter;
  };
  fc_weight_ = draw("fc.weight", {classes, in});
  fc_bias_ = draw("fc.bias", {classes});
}

void ResNetStage::add_parameter(const std::string& name, const at::Tensor& parameter) {
  parameter_names_.push_back(name);
  parameters_.push_back(parameter.requires_grad_());
}

void ResNetStage::add_buffer(const std::string& name, const at::Tensor& buffer) {
  buffer_names_.push_back(name);
  buffers_.push_back(buffer);
}

at::Tensor ResNetStage::forward(const at::Tensor& x, bool training) const {
  at::Tensor y = rpc::placed(x, device_);
  if (stem_) {
    y = stem_->forward(y.contiguous(at::MemoryFormat::ChannelsLast), training).relu_();
    y = at::max_pool2d(y, {3, 3}, {2, 2}, {1, 1});
  } else {
    y = y.permute({0, 3, 1, 2});
  }
  for (const ResidualBlock& block : blocks_) y = block.forward(y, training);
  if (!fc_weight_.defined()) return y.permute({0, 2, 3, 1});
  return at::linear(at::adaptive_avg_pool2d(y, {1, 1}).flatten(1), fc_weight_, fc_bias_);
}

int64_t ResNetStage::parameter_count() const {
  int64_t count = 0;
  for (const at::Tensor& parameter : parameters_) count += parameter.numel();
  return count;
}

data::NamedTensors ResNetStage::named_parameters() const {
  data::NamedTensors named;
  for (size_t i = 0; i < parameters_.size(); ++i) named[parameter_names_[i]] = parameters_[i];
  return named;
}

data::NamedTensors ResNetStage::named_buffers() const {
  data::NamedTensors named;
  for (size_t i = 0; i < buffers_.size(); ++i) named[buffer_names_[i]] = buffers_[i];
  return named;
}

void ResNetStage::load(const data::NamedTensors& weights) {
  std::vector<std::pair<at::Tensor, const at::Tensor*>> copies;
  for (const data::NamedTensors& own : {named_parameters(), named_buffers()}) {
    for (const auto& [name, tensor] : own) {
      const TensorSpec spec = {name, tensor.sizes().vec(), tensor.scalar_type()};
      copies.emplace_back(tensor, find_weight(weights, spec));
    }
  }
  const at::NoGradGuard no_grad;
  for (auto& [tensor, weight] : copies) {
    if (weight) tensor.copy_(*weight);
  }
}

}  // namespace distrain::models
