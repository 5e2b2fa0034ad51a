#include "distrain/membership/slot.h"

#include <utility>

#include "distrain/membership/control_plane.h"
#include "distrain/net/loop.h"

namespace distrain::membership {

namespace {

Options unassigned(Options options) {
  options.rank = kUnassignedRank;
  return options;
}

}  // namespace

struct Slot::Impl {
  explicit Impl(Options given) : options(unassigned(std::move(given))) {}

  const Options options;
  // Declared after the members that the loop's handlers use, so that the loop's thread ends first.
  net::Loop loop;
  const std::shared_ptr<ControlPlane> control = ControlPlane::make(loop, options, {});
};

Slot::Slot(Options options) : impl_(std::make_unique<Impl>(std::move(options))) {}

Slot::~Slot() { impl_->control->close(); }

int Slot::reserve() { return impl_->control->reserve_rank(); }

std::vector<Wait> Slot::waits() const {
  const auto wait = impl_->control->wait();
  if (!wait) return {};
  return {{"a rank that nobody else is", wait->since}};
}

}  // namespace distrain::membership
