#include "distrain/table/table_server.h"

#include <cmath>

#include <c10/util/StringUtil.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/grad_mode.h>

#include "table_set.h"

namespace distrain::table {

struct TableServer::Session {
  // Forgets a lookup and returns it.
  std::shared_ptr<const KeptLookup> take(uint64_t lookup) {
    auto taken = kept.extract(lookup);
    kept_ids -= taken.mapped()->ids.ids.numel();
    return std::move(taken.mapped());
  }

  // Moves the gradients of the request to `lookups`, with the lookups, which the session then
  // forgets.
  void move_lookups(Push& push) {
    for (const auto& [number, gradient] : push.request.gradients) {
      const auto it = kept.find(number);
      if (it == kept.end()) base::invalid("gradients of an unknown lookup");
      set.check(*it->second, gradient);
    }
    for (auto& [number, gradient] : push.request.gradients) {
      push.lookups.emplace_back(take(number), std::move(gradient));
    }
    push.request.gradients.clear();
  }

  TableSet& set;
  const std::shared_ptr<Steps> steps;
  const rpc::ProcessNumber process;
  const int participant;
  const uint64_t first = steps->ended;  // push n of the session is of step `first` + n
  uint64_t oldest = 0;                  // older lookups are released
  std::map<uint64_t, std::shared_ptr<const KeptLookup>> kept;
  int64_t kept_ids = 0;
};

/// Completes promises and frees objects in its destructor. Declare it before a lock.
struct TableServer::Tasks : std::vector<base::Task> {
  ~Tasks() {
    for (base::Task& each : *this) each();
  }
  template <class R>
  void complete(std::shared_ptr<base::Promise<R>> promise,
                base::Result<typename base::Promise<R>::Stored> result) {
    push_back(
        [promise = std::move(promise), result = std::move(result)] { promise->complete(result); });
  }
  template <class T>
  void free(T object) {
    push_back([object = std::move(object)] {});
  }
};

TableServer::TableServer(rpc::Agent* agent) : agent_(agent) {}
TableServer::~TableServer() = default;

TableServer::SessionPtr TableServer::session_locked(uint64_t id, rpc::ProcessNumber caller) const {
  const auto lost = lost_.find(caller);
  if (lost != lost_.end()) throw base::Exception(lost->second);
  const auto it = sessions_.find(id);
  if (it == sessions_.end() || it->second->process != caller) {
    base::invalid("a call to tables that the caller has not opened, or has closed");
  }
  return it->second;
}

base::Future<uint64_t> TableServer::open(const OpenRequest& request, rpc::ProcessNumber caller) {
  if (request.tables.empty() || request.participants > 1 << 16 ||
      request.participant >= request.participants) {
    base::invalid("there are no tables, or the participant is unknown");
  }
  const std::lock_guard opening(opening_);
  TableSet* set = nullptr;
  for (const TableOptions& table : request.tables) {
    for (const auto& each : sets_) set = each->find(table.name) ? each.get() : set;
  }
  if (set) set->check_same(request);
  std::unique_ptr<TableSet> made = set ? nullptr : std::make_unique<TableSet>(request);
  const std::lock_guard lock(mutex_);
  if (made) {
    set = sets_.emplace_back(std::move(made)).get();
    if (set->steps && request.participants > 1 && !lost_.empty()) {
      set->steps->lost = lost_.begin()->second;
    }
  }
  for (const auto& [id, other] : sessions_) {
    if (set->steps && &other->set == set && request.participant >= 0 &&
        other->participant == request.participant) {
      base::invalid(fmt::format("participant {} has opened these tables on rank {} already",
                                request.participant, rpc::rank_of(other->process)));
    }
  }
  const auto steps = set->steps ? set->steps : std::make_shared<Steps>();
  steps->left.erase(request.participant);
  sessions_.emplace(++last_session_,
                    std::make_shared<Session>(Session{*set, steps, caller, request.participant}));
  return base::Future<uint64_t>::ready(last_session_);
}

base::Future<void> TableServer::close(uint64_t id, rpc::ProcessNumber caller) {
  Tasks done;
  const std::lock_guard lock(mutex_);
  const SessionPtr session = session_locked(id, caller);
  remove_locked(id, session, {base::ErrorKind::kCancelled, "the tables are closed"}, done);
  sessions_.erase(id);
  if (session->participant >= 0) session->steps->left.insert(session->participant);
  end_if_left_locked(*session->steps, done);
  return base::Future<void>::ready({});
}

// Fails the lookups of a session that wait.
void TableServer::remove_locked(uint64_t id, const SessionPtr& session, const base::Error& error,
                                Tasks& done) {
  done.free(session);
  std::erase_if(session->steps->waiting, [&](auto& each) {
    if (each.second.session != id) return false;
    done.complete(each.second.may_go_on, error);
    return true;
  });
}

// Reads the rows of a lookup and keeps its ids for the push.
LookupReply TableServer::answer(Session& session, LookupRequest& request) {
  const at::NoGradGuard no_grad;
  const auto kept = std::make_shared<KeptLookup>(KeptLookup{std::move(request.ids), {}, {}});
  LookupReply reply = session.set.read(*kept, !request.evaluates).to(request.dtype);
  const int64_t ids = kept->ids.ids.numel();
  const std::lock_guard lock(mutex_);
  if (request.evaluates || request.lookup < session.oldest) return reply;
  if (session.kept.size() >= kMaxLookups || session.kept_ids + ids > kMaxLookupIds) {
    throw base::Exception(
        base::ErrorKind::kResources,
        fmt::format("rank {} has {} lookups of {} ids without a step, so one of {} ids is too "
                    "much: end their contexts, or look up under a NoGradGuard",
                    rpc::rank_of(session.process), session.kept.size(), session.kept_ids, ids));
  }
  if (session.kept.emplace(request.lookup, kept).second) session.kept_ids += ids;
  return reply;
}

base::Future<LookupReply> TableServer::look_up(LookupRequest request, rpc::ProcessNumber caller) {
  Tasks done;
  std::unique_lock lock(mutex_);
  const SessionPtr session = session_locked(request.session, caller);
  session->oldest = std::max(session->oldest, request.oldest);
  while (!session->kept.empty() && session->kept.begin()->first < session->oldest) {
    done.free(session->take(session->kept.begin()->first));
  }
  Steps& steps = *session->steps;
  const uint64_t after = session->first + request.after;
  if (after <= steps.ended) {
    lock.unlock();
    return base::Future<LookupReply>::ready(answer(*session, request));
  }
  const auto waiting =
      steps.waiting.emplace(after, Steps::WaitingLookup{request.session, rpc::rank_of(caller)});
  return waiting->second.may_go_on->future().then(
      agent_ ? agent_->executor() : inline_executor_,
      [this, session, request = std::move(request)]() mutable {
        return answer(*session, request);
      });
}

base::Future<optim::Norms> TableServer::push(PushRequest request, rpc::ProcessNumber caller) {
  Tasks done;
  std::unique_lock lock(mutex_);
  const SessionPtr session = session_locked(request.session, caller);
  Steps& steps = *session->steps;
  const uint64_t number = session->first + request.number;
  const int participant = session->participant;
  if (participant < 0) base::invalid("a step of an unknown participant");
  if (number <= steps.ended) {
    if (number == steps.ended && steps.error) throw base::Exception(*steps.error);
    base::invalid(fmt::format("participant {} pushes a step that has ended", participant));
  }
  const base::Error abandoned{base::ErrorKind::kInvalid,
                              fmt::format("participant {} has abandoned its step", participant)};
  end_locked(steps, number - 1, abandoned, done);
  try {
    if (request.phase == PushRequest::Phase::kAbandon) throw base::Exception(abandoned);
    return push_locked(*session, std::move(request), lock, done);
  } catch (...) {
    end_locked(steps, number, rpc::error_in_flight(base::ErrorKind::kInternal), done);
    throw;
  }
}

// Adds a push to the next step. Returns the norms, or applies the step, if all participants have
// got that far. Releases the lock while it computes.
base::Future<optim::Norms> TableServer::push_locked(Session& session, PushRequest request,
                                                    std::unique_lock<std::mutex>& lock,
                                                    Tasks& done) {
  using Phase = PushRequest::Phase;
  Steps& steps = *session.steps;
  const uint64_t number = steps.ended + 1;
  if (steps.lost) throw base::Exception(*steps.lost);
  const double factor = request.lr_factor;
  if (!(request.scale >= 0 && request.scale <= 1 && factor >= 0 && std::isfinite(factor))) {
    base::invalid("a step with a factor out of range");
  }
  auto staged = steps.pushes.extract(session.participant);
  if (staged.empty() == (request.phase == Phase::kCommit)) {
    base::invalid("a step that is pushed twice, or committed before it is staged");
  }
  Push push = staged.empty() ? Push() : std::move(staged.mapped());
  push.request = std::move(request);
  session.move_lookups(push);
  push.answer = std::make_shared<base::Promise<optim::Norms>>();
  const auto future = push.answer->future();
  if (steps.pushes.empty()) steps.since = base::Clock::now();
  steps.pushes.emplace(session.participant, std::move(push));
  end_if_left_locked(steps, done);
  if (std::ssize(steps.pushes) < steps.participants) return future;

  const auto is_staged = [](const auto& each) {
    return each.second.request.phase == Phase::kStage;
  };
  const bool applies = std::ranges::none_of(steps.pushes, is_staged);
  std::vector<Push> all;
  std::vector<std::shared_ptr<base::Promise<optim::Norms>>> answers;
  for (auto& each : steps.pushes) {
    all.push_back(each.second);
    if (each.second.answer && (applies || is_staged(each))) {
      answers.push_back(std::move(each.second.answer));
    }
  }
  if (answers.empty()) return future;
  if (applies) steps.pushes.clear();  // so that nothing ends the step while it is applied
  lock.unlock();
  base::Result<optim::Norms> result = optim::Norms{};
  try {
    const at::NoGradGuard no_grad;
    result = applies ? session.set.apply(all) : session.set.norms(all);
  } catch (...) {
    result = rpc::error_in_flight(base::ErrorKind::kInternal);
  }
  lock.lock();
  if (applies && result.ok()) ++*updates_;
  if (applies || !result.ok()) end_locked(steps, number, result, done);
  for (auto& answer : answers) done.complete(std::move(answer), result);
  done.free(std::move(all));
  return future;
}

// Ends all steps up to `number`: answers their pushes, and lets the lookups that wait go on.
void TableServer::end_locked(Steps& steps, uint64_t number,
                             const base::Result<optim::Norms>& result, Tasks& done) {
  if (number <= steps.ended) return;
  steps.ended = number;
  steps.error = result.ok() ? std::nullopt : std::optional(result.error());
  for (auto& [participant, push] : steps.pushes) {
    if (push.answer) done.complete(std::move(push.answer), result);
  }
  done.free(std::exchange(steps.pushes, {}));
  const auto last = steps.waiting.upper_bound(number);
  for (auto it = steps.waiting.begin(); it != last; ++it) {
    done.complete(std::move(it->second.may_go_on), base::Unit{});
  }
  steps.waiting.erase(steps.waiting.begin(), last);
}

void TableServer::end_if_left_locked(Steps& steps, Tasks& done) {
  for (const int left : steps.left) {
    if (steps.pushes.empty() || steps.has(left)) continue;
    end_locked(steps, steps.ended + 1,
               base::Error{base::ErrorKind::kPeerLost,
                           fmt::format("participant {} has closed its tables", left)},
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
const rows::RowRule& TableServer::rule(const std::string& table) const {
  return set_of(table).find(table)->rule;
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
  lost_.emplace(loss.process(), loss.error);
  std::erase_if(sessions_, [&](const auto& each) {
    if (each.second->process != loss.process()) return false;
    remove_locked(each.first, each.second, loss.error, done);
    return true;
  });
  for (const auto& set : sets_) {
    if (!set->steps || set->steps->participants == 1) continue;
    Steps& steps = *set->steps;
    if (!steps.lost) steps.lost = loss.error;
    if (!steps.pushes.empty()) end_locked(steps, steps.ended + 1, loss.error, done);
  }
}

std::vector<rpc::Wait> TableServer::waits() const {
  const std::lock_guard lock(mutex_);
  std::set<const Steps*> all_steps;
  for (const auto& [id, session] : sessions_) all_steps.insert(session->steps.get());
  std::vector<rpc::Wait> all;
  for (const Steps* steps : all_steps) {
    std::vector<int> missing;
    for (int each = 0; !steps->pushes.empty() && each < steps->participants; ++each) {
      if (!steps->has(each)) missing.push_back(each);
    }
    if (!missing.empty()) {
      all.push_back(
          {fmt::format("a step of tables here that wants participant {}", c10::Join(", ", missing)),
           steps->since});
    }
    for (const auto& [step, lookup] : steps->waiting) {
      all.push_back(
          {fmt::format("a lookup of rank {} here that waits for step {}", lookup.rank, step),
           lookup.since});
    }
  }
  return all;
}

optim::UpdateCount install(rpc::Agent& agent) {
  const auto server = std::make_shared<TableServer>(&agent.lasting());
  agent.provide(server);
  agent.expose<&serve<&TableServer::open, OpenRequest>>("distrain.table.open");
  agent.expose<&serve<&TableServer::close, uint64_t>>("distrain.table.close");
  agent.expose<&serve<&TableServer::look_up, LookupRequest>>("distrain.table.look_up");
  agent.expose<&serve<&TableServer::push, PushRequest>>("distrain.table.push");
  agent.add_layer(server);
  return server->updates();
}

}  // namespace distrain::table
