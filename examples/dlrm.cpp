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
  int servers = 1, hash_bits = 24;
  Options() {  // the defaults of this job
    optimizer = "adagrad";
    lr = 0.02;
    batch_size = 128;
  }
  static void describe(job::OptionList<Options>& list) {
    list.text(
        "data", &Options::data, "FILE[,...]",
        "train on lines of a label, 13 numbers and 26 categories; criteo.tsv is made if missing");
    list.text("test-data", &Options::test_data, "FILE[,...]", "evaluate on FILE after each epoch");
    list.integer("shuffle-buffer", &Options::shuffle_buffer, "shuffle N examples at a time");
    list.integer("dim", &Options::dim, "use N numbers per row").range(1, 4096);
    list.integer("servers", &Options::servers, "spread the rows over N servers").range(1, 256);
    list.integer("hash-bits", &Options::hash_bits, "number categories by N bits").range(1, 62);
    list.find("optimizer").choices = {"sgd", "adagrad", "rowwise-adagrad", "adam"};
  }
};

// Makes clicks whose log-odds are the sum of a weight for each category and of two numbers.
void make_clicks(const std::string& path, const std::string& own, uint64_t seed, int count) {
  std::ofstream file(path + own);
  base::Random random({seed, 1});
  for (int i = 0; i < count; ++i) {
    std::string line;
    double odds = -1;
    for (int64_t column = 0; column < data::kCriteoNumbers; ++column) {
      const int64_t number = random.between(0, 50);
      if (column < 2) odds += (column == 0 ? 0.04 : -0.04) * static_cast<double>(number - 25);
      line += '\t' + std::to_string(number);
    }
    for (int64_t column = 0; column < data::kCriteoCategories; ++column) {
      const uint64_t category = random.below(40);
      odds += 0.8 * (base::Random({7, static_cast<uint64_t>(column), category}).unit() - 0.5);
      line += '\t' + std::to_string(100 * category + static_cast<uint64_t>(column));
    }
    file << (random.unit() < 1 / (1 + std::exp(-odds)) ? '1' : '0') << line << '\n';
  }
  file.close();
  if (file) std::filesystem::rename(path + own, path);  // atomically
}

struct DlrmImpl : torch::nn::Module {
  DlrmImpl(int64_t dim, uint64_t seed) {
    torch::manual_seed(seed);
    const int64_t pairs = pair[0].numel();
    bottom = register_module("bottom",
                             torch::nn::Sequential(torch::nn::Linear(13, 64), torch::nn::ReLU(),
                                                   torch::nn::Linear(64, dim), torch::nn::ReLU()));
    top =
        register_module("top", torch::nn::Sequential(torch::nn::Linear(dim + pairs, 64),
                                                     torch::nn::ReLU(), torch::nn::Linear(64, 1)));
  }
  // Maps numbers [n, 13] and the rows of the categories [n, 26, dim] to log-odds [n].
  at::Tensor forward(const at::Tensor& numbers, const at::Tensor& rows) {
    const at::Tensor dense = bottom->forward(numbers);
    const at::Tensor all = at::cat({dense.unsqueeze(1), rows}, 1);
    const at::Tensor dots =
        at::bmm(all, all.transpose(1, 2)).index({at::indexing::Slice(), pair[0], pair[1]});
    return top->forward(at::cat({dense, dots}, 1)).squeeze(1);
  }
  torch::nn::Sequential bottom, top;
  const at::Tensor pair = at::tril_indices(27, 27, -1);
};
TORCH_MODULE(Dlrm);

at::Tensor categories(const data::Batch& batch) {
  return batch.indices.view({-1, 39}).narrow(1, 13, 26);
}

void train(job::Rank& rank, const Options& options) {
  const job::Roles::Role& role = rank.roles().named("server");
  std::vector<int> servers(static_cast<size_t>(role.count));
  std::iota(servers.begin(), servers.end(), role.first);
  const table::TableOptions table{.name = "embedding",
                                  .dim = options.dim,
                                  .seed = options.seed,
                                  .range = 1.0 / static_cast<double>(options.dim),
                                  .optimizer = optim::to_fields(options.rule().options)};
  const auto tables = std::make_shared<table::ShardedEmbedding>(
      rank.agent(), servers, std::vector{table}, options.sharing(rank.index()));
  ddp::DistributedDataParallel net(Dlrm(options.dim, options.seed), rank.group("trainer"));
  optim::DistributedOptimizer optimizer(rank.agent(), {}, net.parameters(), options.rule(),
                                        options.sharing(rank.index()));
  optimizer.add(tables);

  data::StreamOptions settings{.format = data::Format::kCriteo, .batch_size = options.batch_size};
  settings.vocabulary = std::make_shared<data::TextVocabulary>(
      data::scan_vocabulary({}, settings.format, options.hash_bits));
  const auto stream = [settings](const std::string& data, int shard, int shards, int64_t shuffled) {
    data::StreamOptions own = settings;
    own.paths = data::expand_paths(data::split_paths(data));
    own.shard = shard, own.shards = shards, own.shuffle_buffer = shuffled;
    return data::Stream(own);
  };
  data::Stream source =
      stream(options.data, rank.index(), options.trainers, options.shuffle_buffer);
  job::Training training(rank, job::Plan::of_stream(options));
  training.read(source);
  training.agree("data", std::to_string(source.content_key()));
  training.keep("embedding", *tables);
  training.keep("net", net);
  training.keep(optimizer);
  training.evaluate_epochs([&](const job::Share& share) {
    job::Evaluation evaluation;
    data::Stream examples = stream(options.test_data, share.index, share.count, 0);
    for (examples.begin({}); examples.ready() > 0;) {
      const data::Batch batch = examples.next();
      const at::Tensor rows = tables->forward(categories(batch));
      evaluation.add(
          job::Evaluation::of_binary(net.module()->forward(batch.numbers, rows), batch.targets));
    }
    return evaluation;
  });
  training.run([&](const job::Step& step) {
    const data::Batch batch = step.has_data ? source.next() : data::Batch::empty();
    autograd::Context context(rank.agent());
    const at::Tensor scores = net.forward(batch.numbers, tables->forward(categories(batch)));
    const at::Tensor loss = at::binary_cross_entropy_with_logits(
                                scores, batch.targets.to(at::kFloat), {}, {}, at::Reduction::Sum) /
                            std::max<int64_t>(batch.size(), 1);
    autograd::backward(context, {loss});
    optimizer.step(context);
    return job::Result{loss, batch.size()};
  });
}

void prepare(job::Rank& rank, const Options& options) {  // on each rank, before the ranks meet
  const auto make = [&](const std::string& path, const char* name, uint64_t seed, int count) {
    if (path == name && !std::filesystem::exists(path))
      make_clicks(path, "." + rank.name(), seed, count);
  };
  if (rank.role() != "trainer") return;
  make(options.data, "criteo.tsv", 1, 20000);
  make(options.test_data, "criteo.test.tsv", 2, 4000);
}

int main(int argc, char** argv) {
  return app::main(
      argc, argv,
      {job::define<Options>("dlrm", "predict clicks from Criteo's logs with DLRM")
           .example("dlrm --servers 2 --trainers 3", "Train three replicas and two servers")
           .role("server", &Options::servers)
           .role("trainer", &Options::trainers, train)
           .prepare(prepare)});
}
