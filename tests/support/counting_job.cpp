// A job whose model counts how often each example of a stream was used: example i has the one word
// `wi`, and each use adds 1 to row i of a table on the server.
#include <memory>
#include <string>

#include <torch/nn/modules/embedding.h>

#include "distrain/app/main.h"
#include "distrain/data/stream.h"
#include "distrain/job/training.h"
#include "distrain/nn/module.h"

using namespace distrain;

namespace {

struct Options : job::TrainerOptions {
  std::string data;

  Options() {
    lr = 1;
    batch_size = 4;
  }
  static void describe(job::OptionList<Options>& list) {
    list.file("data", &Options::data, "count the examples of FILE").required();
  }
};

torch::nn::Embedding make_table(int64_t rows) {
  torch::nn::Embedding table(torch::nn::EmbeddingOptions(rows, 1));
  const at::NoGradGuard no_grad;
  table->weight.zero_();
  return table;
}

void train(job::Rank& rank, const Options& options) {
  data::StreamOptions stream{.paths = {options.data},
                             .batch_size = options.batch_size,
                             .shuffle_buffer = 64,
                             .seed = options.seed};
  stream.vocabulary = std::make_shared<const data::TextVocabulary>(
      data::scan_vocabulary(stream.paths, stream.format, /*hash_bits=*/0));
  const nn::RemoteModule table(rank.agent(), "server", "table", stream.vocabulary->num_words());
  optim::DistributedOptimizer optimizer(rank.agent(), table.remote_parameters(), {}, options.rule(),
                                        options.sharing(rank.index()));
  job::Plan plan = job::Plan::of_stream(options);
  plan.average_over_data = false;
  job::Training training(rank, std::move(plan));
  training.read([&stream](int shard, int shards) {
    data::StreamOptions part = stream;
    part.shard = shard;
    part.shards = shards;
    return std::make_shared<data::Stream>(std::move(part));
  });
  training.agree("words", stream.vocabulary->num_words());
  training.keep("seen", table);
  training.keep(optimizer);
  training.run([&](const job::Step& step) {
    const data::Batch batch = step.has_data ? step.source->next() : data::Batch::empty();
    autograd::Context context(rank.agent());
    // A mean over all trainers becomes a sum.
    const double scale = options.mode == "async" ? 1 : options.trainers;
    const at::Tensor loss = table.forward(batch.indices).sum() * -scale;
    autograd::backward(context, {loss});
    optimizer.step(context);
    return job::Result{loss, batch.targets.numel()};
  });
}

}  // namespace

int main(int argc, char** argv) {
  return app::main(
      argc, argv,
      {job::define<Options>("count", "count how often each example is used")
           .role("server", 1)
           .role("trainer", &Options::trainers, train)
           .expose([](rpc::Agent& agent) { nn::expose_module(agent, "table", make_table); })});
}
