// distrain ps: a ConvNet on a parameter server, trained by the other ranks.
//
// After PyTorch's tutorial "Implementing a Parameter Server Using Distributed RPC Framework".

#include "ps.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include <ATen/Functions.h>
#include <c10/util/accumulate.h>

namespace distrain::scenario {

namespace {

nn::Dropout dropout_of(std::optional<uint64_t> key) {
  return key ? nn::Dropout({*key}) : nn::Dropout();
}

// The shapes of the parameters in the order of ConvNet::names(): a weight, its bias, and so on.
const std::vector<std::vector<int64_t>> kShapes = {{32, 1, 3, 3}, {32},  {64, 32, 3, 3}, {64},
                                                   {128, 9216},   {128}, {10, 128},      {10}};

}  // namespace

std::vector<size_t> spread_by_size(const std::vector<int64_t>& sizes, int servers) {
  std::vector<std::pair<int64_t, size_t>> order;  // of negated sizes, so the largest comes first
  for (size_t i = 0; i < sizes.size(); ++i) order.emplace_back(-sizes[i], i);
  std::ranges::sort(order);
  std::vector<int64_t> held(static_cast<size_t>(servers));
  std::vector<size_t> server_of_each(sizes.size());
  for (const auto& [negated, tensor] : order) {
    const auto least = std::ranges::min_element(held);
    *least -= negated;
    server_of_each[tensor] = static_cast<size_t>(least - held.begin());
  }
  return server_of_each;
}

ConvNet::ConvNet(uint64_t seed, const std::vector<c10::Device>& devices, int servers, size_t server)
    : servers_(servers) {
  const at::Generator generator = nn::keyed_generator({seed});
  const std::vector<size_t> server_of = server_of_each(servers);
  for (size_t i = 0; i < kShapes.size(); ++i) {
    const std::vector<int64_t>& weight = kShapes[i - i % 2];
    const auto inputs = static_cast<double>(c10::multiply_integers(weight) / weight[0]);
    const c10::Device device = i < 4 ? devices.front() : devices.back();
    // Draws the values of other servers' parameters, too, because all come from one generator.
    at::Tensor parameter = nn::uniform(kShapes[i], 1.0 / std::sqrt(inputs), generator, device);
    if (server_of[i] != server) continue;
    names_.push_back(names()[i]);
    parameters_.push_back(parameter.requires_grad_());
  }
}

std::vector<size_t> ConvNet::server_of_each(int servers) {
  std::vector<int64_t> sizes;
  for (const auto& shape : kShapes) sizes.push_back(c10::multiply_integers(shape));
  return spread_by_size(sizes, servers);
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

PsPass ConvNet::forward_training(rpc::CallContext& call, at::Tensor images,
                                 std::optional<uint64_t> dropout_key,
                                 std::optional<double> dropout_rate) {
  // Trainer t is rank t + servers_. Read `progress` before `versions`: an update between the two is
  // then not counted although `versions` has it, but no update is counted that `versions` lacks.
  const optim::Progress progress =
      optim::progress_of(call.agent, parameters_[0], call.caller.rank - servers_);
  auto tensors = autograd::current_versions(call.agent, parameters_);
  if (servers_ == 1) tensors = {forward(tensors, images, dropout_of(dropout_key), dropout_rate)};
  for (at::Tensor& each : tensors) each = rpc::for_rank(call.agent, call.caller.rank, each);
  return {std::move(tensors), progress.updates, progress.lead};
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

/// Returns the net of server number `server`. The first call creates it.
rpc::RRef<ConvNet> net_of_job(rpc::CallContext& call, uint64_t seed, int servers, size_t server) {
  const auto& devices = call.agent.local<job::Job>().devices;
  return call.agent.make_rref(call.agent.shared<ConvNet>(seed, devices, servers, server));
}

/// The net as a trainer uses it. A single server runs the passes of the net. If there are several
/// servers, the trainer fetches versions of their parameters and runs the passes itself.
class RemoteNet {
 public:
  RemoteNet(const job::Rank& rank, uint64_t seed) : rank_(rank) {
    const job::Roles::Role& role = rank.roles().named("parameter_server");
    server_of_each_ = ConvNet::server_of_each(role.count);
    for (int i = 0; i < role.count; ++i) {
      nets_.push_back(rank.agent().rpc_sync<&net_of_job>(role.first + i, seed, role.count, i));
    }
  }

  void keep_in(job::Training& training) const {
    if (nets_.size() == 1) return training.keep("", nets_[0]);
    std::vector<std::vector<std::string>> names(nets_.size());
    for (size_t i = 0; i < server_of_each_.size(); ++i) {
      names[server_of_each_[i]].push_back(ConvNet::names()[i]);
    }
    for (size_t i = 0; i < nets_.size(); ++i) training.keep("", nets_[i], names[i]);
  }

  std::vector<rpc::RRef<at::Tensor>> parameters() const {
    return ask_all<&ConvNet::parameter_rrefs, rpc::RRef<at::Tensor>>(std::identity());
  }

  PsPass forward_training(const at::Tensor& images, std::optional<uint64_t> key,
                          std::optional<double> rate) const {
    if (nets_.size() == 1) return nets_[0].rpc_sync<&ConvNet::forward_training>(images, key, rate);
    PsPass pass = fetch();
    pass.tensors = {ConvNet::forward(pass.tensors, images, dropout_of(key), rate)};
    return pass;
  }

  /// Returns the forward passes of an evaluation, for which several servers send their parameters
  /// once.
  PsData::Forward begin_evaluation() const {
    if (nets_.size() == 1) {
      return [this](const at::Tensor& images) {
        const auto scores = nets_[0].rpc_sync<&ConvNet::forward_evaluating>(images);
        return rpc::to_device(scores, rank_.device());
      };
    }
    return [parameters = fetch().tensors](const at::Tensor& images) {
      return ConvNet::forward(parameters, images, nn::Dropout());
    };
  }

  /// Checks, as the tutorial does, that the gradients of this step are on the servers and finite.
  void verify_gradients(const autograd::Context& context) const {
    const auto gradients = ask_all<&ConvNet::gradients>(std::identity(), context.id());
    for (size_t i = 0; i < gradients.size(); ++i) {
      const std::string& name = ConvNet::names()[i];
      if (!gradients[i].defined()) {
        const std::string why = "no gradient of " + name + " arrived on the parameter server";
        throw base::Exception(
            base::Error{base::ErrorKind::kInternal, why, rank_.number(), "verify-grads"});
      }
      if (!gradients[i].isfinite().all().item<bool>()) {
        throw base::Exception(base::ErrorKind::kNotFinite,
                              "the gradient of " + name + " is not finite: try a smaller --lr");
      }
    }
  }

 private:
  /// Returns versions of all parameters on this rank's device, from several servers.
  PsPass fetch() const {
    PsPass pass{{}, ~uint64_t{0}};
    const auto versions_in = [&pass](const PsPass& share) {
      pass.version = std::min(pass.version, share.version);
      pass.staleness = std::max(pass.staleness, share.staleness);
      return share.tensors;
    };
    pass.tensors = ask_all<&ConvNet::forward_training>(
        versions_in, at::Tensor(), std::optional<uint64_t>(), std::optional<double>());
    for (at::Tensor& each : pass.tensors) each = rpc::to_device(each, rank_.device());
    return pass;
  }

  /// Calls `method` on all servers concurrently. `list_in` returns the list in a reply. Returns the
  /// elements of all lists in the order of ConvNet::names().
  template <auto method, class T = at::Tensor, class... Args>
  std::vector<T> ask_all(const auto& list_in, const Args&... args) const {
    std::vector<decltype(nets_[0].template rpc_async<method>(args...))> replies;
    for (const auto& net : nets_) replies.push_back(net.template rpc_async<method>(args...));
    std::vector<std::vector<T>> lists;
    for (const auto& reply : replies) lists.push_back(list_in(reply.take()));
    std::vector<size_t> used(lists.size());
    std::vector<T> all;
    for (const size_t server : server_of_each_) all.push_back(lists[server].at(used[server]++));
    return all;
  }

  const job::Rank& rank_;
  std::vector<rpc::RRef<ConvNet>> nets_;  // one on each server
  std::vector<size_t> server_of_each_;    // of each parameter, in the order of ConvNet::names()
};

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
  const RemoteNet net(rank, options.seed);
  optim::DistributedOptimizer optimizer(rank.agent(), net.parameters(), {}, options.rule(),
                                        options.sharing(rank.index()));

  job::Training training(rank, data.plan());
  data.agree(training);
  net.keep_in(training);
  training.keep(optimizer, ConvNet::names());
  training.note_max("staleness", 0);
  data.evaluate_in(training, [&] { return net.begin_evaluation(); });
  training.run([&](const job::Step& step) {
    job::StepPasses passes(rank.agent());
    PsPass first;
    job::Result result;
    for (const PsPart& part : data.parts(step)) {
      const autograd::Context& context = passes.begin();
      const PsPass forward =
          net.forward_training(part.batch.images, part.dropout_key, options.dropout);
      const at::Tensor loss = part.loss(rpc::to_device(forward.tensors[0], device));
      passes.backward(loss);
      if (options.verify_grads) net.verify_gradients(context);
      if (passes.contexts().size() == 1) first = forward;
      result.add(loss, part.batch.labels.numel());
    }
    const uint64_t updates = optimizer.step(passes.contexts());
    training.note_max("staleness", first.staleness);
    // `delay` is the number of other trainers' updates since the first forward pass. It is 0 in
    // sync mode, because all trainers share one update.
    result.more = {{"staleness", first.staleness},
                   {"version", first.version},
                   {"delay", updates - first.version - 1}};
    return result;
  });
}

void train_ps_local(job::SingleProcess& local, const PsOptions& options) {
  PsData data(options);
  const ConvNet net(options.seed, local.job().devices);
  job::SingleProcessOptimizer optimizer(options.rule(), options.mode,
                                        optim::named(ConvNet::names(), net.parameters()));

  job::SingleProcessTraining training(local, data.plan());
  data.agree(training);
  training.keep("", job::part_of(net.named_parameters()));
  training.keep(optimizer);
  training.note_max("staleness", 0);
  data.evaluate_in(training, [&] {
    return [&net](const at::Tensor& images) {
      return ConvNet::forward(net.parameters(), images, nn::Dropout());
    };
  });
  training.run(optimizer, [&](const job::Step& step) {
    const int64_t version = optimizer.updates();
    job::Result result{.more = {{"staleness", 0}, {"version", version}, {"delay", 0}},
                       .has_gradients = true};
    for (const PsPart& part : data.parts(step)) {
      const at::Tensor loss = part.loss(ConvNet::forward(
          net.parameters(), part.batch.images, dropout_of(part.dropout_key), options.dropout));
      base::traced("backward", [&] { loss.backward(); });
      result.add(loss, part.batch.labels.numel());
    }
    return result;
  });
}

void predict_ps(job::Predictions& predictions, const PsOptions& options) {
  const PsData data(options, predictions.input());
  const ConvNet net(options.seed, {predictions.device()});
  predictions.load(net.named_parameters());
  // Predicts the trainers' shares in turn, so that the batches equal those of the evaluation.
  for (int trainer = 0; trainer < options.trainers; ++trainer) {
    data.each_batch(data.test(), {trainer, options.trainers}, [&](const data::ImageBatch& batch) {
      predictions.tell_labels(ConvNet::forward(net.parameters(), batch.images, nn::Dropout()),
                              batch.labels);
    });
  }
}

}  // namespace distrain::scenario
