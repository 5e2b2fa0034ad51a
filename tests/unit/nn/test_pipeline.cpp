#include <ATen/Functions.h>

#include "distrain/autograd/context.h"
#include "distrain/nn/pipeline.h"
#include "distrain/table/sharded_embedding.h"
#include "support/catch.h"
#include "support/cluster.h"

using namespace distrain;
using nn::PipelineStep;
using nn::StageReport;
using testing::Cluster;
using testing::error_of;

namespace {

constexpr int64_t kWidth = 5;

// Computes tanh(x · w); the stage's number determines w. A negative number detaches the output.
class TanhStage : public std::enable_shared_from_this<TanhStage> {
 public:
  using Constructor = TanhStage(int number);
  explicit TanhStage(int number) : cuts_(number < 0), weight_(make_weight(number)) { ++alive; }
  ~TanhStage() { --alive; }

  static at::Tensor make_weight(int number) {
    return at::arange(kWidth * kWidth, at::kDouble)
        .mul(number)
        .sin()
        .view({kWidth, kWidth})
        .contiguous()
        .requires_grad_();
  }

  void begin_batch(rpc::CallContext& call, std::vector<PipelineStep> row, int64_t) {
    passes_.begin(call.agent, std::move(row));
  }
  StageReport end_batch() { return passes_.end(); }
  base::Future<at::Tensor> forward(rpc::CallContext& call, const rpc::RRef<at::Tensor>& input,
                                   int64_t micro_batch) {
    const int next = call.agent.rank() + 1;
    return passes_.forward(
        call.agent, input, micro_batch, next % call.agent.world_size(),
        [self = shared_from_this()](const at::Tensor& x) {
          return at::tanh(at::matmul(self->cuts_ ? x.detach() : x, self->weight_));
        });
  }
  at::Tensor gradient(rpc::CallContext& call) {
    return autograd::gradient(call.agent, rpc::current_context(), weight_);
  }

  static inline std::atomic<int> alive{0};

 private:
  const bool cuts_;
  const at::Tensor weight_;
  nn::StagePasses passes_{"TanhStage.forward"};
};

/// The test sets g_late to complete the futures that late_value() returns.
std::shared_ptr<base::Promise<at::Tensor>> g_late;
base::Future<at::Tensor> late_value() { return g_late->future(); }

void setup_stages(rpc::Agent& agent) {
  autograd::install(agent);
  nn::StagePasses::install(agent);
  agent.expose_class<TanhStage>("TanhStage");
  agent.expose<&TanhStage::begin_batch>("TanhStage.begin_batch");
  agent.expose<&TanhStage::end_batch>("TanhStage.end_batch");
  agent.expose<&TanhStage::forward>("TanhStage.forward");
  agent.expose<&TanhStage::gradient>("TanhStage.gradient");
  agent.expose<&late_value>("late_value");
}

}  // namespace

TEST_CASE("the stages of a pipeline get the gradients of the whole model") {
  constexpr int kStages = 3;
  constexpr int64_t kMicroBatches = 4;
  const std::string name = GENERATE("gpipe", "1f1b", "naive");
  const at::Tensor batch = at::randn({10, kWidth}, at::kDouble);
  std::vector<at::Tensor> weights;
  at::Tensor expected = batch;
  for (int stage = 0; stage < kStages; ++stage) {
    weights.push_back(TanhStage::make_weight(stage + 1));
    expected = at::tanh(at::matmul(expected, weights.back()));
  }
  expected.square().sum().backward();

  Cluster cluster(kStages + 1, setup_stages);
  {
    nn::Pipeline<TanhStage> pipeline(cluster[0]);
    for (int stage = 0; stage < kStages; ++stage) pipeline.add(stage + 1, stage + 1);
    const nn::PipelineSchedule schedule = nn::make_schedule(name, kStages, kMicroBatches);
    const std::vector<int64_t> activations = nn::simulate(schedule).activations;
    for (int round = 0; round < 2; ++round) {
      const autograd::Context context(cluster[0]);
      const std::vector<at::Tensor> outputs =
          pipeline.train(schedule, batch.tensor_split(kMicroBatches),
                         [](size_t, const at::Tensor& y) { return y.square().sum(); });
      CHECK(at::allclose(at::cat(outputs), expected.detach()));
      const std::vector<at::Tensor> gradients = pipeline.call_all<&TanhStage::gradient>();
      const std::vector<StageReport> reports = pipeline.call_all<&TanhStage::end_batch>();
      for (size_t stage = 0; stage < kStages; ++stage) {
        CAPTURE(name, stage);
        CHECK(at::allclose(gradients[stage], weights[stage].grad()));
        CHECK(reports[stage].activations == activations[stage]);
        CHECK(reports[stage].compute_s > 0);
      }
    }
  }
  cluster.shutdown();
  CHECK(cluster[0].live_contexts() == 0);
  CHECK(TanhStage::alive == 0);
}

TEST_CASE("two micro-batches update a table as one batch does") {
  // Adagrad's first step is lr * g / |g|, so the sum of the gradients must come first.
  const table::TableOptions options{
      .name = "t", .dim = kWidth, .num_rows = 8, .optimizer = {"adagrad", {{"lr", 0.1}}}};
  const at::Tensor batch = at::randn({6, kWidth}, at::kDouble);
  const at::Tensor ids = at::tensor({1, 2, 3, 1, 3, 5}, at::kLong);
  std::vector<at::Tensor> rows;  // after the update
  for (const int64_t micro_batches : {1, 2}) {
    Cluster cluster(3, [](rpc::Agent& agent) {
      setup_stages(agent);
      optim::install(agent);
      table::install(agent);
    });
    {
      nn::Pipeline<TanhStage> pipeline(cluster[0]);
      pipeline.add(1, 1);
      const auto tables = std::make_shared<table::ShardedEmbedding>(
          cluster[0], std::vector{2}, std::vector{options}, optim::Sharing{});
      optim::DistributedOptimizer optimizer(cluster[0], std::vector<optim::ParameterGroup>{});
      optimizer.add(tables);
      const autograd::Context context(cluster[0]);
      const auto ids_of = ids.tensor_split(micro_batches);
      pipeline.train(nn::make_schedule("gpipe", 1, micro_batches),
                     batch.tensor_split(micro_batches), [&](size_t m, const at::Tensor& y) {
                       return (y.to(at::kFloat) * tables->forward(ids_of[m])).square().sum();
                     });
      optimizer.step(context);
      const at::NoGradGuard no_grad;
      rows.push_back(tables->forward(at::arange(8)));
    }
    cluster.shutdown();
  }
  CHECK(at::allclose(rows[0], rows[1], 1e-5, 1e-6));
}

TEST_CASE("a pass that fails on a stage fails the batch with the stage's error") {
  Cluster cluster(2, setup_stages);
  {
    nn::Pipeline<TanhStage> pipeline(cluster[0]);
    pipeline.add(1, 1);
    const autograd::Context context(cluster[0]);
    const base::Error error = error_of([&] {
      pipeline.train(nn::make_schedule("gpipe", 1, 1), {at::zeros({2, kWidth + 1}, at::kDouble)},
                     [](size_t, const at::Tensor& y) { return y.sum(); });
    });
    CHECK(error.rank == 1);
    CHECK(error.op == "TanhStage.forward");
    CHECK(error.message.find("shapes") != std::string::npos);
  }
  cluster.shutdown();
}

TEST_CASE("a stage whose step waits for its turn ends with its agent") {
  base::Future<at::Tensor> second;
  {
    Cluster cluster(2, setup_stages);
    nn::Pipeline<TanhStage> pipeline(cluster[0]);
    pipeline.add(1, 1);
    using enum PipelineStep::Kind;
    const std::vector<PipelineStep> row = {
        {kForward, 0}, {kForward, 1}, {kBackward, 0}, {kBackward, 1}};
    pipeline.call<&TanhStage::begin_batch>(0, row, int64_t{1}).wait();
    second = pipeline.chain<&TanhStage::forward>(at::zeros({1, kWidth}, at::kDouble), int64_t{1});
    CHECK_FALSE(second.done());
  }
  CHECK_FALSE(second.wait_result().ok());
  CHECK(TanhStage::alive == 0);
}

TEST_CASE("an impossible batch is refused and ends all its waits") {
  const std::string name = GENERATE("gpipe", "1f1b", "naive");
  CAPTURE(name);
  const auto sum = [](size_t, const at::Tensor& y) { return y.sum(); };
  Cluster cluster(3, setup_stages);
  {
    nn::Pipeline<TanhStage> pipeline(cluster[0]);
    const autograd::Context context(cluster[0]);
    const std::vector<at::Tensor> batch(4, at::ones({2, kWidth}, at::kDouble));
    const nn::PipelineSchedule schedule = nn::make_schedule(name, 2, 4);
    const auto refusal = [&](const std::vector<at::Tensor>& inputs, const nn::detail::Loss& loss) {
      const base::Error error = error_of([&] { pipeline.train(schedule, inputs, loss); });
      CHECK(error.kind == base::ErrorKind::kInvalid);
      return error;
    };
    pipeline.add(1, 1);
    CHECK(refusal(batch, sum).message == "schedule " + name + " is for 2 stages, not for 1");
    pipeline.add(2, -2);
    CHECK(refusal({batch[0]}, sum).message ==
          "schedule " + name + " is for 4 micro-batches, not for 1");
    const base::Error cut = refusal(batch, sum);
    CHECK(cut.rank == 2);
    CHECK(cut.message.find("the stage on rank 2 cuts the graph") == 0);
    pipeline.clear();
    pipeline.add(1, 1);
    pipeline.add(2, 2);
    const base::Error loss = refusal(batch, [](size_t m, const at::Tensor& y) {
      return m == 1 ? at::ones({1}, at::kDouble).requires_grad_() : y.sum();
    });
    CHECK(loss.message.find("the loss of micro-batch 1 does not depend") == 0);
    CHECK(pipeline.train(schedule, batch, sum).size() == 4);
  }
  cluster.shutdown();
  CHECK(TanhStage::alive == 0);
}

namespace {

/// A stage on rank 1. begin() starts a batch of two micro-batches; a test starts two batches.
struct TwoBatches {
  explicit TwoBatches(rpc::Agent& agent_in)
      : agent(agent_in), stage(agent.remote_new<TanhStage>(1, 1)), whole(agent) {}

  using Contexts = std::vector<std::unique_ptr<autograd::Context>>;
  Contexts begin() {
    using enum PipelineStep::Kind;
    Contexts contexts;
    std::vector<PipelineStep> row;
    for (int64_t m : {0, 1}) {
      contexts.push_back(
          std::make_unique<autograd::Context>(agent, autograd::Context::Scope::kExplicit));
      row.push_back({kForward, m, contexts.back()->id()});
    }
    for (int64_t m : {0, 1}) row.push_back({kBackward, m, row[static_cast<size_t>(m)].context});
    stage.rpc_sync<&TanhStage::begin_batch>(row, int64_t{2});
    return contexts;
  }
  base::Future<at::Tensor> forward(const Contexts& batch, int64_t m,
                                   const rpc::RRef<at::Tensor>& input) {
    const rpc::ContextScope scope(agent, batch[static_cast<size_t>(m)]->id());
    return agent.rpc_async<&TanhStage::forward>(rpc::To(1).without_deadline(), stage, input, m);
  }
  at::Tensor input(double value) const { return at::full({1, kWidth}, value, at::kDouble); }

  rpc::Agent& agent;
  const rpc::RRef<TanhStage> stage;
  const autograd::Context whole;
};

}  // namespace

TEST_CASE("late steps of a batch do not affect the next batch") {
  enum class Late { kInput, kError, kCall };
  const Late late = GENERATE(Late::kInput, Late::kError, Late::kCall);
  g_late = std::make_shared<base::Promise<at::Tensor>>();
  Cluster cluster(2, setup_stages);
  {
    TwoBatches two(cluster[0]);
    const auto first = two.begin();
    base::Future<at::Tensor> old;
    if (late != Late::kCall) {
      old = two.forward(first, 1, cluster[0].remote<&late_value>(0));
      two.stage.rpc_sync<&TanhStage::end_batch>();
    }
    const auto second = two.begin();
    if (late == Late::kInput) g_late->set(two.input(1));
    if (late == Late::kError) g_late->fail({base::ErrorKind::kBadData, "late", -1, {}});
    if (late == Late::kCall) old = two.forward(first, 1, cluster[0].make_rref(two.input(1)));
    if (late != Late::kInput) CHECK_FALSE(old.wait_result().ok());
    std::vector<at::Tensor> outputs;
    for (int64_t m : {0, 1}) {
      const double value = static_cast<double>(m) + 2;
      outputs.push_back(two.forward(second, m, cluster[0].make_rref(two.input(value))).wait());
      CHECK(at::allclose(outputs.back(),
                         at::tanh(at::matmul(two.input(value), TanhStage::make_weight(1)))));
    }
    CHECK_FALSE(old.wait_result().ok());
    for (size_t m : {0u, 1u}) autograd::backward(*second[m], {outputs[m].sum()});
  }
  cluster.shutdown();
  CHECK(TanhStage::alive == 0);
}

TEST_CASE("two messages may carry the gradients of one step") {
  Cluster cluster(2, setup_stages);
  {
    TwoBatches two(cluster[0]);
    const auto batch = two.begin();
    at::Tensor expected;
    std::vector<at::Tensor> losses;
    const at::Tensor weight = TanhStage::make_weight(1);
    for (int64_t m : {0, 1}) {
      const at::Tensor x = two.input(0.1 * static_cast<double>(m + 1));
      const rpc::ContextScope scope(cluster[0], batch[static_cast<size_t>(m)]->id());
      const auto y = two.stage.remote<&TanhStage::forward>(cluster[0].make_rref(x), m);
      losses.push_back((y.to_here() + y.to_here()).sum());
      (at::tanh(at::matmul(x, weight)) * 2).sum().backward();
    }
    const auto second = autograd::backward_async(*batch[1], {losses[1]});
    autograd::backward(*batch[0], {losses[0]});
    second.wait();
    CHECK(at::allclose(two.stage.rpc_sync<&TanhStage::gradient>(), weight.grad()));
  }
  cluster.shutdown();
}
