#include <ATen/Functions.h>
#include <torch/csrc/autograd/grad_mode.h>
#include <torch/nn/modules/rnn.h>

#include "distrain/store/named_tensors.h"
#include "scenario/rnn/lstm.h"
#include "support/catch.h"

using namespace distrain;
using nn::Dropout;
using rpc::NamedTensors;
using scenario::Lstm;
using scenario::LstmState;
using store::named_tensors;

namespace {

constexpr int64_t kInput = 5, kHidden = 7, kLayers = 2, kLength = 6, kColumns = 3;

torch::nn::LSTM torch_lstm(const Lstm& lstm) {
  torch::nn::LSTM other(torch::nn::LSTMOptions(kInput, kHidden).num_layers(kLayers));
  const at::NoGradGuard no_grad;
  const NamedTensors named = named_tensors("rnn", *lstm);
  REQUIRE(named.size() == other->named_parameters().size());
  for (const auto& item : other->named_parameters()) {
    CAPTURE(item.key());
    const at::Tensor& mine = named.at("rnn." + item.key());
    REQUIRE(mine.sizes() == item.value().sizes());
    CHECK(mine.requires_grad());
    item.value().copy_(mine);
  }
  return other;
}

}  // namespace

TEST_CASE("without dropout the LSTM has torch's output, state and gradients") {
  Lstm lstm(kInput, kHidden, kLayers, GENERATE(0.0, 0.5), 11);
  torch::nn::LSTM other = torch_lstm(lstm);
  const at::Tensor x = at::rand({kLength, kColumns, kInput}).requires_grad_();
  const at::Tensor x2 = x.detach().clone().requires_grad_();
  LstmState state{at::rand({kLayers, kColumns, kHidden}), at::rand({kLayers, kColumns, kHidden})};
  Dropout none;
  const auto [expected, carried] = other->forward(x2, std::tuple(state.hidden, state.cell));
  const at::Tensor output = lstm->forward(x, state, none);
  CHECK(at::allclose(output, expected));
  CHECK(at::allclose(state.hidden, std::get<0>(carried)));
  CHECK(at::allclose(state.cell, std::get<1>(carried)));
  CHECK_FALSE(state.hidden.requires_grad());  // the state is detached from the previous batch
  CHECK_FALSE(state.cell.requires_grad());

  const at::Tensor weight = at::rand_like(output);
  (output * weight).sum().backward();
  (expected * weight).sum().backward();
  CHECK(at::allclose(x.grad(), x2.grad()));
  const NamedTensors named = named_tensors("rnn", *lstm);
  for (const auto& item : other->named_parameters()) {
    CAPTURE(item.key());
    CHECK(at::allclose(named.at("rnn." + item.key()).grad(), item.value().grad(), 1e-5, 1e-6));
  }
}

TEST_CASE("two batches with a carried state give the same result as one long batch") {
  Lstm lstm(kInput, kHidden, kLayers, 0.5, 11);
  const at::Tensor x = at::rand({2 * kLength, kColumns, kInput});
  Dropout none;
  LstmState whole = lstm->zero_state(kColumns), halves = lstm->zero_state(kColumns);
  const at::Tensor expected = lstm->forward(x, whole, none);
  const at::Tensor first = lstm->forward(x.narrow(0, 0, kLength), halves, none);
  const at::Tensor second = lstm->forward(x.narrow(0, kLength, kLength), halves, none);
  CHECK(at::allclose(at::cat({first, second}), expected));
  CHECK(at::allclose(halves.hidden, whole.hidden));
  CHECK(at::allclose(halves.cell, whole.cell));
}

TEST_CASE("dropout is between the layers and depends on its key") {
  Lstm lstm(kInput, kHidden, kLayers, 0.5, 11);
  const at::Tensor x = at::rand({kLength, kColumns, kInput});
  const auto output = [&](Dropout dropout) {
    LstmState state = lstm->zero_state(kColumns);
    return lstm->forward(x, state, dropout);
  };
  CHECK(at::equal(output(Dropout({1})), output(Dropout({1}))));
  CHECK_FALSE(at::equal(output(Dropout({1})), output(Dropout({2}))));
  CHECK_FALSE(at::equal(output(Dropout({1})), output(Dropout())));
}

TEST_CASE("the LSTM's weights are uniform within 1 / sqrt(hidden) and depend on the seed") {
  const Lstm lstm(kInput, 64, kLayers, 0.0, 11), same(kInput, 64, kLayers, 0.0, 11),
      other(kInput, 64, kLayers, 0.0, 12);
  for (const auto& [name, weight] : named_tensors("rnn", *lstm)) {
    CAPTURE(name);
    const double largest = weight.abs().max().item<double>();
    CHECK(largest <= 0.125);
    CHECK(largest > 0.1);
    CHECK(at::equal(weight, named_tensors("rnn", *same).at(name)));
    CHECK_FALSE(at::equal(weight, named_tensors("rnn", *other).at(name)));
  }
}
