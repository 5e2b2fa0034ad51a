#include "distrain/table/table_server.h"

#include <c10/util/StringUtil.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/grad_mode.h>

#include "table_set.h"

namespace distrain::table {

namespace {

base::Error lost_error(rpc::ProcessNumber process) {
  return {base::ErrorKind::kPeerLost, "this process is lost", rpc::rank_of(process)};
}

template <class R>
base::Task completion(base::Promise<R> promise, std::type_identity_t<base::Result<R>> result) {
  return [promise = std::move(promise), result = std::move(result)]() mutable {
    promise.complete(std::move(result));
  };
}

// Returns what `compute` returns or the error that it throws.
template <class F>
auto result_of(const F& compute) -> base::Result<decltype(compute())> {
  try {
    const at::NoGradGuard no_grad;
    return compute();
  } catch (...) {
    return rpc::error_in_flight(base::ErrorKind::kInternal);
  }
}

}  // namespace

struct TableServer::Session {
  uint64_t pushes() const { return set.is_sync() ? set.steps : applied; }
  void release(uint64_t lookup) {
    for (const KeptPart& part : *kept.at(lookup)) kept_ids -= part.part.ids.numel();
    kept.erase(lookup);
  }

  // Moves the gradients of the request to `lookups`, with the lookups, which the session then
  // forgets.
  void move_lookups(Push& push) {
    for (const auto& [number, gradients] : push.request.gradients) {
      const auto it = kept.find(number);
      if (it == kept.end()) base::invalid("gradients of an unknown lookup");
      set.check(*it->second, gradients);
      push.lookups.emplace_back(it->second, gradients);
    }
    for (const auto& [number, gradients] : push.request.gradients) release(number);
    push.request.gradients.clear();
  }

  TableSet& set;
  const rpc::ProcessNumber process;
  const int participant;
  uint64_t applied = 0;  // pushes of async mode
  uint64_t oldest = 0;   // older lookups are released
  std::map<uint64_t, std::shared_ptr<const KeptLookup>> kept;
  int64_t kept_ids = 0;
  std::optional<base::Error> refused;  // the error of a push, for lookups that would wait for it
};

struct TableServer::WaitingLookup {
  SessionPtr session;
  LookupRequest request;
  base::Promise<LookupReply> promise;
  base::TimePoint since;
};

/// Runs tasks, which complete promises, in its destructor. Declare it before a lock.
struct TableServer::Tasks : std::vector<base::Task> {
  ~Tasks() {
    for (base::Task& each : *this) each();
  }
};

TableServer::TableServer(rpc::Agent* agent) : agent_(agent) {}
TableServer::~TableServer() = default;

TableServer::SessionPtr TableServer::session_locked(uint64_t id, rpc::ProcessNumber caller) const {
  if (lost_.contains(caller)) throw base::Exception(lost_error(caller));
  const auto it = sessions_.find(id);
  if (it == sessions_.end() || it->second->process != caller) {
    base::invalid("a call to tables that the caller has not opened");
  }
  return it->second;
}

OpenReply TableServer::open(const OpenRequest& request, rpc::ProcessNumber caller) {
  const std::lock_guard lock(mutex_);
  if (lost_.contains(caller)) throw base::Exception(lost_error(caller));
  if (request.participant >= request.participants) base::invalid("an unknown participant");
  TableSet* set = nullptr;
  for (const TableOptions& table : request.tables) {
    for (const auto& each : sets_) set = each->find(table.name) ? each.get() : set;
  }
  if (set) {
    set->check_same(request);
  } else {
    set = sets_.emplace_back(std::make_unique<TableSet>(request)).get();
  }
  set->left.erase(request.participant);
  const auto session = std::make_shared<Session>(Session{*set, caller, request.participant});
  sessions_.emplace(++last_session_, session);
  return {last_session_, session->pushes()};
}

void TableServer::close(uint64_t id, rpc::ProcessNumber caller) {
  Tasks done;
  const std::lock_guard lock(mutex_);
  const SessionPtr session = session_locked(id, caller);
  sessions_.erase(id);
  const bool stays =
      session->participant < 0 || std::ranges::any_of(sessions_, [&](const auto& other) {
        return &other.second->set == &session->set &&
               other.second->participant == session->participant;
      });
  if (!stays) session->set.left.insert(session->participant);
  end_if_left_locked(session->set, done);
}

// Reads the rows of a lookup and keeps its ids for the push.
LookupReply TableServer::answer(Session& session, LookupRequest& request) {
  const auto kept = std::make_shared<KeptLookup>();
  LookupReply reply;
  int64_t ids = 0;
  for (LookupPart& part : request.parts) {
    kept->push_back({std::move(part), {}, {}});
    reply.push_back(session.set.read(kept->back(), !request.evaluates).to(request.dtype));
    ids += kept->back().part.ids.numel();
  }
  const std::lock_guard lock(mutex_);
  if (request.evaluates || request.lookup < session.oldest) return reply;
  if (session.kept.size() >= kMaxLookups || session.kept_ids + ids > kMaxLookupIds) {
    throw base::Exception(
        base::ErrorKind::kResources,
        fmt::format("rank {} has {} lookups without a step: end their contexts, or look up under "
                    "a NoGradGuard",
                    rpc::rank_of(session.process), session.kept.size()));
  }
  if (session.kept.emplace(request.lookup, kept).second) session.kept_ids += ids;
  return reply;
}

base::Future<LookupReply> TableServer::look_up(LookupRequest request, rpc::ProcessNumber caller) {
  std::unique_lock lock(mutex_);
  const SessionPtr session = session_locked(request.session, caller);
  session->oldest = std::max(session->oldest, request.oldest);
  while (!session->kept.empty() && session->kept.begin()->first < session->oldest) {
    session->release(session->kept.begin()->first);
  }
  if (session->pushes() < request.after) {
    const auto& error = session->refused ? session->refused : session->set.lost;
    if (error) throw base::Exception(*error);
    waiting_.push_back(std::make_shared<WaitingLookup>(
        WaitingLookup{session, std::move(request), {}, base::Clock::now()}));
    return waiting_.back()->promise.future();
  }
  lock.unlock();
  return base::Future<LookupReply>::from_result(
      result_of([&] { return answer(*session, request); }));
}

template <class Condition>
std::vector<std::shared_ptr<TableServer::WaitingLookup>> TableServer::take_waiting_locked(
    const Condition& condition) {
  std::vector<std::shared_ptr<WaitingLookup>> taken;
  std::erase_if(waiting_, [&](const auto& each) {
    if (!condition(*each)) return false;
    taken.push_back(each);
    return true;
  });
  return taken;
}

template <class Condition>
void TableServer::fail_waiting_locked(const Condition& condition, const base::Error& error,
                                      Tasks& done) {
  for (const auto& lookup : take_waiting_locked(condition)) {
    done.push_back(completion(std::move(lookup->promise), error));
  }
}

// Answers the lookups whose push has been applied.
void TableServer::wake_locked(Tasks& done) {
  const auto is_ready = [](const WaitingLookup& each) {
    return each.session->pushes() >= each.request.after;
  };
  for (const auto& lookup : take_waiting_locked(is_ready)) {
    const auto answer = [self = shared_from_this(), lookup] {
      lookup->promise.complete(
          result_of([&] { return self->answer(*lookup->session, lookup->request); }));
    };
    done.push_back([this, answer] { agent_ ? agent_->executor().post(answer) : answer(); });
  }
}

base::Future<optim::Norms> TableServer::push(PushRequest request, rpc::ProcessNumber caller) {
  Tasks done;
  std::unique_lock lock(mutex_);
  const SessionPtr session = session_locked(request.session, caller);
  try {
    return push_locked(*session, std::move(request), lock, done);
  } catch (...) {  // the lookups that wait for this push would wait forever
    session->refused = rpc::error_in_flight(base::ErrorKind::kInternal);
    fail_waiting_locked([&](const WaitingLookup& each) { return each.session == session; },
                        *session->refused, done);
    throw;
  }
}

base::Future<optim::Norms> TableServer::push_locked(Session& session, PushRequest request,
                                                    std::unique_lock<std::mutex>& lock,
                                                    Tasks& done) {
  using Phase = PushRequest::Phase;
  TableSet& set = session.set;
  const int participant = session.participant;
  if (participant < 0 || participant >= set.participants()) {
    base::invalid("a step of an unknown participant");
  }
  const auto staged = set.pushes.find(participant);
  const bool is_staged = staged != set.pushes.end();
  if (request.number != session.pushes() + 1 || is_staged != (request.phase == Phase::kCommit)) {
    base::invalid(fmt::format("participant {} makes step {} of tables after step {}", participant,
                              request.number, session.pushes()));
  }
  Push push{std::move(request), {}};
  if (is_staged) push.lookups = std::move(staged->second.lookups);
  session.move_lookups(push);
  if (set.is_sync()) {
    if (set.lost) throw base::Exception(*set.lost);
    if (set.pushes.empty()) set.since = base::Clock::now();
    set.pushes[participant] = std::move(push);
    const auto future = set.waiting.try_emplace(participant).first->second.future();
    end_if_left_locked(set, done);
    advance_step(set, lock, done);
    return future;
  }
  lock.unlock();
  const auto result = result_of([&] { return set.apply({push}); });
  lock.lock();
  if (result.ok()) ++*updates_;
  session.applied = push.request.number;
  wake_locked(done);
  return base::Future<optim::Norms>::from_result(result);
}

// Returns the norms, or applies the step, if all participants have got that far. Releases the lock
// while it computes; this is safe because no participant may push anything until it is answered.
void TableServer::advance_step(TableSet& set, std::unique_lock<std::mutex>& lock, Tasks& done) {
  if (std::ssize(set.pushes) < set.participants()) return;
  const auto is_staged = [](const auto& push) {
    return push.second.request.phase == PushRequest::Phase::kStage;
  };
  const bool applies = std::ranges::none_of(set.pushes, is_staged);
  std::vector<Push> pushes;
  std::vector<base::Promise<optim::Norms>> waiting;
  for (const auto& each : set.pushes) {
    pushes.push_back(each.second);
    if (!applies && !is_staged(each)) continue;  // it waits for the step
    if (auto promise = set.waiting.extract(each.first)) {
      waiting.push_back(std::move(promise.mapped()));
    }
  }
  if (waiting.empty()) return;
  lock.unlock();
  const auto result = result_of([&] { return applies ? set.apply(pushes) : set.norms(pushes); });
  lock.lock();
  if (applies) {
    if (result.ok()) ++*updates_;
    set.pushes.clear();
    ++set.steps;
    wake_locked(done);
  } else if (!result.ok()) {  // the participants may make the step again
    end_steps_locked(set, result.error(), done);
  }
  for (auto& promise : waiting) done.push_back(completion(std::move(promise), result));
}

// Fails the steps and lookups that wait for participants.
void TableServer::end_steps_locked(TableSet& set, const base::Error& error, Tasks& done) {
  set.pushes.clear();
  for (auto& [participant, promise] : std::exchange(set.waiting, {})) {
    done.push_back(completion(std::move(promise), error));
  }
  fail_waiting_locked([&](const WaitingLookup& each) { return &each.session->set == &set; }, error,
                      done);
}

void TableServer::end_if_left_locked(TableSet& set, Tasks& done) {
  for (const int left : set.left) {
    if (set.pushes.empty() || set.pushes.contains(left)) continue;
    end_steps_locked(
        set,
        {base::ErrorKind::kPeerLost,
         fmt::format("participant {} has closed its tables, and a step waits for it", left)},
        done);
  }
}

TableSet& TableServer::set_of(const std::string& table) const {
  const std::lock_guard lock(mutex_);
  for (const auto& set : sets_) {
    if (set->find(table)) return *set;
  }
  throw base::Exception(base::ErrorKind::kNotFound, "there is no table named " + table + " here");
}
rows::RowStore& TableServer::store(const std::string& table) const {
  return set_of(table).find(table)->store;
}
std::atomic<uint64_t>& TableServer::updates_of(const std::string& table) const {
  return set_of(table).updates;
}

size_t TableServer::kept_lookups() const {
  const std::lock_guard lock(mutex_);
  size_t all = 0;
  for (const auto& [id, session] : sessions_) all += session->kept.size();
  return all;
}

void TableServer::on_rank_lost(const rpc::Loss& loss) {
  Tasks done;
  const std::lock_guard lock(mutex_);
  lost_.insert(loss.process());
  std::erase_if(sessions_,
                [&](const auto& each) { return each.second->process == loss.process(); });
  for (const auto& set : sets_) {
    if (!set->is_sync() || set->participants() == 1) continue;
    if (!set->lost) set->lost = loss.error;
    end_steps_locked(*set, loss.error, done);
  }
  fail_waiting_locked(
      [&](const WaitingLookup& each) { return each.session->process == loss.process(); },
      loss.error, done);
}

std::vector<rpc::Wait> TableServer::waits() const {
  const std::lock_guard lock(mutex_);
  std::vector<rpc::Wait> all;
  for (const auto& set : sets_) {
    std::vector<int> missing;
    for (int each = 0; each < set->participants(); ++each) {
      if (!set->pushes.contains(each)) missing.push_back(each);
    }
    if (set->pushes.empty()) continue;
    all.push_back(
        {fmt::format("a step of tables here that wants participant {}", c10::Join(", ", missing)),
         set->since});
  }
  for (const auto& lookup : waiting_) {
    all.push_back({fmt::format("a lookup of rank {} here that waits for push {}",
                               rpc::rank_of(lookup->session->process), lookup->request.after),
                   lookup->since});
  }
  return all;
}

namespace {

rpc::ProcessNumber caller_of(const rpc::CallContext& call) {
  return rpc::process_number(call.caller.rank, call.caller.incarnation);
}

}  // namespace

OpenReply open_here(rpc::CallContext& call, const OpenRequest& request) {
  return call.agent.local<TableServer>().open(request, caller_of(call));
}
void close_here(rpc::CallContext& call, uint64_t session) {
  call.agent.local<TableServer>().close(session, caller_of(call));
}
base::Future<LookupReply> look_up_here(rpc::CallContext& call, LookupRequest request) {
  return call.agent.local<TableServer>().look_up(std::move(request), caller_of(call));
}
base::Future<optim::Norms> push_here(rpc::CallContext& call, PushRequest request) {
  return call.agent.local<TableServer>().push(std::move(request), caller_of(call));
}

optim::UpdateCount install(rpc::Agent& agent) {
  const auto server = std::make_shared<TableServer>(&agent.lasting());
  agent.provide(server);
  agent.expose<&open_here>("distrain.table.open");
  agent.expose<&close_here>("distrain.table.close");
  agent.expose<&look_up_here>("distrain.table.look_up");
  agent.expose<&push_here>("distrain.table.push");
  agent.add_layer(server);
  return server->updates();
}

}  // namespace distrain::table
