#include "stage.h"

#include <torch/csrc/autograd/grad_mode.h>

#include "distrain/rpc/to_device.h"
#include "distrain/store/named_tensors.h"

namespace distrain::scenario {

namespace {

void sleep_for(double seconds) {
  const base::TraceScope scope("sleep");
  std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
}

/// Returns the width of a block's input. The stem divides the width by 4, layer2 to layer4 by 2.
int64_t side_before(const std::string& model, size_t block, int64_t image_size) {
  const std::vector<std::string> names = resnet_blocks(model);
  int64_t stride = block > 0 ? 4 : 1;
  for (size_t i = 1; i < block; ++i) {
    if (names[i].ends_with(".0") && names[i] != "layer1.0") stride *= 2;
  }
  return (image_size + stride - 1) / stride;
}

}  // namespace

PipelineStage::PipelineStage(const std::string& model, int64_t classes, int64_t image_size,
                             int64_t first_block, int64_t last_block, uint64_t seed,
                             const std::string& device)
    : module_(model, classes, {static_cast<size_t>(first_block), static_cast<size_t>(last_block)},
              seed, c10::Device(device)),
      classes_(classes),
      input_side_(side_before(model, static_cast<size_t>(first_block), image_size)),
      is_first_(first_block == 0),
      is_last_(static_cast<size_t>(last_block) == whole_resnet(model).last) {}

// Copies buffers, because passes write to them in place. Does not copy parameters: while a snapshot
// shares a parameter's memory, an update writes the new values to other memory.
rpc::RRef<rpc::NamedTensors> PipelineStage::hold_state(rpc::CallContext& call) const {
  rpc::NamedTensors all = store::on_host(module_.state());
  for (const auto& [name, buffer] : module_.buffers()) {
    if (buffer.is_cpu()) all.at(name) = buffer.clone();
  }
  return call.agent.make_rref(std::move(all));
}

at::Tensor PipelineStage::compute(const at::Tensor& input) const {
  if (sleep_s_ > 0) return sleep(input, sleep_s_ * static_cast<double>(input.size(0)));
  if (is_first_ || input.dim() != 2) return module_.forward(input);
  // A sleeping previous stage sends a small output. Expand it to the shape of this stage's input.
  const int64_t channels = module_.parameters()[0].second.size(1);
  return module_.forward(
      input.view({-1, 1, 1, 1}).expand({-1, input_side_, input_side_, channels}).contiguous());
}

// Sleeps in both passes. The output is cheap, but gives gradients to the input and to a parameter.
at::Tensor PipelineStage::sleep(const at::Tensor& input, double seconds) const {
  sleep_for(seconds);
  const auto size = [](const auto& named) { return named.second.numel(); };
  const at::Tensor& smallest = std::ranges::min_element(module_.parameters(), {}, size)->second;
  const at::Tensor first = rpc::to_device(input, smallest.device()).flatten(1).narrow(1, 0, 1);
  at::Tensor output = (first + smallest[0]).expand({input.size(0), is_last_ ? classes_ : 1});
  output.register_hook([seconds](const at::Tensor&) { sleep_for(seconds); });
  return output;
}

base::Future<at::Tensor> PipelineStage::infer(rpc::CallContext& call,
                                              const rpc::RRef<at::Tensor>& input) {
  return input.timeout(std::chrono::nanoseconds::max())
      .to_here_async()
      .then(call.agent.executor(), [self = shared_from_this(), &agent = call.agent](at::Tensor& x) {
        const at::NoGradGuard no_grad;
        return rpc::for_rank(agent, self->next_rank(agent), self->module_.forward(x, false));
      });
}

std::vector<rpc::RRef<at::Tensor>> PipelineStage::parameter_rrefs(rpc::CallContext& call) {
  std::vector<rpc::RRef<at::Tensor>> rrefs;
  for (const auto& [name, parameter] : module_.parameters()) {
    rrefs.push_back(call.agent.make_rref(parameter));
  }
  return rrefs;
}

void PipelineStage::expose(rpc::Agent& agent) {
  nn::StagePasses::install(agent);
  agent.expose_class<PipelineStage>("PipelineStage");
  agent.expose<&PipelineStage::begin_batch>("PipelineStage.begin_batch");
  agent.expose<&PipelineStage::end_batch>("PipelineStage.end_batch");
  agent.expose<&PipelineStage::forward>("PipelineStage.forward");
  agent.expose<&PipelineStage::infer>("PipelineStage.infer");
  agent.expose<&PipelineStage::parameter_rrefs>("PipelineStage.parameter_rrefs");
  agent.expose<&PipelineStage::hold_state>("PipelineStage.hold_state");
  agent.expose<&PipelineStage::load>("PipelineStage.load");
}

}  // namespace distrain::scenario
