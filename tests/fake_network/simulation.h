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

namespace distrain::fake_network {

// Note [Simulation]
//
// Simulates the control plane of a whole job in one thread. Each Rank has the state machine of a
// real agent, a Coordinator or Member, and simulated sockets, threads and program around
// it. Network delivers the messages late or never; VirtualTime is the only clock. All randomness
// comes from one seed, so a failed run can be repeated.
//
// Each run must satisfy:
//
//   no fault   All ranks end well, and the sum of each round is right; the last sums are zero.
//   faults     Each running rank ends within a second of a death, or within the timeout and a
//              second of a stop or a cut. A rank that fails blames a rank that misbehaved or
//              could not be reached.
//   losses     If ranks may be lost, all processes without a fault end well, unless too few
//              ranks are left (see membership::Tolerance). Each rank is notified once of each loss
//              and each return, in rank 0's order, and before the end of a later round. No running
//              rank refuses another running rank.
//   always     No rank sends after its last message. No rank is lost twice, or before rank 0 has
//              started the job. At the end there are no connections, timers or tasks.

/// Returns the error of a rank whose program fails.
Error error_of_program(int rank);
Error out_of_memory(int rank);

struct Result {
  std::vector<std::string> violations;
  uint64_t digest = 0;  ///< a hash of all messages and their times, to compare runs
  std::map<wire::FrameKind, uint64_t> frames;
  int ended_well = 0;
  int failed = 0;
  std::map<int, int> blamed;  ///< blamed rank (-1: none) to the number of ranks that blame it
  int lost = 0;               ///< processes without which the job continued
  int returned = 0;           ///< processes that replaced lost ones
  double seconds = 0;         ///< virtual time until the last rank has ended

  uint64_t frames_in_all() const;
  std::string text() const;
};

class Simulation final : private Observer {
 public:
  /// Called with one line of text for each event.
  using Trace = std::function<void(const std::string& line)>;

  explicit Simulation(Scenario scenario, Bug bug = Bug::kNone, Trace trace = {});

  Result run();

 private:
  /// A fault that has occurred.
  struct Event {
    Fault fault;
    TimePoint began;
    bool is_harmless = false;      // all ranks must end well despite the fault
    bool is_certain = false;       // ranks must notice the fault in time: see latest_end()
    bool is_seen_at_once = false;  // ranks notice the fault without a timeout
  };

  // Overrides of Observer.
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

  /// Returns the latest process that has joined as `rank`, or null if there is none.
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

  // Defined in invariants.cpp.
  void check();
  void check_end(const Rank& rank);
  void check_counts();
  TimePoint latest_end(const Rank& rank) const;
  void check_blame(const Rank& rank);
  bool may_be_blamed(const Event& event, const Rank& by, int rank) const;
  bool is_missing(int rank, TimePoint when) const;
  void violation(const std::string& what);

  // Defined in losses.cpp. A Hearing records which changes a rank has been notified of.
  struct Hearing {
    std::set<int> earlier;  // losses before this rank joined, announced to it at go
    size_t next = 0;        // index into history_
  };
  struct JobEnd {  // why and when the job became unable to continue
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
  /// Returns the next change that the rank must be notified of; skips changes of its own rank.
  const Change* next_for(const Rank& rank, Hearing& hearing) const;

  const Scenario scenario_;
  const Bug bug_;
  const Trace trace_;
  VirtualTime time_;
  Network network_;
  base::Random random_;
  std::vector<std::unique_ptr<Rank>> ranks_;  // the first process of each rank, then replacements
  std::vector<std::unique_ptr<Host>> strangers_;
  std::vector<Event> events_;
  struct Round {
    std::map<int, uint64_t> numbers;  // the number that the newest process of each rank reported
    std::set<const Rank*> entered;
    uint64_t sum = 0;    // the expected sum, set when the round ends
    size_t changes = 0;  // number of changes before the end of the round
  };
  std::map<uint64_t, Round> rounds_;
  std::vector<Change> history_;      // in the order in which rank 0 reports them
  std::map<int, const Rank*> here_;  // ranks that rank 0 considers alive
  std::map<membership::ProcessNumber, size_t> welcomed_;  // history_.size() when admitted
  std::map<const Rank*, Hearing> hearings_;
  std::map<const Rank*, TimePoint> lost_at_;
  std::set<const Rank*> hit_;  // processes that a fault hits
  bool is_spoiled_ = false;    // true after a fault that no job survives
  std::optional<JobEnd> end_;
  Result result_;
};

}  // namespace distrain::fake_network
