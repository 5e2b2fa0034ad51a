// Tests that a batch on a device ends after all its work, and the times that a stage reports.
#include <ATen/Functions.h>

#include "distrain/rpc/device.h"
#include "scenario/pipeline/stage.h"
#include "support/cluster.h"
#include "support/fake_device.h"
#include "support/scenario_data.h"
#include "support/scenario_job.h"

using namespace distrain;
using namespace distrain::testing;
using nn::StageReport;
using rpc::StreamPoint;
using scenario::PipelineOptions;
using scenario::PipelineStage;

namespace {

constexpr int kParameters = 62;  // of a resnet18

PipelineOptions one_batch() {
  PipelineOptions options = small_pipeline(1, 4);
  options.num_split = {2};
  options.loss = "ce";
  options.log_interval = 1;
  return options;
}

Hooks<PipelineOptions> on_a_device(int rank) {
  Hooks<PipelineOptions> hooks;
  hooks.job = [rank](Job& job) {
    if (job.rank == rank) job.devices = {fake(1)};
  };
  return hooks;
}

}  // namespace

TEST_CASE("a stage's batch ends when its device has done all work") {
  const auto setup = [](rpc::Agent& agent) {
    autograd::install(agent);
    PipelineStage::expose(agent);
    agent.provide(std::make_shared<job::Job>());
  };
  Cluster cluster(2, setup, {}, [](rpc::AgentOptions& options) {
    if (options.rank == 1) options.device = fake(1);
  });
  {
    const autograd::Context whole(cluster[0]);
    const auto blocks = scenario::whole_resnet("resnet18");
    const rpc::RRef<PipelineStage> stage = cluster[0].remote_new<PipelineStage>(
        1, "resnet18", 10, 33, blocks.first, blocks.last, 1, cluster[0].device_of(1));
    stage.rpc_sync<&PipelineStage::begin_batch>(std::vector<nn::PipelineStep>{}, 2);
    const at::Tensor work = at::zeros({4}, fake(1));
    for (int i = 0; i < 100; ++i) work.add_(1);
    const StreamPoint all = StreamPoint::mark(fake(1));
    REQUIRE_FALSE(all.reached());
    const StageReport report = stage.rpc_sync<&PipelineStage::end_batch>();
    CHECK(all.reached());
    CHECK_FALSE(report.compute_s);
  }
  cluster.shutdown();
}

TEST_CASE("in one process a batch ends when its device has done all work") {
  Hooks<PipelineOptions> hooks = on_a_device(0);
  int left = -1;  // pieces of work that are pending when the batch's time is measured
  hooks.heard = [&left](const Job&, const Line& line) {
    if (line.event != "step") return;
    const StreamPoint all = StreamPoint::mark(fake(1));
    for (left = 0; !all.reached(); ++left) continue;
  };
  run_job(Place::kLocal, one_batch(), hooks);
  REQUIRE(left >= 0);
  CHECK(left < kParameters);  // freeing may leave work, but updates must be complete
}

TEST_CASE("stages on the CPU report computing time, those on devices do not") {
  const Json ranks = run_job(Place::kRanks, one_batch(), on_a_device(1)).all("split").at(0);
  REQUIRE(ranks["stage_s"].size() == 2);
  CHECK(ranks["stage_s"][0].is_null());
  CHECK(ranks["stage_s"][1].get<double>() > 0);
  const Json local = run_job(Place::kLocal, one_batch(), on_a_device(0)).all("split").at(0);
  CHECK(local["stage_s"] == Json::array({nullptr}));
}
