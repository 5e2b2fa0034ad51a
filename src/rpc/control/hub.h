#pragma once

#include <set>

#include "control/party.h"

namespace distrain::rpc::control {

/// Rank 0: Note [Control plane].
class Hub final : public Party {
 public:
  Hub(Settings settings, World& world, base::TimePoint now);

  /// A rank wants to join on `link`. Gives back why it is refused, if it is: the first field that
  /// does not agree, with both values.
  std::optional<base::Error> join(Link link, int rank, wire::Join join, base::TimePoint now);
  /// To be called once, when this rank can take part: one that is alone meets nobody.
  void begin();

  void prepared(wire::RankDevices devices) override;
  void enter_round(uint64_t round, uint64_t number) override;
  std::vector<int> missing() const override;
  bool is_suspected(int) const override { return false; }

 private:
  struct Joined {
    Link link = 0;
    wire::Endpoint endpoint;
  };

  void on_control(int rank, const Message& message) override;
  void on_control_lost(int rank, const base::Error& error) override;
  void spread(int rank, const base::Error& error) override;
  void suspect(int rank, const base::Error& error) override { lose(rank, error); }
  std::optional<base::Error> check_join(int rank, const wire::Join& join) const;
  void tell_members(const Message& message, int except = -1);
  void meet_if_all_joined();
  void take_prepared(int rank, wire::RankDevices devices);
  void come_to_round(int rank, uint64_t round, uint64_t number);

  std::map<int, Joined> joined_;
  std::map<int, wire::RankDevices> prepared_;
  uint64_t round_ = 0;      // that is under way
  uint64_t round_sum_ = 0;  // of those who have come to it
  std::set<int> in_round_;
};

}  // namespace distrain::rpc::control
