// How AgentCore sends, receives, runs and answers calls.

#include <algorithm>
#include <chrono>
#include <cstring>

#include <c10/util/Exception.h>

#include "agent_core.h"
#include "call_trace.h"
#include "distrain/base/thread_state.h"
#include "distrain/rpc/error.h"
#include "distrain/rpc/torch_state.h"

namespace distrain::rpc {

namespace {

using base::Error;
using base::ErrorKind;
using Kind = base::TraceEvent::Kind;

enum class CallMode : uint8_t { kCall = 0, kRemote = 1 };

thread_local const ContextScope* t_scope = nullptr;

// Returns `timeout` as a call encodes it.
uint32_t wait_ms(base::Duration timeout) {
  if (timeout == base::Duration::max()) return 0;
  const auto ms = std::chrono::ceil<std::chrono::milliseconds>(timeout).count();
  return static_cast<uint32_t>(std::clamp<int64_t>(ms, 1, UINT32_MAX));
}

// Returns `error` with this rank and function as origin, unless it has another origin.
Error with_origin(Error error, int rank, const std::string& op) {
  if (error.rank < 0) error.rank = rank;
  if (error.op.empty()) error.op = op;
  return error;
}

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
    gate_->enter([&](AgentCore& core) {
      if (core.is_here(to_)) {
        try {
          core.send_reply(rank_of(to_), call_id_, context_, fill);
        } catch (...) {
          core.send_error(rank_of(to_), call_id_,
                          with_origin(error_in_flight(ErrorKind::kInternal), rank_, function_));
        }
      }
      core.tell(core.budget->end(work_));
    });
  }

  void fail(Error error) override {
    if (answered_.exchange(true)) return;
    error = with_origin(std::move(error), rank_, function_);
    if (target_) target_->value.fail(error);
    gate_->enter([&](AgentCore& core) {
      if (core.is_here(to_)) core.send_error(rank_of(to_), call_id_, std::move(error));
      core.tell(core.budget->end(work_));
    });
  }

  const std::shared_ptr<OwnedValue>& target() const override { return target_; }
  /// Takes the call's credit when the call begins.
  void begin(AgentCore& core, uint64_t credit) {
    core.tell(core.budget->begin(work_, to_, credit));
  }
  void set_target(std::shared_ptr<OwnedValue> target) { target_ = std::move(target); }
  /// Sets the function that is added to errors without one.
  void set_function(std::string function) { function_ = std::move(function); }

 private:
  const std::shared_ptr<ReplyGate> gate_;
  const int rank_;
  const ProcessNumber to_;
  const uint64_t call_id_;
  const uint64_t context_;
  std::shared_ptr<OwnedValue> target_;
  std::string function_;
  Budget::Work work_;
  std::atomic<bool> answered_{false};
};

const wire::FrameHeader& header_of(const RawReply& reply) {
  return reply.message ? reply.message->header : reply.frame.header;
}

}  // namespace

/// Releases a reply that nobody opens because its caller gave up as it arrived. Thread-safe.
class UnopenedReply {
 public:
  UnopenedReply(std::shared_ptr<ReplyGate> gate, RawReply reply)
      : gate_(std::move(gate)), reply_(std::move(reply)) {}
  ~UnopenedReply() { give_up(); }
  bool open() { return !is_over_.exchange(true); }
  void give_up() {
    if (is_over_.exchange(true)) return;
    gate_->enter([this](AgentCore& core) { core.let_go(std::move(reply_)); });
  }

 private:
  const std::shared_ptr<ReplyGate> gate_;
  RawReply reply_;
  std::atomic<bool> is_over_{false};
};

Error error_in_flight(ErrorKind otherwise) {
  try {
    throw;
  } catch (const c10::OutOfMemoryError& e) {
    // The message's first sentence has the failed operation and the size; the rest are hints.
    const std::string text = e.what_without_backtrace();
    return Error{ErrorKind::kResources, text.substr(0, text.find(". "))};
  } catch (const c10::AcceleratorError& e) {  // only its first line is not a hint
    const std::string text = e.what_without_backtrace();
    return Error{ErrorKind::kResources, text.substr(0, text.find('\n'))};
  } catch (const c10::Error& e) {
    return Error{otherwise, e.what_without_backtrace()};
  } catch (...) {
    return base::current_error(otherwise);
  }
}

const ContextScope* ContextScope::current() {
  const ContextScope* scope = t_scope;
  while (scope && scope->ended_ && *scope->ended_) scope = scope->outer_;
  return scope;
}
uint64_t current_context() {
  const ContextScope* const scope = ContextScope::current();
  return scope ? scope->context_ : 0;
}
AutogradHook* current_autograd() {
  const ContextScope* const scope = ContextScope::current();
  return scope ? scope->autograd_ : nullptr;
}
ContextScope::ContextScope(AutogradHook* autograd, uint64_t context,
                           std::shared_ptr<const std::atomic<bool>> ended)
    : outer_(t_scope), autograd_(autograd), context_(context), ended_(std::move(ended)) {
  t_scope = this;
}
ContextScope::ContextScope(const Agent& agent, uint64_t context)
    : ContextScope(agent.autograd_hook().get(), context) {}
ContextScope::ContextScope(uint64_t context) : ContextScope(current_autograd(), context) {}
ContextScope::~ContextScope() { t_scope = outer_; }
bool ContextScope::is_innermost() const { return t_scope == this; }

void Reply::store(std::shared_ptr<void> value, std::type_index type,
                  OwnedValue::EncodeFunction encode) {
  const std::shared_ptr<OwnedValue> owned = target();
  if (!owned) base::invalid("this function makes an object: use remote_new()");
  owned->type = type;
  owned->encode = encode;
  owned->value.set(std::move(value));
  send([](Encoder&) {});
}

struct AgentCore::OutgoingCall {
  uint64_t id = 0;
  int to = -1;
  std::string function;
  std::vector<RRefTicket> tickets;
  base::TimePoint deadline;
  uint64_t credit = kCallCost;
  Window* window = nullptr;
  std::shared_ptr<std::atomic<bool>> was_sent;  // of a remote() call
  size_t wait_at = 0;                           // offset of the caller's timeout in the body
  size_t behind_wait = 0;                       // bytes from `wait_at` to the end
  // Exactly one of these is set.
  std::shared_ptr<InMessage> own;
  std::shared_ptr<Departure> departure;
  net::OutFrame frame;

  // Replaces the timeout in the body by the time that is left.
  void set_wait(uint8_t* wait) const {
    if (deadline == base::kNever) return;
    const uint32_t left = wait_ms(deadline - base::Clock::now());
    std::memcpy(wait, &left, sizeof left);
  }
};

// Body of kCall: string function · u32 milliseconds that the caller waits (0: for ever) · u8 mode ·
// (remote: u64 RRef id · u64 fork) · arguments
base::Future<RawReply> AgentCore::call(int to, base::Duration timeout, const std::string& function,
                                       const std::function<void(Encoder&)>& fill,
                                       const std::shared_ptr<RRefHandle>& target) {
  const uint64_t id = next_call_.fetch_add(1, std::memory_order_relaxed);
  // With gradients disabled, the caller records nothing, so the call is not part of its context.
  const uint64_t context = at::GradMode::is_enabled() ? current_context() : 0;
  base::Tracer* const tracer = tracer_of(options.tracer, function);
  CallSlice slice(tracer);
  if (slice) slice.set_name("call ", function);
  OutMessage message;
  message.body.reserve(128);
  Encoder encoder(message);
  encoder.rrefs = rrefs.get();
  encoder.devices = &devices;
  encoder.to = to;
  encoder.is_argument = true;
  encoder.out.put(function);
  OutgoingCall out;
  out.id = id;
  out.to = to;
  out.function = function;
  out.wait_at = message.body.size();
  encoder.out.put(wait_ms(timeout));
  encoder.out.put(target ? CallMode::kRemote : CallMode::kCall);
  if (target) {
    encoder.out.put(target->id());
    encoder.out.put(target->fork());
  }
  wire::FrameHeader header;
  header.kind = wire::FrameKind::kCall;
  header.call_id = id;
  header.context_id = context;
  std::vector<RRefTicket>& tickets = out.tickets;
  // A call that cannot be encoded throws here, before anybody waits for its answer.
  try {
    fill(encoder);
    if (context != 0 && hook) header.autograd_id = hook->on_send(context, to, 0, message.tensors);
    tickets = message.rrefs;
    out.behind_wait = message.body.size() - out.wait_at;
    if (to == options.rank) {
      out.credit += message.body.size();
      for (const at::Tensor& tensor : message.tensors) out.credit += tensor.nbytes();
      out.own = std::make_shared<InMessage>(to_self(std::move(message), header, to));
    } else {
      hold_parameters(message);
      if (has_device_tensors(message)) {
        out.departure =
            std::make_shared<Departure>(stager, std::move(message), header, transfer_numbers());
        out.credit += out.departure->bytes_left();
      } else {
        if (function == kFailFunction) {  // a control message
          header.channel = wire::kWithoutCredit;
          out.credit = 0;
        }
        out.frame = to_frame(std::move(message), header);
        if (out.credit > 0) out.credit += net::bytes_of(out.frame);
      }
    }
  } catch (...) {
    rrefs->retract(tickets.empty() ? message.rrefs : tickets);
    if (hook) hook->on_failed(context, header.autograd_id);
    throw base::Exception(
        with_origin(error_in_flight(ErrorKind::kInvalid), options.rank, function));
  }

  PendingCalls::Call call;
  call.to = to;
  call.function = function;
  call.started = base::Clock::now();
  out.deadline = timeout == base::Duration::max() ? base::kNever : call.started + timeout;
  // Checked before credit is taken, so that a call that is too large takes none.
  const base::Status fits = net::check_limits(out.frame);
  out.window = &windows_.at(to);
  const bool has_credit = !fits.ok() || out.credit == 0 || out.window->try_take(out.credit);
  if (has_credit) call.deadline = out.deadline;  // otherwise send_call() sets it
  call.context = context;
  call.autograd_id = header.autograd_id;
  call.is_remote = target != nullptr;
  call.holds = std::move(encoder.holds);
  if (slice) {
    slice.set_flow(Kind::kFlowOut, flow_id(options.rank, id), call.started);
    call.traced_as = tracer->intern({}, function);
  }
  base::Future<RawReply> reply = call.promise.future();
  reply.state()->on_cancel([gate = replies, id, to] {
    gate->enter([&](AgentCore& core) { core.pending.give_up(id, to); });
  });
  if (target) {
    const auto was_sent = out.was_sent = std::make_shared<std::atomic<bool>>(false);
    reply.on_complete(inline_executor,
                      [this, target, function, was_sent](base::Result<RawReply>& result) {
                        if (result.ok()) return;
                        target->set_creation_error(result.error());
                        if (target->is_owner()) target->owned()->value.fail(result.error());
                        if (function != kFailFunction)
                          tell_owner(target, result.error(), *was_sent);
                      });
  }
  calls_.fetch_add(1, std::memory_order_relaxed);
  if (!pending.add(id, std::move(call))) {
    rrefs->retract(tickets);
    return reply;
  }
  if (!fits.ok()) {
    see_to_call(out, fits);
    return reply;
  }
  if (!has_credit && base::thread_state().must_not_wait) {
    pool.post([this, out = std::move(out)]() mutable { send_call(std::move(out), false); });
  } else {
    send_call(std::move(out), has_credit);
  }
  return reply;
}

void AgentCore::send_call(OutgoingCall call, bool has_credit) {
  if (!has_credit) {
    const base::Status may_send =
        wait_for_credit(*call.window, call.to, call.credit, call.deadline);
    if (!may_send.ok()) return see_to_call(call, may_send);
    if (!pending.is_waiting(call.id)) {
      call.window->give_back(call.credit);
      return rrefs->retract(call.tickets);
    }
    pending.set_deadline(call.id, call.deadline);
    if (!call.own && !call.departure) {
      call.set_wait(call.frame.meta.data() + call.frame.meta.size() - call.behind_wait);
    }
  }
  const bool is_delayed = !call.own && options.call_delay > base::Duration::zero();
  if (call.departure || is_delayed) {
    // A departure waits for the device, so a worker sends it and its caller does not wait.
    const bool needs_worker = call.departure != nullptr;
    base::Task go = [this, call = std::move(call)]() mutable { send_late_call(call); };
    if (!is_delayed) return pool.post(std::move(go));
    loop.call_at(base::deadline_after(options.call_delay),
                 [this, needs_worker, go = std::move(go)]() mutable {
                   if (needs_worker) return pool.post(std::move(go));
                   go();
                 });
    return;
  }
  if (call.was_sent) *call.was_sent = true;
  if (!call.own) {
    const base::Status sent = send(call.to, std::move(call.frame));
    return see_to_call(call, sent);
  }
  QueuedCall mine;
  mine.from = call.to;
  mine.incarnation = incarnation_;
  mine.id = call.id;
  mine.message = std::move(call.own);
  mine.credit = call.credit;
  static_cast<void>(budget->arrive(call.to, call.credit));
  queue_call(std::move(mine));
}

// Sends a call from a worker or a timer; if it is given up meanwhile, sends a cancel message too.
void AgentCore::send_late_call(OutgoingCall& call) {
  if (!pending.is_waiting(call.id)) {
    call.window->give_back(call.credit);
    return rrefs->retract(call.tickets);
  }
  if (call.was_sent) *call.was_sent = true;
  const auto still_wanted = [&](wire::Bytes& body) {
    if (!pending.is_waiting(call.id)) return false;
    call.set_wait(body.data() + call.wait_at);
    return true;
  };
  const base::Status sent = call.departure ? send_departure(call.to, *call.departure, still_wanted)
                                           : send(call.to, std::move(call.frame));
  if (call.departure && call.departure->bytes_left() > 0) {
    call.window->give_back(kCallCost + call.departure->bytes_left());
  }
  see_to_call(call, sent);
  if (sent.ok() && !pending.is_waiting(call.id)) tell_given_up(call.id, call.to);
}

// Sends the error of a remote() call to its owner, which may not know of the call, but may have
// received its RRef from ranks that now wait for the value.
void AgentCore::tell_owner(const std::shared_ptr<RRefHandle>& target, const Error& error,
                           bool was_sent) {
  const bool is_given_up =
      error.kind == ErrorKind::kDeadline || error.kind == ErrorKind::kCancelled;
  const bool has_heard =
      target->is_owner() || error.kind == ErrorKind::kPeerLost || (was_sent && is_given_up);
  if (has_heard) return;
  executor.post([this, target, error] {
    try {
      static_cast<void>(call(
          target->owner(), options.rpc_timeout, kFailFunction,
          [&](Encoder& encoder) {
            const wire::Bytes text = wire::encode(error);
            encoder.out.put(std::string(text.begin(), text.end()));
          },
          target));
    } catch (const base::Exception&) {  // this rank is ending
    }
  });
}

// Protects parameters from updates while their frame waits to be sent.
void AgentCore::hold_parameters(OutMessage& message) const {
  if (!hook) return;
  for (at::Tensor& tensor : message.tensors) {
    if (tensor.is_leaf() && tensor.requires_grad()) tensor = hook->hold(tensor);
  }
}

base::Status AgentCore::wait_for_credit(Window& window, int to, uint64_t bytes,
                                        base::TimePoint deadline) {
  try {
    const base::Status taken = window.take(bytes, deadline);
    if (taken.ok() || taken.error().kind != ErrorKind::kOverloaded) return taken;
    Error late = taken.error();
    late.message = membership::rank_text(to, peers.name(to)) +
                   " had no room for this call in time: " + late.message;
    late.rank = to;
    return late;
  } catch (const base::Exception& e) {  // no thread is left that could wait
    return e.error();
  }
}

// Fails a call that could not be sent.
void AgentCore::see_to_call(const OutgoingCall& call, const base::Status& sent) {
  if (sent.ok()) return;
  rrefs->retract(call.tickets);
  Error error = sent.error();
  if (error.rank < 0) error.rank = options.rank;
  error.op = call.function;
  pending.fail(call.id, call.to, std::move(error));
}

// Sends a departure. A device failure counts as this rank's, whichever rank made the call.
base::Status AgentCore::send_departure(int to, Departure& departure,
                                       const Departure::StillWanted& still_wanted) {
  try {
    return departure.send(
        [&](net::OutFrame frame) {
          const bool is_reply = frame.header.kind == wire::FrameKind::kReply;
          return is_reply ? send_answer(to, std::move(frame)) : send(to, std::move(frame));
        },
        still_wanted);
  } catch (...) {
    return with_origin(error_in_flight(ErrorKind::kInternal), options.rank, {});
  }
}

void AgentCore::receive_tensors(InMessage& message, uint64_t context, const std::string& function) {
  message.await_arrivals();
  if (message.header.autograd_id == 0) return;
  if (!hook || context == 0) wire::Reader::fail("gradients outside a context");
  hook->on_receive(context, message, function);
}

void AgentCore::answer(PendingCalls::Call& call, RawReply reply) {
  reply.context = call.context;
  reply.sent = call.autograd_id;
  reply.function = std::move(call.function);
  const bool has_references = reply.message ? !reply.message->tickets.empty()
                                            : reply.frame.header.channel == wire::kWithRRefs;
  const bool has_nodes = reply.sent != 0 || header_of(reply).autograd_id != 0;
  if (!call.is_remote && (has_references || has_nodes || reply.arrivals)) {
    reply.unopened = std::make_shared<UnopenedReply>(replies, reply);
  }
  call.promise.set(std::move(reply));
}

bool RawReply::open() const { return !unopened || unopened->open(); }

void RawReply::give_up() const {
  if (unopened) unopened->give_up();
}

void AgentCore::let_go(RawReply reply) {
  if (reply.context != 0 && hook) {  // both pairs of nodes stay incomplete
    hook->on_failed(reply.context, reply.sent);
    hook->on_given_up(reply.context, reply.from, header_of(reply).call_id);
  }
  pool.post([this, reply = std::move(reply)] {
    try {
      static_cast<void>(read(reply));  // releases its RRefs
    } catch (...) {                    // nobody waits for the error
    }
  });
}

std::shared_ptr<InMessage> AgentCore::read(const RawReply& reply) {
  if (!reply.message) {
    return std::make_shared<InMessage>(
        from_frame(reply.frame, reply.from, stager, reply.arrivals.get(), rrefs.get()));
  }
  rrefs->receive(*reply.message);
  return reply.message;
}

std::shared_ptr<InMessage> AgentCore::open(const RawReply& reply) {
  try {
    if (!reply.open()) throw base::Exception(ErrorKind::kCancelled, "the call was given up");
    std::shared_ptr<InMessage> message = read(reply);
    receive_tensors(*message, reply.context, reply.function);
    return message;
  } catch (...) {
    throw base::Exception(
        with_origin(error_in_flight(ErrorKind::kInternal), options.rank, reply.function));
  }
}

// ---- calls that have come ----

void AgentCore::queue_call(QueuedCall&& call) {
  call.arrived = base::Clock::now();
  queued_calls_.push(std::move(call));
  // Posts one task for each call. A task may find no call, because calls are cancelled or parked.
  pool.post([this] {
    auto next = queued_calls_.pop([this](int from) { return unwritten_->is_full(from); });
    if (next) execute(std::move(*next));
  });
}

// Runs one parked call of rank `from`, and then the next, while there is room for replies.
void AgentCore::run_parked_call(int from) {
  auto [call, has_more] =
      queued_calls_.pop_parked(from, [this](int rank) { return unwritten_->is_full(rank); });
  if (has_more) pool.post([this, from] { run_parked_call(from); });
  if (call) execute(std::move(*call));
}

void AgentCore::tell_given_up(uint64_t id, int to) {
  if (to == options.rank) return cancel_call(to, id);
  static_cast<void>(send_word(to, wire::FrameKind::kCancel, id));  // a lost rank needs no message
}

void AgentCore::cancel_call(int from, uint64_t id) {
  std::optional<QueuedCall> call = queued_calls_.take(from, id);
  if (!call) return;
  call->is_given_up = true;
  given_up_.post([this, call = std::move(*call)]() mutable {
    const TorchStateGuard guard;
    execute(std::move(call));
  });
}

void AgentCore::execute(QueuedCall&& call) {
  if (closed_) return;  // callers learn of this rank's loss
  const int from = call.from;
  std::shared_ptr<InMessage> message = std::move(call.message);
  // The caller is lost: nobody waits for the result.
  const ProcessNumber caller = process_number(from, call.incarnation);
  if (!is_here(caller)) return;
  // Before a call of a new process, the layers must have released the state of the lost one.
  if (layers.is_telling() && call.incarnation > 0) layers.wait_until_told();
  const wire::FrameHeader header = message ? message->header : call.frame.header;
  const auto reply = std::make_shared<ReplyImpl>(*this, caller, header.call_id, header.context_id);
  uint64_t credit = call.credit;
  const auto begin = [&] { reply->begin(*this, std::exchange(credit, 0)); };
  std::string function;
  CallSlice slice(options.tracer && options.tracer->on() ? options.tracer.get() : nullptr);
  try {
    if (message) {
      rrefs->receive(*message);
    } else {
      message = std::make_shared<InMessage>(
          from_frame(std::move(call.frame), from, stager, call.arrivals.get(), rrefs.get()));
      credit += message->credit_of_arrivals;
    }
    begin();
    const ContextScope scope(hook.get(), header.context_id);
    Decoder decoder(*message);
    function = decoder.in.get_string();
    reply->set_function(function);
    if (!tracer_of(options.tracer, function)) slice.drop();
    if (slice) {
      slice.set_name({}, function);
      slice.set_flow(Kind::kFlowIn, flow_id(from, header.call_id));
    }
    const std::chrono::milliseconds wait(decoder.in.get<uint32_t>());
    if (decoder.in.get<CallMode>() == CallMode::kRemote) {
      const auto id = decoder.in.get<uint64_t>();
      const auto fork = decoder.in.get<uint64_t>();
      reply->set_target(rrefs->target(id, fork, from));
    }
    const bool is_late = wait.count() > 0 && base::Clock::now() - call.arrived > wait;
    if (is_late || call.is_given_up) {
      throw base::Exception(ErrorKind::kDeadline, "its turn came when its caller had given up");
    }
    Handler handler;
    {
      std::shared_lock lock(registry_mutex);
      const auto it = handlers.find(function);
      if (it == handlers.end()) {
        throw base::Exception(ErrorKind::kNotFound, membership::rank_text(options.rank, name) +
                                                        " exposes no function '" + function + "'");
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
  OutMessage message;
  Encoder encoder(message);
  encoder.rrefs = rrefs.get();
  encoder.devices = &devices;
  encoder.to = to;
  wire::FrameHeader header;
  header.kind = wire::FrameKind::kReply;
  header.call_id = call_id;
  header.context_id = context;
  std::vector<RRefTicket> tickets;
  try {
    fill(encoder);
    if (context != 0 && hook) {
      header.autograd_id = hook->on_send(context, to, call_id, message.tensors);
    }
    tickets = message.rrefs;
    if (to == options.rank) {
      auto own = std::make_shared<InMessage>(to_self(std::move(message), header, to));
      auto call = pending.take(call_id, to);
      if (!call) return rrefs->retract(tickets);
      return answer(*call, {std::move(own), {}, nullptr, to});
    }
    hold_parameters(message);
    base::Status sent = base::Unit{};
    if (has_device_tensors(message)) {
      Departure departure(stager, std::move(message), header, transfer_numbers());
      sent = send_departure(to, departure);
    } else {
      sent = send_answer(to, to_frame(std::move(message), header));
    }
    if (sent.ok()) return;
    rrefs->retract(tickets);
    if (hook) hook->on_failed(context, header.autograd_id);
    // A lost caller needs no error.
    if (sent.error().kind != ErrorKind::kPeerLost) send_error(to, call_id, sent.error());
  } catch (...) {
    rrefs->retract(tickets.empty() ? message.rrefs : tickets);
    if (hook) hook->on_failed(context, header.autograd_id);
    throw;
  }
}

void AgentCore::send_error(int to, uint64_t call_id, Error error) {
  if (error.rank < 0) error.rank = options.rank;
  if (to != options.rank) {
    net::OutFrame frame;
    frame.header.kind = wire::FrameKind::kError;
    frame.header.call_id = call_id;
    frame.meta = wire::encode(error);
    static_cast<void>(send_answer(to, std::move(frame)));
  } else {
    pending.fail(call_id, to, std::move(error));
  }
}

}  // namespace distrain::rpc
