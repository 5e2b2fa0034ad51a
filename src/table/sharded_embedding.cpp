#include "distrain/table/sharded_embedding.h"

#include <ATen/Functions.h>
#include <c10/util/StringUtil.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/grad_mode.h>

#include "distrain/autograd/context.h"
#include "query_plan.h"

namespace distrain::table {

using base::Future;

/// Sends requests to the servers, here or on other ranks.
struct ShardedEmbedding::Client {
  Client(rpc::Agent* its_agent, std::vector<int> servers, std::shared_ptr<TableServer> server = {})
      : agent(its_agent), ranks(std::move(servers)), here(std::move(server)) {}

  /// Returns a future of the result of `Method` on the server, which `Call` calls on another rank.
  template <auto Call, auto Method, class Request>
  auto call(size_t server, const Request& request) {
    using Reply = decltype(agent->rpc_async<Call>(0, request));
    const rpc::ContextScope outside(0);  // the calls are not part of the distributed graph
    if (agent) return agent->rpc_async<Call>(rpc::To(ranks[server]).without_deadline(), request);
    if constexpr (std::is_same_v<Reply, decltype(((*here).*Method)(request, 0))>) {
      return ((*here).*Method)(request, 0);
    } else if constexpr (std::is_same_v<Reply, Future<void>>) {
      ((*here).*Method)(request, 0);
      return Reply::ready({});
    } else {
      return Reply::ready(((*here).*Method)(request, 0));
    }
  }

  rpc::Agent* const agent;       // null: the only server is `here`
  const std::vector<int> ranks;  // the servers
  const std::shared_ptr<TableServer> here;
  std::vector<uint64_t> sessions;  // by server

  std::mutex mutex;
  uint64_t lookups = 0;  // number of the last lookup
  std::set<uint64_t>
      unpushed;         // lookups that servers may keep: those of contexts and of unanswered pushes
  uint64_t pushes = 0;  // number of the last push
  int64_t staleness = 0;
  // Without contexts: the lookups by number of the gather() that follows them.
  std::map<uint64_t, std::vector<std::shared_ptr<Lookup>>> gathered;
  uint64_t gathers = 0;
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
  std::vector<QueryPlan> plans;
  std::vector<Future<LookupReply>> replies{};  // by server
  bool is_pushed = false;
};

/// The gradients of a step, checked and in the type of messages.
struct ShardedEmbedding::PreparedStep {
  explicit PreparedStep(std::vector<uint64_t> ids) : contexts(std::move(ids)) {}

  struct Part {
    std::shared_ptr<Lookup> lookup;
    std::vector<at::Tensor> gradients;  // by query; undefined if there is none
  };
  const std::vector<uint64_t> contexts;
  std::vector<Part> parts;
  bool is_staged = false;
};

ShardedEmbedding::ShardedEmbedding(rpc::Agent& agent, std::vector<int> servers,
                                   std::vector<TableOptions> tables, optim::Sharing sharing,
                                   LookupSettings settings)
    : tables_(std::move(tables)),
      sharing_(sharing),
      settings_(settings),
      client_(std::make_shared<Client>(&agent, std::move(servers))) {
  if (sharing.mode == optim::Sharing::Mode::kSsp) base::invalid("tables have no mode ssp");
  const at::ScalarType wire = settings.wire_dtype;
  if (wire != at::kFloat && wire != at::kBFloat16 && wire != at::kHalf) {
    base::invalid("tables send rows as float, bfloat16 or half");
  }
  open();
}

ShardedEmbedding::ShardedEmbedding(std::shared_ptr<TableServer> server,
                                   std::vector<TableOptions> tables)
    : tables_(std::move(tables)),
      client_(std::make_shared<Client>(nullptr, std::vector{0}, std::move(server))) {
  open();
}

void ShardedEmbedding::open() {
  const auto servers = static_cast<int>(client_->ranks.size());
  if (tables_.empty() || servers == 0) base::invalid("there are no tables, or no servers");
  std::vector<Future<OpenReply>> replies;
  for (int server = 0; server < servers; ++server) {
    replies.push_back(client_->call<&open_here, &TableServer::open>(
        static_cast<size_t>(server), OpenRequest{tables_, sharing_.mode, sharing_.participants,
                                                 sharing_.participant, server, servers}));
  }
  base::wait_all(replies);
  for (const auto& reply : replies) client_->sessions.push_back(reply.wait().first);
  client_->pushes = replies.front().wait().second;
}

ShardedEmbedding::~ShardedEmbedding() {
  for (size_t server = 0; server < client_->sessions.size(); ++server) {
    try {
      static_cast<void>(
          client_->call<&close_here, &TableServer::close>(server, client_->sessions[server]));
    } catch (const base::Exception&) {  // the server or this rank has ended
    }
  }
}

at::Tensor ShardedEmbedding::forward(const at::Tensor& ids) { return look_up({{0, ids}})[0]; }

at::Tensor ShardedEmbedding::bags(const at::Tensor& ids, const at::Tensor& offsets,
                                  const at::Tensor& weights, Pooling pooling) {
  return look_up({{0, ids, offsets, weights, pooling}})[0];
}

std::vector<at::Tensor> ShardedEmbedding::look_up(const std::vector<Query>& queries) {
  return finish(start(queries));
}

ShardedEmbedding::Pending ShardedEmbedding::start(const std::vector<Query>& queries) {
  LookupRequest request{.evaluates = !at::GradMode::is_enabled(), .dtype = settings_.wire_dtype};
  const at::NoGradGuard no_grad;
  const bool pools = settings_.pools_on_servers && !request.evaluates;
  std::vector<QueryPlan> plans;
  for (const Query& query : queries) {
    if (query.table < 0 || query.table >= std::ssize(tables_)) base::invalid("no such table");
    plans.push_back(plan_query(query, tables_[static_cast<size_t>(query.table)],
                               client_->ranks.size(),
                               pools ? at::elementSize(settings_.wire_dtype) : 0));
  }
  {
    const std::lock_guard lock(client_->mutex);
    request.lookup = ++client_->lookups;
    request.after = client_->pushes;
    if (!request.evaluates) client_->unpushed.insert(request.lookup);
    request.oldest = client_->unpushed.empty() ? request.lookup : *client_->unpushed.begin();
  }
  const std::shared_ptr<Lookup> lookup(
      new Lookup{client_, request.lookup, request.after, request.evaluates, std::move(plans)});
  for (size_t server = 0; server < client_->ranks.size(); ++server) {
    request.session = client_->sessions[server];
    request.parts.clear();
    for (const QueryPlan& plan : lookup->plans) request.parts.push_back(plan.parts[server]);
    lookup->replies.push_back(client_->call<&look_up_here, &TableServer::look_up>(server, request));
  }
  return lookup;
}

std::vector<at::Tensor> ShardedEmbedding::finish(Pending lookup) {
  if (!lookup || lookup->replies.empty()) base::invalid("a lookup that is finished already");
  const bool learns = !lookup->evaluates && at::GradMode::is_enabled();
  const uint64_t context = rpc::current_context();
  if (learns && client_->agent && context == 0) {
    base::invalid(
        "a lookup that trains needs an autograd::Context; an evaluation needs a "
        "NoGradGuard");
  }
  base::wait_all(lookup->replies);
  {
    const std::lock_guard lock(client_->mutex);
    client_->staleness = static_cast<int64_t>(client_->pushes - lookup->after);
    if (client_->staleness > 0 && sharing_.mode == optim::Sharing::Mode::kSync) {
      base::invalid("in sync mode a lookup cannot begin before the previous step");
    }
  }
  std::vector<at::Tensor> results;
  for (size_t i = 0; i < lookup->plans.size(); ++i) {
    QueryPlan& plan = lookup->plans[i];
    std::vector<at::Tensor> vectors;
    for (size_t server = 0; server < lookup->replies.size(); ++server) {
      const LookupReply& reply = lookup->replies[server].wait_result().value();
      const std::array<int64_t, 2> sizes{plan.parts[server].vectors(), plan.shape.back()};
      if (reply.size() != lookup->plans.size() || reply[i].sizes() != at::IntArrayRef(sizes)) {
        wire::Reader::fail("rows of another shape than the lookup");
      }
      vectors.push_back(reply[i].to(at::kFloat));
    }
    plan.leaf = vectors.size() == 1 ? vectors[0].contiguous() : at::cat(vectors);
    plan.leaf.set_requires_grad(learns);
    results.push_back(result_of(plan));
    if (plan.gather && !learns) plan.gather.reset();
  }
  lookup->replies.clear();
  if (!learns) return results;
  if (client_->agent) {
    autograd::attach(*client_->agent, context, client_.get(), lookup);
  } else {
    const std::lock_guard lock(client_->mutex);
    client_->gathered[client_->gathers].push_back(lookup);
  }
  return results;
}

int64_t ShardedEmbedding::staleness() const {
  const std::lock_guard lock(client_->mutex);
  return client_->staleness;
}

void ShardedEmbedding::settle() {
  const auto pushing = std::exchange(pushing_, {});
  const std::unique_ptr<PreparedStep> pushed = std::move(pushed_);  // until the push is answered
  base::wait_all(pushing);
}

std::string ShardedEmbedding::where() const {
  return fmt::format("the tables of rank {}", c10::Join(", ", client_->ranks));
}

uint64_t ShardedEmbedding::gather() {
  const std::lock_guard lock(client_->mutex);
  return client_->gathers++;
}

std::vector<std::shared_ptr<ShardedEmbedding::Lookup>> ShardedEmbedding::take_lookups(
    uint64_t context) {
  if (!client_->agent) {
    const std::lock_guard lock(client_->mutex);
    auto taken = client_->gathered.extract(context);
    return taken ? std::move(taken.mapped()) : std::vector<std::shared_ptr<Lookup>>();
  }
  if (autograd::pass_failed(*client_->agent, context)) {
    base::invalid("the backward pass of this context has failed, so it makes no step");
  }
  std::vector<std::shared_ptr<Lookup>> lookups;
  for (auto& each : autograd::attachments(*client_->agent, context, client_.get())) {
    lookups.push_back(std::static_pointer_cast<Lookup>(each));
  }
  return lookups;
}

void ShardedEmbedding::check(const std::vector<uint64_t>& contexts) {
  const at::NoGradGuard no_grad;
  settle();
  step_.reset();
  const auto gradient_of = [&](const QueryPlan& plan, uint64_t context) {
    at::Tensor gradient =
        client_->agent ? autograd::gradient(*client_->agent, context, plan.leaf) : plan.leaf.grad();
    if (!gradient.defined()) return gradient;
    gradient = gradient.to(settings_.wire_dtype).contiguous();
    // The sum is finite only if all gradients are.
    if (std::isfinite(gradient.sum(at::kFloat).item<float>())) return gradient;
    throw base::Exception(base::ErrorKind::kNotFinite,
                          "a gradient of table " +
                              tables_[static_cast<size_t>(plan.parts[0].table)].name +
                              " is not finite, so no table is updated");
  };
  auto step = std::make_unique<PreparedStep>(contexts);
  for (const uint64_t context : contexts) {
    for (const auto& lookup : take_lookups(context)) {
      if (lookup->is_pushed) base::invalid("this context has made its step of the tables already");
      PreparedStep::Part part{lookup, {}};
      for (const QueryPlan& plan : lookup->plans) {
        part.gradients.push_back(gradient_of(plan, context));
      }
      const auto is_defined = [](const at::Tensor& gradient) { return gradient.defined(); };
      if (std::ranges::any_of(part.gradients, is_defined)) step->parts.push_back(std::move(part));
    }
  }
  step_ = std::move(step);
}

// Sends the gradients of `step` to all servers, also to those without gradients, so that the tables
// have the same number of updates everywhere.
std::vector<Future<optim::Norms>> ShardedEmbedding::push(PushRequest request,
                                                         const PreparedStep& step) {
  using Phase = PushRequest::Phase;
  const bool has_gradients = request.phase != Phase::kCommit;
  std::vector<Future<optim::Norms>> replies;
  for (size_t server = 0; server < client_->ranks.size(); ++server) {
    request.session = client_->sessions[server];
    request.gradients.clear();
    for (const PreparedStep::Part& part : step.parts) {
      if (!has_gradients) break;
      LookupReply& its = request.gradients[part.lookup->number];
      for (size_t q = 0; q < part.gradients.size(); ++q) {
        its.push_back(part.lookup->plans[q].of_server(part.gradients[q], server));
      }
    }
    replies.push_back(client_->call<&push_here, &TableServer::push>(server, request));
  }
  return replies;
}

Future<optim::Norms> ShardedEmbedding::norm(const std::vector<uint64_t>& contexts,
                                            const optim::NormArguments& arguments) {
  const at::NoGradGuard no_grad;
  if (!step_ || step_->contexts != contexts) check(contexts);
  optim::Norms norms{0, arguments.own};
  if (sharing_.mode == optim::Sharing::Mode::kSync && sharing_.participants > 1) {
    PushRequest request{.phase = PushRequest::Phase::kStage, .own_norm = arguments.own};
    {
      const std::lock_guard lock(client_->mutex);
      request.number = client_->pushes + 1;
    }
    step_->is_staged = true;
    const auto replies = push(request, *step_);
    base::wait_all(replies);
    for (const auto& reply : replies) norms.shared += reply.wait().shared;
    norms.own = replies.front().wait().own;
    return Future<optim::Norms>::ready(norms);
  }
  for (int table = 0; table < std::ssize(tables_); ++table) {
    std::vector<TableGradients::Part> parts;
    for (const PreparedStep::Part& part : step_->parts) {
      for (size_t q = 0; q < part.gradients.size(); ++q) {
        const QueryPlan& plan = part.lookup->plans[q];
        if (plan.parts[0].table != table || !part.gradients[q].defined()) continue;
        for (size_t server = 0; server < plan.parts.size(); ++server) {
          parts.push_back({&plan.parts[server], plan.of_server(part.gradients[q], server)});
        }
      }
    }
    if (!parts.empty()) norms.shared += TableGradients(parts).norm_squared();
  }
  return Future<optim::Norms>::ready(norms);
}

Future<uint64_t> ShardedEmbedding::apply(const std::vector<uint64_t>& contexts,
                                         const optim::StepOptions& options) {
  const at::NoGradGuard no_grad;
  if (!step_ || step_->contexts != contexts) check(contexts);
  PushRequest request{
      .phase = step_->is_staged ? PushRequest::Phase::kCommit : PushRequest::Phase::kApply,
      .lr_factor = options.lr_factor,
      .scale = options.scale};
  {
    const std::lock_guard lock(client_->mutex);
    request.number = ++client_->pushes;
  }
  pushed_ = std::move(step_);
  for (const PreparedStep::Part& part : pushed_->parts) part.lookup->is_pushed = true;
  pushing_ = push(request, *pushed_);
  if (!client_->agent) settle();
  return Future<uint64_t>::ready(request.number);
}

}  // namespace distrain::table
