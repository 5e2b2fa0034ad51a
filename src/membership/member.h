#pragma once

#include <set>

#include "control_protocol.h"

namespace distrain::membership {

/// The ControlProtocol of each rank but 0: Note [Control plane].
class Member final : public ControlProtocol {
 public:
  /// `coordinator` is the connection to rank 0, on which this rank joins.
  Member(ControlSettings settings, ControlTransport& transport, Link coordinator,
         base::TimePoint now);

  void prepared(wire::RankDevices devices) override;
  void enter_round(uint64_t round, uint64_t number) override;
  std::vector<int> missing() const override { return {}; }  // only rank 0 knows
  bool is_suspected(int rank) const override { return reported_lost_.contains(rank); }

 private:
  void on_control(int rank, const Message& message) override;
  void on_control_lost(int rank, const Error& error) override;
  void declare_lost(int rank, const Error& error) override;
  void suspect(int rank, const Error& error) override;

  const Link coordinator_;
  bool has_joined_ = false;
  // Ranks whose newest process was reported lost, by this rank or by the coordinator.
  std::set<int> reported_lost_;
};

}  // namespace distrain::membership
