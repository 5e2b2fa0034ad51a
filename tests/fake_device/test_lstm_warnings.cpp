// Tests that an LSTM on a device hides only the warning about non-contiguous weights.
#include <ATen/record_function.h>
#include <c10/util/Exception.h>

#include "scenario/rnn/lstm.h"
#include "support/catch.h"
#include "support/fake_device.h"

using namespace distrain;
using testing::fake;

namespace {

class Collector final : public c10::WarningHandler {
 public:
  void process(const c10::Warning& warning) override { heard.push_back(warning.msg()); }
  std::vector<std::string> heard;
};

/// Raises two warnings when aten::lstm is called: cuDNN's about the weights, and an unrelated one.
std::unique_ptr<at::ObserverContext> warn(const at::RecordFunction& function) {
  if (std::string_view(function.name()) == "aten::lstm") {
    TORCH_WARN(
        "RNN module weights are not part of single contiguous chunk of memory. This means …");
    TORCH_WARN("something is odd");
  }
  return nullptr;
}

}  // namespace

TEST_CASE("an LSTM on a device suppresses only one warning") {
  const c10::Device device = GENERATE(fake(), c10::Device(c10::kCPU));
  scenario::Lstm lstm(3, 4, 1, 0.0, 1, device);
  scenario::LstmState state = lstm->zero_state(2);
  nn::Dropout none;
  Collector collector;
  {
    const c10::WarningUtils::WarningHandlerGuard guard(&collector);
    const auto callback = at::addThreadLocalCallback(at::RecordFunctionCallback(warn));
    lstm->forward(at::zeros({5, 2, 3}, at::device(device)), state, none);
    at::removeCallback(callback);
  }
  REQUIRE(!collector.heard.empty());
  CHECK(collector.heard.back() == "something is odd");
  CHECK(collector.heard.size() == (device.is_cpu() ? 2 : 1));
}
