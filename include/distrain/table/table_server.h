#pragma once

#include <memory>
#include <mutex>

#include "distrain/base/deferred_tasks.h"
#include "distrain/rows/row_store.h"
#include "distrain/rows/rule.h"
#include "distrain/table/messages.h"

namespace distrain::table {

class TableSet;
struct Steps;
struct Table;

/// Allows other ranks to open tables on this rank. Call it on every rank before join(). Returns the
/// number of updates that this rank has made to sets of tables.
optim::UpdateCount install(rpc::Agent& agent);

// Note [Steps of tables]
//
// A lookup that trains is kept on its servers, by session and number, until a push brings its
// gradients or its session releases it. A push has the gradients of all lookups of one step. The
// server groups them by id and updates each row once.
//
//   async  Each session has its own steps, which are applied when they arrive.
//   sync   The sessions of a set share its steps. A step is complete when all participants have
//          pushed it. The gradients are added in the order of the participants and divided by their
//          number. A participant that clips stages its gradients first, gets the norm of the mean
//          gradients when all have staged or pushed theirs, and commits. A push is answered when it
//          is stored, because an unanswered push may hold the credit that the push of another
//          participant waits for. await_step(), which is sent with the push, returns the result.
//
// A step fails if a push is refused, the norm is not finite, a rank is lost, or a participant
// closes its tables or pushes another step than the current one. Servers may then have applied
// different steps, so the current step and all later ones fail with that error until all
// participants have closed their sessions.
//
// A session awaits a step before it pushes the next one. A lookup names the session's last step and
// waits here until that step is applied, because messages of a rank may overtake each other. If the
// step fails, the lookup fails with its error.

/// One rank's part of sets of tables. A set is opened as a whole, and keeps its rows until this
/// object is destroyed. Thread-safe. `caller` is the process that makes a request; requests of a
/// lost process throw `peer_lost`.
class TableServer final : public rpc::Layer {
 public:
  /// Maximum number of lookups that a session keeps here, above which lookups throw `resources`.
  static constexpr size_t kMaxLookups = 4096;
  /// Maximum number of their ids and offsets, and of those of one evaluation: about 256 MiB.
  static constexpr uint64_t kMaxLookupIds = uint64_t{1} << 22;

  /// `agent` may be null if all sessions are of this process.
  explicit TableServer(rpc::Agent* agent = nullptr);
  ~TableServer() override;

  /// Makes the tables or, if they exist, checks that all options are equal (else `invalid`).
  /// Returns the number of the session. In sync mode a participant has one session at a time.
  base::Future<uint64_t> open(const OpenRequest& request, rpc::ProcessNumber caller);
  base::Future<void> close(uint64_t session, rpc::ProcessNumber caller);
  base::Future<LookupReply> look_up(LookupRequest request, rpc::ProcessNumber caller);
  /// Stores a push and, if it completes the step, applies the step.
  base::Future<void> push(PushRequest request, rpc::ProcessNumber caller);
  /// Returns the result of a push, which may arrive later. Ignores the gradients of `push`.
  base::Future<optim::Norms> await_step(const PushRequest& push, rpc::ProcessNumber caller);

  /// Return a table's rows, its optimizer and its number of steps with gradients. Throw
  /// `not_found`.
  rows::RowStore& store(const std::string& table) const;
  const rows::RowRule& rule(const std::string& table) const;
  std::atomic<uint64_t>& updates_of(const std::string& table) const;
  /// Returns the number of steps that were applied to any set.
  optim::UpdateCount updates() const { return updates_; }
  /// Returns the number of lookups that are kept for a push.
  size_t kept_lookups() const;

  void on_rank_lost(const rpc::Loss& loss) override;
  std::vector<rpc::Wait> waits() const override;

 private:
  struct Session;
  using SessionPtr = std::shared_ptr<Session>;

  SessionPtr session_locked(uint64_t id, rpc::ProcessNumber caller) const;
  static void end_session_locked(const SessionPtr& session, const base::Error& error,
                                 base::DeferredTasks& done);
  Table& table_of(const std::string& name) const;
  LookupReply answer(Session& session, LookupRequest& request);
  void push_locked(Session& session, PushRequest request, std::unique_lock<std::mutex>& lock,
                   base::DeferredTasks& done);
  static void fail_locked(Steps& steps, const base::Error& error, base::DeferredTasks& done);

  rpc::Agent* const agent_;
  base::InlineExecutor inline_executor_;  // if there is no agent
  const std::shared_ptr<std::atomic<uint64_t>> updates_ =
      std::make_shared<std::atomic<uint64_t>>(0);
  std::mutex opening_;        // held while a set is made, which may take long
  mutable std::mutex mutex_;  // not held while rows are made, read or updated
  std::vector<std::unique_ptr<TableSet>> sets_;
  std::map<uint64_t, SessionPtr> sessions_;
  uint64_t last_session_ = 0;
  std::set<rpc::ProcessNumber> lost_;
};

}  // namespace distrain::table
