#pragma once

#include <memory>
#include <mutex>

#include "distrain/rows/row_store.h"
#include "distrain/rows/rule.h"
#include "distrain/table/messages.h"

namespace distrain::table {

class TableSet;
struct Steps;

/// Allows other ranks to open tables on this rank. Call it on every rank before join(). Returns the
/// number of updates that this rank has made to sets of tables.
optim::UpdateCount install(rpc::Agent& agent);

// Note [Steps of tables]
//
// A lookup that trains is kept on its servers, by session and number, until a push brings its
// gradients or its session releases it. A push has the gradients of all lookups of one step. The
// server groups them by id and updates each row once.
//
//   async  Each session has steps of its own, which are applied when they arrive.
//   sync   The sessions of a set share its steps. A step is complete when all participants have
//          pushed it. The gradients are added in the order of the participants and divided by their
//          number. A participant that clips stages its gradients first; when all have staged or
//          pushed theirs, the server returns the norm of the mean gradients. Then it commits.
//
// A step ends when it is applied, or fails: a push is refused, a rank is lost, or a participant
// closes its tables or pushes its next step before it has committed this one. All pushes of the
// step get the error, also those that arrive later, so that pushes of two steps never meet.
//
// A session awaits a push before it sends the next one. A lookup names the session's last step and
// waits here until that step has ended, because messages of a rank may overtake each other. After a
// failed step the lookups go on, and the error of the push ends the session's next step. A push
// that may not have reached the server is followed by kAbandon, so that no lookup waits for it.

/// One rank's part of sets of tables. A set is opened as a whole, and keeps its rows until this
/// object is destroyed. Thread-safe. `caller` is the process that makes a request; requests of a
/// lost process throw `peer_lost`.
class TableServer final : public rpc::Layer {
 public:
  /// Maximum of the lookups that a session keeps here, above which lookups throw `resources`.
  static constexpr size_t kMaxLookups = 4096;
  static constexpr int64_t kMaxLookupIds = int64_t{1} << 22;  ///< about 256 MiB

  /// `agent` may be null if all sessions are of this process.
  explicit TableServer(rpc::Agent* agent = nullptr);
  ~TableServer() override;

  /// Makes the tables or, if they exist, checks that all options are equal (else `invalid`).
  /// Returns the number of the session. In sync mode a participant has one session at a time.
  base::Future<uint64_t> open(const OpenRequest& request, rpc::ProcessNumber caller);
  base::Future<void> close(uint64_t session, rpc::ProcessNumber caller);
  base::Future<LookupReply> look_up(LookupRequest request, rpc::ProcessNumber caller);
  base::Future<optim::Norms> push(PushRequest request, rpc::ProcessNumber caller);

  /// Return the rows of a table, its optimizer and the number of its updates. Throw `not_found`.
  rows::RowStore& store(const std::string& table) const;
  const rows::RowRule& rule(const std::string& table) const;
  std::atomic<uint64_t>& updates_of(const std::string& table) const;
  /// Returns the number of updates of all sets.
  optim::UpdateCount updates() const { return updates_; }
  /// Returns the number of lookups that are kept for a push.
  size_t kept_lookups() const;

  void on_rank_lost(const rpc::Loss& loss) override;
  std::vector<rpc::Wait> waits() const override;

 private:
  struct Session;
  struct Tasks;
  using SessionPtr = std::shared_ptr<Session>;

  SessionPtr session_locked(uint64_t id, rpc::ProcessNumber caller) const;
  static void remove_locked(uint64_t id, const SessionPtr& session, const base::Error& error,
                            Tasks& done);
  TableSet& set_of(const std::string& table) const;
  LookupReply answer(Session& session, LookupRequest& request);
  base::Future<optim::Norms> push_locked(Session& session, PushRequest request,
                                         std::unique_lock<std::mutex>& lock, Tasks& done);
  static void end_locked(Steps& steps, uint64_t number, const base::Result<optim::Norms>& result,
                         Tasks& done);
  static void end_if_left_locked(Steps& steps, Tasks& done);

  rpc::Agent* const agent_;
  base::InlineExecutor inline_executor_;  // if there is no agent
  const std::shared_ptr<std::atomic<uint64_t>> updates_ =
      std::make_shared<std::atomic<uint64_t>>(0);
  std::mutex opening_;        // held while a set is made, which may take long
  mutable std::mutex mutex_;  // not held while rows are made, read or updated
  std::vector<std::unique_ptr<TableSet>> sets_;
  std::map<uint64_t, SessionPtr> sessions_;
  uint64_t last_session_ = 0;
  std::map<rpc::ProcessNumber, base::Error> lost_;
};

}  // namespace distrain::table
