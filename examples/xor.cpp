// The smallest job: a net on a server, trained by any number of trainers.
//
//   ./xor --trainers 3 --epochs 5 --lr 0.3 | jq -c 'select(.event=="end").loss'
#include <distrain/distrain.h>

using namespace distrain;

struct Options : job::TrainerOptions {  // --trainers, --epochs, --lr, --checkpoint, ...
  int64_t hidden = 32;
  static void describe(job::OptionList<Options>& list) {
    list.integer("hidden", &Options::hidden, "hidden units").range(1, 4096);
  }
};

torch::nn::Sequential make_net(int64_t hidden, uint64_t seed) {
  torch::manual_seed(seed);
  return torch::nn::Sequential(torch::nn::Linear(2, hidden), torch::nn::Tanh(),
                               torch::nn::Linear(hidden, 2));
}

void train(job::Rank& rank, const Options& options) {  // runs on each trainer
  nn::RemoteModule net(rank.agent(), "server", "net", options.hidden, options.seed);
  optim::DistributedOptimizer optimizer(rank.agent(), net.remote_parameters(), {}, options.rule(),
                                        options.sharing(rank.index()));
  job::Training training(rank, options, 200);  // steps in an epoch
  training.keep("net", net);                   // part of a checkpoint
  training.keep(optimizer);
  torch::manual_seed(options.seed + static_cast<uint64_t>(rank.number()));
  training.run([&](const job::Step&) {
    const at::Tensor points = at::randn({options.batch_size, 2});
    const at::Tensor labels = (points.prod(1) > 0).to(at::kLong);  // same sign?
    autograd::Context context(rank.agent());
    const at::Tensor loss = at::cross_entropy_loss(net.forward(points), labels);
    autograd::backward(context, {loss});  // gradients flow to the server
    optimizer.step(context);
    return job::Result{loss, options.batch_size};
  });
}

int main(int argc, char** argv) {
  return app::main(
      argc, argv,
      {job::define<Options>("xor", "a net on a server learns whether two signs are equal")
           .role("server", 1)
           .role("trainer", &Options::trainers, train)
           .expose([](rpc::Agent& agent) { nn::expose_module(agent, "net", make_net); })});
}
