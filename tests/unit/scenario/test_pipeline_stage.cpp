#include <ATen/Functions.h>
#include <torch/csrc/autograd/grad_mode.h>

#include "scenario/pipeline/stage.h"
#include "support/catch.h"

using namespace distrain;

TEST_CASE("the state of a stage is a copy of its running statistics, which change later") {
  const at::NoGradGuard no_grad;
  const scenario::PipelineStage stage("resnet18", 10, 32, 0, 1, 7, "cpu");
  rpc::AgentOptions options;
  options.names = {"alone"};
  rpc::Agent agent(options);
  agent.join();
  rpc::CallContext call{agent, {0, "alone"}};
  const auto state = [&] { return stage.hold_state(call).local_value(); };
  const rpc::NamedTensors saved = state();
  int buffers = 0;
  for (const auto& [name, tensor] : saved) {
    if (name.find("running_") == std::string::npos && !name.ends_with("_tracked")) continue;
    ++buffers;
    at::Tensor(tensor).fill_(7);
    CAPTURE(name);
    CHECK_FALSE(at::equal(state().at(name), tensor));
  }
  CHECK(buffers == 3);
  agent.shutdown();
}
