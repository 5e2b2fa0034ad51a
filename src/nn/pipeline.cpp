#include "distrain/nn/pipeline.h"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include "distrain/autograd/context.h"
#include "distrain/rpc/to_device.h"
#include "stage_order.h"

namespace distrain::nn {

namespace {

using torch::autograd::Node;

constexpr auto kAsLongAsItTakes = std::chrono::nanoseconds::max();

std::shared_ptr<Node> node_of(const at::Tensor& tensor) {
  return tensor.requires_grad() ? torch::autograd::impl::gradient_edge(tensor).function : nullptr;
}

/// Returns true if the graph of `output` reaches `node`. A null `node` stands for any node.
bool reaches(const at::Tensor& output, const Node* node) {
  const std::shared_ptr<Node> root = node_of(output);
  if (!root || !node) return root != nullptr;
  std::unordered_set<const Node*> seen = {root.get()};
  for (std::vector<const Node*> left = {root.get()}; !left.empty();) {
    const Node* const next = left.back();
    left.pop_back();
    if (next == node) return true;
    for (const auto& edge : next->next_edges()) {
      if (edge.is_valid() && seen.insert(edge.function.get()).second) {
        left.push_back(edge.function.get());
      }
    }
  }
  return false;
}

}  // namespace

// The steps of a stage in one batch. A step belongs to the batch of its forward pass. If the step
// comes after a later batch has begun, it does not affect the later batch.
struct StagePasses::Batch : std::enable_shared_from_this<Batch> {
  Batch(std::string function_in, std::vector<PipelineStep> row)
      : function(std::move(function_in)), steps(row), order(std::make_shared<StageOrder>(row)) {}

  at::Tensor pass(rpc::Agent& agent, const at::Tensor& input, int64_t micro_batch,
                  const Compute& compute, const StageOrder::AdmissionPtr& admission);
  autograd::PassGuard guard(rpc::Agent& agent, int64_t micro_batch);

  /// Returns true if `steps` has a step of this micro-batch in this autograd context.
  bool has(int64_t micro_batch, uint64_t context_of_step) const {
    return std::ranges::any_of(steps, [&](const PipelineStep& step) {
      return step.micro_batch == micro_batch &&
             (step.context == 0 || step.context == context_of_step);
    });
  }
  void count_activations(int64_t change) {
    std::lock_guard lock(mutex);
    activations += change;
    report.activations = std::max(report.activations, activations);
  }
  void add_compute(base::TimePoint begun) {
    std::lock_guard lock(mutex);
    if (report.compute_s) *report.compute_s += base::seconds_since(begun);
  }

  const std::string function;
  const std::vector<PipelineStep> steps;
  const std::shared_ptr<StageOrder> order;
  uint64_t context = 0;  // backward passes move their gradients to this context
  c10::Device device = c10::kCPU;
  std::mutex mutex;         // guards `activations` and `report`
  int64_t activations = 0;  // micro-batches between their forward and backward passes
  StageReport report;
};

struct StagePasses::State {
  std::shared_ptr<Batch> current() {
    std::lock_guard lock(mutex);
    return batch;
  }

  std::mutex mutex;
  std::shared_ptr<Batch> batch;  // guarded by `mutex`
};

// Fails waiting steps when the agent ends. Otherwise the steps would keep their stages alive.
class StagePasses::OfAgent {
 public:
  ~OfAgent() {
    for (const auto& weak : stages_) {
      if (const auto stage = weak.lock()) {
        stage->current()->order->fail({base::ErrorKind::kCancelled, "the job has ended"});
      }
    }
  }
  void add(const std::shared_ptr<State>& stage) {
    std::lock_guard lock(mutex_);
    std::erase_if(stages_, [&](const auto& known) {
      const auto other = known.lock();
      return !other || other == stage;
    });
    stages_.push_back(stage);
  }

 private:
  std::mutex mutex_;
  std::vector<std::weak_ptr<State>> stages_;
};

void StagePasses::install(rpc::Agent& agent) { agent.provide(std::make_shared<OfAgent>()); }

StagePasses::StagePasses(std::string function) : state_(std::make_shared<State>()) {
  state_->batch = std::make_shared<Batch>(std::move(function), std::vector<PipelineStep>());
}

void StagePasses::begin(rpc::Agent& agent, std::vector<PipelineStep> row) {
  agent.local<OfAgent>().add(state_);
  auto batch = std::make_shared<Batch>(state_->current()->function, std::move(row));
  batch->context = rpc::current_context();
  batch->device = agent.device();
  if (!rpc::is_accelerator(batch->device)) batch->report.compute_s = 0;
  {
    std::lock_guard lock(state_->mutex);
    batch.swap(state_->batch);
  }
  batch->order->fail({base::ErrorKind::kCancelled, "another batch has begun"});
}

StageReport StagePasses::end() {
  const std::shared_ptr<Batch> batch = state_->current();
  rpc::StreamPoint::mark(batch->device).wait_on_host();
  std::lock_guard lock(batch->mutex);
  return batch->report;
}

base::Future<at::Tensor> StagePasses::forward(rpc::Agent& agent, const rpc::RRef<at::Tensor>& input,
                                              int64_t micro_batch, int next_rank, Compute compute) {
  const std::shared_ptr<Batch> batch = state_->current();
  if (!batch->has(micro_batch, rpc::current_context())) {
    throw base::Exception(base::Error{base::ErrorKind::kCancelled,
                                      "micro-batch " + std::to_string(micro_batch) +
                                          " is of another batch than this stage works on",
                                      agent.rank(), batch->function});
  }
  const base::Future<at::Tensor> fetched = input.timeout(kAsLongAsItTakes).to_here_async();
  fetched.on_complete(agent.inline_executor(), [batch](base::Result<at::Tensor>& x) {
    if (!x.ok()) batch->order->fail(x.error());  // without its input the step cannot run
  });
  const auto run = [batch, &agent, micro_batch, next_rank, compute = std::move(compute)](
                       const at::Tensor& x, const StageOrder::AdmissionPtr& admission) {
    try {
      return rpc::for_rank(agent, next_rank,
                           batch->pass(agent, x, micro_batch, compute, admission));
    } catch (...) {
      base::Error error =
          base::with_origin(rpc::error_in_flight(base::ErrorKind::kRemoteFailed), agent.rank());
      error.op = batch->function;
      admission->fail(error);
      throw base::Exception(error);
    }
  };
  return fetched.then(agent.executor(), [batch, &agent, micro_batch, run](at::Tensor& x) {
    return batch->order->admit(PipelineStep::Kind::kForward, micro_batch)
        .then(agent.executor(),
              [x, run](StageOrder::AdmissionPtr& admission) { return run(x, admission); });
  });
}

at::Tensor StagePasses::Batch::pass(rpc::Agent& agent, const at::Tensor& input, int64_t micro_batch,
                                    const Compute& compute,
                                    const StageOrder::AdmissionPtr& admission) {
  const base::TraceScope scope("forward", "micro_batch", micro_batch);
  const base::TimePoint begun = base::Clock::now();
  count_activations(+1);
  const std::shared_ptr<Node> source = node_of(input);
  at::Tensor output = compute(input);
  if (!reaches(output, source.get())) {
    base::invalid(
        "the stage on rank " + std::to_string(agent.rank()) + " cuts the graph: " +
        (source ? "its output does not depend on its input" : "its output requires no gradient") +
        ", so its backward pass would never come (detach() or a NoGradGuard?)");
  }
  autograd::guard_pass(agent, guard(agent, micro_batch));
  add_compute(begun);
  admission->done();
  return output;
}

// Returns the guard of the backward pass in the current autograd context. Several messages may
// bring gradients of the pass, so admit() may be called more than once.
autograd::PassGuard StagePasses::Batch::guard(rpc::Agent& agent, int64_t micro_batch) {
  struct Step {
    std::mutex mutex;
    base::Future<void> admitted;  // guarded by `mutex`
    StageOrder::AdmissionPtr admission;
    base::TimePoint begun;
  };
  const auto self = shared_from_this();
  const auto step = std::make_shared<Step>();
  autograd::PassGuard guard;
  guard.admit = [self, &agent, micro_batch, step] {
    std::lock_guard lock(step->mutex);
    if (!step->admitted.valid()) {
      step->admitted = self->order->admit(PipelineStep::Kind::kBackward, micro_batch)
                           .then(agent.executor(), [step](StageOrder::AdmissionPtr& admission) {
                             step->admission = std::move(admission);
                             step->begun = base::Clock::now();
                           });
    }
    return step->admitted;
  };
  guard.on_end = [self, &agent, step, from = rpc::current_context()] {
    autograd::move_gradients(agent, from, self->context);
    self->count_activations(-1);
    self->add_compute(step->begun);
    step->admission->done();
  };
  guard.on_failure = [self](const base::Error& error) { self->order->fail(error); };
  return guard;
}

void detail::check_counts(const PipelineSchedule& schedule, size_t stages, size_t micro_batches) {
  const auto check = [&](size_t planned, size_t given, const std::string& what) {
    if (planned == given) return;
    base::invalid("schedule " + schedule.name + " is for " + std::to_string(planned) + what +
                  ", not for " + std::to_string(given));
  };
  check(schedule.stages.size(), stages, " stages");
  check(static_cast<size_t>(schedule.micro_batches), micro_batches, " micro-batches");
  simulate(schedule);  // throws if the schedule cannot run
}

std::vector<at::Tensor> detail::run_passes(rpc::Agent& agent, PipelineSchedule schedule,
                                           const Begin& begin, const Forward& forward,
                                           const Loss& loss) {
  // All passes share this object, because some may still run when run_passes() has thrown.
  struct Passes {
    Loss loss;
    std::vector<std::unique_ptr<autograd::Context>> contexts;
    std::vector<at::Tensor> outputs;
  };
  const auto micro_batches = static_cast<size_t>(schedule.micro_batches);
  const auto passes = std::make_shared<Passes>();
  passes->loss = loss;
  passes->outputs.resize(micro_batches);
  for (size_t m = 0; m < micro_batches; ++m) {
    passes->contexts.push_back(
        std::make_unique<autograd::Context>(agent, autograd::Context::Scope::kExplicit));
  }
  for (auto& row : schedule.stages) {
    for (PipelineStep& step : row) {
      step.context = passes->contexts[static_cast<size_t>(step.micro_batch)]->id();
    }
  }
  begin(schedule);
  std::vector<base::Future<void>> done;
  for (size_t m = 0; m < micro_batches; ++m) {
    const rpc::ContextScope scope(agent, passes->contexts[m]->id());
    done.push_back(forward(m).then(agent.executor(), [passes, m, &agent](at::Tensor& given) {
      const at::Tensor output = rpc::to_device(given, agent.device());
      passes->outputs[m] = output.detach();
      const std::shared_ptr<Node> source = node_of(output);
      const at::Tensor loss = passes->loss(m, output);
      if (!reaches(loss, source.get())) {
        base::invalid("the loss of micro-batch " + std::to_string(m) +
                      " does not depend on what the last stage gave");
      }
      return autograd::backward_async(*passes->contexts[m], {loss}, {.timeout = kAsLongAsItTakes})
          .then(agent.inline_executor(), [passes] {});
    }));
  }
  try {
    base::wait_all(done);
  } catch (...) {
    // Fail the other passes, because their steps may wait for input that will never arrive.
    const base::Error error = rpc::error_in_flight(base::ErrorKind::kInternal);
    for (const auto& context : passes->contexts) autograd::fail_passes(*context, error);
    throw;
  }
  return passes->outputs;
}

}  // namespace distrain::nn
