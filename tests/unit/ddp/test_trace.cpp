// Tests what a trace shows of training with DistributedDataParallel.
#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "distrain/base/trace.h"
#include "unit/ddp/trainer.h"

using namespace distrain;
using namespace distrain::testing;

TEST_CASE("a trace shows an allreduce for each bucket of each pass, from when it is started") {
  std::vector<std::shared_ptr<base::Tracer>> tracers;
  Cluster cluster(
      kTrainers, [](rpc::Agent& agent) { autograd::install(agent); }, {},
      [&](rpc::AgentOptions& options) {
        options.tracer = tracers.emplace_back(std::make_shared<base::Tracer>());
      });
  cluster.on_all([](rpc::Agent& agent) {
    base::Tracer& tracer = *agent.tracer();
    const auto count = [&](const std::string& name) {
      size_t found = 0;
      for (const base::TraceTrack& track : tracer.tracks()) {
        for (const base::TraceEvent& event : track.events) {
          if (event.name != name) continue;
          expect(event.kind == base::TraceEvent::Kind::kAsync, name + " is no operation");
          ++found;
        }
      }
      return found;
    };
    tracer.start();
    Trainer trainer(agent);
    expect(count("broadcast") >= 1, "no broadcast of the parameters");
    size_t wanted = 2;  // compare the models, and agree on the order of the buckets
    for (int step = 0; step < 6; ++step) {
      wanted += trainer.model->reducer().buckets().size();
      trainer.forward(step).backward();
    }
    expect(count("allreduce") == wanted, "allreduces of six passes");
    tracer.stop();
    for (int step = 6; step < 9; ++step) trainer.forward(step).backward();
    expect(count("allreduce") == wanted, "allreduces that are not traced");
    tracer.start();
    trainer.forward(9).backward();
    expect(count("allreduce") == wanted + trainer.model->reducer().buckets().size(),
           "allreduces of a later pass");
    tracer.stop();
  });
  cluster.shutdown();
}
