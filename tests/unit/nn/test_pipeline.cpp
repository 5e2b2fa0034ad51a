#include <ATen/Functions.h>

#include "distrain/autograd/context.h"
#include "distrain/nn/pipeline.h"
#include "support/catch.h"
#include "support/cluster.h"

using namespace distrain;
using nn::PipelineStep;
using nn::StageReport;
using testing::Cluster;
using testing::error_of;

namespace {

constexpr int64_t kWidth = 5;

// y = tanh(x · w), with numbers of its own.
class TanhStage : public std::enable_shared_from_this<TanhStage> {
 public:
  using Constructor = TanhStage(int number);
  explicit TanhStage(int number) : weight_(make_weight(number)) { ++alive; }
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
    return passes_.forward(call.agent, input, micro_batch, next % call.agent.world_size(),
                           [self = shared_from_this()](const at::Tensor& x) {
                             return at::tanh(at::matmul(x, self->weight_));
                           });
  }
  at::Tensor gradient(rpc::CallContext& call) {
    return autograd::gradient(call.agent, rpc::current_context(), weight_);
  }

  static inline std::atomic<int> alive{0};

 private:
  const at::Tensor weight_;
  nn::StagePasses passes_{"TanhStage.forward"};
};

void setup_stages(rpc::Agent& agent) {
  autograd::install(agent);
  nn::StagePasses::install(agent);
  agent.expose_class<TanhStage>("TanhStage");
  agent.expose<&TanhStage::begin_batch>("TanhStage.begin_batch");
  agent.expose<&TanhStage::end_batch>("TanhStage.end_batch");
  agent.expose<&TanhStage::forward>("TanhStage.forward");
  agent.expose<&TanhStage::gradient>("TanhStage.gradient");
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

TEST_CASE("a pass that fails on a stage fails the batch by the stage's words") {
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

TEST_CASE("a stage whose step waits for its turn goes with its agent") {
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
