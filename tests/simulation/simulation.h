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
//   losses     where ranks may be lost, the job goes well for all processes that nothing has
//   happened
//              to, unless too few are left: Tolerance. All hear of each loss and each return once,
//              in the order in which rank 0 has told it, and before the end of a round that came
//              after it; who is there refuses nobody that is there
//   always     nobody speaks after its last word, nobody is lost twice, or before go; in the end
//              there are no connections, no timers and nothing that is still to be done

/// What a rank says whose program fails.
Error error_of_program(int rank);
Error out_of_memory(int rank);

/// What has come of a run.
struct Result {
  std::vector<std::string> violations;
  uint64_t digest = 0;  ///< of all that was sent, and when: of two runs alike if they are
  std::map<wire::FrameKind, uint64_t> frames;
  int ended_well = 0;
  int failed = 0;
  std::map<int, int> blamed;  ///< how many ranks, by whom they name; -1: nobody
  int lost = 0;               ///< processes that the job has gone on without
  int returned = 0;           ///< processes in their places
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
  void on_change(const Rank& rank, const Change& change, const Error& why) override;
  void on_directory(const Rank& rank, const wire::Directory& directory) override;
  void on_refused(const Rank& by, int rank, uint32_t incarnation, const Error& why) override;
  void on_violation(const Rank& rank, const std::string& what) override;
  bool is_traced() const override { return static_cast<bool>(trace_); }
  void trace(const Rank& rank, const std::string& what) override;
  Rank& rank_to_join() override { return *ranks_[0]; }
  Rank* at(int place) override;

  /// Null before it is there.
  Rank* current(int rank);
  Rank& add(int rank, int place);
  void start_all();
  void begin(const Fault& fault);
  bool apply(Event& event);
  bool stop(Rank& rank, Event& event);
  bool reset_calls(const Rank& rank, Event& event);
  void separate(const std::set<int>& some, const std::set<int>& others, const Fault& fault);
  void replace(const Fault& fault);
  void replace_lost(int rank, int more_deaths);
  bool is_tolerant() const { return !scenario_.job.tolerated.empty(); }
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

  // in losses.cpp
  struct Hearing {
    std::set<int> earlier;  // lost before it came: to be told at go
    size_t next = 0;        // of history_
  };
  struct JobEnd {  // of one that cannot go on
    Error error;
    TimePoint when;
  };
  void note_hit(const Event& event, Rank& rank);
  void note_welcome(int rank, const wire::Directory& directory);
  void check_loss(const Change& change, const Error& why);
  void check_tolerant_round(const Rank& rank, uint64_t round, uint64_t sum);
  void check_tolerant_end(const Rank& rank);
  void check_tolerant_outcome(const Rank& rank);
  const Rank* process(int rank, uint32_t incarnation) const;
  bool is_here(const Rank& rank) const;
  /// What it is to hear next; skips what is about itself.
  const Change* next_for(const Rank& rank, Hearing& hearing) const;

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
    std::map<int, uint64_t> numbers;  // of the newest process of each rank
    std::set<const Rank*> entered;
    uint64_t sum = 0;    // of those that count, once it is over
    size_t changes = 0;  // that have come before its end
  };
  std::map<uint64_t, Round> rounds_;
  std::vector<Change> history_;                    // as rank 0 tells it
  std::map<int, const Rank*> here_;                // as rank 0 has it, of those that may be lost
  std::map<rpc::ProcessNumber, size_t> welcomed_;  // so much of history_ is in its directory
  std::map<const Rank*, Hearing> hearings_;
  std::map<const Rank*, TimePoint> lost_at_;
  std::set<const Rank*> hit_;  // by faults
  bool is_spoiled_ = false;    // by a fault that no job goes on after
  std::optional<JobEnd> end_;
  Result result_;
};

}  // namespace distrain::simulation
