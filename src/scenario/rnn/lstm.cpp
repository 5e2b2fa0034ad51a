#include "lstm.h"

#include <cmath>

#include <c10/util/Exception.h>

#include "distrain/nn/sized_by.h"

namespace distrain::scenario {

namespace {

constexpr double kInitialRange = 0.1;
enum : uint64_t { kEncoderSeed = 1, kDecoderSeed = 2, kLstmSeed = 3 };

/// Suppresses cuDNN's warning that it copies LSTM weights which are not in one block of memory.
/// Here the weights never are in one block, because each weight is a parameter of its own.
class NoWordOfCopies final : public c10::WarningHandler {
 public:
  void process(const c10::Warning& warning) override {
    if (warning.msg().find("RNN module weights are not part of") == std::string::npos) {
      next_.process(warning);
    }
  }

 private:
  c10::WarningHandler& next_ = *c10::WarningUtils::get_warning_handler();
};

at::Tensor initial_weight(at::IntArrayRef sizes, std::initializer_list<uint64_t> key,
                          c10::Device device) {
  return nn::sized_by("--vocab-size, --embedding-dim or --nhid", [&] {
    return nn::uniform(sizes, kInitialRange, nn::keyed_generator(key), device);
  });
}

}  // namespace

WordEmbedding::WordEmbedding(int64_t words, int64_t size, uint64_t seed, c10::Device device)
    : weight_(initial_weight({words, size}, {seed, kEncoderSeed}, device).requires_grad_()) {}

Decoder::Decoder(int64_t words, int64_t hidden, uint64_t seed, c10::Device device)
    : parameters_{initial_weight({words, hidden}, {seed, kDecoderSeed}, device).requires_grad_(),
                  rpc::to_device(at::zeros({words}, at::kFloat), device).requires_grad_()} {}

LstmImpl::LstmImpl(int64_t input, int64_t hidden, int64_t layers, double dropout, uint64_t seed,
                   c10::Device device)
    : hidden_(hidden), layers_(layers), dropout_(dropout) {
  at::Generator generator = nn::keyed_generator({seed, kLstmSeed});
  const double range = 1.0 / std::sqrt(static_cast<double>(hidden));
  const auto add = [&](const std::string& name, at::IntArrayRef shape) {
    weights_.push_back(register_parameter(name, nn::uniform(shape, range, generator, device)));
  };
  for (int64_t layer = 0; layer < layers; ++layer) {
    const std::string suffix = "_l" + std::to_string(layer);
    add("weight_ih" + suffix, {4 * hidden, layer == 0 ? input : hidden});
    add("weight_hh" + suffix, {4 * hidden, hidden});
    add("bias_ih" + suffix, {4 * hidden});
    add("bias_hh" + suffix, {4 * hidden});
  }
}

at::Tensor LstmImpl::forward(at::Tensor x, LstmState& state, nn::Dropout& dropout) {
  // `train` makes cuDNN save data for the backward pass. It also enables dropout, which is 0 here.
  const bool train = rpc::is_accelerator(x.device()) && at::GradMode::is_enabled();
  NoWordOfCopies quiet;
  std::optional<c10::WarningUtils::WarningHandlerGuard> guard;
  if (rpc::is_accelerator(x.device())) guard.emplace(&quiet);
  std::vector<at::Tensor> hidden, cell;
  for (int64_t layer = 0; layer < layers_; ++layer) {
    if (layer > 0) x = dropout(x, dropout_);
    const auto first = weights_.begin() + 4 * layer;
    auto [output, h, c] =
        at::lstm(x, {state.hidden.narrow(0, layer, 1), state.cell.narrow(0, layer, 1)},
                 std::vector<at::Tensor>(first, first + 4), /*has_biases=*/true, /*num_layers=*/1,
                 /*dropout=*/0.0, train, /*bidirectional=*/false, /*batch_first=*/false);
    x = std::move(output);
    hidden.push_back(std::move(h));
    cell.push_back(std::move(c));
  }
  // Detach, so that gradients do not flow back into the previous batch.
  state = {at::cat(hidden).detach(), at::cat(cell).detach()};
  return x;
}

}  // namespace distrain::scenario
