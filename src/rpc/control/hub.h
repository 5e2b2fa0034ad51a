#pragma once

#include <set>

#include "control/party.h"

namespace distrain::rpc::control {

/// Rank 0: Note [Control plane].
class Hub final : public Party {
 public:
  using Party::Party;

  /// A rank wants to join on `link`. Returns why it is refused: the first field that differs.
  std::optional<base::Error> join(Link link, int rank, wire::Join join, base::TimePoint now);
  /// Somebody on `link` asks for a rank that nobody else is, and joins as that soon: until then it
  /// is kept from others who ask, for a minute at most or until keep_no_more(). Gives back why it
  /// is refused; `overloaded`: there is none now.
  std::optional<base::Error> keep_place(Link link, const wire::Join& join, base::TimePoint now);
  void keep_no_more(Link link);
  /// To be called once, when this rank can take part: one that is alone meets nobody.
  void begin() { meet_if_all_joined(); }
  /// From here on, in place of what was said before.
  void tolerate(Tolerance tolerance) { tolerance_ = std::move(tolerance); }
  /// A rank that is there again is of use: from here on what it fails with counts for all.
  void note_of_use(int rank) { untried_.erase(rank); }

  void prepared(wire::RankDevices devices) override;
  void enter_round(uint64_t round, uint64_t number) override;
  std::vector<int> missing() const override;
  bool is_suspected(int) const override { return false; }
  /// Counts the ranks that were looked at to see whether all have come, for tests.
  uint64_t looks() const { return looks_; }

 private:
  struct Joined {
    Link link = 0;
    wire::Endpoint endpoint;
  };
  /// For one who has asked for a place, and is yet to join.
  struct Kept {
    Link link = 0;
    base::TimePoint since;
  };
  /// A new process in the place of one that was lost, until it hears go.
  struct Newcomer {
    bool is_prepared = false;
    std::set<int> yet_to_know;  ///< of it, once it is prepared
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
  int next_place_ = 1;                        // that is looked at for whoever asks for one
  std::map<int, wire::RankDevices> devices_;  // of those that are, or were, prepared
  Tolerance tolerance_;
  bool job_goes_on_ = true;  // until a loss that it cannot go on after: then all leave
  std::map<int, Newcomer> newcomers_;
  std::set<int> untried_;             // who have come anew, and may not fit the job
  uint64_t round_ = 0;                // that is under way
  std::map<int, uint64_t> in_round_;  // the numbers of those who have come to it
  int awaited_ = 0;                   // a rank that was missing when it was last looked at
  mutable uint64_t looks_ = 0;
};

}  // namespace distrain::rpc::control
