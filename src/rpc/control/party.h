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

#include "distrain/base/clock.h"
#include "distrain/base/error.h"
#include "distrain/rpc/incarnation.h"
#include "distrain/wire/frame.h"
#include "distrain/wire/handshake.h"

namespace distrain::rpc::control {

// Note [Control plane]
//
// How ranks meet, know that the others are alive, hear who is lost, and end together. Each rank has
// a connection to rank 0 for that, and rank 0 is the hub: what one rank sees of another's loss it
// tells the hub, and the hub tells all; so a job has O(N) connections and not O(N²). Calls have
// connections of their own, made when there is something to send, and the ranks at their ends watch
// those, too: a link may be cut that leaves both their ways to rank 0.
//
// A connection for calls that breaks without a word proves little: the other end may have left
// because of a loss that this rank has yet to hear of. So it asks the hub, which tells all ranks of
// losses in one order: whoever left because of another was told of that one first. Who has lost the
// hub has lost all, for the same reason.
//
// Whatever a member sees of another's loss, only the hub says whether the job goes on without that
// rank: Tolerance. If it does, the place is open again. A new process that joins in its midst gets
// the directory at once, and prepares itself; then all others are told where it is, and it hears go
// when all of them have said that they know: so none of them refuses what it connects to. From the
// directory on it hears all that the hub tells the others, and others may be such new processes,
// too: each of two knows of the other before either hears go.
//
// Who is to be any rank asks first (kAnyRank), on a connection of its own, and the hub keeps a
// place for it: so a process knows which rank it is before it prepares anything. See Place.
//
// All of it is in Hub (rank 0) and Member (any other), which do no I/O, have no clock and no
// thread: an event comes in by a function call with the time, what is to be done goes out through
// World. So a test can play one hundred ranks, with messages late or lost.
//
// States of a rank, and what takes it on:
//
//   meeting    until the directory is there; Hub: until all have joined
//   preparing  until go; Hub: until all are prepared. A rank that is lost before go ends all,
//              but for one that comes in the midst of the job
//   running    until it leaves, or is told that it is lost itself
//   over       nothing is sent or told any more

/// A connection of this rank, as the World numbers it.
using Link = uint64_t;

/// Bytes of a message. Copies share them, as rank 0 sends the same message to all ranks.
class Body {
 public:
  Body() = default;
  Body(wire::Bytes bytes)  // NOLINT: implicit by design
      : bytes_(std::make_shared<const wire::Bytes>(std::move(bytes))) {}
  operator std::span<const uint8_t>() const {  // NOLINT
    return bytes_ ? std::span<const uint8_t>(*bytes_) : std::span<const uint8_t>();
  }
  /// Null for an empty body.
  const std::shared_ptr<const wire::Bytes>& shared() const { return bytes_; }

 private:
  std::shared_ptr<const wire::Bytes> bytes_;
};

/// A frame without a payload. `a` and `b` are its call_id and context_id.
struct Message {
  wire::FrameKind kind = wire::FrameKind::kHeartbeat;
  uint64_t a = 0;
  uint64_t b = 0;
  Body body = {};
};

/// What a Party does to its surroundings. It is called from inside the events below, and must not
/// come back with one of them from there.
class World {
 public:
  virtual ~World() = default;
  /// Whether it arrives is not known.
  virtual void send(Link link, Message message) = 0;
  /// What was sent goes out first if `flush`. No closed() follows.
  virtual void close(Link link, bool flush) = 0;

  /// Member: rank 0 has this place for it, which is its own unless that is any.
  virtual void on_joined(int rank) = 0;
  /// Once: who the ranks are, and where.
  virtual void on_directory(const wire::Directory& directory) = 0;
  /// Once: all ranks can be called. An exception ends the job for all.
  virtual void on_go(std::vector<wire::RankDevices> devices) = 0;
  /// Instead of go: there will be no job.
  virtual void on_failed(const base::Error& error) = 0;
  /// After go, once for each process that is lost. A rank that comes in the midst of the job hears
  /// it before, too, of those that were lost before it came.
  virtual void on_lost(const Loss& loss) = 0;
  /// A rank that was lost is there again: directory() has its new incarnation, and where it is.
  virtual void on_returned(int rank, const wire::RankDevices& devices) = 0;
  /// All ranks have come to that round of the end.
  virtual void on_round(uint64_t round, uint64_t sum) = 0;
};

struct Settings {
  int rank = 0;
  std::string job;                 ///< what job this is; Member: refused if the hub has another
  std::vector<std::string> names;  ///< Hub: of all ranks
  int world_size = 0;              ///< Member: refused if the hub has another; 0: as it says
  wire::Endpoint endpoint;         ///< where others reach this rank
  std::string secret;              ///< Hub: of the job
  std::map<std::string, std::string> options;  ///< Hub: the job's; Member: must agree with these
  base::Duration peer_timeout{0};              ///< of silence; zero: silence is no loss
};

/// Without whom a job goes on.
struct Tolerance {
  std::set<int> ranks;
  size_t least = 1;         ///< of them are to be left
  std::string if_too_few;   ///< what is said of the loss after which there are fewer
  bool may_return = false;  ///< new processes may take the places of those that are lost
};

base::Error rendezvous_error(std::string message, int rank = -1);

/// One rank's part in the control plane: Note [Control plane]. Not thread-safe.
class Party {
 public:
  Party(Settings settings, World& world, base::TimePoint now);
  virtual ~Party() = default;
  Party(const Party&) = delete;
  Party& operator=(const Party&) = delete;

  // ---- what this rank does ----

  virtual void prepared(wire::RankDevices devices) = 0;
  /// It has come to `round` of the end, the first or the one after the last on_round().
  virtual void enter_round(uint64_t round, uint64_t number) = 0;
  /// It leaves because of `error`, and tells all others. Before go that is on_failed().
  void abort(const base::Error& error);
  /// It leaves, as all have come to the last round.
  void leave();

  // ---- connections for calls ----

  /// One to `rank` is there. Not for one that is lost: see is_here().
  void open(int rank, Link link, base::TimePoint now);
  /// Running, and neither lost nor gone.
  bool is_here(int rank) const;
  /// It seems lost; what rank 0 makes of that is still to come.
  virtual bool is_suspected(int rank) const = 0;
  /// This rank could not reach it, or read what it said.
  void report(int rank, base::Error error);
  /// Why a connection that `rank` has made is refused, if it is.
  std::optional<base::Error> check_peer(int rank, uint32_t incarnation) const;

  // ---- what happens ----

  void receive(Link link, const Message& message);
  /// Bytes came from there, of whatever kind.
  void heard(Link link, base::TimePoint when);
  void closed(Link link, const base::Error& error);
  /// Says that this rank is alive and looks who is silent. Returns when to call it again.
  base::TimePoint tick(base::TimePoint now);

  bool is_running() const { return state_ == State::kRunning; }
  bool is_over() const { return state_ == State::kOver; }
  /// Empty before it is known.
  const wire::Directory& directory() const { return directory_; }
  const std::string& secret() const { return directory_.secret; }
  /// The ranks that this one waits for, as far as it knows them.
  virtual std::vector<int> missing() const = 0;

 protected:
  enum class State { kMeeting, kPreparing, kRunning, kOver };
  enum class Presence { kHere, kLeft, kLost };
  struct Connection {
    int rank = 0;
    bool is_control = false;
    base::TimePoint heard;
    bool is_leaving = false;
  };

  virtual void on_control(int rank, const Message& message) = 0;
  /// Before go; after that it is lost as any other.
  virtual void on_control_lost(int rank, const base::Error& error) = 0;
  /// This rank has seen that another one is lost.
  virtual void find_lost(int rank, const base::Error& error) = 0;
  /// A connection for calls with it has broken without a word.
  virtual void suspect(int rank, const base::Error& error) = 0;

  void add_control(int rank, Link link, base::TimePoint now) {
    connections_[link] = {rank, true, now, false};
  }
  /// False when it could not, and has failed.
  bool begin_running(std::vector<wire::RankDevices> devices);
  void know(wire::Directory directory);
  /// Does nothing if it is not here.
  void lose(int rank, const base::Error& error, bool job_goes_on);
  /// Nothing is heard of it any more, nor said to it but why.
  void cut_off(int rank, const base::Error& why);
  /// A new process has its place.
  void take_back(int rank, uint32_t incarnation, const wire::Returned& returned);
  base::Error loss(int rank, const base::Error& error) const;
  /// Why `rank` leaves, or another does, as it says. If that is the loss of this one it is taken at
  /// its word, which is told as such: who was stopped for a while cannot know better.
  base::Error reason_of(int rank, const Message& message) const;
  /// "rank 3 (trainer 2)", without the name if that is not known.
  std::string text_of(int rank) const;

  const Settings settings_;
  World& world_;
  State state_ = State::kMeeting;
  std::map<Link, Connection> connections_;
  std::vector<Presence> presence_;     // once the ranks are known
  std::map<int, base::Error> losses_;  // why each rank that is lost is
  wire::Directory directory_;

 private:
  void tell_all(Message message);
  base::Error why_over() const;
  /// The other end hears why this one closes, for certain if `flush`.
  void dismiss(Link link, const base::Error& why, bool flush);

  Message last_word_;              // once it is over
  const base::Duration interval_;  // of heartbeats
  base::TimePoint next_beat_;
  base::TimePoint wake_at_;
};

}  // namespace distrain::rpc::control
