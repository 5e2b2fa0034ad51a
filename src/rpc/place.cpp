#include "distrain/rpc/place.h"

#include <utility>

#include "control/control_plane.h"
#include "device_table.h"

namespace distrain::rpc {

namespace {

AgentOptions of_any_rank(AgentOptions options) {
  options.rank = kAnyRank;
  return options;
}

}  // namespace

struct Place::Impl {
  explicit Impl(AgentOptions given) : options(of_any_rank(std::move(given))) {}

  const AgentOptions options;
  DeviceTable devices{kAnyRank, c10::kCPU, {}};
  // Declared after the members that the loop's handlers use, so that the loop's thread ends first.
  net::Loop loop;
  const std::shared_ptr<ControlPlane> control =
      std::make_shared<ControlPlane>(loop, options, devices, ControlPlane::Callbacks());
};

Place::Place(AgentOptions options) : impl_(std::make_unique<Impl>(std::move(options))) {}

Place::~Place() { impl_->control->close(); }

int Place::take() { return impl_->control->ask_for_place(); }

std::vector<Wait> Place::waits() const {
  const auto wait = impl_->control->wait();
  if (!wait) return {};
  return {{"a rank that nobody else is", wait->since}};
}

}  // namespace distrain::rpc
