#include "distrain/table/table_server.h"

#include <cmath>

#include <c10/util/StringUtil.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/grad_mode.h>

#include "table_set.h"

namespace distrain::table {

using base::DeferredTasks;
using base::ErrorKind;
using base::Future;

struct TableServer::Session {
  // A lookup, null until it is answered, and the number of its ids and offsets.
  struct Kept {
    std::shared_ptr<const KeptLookup> lookup;
    uint64_t size;
  };

  // Counts a lookup before it is answered. Throws `resources` if a limit would be exceeded.
  void reserve(const LookupRequest& request) {
    const uint64_t size =
        span_of<int64_t>(request.ids.ids).size() + span_of<int64_t>(request.ids.offsets).size();
    const bool is_kept = !request.evaluates && request.lookup >= oldest;
    if ((is_kept ? kept_size + size : size) > kMaxLookupIds ||
        (is_kept && kept.size() >= kMaxLookups)) {
      throw base::Exception(
          ErrorKind::kResources,
          fmt::format("rank {} has {} lookups of {} ids and offsets without a step, so one of {} "
                      "is too much: end their contexts, or look up fewer ids",
                      rpc::rank_of(process), kept.size(), kept_size, size));
    }
    if (!is_kept) return;
    const bool is_new = kept.emplace(request.lookup, Kept{nullptr, size}).second;
    if (!is_new) wire::Reader::fail("a lookup that was made before");
    kept_size += size;
  }

  // Forgets a lookup and returns it.
  std::shared_ptr<const KeptLookup> take(uint64_t lookup) {
    auto taken = kept.extract(lookup);
    kept_size -= taken.mapped().size;
    return std::move(taken.mapped().lookup);
  }

  // Moves the gradients of the request, and their lookups, to `push.lookups`.
  void move_lookups(Push& push) {
    for (const auto& [number, gradient] : push.request.gradients) {
      const auto it = kept.find(number);
      if (it == kept.end() || !it->second.lookup) base::invalid("gradients of an unknown lookup");
      set.check(*it->second.lookup, gradient);
    }
    for (auto& [number, gradient] : push.request.gradients) {
      push.lookups.emplace_back(take(number), std::move(gradient));
    }
    push.request.gradients.clear();
  }

  // Returns the promise of a push's result. The push and await_step() may arrive in any order.
  Answer answer_to(const PushRequest& push, DeferredTasks& done) {
    const std::pair key(push.number, push.phase != PushRequest::Phase::kStage);
    if (answer && key == last_push) return answer;
    if (key < last_push) base::invalid("a push that its participant has followed by another");
    last_push = key;
    done.free(std::exchange(answer, std::make_shared<base::Promise<optim::Norms>>()));
    return answer;
  }

  TableSet& set;
  const std::shared_ptr<Steps> steps;
  const rpc::ProcessNumber process;
  const int participant;
  const at::ScalarType dtype;
  uint64_t oldest = 0;  // lookups before this number are released
  std::map<uint64_t, Kept> kept;
  uint64_t kept_size = 0;
  std::pair<uint64_t, bool> last_push{0, false};  // number; false for kStage
  Answer answer;                                  // to the last push
};

TableServer::TableServer(rpc::Agent* agent) : agent_(agent) {}

TableServer::~TableServer() {
  // A lookup that waits holds its session, which holds the lookup.
  for (const auto& [id, session] : sessions_) session->steps->waiting.clear();
}

TableServer::SessionPtr TableServer::session_locked(uint64_t id, rpc::ProcessNumber caller) const {
  if (lost_.contains(caller)) throw base::Exception(ErrorKind::kPeerLost, "this process is lost");
  const auto it = sessions_.find(id);
  if (it == sessions_.end() || it->second->process != caller) {
    base::invalid("a call to tables that the caller has not opened, or has closed");
  }
  return it->second;
}

Future<uint64_t> TableServer::open(const OpenRequest& request, rpc::ProcessNumber caller) {
  const bool is_sync = request.mode == optim::Sharing::Mode::kSync;
  const bool is_known = is_sync || request.mode == optim::Sharing::Mode::kAsync;
  if (!is_known || request.participants < 1 || request.participants > 1 << 16 ||
      (request.dtype != at::kFloat && request.dtype != at::kBFloat16 &&
       request.dtype != at::kHalf)) {
    wire::Reader::fail("tables of an unknown mode, type or number of participants");
  }
  if (request.tables.empty() || request.participant >= request.participants) {
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
  if (lost_.contains(caller)) throw base::Exception(ErrorKind::kPeerLost, "this process is lost");
  if (made) set = sets_.emplace_back(std::move(made)).get();
  bool is_open = false;  // by a participant
  for (const auto& [id, other] : sessions_) {
    if (&other->set != set || other->participant < 0) continue;
    is_open = true;
    if (is_sync && other->participant == request.participant) {
      base::invalid(fmt::format("participant {} has opened these tables on rank {} already",
                                request.participant, rpc::rank_of(other->process)));
    }
  }
  if (is_sync && !is_open) {
    set->steps = std::make_shared<Steps>(Steps{.participants = request.participants});
    if (request.participants > 1 && !lost_.empty()) {
      set->steps->failed = {ErrorKind::kPeerLost, "a rank is lost", rpc::rank_of(*lost_.begin())};
    }
  }
  const auto steps = set->steps ? set->steps : std::make_shared<Steps>();
  const uint64_t id = ++last_session_;
  sessions_[id] =
      std::make_shared<Session>(Session{*set, steps, caller, request.participant, request.dtype});
  return Future<uint64_t>::ready(id);
}

Future<void> TableServer::close(uint64_t id, rpc::ProcessNumber caller) {
  DeferredTasks done;
  const std::lock_guard lock(mutex_);
  const SessionPtr session = session_locked(id, caller);
  sessions_.erase(id);
  const auto why = fmt::format("participant {} has closed its tables", session->participant);
  end_session_locked(session, {ErrorKind::kPeerLost, why, rpc::rank_of(caller)}, done);
  return Future<void>::ready({});
}

// Fails the steps of a participant whose session has ended.
void TableServer::end_session_locked(const SessionPtr& session, const base::Error& error,
                                     DeferredTasks& done) {
  done.free(session);
  if (session->answer) done.complete(session->answer, error);
  if (session->participant >= 0) fail_locked(*session->steps, error, done);
}

// Reads the rows of a lookup and keeps its ids for the push.
LookupReply TableServer::answer(Session& session, LookupRequest& request) {
  const at::NoGradGuard no_grad;
  const auto keep = [&](std::shared_ptr<const KeptLookup> lookup) {  // null: forgets it
    const std::lock_guard lock(mutex_);
    const auto it = session.kept.find(request.lookup);
    if (request.evaluates || it == session.kept.end()) return;
    it->second.lookup = std::move(lookup);
    if (!it->second.lookup) session.take(request.lookup);
  };
  const auto lookup = std::make_shared<KeptLookup>(std::move(request.ids));
  LookupReply reply;
  try {
    reply = session.set.read(*lookup, !request.evaluates).to(session.dtype);
  } catch (...) {
    keep(nullptr);
    throw;
  }
  keep(lookup);
  return reply;
}

Future<LookupReply> TableServer::look_up(LookupRequest request, rpc::ProcessNumber caller) {
  DeferredTasks done;
  std::unique_lock lock(mutex_);
  const SessionPtr session = session_locked(request.session, caller);
  session->oldest = std::max(session->oldest, request.oldest);
  while (!session->kept.empty() && session->kept.begin()->first < session->oldest) {
    done.free(session->take(session->kept.begin()->first));
  }
  Steps& steps = *session->steps;
  const bool waits = request.after > steps.applied;
  if (waits && steps.failed) throw base::Exception(*steps.failed);
  session->reserve(request);
  if (!waits) {
    lock.unlock();
    return Future<LookupReply>::ready(answer(*session, request));
  }
  const auto may_go_on = std::make_shared<base::Promise<void>>();
  steps.waiting.emplace(request.after, may_go_on);
  return may_go_on->future().then(agent_ ? agent_->executor() : inline_executor_,
                                  [this, session, request = std::move(request)]() mutable {
                                    return answer(*session, request);
                                  });
}

Future<void> TableServer::push(PushRequest request, rpc::ProcessNumber caller) {
  if (request.phase > PushRequest::Phase::kCommit) wire::Reader::fail("a push of an unknown phase");
  DeferredTasks done;
  std::unique_lock lock(mutex_);
  const SessionPtr session = session_locked(request.session, caller);
  if (session->participant < 0) base::invalid("a step of an unknown participant");
  try {
    push_locked(*session, std::move(request), lock, done);
  } catch (...) {
    const base::Error error = rpc::error_in_flight(ErrorKind::kInternal);
    fail_locked(*session->steps, error, done);
    if (session->answer) done.complete(session->answer, error);
    throw;
  }
  if (session->steps->participants > 1) return Future<void>::ready({});
  return session->answer->future().then(inline_executor_, [](const optim::Norms&) {});
}

Future<optim::Norms> TableServer::await_step(const PushRequest& push, rpc::ProcessNumber caller) {
  DeferredTasks done;
  const std::lock_guard lock(mutex_);
  return session_locked(push.session, caller)->answer_to(push, done)->future();
}

// Adds a push to the current step. If no participant is missing, computes the norms or applies the
// step. Releases the lock while it computes.
void TableServer::push_locked(Session& session, PushRequest request,
                              std::unique_lock<std::mutex>& lock, DeferredTasks& done) {
  using Phase = PushRequest::Phase;
  Steps& steps = *session.steps;
  const uint64_t number = steps.applied + 1;
  const Answer answer = session.answer_to(request, done);
  if (steps.failed) throw base::Exception(*steps.failed);
  if (request.number != number) {
    base::invalid(fmt::format("participant {} pushes step {} instead of step {}",
                              session.participant, request.number, number));
  }
  const double factor = request.lr_factor;
  if (!(request.scale >= 0 && std::isfinite(request.scale) && factor >= 0 &&
        std::isfinite(factor))) {
    base::invalid("a step with a factor out of range");
  }
  auto staged = steps.pushes.extract(session.participant);
  if (staged.empty() == (request.phase == Phase::kCommit)) {
    base::invalid("a step that is pushed twice, or committed before it is staged");
  }
  Push push = staged.empty() ? Push() : std::move(staged.mapped());
  push.request = std::move(request);
  session.move_lookups(push);
  push.answer = answer;
  if (steps.pushes.empty()) steps.since = base::Clock::now();
  steps.pushes.emplace(session.participant, std::move(push));
  if (std::ssize(steps.pushes) < steps.participants) return;

  const auto is_staged = [](const auto& each) {
    return each.second.request.phase == Phase::kStage;
  };
  const bool applies = std::ranges::none_of(steps.pushes, is_staged);
  std::vector<Push> all;
  std::vector<Answer> answers;
  for (auto& each : steps.pushes) {
    all.push_back(each.second);
    if (each.second.answer && (applies || is_staged(each))) {
      answers.push_back(std::move(each.second.answer));
    }
  }
  if (answers.empty()) return;
  if (applies) steps.pushes.clear();  // so that the step cannot fail while it is applied
  lock.unlock();
  base::Result<optim::Norms> result = optim::Norms{};
  try {
    const at::NoGradGuard no_grad;
    result = applies ? session.set.apply(all) : session.set.norms(all);
  } catch (...) {
    result = rpc::error_in_flight(ErrorKind::kInternal);
  }
  lock.lock();
  for (Answer& each : answers) done.complete(std::move(each), result);
  done.free(std::move(all));
  if (!result.ok()) return fail_locked(steps, result.error(), done);
  if (!applies) return;
  ++*updates_;
  steps.applied = number;
  const auto last = steps.waiting.upper_bound(number);
  for (auto it = steps.waiting.begin(); it != last; ++it) {
    done.complete(std::move(it->second), base::Unit{});
  }
  steps.waiting.erase(steps.waiting.begin(), last);
}

// Makes the current step, all later ones and the lookups that wait for them fail, with the first
// error of a call.
void TableServer::fail_locked(Steps& steps, const base::Error& error, DeferredTasks& done) {
  if (!steps.failed) steps.failed = error;
  for (auto& [participant, push] : steps.pushes) {
    if (push.answer) done.complete(std::move(push.answer), *steps.failed);
  }
  done.free(std::exchange(steps.pushes, {}));
  for (auto& [step, may_go_on] : std::exchange(steps.waiting, {})) {
    done.complete(std::move(may_go_on), *steps.failed);
  }
}

Table& TableServer::table_of(const std::string& name) const {
  const std::lock_guard lock(mutex_);
  for (const auto& set : sets_) {
    if (Table* const table = set->find(name)) return *table;
  }
  throw base::Exception(ErrorKind::kNotFound, "there is no table named " + name + " here");
}
rows::RowStore& TableServer::store(const std::string& table) const { return table_of(table).store; }
const rows::RowRule& TableServer::rule(const std::string& table) const {
  return table_of(table).rule;
}
std::atomic<uint64_t>& TableServer::updates_of(const std::string& table) const {
  return table_of(table).updates;
}

size_t TableServer::kept_lookups() const {
  const std::lock_guard lock(mutex_);
  size_t all = 0;
  for (const auto& [id, session] : sessions_) all += session->kept.size();
  return all;
}

void TableServer::on_rank_lost(const rpc::Loss& loss) {
  DeferredTasks done;
  const std::lock_guard lock(mutex_);
  lost_.insert(loss.process());
  std::erase_if(sessions_, [&](const auto& each) {
    if (each.second->process != loss.process()) return false;
    end_session_locked(each.second, loss.error, done);
    return true;
  });
  for (const auto& set : sets_) {
    if (set->steps && set->steps->participants > 1) fail_locked(*set->steps, loss.error, done);
  }
}

std::vector<rpc::Wait> TableServer::waits() const {
  const std::lock_guard lock(mutex_);
  std::vector<rpc::Wait> all;
  for (const auto& set : sets_) {
    if (!set->steps || set->steps->pushes.empty()) continue;
    std::vector<int> missing;
    for (int each = 0; each < set->steps->participants; ++each) {
      const auto push = set->steps->pushes.find(each);
      if (push == set->steps->pushes.end() || !push->second.answer) missing.push_back(each);
    }
    if (missing.empty()) continue;
    const std::string who = fmt::format("participant {}", c10::Join(", ", missing));
    all.push_back({"a step of tables here that wants " + who, set->steps->since});
  }
  return all;
}

optim::UpdateCount install(rpc::Agent& agent) {
  const auto server = std::make_shared<TableServer>(&agent.lasting());
  agent.provide(server);
  agent.expose<&serve<&TableServer::open, OpenRequest>>("distrain.table.open");
  agent.expose<&serve<&TableServer::close, uint64_t>>("distrain.table.close");
  agent.expose<&serve<&TableServer::look_up, LookupRequest>>(kLookUp);
  agent.expose<&serve<&TableServer::push, PushRequest>>("distrain.table.push");
  agent.expose<&serve<&TableServer::await_step, PushRequest>>("distrain.table.await_step");
  agent.add_layer(server);
  return server->updates();
}

}  // namespace distrain::table
