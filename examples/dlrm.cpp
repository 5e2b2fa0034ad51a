// DLRM (Naumov et al., 2019) on click logs in Criteo's format: a bottom net for 13 numbers, tables
// on servers for 26 categories, dot products of all pairs of vectors, and a top net under DDP.
//
//   ./dlrm --servers 2 | jq -c 'select(.event == "eval")'
//   ./dlrm --data 'day_*.gz' --test-data day_23 --servers 4 --trainers 8 --hash-bits 30
#include <cmath>
#include <filesystem>
#include <fstream>
#include <numeric>

#include <ATen/Functions.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include <distrain/app/main.h>
#include <distrain/base/random.h>
#include <distrain/data/stream.h>
#include <distrain/job/training.h>

using namespace distrain;

struct Options : job::TrainerOptions {
  std::string data = "criteo.tsv", test_data = "criteo.test.tsv";
  int64_t shuffle_buffer = 65536, dim = 16;
  int servers = 1, hash_bits = 40;
  Options() {
    optimizer = "adagrad", lr = 0.02;
    batch_size = 128;
  }
  static void describe(job::OptionList<Options>& list) {
    list.text("data", &Options::data, "FILE[,...]",
              "train on FILE in Criteo's format; criteo.tsv is made if it is missing");
    list.text("test-data", &Options::test_data, "FILE[,...]", "evaluate on FILE after each epoch");
    list.integer("shuffle-buffer", &Options::shuffle_buffer, "shuffle N examples at a time");
    list.integer("dim", &Options::dim, "use N numbers per row").range(1, 4096);
    list.integer("servers", &Options::servers, "spread the rows over N servers").range(1, 256);
    list.integer("hash-bits", &Options::hash_bits, "number categories by N bits").range(1, 62);
    list.find("optimizer").choices = {"sgd", "adagrad", "rowwise-adagrad", "adam"};
  }
};

// Makes clicks whose log-odds are the sum of 13 numbers and of a weight for each category.
void make_clicks(const std::string& path, const std::string& maker, uint64_t seed, int count) {
  if (std::filesystem::exists(path)) return;
  std::ofstream file(path + "." + maker);
  base::Random random({seed});
  for (int i = 0; i < count; ++i) {
    std::string line;
    double log_odds = -1;
    for (uint64_t column = 0; column < 39; ++column) {
      const uint64_t value = random.below(40);
      const double weight = base::Random({column, value}).unit() - 0.5;
      log_odds += column < 13 ? 0.02 * static_cast<double>(value) - 0.4 : 1.5 * weight;
      line += '\t' + std::to_string(value);
    }
    file << (random.unit() < 1 / (1 + std::exp(-log_odds))) << line << '\n';
  }
  file.close();
  if (file) std::filesystem::rename(path + "." + maker, path);  // atomically
}

struct NetImpl : torch::nn::Module {
  NetImpl(int64_t dim, uint64_t seed) {
    using torch::nn::Linear, torch::nn::ReLU, torch::nn::Sequential;
    torch::manual_seed(seed);
    bottom = Sequential(Linear(13, 64), ReLU(), Linear(64, dim), ReLU());
    top = Sequential(Linear(dim + pairs.numel(), 64), ReLU(), Linear(64, 1));
    register_module("bottom", bottom);
    register_module("top", top);
  }
  // Maps numbers [n, 13] and rows [n, 26, dim] to log-odds [n].
  at::Tensor forward(const at::Tensor& numbers, const at::Tensor& rows) {
    const at::Tensor dense = bottom->forward(numbers);
    const at::Tensor all = at::cat({dense.unsqueeze(1), rows}, 1);
    const at::Tensor dots = at::bmm(all, all.transpose(1, 2)).flatten(1).index_select(1, pairs);
    return top->forward(at::cat({dense, dots}, 1)).squeeze(1);
  }
  torch::nn::Sequential bottom, top;
  // Indices of the 351 pairs of different vectors in the flat matrix of all dot products.
  const at::Tensor pairs = at::ones({27, 27}).tril(-1).flatten().nonzero().squeeze(1);
};
TORCH_MODULE(Net);

auto open(const Options& options, const std::string& files, job::Share share) {
  const auto format = data::Format::kCriteo;
  data::StreamOptions stream{.format = format, .shard = share.index, .shards = share.count};
  stream.paths = data::expand_paths(data::split_paths(files));
  stream.batch_size = options.batch_size;
  stream.shuffle_buffer = options.shuffle_buffer;
  stream.seed = options.seed;
  stream.vocabulary =
      std::make_shared<data::TextVocabulary>(data::scan_vocabulary({}, format, options.hash_bits));
  return std::make_shared<data::Stream>(stream);
}

void train(job::Rank& rank, const Options& options) {
  const job::Roles::Role& role = rank.roles().named("server");
  std::vector<int> servers(static_cast<size_t>(role.count));
  std::iota(servers.begin(), servers.end(), role.first);
  table::TableOptions table{.name = "categories", .dim = options.dim, .seed = options.seed};
  table.range = 1.0 / static_cast<double>(options.dim);
  table.optimizer = optim::to_fields(options.rule().options);
  table.optimizer.name = options.optimizer;
  const auto tables = std::make_shared<table::ShardedEmbedding>(
      rank.agent(), servers, std::vector{table}, options.sharing(rank.index()));
  ddp::DistributedDataParallel net(Net(options.dim, options.seed), rank.group("trainer"));
  optim::DistributedOptimizer optimizer(rank.agent(), {}, net.parameters(), options.rule(),
                                        options.sharing(rank.index()));
  optimizer.add(tables);
  const auto rows = [&](const data::Batch& batch) {
    return tables->forward(batch.indices.view({-1, 39}).slice(1, 13));  // without the numbers
  };

  job::Training training(rank, job::Plan::of_stream(options));
  training.read([&](int shard, int n) { return open(options, options.data, {shard, n}); });
  training.agree("data", std::to_string(open(options, options.data, {})->content_key()));
  training.keep("categories", *tables);
  training.keep("net", net);
  training.keep(optimizer);
  training.evaluate_epochs([&](const job::Share& share) {
    job::Evaluation evaluation;
    const auto examples = open(options, options.test_data, share);
    for (examples->begin({}); examples->ready() > 0;) {
      const data::Batch batch = examples->next();
      const at::Tensor log_odds = net.module()->forward(batch.numbers, rows(batch));
      evaluation.add(job::Evaluation::of_binary(log_odds, batch.targets));
    }
    return evaluation;
  });
  training.run([&](const job::Step& step) {
    const data::Batch batch = step.has_data ? step.source->next() : data::Batch::empty();
    autograd::Context context(rank.agent());
    const at::Tensor log_odds = net.forward(batch.numbers, rows(batch));
    const at::Tensor sum = at::binary_cross_entropy_with_logits(
        log_odds, batch.targets.to(at::kFloat), {}, {}, at::Reduction::Sum);
    const at::Tensor loss = sum / std::max<int64_t>(batch.size(), 1);
    autograd::backward(context, {loss});
    optimizer.step(context);
    return job::Result{loss, batch.size()};
  });
}

void prepare(job::Rank& rank, const Options& options) {
  if (rank.role() != "trainer") return;
  const Options defaults;
  if (options.data == defaults.data) make_clicks(options.data, rank.name(), 1, 20000);
  if (options.test_data == defaults.test_data) make_clicks(options.test_data, rank.name(), 2, 4000);
}

int main(int argc, char** argv) {
  return app::main(
      argc, argv,
      {job::define<Options>("dlrm", "predict clicks from logs in Criteo's format with DLRM")
           .example("dlrm --servers 2 --trainers 3", "Train three replicas and two servers")
           .role("server", &Options::servers)
           .role("trainer", &Options::trainers, train)
           .prepare(prepare)});
}
