#include "distrain/nn/pipeline.h"

#include <algorithm>
#include <mutex>

#include "distrain/autograd/context.h"
#include "distrain/base/clock.h"
#include "distrain/base/trace.h"
#include "distrain/rpc/device.h"
#include "distrain/rpc/error.h"
#include "distrain/rpc/placed.h"
#include "turns.h"

namespace distrain::nn {

namespace {

constexpr auto kAsLongAsItTakes = std::chrono::nanoseconds::max();

}  // namespace

struct StagePasses::State : std::enable_shared_from_this<State> {
  at::Tensor pass(rpc::Agent& agent, const at::Tensor& input, int64_t micro_batch,
                  const Compute& compute, const Turns::TurnPtr& turn);
  autograd::PassGuard guard(rpc::Agent& agent, int64_t micro_batch);

  void hold(int64_t micro_batches) {
    std::lock_guard lock(mutex);
    held += micro_batches;
    report.activations = std::max(report.activations, held);
  }
  void add_compute(base::TimePoint begun) {
    std::lock_guard lock(mutex);
    if (report.compute_s) *report.compute_s += base::seconds_since(begun);
  }

  std::string function;
  Turns turns;
  // Set between two batches.
  uint64_t batch_context = 0;
  c10::Device device = c10::kCPU;
  std::mutex mutex;  // of what follows
  int64_t held = 0;
  StageReport report;
};

// Steps that still wait for their turn when the agent ends would wait, and keep their stage, for
// ever.
class StagePasses::OfAgent {
 public:
  ~OfAgent() {
    for (const auto& weak : stages_) {
      if (const auto stage = weak.lock()) {
        stage->turns.fail({base::ErrorKind::kCancelled, "the job has ended", -1, {}});
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
  state_->function = std::move(function);
}

void StagePasses::begin(rpc::Agent& agent, std::vector<PipelineStep> row) {
  agent.local<OfAgent>().add(state_);
  state_->turns.begin(std::move(row));
  state_->batch_context = rpc::current_context();
  state_->device = agent.device();
  std::lock_guard lock(state_->mutex);
  state_->held = 0;
  state_->report = {};
  if (!rpc::is_accelerator(state_->device)) state_->report.compute_s = 0;
}

StageReport StagePasses::end() {
  rpc::StreamPoint::mark(state_->device).wait_on_host();
  std::lock_guard lock(state_->mutex);
  return state_->report;
}

base::Future<at::Tensor> StagePasses::forward(rpc::Agent& agent, const rpc::RRef<at::Tensor>& input,
                                              int64_t micro_batch, int next_rank, Compute compute) {
  const base::Future<at::Tensor> fetched = input.to_here_async(kAsLongAsItTakes);
  fetched.on_complete(agent.inline_executor(), [state = state_](base::Result<at::Tensor>& x) {
    if (!x.ok()) state->turns.fail(x.error());  // its turn would never come
  });
  const auto run = [state = state_, &agent, micro_batch, next_rank, compute = std::move(compute)](
                       const at::Tensor& x, const Turns::TurnPtr& turn) {
    try {
      return rpc::for_rank(agent, next_rank, state->pass(agent, x, micro_batch, compute, turn));
    } catch (...) {
      base::Error error = rpc::error_in_flight(base::ErrorKind::kRemoteFailed);
      if (error.rank < 0) error.rank = agent.rank();
      error.op = state->function;
      turn->fail(error);
      throw base::Exception(error);
    }
  };
  return fetched.then(agent.executor(), [state = state_, &agent, micro_batch, run](at::Tensor& x) {
    return state->turns.enter({PipelineStep::Kind::kForward, micro_batch})
        .then(agent.executor(), [x, run](Turns::TurnPtr& turn) { return run(x, turn); });
  });
}

at::Tensor StagePasses::State::pass(rpc::Agent& agent, const at::Tensor& input, int64_t micro_batch,
                                    const Compute& compute, const Turns::TurnPtr& turn) {
  const base::TraceScope scope("forward", "micro_batch", micro_batch);
  const base::TimePoint begun = base::Clock::now();
  hold(+1);
  at::Tensor output = compute(input);
  autograd::guard_pass(agent, guard(agent, micro_batch));
  add_compute(begun);
  turn->done();
  return output;
}

// Of the backward pass of the current context through this stage.
autograd::PassGuard StagePasses::State::guard(rpc::Agent& agent, int64_t micro_batch) {
  struct Step {
    Turns::TurnPtr turn;
    base::TimePoint begun;
  };
  const auto self = shared_from_this();
  const auto step = std::make_shared<Step>();
  autograd::PassGuard guard;
  guard.admit = [self, &agent, micro_batch, step] {
    return self->turns.enter({PipelineStep::Kind::kBackward, micro_batch})
        .then(agent.executor(), [step](Turns::TurnPtr& turn) {
          step->turn = std::move(turn);
          step->begun = base::Clock::now();
        });
  };
  guard.on_end = [self, &agent, step, from = rpc::current_context(), to = batch_context] {
    autograd::move_gradients(agent, from, to);
    self->hold(-1);
    self->add_compute(step->begun);
    step->turn->done();
  };
  guard.on_failure = [self](const base::Error& error) { self->turns.fail(error); };
  return guard;
}

std::vector<at::Tensor> detail::run_passes(rpc::Agent& agent, size_t micro_batches,
                                           const Forward& forward, const Loss& loss) {
  // For as long as any pass goes on: one may have failed before the others are through.
  struct Passes {
    Loss loss;
    std::vector<std::unique_ptr<autograd::Context>> contexts;
    std::vector<at::Tensor> outputs;
  };
  const auto passes = std::make_shared<Passes>();
  passes->loss = loss;
  passes->contexts.resize(micro_batches);
  passes->outputs.resize(micro_batches);
  std::vector<base::Future<void>> done;
  for (size_t m = 0; m < micro_batches; ++m) {
    auto& context = passes->contexts[m];
    context = std::make_unique<autograd::Context>(agent, autograd::Context::Scope::kExplicit);
    const rpc::ContextScope scope(agent, context->id());
    done.push_back(forward(m).then(agent.executor(), [passes, m, &agent](at::Tensor& given) {
      const at::Tensor output = rpc::placed(given, agent.device());
      passes->outputs[m] = output.detach();
      const at::Tensor loss = passes->loss(m, output);
      return autograd::backward_async(*passes->contexts[m], {loss}, {.timeout = kAsLongAsItTakes})
          .then(agent.inline_executor(), [passes] {});
    }));
  }
  base::wait_all(done);
  return passes->outputs;
}

}  // namespace distrain::nn
