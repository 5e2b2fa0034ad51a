#pragma once

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "distrain/base/clock.h"
#include "distrain/net/socket.h"
#include "distrain/net/stream.h"
#include "distrain/wire/handshake.h"
#include "identity/handshake.h"

namespace distrain::rpc::control {

/// Why rank 0 refused ranks, by the rank that each one claimed to be. A stranger can claim any rank
/// as often as it likes, so ranks that the job does not have share entry 0, and an entry holds at
/// most eight reasons. Not thread-safe.
class Refusals {
 public:
  explicit Refusals(size_t world_size) : world_size_(world_size) {}

  /// Returns true if `rank` was not refused for this `reason` before: then the user is to be told.
  /// `text` is the sentence that text() repeats.
  bool add(int rank, const std::string& reason, std::string text) {
    Entry& entry = entries_[key(rank)];
    entry.text = std::move(text);
    return entry.reasons.size() < 8 && entry.reasons.insert(reason).second;
  }
  /// Called when `rank` has joined.
  void forget(int rank) {
    entries_.erase(key(rank));
    entries_.erase(0);
  }
  /// Returns the newest text of each entry, of the first ones if there are many.
  std::string text() const {
    std::string all;
    for (const auto& [rank, entry] : entries_) {
      if (all.size() > 1000) return all + "; and more";
      all += (all.empty() ? "" : "; ") + entry.text;
    }
    return all;
  }

 private:
  struct Entry {
    std::string text;
    std::set<std::string> reasons;
  };
  int key(int rank) const { return rank > 0 && std::cmp_less(rank, world_size_) ? rank : 0; }

  const size_t world_size_;
  std::map<int, Entry> entries_;
};

/// Where connections to this rank come in, and prove who they are: the responder of Note
/// [Identity]. Before the proof it gives none of them more than a hello, a proof and two seconds.
/// When all places are taken others wait in the kernel's backlog, and the oldest goes after a fair
/// time. It admits on the loop; listen() and close() are for any thread.
class Doorway : public std::enable_shared_from_this<Doorway> {
 public:
  /// Who has proved itself.
  struct Visitor {
    wire::HelloPurpose purpose = wire::HelloPurpose::kPeer;
    int rank = -1;
    uint32_t incarnation = 0;
    wire::Join join = {};  ///< of who joins
  };
  /// All on the loop.
  struct Callbacks {
    /// What connections for that purpose prove here; nothing: there are none now.
    std::function<std::optional<identity::Credentials>(wire::HelloPurpose)> credentials;
    /// Takes the connection, with a handler of its own, or gives back why it is refused.
    std::function<std::optional<base::Error>(const net::StreamPtr& stream, Visitor visitor)> admit;
    /// Called when a process that claims to be `rank` is refused before admit().
    std::function<void(int rank, const net::StreamPtr& stream, base::Error why)> on_refused;
  };

  /// `patience`: for the proof of one connection.
  Doorway(net::Loop& loop, base::Duration patience, Callbacks callbacks);

  void listen(net::Fd socket);
  /// Nobody comes in any more. Connections that stand there are cut off.
  void close();

 private:
  enum class Stage { kHello, kProof, kRefused };
  struct Stranger {
    net::StreamPtr stream;
    base::TimePoint came;
    Stage stage = Stage::kHello;
    std::optional<identity::Responder> responder;
    uint64_t timer = 0;
  };
  using Strangers = std::map<uint64_t, Stranger>;

  void on_connection_on_loop(net::Fd socket);
  void on_closed_on_loop(uint64_t number, const base::Error& error);
  void see_to_crowd_on_loop();
  /// Null if it stands here no more: a stream may still say something after that.
  net::StreamPtr take_on_loop(uint64_t number);
  uint64_t show_the_door_later_on_loop(uint64_t number, base::Duration patience);
  void show_the_door_on_loop(uint64_t number);

  void on_frame_on_loop(uint64_t number, const net::InFrame& frame);
  void on_hello_on_loop(Stranger& stranger, const net::InFrame& frame);
  void on_proof_on_loop(uint64_t number, Stranger& stranger, const net::InFrame& frame);
  void on_join_on_loop(uint64_t number, const net::InFrame& frame);
  void admit_on_loop(const net::StreamPtr& stream, Visitor visitor);

  void reject_on_loop(const net::StreamPtr& stream, base::Error why);
  void refuse_on_loop(Stranger& stranger, const base::Error& why);
  void report_on_loop(const Stranger& stranger, base::Error why);

  net::Loop& loop_;
  const base::Duration patience_;
  const Callbacks callbacks_;
  const size_t most_;  // may stand there without a proof

  // Loop thread only. By number, as they came.
  Strangers strangers_;
  Strangers believed_;  // who have proved themselves, and are to say what they join
  uint64_t newest_ = 0;
  bool is_full_ = false;
  uint64_t crowd_timer_ = 0;  // when the oldest goes; 0: none

  std::mutex mutex_;
  bool is_closed_ = false;                                 // by mutex_
  std::vector<std::shared_ptr<net::Listener>> listeners_;  // by mutex_
};

}  // namespace distrain::rpc::control
