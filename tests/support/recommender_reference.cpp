// Trains the model of examples/recommender.cpp in one process with torch alone, for
// tests/cli/examples.sh. `recommender_reference CLICKS BATCH EPOCHS LR` prints the accuracy on the
// last fifth.
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <vector>

#include <ATen/Functions.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adam.h>

int main(int argc, char** argv) {
  if (argc != 5) return 2;
  std::ifstream file(argv[1]);
  const std::vector<int64_t> numbers(std::istream_iterator<int64_t>(file), {});
  const at::Tensor lines = at::tensor(numbers).view({-1, 3});
  const at::Tensor training = lines.slice(0, 0, lines.size(0) * 4 / 5);
  const at::Tensor held_out = lines.slice(0, lines.size(0) * 4 / 5);

  torch::manual_seed(1);
  torch::nn::Embedding table(400, 8);
  torch::nn::Sequential net(torch::nn::Linear(16, 32), torch::nn::ReLU(), torch::nn::Linear(32, 2));
  std::vector<at::Tensor> parameters = net->parameters();
  parameters.push_back(table->weight);
  torch::optim::Adam adam(parameters, std::atof(argv[4]));
  const auto forward = [&](const at::Tensor& of) {
    return net->forward(table->forward(of.slice(1, 1)).flatten(1));
  };
  for (int epoch = 0; epoch < std::atoi(argv[3]); ++epoch) {
    const at::Tensor order = at::randperm(training.size(0));
    for (const at::Tensor& which : order.split(std::atoi(argv[2]))) {
      const at::Tensor batch = training.index({which});
      adam.zero_grad();
      at::cross_entropy_loss(forward(batch), batch.select(1, 0)).backward();
      adam.step();
    }
  }
  const at::Tensor right = forward(held_out).argmax(1).eq(held_out.select(1, 0));
  std::printf("%.4f\n", right.to(at::kDouble).mean().item<double>());
  return 0;
}
