#include "distrain/table/sharded_embedding.h"

#include <c10/util/StringUtil.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/grad_mode.h>

#include "distrain/autograd/context.h"
#include "query_plan.h"

namespace distrain::table {

using base::Future;

/// Sends requests to the servers, here or on other ranks.
struct ShardedEmbedding::Client final : rpc::Layer, std::enable_shared_from_this<Client> {
  Client(rpc::Agent* its_agent, std::vector<int> servers, std::shared_ptr<TableServer> server = {})
      : agent(its_agent), ranks(std::move(servers)), here(std::move(server)) {}

  /// Calls a method of a server. Returns a failed future if the call cannot be made.
  template <auto Method, class Request>
  auto call(size_t server, const Request& request) {
    using Reply = decltype(((*here).*Method)(request, 0));
    const rpc::ContextScope outside(0);  // the calls are not part of the distributed graph
    try {
      if (!agent) return ((*here).*Method)(request, 0);
      return agent->rpc_async<&serve<Method, Request>>(rpc::To(ranks[server]).without_deadline(),
                                                       request);
    } catch (...) {
      return Reply::failed(rpc::error_in_flight(base::ErrorKind::kInternal));
    }
  }

  /// Sends a lookup. The waiting thread decodes the reply, so that no worker is woken for it.
  Future<rpc::RawReply> look_up(size_t server, const LookupRequest& request) {
    const rpc::ContextScope outside(0);
    try {
      return agent->call_raw(rpc::To(ranks[server]).without_deadline(), kLookUp,
                             [&](rpc::Encoder& encoder) { rpc::encode(encoder, request); });
    } catch (...) {
      return Future<rpc::RawReply>::failed(rpc::error_in_flight(base::ErrorKind::kInternal));
    }
  }

  /// Sends a push. Returns its result.
  Future<optim::Norms> push(size_t server, const PushRequest& request) {
    const Future<void> stored = call<&TableServer::push>(server, request);
    auto result = Future<optim::Norms>::ready({});
    if (steps_wait) {
      result = call<&TableServer::await_step>(
          server, PushRequest{request.session, request.number, request.phase});
    }
    base::Executor& at_once = agent ? agent->inline_executor() : inline_executor;
    // Lookups wait for a push that has not reached its server. The server refuses step 0, after
    // which all steps and lookups fail.
    stored.on_complete(at_once, [self = shared_from_this(), server](const auto& done) {
      if (done.ok() || !self->agent || !self->is_open) return;
      self->agent->executor().post([self, server] {
        static_cast<void>(
            self->call<&TableServer::push>(server, PushRequest{self->sessions[server]}));
      });
    });
    return stored.then(at_once, [result] { return result; });
  }
  /// Waits for all servers. Throws the first error, and names the server. Prefers other errors to
  /// `peer_lost`, because a participant may have closed its tables after another server's error.
  void await_each(const std::vector<Future<optim::Norms>>& results) const {
    std::optional<base::Error> first;
    for (size_t server = 0; server < results.size(); ++server) {
      const auto& result = results[server].wait_result();
      if (result.ok()) continue;
      const bool is_loss = result.error().kind == base::ErrorKind::kPeerLost;
      if (first && (is_loss || first->kind != base::ErrorKind::kPeerLost)) continue;
      first = result.error();
      if (agent) first->message += fmt::format(" (the tables of rank {})", ranks[server]);
    }
    if (first) throw base::Exception(std::move(*first));
  }

  void open(OpenRequest request) {
    steps_wait = request.mode == optim::Sharing::Mode::kSync && request.participants > 1;
    request.servers = static_cast<int>(ranks.size());
    std::vector<Future<uint64_t>> replies;
    for (size_t server = 0; server < ranks.size(); ++server) {
      request.server = static_cast<int>(server);
      replies.push_back(call<&TableServer::open>(server, request));
    }
    for (const auto& reply : replies) {
      const auto& session = reply.wait_result();
      sessions.push_back(session.ok() ? session.unchecked() : 0);
    }
    is_open = true;
    if (std::ranges::count(sessions, uint64_t{0}) > 0) close();
    base::wait_all(replies);
  }

  /// Closes the sessions, and waits until the servers know it.
  void close() {
    if (!is_open.exchange(false) || (agent && agent_alive.expired())) return;
    std::vector<Future<void>> replies;
    for (size_t server = 0; server < ranks.size(); ++server) {
      replies.push_back(call<&TableServer::close>(server, sessions[server]));
    }
    for (const auto& reply : replies) static_cast<void>(reply.wait_result());
  }
  void on_shutdown() override { close(); }
  void on_rank_lost(const rpc::Loss&) override {}

  struct AgentAlive {};

  rpc::Agent* const agent;  // null: the only server is `here`
  // The agent releases this object when it ends.
  const std::weak_ptr<AgentAlive> agent_alive = agent ? agent->shared<AgentAlive>() : nullptr;
  base::InlineExecutor inline_executor;  // if there is no agent
  const std::vector<int> ranks;          // the servers
  const std::shared_ptr<TableServer> here;

  bool steps_wait = false;            // true if steps wait for other participants
  std::vector<uint64_t> sessions;     // by server
  std::atomic<bool> is_open = false;  // false if there is no session to close
  uint64_t pushes = 0;                // number of the last step that was staged or applied
  std::atomic<uint64_t> applied = 0;  // number of the last step of apply()
  std::atomic<int64_t> staleness = 0;

  std::mutex mutex;             // guards the members below
  uint64_t lookups = 0;         // number of the last lookup
  std::set<uint64_t> unpushed;  // lookups that servers may keep for a push
  // Without contexts: the lookups by number of the gather() that follows them.
  std::map<uint64_t, std::vector<std::shared_ptr<Lookup>>> gathered;
  uint64_t gathers = 0;
};

/// The clients of tables that an exception has destroyed. Agent::shutdown() closes their sessions.
struct ShardedEmbedding::LeftOpen {
  std::mutex mutex;
  std::vector<std::shared_ptr<Client>> clients;
};

struct ShardedEmbedding::Lookup {
  ~Lookup() {
    const std::lock_guard lock(client->mutex);
    client->unpushed.erase(number);
  }

  const std::shared_ptr<Client> client;
  const uint64_t number;
  const uint64_t after;  // the last push before start()
  const bool evaluates;
  const std::shared_ptr<LookupPlan> plan;
  std::vector<Future<rpc::RawReply>> replies{};  // by server
  Future<LookupReply> reply_here{};              // if there is no agent
  bool is_pushed = false;                        // true if a step has pushed its gradients
};

/// The gradients of a step, checked and in the type of messages.
struct ShardedEmbedding::PreparedStep {
  struct Part {
    std::shared_ptr<Lookup> lookup;
    at::Tensor gradient;
    std::vector<int> queries;  // that have a gradient
  };
  std::vector<Part> parts;
  uint64_t number = 0;  // of a step that norm() has staged
};

ShardedEmbedding::ShardedEmbedding(rpc::Agent& agent, std::vector<int> servers,
                                   std::vector<TableOptions> tables, optim::Sharing sharing,
                                   LookupSettings settings)
    : tables_(std::move(tables)),
      sharing_(sharing),
      settings_(settings),
      client_(std::make_shared<Client>(&agent.lasting(), std::move(servers))) {
  if (sharing.mode == optim::Sharing::Mode::kSsp) base::invalid("tables have no mode ssp");
  const at::ScalarType wire = settings.wire_dtype;
  if (wire != at::kFloat && wire != at::kBFloat16 && wire != at::kHalf) {
    base::invalid("tables send rows as float, bfloat16 or half");
  }
  if (client_->ranks.empty()) base::invalid("tables need servers");
  client_->open({tables_, sharing.mode, sharing.participants, sharing.participant, wire});
  agent.add_layer(client_);
}

ShardedEmbedding::ShardedEmbedding(std::shared_ptr<TableServer> server,
                                   std::vector<TableOptions> tables)
    : tables_(std::move(tables)),
      client_(std::make_shared<Client>(nullptr, std::vector{0}, std::move(server))) {
  client_->open({tables_});
}

ShardedEmbedding::~ShardedEmbedding() {
  std::unique_lock lock(client_->mutex);
  const auto gathered = std::move(client_->gathered);  // its lookups hold the client
  lock.unlock();
  const bool unwinds = client_->agent && std::uncaught_exceptions() > 0;
  if (!unwinds) client_->close();
  if (!unwinds || client_->agent_alive.expired()) return;
  const auto left = client_->agent->shared<LeftOpen>();
  const std::lock_guard keeping(left->mutex);
  left->clients.push_back(client_);
}

ShardedEmbedding::Pending ShardedEmbedding::start(const std::vector<Query>& queries) {
  LookupRequest request{.evaluates = !at::GradMode::is_enabled()};
  const at::NoGradGuard no_grad;
  const bool pools = settings_.pools_on_servers && !request.evaluates;
  const auto plan = std::make_shared<LookupPlan>(queries, tables_, client_->ranks.size(),
                                                 pools ? at::elementSize(settings_.wire_dtype) : 0);
  {
    const std::lock_guard lock(client_->mutex);
    request.lookup = ++client_->lookups;
    request.after = client_->applied;
    if (!request.evaluates) client_->unpushed.insert(request.lookup);
    request.oldest = client_->unpushed.empty() ? request.lookup : *client_->unpushed.begin();
  }
  const std::shared_ptr<Lookup> lookup(
      new Lookup{client_, request.lookup, request.after, request.evaluates, plan});
  for (size_t server = 0; server < client_->ranks.size(); ++server) {
    request.session = client_->sessions[server];
    request.ids = plan->ids()[server];
    if (client_->agent) {
      lookup->replies.push_back(client_->look_up(server, request));
    } else {
      lookup->reply_here = client_->call<&TableServer::look_up>(server, request);
    }
  }
  return lookup;
}

std::vector<at::Tensor> ShardedEmbedding::finish(Pending lookup) {
  const bool is_pending = lookup && (!lookup->replies.empty() || lookup->reply_here.valid());
  if (!is_pending) base::invalid("a lookup that is finished already");
  if (lookup->client != client_) base::invalid("a lookup that another ShardedEmbedding started");
  const bool learns = !lookup->evaluates && at::GradMode::is_enabled();
  const uint64_t context = rpc::current_context();
  if (learns && client_->agent && context == 0) {
    base::invalid("a lookup needs an autograd::Context, or a NoGradGuard if it evaluates");
  }
  base::wait_all(lookup->replies);
  std::vector<at::Tensor> replies;
  if (lookup->reply_here.valid()) replies.push_back(lookup->reply_here.wait());
  for (const auto& reply : lookup->replies) {
    replies.push_back(client_->agent->finish<LookupReply>(reply.wait()));
  }
  client_->staleness = static_cast<int64_t>(client_->applied - lookup->after);
  if (client_->applied > lookup->after && sharing_.mode == optim::Sharing::Mode::kSync) {
    base::invalid("in sync mode a lookup cannot begin before the previous step");
  }
  const std::vector<at::Tensor> results = LookupPlan::results(lookup->plan, replies, learns);
  lookup->replies.clear();
  lookup->reply_here = {};
  if (!learns) return results;
  if (client_->agent) {
    autograd::attach(*client_->agent, context, client_.get(), lookup);
  } else {
    const std::lock_guard lock(client_->mutex);
    client_->gathered[client_->gathers].push_back(lookup);
  }
  return results;
}

int64_t ShardedEmbedding::staleness() const { return client_->staleness; }

void ShardedEmbedding::settle() {
  const std::unique_ptr<PreparedStep> pushed = std::move(pushed_);  // until the push is answered
  client_->await_each(std::exchange(pushing_, {}));
}

const std::vector<int>& ShardedEmbedding::servers() const { return client_->ranks; }
const std::shared_ptr<TableServer>& ShardedEmbedding::local_server() const { return client_->here; }

std::string ShardedEmbedding::where() const {
  return fmt::format("the tables of rank {}", c10::Join(", ", client_->ranks));
}

bool ShardedEmbedding::only_sends() const { return client_->agent != nullptr; }

uint64_t ShardedEmbedding::gather() {
  const std::lock_guard lock(client_->mutex);
  return client_->gathers++;
}

std::vector<std::shared_ptr<ShardedEmbedding::Lookup>> ShardedEmbedding::take_lookups(
    uint64_t context) {
  if (!client_->agent) {
    std::map<uint64_t, std::vector<std::shared_ptr<Lookup>>> older;  // which no step took
    const std::lock_guard lock(client_->mutex);
    auto taken = client_->gathered.extract(context);
    while (!client_->gathered.empty() && client_->gathered.begin()->first < context) {
      older.insert(client_->gathered.extract(client_->gathered.begin()));
    }
    return taken ? std::move(taken.mapped()) : std::vector<std::shared_ptr<Lookup>>();
  }
  if (autograd::pass_failed(*client_->agent, context)) {
    base::invalid("a backward pass of this context has failed, so it makes no step");
  }
  std::vector<std::shared_ptr<Lookup>> lookups;
  for (auto& each : autograd::attachments(*client_->agent, context, client_.get())) {
    lookups.push_back(std::static_pointer_cast<Lookup>(each));
  }
  return lookups;
}

// Returns a gradient in the type of messages. Throws `not_finite`.
at::Tensor ShardedEmbedding::checked(const LookupPlan& plan, const at::Tensor& gradient) const {
  // Tests the sum, which is quick: it is finite only if all numbers are.
  const auto is_finite = [](const at::Tensor& numbers) {
    return std::isfinite(numbers.sum(at::kFloat).item<float>());
  };
  at::Tensor sent = gradient.to(settings_.wire_dtype).contiguous();
  if (is_finite(sent)) return sent;
  const bool is_too_large = is_finite(gradient);
  std::set<std::string> names;
  for (const QueryPlan& query : plan.queries()) {
    names.insert(tables_[static_cast<size_t>(query.table)].name);
  }
  throw base::Exception(
      base::ErrorKind::kNotFinite,
      fmt::format("a gradient of table {} is {}, so no table is updated", c10::Join(" or ", names),
                  is_too_large ? "too large for --wire-dtype" : "not finite"));
}

void ShardedEmbedding::check(const std::vector<uint64_t>& contexts) {
  const at::NoGradGuard no_grad;
  settle();
  step_.reset();
  auto step = std::make_unique<PreparedStep>();
  for (const uint64_t context : contexts) {
    for (const auto& lookup : take_lookups(context)) {
      if (lookup->is_pushed) base::invalid("this context has sent its step of the tables already");
      const at::Tensor& leaf = lookup->plan->leaf();
      const at::Tensor gradient =
          client_->agent ? autograd::gradient(*client_->agent, context, leaf) : leaf.grad();
      if (!gradient.defined()) continue;
      step->parts.push_back({lookup, checked(*lookup->plan, gradient), lookup->plan->learning()});
    }
  }
  step_ = std::move(step);
}

// Sends the gradients of `step` to all servers, also to those without gradients, so that the tables
// have the same number of updates everywhere.
std::vector<Future<optim::Norms>> ShardedEmbedding::push(PushRequest request,
                                                         const PreparedStep& step) {
  std::vector<Future<optim::Norms>> replies;
  for (size_t server = 0; server < client_->ranks.size(); ++server) {
    request.session = client_->sessions[server];
    request.gradients.clear();
    for (const PreparedStep::Part& part : step.parts) {
      if (request.phase == PushRequest::Phase::kCommit) break;
      part.lookup->is_pushed = true;
      request.gradients[part.lookup->number] = {
          part.queries, part.lookup->plan->of_server(part.gradient, server)};
    }
    replies.push_back(client_->push(server, request));
  }
  return replies;
}

// Returns the squared norm of the gradients of `step_`.
double ShardedEmbedding::norm_squared() const {
  const auto dim_of = [this](int table) { return tables_[static_cast<size_t>(table)].dim; };
  std::deque<std::vector<PartView>> views;
  std::vector<TableGradients::Part> all;
  for (const PreparedStep::Part& part : step_->parts) {
    const LookupPlan& plan = *part.lookup->plan;
    const at::Tensor gradient = part.gradient.to(at::kFloat);
    for (size_t server = 0; server < plan.ids().size(); ++server) {
      const auto& its = views.emplace_back(parts_of(plan.ids()[server], dim_of));
      for (const int query : part.queries) {
        all.push_back({&its[static_cast<size_t>(query)], plan.of_server(gradient, server)});
      }
    }
  }
  double sum = 0;
  TableGradients::for_each_table(std::move(all), [&](int table, const auto& parts) {
    sum += TableGradients(parts, dim_of(table)).norm_squared();
  });
  return sum;
}

Future<optim::Norms> ShardedEmbedding::norm(const std::vector<uint64_t>&,
                                            const optim::NormArguments& arguments) {
  const at::NoGradGuard no_grad;
  optim::Norms norms{0, arguments.own};
  if (client_->steps_wait) {
    auto step = std::move(step_);  // dropped if an error is thrown
    step->number = ++client_->pushes;
    const auto replies = push(
        {.number = step->number, .phase = PushRequest::Phase::kStage, .own_norm = arguments.own},
        *step);
    client_->await_each(replies);
    step_ = std::move(step);
    for (const auto& reply : replies) norms.shared += reply.wait().shared;
    norms.own = replies.front().wait().own;
  } else {
    norms.shared = norm_squared();
  }
  return Future<optim::Norms>::ready(norms);
}

Future<uint64_t> ShardedEmbedding::apply(const std::vector<uint64_t>&,
                                         const optim::StepOptions& options) {
  const at::NoGradGuard no_grad;
  using Phase = PushRequest::Phase;
  auto step = std::move(step_);
  const Phase phase = step->number > 0 ? Phase::kCommit : Phase::kApply;
  if (phase == Phase::kApply) step->number = ++client_->pushes;
  pushing_ = push({.number = step->number,
                   .phase = phase,
                   .lr_factor = options.lr_factor,
                   .scale = options.scale},
                  *step);
  client_->applied = step->number;
  pushed_ = std::move(step);
  if (!client_->agent) settle();
  return Future<uint64_t>::ready(client_->applied);
}

}  // namespace distrain::table
