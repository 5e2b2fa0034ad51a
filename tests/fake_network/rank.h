#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "control_protocol.h"
#include "network.h"
#include "proof.h"

namespace distrain::fake_network {

using base::Error;
using membership::ControlProtocol;
using membership::ControlTransport;
using membership::Coordinator;
using membership::Link;
using membership::Member;

inline constexpr const char* kSimulatedJob = "simulated";
inline constexpr const char* kTooFewLeft = "too few are left";

/// How a process has ended.
enum class Outcome { kNone, kEndedWell, kFailed, kDied };

/// A deliberate bug in the simulated environment of the control plane; the checks must detect it.
enum class Bug {
  kNone,
  kLossIsNotSpread,      ///< rank 0 sends neither losses nor its reason to abort
  kSilenceIsNotJudged,   ///< a silent rank counts as heard
  kRoundIsCountedTwice,  ///< a rank's message that it has entered a round is counted twice
  kAccuserIsBlamed,      ///< rank 0 blames the rank that reports a loss
  kLastWordIsKept,       ///< a rank that aborts does not send its reason
  kNothingIsClosed,      ///< connections stay open
  kNewcomerGoesEarly,    ///< rank 0 starts a replacement before other ranks know of it
};

/// When rank 0's program stops admitting processes that replace lost ranks.
enum class Door { kClosesInTheMidst, kClosesAtEnd, kStaysOpen };

/// The parameters that all ranks of a run share.
struct Job {
  int size = 0;
  Duration peer_timeout{};
  Duration join_timeout{};
  Duration longest_delay{};
  Duration longest_prepare{};
  Duration longest_work{};
  Duration longest_reaction{};  ///< longest time from an untolerated loss to a rank's abort
  double calls_per_rank = 0;    ///< average number of calls to random ranks
  std::set<int> tolerated;      ///< ranks that may be lost while at least `least` of them are left
  size_t least = 1;
  Door door = Door::kClosesInTheMidst;
};

/// The loss of a process or the arrival of its replacement, as rank 0 announces it to the ranks.
struct Change {
  int rank = 0;
  uint32_t incarnation = 0;
  bool is_return = false;
  bool job_goes_on = true;

  bool operator==(const Change&) const = default;
  std::string text() const;
};

/// The phases of a job. Each begins when rank 0 reaches it. The time of a fault is relative to one.
enum class Phase { kMeeting, kPreparing, kRunning, kEnding };

class Rank;

/// Receives the events of the ranks.
class Observer {
 public:
  virtual ~Observer() = default;
  virtual void on_phase(Phase phase) = 0;
  virtual void on_sent(const Rank& from, int to, const Message& message) = 0;
  virtual void on_round_entered(const Rank& rank, uint64_t round, uint64_t number) = 0;
  virtual void on_round_over(const Rank& rank, uint64_t round, uint64_t sum) = 0;
  /// Called when a rank is notified of a change, but not after the loss of rank 0.
  virtual void on_change(const Rank& rank, const Change& change, const Error& why) = 0;
  virtual void on_directory(const Rank& rank, const wire::Directory& directory) = 0;
  /// Called when `by` refuses a connection from process `incarnation` of `rank`.
  virtual void on_refused(const Rank& by, int rank, uint32_t incarnation, const Error& why) = 0;
  /// Reports a violated invariant.
  virtual void on_violation(const Rank& rank, const std::string& what) = 0;
  virtual bool is_traced() const = 0;
  virtual void trace(const Rank& rank, const std::string& what) = 0;
  virtual Rank& rank_to_join() = 0;
  virtual Rank* at(int place) = 0;
};

/// A process of the job: a real ControlProtocol whose environment (ControlPlane, Peers, AgentCore
/// and the job's program) is simulated as events of virtual time.
class Rank final : public Host, private ControlTransport {
 public:
  static constexpr const char* kNotAllThere = "not all ranks were there within the join timeout";

  Rank(VirtualTime& time, Network& network, Observer& observer, const Job& job, int rank, int place,
       uint64_t seed, Bug bug);

  void start();

  // ---- faults ----
  void die();
  void stop();
  void resume();
  void abort(const Error& error);
  /// Sends an invalid message on a random control connection of this rank.
  void send_garbage();
  /// Makes on_go() throw `error`.
  void fail_at_go(const Error& error) { fails_at_go_ = error; }
  /// Makes the rank run `what` when `delay` has passed after on_go().
  void after_go(Duration delay, std::function<void()> what) { after_go_ = {delay, what}; }
  /// Returns the number of the control connection with `rank` or of a connection for calls with it.
  std::optional<size_t> connection_to(int rank, bool is_control) const;

  int rank() const { return rank_; }
  bool is_stopped() const override { return is_stopped_; }
  bool is_started() const { return is_started_; }
  TimePoint started() const { return started_; }
  /// Returns when the process was last resumed, or the clock's epoch if it never was.
  TimePoint resumed() const { return resumed_; }
  /// Returns true if the process has started and has not ended. It may be stopped.
  bool is_alive() const { return is_started_ && outcome_ == Outcome::kNone; }
  bool has_met() const { return has_gone_; }
  bool has_joined() const { return has_directory_; }
  /// Returns true if rank 0 has admitted this process.
  bool is_admitted() const { return is_admitted_ || rank_ == 0; }
  uint32_t incarnation() const { return incarnation_; }
  membership::ProcessNumber process() const {
    return membership::process_number(rank_, incarnation_);
  }
  /// Returns true if this process has been notified of the loss of rank 0.
  bool is_cut_off() const { return is_cut_off_; }
  /// Returns true if the process has ended or will abort because of a loss.
  bool is_leaving() const { return is_over_ || loss_.has_value(); }
  /// Returns the ranks that have a control connection to this rank, which must be rank 0.
  std::set<int> members() const;
  /// Returns true if the process failed because the join timeout of some rank passed.
  bool has_given_up() const { return error_ && error_->message.starts_with(kNotAllThere); }
  Outcome outcome() const { return outcome_; }
  const std::optional<Error>& error() const { return error_; }
  TimePoint ended() const { return ended_; }
  uint64_t live() const { return live_; }

  // Overrides of Host.
  int place() const override { return place_; }
  bool is_reading() const override { return is_started_ && !is_stopped_ && !is_gone_; }
  bool is_listening() const override { return is_listening_; }
  void on_connection(End end) override;
  void on_message(End end, const Message& message) override;
  void on_end(End end, const Error& error) override;

 private:
  enum class PeerState { kUnconnected, kConnecting, kConnected, kGone };
  struct Peer {
    PeerState state = PeerState::kUnconnected;
    std::optional<Link> own;       // the link for sending; may equal `accepted`
    std::optional<Link> accepted;  // the link that the peer opened
    int waiting = 0;               // calls to be sent once connected
    int under_way = 0;             // calls that have not arrived
    uint32_t incarnation = 0;
  };
  struct Stream {
    End end;
    int rank = -1;
    bool is_control = false;
  };

  // Overrides of ControlTransport.
  void send(Link link, Message message) override;
  void close(Link link, bool flush) override;
  void on_joined(int rank) override;
  void on_directory(const wire::Directory& directory) override;
  void on_go(std::vector<wire::RankDevices> devices) override;
  void on_failed(const Error& error) override;
  void on_lost(const membership::Loss& loss) override;
  void on_returned(int rank, const wire::RankDevices& devices) override;
  void on_round(uint64_t round, uint64_t sum) override;

  void after(Duration delay, std::function<void()> what);
  Duration up_to(Duration longest);
  membership::ControlSettings common_settings() const;
  void begin_as_coordinator();
  void begin_as_member(End end);
  void prepare();
  void try_to_join();
  void give_up_joining();
  void tick();
  void end(Outcome outcome, std::optional<Error> error);
  void close_door();

  void connect(Host& to, Duration limit, Network::OnConnected then);
  membership::Credentials credentials(wire::HelloPurpose purpose) const;
  void introduce(End end, wire::HelloPurpose purpose, Network::OnConnected then);
  void go_on_introducing(End end, const Message& message);
  void end_introduction(End end, bool is_believed);
  void hear_stranger(End end, const Message& message);
  std::optional<Error> admit_peer(End end, int rank, uint32_t incarnation);
  std::optional<Error> admit_member(End end, int rank, const Message& join);
  void refuse(End end, const Error& why);
  std::optional<Error> accept(int rank, End end);
  Link hold(End end, int rank, bool is_control);
  void receive(Link link, const Message& message);

  void call_somebody();
  void call(int to);
  void reach(int to, uint32_t incarnation, TimePoint deadline);
  void connected(int to, uint32_t incarnation, std::optional<End> end);
  void begin_to_send(int to, Link link);
  void call_has_come(End end);

  void tolerate(bool may_return);
  void finish_work();
  void end_if_done();
  void enter_round(uint64_t round);
  void violation(const std::string& what) { observer_.on_violation(*this, what); }
  void trace(const std::string& what) {
    if (observer_.is_traced()) observer_.trace(*this, what);
  }

  VirtualTime& time_;
  Network& network_;
  Observer& observer_;
  const Job& job_;
  const int rank_;
  const int place_;
  const Bug bug_;
  base::Random random_;

  bool is_started_ = false;
  TimePoint started_{};
  TimePoint resumed_{};
  bool is_stopped_ = false;
  bool is_listening_ = false;
  bool is_over_ = false;                     // the protocol has ended
  bool is_gone_ = false;                     // the process has ended, too
  std::vector<std::function<void()>> held_;  // tasks that became due while it was stopped

  std::unique_ptr<ControlProtocol> protocol_;
  Coordinator* coordinator_ = nullptr;
  std::map<Link, Stream> streams_;
  std::map<End, Link> links_;
  struct OutgoingHandshake {
    membership::Initiator initiator;
    Network::OnConnected then;
    bool has_answered = false;
  };
  std::map<End, OutgoingHandshake> introductions_;
  struct Stranger {
    std::optional<membership::Responder> responder;
    bool is_believed = false;
  };
  std::map<End, Stranger> strangers_;
  Link next_link_ = 1;
  std::vector<Peer> peers_;

  bool waits_for_rank_0_ = false;
  bool is_admitted_ = false;
  bool has_directory_ = false;
  bool has_gone_ = false;
  uint32_t incarnation_ = 0;
  std::pair<Duration, std::function<void()>> after_go_;
  std::set<membership::ProcessNumber> lost_;
  bool is_cut_off_ = false;
  std::optional<Error> loss_;  // the first loss that the job does not tolerate
  std::optional<Error> fails_at_go_;
  bool is_working_ = false;
  bool is_ending_ = false;
  int calls_under_way_ = 0;
  uint64_t held_values_ = 0;  // values that other ranks refer to
  uint64_t live_ = 0;         // the number that this rank reported in its last round
  uint64_t round_ = 0;
  bool is_in_round_ = false;

  Outcome outcome_ = Outcome::kNone;
  std::optional<Error> error_;
  TimePoint ended_{};
};

}  // namespace distrain::fake_network
