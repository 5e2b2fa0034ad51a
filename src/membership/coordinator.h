#pragma once

#include <set>

#include "control_protocol.h"

namespace distrain::membership {

/// Rank 0's ControlProtocol: Note [Control plane].
class Coordinator final : public ControlProtocol {
 public:
  using ControlProtocol::ControlProtocol;

  /// Admits `rank` on `link`. Returns an error with the first mismatch if the rank is refused.
  std::optional<Error> join(Link link, int rank, wire::Join join, base::TimePoint now);
  /// Reserves a free rank for the process on `link`, which has no rank: until it joins as that
  /// rank, for a minute at most, or until release_reservation(). Returns an error if it is refused;
  /// `overloaded` if no rank is free now.
  std::optional<Error> reserve_rank(Link link, const wire::Join& join, base::TimePoint now);
  void release_reservation(Link link);
  /// Called once, when rank 0 itself can take part; a job of one rank begins here.
  void begin() { begin_if_all_joined(); }
  void tolerate(Tolerance tolerance) { tolerance_ = std::move(tolerance); }
  /// No longer tolerates all failures of the new process of `rank`.
  void note_of_use(int rank) { on_trial_.erase(rank); }

  void prepared(wire::RankDevices devices) override;
  void enter_round(uint64_t round, uint64_t number) override;
  std::vector<int> missing() const override;
  bool is_suspected(int) const override { return false; }
  /// Returns the number of times that a rank was checked for being free or missing. For tests.
  uint64_t looks() const { return looks_; }

 private:
  struct Joined {
    Link link = 0;
    wire::Endpoint endpoint;
  };
  /// A rank reserved for a process that is yet to join.
  struct Reservation {
    Link link = 0;
    base::TimePoint since;
  };
  /// A new process of a lost rank, until it receives go.
  struct Newcomer {
    bool is_prepared = false;
    std::set<int> unconfirmed;  ///< the others that have not confirmed it, once it is prepared
  };

  void on_control(int rank, const Message& message) override;
  void on_control_lost(int rank, const Error& error) override;
  void declare_lost(int rank, const Error& error) override;
  void suspect(int rank, const Error& error) override { declare_lost(rank, error); }
  std::optional<Error> check_join(int rank, const wire::Join& join) const;
  bool is_missing(int rank) const;
  bool is_free(int rank) const;
  void broadcast(const Message& message, int except = -1);
  void begin_if_all_joined();
  void note_prepared(int rank, wire::RankDevices devices);

  void send_directory(int rank);
  void announce(int rank, wire::RankDevices devices);
  void note_confirmed(int newcomer, int by);
  void start_newcomer(int newcomer);
  void stop_waiting_for(int rank);
  bool tolerates(int rank, Error& error) const;
  void forget(int rank);

  void note_entered(int rank, uint64_t round, uint64_t number);
  void end_round_if_complete();

  std::map<int, Joined> joined_;
  std::map<int, Reservation> reservations_;
  int next_to_reserve_ = 1;                   // the next rank that reserve_rank() checks
  std::map<int, wire::RankDevices> devices_;  // of the ranks that are, or were, prepared
  Tolerance tolerance_;
  bool job_goes_on_ = true;  // false after a loss that is not tolerated: then all ranks leave
  std::map<int, Newcomer> newcomers_;
  std::set<int> on_trial_;            // new processes that have not been useful yet
  uint64_t round_ = 0;                // the current round of the end
  std::map<int, uint64_t> in_round_;  // the numbers of the ranks that have entered it
  int awaited_ = 0;                   // a rank that was missing when last checked
  mutable uint64_t looks_ = 0;
};

}  // namespace distrain::membership
