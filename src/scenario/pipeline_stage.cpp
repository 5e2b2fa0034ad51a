#include "pipeline_stage.h"

#include <algorithm>
#include <thread>

#include <ATen/Functions.h>

#include "distrain/autograd/context.h"
#include "distrain/base/clock.h"

namespace distrain::scenario {

namespace {

/// A backward pass from its turn to its end.
struct BackwardStep {
  Turns::TurnPtr turn;
  base::TimePoint begun;
};

constexpr auto kAsLongAsItTakes = std::chrono::nanoseconds::max();  // or until its peer dies

void sleep_for(double seconds) {
  std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
}

}  // namespace

PipelineStage::PipelineStage(const std::string& model, int64_t classes, int64_t first_block,
                             int64_t last_block, uint64_t seed)
    : module_(model, classes, {static_cast<size_t>(first_block), static_cast<size_t>(last_block)},
              seed),
      classes_(classes),
      is_last_(static_cast<size_t>(last_block) == whole_resnet(model).last) {}

void PipelineStage::begin_batch(std::vector<PipelineStep> row, int64_t batch_size) {
  turns_.begin(std::move(row));
  batch_context_ = rpc::current_context();
  batch_size_ = batch_size;
  std::lock_guard lock(mutex_);
  held_ = 0;
  report_ = {};
}

StageReport PipelineStage::end_batch() {
  std::lock_guard lock(mutex_);
  return report_;
}

base::Future<at::Tensor> PipelineStage::forward(rpc::CallContext& call,
                                                const rpc::RRef<at::Tensor>& input,
                                                int64_t micro_batch) {
  rpc::Agent& agent = call.agent;
  return input.to_here_async(kAsLongAsItTakes)
      .then(agent.executor(), [self = shared_from_this(), &agent, micro_batch](at::Tensor& x) {
        return self->turns_.enter({PipelineStep::Kind::kForward, micro_batch})
            .then(agent.executor(), [self, &agent, micro_batch, x](Turns::TurnPtr& turn) {
              return self->compute(agent, x, micro_batch, turn);
            });
      });
}

at::Tensor PipelineStage::compute(rpc::Agent& agent, const at::Tensor& input, int64_t micro_batch,
                                  const Turns::TurnPtr& turn) {
  const base::TimePoint begun = base::Clock::now();
  hold(+1);
  const double share = static_cast<double>(input.size(0)) / static_cast<double>(batch_size_);
  const double sleep_s = agent.local<StageSettings>().sleep_s * share;
  if (sleep_s > 0) sleep_for(sleep_s);
  const at::Tensor output = sleep_s > 0 ? stand_in(input) : module_.forward(input);

  const auto step = std::make_shared<BackwardStep>();
  const auto admit = [self = shared_from_this(), &agent, micro_batch, sleep_s, step] {
    return self->turns_.enter({PipelineStep::Kind::kBackward, micro_batch})
        .then(agent.executor(), [self, step, sleep_s](Turns::TurnPtr& own) {
          step->turn = std::move(own);
          step->begun = base::Clock::now();
          if (sleep_s > 0) sleep_for(sleep_s);
        });
  };
  const auto end = [self = shared_from_this(), &agent, step, from = rpc::current_context(),
                    to = batch_context_] {
    autograd::move_gradients(agent, from, to);
    self->hold(-1);
    self->add_compute(step->begun);
    step->turn->done();
  };
  autograd::guard_pass(agent, admit, end);
  add_compute(begun);
  turn->done();
  return output;
}

// Costs nothing, and has a gradient for its input and for one parameter.
at::Tensor PipelineStage::stand_in(const at::Tensor& input) const {
  const at::Tensor first = input.flatten(1).narrow(1, 0, 1);
  const at::Tensor parameter = module_.parameters()[0].flatten()[0];
  return (first + parameter).expand({input.size(0), is_last_ ? classes_ : 1});
}

void PipelineStage::hold(int64_t micro_batches) {
  std::lock_guard lock(mutex_);
  held_ += micro_batches;
  report_.activations = std::max(report_.activations, held_);
}

void PipelineStage::add_compute(base::TimePoint begun) {
  std::lock_guard lock(mutex_);
  report_.compute_s += base::seconds_since(begun);
}

std::vector<rpc::RRef<at::Tensor>> PipelineStage::parameter_rrefs(rpc::CallContext& call) {
  std::vector<rpc::RRef<at::Tensor>> rrefs;
  for (const at::Tensor& parameter : module_.parameters()) {
    rrefs.push_back(call.agent.make_rref(parameter));
  }
  return rrefs;
}

NamedTensors PipelineStage::gradients(rpc::CallContext& call) {
  NamedTensors named;
  for (size_t i = 0; i < module_.parameters().size(); ++i) {
    named[module_.parameter_names()[i]] =
        autograd::gradient(call.agent, rpc::current_context(), module_.parameters()[i]);
  }
  return named;
}

void PipelineStage::expose(rpc::Agent& agent) {
  agent.expose_class<PipelineStage>("PipelineStage");
  agent.expose<&PipelineStage::begin_batch>("PipelineStage.begin_batch");
  agent.expose<&PipelineStage::end_batch>("PipelineStage.end_batch");
  agent.expose<&PipelineStage::forward>("PipelineStage.forward");
  agent.expose<&PipelineStage::parameter_rrefs>("PipelineStage.parameter_rrefs");
  agent.expose<&PipelineStage::gradients>("PipelineStage.gradients");
  agent.expose<&PipelineStage::load>("PipelineStage.load");
}

}  // namespace distrain::scenario
