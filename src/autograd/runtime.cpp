#include "runtime.h"

#include <iterator>

#include <torch/csrc/autograd/functions/utils.h>

namespace distrain::autograd {

namespace {

constexpr uint16_t kChannel = 1;
constexpr uint64_t kAllPasses = UINT64_MAX;
enum : uint64_t { kReleased = 1, kPassFailed = 2, kGivenUp = 3 };

// Context ids contain the rank plus 1, because 0 means no context.
rpc::ProcessNumber maker_of(uint64_t context) { return rpc::maker_of(context) - 1; }

/// The stack of contexts that one thread has created. The contexts may end in any order and on any
/// thread: an ended context no longer counts, and is removed when it is on top.
class ContextStack {
 public:
  using Ended = std::shared_ptr<std::atomic<bool>>;

  static ContextStack& here() {
    thread_local ContextStack contexts;
    return contexts;
  }

  /// Makes the context current on this thread. Returns a flag to set when the context ends.
  Ended enter(Runtime& runtime, uint64_t id) {
    leave_ended();
    auto ended = std::make_shared<std::atomic<bool>>(false);
    stack_.push_back({std::make_unique<rpc::ContextScope>(&runtime, id, ended), ended});
    return ended;
  }
  void leave_ended() {
    // Keep an ended entry while a newer rpc::ContextScope is nested in it.
    while (!stack_.empty() && *stack_.back().ended && stack_.back().scope->is_innermost()) {
      stack_.pop_back();
    }
  }

 private:
  struct Entry {
    std::unique_ptr<rpc::ContextScope> scope;
    Ended ended;
  };
  std::vector<Entry> stack_;
};

struct InitiatedPass {
  InitiatedPass(rpc::Agent& agent, std::shared_ptr<ContextState> its, PassOptions options)
      : runtime(Runtime::of(agent)),
        state(std::move(its)),
        pass(std::make_shared<Pass>(agent, runtime->new_id(), options)) {}

  /// Returns part(). If `part` throws, fails the pass and rethrows the error.
  template <class Part>
  auto or_fail(const Part& part) {
    try {
      return part();
    } catch (...) {
      const base::Error error = rpc::error_in_flight(base::ErrorKind::kInternal);
      fail(error);
      throw base::Exception(error);
    }
  }
  base::Future<void> run(const std::vector<at::Tensor>& roots) {
    if (roots.empty()) base::invalid("backward: there is no root");
    for (const at::Tensor& root : roots) {
      if (root.defined() && root.requires_grad()) continue;
      base::invalid("backward: a root does not require a gradient");
    }
    state->begin_pass(pass);
    return or_fail([&] {
      pass->prepare(state, roots);
      return pass->run_roots(roots);
    });
  }
  void end() { state->finish_pass(pass->id()); }
  /// Fails the pass on all ranks. Must not run on the loop thread, because it destroys user hooks.
  void fail(const base::Error& error) {
    state->fail_pass(pass->id(), error);
    runtime->fail_pass(state->id(), pass->id(), error);
  }

  std::shared_ptr<Runtime> runtime;
  std::shared_ptr<ContextState> state;
  std::shared_ptr<Pass> pass;
};

}  // namespace

void install(rpc::Agent& agent) { std::make_shared<Runtime>(agent.lasting())->install(); }

void Runtime::install() {
  agent_.set_autograd_hook(shared_from_this());
  const std::weak_ptr<Runtime> weak = weak_from_this();
  agent_.expose_raw(kGradientsFunction,
                    [weak](rpc::CallContext&, rpc::Decoder& in, const rpc::ReplyPtr& reply) {
                      if (const auto self = weak.lock()) self->on_gradients(in, reply);
                    });
  channel_ = &agent_.open_channel(kChannel);
  channel_->set_handler({[weak](rpc::ChannelMessage message) {
                           if (const auto self = weak.lock()) self->on_message_on_loop(message);
                         },
                         {}});
  agent_.add_layer(weak_from_this());
}

std::shared_ptr<Runtime> Runtime::of(rpc::Agent& agent) {
  auto runtime = std::dynamic_pointer_cast<Runtime>(agent.autograd_hook());
  if (!runtime) {
    base::invalid("this agent has no autograd: call autograd::install(agent) before join()");
  }
  return runtime;
}

std::shared_ptr<ContextState> Runtime::find_or_create(uint64_t id) {
  std::lock_guard lock(mutex_);
  const auto it = contexts_.find(id);
  if (it != contexts_.end()) return it->second;
  if (const auto lost = lost_.find(maker_of(id)); lost != lost_.end()) {
    throw base::Exception(lost->second);
  }
  if (const auto range = ended_.lower_bound(id); range != ended_.end() && range->second <= id) {
    base::invalid("the autograd context of this call has ended: wait for its calls before");
  }
  return contexts_.emplace(id, std::make_shared<ContextState>(id)).first->second;
}

// Marks contexts `first_ended` to `id` as ended. Removes and returns context `id`, if present.
std::shared_ptr<ContextState> Runtime::take_locked(uint64_t first_ended, uint64_t id) {
  uint64_t last = id;
  for (auto range = ended_.lower_bound(first_ended - 1);
       range != ended_.end() && range->second <= last + 1; range = ended_.erase(range)) {
    first_ended = std::min(first_ended, range->second);
    last = std::max(last, range->first);
  }
  ended_.emplace(last, first_ended);
  auto taken = contexts_.extract(id);
  return taken ? std::move(taken.mapped()) : nullptr;
}

void Runtime::tell(const ContextState& context, const rpc::ChannelTag& tag,
                   std::shared_ptr<const wire::Bytes> payload, int but) {
  const auto is_sent = [&](int rank) {
    if (rank == but || rank == agent_.rank()) return true;
    try {
      const auto piece = payload ? std::span(*payload) : std::span<const uint8_t>();
      channel_->send(rank, tag, {&piece, 1}, payload);
      return true;
    } catch (const base::Exception&) {  // the rank is lost
      return false;
    }
  };
  const std::set<int> participants = context.participants();
  bool sent_to_all = true;
  for (const int rank : participants) sent_to_all = is_sent(rank) && sent_to_all;
  if (sent_to_all) return;
  // A lost rank cannot forward the message to its own peers, so send the message to all ranks.
  for (int rank = 0; rank < agent_.world_size(); ++rank) {
    if (!participants.contains(rank)) is_sent(rank);
  }
}

void Runtime::release(uint64_t id) {
  std::shared_ptr<ContextState> state;
  uint64_t first_ended = rpc::make_id(rpc::maker_of(id), 1);
  {
    std::lock_guard lock(mutex_);
    const auto it = contexts_.find(id);
    if (it == contexts_.end()) return;
    if (it != contexts_.begin()) first_ended = std::max(first_ended, std::prev(it)->first + 1);
    state = take_locked(first_ended, id);
  }
  tell(*state, {id, kReleased, first_ended}, nullptr, -1);
}

void Runtime::fail_pass(uint64_t context, uint64_t pass, const base::Error& error) {
  const std::shared_ptr<ContextState> state = find(context);
  if (!state) return;
  tell(*state, {context, kPassFailed, pass},
       std::make_shared<const wire::Bytes>(wire::encode(error)), -1);
}

void Runtime::on_message_on_loop(const rpc::ChannelMessage& message) {
  const uint64_t id = message.tag.a;
  if (message.tag.b == kReleased) {
    const uint64_t first_ended = message.tag.c;
    if (first_ended == 0 || first_ended > id || rpc::maker_of(first_ended) != rpc::maker_of(id)) {
      wire::Reader::fail("contexts of no range have ended");
    }
    std::unique_lock lock(mutex_);
    std::shared_ptr<ContextState> state = take_locked(first_ended, id);
    lock.unlock();
    if (!state) return;  // unknown here, or already released by another rank's message
    tell(*state, message.tag, nullptr, message.from);
    throw_away(std::move(state));
  } else if (message.tag.b == kPassFailed) {
    const std::shared_ptr<ContextState> state = find(id);
    if (!state) return;
    // Mark the pass as failed and forward `message` on the loop thread, before a message of the
    // next pass arrives. A worker calls end(), because end() destroys the user's hooks.
    auto failing = state->begin_failing(message.tag.c);
    if (!failing) return;
    tell(*state, message.tag,
         std::make_shared<const wire::Bytes>(message.payload.begin(), message.payload.end()),
         message.from);
    base::Error error{base::ErrorKind::kInternal, "the pass failed", message.from};
    try {
      error = wire::decode_error(message.payload);
    } catch (const base::Exception&) {
    }
    agent_.executor().post(
        [state, error, failing = std::move(*failing)]() mutable { failing.end(error); });
  } else if (message.tag.b == kGivenUp && message.tag.c != 0) {
    on_given_up_by(id, message.from, message.tag.c);
  }
}

uint64_t Runtime::on_send(uint64_t context, int to, uint64_t answered,
                          const std::vector<at::Tensor>& tensors) {
  empty_trash();
  std::vector<at::Tensor> wanted;
  for (const at::Tensor& tensor : tensors) {
    if (at::GradMode::is_enabled() && tensor.requires_grad()) wanted.push_back(tensor);
  }
  const std::shared_ptr<ContextState> state = find_or_create(context);
  state->add_participant(to);
  if (wanted.empty()) return 0;
  const uint64_t id = new_id();
  return state->add_send(id, std::make_shared<SendNode>(to, answered, wanted)) ? id : 0;
}

void Runtime::on_given_up(uint64_t context, int to, uint64_t call) {
  if (to == agent_.rank()) return on_given_up_by(context, to, call);
  if (!find(context)) return;
  try {
    channel_->send(to, {context, kGivenUp, call}, {}, nullptr);
  } catch (const base::Exception&) {  // the rank is lost and will not answer
  }
}

void Runtime::on_given_up_by(uint64_t context, int caller, uint64_t call) {
  try {
    // Creates a missing context to record the given-up call, which may still arrive and run here.
    throw_away(find_or_create(context)->give_up(caller, call));
  } catch (const base::Exception&) {  // the context has ended
  }
}

void Runtime::on_receive(uint64_t context, rpc::InMessage& message, const std::string& function) {
  std::vector<at::Tensor> wanted;
  for (size_t i = 0; i < message.tensors.size(); ++i) {
    if (!message.requires_grad[i]) continue;
    if (!torch::autograd::isDifferentiableType(message.tensors[i].scalar_type())) {
      wire::Reader::fail("a gradient for integers");
    }
    wanted.push_back(message.tensors[i]);
  }
  const std::shared_ptr<ContextState> state = find_or_create(context);
  const uint64_t id = message.header.autograd_id;
  state->add_participant(message.from);
  if (!function.empty()) state->add_result(id, message.from, function);
  const auto node = std::make_shared<RecvNode>(context, id, message.from);
  torch::autograd::set_history(wanted, node);  // and of message.tensors, which share the impls
}

void Runtime::on_rank_lost(const rpc::Loss& loss) {
  const base::Error& error = loss.error;
  std::vector<std::shared_ptr<ContextState>> orphans;
  {
    std::lock_guard lock(mutex_);
    lost_.emplace(loss.process(), error);
    for (auto& [id, state] : contexts_) {
      if (maker_of(id) == loss.process()) orphans.push_back(state);
    }
    for (const auto& state : orphans) contexts_.erase(state->id());
  }
  for (const auto& state : orphans) state->fail_pass(kAllPasses, error);
}

// Body: u64 context · u64 pass · u64 autograd id · bool retain graph · i64 timeout ns · gradients
void Runtime::on_gradients(rpc::Decoder& in, const rpc::ReplyPtr& reply) {
  empty_trash();
  const auto context = in.in.get<uint64_t>();
  const auto pass_id = in.in.get<uint64_t>();
  const auto autograd_id = in.in.get<uint64_t>();
  PassOptions options;
  options.retain_graph = in.in.get<bool>();
  options.timeout = std::chrono::nanoseconds(in.in.get<int64_t>());
  auto grads = rpc::decode<std::vector<at::Tensor>>(in);
  in.in.expect_end();
  const std::shared_ptr<ContextState> state = find(context);
  const std::shared_ptr<SendNode> node = state ? state->send(autograd_id) : nullptr;
  if (!node) {
    base::invalid("gradients for a context that has ended, or a call that has failed, on rank " +
                  std::to_string(agent_.rank()));
  }
  auto receive = [this, state, node, pass_id, options, reply, grads = std::move(grads)]() mutable {
    const std::shared_ptr<Pass> pass = state->pass_or(pass_id, [&] {
      auto pass = std::make_shared<Pass>(agent_, pass_id, options);
      pass->prepare(state, {});
      return pass;
    });
    pass->receive(node, std::move(grads), reply);
  };
  const auto admit = state->admission();
  if (!admit) return receive();
  admit().on_complete(
      agent_.executor(), [receive, reply, state, pass_id](base::Result<base::Unit>& turn) mutable {
        if (!turn.ok()) return reply->fail(turn.error());
        try {
          receive();
        } catch (...) {
          const base::Error error = rpc::error_in_flight(base::ErrorKind::kRemoteFailed);
          state->fail_pass(pass_id, error);
          reply->fail(error);
        }
      });
}

Context::Context(rpc::Agent& agent, Scope scope)
    : Context(agent, scope, Runtime::of(agent)->create()) {}

Context::Context(rpc::Agent& agent, Scope scope, std::shared_ptr<ContextState> state)
    : ContextRef(state),
      agent_(agent),
      runtime_(Runtime::of(agent)),
      state_(std::move(state)),
      ended_(scope == Scope::kThread ? ContextStack::here().enter(*runtime_, id()) : nullptr) {}

Context::~Context() {
  runtime_->release(id());
  if (!ended_) return;
  *ended_ = true;
  ContextStack::here().leave_ended();
}

std::vector<std::pair<at::Tensor, at::Tensor>> Context::gradients() const {
  return state_->gradients();
}
void Context::on_gradient_ready(const at::Tensor& variable,
                                std::function<void(const at::Tensor&)> fn) {
  state_->on_gradient_ready(variable, std::move(fn));
}

ContextRef::ContextRef(const std::shared_ptr<ContextState>& state, uint64_t pass)
    : id_(state->id()), pass_(pass), state_(state) {}

std::optional<ContextRef> ContextRef::current() {
  const uint64_t id = rpc::current_context();
  if (id == 0) return std::nullopt;
  auto* runtime = dynamic_cast<Runtime*>(rpc::current_autograd());
  if (!runtime) {
    base::invalid(
        "this thread is in an autograd context of an unknown agent: make it the "
        "current one by rpc::ContextScope(agent, context.id())");
  }
  return ContextRef(runtime->find_or_create(id));
}

at::Tensor ContextRef::gradient(const at::Tensor& variable) const {
  const auto state = state_.lock();
  return state ? state->gradient(variable) : at::Tensor();
}
void ContextRef::set_gradient(const at::Tensor& variable, at::Tensor gradient) const {
  if (const auto state = state_.lock()) state->set_gradient(variable, std::move(gradient));
}
bool ContextRef::runs() const {
  const auto state = state_.lock();
  return state && state->runs(pass_);
}
bool ContextRef::on_pass_end(std::function<void()> fn) const {
  const auto state = state_.lock();
  return state && state->on_pass_end(std::move(fn), pass_);
}

void backward(rpc::Agent& agent, uint64_t id, const std::vector<at::Tensor>& roots,
              PassOptions options) {
  const std::shared_ptr<ContextState> state = Runtime::of(agent)->find(id);
  if (!state || maker_of(id) != rpc::process_number(agent.rank(), agent.incarnation())) {
    base::invalid("backward: this rank has no autograd context " + std::to_string(id));
  }
  InitiatedPass initiated(agent, state, options);
  const base::Future<void> ended = initiated.run(roots);
  initiated.or_fail([&] {
    agent.run_calls_until(ended, kGradientsFunction, id);
    ended.wait();
  });
  initiated.end();
  initiated.pass->join_streams();
}

void backward(Context& context, const rpc::RRef<at::Tensor>& root, PassOptions options) {
  if (root.is_owner()) return backward(context, {root.local_value()}, options);
  using Fetched = std::pair<rpc::RRef<at::Tensor>, at::Tensor>;  // keeps the handle, its key
  auto fetched = context.state()->attachments_of(root.handle().get());
  if (fetched.empty()) {
    const rpc::ContextScope scope(context.agent(), context.id());
    fetched = {std::make_shared<Fetched>(root, root.to_here())};
    context.state()->attach({root.handle().get(), fetched[0]});
  }
  backward(context, {std::static_pointer_cast<Fetched>(fetched[0])->second}, options);
}

base::Future<void> backward_async(Context& context, const std::vector<at::Tensor>& roots,
                                  PassOptions options) {
  InitiatedPass initiated(context.agent(), context.state(), options);
  auto ended = std::make_shared<base::Promise<void>>();
  base::Future<void> result = ended->future();
  initiated.run(roots).on_complete(
      context.agent().executor(), [initiated, ended](base::Result<base::Unit>& outcome) mutable {
        outcome.ok() ? initiated.end() : initiated.fail(outcome.error());
        ended->complete(outcome);
      });
  return result;
}

void fail_passes(const Context& context, const base::Error& error) {
  InitiatedPass(context.agent(), context.state(), {}).fail(error);
}

at::Tensor gradient(rpc::Agent& agent, uint64_t id, const at::Tensor& variable) {
  const std::shared_ptr<ContextState> state = Runtime::of(agent)->find(id);
  return state ? state->gradient(variable) : at::Tensor();
}

void attach(rpc::Agent& agent, uint64_t id, const void* owner, std::shared_ptr<void> object) {
  Runtime::of(agent)->find_or_create(id)->attach({owner, std::move(object)});
}

std::vector<std::shared_ptr<void>> attachments(rpc::Agent& agent, uint64_t id, const void* owner) {
  const std::shared_ptr<ContextState> state = Runtime::of(agent)->find(id);
  return state ? state->attachments_of(owner) : std::vector<std::shared_ptr<void>>();
}

bool pass_failed(rpc::Agent& agent, uint64_t id) {
  const std::shared_ptr<ContextState> state = Runtime::of(agent)->find(id);
  return state && state->pass_failed();
}

void move_gradients(rpc::Agent& agent, uint64_t from, uint64_t to) {
  const std::shared_ptr<Runtime> runtime = Runtime::of(agent);
  const std::shared_ptr<ContextState> source = runtime->find(from);
  if (!source) return;
  const std::shared_ptr<ContextState> target = runtime->find(to);
  if (!target) {
    base::invalid(
        "gradients are to be added to those of a context that this rank does not "
        "know, or that has ended");
  }
  const at::NoGradGuard no_grad;
  for (auto& attachment : source->take_attachments()) target->attach(std::move(attachment));
  for (auto& [variable, gradient] : source->take_gradients()) {
    target->accumulate(variable, std::move(gradient));
  }
}

void guard_pass(rpc::Agent& agent, PassGuard guard) {
  const uint64_t context = rpc::current_context();
  if (context == 0) base::invalid("guard_pass: there is no current context");
  Runtime::of(agent)->find_or_create(context)->set_guard(std::move(guard));
}

}  // namespace distrain::autograd
