// ctest: timeout=180
// Tests that a stage that throws fails all micro-batches with its error.
#include <ATen/Functions.h>

#include "distrain/autograd/context.h"
#include "distrain/job/job.h"
#include "scenario/pipeline/stage.h"
#include "support/catch.h"
#include "support/cluster.h"

using namespace distrain;
using namespace distrain::scenario;
using scenario::cut_resnet;
using testing::Cluster;
using testing::error_of;

namespace {

constexpr int kStages = 2;
constexpr int64_t kMicroBatches = 4;
constexpr int64_t kSide = 33;

/// Two remote stages of a resnet18, and a context for each micro-batch, as on the job's master. The
/// object must outlive the futures that run() returns.
struct TwoStages {
  explicit TwoStages(rpc::Agent& master) : agent(master) {
    const auto cut = cut_resnet("narrow_resnet18", kStages, {}, 10, kSide);
    const nn::PipelineSchedule schedule = nn::make_schedule("1f1b", kStages, kMicroBatches);
    for (size_t i = 0; i < kStages; ++i) {
      const int rank = static_cast<int>(i) + 1;
      stages.push_back(agent.remote_new<PipelineStage>(
          rank, "narrow_resnet18", 10, kSide, cut[i].first, cut[i].last, 1, agent.device_of(rank)));
      stages[i].rpc_sync<&PipelineStage::begin_batch>(schedule.stages[i], 2 * kMicroBatches);
    }
  }

  /// Runs the micro-batches. `spoil` may change the scores before the loss is computed.
  std::vector<base::Future<void>> run(const std::vector<at::Tensor>& images,
                                      const std::function<at::Tensor(at::Tensor)>& spoil = {}) {
    std::vector<base::Future<void>> done;
    for (size_t m = 0; m < images.size(); ++m) {
      auto& context = *contexts.emplace_back(
          std::make_unique<autograd::Context>(agent, autograd::Context::Scope::kExplicit));
      const rpc::ContextScope scope(agent, context.id());
      auto activations = agent.make_rref(images[m]);
      for (const auto& stage : stages) {
        activations = stage.remote<&PipelineStage::forward>(activations, static_cast<int64_t>(m));
      }
      done.push_back(activations.to_here_async().then(
          agent.executor(), [&context, m, spoil](at::Tensor& scores) {
            const at::Tensor used = spoil && m == 0 ? spoil(scores) : scores;
            return autograd::backward_async(context, {used.sum()});
          }));
    }
    return done;
  }

  rpc::Agent& agent;
  const autograd::Context whole{agent};
  std::vector<rpc::RRef<PipelineStage>> stages;
  std::vector<std::unique_ptr<autograd::Context>> contexts;
};

void setup_stages(rpc::Agent& agent) {
  autograd::install(agent);
  PipelineStage::expose(agent);
  agent.provide(std::make_shared<job::Job>());
}

std::vector<at::Tensor> good_images() {
  return std::vector<at::Tensor>(kMicroBatches, at::rand({2, 3, kSide, kSide}));
}

}  // namespace

TEST_CASE("a forward pass that throws fails all micro-batches with its error") {
  Cluster cluster(kStages + 1, setup_stages);
  for (int round = 0; round < 10; ++round) {
    TwoStages pipeline(cluster[0]);
    std::vector<at::Tensor> images = good_images();
    const size_t bad = static_cast<size_t>(round) % kMicroBatches;
    images[bad] = at::rand({2, 5, kSide, kSide});  // an image with five channels
    const auto done = pipeline.run(images);
    const base::Error error = error_of([&] { base::wait_all(done); });
    for (const auto& one : done) one.wait_result();
    CAPTURE(round, error.message);
    CHECK(base::kind_name(error.kind) == base::kind_name(base::ErrorKind::kRemoteFailed));
    CHECK(error.rank == 1);
    CHECK(error.op == "PipelineStage.forward");
    CHECK(error.message.find("channels") != std::string::npos);
    CHECK(error.message.find("frame #") == std::string::npos);
    for (size_t m = bad; m < done.size(); ++m) CHECK_FALSE(done[m].wait_result().ok());
  }
  cluster.shutdown();
  for (int rank = 0; rank < cluster.size(); ++rank) {
    CHECK(cluster[rank].live_contexts() == 0);
    CHECK(cluster[rank].live_rrefs() == 0);
  }
}

TEST_CASE("a backward pass that throws fails the other micro-batches, too") {
  Cluster cluster(kStages + 1, setup_stages);
  TwoStages pipeline(cluster[0]);
  const auto done = pipeline.run(good_images(), [](at::Tensor scores) {
    scores.register_hook(
        [](const at::Tensor&) -> at::Tensor { throw std::runtime_error("the hook broke"); });
    return scores;
  });
  // The pass fails on the master before any stage runs its backward pass. The master notifies the
  // stages, and each stage fails the micro-batches that wait behind the failed one.
  for (const auto& one : done) {
    const base::Error error = error_of([&] { one.wait(); });
    CAPTURE(error.message);
    CHECK(error.message.find("the hook broke") != std::string::npos);
    CHECK(base::kind_name(error.kind) != base::kind_name(base::ErrorKind::kDeadline));
  }
}

TEST_CASE("a pipeline ends when a stage dies with micro-batches in flight") {
  const int dying = GENERATE(1, 2);
  Cluster cluster(kStages + 1, setup_stages);
  TwoStages pipeline(cluster[0]);
  const auto done = pipeline.run(good_images());
  cluster.kill(dying);
  for (const auto& one : done) one.wait_result();  // completes, with or without an error
}
