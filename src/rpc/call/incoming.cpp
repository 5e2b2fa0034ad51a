// How AgentCore queues and runs calls, from other ranks and from itself, and answers them.
#include <chrono>

#include <fmt/format.h>

#include "agent_core.h"
#include "call/calls.h"
#include "distrain/membership/loss.h"
#include "distrain/rpc/error.h"
#include "distrain/rpc/torch_state.h"

namespace distrain::rpc {

namespace {

class ReplyImpl final : public Reply {
 public:
  ReplyImpl(AgentCore& core, ProcessNumber to, uint64_t call_id, uint64_t context)
      : gate_(core.replies),
        rank_(core.options.rank),
        to_(to),
        call_id_(call_id),
        context_(context) {}
  ~ReplyImpl() override {
    fail(Error{ErrorKind::kCancelled, "the function gave no answer", rank_});
  }

  void send(const std::function<void(Encoder&)>& fill) override {
    if (answered_.exchange(true)) return;
    end_call([&](AgentCore& core) {
      try {
        core.send_reply(rank_of(to_), call_id_, context_, fill);
      } catch (...) {
        core.send_error(rank_of(to_), call_id_,
                        with_origin(error_in_flight(ErrorKind::kInternal), rank_, function));
      }
    });
  }

  void fail(Error error) override {
    if (answered_.exchange(true)) return;
    error = with_origin(std::move(error), rank_, function);
    if (created) created->value.fail(error);
    end_call([&](AgentCore& core) { core.send_error(rank_of(to_), call_id_, std::move(error)); });
  }

  const std::shared_ptr<OwnedValue>& target() const override { return created; }

  std::shared_ptr<OwnedValue> created;  // the value of a remote() call
  std::string function;                 // added to errors that name no function
  Budget::Work work;
  bool has_small_credit = false;

 private:
  /// Calls `answer(core)` unless the caller is lost. Releases the call's credit in both cases.
  template <class F>
  void end_call(const F& answer) {
    gate_->enter([&](AgentCore& core) {
      if (core.is_here(to_)) answer(core);
      core.send_grants(has_small_credit, core.flows[has_small_credit].budget->end(work));
    });
  }

  const std::shared_ptr<ReplyGate> gate_;
  const int rank_;
  const ProcessNumber to_;
  const uint64_t call_id_;
  const uint64_t context_;
  std::atomic<bool> answered_{false};
};

// A call that a thread receives while it polls, and that the thread itself is to run.
struct OwnCall {
  const std::string_view function;
  const uint64_t key;
  std::optional<QueuedCall> taken{};
};
thread_local OwnCall* own_call = nullptr;  // set while run_calls_until() polls

}  // namespace

void Reply::store(std::shared_ptr<void> value, std::type_index type,
                  OwnedValue::EncodeFunction encode) {
  const std::shared_ptr<OwnedValue> owned = target();
  if (!owned) base::invalid("this function makes an object: use remote_new()");
  owned->type = type;
  owned->encode = encode;
  owned->value.set(std::move(value));
  send([](Encoder&) {});
}

bool take_own_call(QueuedCall& call) {
  if (!own_call || own_call->taken || call.message) return false;
  try {
    wire::Reader in = body_of(call.frame);
    if (in.get_string() != own_call->function) return false;
    in.get<uint32_t>();  // the time that its caller waits
    if (in.get<CallMode>() != CallMode::kCall || in.get<uint64_t>() != own_call->key) return false;
  } catch (const Exception&) {  // a worker tells the caller
    return false;
  }
  own_call->taken = std::move(call);
  return true;
}

// While a call runs, this thread takes no further one, because the running one may wait for it.
void AgentCore::run_calls_until(const base::Future<void>& done, std::string_view function,
                                uint64_t key) {
  if (!devices.home().is_cpu()) return;
  OwnCall own{function, key};
  const auto poll = [&] {
    OwnCall* const outer = std::exchange(own_call, &own);
    base::thread_state().poll.poll([&] { return done.done() || own.taken; },
                                   loop.event_loop().get());
    own_call = outer;
    return own.taken.has_value();
  };
  while (poll()) {
    const TorchStateGuard guard;
    execute(*std::exchange(own.taken, std::nullopt));
  }
}

void AgentCore::execute(QueuedCall&& call) {
  if (closed_) return;  // callers are notified that this rank is lost
  const int from = call.from;
  std::shared_ptr<InMessage> message = std::move(call.message);
  const ProcessNumber caller = process_number(from, call.incarnation);
  if (!is_here(caller)) return;  // nobody waits for the result
  // Layers must release a lost process's state before the first call of its successor runs.
  if (call.incarnation > 0 && layers.is_notifying()) layers.wait_until_notified();
  const wire::FrameHeader header = message ? message->header : call.frame.header;
  const auto reply = std::make_shared<ReplyImpl>(*this, caller, header.call_id, header.context_id);
  reply->has_small_credit = call.has_small_credit;
  uint64_t credit = call.credit;
  const auto begin = [&] {
    Budget& budget = *flows[call.has_small_credit].budget;
    send_grants(call.has_small_credit, budget.begin(reply->work, caller, std::exchange(credit, 0)));
  };
  CallSlice slice(options.tracer && options.tracer->on() ? options.tracer.get() : nullptr);
  try {
    if (message) {
      rrefs->receive(*message);
    } else {
      message = std::make_shared<InMessage>(
          from_frame(std::move(call.frame), from, stager, call.device_receive.get(), rrefs.get()));
      credit += message->credit_of_transfers;
    }
    begin();
    const ContextScope scope(hook.get(), header.context_id);
    Decoder decoder(*message);
    reply->function = decoder.in.get_string();
    const std::string& function = reply->function;
    if (!tracer_of(options.tracer, function)) slice.drop();
    if (slice) {
      slice.set_name({}, function);
      slice.set_flow(base::TraceEvent::Kind::kFlowIn, flow_id(from, header.call_id));
    }
    const std::chrono::milliseconds wait(decoder.in.get<uint32_t>());
    if (decoder.in.get<CallMode>() == CallMode::kRemote) {
      const auto id = decoder.in.get<uint64_t>();
      reply->created = rrefs->target(id, decoder.in.get<uint64_t>(), from);
    }
    const bool is_late = wait.count() > 0 && base::Clock::now() - call.arrived > wait;
    if (is_late || call.is_given_up) {
      throw Exception(ErrorKind::kDeadline, "its turn came when its caller had given up");
    }
    Handler handler;
    {
      std::shared_lock lock(registry_mutex);
      const auto it = handlers.find(function);
      if (it == handlers.end()) {
        throw Exception(ErrorKind::kNotFound,
                        fmt::format("{} exposes no function '{}'",
                                    membership::rank_text(options.rank, name), function));
      }
      handler = it->second;
    }
    receive_tensors(*message, header.context_id);
    CallContext context{agent, {from, peers.name(from), call.incarnation}};
    handler(context, decoder, reply);
  } catch (...) {
    if (credit > 0) begin();
    reply->fail(error_in_flight(ErrorKind::kRemoteFailed));
  }
}

void AgentCore::send_reply(int to, uint64_t call_id, uint64_t context,
                           const std::function<void(Encoder&)>& fill) {
  OutgoingMessage reply = encode(
      to, {.kind = wire::FrameKind::kReply, .call_id = call_id, .context_id = context}, fill);
  try {
    if (reply.own) {
      auto call = pending.take(call_id, to);
      if (!call) return rrefs->retract(reply.tickets);
      return answer(*call, {std::move(reply.own), {}, nullptr, to});
    }
    const base::Status sent = reply.device_send ? send_from_device(to, *reply.device_send)
                                                : send_answer(to, std::move(reply.frame));
    if (sent.ok()) return;
    rrefs->retract(reply.tickets);
    if (hook) hook->on_failed(context, reply.header.autograd_id);
    // If the caller is lost, no error needs to be sent.
    if (sent.error().kind != ErrorKind::kPeerLost) send_error(to, call_id, sent.error());
  } catch (...) {
    rrefs->retract(reply.tickets);
    if (hook) hook->on_failed(context, reply.header.autograd_id);
    throw;
  }
}

}  // namespace distrain::rpc
