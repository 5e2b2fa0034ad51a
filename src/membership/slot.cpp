#include "distrain/membership/slot.h"

#include <utility>

#include "distrain/membership/control_plane.h"

namespace distrain::membership {

Slot::Slot(Options options) : options_(std::move(options)) {
  options_.rank = kUnassignedRank;
  control_ = ControlPlane::make(loop_, options_, {});
}

Slot::~Slot() { control_->close(); }

int Slot::reserve() { return control_->reserve_rank(); }

std::vector<Wait> Slot::waits() const {
  const auto wait = control_->wait();
  if (!wait) return {};
  return {{"a rank that nobody else is", wait->since}};
}

}  // namespace distrain::membership
