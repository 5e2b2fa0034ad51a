#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "distrain/membership/loss.h"
#include "distrain/membership/options.h"
#include "distrain/wire/frame.h"

namespace distrain::membership {

using base::Error;
using base::ErrorKind;
using base::Exception;
using wire::FrameKind;

// Note [Control plane]
//
// Ranks meet, monitor each other, learn of losses and end together. Each rank has a control
// connection to rank 0, the coordinator, and reports the losses that it sees to the coordinator,
// which reports them to all ranks. So a job has O(N) control connections and not O(N²). Calls use
// connections of their own. Both ends monitor these too, because the link between two ranks may
// fail while their connections to rank 0 stay intact. That cannot happen within a host, so no
// heartbeats travel over unix sockets for calls: with N ranks they would be O(N²) messages.
//
// A call connection that breaks without a message proves little: the other end may have left
// because of a loss that this rank does not know yet. So this rank only reports the break to the
// coordinator, which reports losses to all ranks in one order: the loss because of which the other
// end left comes before the loss of that end. A rank that loses the coordinator treats all ranks as
// lost, because it would not learn of later losses.
//
// Only the coordinator decides whether the job continues without a lost rank: Tolerance. If it
// does, a new process can join as that rank. The new process receives the directory at once and
// prepares itself. Then the coordinator sends its endpoint to all other ranks, and sends it kGo
// when all of them have confirmed, so that no rank refuses its connections. From the directory on,
// it receives all messages that the coordinator sends to all ranks. Of two new processes, neither
// receives kGo before the other has confirmed it.
//
// A process without a rank (kUnassignedRank) first asks the coordinator on a separate connection to
// reserve one, so it knows its rank before it prepares anything: Slot.
//
// Coordinator (rank 0) and Member (any other rank) have no I/O, clock or threads: events are calls
// that pass the time, and ControlTransport performs the effects. So a test can simulate a hundred
// ranks, and delay or drop messages.
//
// States of a rank:
//
//   meeting    until the rank has the directory (rank 0: until all ranks have joined)
//   preparing  until kGo (rank 0: until all ranks are prepared). If a rank is lost before kGo, the
//              job ends for all, unless the rank is a new process that joins later
//   running    until the rank leaves, or receives the message that it is lost itself
//   over       the rank sends and reports nothing any more

/// The number that ControlTransport gives to a connection of this rank.
using Link = uint64_t;

/// The bytes of a message. Copies share the bytes, because rank 0 sends one message to all ranks.
class Body {
 public:
  Body() = default;
  Body(wire::Bytes bytes)  // NOLINT: implicit by design
      : bytes_(std::make_shared<const wire::Bytes>(std::move(bytes))) {}
  operator std::span<const uint8_t>() const {  // NOLINT
    return bytes_ ? std::span<const uint8_t>(*bytes_) : std::span<const uint8_t>();
  }
  /// Returns the bytes; null if the body is empty.
  const std::shared_ptr<const wire::Bytes>& shared() const { return bytes_; }

 private:
  std::shared_ptr<const wire::Bytes> bytes_;
};

/// A frame without payload. `a` and `b` are the header's call_id and context_id.
struct Message {
  FrameKind kind = FrameKind::kHeartbeat;
  uint64_t a = 0;
  uint64_t b = 0;
  Body body = {};
};

/// Performs the I/O and callbacks of a ControlProtocol. Its functions must not call that object.
class ControlTransport {
 public:
  virtual ~ControlTransport() = default;
  /// Sends a message, without confirmation of delivery.
  virtual void send(Link link, Message message) = 0;
  /// Closes the connection; does not call closed(). If `flush`, first sends queued messages.
  virtual void close(Link link, bool flush) = 0;
  /// Called on ranks other than 0 when rank 0 has admitted this process as `rank`.
  virtual void on_joined(int rank) = 0;
  /// Called once, when this rank knows all ranks and their endpoints.
  virtual void on_directory(const wire::Directory& directory) = 0;
  /// Called once, when every rank accepts calls. An exception ends the job for all ranks.
  virtual void on_go(std::vector<wire::RankDevices> devices) = 0;
  /// Called instead of on_go() if the job does not begin.
  virtual void on_failed(const Error& error) = 0;
  /// Called after on_go(), once for each lost process. A rank that joins a running job also gets
  /// the earlier losses, before on_go().
  virtual void on_lost(const Loss& loss) = 0;
  /// Called when a new process has replaced a lost rank. directory() then has the new endpoint.
  virtual void on_returned(int rank, const wire::RankDevices& devices) = 0;
  /// Called when all ranks have entered shutdown round `round`. `sum` is the sum of their numbers.
  virtual void on_round(uint64_t round, uint64_t sum) = 0;
};

struct ControlSettings : Options {
  wire::Endpoint endpoint;  ///< address at which other ranks reach this rank
  std::string secret;       ///< on rank 0: the directory's secret of Note [Identity]
};

inline Error rendezvous_error(std::string message, int rank = -1) {
  return {ErrorKind::kRendezvous, std::move(message), rank, "join"};
}

/// A rank's state machine of the control plane: see Note [Control plane]. Not thread-safe.
class ControlProtocol {
 public:
  ControlProtocol(ControlSettings settings, ControlTransport& transport, base::TimePoint now);
  virtual ~ControlProtocol() = default;
  ControlProtocol(ControlProtocol&&) = delete;

  virtual void prepared(wire::RankDevices devices) = 0;
  /// Enters the shutdown round `round`, which is 0 or follows the round of the last on_round().
  virtual void enter_round(uint64_t round, uint64_t number) = 0;
  /// Leaves the job and sends `error` to all other ranks. Before on_go(), also calls on_failed().
  void abort(const Error& error);
  /// Leaves the job. Called when all ranks have entered the last shutdown round.
  void leave() {
    if (state_ != State::kRunning) return;
    state_ = State::kOver;
    send_to_all({FrameKind::kLeave});
  }
  /// Called when a call connection to `rank` is open, which is monitored if not `is_local`, within
  /// this host. The rank must not be lost: see is_here().
  void open(int rank, Link link, base::TimePoint now, bool is_local = false) {
    if (state_ == State::kOver) {  // opened while this rank sent its last messages
      transport_.send(link, last_message_);
      transport_.close(link, true);
      return;
    }
    connections_[link] = {rank, false, now, is_local};
  }
  /// Returns true if this rank is running, and `rank` has neither left the job nor been lost.
  bool is_here(int rank) const {
    return state_ == State::kRunning && presence(rank) == Presence::kHere;
  }
  /// Returns true while this rank suspects that `rank` is lost, until rank 0 has decided.
  virtual bool is_suspected(int rank) const = 0;
  /// Called if this rank cannot reach `rank`, or has received malformed data from it.
  void report(int rank, Error error) {
    if (state_ == State::kPreparing) return abort(error);
    declare_lost(rank, error);
  }
  /// Returns an error if this rank refuses a connection that `rank` has opened.
  std::optional<Error> check_peer(int rank, uint32_t incarnation) const;

  void receive(Link link, const Message& message);
  /// Called when any bytes have arrived on `link`.
  void heard(Link link, base::TimePoint when) {
    const auto found = connections_.find(link);
    if (found != connections_.end()) found->second.heard = std::max(found->second.heard, when);
  }
  void closed(Link link, const Error& error);
  /// Sends heartbeats and declares silent peers lost. Returns the time for the next call.
  base::TimePoint tick(base::TimePoint now);
  /// Sends heartbeats if they are due.
  void beat(base::TimePoint now) {
    if (state_ == State::kOver || now < next_beat_) return;
    for (const auto& [link, connection] : connections_) {
      if (!connection.is_local) transport_.send(link, {FrameKind::kHeartbeat});
    }
    next_beat_ = now + interval_;
  }

  bool is_running() const { return state_ == State::kRunning; }
  bool is_over() const { return state_ == State::kOver; }
  /// Returns the directory, which is empty until rank 0 has sent it.
  const wire::Directory& directory() const { return directory_; }
  const wire::Directory::Entry& entry(int rank) const {
    return directory_.ranks[static_cast<size_t>(rank)];
  }
  const std::string& secret() const { return directory_.secret; }
  /// Returns the ranks that this rank waits for, as far as it knows.
  virtual std::vector<int> missing() const = 0;

 protected:
  enum class State { kMeeting, kPreparing, kRunning, kOver };
  enum class Presence { kHere, kLeft, kLost };
  struct Connection {
    int rank = 0;
    bool is_control = false;
    base::TimePoint heard;
    bool is_local = false;
    bool is_leaving = false;
  };

  virtual void on_control(int rank, const Message& message) = 0;
  /// Called instead of declare_lost() if the control connection to `rank` breaks before on_go().
  virtual void on_control_lost(int rank, const Error& error) = 0;
  /// Called when this rank has found that `rank` is lost.
  virtual void declare_lost(int rank, const Error& error) = 0;
  /// Called when a connection for calls to `rank` has broken without a message.
  virtual void suspect(int rank, const Error& error) = 0;

  void add_control(int rank, Link link, base::TimePoint now) {
    connections_[link] = {rank, true, now};
  }
  /// Calls on_go(). If that throws, calls abort() and returns false.
  bool begin_running(std::vector<wire::RankDevices> devices);
  void set_directory(wire::Directory directory);
  /// Unless `rank` is lost or has left, marks it as lost, disconnects it and calls on_lost().
  void mark_lost(int rank, const Error& error, bool job_goes_on) {
    if (state_ == State::kOver || presence(rank) != Presence::kHere) return;
    presence_[static_cast<size_t>(rank)] = Presence::kLost;
    losses_[rank] = error;
    disconnect(rank, error);
    transport_.on_lost({rank, error, job_goes_on, entry(rank).incarnation});
  }
  /// Sends `why` to `rank` and closes all connections to it.
  void disconnect(int rank, const Error& why);
  /// Records that a new process has replaced a lost rank, and calls on_returned().
  void replace_lost(int rank, uint32_t incarnation, const wire::Returned& returned);
  Error loss(int rank, const Error& error) const {
    Error loss = error;
    if (loss.kind == ErrorKind::kPeerLost) {
      loss.message = text_of(rank) + " is lost: " + error.message;
    }
    loss.rank = loss.kind == ErrorKind::kResources ? settings_.rank : rank;
    return loss;
  }
  /// Returns the error that `rank` sent. If the error claims that this rank is lost, adds `rank` to
  /// its message, because a rank that was stopped for a while may claim this wrongly.
  Error reason_of(int rank, const Message& message) const {
    Error error = base::with_origin(wire::decode_error(message.body), rank);
    if (error.rank == settings_.rank && error.kind == ErrorKind::kPeerLost) {
      error.message = text_of(rank) + " says: " + error.message;
    }
    return error;
  }
  /// Returns "rank 3 (trainer 2)", or "rank 3" while the name is unknown.
  std::string text_of(int rank) const {
    const auto at = static_cast<size_t>(rank);
    if (at < directory_.ranks.size()) return rank_text(rank, directory_.ranks[at].name);
    return at < settings_.names.size() ? rank_text(rank, settings_.names[at])
                                       : "rank " + std::to_string(rank);
  }

  Presence presence(int rank) const { return presence_[static_cast<size_t>(rank)]; }

  const ControlSettings settings_;
  ControlTransport& transport_;
  State state_ = State::kMeeting;
  std::map<Link, Connection> connections_;
  std::vector<Presence> presence_;  // by rank; empty until the ranks are known
  std::map<int, Error> losses_;     // the error of each lost rank
  wire::Directory directory_;

 private:
  void send_to_all(Message message);
  Error why_over() const {
    if (last_message_.kind == FrameKind::kAbort) return wire::decode_error(last_message_.body);
    return {ErrorKind::kPeerLost, text_of(settings_.rank) + " has left", settings_.rank};
  }
  /// Sends the reason and closes the connection; if `flush` is true, only after sending completes.
  void close_with_reason(Link link, const Error& why, bool flush) {
    transport_.send(link, {FrameKind::kAbort, 0, 0, wire::encode(why)});
    connections_.erase(link);
    transport_.close(link, flush);
  }

  Message last_message_;           // sent when this rank left; set if kOver
  const base::Duration interval_;  // between heartbeats
  base::TimePoint next_beat_;
  base::TimePoint wake_at_;
};

/// Rank 0's state machine: see Note [Control plane].
class Coordinator final : public ControlProtocol {
 public:
  using ControlProtocol::ControlProtocol;
  /// Admits the process on `link` as `rank`, or returns the reason to refuse the process.
  std::optional<Error> join(Link link, int rank, wire::Join join, base::TimePoint now);
  /// Reserves a free rank for the process on `link`. The reservation ends when the process joins,
  /// after a minute, or by release_reservation(). Returns `overloaded` if no rank is free now.
  std::optional<Error> reserve_rank(Link link, const wire::Join& join, base::TimePoint now);
  void release_reservation(Link link) {
    std::erase_if(reservations_, [link](const auto& kept) { return kept.second.link == link; });
  }
  /// Called once, when other ranks can join. Begins the job if it has only one rank.
  void begin() { begin_if_all_joined(); }
  void tolerate(Tolerance tolerance) { tolerance_ = std::move(tolerance); }
  /// Ends the trial of `rank`'s new process, in which the job tolerates any failure of the process.
  void note_of_use(int rank) { on_trial_.erase(rank); }

  void prepared(wire::RankDevices devices) override { note_prepared(0, std::move(devices)); }
  void enter_round(uint64_t round, uint64_t number) override {
    if (state_ == State::kRunning) note_entered(0, round, number);
  }
  std::vector<int> missing() const override {
    std::vector<int> ranks;
    for (int rank = 0; rank < static_cast<int>(settings_.names.size()); ++rank) {
      if (is_missing(rank)) ranks.push_back(rank);
    }
    return ranks;
  }
  bool is_suspected(int) const override { return false; }
  /// For tests: returns how often the coordinator has checked whether a rank is free or missing.
  uint64_t looks() const { return looks_; }

 private:
  struct Joined {
    Link link = 0;
    wire::Endpoint endpoint;
  };
  /// A rank that is reserved for a process which has not joined yet.
  struct Reservation {
    Link link = 0;
    base::TimePoint since;
  };
  /// A new process of a lost rank, from its join until the coordinator sends kGo to it.
  struct Newcomer {
    bool is_prepared = false;
    std::set<int> unconfirmed;  ///< if prepared: ranks that have not confirmed this process
  };

  void on_control(int rank, const Message& message) override;
  void on_control_lost(int rank, const Error& error) override {
    if (state_ == State::kMeeting) {
      joined_.erase(rank);  // the rank is free again
    } else {
      abort(error);
    }
  }
  void declare_lost(int rank, const Error& error) override;
  void suspect(int rank, const Error& error) override { declare_lost(rank, error); }
  std::optional<Error> check_join(int rank, const wire::Join& join) const;
  bool is_missing(int rank) const {
    ++looks_;
    if (state_ == State::kMeeting) return rank != 0 && !joined_.contains(rank);
    if (state_ == State::kPreparing) return !devices_.contains(rank);
    return (is_here(rank) || newcomers_.contains(rank)) && !in_round_.contains(rank);
  }
  bool is_free(int rank) const {
    if (state_ == State::kMeeting) return !joined_.contains(rank);
    return state_ == State::kRunning && job_goes_on_ && tolerance_.may_return &&
           tolerance_.ranks.contains(rank) && presence(rank) == Presence::kLost &&
           !newcomers_.contains(rank) && entry(rank).incarnation + 1 < kMaxIncarnations;
  }
  void broadcast(const Message& message, int except = -1) {
    for (const auto& [rank, joined] : joined_) {
      if (rank != except && connections_.contains(joined.link))
        transport_.send(joined.link, message);
    }
  }
  void begin_if_all_joined();
  void note_prepared(int rank, wire::RankDevices devices);
  std::vector<wire::RankDevices> all_devices() const {
    std::vector<wire::RankDevices> all;
    for (const auto& [rank, devices] : devices_) all.push_back(devices);
    return all;
  }

  void send_directory(int rank);
  void announce(int rank, wire::RankDevices devices);
  void note_confirmed(int newcomer, int by) {
    const auto found = newcomers_.find(newcomer);
    if (found == newcomers_.end() || found->second.unconfirmed.erase(by) == 0) return;
    if (found->second.unconfirmed.empty()) start_newcomer(newcomer);
  }
  void start_newcomer(int newcomer) {
    newcomers_.erase(newcomer);
    transport_.send(joined_.at(newcomer).link, {FrameKind::kGo, 0, 0, wire::encode(all_devices())});
  }
  void stop_waiting_for(int rank) {
    const auto waiting = newcomers_;  // a copy, because note_confirmed() may remove entries
    for (const auto& [newcomer, its] : waiting) note_confirmed(newcomer, rank);
  }
  bool tolerates(int rank, Error& error) const;
  void forget(int rank) {
    newcomers_.erase(rank);
    on_trial_.erase(rank);
    in_round_.erase(rank);
    // Keeps the rank's entry in joined_, which has no effect until a new process replaces it.
  }

  void note_entered(int rank, uint64_t round, uint64_t number) {
    if (round != round_ || !in_round_.emplace(rank, number).second) {
      wire::Reader::fail("a round of the end that is not under way");
    }
    end_round_if_complete();
  }
  void end_round_if_complete();

  std::map<int, Joined> joined_;
  std::map<int, Reservation> reservations_;
  int next_to_reserve_ = 1;                   // the next rank that reserve_rank() checks
  std::map<int, wire::RankDevices> devices_;  // of all ranks that have been prepared
  Tolerance tolerance_;
  bool job_goes_on_ = true;  // false after a loss that is not tolerated: then all ranks leave
  std::map<int, Newcomer> newcomers_;
  std::set<int> on_trial_;            // ranks with a new process, until note_of_use()
  uint64_t round_ = 0;                // the current shutdown round
  std::map<int, uint64_t> in_round_;  // numbers of the ranks that entered the round
  int awaited_ = 0;                   // the rank that end_round_if_complete() checks first
  mutable uint64_t looks_ = 0;
};

/// The state machine of every rank except rank 0: see Note [Control plane].
class Member final : public ControlProtocol {
 public:
  /// `coordinator` is the connection to rank 0, on which this rank joins.
  Member(ControlSettings settings, ControlTransport& transport, Link coordinator,
         base::TimePoint now);

  void prepared(wire::RankDevices devices) override {
    if (state_ != State::kPreparing) return;
    transport_.send(coordinator_, {FrameKind::kPrepared, 0, 0, wire::encode(devices)});
  }
  void enter_round(uint64_t round, uint64_t number) override {
    if (is_here(0)) transport_.send(coordinator_, {FrameKind::kFlush, round, number});
  }
  std::vector<int> missing() const override { return {}; }  // only rank 0 knows the missing ranks
  bool is_suspected(int rank) const override { return reported_lost_.contains(rank); }

 private:
  void on_control(int rank, const Message& message) override;
  void on_control_lost(int, const Error& error) override { abort(error); }
  void declare_lost(int rank, const Error& error) override;
  /// Reports a loss to the coordinator, which answers by reporting it to all ranks.
  void suspect(int rank, const Error& error) override {
    if (!is_here(rank) || !is_here(0) || !reported_lost_.insert(rank).second) return;
    const uint32_t incarnation = entry(rank).incarnation;
    transport_.send(coordinator_, {FrameKind::kLost, static_cast<uint64_t>(rank), incarnation,
                                   wire::encode(error)});
  }

  const Link coordinator_;
  bool has_joined_ = false;
  // Ranks whose newest process was reported lost, by this rank or by the coordinator.
  std::set<int> reported_lost_;
};

}  // namespace distrain::membership
