#pragma once

#include <set>

#include "party.h"

namespace distrain::membership {

/// The Party of each rank but 0: Note [Control plane].
class Member final : public Party {
 public:
  /// `hub` is the connection to rank 0, on which this rank joins.
  Member(Settings settings, World& world, Link hub, base::TimePoint now);

  void prepared(wire::RankDevices devices) override;
  void enter_round(uint64_t round, uint64_t number) override;
  std::vector<int> missing() const override { return {}; }  // only rank 0 knows
  bool is_suspected(int rank) const override { return told_.contains(rank); }

 private:
  void on_control(int rank, const Message& message) override;
  void on_control_lost(int rank, const base::Error& error) override;
  void find_lost(int rank, const base::Error& error) override;
  void suspect(int rank, const base::Error& error) override;

  const Link hub_;
  bool has_joined_ = false;
  std::set<int> told_;  // ranks whose newest process was reported lost, by this rank or by the hub
};

}  // namespace distrain::membership
