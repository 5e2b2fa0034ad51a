// distrain ps: a ConvNet on a parameter server, trained by the other ranks.
//
// After PyTorch's tutorial "Implementing a Parameter Server Using Distributed RPC Framework".

#include <ATen/Functions.h>

#include "conv_net.h"
#include "data.h"
#include "distrain/autograd/context.h"
#include "distrain/base/error.h"
#include "distrain/base/trace.h"
#include "distrain/optim/distributed_optimizer.h"
#include "distrain/rpc/to_device.h"

namespace distrain::scenario {

namespace {

/// On the server: returns the net. The first call creates it.
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
    // Counts updates by others since the forward pass: none in sync mode, where all share one.
    return job::Result{loss,
                       batch.labels.numel(),
                       {{"staleness", forward.staleness},
                        {"version", forward.version},
                        {"delay", updates - forward.version - 1}}};
  });
}

}  // namespace distrain::scenario
