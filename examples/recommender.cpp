// Predicts clicks: each user and each item has a row in a table on a server. Each trainer
// has a replica of the net that judges two rows; DDP keeps the replicas equal.
//
//   ./recommender --trainers 3 | jq -c 'select(.event=="eval")'
//   for rank in 0 1 2 3; do ./recommender --trainers 3 --rank $rank & done; wait
#include <filesystem>
#include <fstream>
#include <iterator>

#include <ATen/Functions.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>

#include <distrain/app/main.h>
#include <distrain/base/random.h>
#include <distrain/data/batches.h>
#include <distrain/job/training.h>
#include <distrain/nn/module.h>

using namespace distrain;

struct Options : job::TrainerOptions {
  std::string data = "clicks.txt";
  int64_t rows = 400, dim = 8;
  Options() {
    optimizer = "adam";
    mode = "sync";
    epochs = 10;
  }
  static void describe(job::OptionList<Options>& list) {
    list.text("data", &Options::data, "FILE",
              "train on FILE: 1 (a click) or 0, a user and an item in each line; FILE is made if "
              "missing");
    list.integer("rows", &Options::rows, "make clicks of N users and items").range(2, 1 << 24);
    list.integer("dim", &Options::dim, "use N numbers per row").range(1, 4096);
  }
};

// Makes clicks of users on items of the same parity, and 5 % noise. Any trainer may make the file.
void make_clicks(const Options& options, const std::string& own) {
  std::ofstream file(options.data + own);
  base::Random random({options.seed});
  const int64_t users = options.rows / 2;
  for (int i = 0; i < 10000; ++i) {
    const int64_t user = random.between(0, users - 1), item = random.between(0, users - 1);
    const bool clicks = (user % 2 == item % 2) == (random.below(20) > 0);
    file << clicks << ' ' << user << ' ' << users + item << '\n';
  }
  file.close();
  if (file) std::filesystem::rename(options.data + own, options.data);  // atomically
}

struct Clicks {
  at::Tensor ids, labels;  // int64 [n, 2] and [n]

  explicit Clicks(const Options& options) {
    std::ifstream file(options.data);
    const std::vector<int64_t> numbers(std::istream_iterator<int64_t>(file), {});
    if (numbers.empty() || numbers.size() % 3 != 0 || !file.eof()) {
      throw base::Exception(base::ErrorKind::kBadData, options.data + ": no lines of 3 numbers");
    }
    const at::Tensor lines = at::tensor(numbers).view({-1, 3});
    ids = lines.slice(1, 1), labels = lines.select(1, 0);
  }
  int64_t training() const { return labels.numel() * 4 / 5; }  // the rest is held out
};

torch::nn::Embedding make_table(int64_t rows, int64_t dim, uint64_t seed) {
  torch::manual_seed(seed);
  return torch::nn::Embedding(torch::nn::EmbeddingOptions(rows, dim).sparse(true));
}

torch::nn::Sequential make_net(int64_t dim, uint64_t seed) {
  torch::manual_seed(seed);
  return torch::nn::Sequential(torch::nn::Linear(2 * dim, 32), torch::nn::ReLU(),
                               torch::nn::Linear(32, 2));
}

void train(job::Rank& rank, const Options& options) {
  if (!std::filesystem::exists(options.data)) make_clicks(options, "." + rank.name());
  const Clicks clicks(options);
  nn::RemoteModule table(rank.agent(), "server", "table", options.rows, options.dim, options.seed);
  ddp::DistributedDataParallel net(make_net(options.dim, options.seed), rank.group("trainer"));
  optim::DistributedOptimizer optimizer(rank.agent(), table.remote_parameters(), net.parameters(),
                                        options.rule(), options.sharing(rank.index()));

  data::Sampler sampler(options.seed, options.trainers, clicks.training(), options.batch_size);
  job::Training training(rank, options, sampler.steps_per_epoch());
  training.agree("clicks", clicks.labels.numel());
  training.keep("table", table);
  training.keep("net", net);
  training.keep(optimizer);
  training.evaluate_epochs([&](const job::Share& share) {
    const int64_t first = clicks.training(), held_out = clicks.labels.numel() - first;
    const at::Tensor mine = at::arange(first + share.first(held_out), first + share.end(held_out));
    const at::Tensor rows = table.forward(clicks.ids.index({mine}));
    return job::Evaluation::of(net.module()->forward(rows.flatten(1)), clicks.labels.index({mine}));
  });
  training.run([&](const job::Step& step) {
    const at::Tensor batch = at::tensor(sampler.batch(step.epoch, step.shard, step.number));
    autograd::Context context(rank.agent());
    const at::Tensor rows = table.forward(clicks.ids.index({batch}));
    const at::Tensor scores = net.forward(rows.flatten(1));
    const at::Tensor loss = at::cross_entropy_loss(scores, clicks.labels.index({batch}));
    autograd::backward(context, {loss});
    optimizer.step(context);
    return job::Result{loss, batch.numel()};
  });
}

int main(int argc, char** argv) {
  return app::main(
      argc, argv,
      {job::define<Options>("recommender",
                            "predict clicks with a table on a server and replicas under DDP")
           .example("recommender --trainers 3 --epochs 20", "Train with three trainers")
           .role("server", 1)
           .role("trainer", &Options::trainers, train)
           .expose([](rpc::Agent& agent) { nn::expose_module(agent, "table", make_table); })});
}
