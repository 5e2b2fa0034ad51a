// How AgentCore sends calls and receives their replies.
#include <cstring>
#include <functional>

#include <ATen/core/grad_mode.h>
#include <fmt/format.h>

#include "agent_core.h"
#include "call/calls.h"
#include "distrain/base/thread_state.h"
#include "distrain/membership/loss.h"
#include "distrain/rpc/error.h"

namespace distrain::rpc {

static const wire::FrameHeader& header_of(const RawReply& reply) {
  return reply.message ? reply.message->header : reply.frame.header;
}

/// Releases the contents of a reply that its caller drops or gives up unopened. Thread-safe.
class UnopenedReply {
 public:
  UnopenedReply(std::shared_ptr<ReplyGate> gate, RawReply reply)
      : gate_(std::move(gate)), reply_(std::move(reply)) {}
  ~UnopenedReply() { give_up(); }
  bool open() { return !is_over_.exchange(true); }
  void give_up() {
    if (is_over_.exchange(true)) return;
    gate_->enter([this](AgentCore& core) { core.release(std::move(reply_)); });
  }

 private:
  const std::shared_ptr<ReplyGate> gate_;
  RawReply reply_;
  std::atomic<bool> is_over_{false};
};

struct AgentCore::OutgoingCall : OutgoingMessage {
  uint64_t id = 0;
  int to = -1;
  std::string function;
  base::TimePoint deadline;
  uint64_t credit = kCallCost;
  Window* window = nullptr;
  bool has_small_credit = false;
  std::shared_ptr<std::atomic<bool>> was_sent;  // set for a remote() call
  size_t behind_wait = 0;                       // bytes of the body from its timeout field on
  bool has_credit = false;

  // Writes the remaining time to the timeout field in `bytes`. The field is found from the end,
  // because `bytes` end with the call's body.
  void set_wait(wire::Bytes& bytes) const {
    if (deadline == base::kNever) return;
    const uint32_t left = wait_ms(deadline - base::Clock::now());
    std::memcpy(bytes.data() + bytes.size() - behind_wait, &left, sizeof left);
  }
};

// A call takes these steps, in this order:
//
//   encode    the arguments become a message. If that fails, call() throws, and no call exists
//   admit     checks the size, and takes credit if there is enough without a wait
//   register  from now on, a reply, the deadline or a loss completes the call
//   send      waits for credit that is missing, then sends the message
//
// A call to this rank goes to its own queue. A worker sends a message with device tensors, because
// sending waits for the device; the calling thread sends others. Fault injection delays both.
base::Future<RawReply> AgentCore::call(int to, base::Duration timeout, const std::string& function,
                                       const std::function<void(Encoder&)>& fill,
                                       const std::shared_ptr<RRefHandle>& target, CallForm form) {
  base::Tracer* const tracer = tracer_of(options.tracer, function);
  CallSlice slice(tracer);
  if (slice) slice.set_name("call ", function);
  PendingCalls::Call waiting(loop);
  waiting.to = to;
  waiting.function = function;
  waiting.is_remote = target != nullptr;
  OutgoingCall call = encode_call(waiting, timeout, fill, target.get());
  waiting.started = base::Clock::now();
  call.deadline = base::deadline_after(timeout);
  const base::Status fits = net::check_limits(call.frame);
  call.has_credit = !fits.ok() || call.credit == 0 || try_take_credit(call);
  if (call.has_credit) waiting.deadline = call.deadline;  // otherwise await_credit() sets it
  if (slice) {
    slice.set_flow(base::TraceEvent::Kind::kFlowOut, flow_id(options.rank, call.id),
                   waiting.started);
    constexpr const char* kForms[] = {"sync", "async", "remote"};
    waiting.traced_as =
        tracer->intern("rpc_", fmt::format("{}#{}({} -> {})", kForms[static_cast<int>(form)],
                                           function, name, peers.name(to)));
  }
  base::Future<RawReply> reply = waiting.promise.future();
  if (!register_call(call, std::move(waiting), target)) {
    rrefs->retract(call.tickets);
  } else if (!fits.ok()) {
    fail_if_unsent(call, fits);
  } else if (!call.has_credit && base::thread_state().must_not_wait) {
    pool.post([this, call = std::move(call)]() mutable { send_call(std::move(call)); });
  } else {
    send_call(std::move(call));
  }
  return reply;
}

// Encodes a call, or throws. Sets the members of `waiting` that depend on the encoded call.
AgentCore::OutgoingCall AgentCore::encode_call(PendingCalls::Call& waiting, base::Duration timeout,
                                               const std::function<void(Encoder&)>& fill,
                                               const RRefHandle* target) {
  OutgoingCall call;
  call.id = next_call_.fetch_add(1, std::memory_order_relaxed);
  call.to = waiting.to;
  call.function = waiting.function;
  const auto fill_call = [&](Encoder& encoder) {
    wire::Bytes& body = encoder.message.body;
    body.reserve(128);
    encoder.is_argument = true;
    encoder.out.put(call.function);
    const size_t wait_at = body.size();
    encoder.out.put(wait_ms(timeout));
    encoder.out.put(target ? CallMode::kRemote : CallMode::kCall);
    if (target) {
      encoder.out.put(target->id());
      encoder.out.put(target->fork());
    }
    fill(encoder);
    call.behind_wait = body.size() - wait_at;
    waiting.holds = std::move(encoder.holds);
  };
  const bool is_control = call.function == kFailFunction;
  wire::FrameHeader header{.kind = wire::FrameKind::kCall, .call_id = call.id};
  if (is_control) header.channel = wire::kWithoutCredit;
  // With gradients disabled, autograd records nothing, so the call belongs to no context.
  header.context_id = at::GradMode::is_enabled() ? current_context() : 0;
  try {
    static_cast<OutgoingMessage&>(call) = encode(call.to, header, std::cref(fill_call));
  } catch (...) {
    throw Exception(with_origin(error_in_flight(ErrorKind::kInvalid), options.rank, call.function));
  }
  waiting.context = call.header.context_id;
  waiting.autograd_id = call.header.autograd_id;
  if (is_control) {
    call.credit = 0;
  } else if (call.own) {
    call.credit += call.own->body.size();
    for (const at::Tensor& tensor : call.own->tensors) call.credit += tensor.nbytes();
  } else {
    call.credit += call.device_send ? call.device_send->bytes_left() : net::bytes_of(call.frame);
  }
  return call;
}

// Encodes the values that `fill` writes as a message to rank `to`, and records its autograd send
// node. If encoding throws, drops the node and the RRefs' forks.
AgentCore::OutgoingMessage AgentCore::encode(int to, wire::FrameHeader header,
                                             const std::function<void(Encoder&)>& fill) {
  const uint64_t context = header.context_id;
  OutgoingMessage encoded;
  OutMessage message;
  Encoder encoder(message, rrefs.get(), &devices, to);
  try {
    fill(encoder);
    if (context != 0 && hook) {
      const uint64_t answered = header.kind == wire::FrameKind::kReply ? header.call_id : 0;
      header.autograd_id = hook->on_send(context, to, answered, message.tensors);
    }
    encoded.header = header;
    encoded.tickets = message.rrefs;
    if (to == options.rank) {
      encoded.own = std::make_shared<InMessage>(to_self(std::move(message), header, to));
      return encoded;
    }
    for (at::Tensor& tensor : message.tensors) {
      // Holds parameters, so that no update changes them while their frame waits to be sent.
      if (hook && tensor.is_leaf() && tensor.requires_grad()) tensor = hook->hold(tensor);
    }
    if (has_device_tensors(message)) {
      encoded.device_send = std::make_shared<DeviceSend>(
          stager, std::move(message), header,
          [this] { return next_transfer_.fetch_add(1, std::memory_order_relaxed); });
    } else {
      encoded.frame = to_frame(std::move(message), header);
    }
    return encoded;
  } catch (...) {
    rrefs->retract(encoded.tickets.empty() ? message.rrefs : encoded.tickets);
    if (hook) hook->on_failed(context, header.autograd_id);
    throw;
  }
}

// Adds the call to `pending`. If this agent has ended, fails the call and returns false.
bool AgentCore::register_call(OutgoingCall& call, PendingCalls::Call waiting,
                              const std::shared_ptr<RRefHandle>& target) {
  const base::Future<RawReply> reply = waiting.promise.future();
  reply.state()->on_cancel([gate = replies, id = call.id, to = call.to] {
    gate->enter([&](AgentCore& core) { core.pending.give_up(id, to); });
  });
  if (target) {
    const auto was_sent = call.was_sent = std::make_shared<std::atomic<bool>>(false);
    reply.on_complete(*inline_executor, [this, target, function = call.function,
                                         was_sent](base::Result<RawReply>& result) {
      target->set_created(result.ok() ? base::Status(base::Unit{}) : result.error());
      if (result.ok()) return;
      if (target->is_owner()) target->owned()->value.fail(result.error());
      if (function != kFailFunction) send_failure_to_owner(target, result.error(), *was_sent);
    });
  }
  calls_.fetch_add(1, std::memory_order_relaxed);
  return pending.add(call.id, std::move(waiting));
}

void AgentCore::send_call(OutgoingCall call) {
  if (!call.has_credit && !await_credit(call)) return;
  const bool is_delayed = !call.own && options.call_delay > base::Duration::zero();
  if (call.device_send || is_delayed) {
    const bool needs_worker = call.device_send != nullptr;
    base::Task go = [this, call = std::move(call)]() mutable { send_deferred(call); };
    if (!is_delayed) return pool.post(std::move(go));
    if (needs_worker) go = [this, go = std::move(go)]() mutable { pool.post(std::move(go)); };
    loop.call_at(base::deadline_after(options.call_delay), std::move(go));
    return;
  }
  if (call.was_sent) *call.was_sent = true;
  if (!call.own) return fail_if_unsent(call, send(call.to, std::move(call.frame)));
  static_cast<void>(flows[call.has_small_credit].budget->arrive(call.to, call.credit));
  queue_call({.from = call.to,
              .incarnation = incarnation_,
              .id = call.id,
              .message = std::move(call.own),
              .credit = call.credit,
              .has_small_credit = call.has_small_credit});
}

// Takes the call's credit if no wait is needed. Otherwise sets the window in which the call waits.
bool AgentCore::try_take_credit(OutgoingCall& call) {
  call.window = &flows[0].windows.at(call.to);
  if (call.window->try_take(call.credit)) return true;
  if (call.device_send || call.credit > kLargestSmallCall) return false;
  call.window = &flows[1].windows.at(call.to);
  call.has_small_credit = true;
  call.frame.header.channel = wire::kWithSmallCredit;
  return call.window->try_take(call.credit);
}

// Waits for the call's credit. Returns false if the call has failed or was given up.
bool AgentCore::await_credit(OutgoingCall& call) {
  base::Status taken = base::Unit{};
  try {
    taken = call.window->take(call.credit, call.deadline);
    if (!taken.ok() && taken.error().kind == ErrorKind::kOverloaded) {
      taken = Error{
          ErrorKind::kOverloaded,
          fmt::format("{} had no room for this call in time: {}",
                      membership::rank_text(call.to, peers.name(call.to)), taken.error().message),
          call.to};
    }
  } catch (const Exception& e) {  // the thread pool has no thread left to wait
    taken = e.error();
  }
  if (!taken.ok()) {
    fail_if_unsent(call, taken);
    return false;
  }
  if (!pending.is_waiting(call.id)) {
    call.window->give_back(call.credit);
    rrefs->retract(call.tickets);
    return false;
  }
  pending.set_deadline(call.id, call.deadline);
  if (!call.own && !call.device_send) call.set_wait(call.frame.meta);
  return true;
}

// Sends a call from a worker or a timer. If the caller gives up meanwhile, also sends a cancel.
void AgentCore::send_deferred(OutgoingCall& call) {
  if (!pending.is_waiting(call.id)) {
    call.window->give_back(call.credit);
    return rrefs->retract(call.tickets);
  }
  if (call.was_sent) *call.was_sent = true;
  const auto still_wanted = [&](wire::Bytes& body) {
    if (!pending.is_waiting(call.id)) return false;
    call.set_wait(body);
    return true;
  };
  const base::Status sent = call.device_send
                                ? send_from_device(call.to, *call.device_send, still_wanted)
                                : send(call.to, std::move(call.frame));
  if (call.device_send && call.device_send->bytes_left() > 0) {
    call.window->give_back(kCallCost + call.device_send->bytes_left());
  }
  fail_if_unsent(call, sent);
  if (sent.ok() && !pending.is_waiting(call.id)) send_cancel(call.id, call.to);
}

// Sends the error of a failed remote() call to the owner of its value. The owner may not have got
// the call, but ranks to which the RRef was sent may wait for the value there.
void AgentCore::send_failure_to_owner(const std::shared_ptr<RRefHandle>& target, const Error& error,
                                      bool was_sent) {
  const bool is_given_up =
      error.kind == ErrorKind::kDeadline || error.kind == ErrorKind::kCancelled;
  if (was_sent && is_given_up) return;  // the owner has received the call
  if (target->is_owner() || error.kind == ErrorKind::kPeerLost) return;
  executor.post([this, target, error] {
    try {
      static_cast<void>(call(
          target->owner(), rpc_timeout.load(), kFailFunction,
          [&](Encoder& encoder) {
            const wire::Bytes text = wire::encode(error);
            encoder.out.put(std::string(text.begin(), text.end()));
          },
          target));
    } catch (const Exception&) {  // this rank is ending
    }
  });
}

void AgentCore::fail_if_unsent(const OutgoingCall& call, const base::Status& sent) {
  if (sent.ok()) return;
  rrefs->retract(call.tickets);
  Error error = with_origin(sent.error(), options.rank, {});
  error.op = call.function;
  pending.fail(call.id, call.to, std::move(error));
}

// Sends a message with device tensors. A failed device is reported as an error of this rank, even
// if the message is a reply to another rank.
base::Status AgentCore::send_from_device(int to, DeviceSend& device_send,
                                         const DeviceSend::StillWanted& still_wanted) {
  try {
    const auto send_frame = [&](net::OutFrame frame) {
      const bool is_reply = frame.header.kind == wire::FrameKind::kReply;
      return is_reply ? send_answer(to, std::move(frame)) : send(to, std::move(frame));
    };
    return device_send.send(send_frame, still_wanted);
  } catch (...) {
    return with_origin(error_in_flight(ErrorKind::kInternal), options.rank, {});
  }
}

void AgentCore::answer(PendingCalls::Call& call, RawReply reply) {
  reply.context = call.context;
  reply.sent = call.autograd_id;
  reply.function = std::move(call.function);
  const bool has_references = reply.message ? !reply.message->tickets.empty()
                                            : reply.frame.header.channel == wire::kWithRRefs;
  const bool has_nodes = reply.sent != 0 || header_of(reply).autograd_id != 0;
  if (!call.is_remote && (has_references || has_nodes || reply.device_receive)) {
    reply.unopened = std::make_shared<UnopenedReply>(replies, reply);
  }
  call.promise.set(std::move(reply));
}

bool RawReply::is_plain() const {
  constexpr uint64_t kMostBytes = 4096;
  return !message && !unopened && frame.header.body_bytes() <= kMostBytes &&
         !base::detail::find_queued_work.load(std::memory_order_relaxed);
}

bool RawReply::open() const { return !unopened || unopened->open(); }

void RawReply::give_up() const {
  if (unopened) unopened->give_up();
}

void AgentCore::release(RawReply reply) {
  if (reply.context != 0 && hook) {  // neither the call nor the reply gets a gradient
    hook->on_failed(reply.context, reply.sent);
    hook->on_given_up(reply.context, reply.from, header_of(reply).call_id);
  }
  pool.post([this, reply = std::move(reply)] {
    try {
      static_cast<void>(read(reply));  // decodes its RRefs, which releases them
    } catch (...) {                    // nobody waits for the error
    }
  });
}

std::shared_ptr<InMessage> AgentCore::read(const RawReply& reply) {
  if (!reply.message) {
    return std::make_shared<InMessage>(
        from_frame(reply.frame, reply.from, stager, reply.device_receive.get(),
                   reply.frame.header.channel == wire::kWithRRefs ? rrefs.get() : nullptr));
  }
  rrefs->receive(*reply.message);
  return reply.message;
}

std::shared_ptr<InMessage> AgentCore::open(const RawReply& reply) {
  try {
    if (!reply.open()) throw Exception(ErrorKind::kCancelled, "the call was given up");
    std::shared_ptr<InMessage> message = read(reply);
    receive_tensors(*message, reply.context, reply.function);
    return message;
  } catch (...) {
    throw Exception(
        with_origin(error_in_flight(ErrorKind::kInternal), options.rank, reply.function));
  }
}

}  // namespace distrain::rpc
