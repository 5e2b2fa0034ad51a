// distrain ps: a ConvNet on a parameter server, trained by the other ranks.
//
// After PyTorch's tutorial "Implementing a Parameter Server Using Distributed RPC Framework".

#include "ps.h"

#include <cmath>

#include <ATen/Functions.h>
#include <c10/util/accumulate.h>
#include <torch/csrc/autograd/grad_mode.h>

#include "distrain/autograd/parameter_versions.h"
#include "distrain/rpc/to_device.h"

namespace distrain::scenario {

ConvNet::ConvNet(uint64_t seed, const std::vector<c10::Device>& devices) {
  const at::Generator generator = nn::keyed_generator({seed});
  const auto layer = [&](const std::vector<int64_t>& shape, c10::Device device) {
    const int64_t inputs = c10::multiply_integers(shape) / shape[0];
    const double bound = 1.0 / std::sqrt(static_cast<double>(inputs));
    for (const at::IntArrayRef sizes : {at::IntArrayRef(shape), at::IntArrayRef(shape[0])}) {
      parameters_.push_back(nn::uniform(sizes, bound, generator, device).requires_grad_());
    }
  };
  layer({32, 1, 3, 3}, devices.front());
  layer({64, 32, 3, 3}, devices.front());
  layer({128, 9216}, devices.back());
  layer({10, 128}, devices.back());
}

const std::vector<std::string>& ConvNet::names() {
  static const std::vector<std::string> kNames = {"conv1.weight", "conv1.bias", "conv2.weight",
                                                  "conv2.bias",   "fc1.weight", "fc1.bias",
                                                  "fc2.weight",   "fc2.bias"};
  return kNames;
}

rpc::NamedTensors ConvNet::named_parameters() const {
  const auto named = optim::named(names(), parameters_);
  return {named.begin(), named.end()};
}

at::Tensor ConvNet::forward(const std::vector<at::Tensor>& parameters, const at::Tensor& images,
                            nn::Dropout dropout, std::optional<double> rate) {
  const base::TraceScope scope("forward");
  at::Tensor x = rpc::to_device(images, parameters[0].device());
  x = at::relu(at::conv2d(x, parameters[0], parameters[1]));
  x = at::relu(at::conv2d(x, parameters[2], parameters[3]));
  x = dropout.channels(at::max_pool2d(x, {2, 2}), rate.value_or(0.25));
  x = rpc::to_device(x.flatten(1), parameters[4].device());
  x = at::relu(at::linear(x, parameters[4], parameters[5]));
  x = at::linear(dropout(x, rate.value_or(0.5)), parameters[6], parameters[7]);
  return at::log_softmax(x, 1);
}

PsForward ConvNet::forward_training(rpc::CallContext& call, at::Tensor images,
                                    std::optional<uint64_t> dropout_key,
                                    std::optional<double> dropout_rate) {
  // Trainer t is rank t + 1. Read `progress` before `versions`: an update between the two is then
  // not counted although `versions` has it, but no update is counted that `versions` lacks.
  const optim::Progress progress =
      optim::progress_of(call.agent, parameters_[0], call.caller.rank - 1);
  const auto versions = autograd::current_versions(call.agent, parameters_);
  const at::Tensor scores = forward(
      versions, images, dropout_key ? nn::Dropout({*dropout_key}) : nn::Dropout(), dropout_rate);
  return {rpc::for_rank(call.agent, call.caller.rank, scores), progress.updates, progress.lead};
}

at::Tensor ConvNet::forward_evaluating(rpc::CallContext& call, at::Tensor images) {
  const at::NoGradGuard no_grad;
  const auto versions = autograd::current_versions(call.agent, parameters_);
  return rpc::for_rank(call.agent, call.caller.rank, forward(versions, images, nn::Dropout()));
}

std::vector<rpc::RRef<at::Tensor>> ConvNet::parameter_rrefs(rpc::CallContext& call) {
  std::vector<rpc::RRef<at::Tensor>> rrefs;
  for (const at::Tensor& parameter : parameters_) rrefs.push_back(call.agent.make_rref(parameter));
  return rrefs;
}

std::vector<at::Tensor> ConvNet::gradients(rpc::CallContext& call, uint64_t context) {
  std::vector<at::Tensor> gradients;
  for (const at::Tensor& parameter : parameters_) {
    const at::Tensor gradient = autograd::gradient(call.agent, context, parameter);
    gradients.push_back(gradient.defined() ? rpc::for_rank(call.agent, call.caller.rank, gradient)
                                           : gradient);
  }
  return gradients;
}

namespace {

/// Returns the server's net. The first call creates it.
rpc::RRef<ConvNet> net_of_job(rpc::CallContext& call, uint64_t seed) {
  const auto& devices = call.agent.local<job::Job>().devices;
  return call.agent.make_rref(call.agent.shared<ConvNet>(seed, devices));
}

/// Checks, as the tutorial does, that the gradients of this step are on the server and finite.
void verify_gradients(const rpc::RRef<ConvNet>& net, const autograd::Context& context, int rank) {
  const auto gradients = net.rpc_sync<&ConvNet::gradients>(context.id());
  for (size_t i = 0; i < gradients.size(); ++i) {
    const std::string& name = ConvNet::names()[i];
    if (!gradients[i].defined()) {
      throw base::Exception(base::Error{
          base::ErrorKind::kInternal, "no gradient of " + name + " arrived on the parameter server",
          rank, "verify-grads"});
    }
    if (!gradients[i].isfinite().all().item<bool>()) {
      throw base::Exception(base::ErrorKind::kNotFinite,
                            "the gradient of " + name + " is not finite: try a smaller --lr");
    }
  }
}

}  // namespace

void expose_ps(rpc::Agent& agent) {
  agent.expose<&ConvNet::forward_training>("ConvNet.forward_training");
  agent.expose<&ConvNet::forward_evaluating>("ConvNet.forward_evaluating");
  agent.expose<&ConvNet::parameter_rrefs>("ConvNet.parameter_rrefs");
  agent.expose<&ConvNet::gradients>("ConvNet.gradients");
  job::expose_parameters<ConvNet>(agent, "ConvNet");
  agent.expose<&net_of_job>("ps.net");
}

void train_ps(job::Rank& rank, const PsOptions& options) {
  const c10::Device device = rank.device();
  PsData data(options);
  const auto net = rank.agent().rpc_sync<&net_of_job>("parameter_server", options.seed);
  optim::DistributedOptimizer optimizer(rank.agent(), net.rpc_sync<&ConvNet::parameter_rrefs>(), {},
                                        options.rule(), options.sharing(rank.index()));

  job::Training training(rank, data.plan());
  data.agree(training);
  training.keep("", net);
  training.keep(optimizer, ConvNet::names());
  training.note_max("staleness", 0);
  data.evaluate_in(training, [&](const at::Tensor& images) {
    return rpc::to_device(net.rpc_sync<&ConvNet::forward_evaluating>(images), device);
  });
  training.run([&](const job::Step& step) {
    const data::ImageBatch batch = data.batch(step);
    const at::Tensor targets = rpc::to_device(batch.labels, device);
    autograd::Context context(rank.agent());
    const PsForward forward = net.rpc_sync<&ConvNet::forward_training>(
        batch.images, dropout_key(options, step), options.dropout);
    const at::Tensor scores = rpc::to_device(forward.scores, device);
    const at::Tensor loss = base::traced("loss", [&] { return at::nll_loss(scores, targets); });
    autograd::backward(context, {loss});
    if (options.verify_grads) verify_gradients(net, context, rank.number());
    const uint64_t updates = optimizer.step(context);
    training.note_max("staleness", forward.staleness);
    // `delay` is the number of other trainers' updates since the forward pass. It is 0 in sync
    // mode, because all trainers share one update.
    return job::Result{loss,
                       batch.labels.numel(),
                       {{"staleness", forward.staleness},
                        {"version", forward.version},
                        {"delay", updates - forward.version - 1}}};
  });
}

void train_ps_local(job::SingleProcess& local, const PsOptions& options) {
  PsData data(options);
  const ConvNet net(options.seed, local.job().devices);
  job::SingleProcessOptimizer optimizer(options.rule(), options.mode,
                                        optim::named(ConvNet::names(), net.parameters()));

  job::SingleProcessTraining training(local, data.plan(), options.trainers);
  data.agree(training);
  training.keep("", job::part_of(net.named_parameters()));
  training.keep(optimizer);
  training.note_max("staleness", 0);
  data.evaluate_in(training, [&](const at::Tensor& images) {
    return ConvNet::forward(net.parameters(), images, nn::Dropout());
  });
  training.run(optimizer, [&](const job::Step& step) {
    const int64_t version = optimizer.updates();
    const data::ImageBatch batch = data.batch(step);
    const auto key = dropout_key(options, step);
    const at::Tensor scores = ConvNet::forward(
        net.parameters(), batch.images, key ? nn::Dropout({*key}) : nn::Dropout(), options.dropout);
    const at::Tensor targets = rpc::to_device(batch.labels, scores.device());
    const at::Tensor loss = base::traced("loss", [&] { return at::nll_loss(scores, targets); });
    return job::Result{
        loss, batch.labels.numel(), {{"staleness", 0}, {"version", version}, {"delay", 0}}};
  });
}

void predict_ps(job::Predictions& predictions, const PsOptions& options) {
  const PsData data(options, predictions.input());
  const ConvNet net(options.seed, {predictions.device()});
  predictions.load(net.named_parameters());
  // Predicts the trainers' shares in turn, so that the batches equal those of the evaluation.
  for (int trainer = 0; trainer < options.trainers; ++trainer) {
    data.each_batch(data.test(), {trainer, options.trainers}, [&](const data::ImageBatch& batch) {
      const auto& parameters = net.parameters();
      predictions.tell_labels(ConvNet::forward(parameters, batch.images, nn::Dropout()),
                              batch.labels);
    });
  }
}

}  // namespace distrain::scenario
