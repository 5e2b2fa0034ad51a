// Matrix factorisation: each user and each item has a row of numbers, and the product of two rows
// predicts a rating. The users' table is on one server, the items' table on another.
//
//   python3 make_data.py .
//   ./matrix_factorization --data ratings.txt | jq -c 'select(.event == "eval")'
#include <fstream>
#include <memory>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include <ATen/Functions.h>
#include <torch/nn/init.h>
#include <torch/nn/modules/embedding.h>

#include <distrain/app/main.h>
#include <distrain/data/batches.h>
#include <distrain/job/training.h>
#include <distrain/nn/module.h>

using namespace distrain;

struct Options : job::TrainerOptions {
  std::string data;
  int64_t dim = 8;

  Options() {  // the defaults of this job
    optimizer = "adagrad";
    lr = 0.2;
    epochs = 10;
  }
  static void describe(job::OptionList<Options>& list) {
    list.file("data", &Options::data, "train on FILE: a user, an item and a rating in each line")
        .required();
    list.integer("dim", &Options::dim, "use N numbers per row").range(1, 4096);
    list.find("optimizer").choices = {"sgd", "adagrad", "adam"};
  }
};

struct Ratings {
  at::Tensor users, items, values;  // int64, int64 and float, [n] each

  explicit Ratings(const std::string& path) {
    std::ifstream file(path);
    std::vector<int64_t> user_of, item_of;
    std::vector<float> value_of;
    for (std::string line; std::getline(file, line);) {
      std::istringstream words(line);
      int64_t user = 0, item = 0;
      float value = 0;
      if (!(words >> user >> item >> value) || user < 0 || item < 0) {
        base::bad_data(path + ": not a user, an item and a rating: '" + line + "'");
      }
      user_of.push_back(user), item_of.push_back(item), value_of.push_back(value);
    }
    if (value_of.size() < 10) base::bad_data(path + ": fewer than 10 ratings");
    users = at::tensor(user_of), items = at::tensor(item_of), values = at::tensor(value_of);
  }
  int64_t training() const { return values.numel() * 9 / 10; }  // the rest is held out
};

torch::nn::Embedding make_table(int64_t rows, int64_t dim, uint64_t seed) {
  torch::manual_seed(seed);
  torch::nn::Embedding table(torch::nn::EmbeddingOptions(rows, dim).sparse(true));
  torch::nn::init::normal_(table->weight, 0, 0.3);
  return table;
}

void read_ratings(job::Rank& rank, const Options& options) {  // on each rank, before the ranks meet
  if (rank.role() == "trainer") rank.agent().provide(std::make_shared<Ratings>(options.data));
}

void train(job::Rank& rank, const Options& options) {  // runs on each trainer
  rpc::Agent& agent = rank.agent();
  const Ratings& ratings = agent.local<Ratings>();
  const auto table = [&](const char* server, const at::Tensor& ids, uint64_t seed) {
    const auto rows = ids.max().item<int64_t>() + 1;
    return nn::RemoteModule(agent, server, "table", rows, options.dim, seed);
  };
  const nn::RemoteModule users = table("user_server", ratings.users, options.seed);
  const nn::RemoteModule items = table("item_server", ratings.items, options.seed + 1);
  const double mean = ratings.values.slice(0, 0, ratings.training()).mean().item<double>();
  const auto predict = [&](const at::Tensor& examples) {
    const auto user_rows = users.forward_async(ratings.users.index({examples}));
    const auto item_rows = items.forward_async(ratings.items.index({examples}));
    return mean + (user_rows.wait() * item_rows.wait()).sum(1);
  };

  std::vector<rpc::RRef<at::Tensor>> parameters = users.remote_parameters();
  for (const auto& parameter : items.remote_parameters()) parameters.push_back(parameter);
  optim::DistributedOptimizer optimizer(agent, parameters, {}, options.rule(),
                                        options.sharing(rank.index()));

  data::Sampler sampler(options.seed, options.trainers, ratings.training(), options.batch_size);
  job::Training training(rank, options, sampler.steps_per_epoch());
  training.agree("ratings", ratings.values.numel());
  training.keep("users", users);
  training.keep("items", items);
  training.keep(optimizer);
  training.evaluate_epochs([&](const job::Share& share) {
    const int64_t first = ratings.training(), count = ratings.values.numel() - first;
    const at::Tensor mine = at::arange(first + share.first(count), first + share.end(count));
    const at::Tensor errors = predict(mine) - ratings.values.index({mine});
    job::Evaluation evaluation;
    evaluation.samples = mine.numel();
    evaluation.loss_sum = errors.pow(2).sum().item<double>();
    evaluation.means["abs_error"] = errors.abs().sum().item<double>();
    return evaluation;
  });
  training.run([&](const job::Step& step) {
    const at::Tensor batch = at::tensor(sampler.batch(step.epoch, step.shard, step.number));
    autograd::Context context(agent);
    const at::Tensor loss = at::mse_loss(predict(batch), ratings.values.index({batch}));
    autograd::backward(context, {loss});
    optimizer.step(context);
    return job::Result{loss, batch.numel()};
  });
}

int main(int argc, char** argv) {
  return app::main(
      argc, argv,
      {job::define<Options>("matrix_factorization", "predict ratings with tables on two servers")
           .example("matrix_factorization --data ratings.txt --trainers 3",
                    "Train with three trainers")
           .metric("abs_error", "mean absolute error of a rating")
           .role("user_server", 1)
           .role("item_server", 1)
           .role("trainer", &Options::trainers, train)
           .prepare(read_ratings)
           .expose([](rpc::Agent& agent) { nn::expose_module(agent, "table", make_table); })});
}
