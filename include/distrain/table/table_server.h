#pragma once

#include <memory>
#include <mutex>

#include "distrain/rows/row_store.h"
#include "distrain/table/messages.h"

namespace distrain::table {

class TableSet;

/// Allows other ranks to open tables on this rank. Call it on every rank before join(). Returns the
/// number of updates that this rank has made to sets of tables.
optim::UpdateCount install(rpc::Agent& agent);

// Note [Steps of tables]
//
// A lookup that trains is kept on its servers, by session and number, until a push brings its
// gradients or its session releases it. A push has the gradients of all lookups of one step. The
// server groups them by id and updates each row once.
//
//   async  A session's pushes are applied when they arrive. A session awaits a push before it sends
//          the next one. A lookup names the session's last push, and waits here until that push is
//          applied, because messages of a rank may overtake each other.
//   sync   A step is complete when all participants have pushed it. The gradients are added in the
//          order of the participants and divided by their number. Lookups of step k + 1 wait for
//          step k. A participant that clips stages its gradients first; when all have staged or
//          pushed theirs, the server returns the norm of the mean gradients. Then it commits.
//
// A push that fails counts as applied, so that lookups which wait for it go on; the error of the
// push ends the session's next step.

/// One rank's part of sets of tables. A set is opened as a whole, and keeps its rows until this
/// object is destroyed. Thread-safe. `caller` is the process that makes a request; requests of a
/// lost process throw `peer_lost`.
class TableServer final : public rpc::Layer, public std::enable_shared_from_this<TableServer> {
 public:
  /// Maximum of the lookups that a session keeps here, above which lookups throw `resources`.
  static constexpr size_t kMaxLookups = 4096;
  static constexpr int64_t kMaxLookupIds = int64_t{1} << 22;  ///< about 256 MiB

  /// `agent` may be null if all sessions are of this process.
  explicit TableServer(rpc::Agent* agent = nullptr);
  ~TableServer() override;

  /// Makes the tables or, if they exist, checks that all options are equal (else `invalid`).
  OpenReply open(const OpenRequest& request, rpc::ProcessNumber caller);
  void close(uint64_t session, rpc::ProcessNumber caller);
  base::Future<LookupReply> look_up(LookupRequest request, rpc::ProcessNumber caller);
  base::Future<optim::Norms> push(PushRequest request, rpc::ProcessNumber caller);

  /// Return the rows of a table and the number of its updates. Throw `not_found`.
  rows::RowStore& store(const std::string& table) const;
  std::atomic<uint64_t>& updates_of(const std::string& table) const;
  /// Returns the number of updates of all sets.
  optim::UpdateCount updates() const { return updates_; }
  /// Returns the number of lookups that are kept for a push.
  size_t kept_lookups() const;

  void on_rank_lost(const rpc::Loss& loss) override;
  std::vector<rpc::Wait> waits() const override;

 private:
  struct Session;
  struct WaitingLookup;
  struct Tasks;
  using SessionPtr = std::shared_ptr<Session>;

  SessionPtr session_locked(uint64_t id, rpc::ProcessNumber caller) const;
  TableSet& set_of(const std::string& table) const;
  LookupReply answer(Session& session, LookupRequest& request);
  template <class Condition>
  std::vector<std::shared_ptr<WaitingLookup>> take_waiting_locked(const Condition& condition);
  template <class Condition>
  void fail_waiting_locked(const Condition& condition, const base::Error& error, Tasks& done);
  void wake_locked(Tasks& done);
  base::Future<optim::Norms> push_locked(Session& session, PushRequest request,
                                         std::unique_lock<std::mutex>& lock, Tasks& done);
  void advance_step(TableSet& set, std::unique_lock<std::mutex>& lock, Tasks& done);
  void end_steps_locked(TableSet& set, const base::Error& error, Tasks& done);
  void end_if_left_locked(TableSet& set, Tasks& done);

  rpc::Agent* const agent_;
  const std::shared_ptr<std::atomic<uint64_t>> updates_ =
      std::make_shared<std::atomic<uint64_t>>(0);
  mutable std::mutex mutex_;  // not held while rows are read or updated
  std::vector<std::unique_ptr<TableSet>> sets_;
  std::map<uint64_t, SessionPtr> sessions_;
  uint64_t last_session_ = 0;
  std::vector<std::shared_ptr<WaitingLookup>> waiting_;
  std::set<rpc::ProcessNumber> lost_;
};

}  // namespace distrain::table
