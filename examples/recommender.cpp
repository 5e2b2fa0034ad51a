// A recommender: rows of a table on a server, a deep net under DDP on the trainers.
//
//   ./recommender --trainers 3 --epochs 4 | jq -c 'select(.event=="eval")'
//   for rank in 0 1 2; do ./recommender --rank $rank & done; wait
#include <filesystem>
#include <fstream>
#include <sstream>

#include <ATen/Functions.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>

#include <distrain/app/main.h>
#include <distrain/autograd/context.h>
#include <distrain/data/batches.h>
#include <distrain/job/training.h>
#include <distrain/nn/module.h>

using namespace distrain;

struct Options : job::TrainerOptions {
  std::string data = "clicks.txt";
  int rows = 1000, dim = 8;
  Options() { optimizer = "adam", epochs = 3, mode = "sync"; }
  static void describe(job::OptionList<Options>& list) {
    list.text("data", &Options::data, "FILE", "clicks: a label, a user, an item; made if missing");
    list.integer("rows", &Options::rows, "users and items").range(2, 1 << 24);
    list.integer("dim", &Options::dim, "numbers in a row").range(1, 4096);
  }
};

// A user clicks on what has the same parity, mostly.
void make_clicks(const Options& options) {
  if (std::filesystem::exists(options.data)) return;
  data::Random random({options.seed});
  std::ostringstream clicks;
  for (int i = 0; i < 8000; ++i) {
    const auto user = random.below(options.rows / 2), item = random.below(options.rows / 2);
    const bool liked = user % 2 == item % 2;
    clicks << (random.below(20) > 0 ? liked : !liked) << ' ' << user << ' '
           << options.rows / 2 + item << '\n';
  }
  std::ofstream(options.data) << clicks.str();
}

struct Clicks {
  at::Tensor ids, labels;  // int64 [n, 2], float [n]

  explicit Clicks(const std::string& path) {
    std::ifstream file(path);
    std::vector<int64_t> rows;
    std::vector<float> wanted;
    int64_t user, item;
    for (float label; file >> label >> user >> item;) {
      wanted.push_back(label);
      rows.insert(rows.end(), {user, item});
    }
    ids = at::tensor(rows, at::kLong).view({-1, 2});
    labels = at::tensor(wanted);
  }
  int64_t size() const { return labels.numel(); }
  int64_t training() const { return size() * 4 / 5; }  // the rest is to evaluate on
};

torch::nn::Embedding make_table(int64_t rows, int64_t dim) {
  return torch::nn::Embedding(rows, dim);
}

void train(job::Rank& rank, const Options& options) {
  const Clicks clicks(options.data);
  nn::RemoteModule table(rank.agent(), "server", "table", options.rows, options.dim);
  torch::manual_seed(options.seed);
  ddp::DistributedDataParallel net(
      torch::nn::Sequential(torch::nn::Linear(2 * options.dim, 32), torch::nn::ReLU(),
                            torch::nn::Linear(32, 1)),
      rank.group("trainer"));
  optim::DistributedOptimizer optimizer(rank.agent(), table.remote_parameters(), net.parameters(),
                                        options.rule(), options.sharing(rank.index()));

  job::Training training(rank, options, data::steps_per_epoch(clicks.training(), options.trainers,
                                                              options.batch_size));
  training.agree("clicks", clicks.size());
  training.keep("table", table);
  training.keep("net", net);
  training.keep(optimizer);
  training.evaluate_epochs([&](const job::Share& share) {
    const int64_t first = clicks.training(), held_out = clicks.size() - first;
    const auto mine = [&](const at::Tensor& all) {
      return all.slice(0, first + share.first(held_out), first + share.end(held_out));
    };
    const at::Tensor labels = mine(clicks.labels);
    const at::Tensor rows = table.forward(mine(clicks.ids));
    const at::Tensor logits = net.module()->forward(rows.flatten(1)).squeeze(1);
    const at::Tensor loss = at::binary_cross_entropy_with_logits(logits, labels, {}, {},
                                                                 at::Reduction::Sum);
    return job::Evaluation{labels.numel(), (logits > 0).eq(labels > 0).sum().item<int64_t>(),
                           loss.item<double>()};
  });
  training.run([&](const job::Step& step) {
    const data::EpochSampler sampler(options.seed, step.epoch, {step.shard, options.trainers},
                                     clicks.training(), options.batch_size);
    const auto examples = sampler.batch(step.number);
    const at::Tensor which = at::tensor(at::ArrayRef<int64_t>(examples.data(), examples.size()));
    autograd::Context context(rank.agent());
    const at::Tensor rows = table.forward(clicks.ids.index_select(0, which));
    const at::Tensor scores = net.forward(rows.flatten(1)).squeeze(1);
    const at::Tensor loss = at::binary_cross_entropy_with_logits(
        scores, clicks.labels.index_select(0, which));
    autograd::backward(context, {loss});
    optimizer.step(context);
    return job::Result{loss, which.numel()};
  });
}

int main(int argc, char** argv) {
  return app::main(argc, argv,
                   {job::define<Options>("recommender", "clicks, with rows on a server")
                        .role("server", 1)
                        .role("trainer", &Options::trainers, train)
                        .check([](const Options& options, const job::Preflight&) {
                          make_clicks(options);
                        })
                        .expose([](rpc::Agent& agent) {
                          nn::expose_module(agent, "table", make_table);
                        })});
}
