#include "resnet.h"

#include <algorithm>
#include <array>
#include <cmath>

#include <ATen/Functions.h>
#include <c10/util/StringUtil.h>
#include <torch/csrc/autograd/grad_mode.h>

#include "distrain/base/error.h"
#include "distrain/nn/pipeline.h"
#include "distrain/nn/random.h"
#include "distrain/rpc/to_device.h"
#include "distrain/store/hash.h"

namespace distrain::scenario {

namespace {

constexpr int kLayers = 4;
// Cost of batch norm, addition and ReLU together, per element on a CPU, in multiply-adds.
constexpr double kElementCost = 60;
constexpr int64_t kImagesForOneDnn = 16;

using base::bad_data;
using base::invalid;

struct Architecture {
  int64_t expansion;  // output channels / width of a block: 1 (two convolutions) or 4 (three)
  std::array<size_t, kLayers> depth;  // number of blocks in each layer
  int64_t stem_width = 64;            // output channels of the stem
};

const Architecture& architecture(const std::string& model) {
  static const Architecture kResNet18 = {1, {2, 2, 2, 2}};
  static const Architecture kResNet50 = {4, {3, 4, 6, 3}};
  static const Architecture kNarrowResNet18 = {1, {2, 2, 2, 2}, 8};
  if (model == "resnet18") return kResNet18;
  if (model == "resnet50") return kResNet50;
  if (model == "narrow_resnet18") return kNarrowResNet18;
  invalid("there is no model " + model + ": resnet18, resnet50");
}

ConvNorm stem(const Architecture& shape) { return {"conv1", "bn1", 3, shape.stem_width, 7, 2}; }

int64_t head_inputs(const Architecture& shape) {
  return (shape.stem_width << (kLayers - 1)) * shape.expansion;
}

// Returns the blocks between stem and head: only names and sizes, without tensors.
std::vector<ResidualBlock> residual_blocks(const Architecture& shape) {
  std::vector<ResidualBlock> blocks;
  int64_t in = shape.stem_width;
  for (int layer = 0; layer < kLayers; ++layer) {
    const int64_t width = shape.stem_width << layer, out = width * shape.expansion;
    for (size_t i = 0; i < shape.depth[layer]; ++i) {
      const std::string name = c10::str("layer", layer + 1, ".", i, ".");
      const int64_t stride = layer > 0 && i == 0 ? 2 : 1;
      ResidualBlock& block = blocks.emplace_back();
      const auto add = [&](int64_t from, int64_t to, int64_t kernel, int64_t step) {
        const size_t number = block.layers.size() + 1;
        block.layers.push_back(
            {c10::str(name, "conv", number), c10::str(name, "bn", number), from, to, kernel, step});
      };
      if (shape.expansion == 1) {
        add(in, width, 3, stride);
        add(width, out, 3, 1);
      } else {
        add(in, width, 1, 1);
        add(width, width, 3, stride);
        add(width, out, 1, 1);
      }
      if (stride > 1 || in != out) {
        block.downsample =
            ConvNorm{name + "downsample.0", name + "downsample.1", in, out, 1, stride};
      }
      in = out;
    }
  }
  return blocks;
}

// Returns the side of the output of a convolution or pool that is padded by half its kernel.
int64_t side_after(int64_t stride, int64_t side) { return (side - 1) / stride + 1; }

// Returns the cost of `layer` for an image of side `side`, and sets `side` to the output's side.
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

// Returns the tensor `name` of `weights`, or null if num_batches_tracked is missing, as in old
// files. Throws `bad_data` if another tensor is missing, or if dtype or shape is not `expected`'s.
const at::Tensor* find_weight(const rpc::NamedTensors& weights, const std::string& name,
                              const at::Tensor& expected) {
  const auto it = weights.find(name);
  if (it == weights.end()) {
    if (name.ends_with(".num_batches_tracked")) return nullptr;
    bad_data("no " + name + " among the weights");
  }
  const at::Tensor& weight = it->second;
  if (weight.scalar_type() != expected.scalar_type()) {
    bad_data(c10::str(name, " is of ", weight.scalar_type(), ", not of ", expected.scalar_type()));
  }
  if (weight.sizes() != expected.sizes()) {
    bad_data(c10::str(name, " has the shape ", weight.sizes(), ", not ", expected.sizes()));
  }
  return &weight;
}

// Returns the index of the block that `name` in --split refers to.
size_t find_block(const std::string& model, const std::vector<std::string>& blocks,
                  const std::string& name) {
  if (name == "conv1") return 0;
  for (size_t i = blocks.size(); i-- > 0;) {  // backwards: a layer's name means its last block
    if (blocks[i] == name || blocks[i].substr(0, blocks[i].rfind('.')) == name) return i;
  }
  invalid(c10::str("--split: ", model, " has no block ", name, ", but ", c10::Join(", ", blocks),
                   " (layer2 is the last block of that layer)"));
}

// Returns a tensor to fill with random numbers: on kMeta if `device` is kMeta, else on the CPU.
at::Tensor empty(at::IntArrayRef sizes, c10::Device device) {
  return at::empty(sizes,
                   at::TensorOptions(at::kFloat).device(device.is_meta() ? device : at::kCPU));
}

at::Generator generator(uint64_t seed, const std::string& name) {
  return nn::keyed_generator({seed, store::content_hash(name)});
}

// Returns the index of each stage's first block, except for the first stage.
std::vector<size_t> named_cuts(const std::string& model, const std::vector<std::string>& blocks,
                               size_t stages, const std::vector<std::string>& split) {
  if (split.size() != stages - 1) {
    invalid(c10::str("--split names ", split.size(), split.size() == 1 ? " block" : " blocks",
                     " to cut after, but ", stages, stages == 1 ? " stage needs " : " stages need ",
                     stages - 1));
  }
  std::vector<size_t> cuts;
  for (const std::string& name : split) {
    const size_t next = find_block(model, blocks, name) + 1;
    if (!cuts.empty() && next <= cuts.back()) {
      invalid("--split: " + name + " does not come after " + split[cuts.size() - 1]);
    }
    if (next == blocks.size()) {
      invalid("--split: nothing comes after " + name + " for the last stage");
    }
    cuts.push_back(next);
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
  std::vector<double> costs = {cost(stem(shape), side)};
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
  if (stages < 1) invalid(c10::str("--stages must be at least 1, not ", stages));
  const auto count = static_cast<size_t>(stages);
  if (count > blocks.size()) {
    invalid(
        c10::str("--stages ", stages, " is more than the ", blocks.size(), " blocks of ", model));
  }
  const bool as_tutorial = split.empty() && stages == 2;
  const auto names = as_tutorial ? std::vector<std::string>{"layer2"} : split;
  std::vector<size_t> cuts =
      names.empty() ? nn::balanced_cuts(resnet_costs(model, classes, image_size), count)
                    : named_cuts(model, blocks, count, names);
  cuts.push_back(blocks.size());
  std::vector<BlockRange> ranges;
  for (const size_t end : cuts) ranges.push_back({ranges.empty() ? 0 : ranges.back().last, end});
  return ranges;
}

void check_resnet_input(int64_t image_size, int64_t smallest_micro_batch) {
  const int64_t side = side_after(32, image_size);
  if (side * side * smallest_micro_batch > 1) return;
  invalid("batch norm cannot train on micro-batches of one image of " + std::to_string(image_size) +
          " pixels: give fewer --micro-batches, a larger --batch-size, or --image-size 33 or more");
}

rpc::NamedTensors weights_of(const std::string& model, const BlockRange& blocks,
                             const rpc::NamedTensors& weights) {
  rpc::NamedTensors own;
  for (const auto& [name, tensor] : ResNetStage(model, 1, blocks, 0, c10::kMeta).state()) {
    if (const auto it = weights.find(name); it != weights.end()) own.insert(*it);
  }
  return own;
}

void check_weights(const std::string& model, int64_t classes, const rpc::NamedTensors& weights) {
  const rpc::NamedTensors expected =
      ResNetStage(model, classes, whole_resnet(model), 0, c10::kMeta).state();
  for (const auto& [name, tensor] : expected) {
    const at::Tensor* const weight = find_weight(weights, name, tensor);
    if (weight && !weight->isfinite().all().item<bool>()) {
      bad_data(name + " has numbers that are not finite");
    }
  }
  for (const auto& [name, _] : weights) {
    if (!expected.contains(name)) bad_data("there is " + name + ", which " + model + " has not");
  }
}

at::Tensor ConvNorm::convolve(const at::Tensor& x) const {
  const int64_t padding = kernel / 2;
  const int64_t samples = x.size(0), height = x.size(2), width = x.size(3);
  // For a 1x1 convolution of fewer than 16 images on one thread LibTorch uses a kernel that takes
  // 1.5 times as long as oneDNN's. To get oneDNN's, pass halves, quarters, … of images as images of
  // their own, without a copy. This is correct because a 1x1 convolution treats pixels separately.
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

ResNetStage::ResNetStage(const std::string& model, int64_t classes, BlockRange blocks,
                         uint64_t seed, c10::Device device)
    : device_(device) {
  const Architecture& shape = architecture(model);
  std::vector<ResidualBlock> all = residual_blocks(shape);
  const size_t head = all.size() + 1;  // index of the head; the stem's is 0
  if (blocks.first >= blocks.last || blocks.last > head + 1) {
    invalid(c10::str("no blocks ", blocks.first, " to ", blocks.last, " in ", model));
  }
  if (blocks.first == 0) add(stem_.emplace(stem(shape)), seed);
  for (size_t i = std::max<size_t>(blocks.first, 1); i < std::min(blocks.last, head); ++i) {
    ResidualBlock& block = blocks_.emplace_back(std::move(all[i - 1]));
    for (ConvNorm& layer : block.layers) add(layer, seed);
    if (block.downsample) add(*block.downsample, seed);
  }
  if (blocks.last != head + 1) return;
  const int64_t inputs = head_inputs(shape);
  const double bound = 1 / std::sqrt(static_cast<double>(inputs));  // as torch.nn.Linear
  const auto draw = [&](const std::string& name, at::IntArrayRef sizes) {
    const at::Tensor drawn = empty(sizes, device_).uniform_(-bound, bound, generator(seed, name));
    return parameters_.emplace_back(name, rpc::to_device(drawn, device_).requires_grad_()).second;
  };
  fc_weight_ = draw("fc.weight", {classes, inputs});
  fc_bias_ = draw("fc.bias", {classes});
}

void ResNetStage::add(ConvNorm& layer, uint64_t seed) {
  // Initialize as torchvision: He initialization by fan-out, for layers followed by a ReLU.
  const std::string weight = layer.conv_name + ".weight", norm = layer.norm_name + '.';
  const double fan_out = static_cast<double>(layer.out * layer.kernel * layer.kernel);
  const at::Tensor drawn = empty({layer.out, layer.in, layer.kernel, layer.kernel}, device_)
                               .normal_(0, std::sqrt(2 / fan_out), generator(seed, weight));
  layer.weight = rpc::to_device(drawn.contiguous(at::MemoryFormat::ChannelsLast), device_);
  layer.scale = at::ones({layer.out}, device_);
  layer.shift = at::zeros({layer.out}, device_);
  layer.running_mean = at::zeros({layer.out}, device_);
  layer.running_var = at::ones({layer.out}, device_);
  layer.batches_tracked = at::zeros({}, at::kLong);  // only a count, so it stays on the CPU
  parameters_.insert(parameters_.end(), {{weight, layer.weight.requires_grad_()},
                                         {norm + "weight", layer.scale.requires_grad_()},
                                         {norm + "bias", layer.shift.requires_grad_()}});
  buffers_.insert(buffers_.end(), {{norm + "running_mean", layer.running_mean},
                                   {norm + "running_var", layer.running_var},
                                   {norm + "num_batches_tracked", layer.batches_tracked}});
}

at::Tensor ResNetStage::forward(const at::Tensor& x, bool training) const {
  at::Tensor y = rpc::to_device(x, device_);
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

void ResNetStage::load(const rpc::NamedTensors& weights) {
  std::vector<std::pair<at::Tensor, const at::Tensor*>> copies;
  for (const auto& [name, tensor] : state()) {
    copies.emplace_back(tensor, find_weight(weights, name, tensor));
  }
  const at::NoGradGuard no_grad;
  for (auto& [tensor, weight] : copies) {
    if (weight) tensor.copy_(*weight);
  }
}

}  // namespace distrain::scenario
