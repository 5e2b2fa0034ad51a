#pragma once

#include <set>

#include "party.h"

namespace distrain::membership {

/// Rank 0's Party: Note [Control plane].
class Hub final : public Party {
 public:
  using Party::Party;

  /// Admits `rank` on `link`. Returns an error with the first mismatch if the rank is refused.
  std::optional<base::Error> join(Link link, int rank, wire::Join join, base::TimePoint now);
  /// Reserves a free rank for the process on `link`, which has asked for any: until it joins as
  /// that rank, for a minute at most, or until keep_no_more(). Returns an error if it is refused;
  /// `overloaded` if no rank is free now.
  std::optional<base::Error> keep_place(Link link, const wire::Join& join, base::TimePoint now);
  void keep_no_more(Link link);
  /// Called once, when rank 0 itself can take part; a job of one rank begins here.
  void begin() { meet_if_all_joined(); }
  void tolerate(Tolerance tolerance) { tolerance_ = std::move(tolerance); }
  /// No longer tolerates all failures of the new process of `rank`.
  void note_of_use(int rank) { untried_.erase(rank); }

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
  struct Kept {
    Link link = 0;
    base::TimePoint since;
  };
  /// A new process of a lost rank, until it receives go.
  struct Newcomer {
    bool is_prepared = false;
    std::set<int> yet_to_know;  ///< the others that have not confirmed it, once it is prepared
  };

  void on_control(int rank, const Message& message) override;
  void on_control_lost(int rank, const base::Error& error) override;
  void find_lost(int rank, const base::Error& error) override;
  void suspect(int rank, const base::Error& error) override { find_lost(rank, error); }
  std::optional<base::Error> check_join(int rank, const wire::Join& join) const;
  bool is_missing(int rank) const;
  bool is_free(int rank) const;
  void tell_members(const Message& message, int except = -1);
  void meet_if_all_joined();
  void take_prepared(int rank, wire::RankDevices devices);

  void welcome(int rank);
  void introduce(int rank, wire::RankDevices devices);
  void note_known(int newcomer, int by);
  void let_go_on(int newcomer);
  void wait_no_more_for(int rank);
  bool goes_on_without(int rank, base::Error& error) const;
  void forget(int rank);

  void come_to_round(int rank, uint64_t round, uint64_t number);
  void end_round_if_all_there();

  std::map<int, Joined> joined_;
  std::map<int, Kept> kept_;
  int next_place_ = 1;                        // the next rank that keep_place() checks
  std::map<int, wire::RankDevices> devices_;  // of the ranks that are, or were, prepared
  Tolerance tolerance_;
  bool job_goes_on_ = true;  // false after a loss that is not tolerated: then all ranks leave
  std::map<int, Newcomer> newcomers_;
  std::set<int> untried_;             // new processes that have not been useful yet
  uint64_t round_ = 0;                // the current round of the end
  std::map<int, uint64_t> in_round_;  // the numbers of the ranks that have entered it
  int awaited_ = 0;                   // a rank that was missing when last checked
  mutable uint64_t looks_ = 0;
};

}  // namespace distrain::membership
