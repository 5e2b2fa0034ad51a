// A net in two halves, each on a server of its own. The trainers have none of it: they send batches
// through both, each at its own pace, so that both are at work at a time, and the gradients back.
//
//   ./split_model --trainers 3 --epochs 20 | jq -c 'select(.event=="eval")'
//   ./split_model --steps 50 --trace t.json        # who does what when: ui.perfetto.dev
#include <cmath>
#include <numbers>
#include <vector>

#include <ATen/Functions.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/linear.h>

#include <distrain/app/main.h>
#include <distrain/base/random.h>
#include <distrain/job/training.h>
#include <distrain/nn/module.h>

using namespace distrain;

struct Options : job::TrainerOptions {
  int64_t width = 64, batches_per_epoch = 100;
  double dropout = 0.1;
  Options() {
    optimizer = "adam";
    epochs = 10;
  }
  static void describe(job::OptionList<Options>& list) {
    list.integer("width", &Options::width, "numbers between the halves").range(1, 65536);
    list.real("dropout", &Options::dropout, "share of them that is dropped").below(0, 1);
    list.integer("batches-per-epoch", &Options::batches_per_epoch, "of each trainer").range(1, 1e9);
  }
};

// Points on two spirals that wind around each other, and on which of them each is.
struct Points {
  at::Tensor places, spirals;  // float [n, 2] and int64 [n]

  Points(base::Random random, int64_t count) {
    std::vector<float> coordinates;
    std::vector<int64_t> which;
    for (int64_t i = 0; i < count; ++i) {
      which.push_back(random.between(0, 1));
      const double radius = std::sqrt(random.unit());
      const double angle = std::numbers::pi * (3 * radius + static_cast<double>(which.back()));
      for (const double place : {radius * std::cos(angle), radius * std::sin(angle)}) {
        coordinates.push_back(static_cast<float>(place + 0.1 * (random.unit() - 0.5)));
      }
    }
    places = at::tensor(coordinates).view({-1, 2});
    spirals = at::tensor(which);
  }
};

torch::nn::Sequential make_front(int64_t width, double dropout, uint64_t seed) {
  torch::manual_seed(seed);
  return torch::nn::Sequential(torch::nn::Linear(2, width), torch::nn::Tanh(),
                               torch::nn::Linear(width, width), torch::nn::Tanh(),
                               torch::nn::Dropout(dropout));
}

torch::nn::Sequential make_back(int64_t width, uint64_t seed) {
  torch::manual_seed(seed + 1);
  return torch::nn::Sequential(torch::nn::Linear(width, width), torch::nn::Tanh(),
                               torch::nn::Linear(width, 2));
}

void train(job::Rank& rank, const Options& options) {
  rpc::Agent& agent = rank.agent();
  nn::RemoteModule front(agent, "front", "front", options.width, options.dropout, options.seed);
  const nn::RemoteModule back(agent, "back", "back", options.width, options.seed);
  std::vector<rpc::RRef<at::Tensor>> parameters = front.remote_parameters();
  for (const auto& parameter : back.remote_parameters()) parameters.push_back(parameter);
  optim::DistributedOptimizer optimizer(agent, parameters, {}, options.rule(),
                                        options.sharing(rank.index()));

  job::Training training(rank, options, options.batches_per_epoch);
  training.keep("front", front);
  training.keep("back", back);
  training.keep(optimizer);
  training.evaluate_epochs([&](const job::Share& share) {
    const Points points(base::Random({options.seed, 0}), 2000);
    const auto mine = [&](const at::Tensor& all) {
      return all.slice(0, share.first(all.size(0)), share.end(all.size(0)));
    };
    nn::RemoteModule whole = front;
    whole.eval();  // drops nothing
    return job::Evaluation::of(back.forward(whole.forward(mine(points.places))),
                               mine(points.spirals));
  });
  training.run([&](const job::Step& step) {
    // Points and what is dropped follow from the step, so a resumed job goes on with the same.
    base::Random random({options.seed, 1, static_cast<uint64_t>(step.epoch),
                         static_cast<uint64_t>(step.shard), static_cast<uint64_t>(step.number)});
    front.seed(random.next());
    const Points points(random, options.batch_size);
    autograd::Context context(agent);
    const at::Tensor scores = back.forward(front.forward(points.places));
    const at::Tensor loss = at::cross_entropy_loss(scores, points.spirals);
    autograd::backward(context, {loss});
    optimizer.step(context);
    return job::Result{loss, options.batch_size};
  });
}

int main(int argc, char** argv) {
  return app::main(
      argc, argv,
      {job::define<Options>("split_model", "a net in two halves, on a server each")
           .example("split_model --trainers 3 --epochs 20", "Three trainers, each at its own pace")
           .role("front", 1)
           .role("back", 1)
           .role("trainer", &Options::trainers, train)
           .expose([](rpc::Agent& agent) {
             nn::expose_module(agent, "front", make_front);
             nn::expose_module(agent, "back", make_back);
           })});
}
