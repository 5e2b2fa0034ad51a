#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include <torch/csrc/autograd/grad_mode.h>

#include "distrain/autograd/parameter_versions.h"
#include "distrain/data/batches.h"
#include "distrain/data/images.h"
#include "distrain/job/definition.h"
#include "distrain/nn/random.h"
#include "distrain/rpc/to_device.h"

namespace distrain::scenario {

/// Options of `distrain ps`. The defaults are those of the PyTorch tutorial.
struct PsOptions : job::TrainerOptions {
  PsOptions() { lr = 0.03; }
  static void describe(job::OptionList<PsOptions>& list);

  std::optional<double> dropout;  ///< rate of both layers; nullopt: the tutorial's 0.25 and 0.5
  bool verify_grads = false;
  std::string data;                   ///< folder with IDX files
  std::string valid_data, test_data;  ///< as `data`; an empty valid_data: the test images of `data`
  int64_t limit = 0;                  ///< number of training examples; 0: all
  double mean = 0.1307;
  double std = 0.3081;
  std::optional<int> num_gpus;  ///< number of the server's GPUs; nullopt: `--device` decides
  int servers = 1;              ///< number of servers that share the net's parameters
};

/// A part of a training step (`--accumulate`).
struct PsPart {
  data::ImageBatch batch;
  std::optional<uint64_t> dropout_key;
  double weight = 1;                                ///< share of the batch in the step's images
  at::Tensor loss(const at::Tensor& scores) const;  ///< the part's share of the step's mean loss
};

/// Batches of normalised 28 × 28 float images in ten classes, from IDX files.
class PsData {
 public:
  /// Reads the files. Throws `bad_data` if a file cannot be read or is not valid.
  explicit PsData(const PsOptions& options);
  /// Reads test images, which need no labels.
  PsData(const PsOptions& options, const std::string& images);

  job::Plan plan() const {
    job::Plan plan = job::Plan::of(options_, sampler_.steps_per_epoch());
    plan.what_must_agree = "the files, --mean and --std";
    return plan;
  }
  /// Adds to `training` the properties of the data that all trainers must share.
  void agree(job::TrainingPlan& training) const;
  std::vector<PsPart> parts(const job::Step& step);
  /// Has `training` evaluate the validation images after each epoch and the test images at the end.
  /// Each evaluation calls `begin`, which returns a function from a batch of images to
  /// log-probabilities. This object must outlive the training.
  using Forward = std::function<at::Tensor(const at::Tensor& images)>;
  void evaluate_in(job::TrainingPlan& training, const std::function<Forward()>& begin) const;
  /// Returns the test images. Call it only if there are test images.
  const data::ImageSet& test() const { return *test_; }
  /// Calls `use` with each batch of `share`: `batch_size` images, clamped to [16, 128]. So
  /// activations stay below 32 MiB; for larger ones, glibc maps new memory.
  void each_batch(const data::ImageSet& set, const job::Share& share,
                  const std::function<void(const data::ImageBatch&)>& use) const {
    const auto batch_size = std::clamp<int64_t>(options_.batch_size, 16, 128);
    share.each_batch(set.count, batch_size, [&](std::span<const int64_t> examples) {
      use(data::make_batch(set, examples, form_));
    });
  }

 private:
  const PsOptions options_;
  const data::ImageForm form_{{options_.mean}, {options_.std}};
  data::ImageFolder files_;
  std::optional<data::ImageSet> valid_, test_;  // evaluated after each epoch, and at the end
  int64_t examples_ = 0;                        // number of training examples
  data::Sampler sampler_;
};

/// The reply of a server to a trainer that begins a training pass.
struct PsPass {
  std::vector<at::Tensor> tensors;  ///< log-probabilities [n, 10], or versions of the parameters
  uint64_t version = 0;             ///< number of updates in the parameters; a lower bound
  int64_t staleness = 0;            ///< the caller's lead over the slowest trainer; an upper bound
  static constexpr auto kFields =
      std::tuple(&PsPass::tensors, &PsPass::version, &PsPass::staleness);
};

/// Assigns tensors of these sizes to servers: the largest first, each to the server with the least
/// so far, and of several such servers to the first. Returns the number of each tensor's server.
std::vector<size_t> spread_by_size(const std::vector<int64_t>& sizes, int servers);

/// The net of PyTorch's MNIST example, or the part of it that one of several servers holds. It has
/// no training flag, because trainers would share it: each call trains or evaluates.
class ConvNet {
 public:
  /// Initializes as torch.nn does. Convolutions are on the first device, linear layers on the last.
  /// Holds the parameters of server number `server`. Their values do not depend on `servers`.
  explicit ConvNet(uint64_t seed, const std::vector<c10::Device>& devices = {c10::kCPU},
                   int servers = 1, size_t server = 0);

  /// Computes log-probabilities [n, 10] of images [n, 1, 28, 28]. `parameters` are in the order of
  /// names(), on any devices. The result is on the last parameter's device. `rate` is the rate of
  /// both dropouts; the example's default is 0.25 of the channels and 0.5 of the elements.
  static at::Tensor forward(const std::vector<at::Tensor>& parameters, const at::Tensor& images,
                            nn::Dropout dropout, std::optional<double> rate = {});

  static const std::vector<std::string>& names() {
    static const std::vector<std::string> kNames = {"conv1.weight", "conv1.bias", "conv2.weight",
                                                    "conv2.bias",   "fc1.weight", "fc1.bias",
                                                    "fc2.weight",   "fc2.bias"};
    return kNames;
  }
  /// Returns the number of each parameter's server, in the order of names().
  static std::vector<size_t> server_of_each(int servers);
  const std::vector<at::Tensor>& parameters() const { return parameters_; }
  rpc::NamedTensors named_parameters() const {
    const auto named = optim::named(names_, parameters_);
    return {named.begin(), named.end()};
  }

  // Functions that the trainers call over RPC.

  /// Runs a training pass on the current versions of the parameters, which concurrent updates do
  /// not change. Without a `dropout_key` there is no dropout. One of several servers returns its
  /// versions instead, for a pass on the trainer.
  PsPass forward_training(rpc::CallContext& call, at::Tensor images,
                          std::optional<uint64_t> dropout_key, std::optional<double> dropout_rate);
  at::Tensor forward_evaluating(rpc::CallContext& call, at::Tensor images) {
    const at::NoGradGuard no_grad;
    const auto versions = autograd::current_versions(call.agent, parameters_);
    return rpc::for_rank(call.agent, call.caller.rank, forward(versions, images, nn::Dropout()));
  }
  std::vector<rpc::RRef<at::Tensor>> parameter_rrefs(rpc::CallContext& call) {
    std::vector<rpc::RRef<at::Tensor>> rrefs;
    for (const at::Tensor& each : parameters_) rrefs.push_back(call.agent.make_rref(each));
    return rrefs;
  }
  /// Returns the gradients of parameters() in an autograd context; undefined if missing.
  std::vector<at::Tensor> gradients(rpc::CallContext& call, uint64_t context);

 private:
  const int servers_;
  std::vector<std::string> names_;  // of parameters_
  std::vector<at::Tensor> parameters_;
};

void train_ps(job::Rank& rank, const PsOptions& options);
void expose_ps(rpc::Agent& agent);
/// Trains in one process without RPC: the reference for correctness and speed.
void train_ps_local(job::SingleProcess& local, const PsOptions& options);
/// Classifies images with the model of a checkpoint.
void predict_ps(job::Predictions& predictions, const PsOptions& options);

}  // namespace distrain::scenario
