#include "stage.h"

#include <algorithm>
#include <thread>

#include <ATen/Functions.h>
#include <torch/csrc/autograd/grad_mode.h>

#include "distrain/autograd/context.h"
#include "distrain/base/clock.h"
#include "distrain/base/trace.h"
#include "distrain/data/named_tensors.h"
#include "distrain/rpc/device.h"
#include "distrain/rpc/error.h"
#include "distrain/rpc/placed.h"

namespace distrain::scenario {

namespace {

constexpr int kMaster = 0;

void sleep_for(double seconds) {
  const base::TraceScope scope("sleep");
  std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
}

/// Pixels of the side of what this block takes. The stem halves images twice, the first block of
/// each layer from layer2 on once.
int64_t side_before(const std::string& model, size_t block, int64_t image_size) {
  const std::vector<std::string> names = models::resnet_blocks(model);
  int64_t side = image_size;
  for (size_t i = 0; i < block; ++i) {
    const bool halves = names[i].ends_with(".0") && names[i] != "layer1.0";
    for (int times = i == 0 ? 2 : halves ? 1 : 0; times > 0; --times) side = (side + 1) / 2;
  }
  return side;
}

}  // namespace

StageJob::~StageJob() {
  for (const auto& weak : stages_) {
    if (const auto stage = weak.lock()) {
      stage->fail({base::ErrorKind::kCancelled, "the job has ended", -1, {}});
    }
  }
}

void StageJob::add(std::weak_ptr<PipelineStage> stage) {
  std::lock_guard lock(mutex_);
  const auto own = stage.lock();
  std::erase_if(stages_, [&](const auto& known) {
    const auto other = known.lock();
    return !other || other == own;
  });
  stages_.push_back(std::move(stage));
}

PipelineStage::PipelineStage(const std::string& model, int64_t classes, int64_t image_size,
                             int64_t first_block, int64_t last_block, uint64_t seed,
                             const std::string& device)
    : module_(model, classes, {static_cast<size_t>(first_block), static_cast<size_t>(last_block)},
              seed, c10::Device(device)),
      classes_(classes),
      input_side_(side_before(model, static_cast<size_t>(first_block), image_size)),
      is_first_(first_block == 0),
      is_last_(static_cast<size_t>(last_block) == models::whole_resnet(model).last) {}

void PipelineStage::begin_batch(rpc::CallContext& call, std::vector<PipelineStep> row,
                                int64_t batch_size) {
  call.agent.local<StageJob>().add(weak_from_this());
  turns_.begin(std::move(row));
  batch_context_ = rpc::current_context();
  batch_size_ = batch_size;
  std::lock_guard lock(mutex_);
  held_ = 0;
  report_ = {};
  if (!rpc::is_accelerator(device())) report_.compute_s = 0;
}

StageReport PipelineStage::end_batch() {
  rpc::StreamPoint::mark(device()).wait_on_host();
  std::lock_guard lock(mutex_);
  return report_;
}

base::Future<at::Tensor> PipelineStage::forward(rpc::CallContext& call,
                                                const rpc::RRef<at::Tensor>& input,
                                                int64_t micro_batch) {
  rpc::Agent& agent = call.agent;
  const auto self = shared_from_this();
  const base::Future<at::Tensor> fetched = input.to_here_async(kAsLongAsItTakes);
  fetched.on_complete(agent.inline_executor(), [self](base::Result<at::Tensor>& x) {
    if (!x.ok()) self->fail(x.error());  // its turn would never come
  });
  return fetched.then(agent.executor(), [self, &agent, micro_batch](at::Tensor& x) {
    return self->turns_.enter({PipelineStep::Kind::kForward, micro_batch})
        .then(agent.executor(), [self, &agent, micro_batch, x](Turns::TurnPtr& turn) {
          try {
            return self->compute(agent, x, micro_batch, turn);
          } catch (...) {
            base::Error error = rpc::error_in_flight(base::ErrorKind::kRemoteFailed);
            if (error.rank < 0) error.rank = agent.rank();
            error.op = "PipelineStage.forward";
            turn->fail(error);
            throw base::Exception(error);
          }
        });
  });
}

at::Tensor PipelineStage::compute(rpc::Agent& agent, const at::Tensor& input, int64_t micro_batch,
                                  const Turns::TurnPtr& turn) {
  const base::TraceScope scope("forward", "micro_batch", micro_batch);
  const base::TimePoint begun = base::Clock::now();
  hold(+1);
  const double share = static_cast<double>(input.size(0)) / static_cast<double>(batch_size_);
  const double sleep_s = agent.local<StageJob>().sleep_s * share;
  if (sleep_s > 0) sleep_for(sleep_s);
  const at::Tensor output = sleep_s > 0 ? stand_in(input) : module_.forward(full_size(input));
  autograd::guard_pass(agent, guard(agent, micro_batch, sleep_s));
  add_compute(begun);
  turn->done();
  return rpc::for_rank(agent, next_rank(agent), output);
}

int PipelineStage::next_rank(const rpc::Agent& agent) const {
  return is_last_ ? kMaster : agent.rank() + 1;
}

base::Future<at::Tensor> PipelineStage::infer(rpc::CallContext& call,
                                              const rpc::RRef<at::Tensor>& input) {
  return input.to_here_async(kAsLongAsItTakes)
      .then(call.agent.executor(), [self = shared_from_this(), &agent = call.agent](at::Tensor& x) {
        const at::NoGradGuard no_grad;
        return rpc::for_rank(agent, self->next_rank(agent), self->module_.forward(x, false));
      });
}

// Of the backward pass of the current context through this stage.
autograd::PassGuard PipelineStage::guard(rpc::Agent& agent, int64_t micro_batch, double sleep_s) {
  struct Step {
    Turns::TurnPtr turn;
    base::TimePoint begun;
  };
  const auto self = shared_from_this();
  const auto step = std::make_shared<Step>();
  autograd::PassGuard guard;
  guard.admit = [self, &agent, micro_batch, sleep_s, step] {
    return self->turns_.enter({PipelineStep::Kind::kBackward, micro_batch})
        .then(agent.executor(), [step, sleep_s](Turns::TurnPtr& turn) {
          step->turn = std::move(turn);
          step->begun = base::Clock::now();
          if (sleep_s > 0) sleep_for(sleep_s);
        });
  };
  guard.on_end = [self, &agent, step, from = rpc::current_context(), to = batch_context_] {
    autograd::move_gradients(agent, from, to);
    self->hold(-1);
    self->add_compute(step->begun);
    step->turn->done();
  };
  guard.on_failure = [self](const base::Error& error) { self->fail(error); };
  return guard;
}

// In place of the output, for a stage that sleeps: next to nothing, with a gradient for its input
// and for one parameter.
at::Tensor PipelineStage::stand_in(const at::Tensor& input) const {
  const auto size = [](const auto& named) { return named.second.numel(); };
  const at::Tensor& smallest = std::ranges::min_element(module_.parameters(), {}, size)->second;
  const at::Tensor first = rpc::placed(input, smallest.device()).flatten(1).narrow(1, 0, 1);
  return (first + smallest[0]).expand({input.size(0), is_last_ ? classes_ : 1});
}

// The stage before may have slept.
at::Tensor PipelineStage::full_size(const at::Tensor& input) const {
  if (is_first_ || input.dim() != 2) return input;
  const int64_t channels = module_.parameters()[0].second.size(1);
  return input.view({-1, 1, 1, 1}).expand({-1, input_side_, input_side_, channels}).contiguous();
}

void PipelineStage::hold(int64_t micro_batches) {
  std::lock_guard lock(mutex_);
  held_ += micro_batches;
  report_.activations = std::max(report_.activations, held_);
}

void PipelineStage::add_compute(base::TimePoint begun) {
  std::lock_guard lock(mutex_);
  if (report_.compute_s) *report_.compute_s += base::seconds_since(begun);
}

std::vector<rpc::RRef<at::Tensor>> PipelineStage::parameter_rrefs(rpc::CallContext& call) {
  std::vector<rpc::RRef<at::Tensor>> rrefs;
  for (const auto& [name, parameter] : module_.parameters()) {
    rrefs.push_back(call.agent.make_rref(parameter));
  }
  return rrefs;
}

std::vector<std::string> PipelineStage::parameter_names() const {
  std::vector<std::string> names;
  for (const auto& [name, parameter] : module_.parameters()) names.push_back(name);
  return names;
}

data::NamedTensors PipelineStage::gradients(rpc::CallContext& call) {
  data::NamedTensors named;
  for (const auto& [name, parameter] : module_.parameters()) {
    named[name] = autograd::gradient(call.agent, rpc::current_context(), parameter);
  }
  return data::on_host(named);
}

void PipelineStage::expose(rpc::Agent& agent) {
  agent.expose_class<PipelineStage>("PipelineStage");
  agent.expose<&PipelineStage::begin_batch>("PipelineStage.begin_batch");
  agent.expose<&PipelineStage::end_batch>("PipelineStage.end_batch");
  agent.expose<&PipelineStage::forward>("PipelineStage.forward");
  agent.expose<&PipelineStage::infer>("PipelineStage.infer");
  agent.expose<&PipelineStage::parameter_rrefs>("PipelineStage.parameter_rrefs");
  agent.expose<&PipelineStage::parameter_names>("PipelineStage.parameter_names");
  agent.expose<&PipelineStage::gradients>("PipelineStage.gradients");
  agent.expose<&PipelineStage::state>("PipelineStage.state");
  agent.expose<&PipelineStage::load>("PipelineStage.load");
}

}  // namespace distrain::scenario
