// A multilayer perceptron that reads digits. Each trainer has a replica, and
// DistributedDataParallel averages the gradients; the job has no server. It has --local and
// predict.
//
//   python3 make_data.py .
//   ./mlp --data digits --trainers 3 --checkpoint run1 | jq -c 'select(.event == "eval")'
//   ./mlp predict run1 digits | jq -c 'select(.event == "prediction")'
#include <string>

#include <ATen/Functions.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include <distrain/app/main.h>
#include <distrain/data/batches.h>
#include <distrain/data/images.h>
#include <distrain/job/single_process_training.h>
#include <distrain/job/training.h>

using namespace distrain;

struct Options : job::TrainerOptions {
  std::string data;
  int64_t hidden = 64;

  Options() {
    optimizer = "adam";
    lr = 0.01;
    mode = "sync";
    epochs = 10;
  }
  static void describe(job::OptionList<Options>& list) {
    list.folder("data", &Options::data, "train on the IDX files in DIR").required();
    list.integer("hidden", &Options::hidden, "use N hidden units").range(1, 65536);
    list.without("mode");          // replicas are always updated together
    list.without("min-trainers");  // the job cannot continue without a trainer
  }
};

// The images of one process.
struct Digits {
  data::ImageFolder images;
  data::Sampler sampler;
  data::ImageForm form{.mean = {0.2}, .std = {0.3}};

  explicit Digits(const Options& options)
      : images(data::read_image_folder(options.data)),
        sampler(options.seed, options.trainers, images.train.count, options.batch_size) {
    if (!images.test) base::bad_data(options.data + ": there are no t10k-... files to test with");
  }
  int64_t pixels() const { return images.train.rows * images.train.columns; }
  data::ImageBatch batch(const job::Step& step) {
    return make_batch(images.train, sampler.batch(step.epoch, step.shard, step.number), form);
  }
};

torch::nn::Sequential make_net(int64_t pixels, const Options& options) {
  torch::manual_seed(options.seed);
  return torch::nn::Sequential(torch::nn::Linear(pixels, options.hidden), torch::nn::ReLU(),
                               torch::nn::Linear(options.hidden, 10));
}

// Declares the data check and the evaluation, for trainers and for --local.
void describe(job::TrainingPlan& training, const Digits& digits, torch::nn::Sequential& net) {
  training.agree("images", digits.images.train.count);
  training.evaluate_epochs([&digits, net](const job::Share& share) mutable {
    job::Evaluation evaluation;
    const data::ImageSet& test = *digits.images.test;
    share.each_batch(test.count, 1000, [&](std::span<const int64_t> examples) {
      const data::ImageBatch batch = make_batch(test, examples, digits.form);
      evaluation.add(job::Evaluation::of(net->forward(batch.images.flatten(1)), batch.labels));
    });
    return evaluation;
  });
}

void train(job::Rank& rank, const Options& options) {  // runs on each trainer
  Digits digits(options);
  ddp::DistributedDataParallel net(make_net(digits.pixels(), options), rank.group("trainer"));
  optim::DistributedOptimizer optimizer(rank.agent(), {}, net.parameters(), options.rule());

  job::Training training(rank, options, digits.sampler.steps_per_epoch());
  describe(training, digits, net.module());
  training.keep("net", net);
  training.keep(optimizer);
  training.run([&](const job::Step& step) {
    const data::ImageBatch batch = digits.batch(step);
    autograd::Context context(rank.agent());
    const at::Tensor scores = net.forward(batch.images.flatten(1));
    const at::Tensor loss = at::cross_entropy_loss(scores, batch.labels);
    autograd::backward(context, {loss});
    optimizer.step(context);
    return job::Result{loss, batch.labels.numel()};
  });
}

void train_locally(job::SingleProcess& local, const Options& options) {  // runs with --local
  Digits digits(options);
  torch::nn::Sequential net = make_net(digits.pixels(), options);
  job::SingleProcessOptimizer optimizer(*net, options.rule());

  job::SingleProcessTraining training(local, options, digits.sampler.steps_per_epoch());
  describe(training, digits, net);
  training.keep("net", *net);
  training.keep(optimizer);
  training.run(optimizer, [&](const job::Step& step) {
    const data::ImageBatch batch = digits.batch(step);
    const at::Tensor scores = net->forward(batch.images.flatten(1));
    return job::Result{at::cross_entropy_loss(scores, batch.labels), batch.labels.numel()};
  });
}

void predict(job::Predictions& predictions, const Options& options) {
  const data::ImageSet images = data::read_images(predictions.input());
  torch::nn::Sequential net = make_net(images.rows * images.columns, options);
  predictions.load(store::named_tensors("net", *net));
  job::Share{}.each_batch(images.count, 1000, [&](std::span<const int64_t> examples) {
    const data::ImageBatch batch = make_batch(images, examples, {.mean = {0.2}, .std = {0.3}});
    predictions.tell_labels(net->forward(batch.images.flatten(1)), batch.labels);
  });
}

int main(int argc, char** argv) {
  return app::main(argc, argv,
                   {job::define<Options>("mlp", "read digits with replicas under DDP")
                        .example("mlp --data digits --trainers 3", "Train three replicas")
                        .role("trainer", &Options::trainers, train)
                        .local(train_locally)
                        .predict(predict)});
}
