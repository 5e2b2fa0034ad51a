#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "scenario.h"

namespace distrain::simulation {

// Note [Simulation]
//
// The control plane of a whole job in one thread. Each Rank has the machine that an agent has, a
// control::Hub or control::Member, and around it what stands for sockets, threads and the program;
// Network carries what they say to each other, late, or never; VirtualTime is the clock of all. All
// that is left to chance comes of one seed, so a run that has gone wrong goes wrong again.
//
// What must hold in each run:
//
//   no fault   all ranks end well, the numbers of each round are added up right, the last are zero
//   faults     each rank whose process is there ends: within a second of a death, within the
//   timeout
//              and a second of a stop or a cut; who fails names a rank that did what it should not,
//              or could not be reached
//   always     nobody speaks after its last word, nobody is lost twice, or before go; in the end
//              there are no connections, no timers and nothing that is still to be done

/// What a rank says whose program fails.
Error error_of_program(int rank);

/// What has come of a run.
struct Result {
  std::vector<std::string> violations;
  uint64_t digest = 0;  ///< of all that was sent, and when: of two runs alike if they are
  std::map<wire::FrameKind, uint64_t> frames;
  int ended_well = 0;
  int failed = 0;
  std::map<int, int> blamed;  ///< how many ranks, by whom they name; -1: nobody
  double seconds = 0;         ///< of virtual time, until the last rank has ended

  uint64_t frames_in_all() const;
  std::string text() const;
};

class Simulation final : private Observer {
 public:
  /// Called with each line of what happens, if it is given.
  using Trace = std::function<void(const std::string& line)>;

  explicit Simulation(Scenario scenario, Bug bug = Bug::kNone, Trace trace = {});

  Result run();

 private:
  /// A fault that has come about.
  struct Event {
    Fault fault;
    TimePoint began;
    bool is_harmless = false;  // for this job: all must end well
    bool is_certain = false;   // somebody has to notice, from its beginning on
    bool is_seen_at_once = false;
  };

  // Observer
  void on_phase(Phase phase) override;
  void on_sent(const Rank& from, int to, const Message& message) override;
  void on_round_entered(const Rank& rank, uint64_t round, uint64_t number) override;
  void on_round_over(const Rank& rank, uint64_t round, uint64_t sum) override;
  void on_violation(const Rank& rank, const std::string& what) override;
  bool is_traced() const override { return static_cast<bool>(trace_); }
  void trace(const Rank& rank, const std::string& what) override;
  Rank& rank_to_join() override { return *ranks_[0]; }
  /// Null before it is there.
  Rank* current(int rank) override;

  Rank& add(int rank, int place);
  void start_all();
  void begin(const Fault& fault);
  bool apply(Event& event);
  bool stop(Rank& rank, Event& event);
  bool reset_calls(const Rank& rank, Event& event);
  void separate(const std::set<int>& some, const std::set<int>& others, const Fault& fault);
  void replace(const Fault& fault);
  void send_stranger(int to);

  // in invariants.cpp
  void check();
  void check_end(const Rank& rank);
  void check_counts();
  TimePoint latest_end(const Rank& rank) const;
  void check_blame(const Rank& rank);
  bool may_be_blamed(const Event& event, const Rank& by, int rank) const;
  bool is_missing(int rank, TimePoint when) const;
  void violation(const std::string& what);

  const Scenario scenario_;
  const Bug bug_;
  const Trace trace_;
  VirtualTime time_;
  Network network_;
  base::Random random_;
  std::vector<std::unique_ptr<Rank>> ranks_;  // first of each rank one; then those who come later
  std::vector<std::unique_ptr<Host>> strangers_;
  std::vector<Event> events_;
  struct Round {
    std::set<int> ranks;
    uint64_t sum = 0;
  };
  std::map<uint64_t, Round> rounds_;
  Result result_;
};

}  // namespace distrain::simulation
