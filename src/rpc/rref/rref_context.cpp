#include "rref/rref_context.h"

#include <fmt/format.h>

#include "device/device_table.h"

namespace distrain::rpc {

// Maximum number of values that messages refer to before the calls that create them arrive. By
// default, a rank's credit (AgentOptions::peer_budget) admits fewer calls than this at a time.
constexpr size_t kMaxUnmade = size_t{1} << 18;

// ---- RRefHandle ----

RRefHandle::~RRefHandle() {
  if (owned_) return;
  context_->send(owner(), wire::FrameKind::kRRefDelete, id_, fork_, 0);
  --context_->user_handles_;
}

Agent& RRefHandle::agent() const { return context_->agent(); }

std::shared_ptr<void> RRefHandle::local(std::type_index type,
                                        std::chrono::nanoseconds timeout) const {
  if (!owned_) {
    base::invalid("the value of " + text() + " is not here: use to_here() or call it there");
  }
  const auto future = owned_->value.future();
  if (timeout != kAgentsTimeout && !future.wait_until(base::deadline_after(timeout))) {
    throw base::Exception(base::ErrorKind::kDeadline, text() + " was not made in time");
  }
  const std::shared_ptr<void> value = future.wait();
  follow_workers();
  if (owned_->type != type) {
    base::invalid(
        fmt::format("this RRef refers to a {}, not to a {}", owned_->type.name(), type.name()));
  }
  return value;
}

void encode_rref(Encoder& encoder, const std::shared_ptr<RRefHandle>& handle) {
  encoder.rrefs->encode(encoder, handle);
}

// Reads an index (u32) into the message's RRefs and moves the handle at this index out of the
// message.
std::shared_ptr<RRefHandle> decode_rref(Decoder& decoder) {
  const auto position = decoder.in.get<uint32_t>();
  auto& received = decoder.message.rrefs;
  if (position >= received.size() || !received[position]) wire::Reader::fail("an RRef is missing");
  return std::move(received[position]);
}

// ---- RRefContext ----

void RRefContext::close() {
  {
    std::lock_guard lock(closing_);
    closed_ = true;
  }
  decltype(owned_) owned;
  decltype(pending_children_) children;
  std::lock_guard lock(mutex_);
  owned.swap(owned_);
  children.swap(pending_children_);
}

std::shared_ptr<OwnedValue> RRefContext::value_locked(uint64_t id) {
  const auto [entry, is_new] = owned_.try_emplace(id);
  if (is_new && ++unmade_ > kMaxUnmade) {
    owned_.erase(entry);
    --unmade_;
    wire::Reader::fail("more RRefs than calls that could make their values");
  }
  Record& record = entry->second;
  std::shared_ptr<OwnedValue> value = record.value.lock();
  if (!value) {
    // The deleter locks mutex_ to remove the entry, so no value may be released under the lock.
    value =
        std::shared_ptr<OwnedValue>(new OwnedValue, [weak = weak_from_this(), id](OwnedValue* v) {
          delete v;
          if (const auto self = weak.lock()) self->sweep(id);
        });
    record.value = value;
    // If the creating call's rank is lost, the call will not run, so the value fails.
    const auto lost = record.made ? lost_.end() : lost_.find(maker_of(id));
    if (lost != lost_.end()) value->value.fail(lost->second);
    if (ended_ && !record.made) value->value.fail(*ended_);  // creating calls no longer run
  }
  return value;
}

std::shared_ptr<OwnedValue> RRefContext::target(uint64_t id, uint64_t fork, int caller) {
  // Adds no fork if this rank is the caller (its RRefHandle holds the value) or the caller is lost.
  const auto is_lost = [&] {
    std::lock_guard lock(mutex_);
    return lost_.contains(maker_of(id));
  };
  if (caller != rank_ && !is_lost()) add_fork(id, fork, caller);
  std::lock_guard lock(mutex_);
  std::shared_ptr<OwnedValue> value = value_locked(id);
  if (!std::exchange(owned_[id].made, true)) --unmade_;
  return value;
}

void RRefContext::drop_forks(uint64_t id,
                             const std::function<bool(uint64_t fork, int holder)>& which) {
  std::shared_ptr<OwnedValue> released;
  {
    std::lock_guard lock(mutex_);
    const auto it = owned_.find(id);
    if (it == owned_.end()) return;
    Record& record = it->second;
    std::erase_if(record.forks, [&](const auto& fork) { return which(fork.first, fork.second); });
    if (!record.forks.empty()) return;
    released = std::move(record.kept);
  }
  // Destroys the value on a worker, because its destructor is user code and this may be the loop.
  if (released) executor_.post([released = std::move(released)]() mutable { released.reset(); });
}

void RRefContext::encode(Encoder& encoder, const std::shared_ptr<RRefHandle>& handle) {
  if (!handle) base::invalid("an empty RRef cannot be sent");
  const int owner = handle->owner();
  {
    std::lock_guard lock(mutex_);
    const ProcessNumber process = handle->owning_process();
    const auto lost = lost_.find(process);
    // Throws, because the owner's new process would wait for ever for a value of the lost process.
    if (lost != lost_.end() && newest_locked(owner) != process) throw base::Exception(lost->second);
  }
  Mode mode;
  uint64_t fork = 0;
  if (encoder.to == owner && encoder.is_argument) {
    mode = Mode::kLocalHold;
    encoder.holds.push_back(handle);
  } else {
    fork = next_id();
    if (encoder.to != owner && owner == rank_) {
      mode = Mode::kConfirmed;
      add_fork(handle->id(), fork, encoder.to);
    } else {
      mode = encoder.to == owner ? Mode::kLocalHoldAccept : Mode::kUnconfirmed;
      std::lock_guard lock(mutex_);
      // If the value is lost, its owner sends no Accept and no handle needs to be kept alive.
      if (!lost_.contains(handle->owning_process())) {
        pending_children_.emplace(fork, std::pair(handle, encoder.to));
      }
    }
  }
  auto& tickets = encoder.message.rrefs;
  encoder.out.put(static_cast<uint32_t>(tickets.size()));
  tickets.push_back(
      {handle->id(), handle->owning_process(), static_cast<uint8_t>(mode), fork, rank_});
}

void RRefContext::retract(const std::vector<RRefTicket>& tickets) {
  for (const RRefTicket& ticket : tickets) {
    if (static_cast<Mode>(ticket.mode) == Mode::kConfirmed) {
      drop_forks(ticket.id, [&](uint64_t fork, int) { return fork == ticket.fork; });
    } else {
      on_control(wire::FrameKind::kRRefAccept, ticket.id, ticket.fork, rank_, 0);
    }
  }
}

std::shared_ptr<RRefHandle> RRefContext::receive(const RRefTicket& ticket) {
  const int world = agent().world_size();
  const int owner = rank_of(ticket.owner);
  if (owner >= world || ticket.parent < 0 || ticket.parent >= world) {
    wire::Reader::fail("an RRef of a rank that does not exist");
  }
  const auto mode = static_cast<Mode>(ticket.mode);
  const bool is_hold = mode == Mode::kLocalHold || mode == Mode::kLocalHoldAccept;
  if (!is_hold && mode != Mode::kConfirmed && mode != Mode::kUnconfirmed) {
    wire::Reader::fail("an unknown kind of RRef");
  }
  if (is_hold != (owner == rank_)) wire::Reader::fail("an RRef sent to the wrong owner");
  if (is_hold) {
    auto handle = received_by_owner(ticket);
    if (mode == Mode::kLocalHold) return handle;
    send(ticket.parent, wire::FrameKind::kRRefAccept, ticket.id, ticket.fork, 0);
    return handle;
  }
  auto handle = user_handle(ticket.id, ticket.fork, ticket.owner);
  handle->set_created(base::Unit{});  // only the creating call's rank knows the call's result
  if (mode == Mode::kConfirmed) return handle;
  send(owner, wire::FrameKind::kRRefFork, ticket.id, ticket.fork,
       static_cast<uint64_t>(ticket.parent));
  return handle;
}

std::shared_ptr<RRefHandle> RRefContext::received_by_owner(const RRefTicket& ticket) {
  const uint64_t id = ticket.id;
  base::Error why{base::ErrorKind::kPeerLost,
                  "the value of this RRef has gone with a process that had this rank before",
                  rank_};
  if (ticket.owner == self_) {
    std::lock_guard lock(mutex_);
    if (!is_freed_locked(id)) return owner_handle(id, value_locked(id));
    why.kind = base::ErrorKind::kNotFound;
    why.message =
        "the value of this RRef is gone: its last reference ended before this call was looked at";
    // If a rank was lost, reports that loss, because it may have freed the value before this call.
    if (!lost_.empty()) why = lost_.begin()->second;
  }
  auto gone = std::make_shared<OwnedValue>();
  gone->value.fail(std::move(why));
  return owner_handle(id, std::move(gone));
}

void RRefContext::on_control(wire::FrameKind kind, uint64_t id, uint64_t fork, int from,
                             int parent) {
  if (kind == wire::FrameKind::kRRefFork) {
    add_fork(id, fork, from);
    send(parent, wire::FrameKind::kRRefAccept, id, fork, 0);
  } else if (kind == wire::FrameKind::kRRefAccept) {
    decltype(pending_children_)::node_type held;  // destroyed without the lock: may send a Delete
    std::lock_guard lock(mutex_);
    held = pending_children_.extract(fork);
  } else if (kind == wire::FrameKind::kRRefDelete) {
    {
      std::lock_guard lock(mutex_);
      if (deleted_.contains(fork)) return;
      deleted_.insert(fork);
    }
    drop_forks(id, [fork](uint64_t candidate, int) { return candidate == fork; });
  }
}

void RRefContext::on_peer_lost(ProcessNumber process, const base::Error& error) {
  const int rank = rank_of(process);
  std::vector<uint64_t> ids;
  std::vector<std::shared_ptr<RRefHandle>> held;
  {
    std::lock_guard lock(mutex_);
    lost_.emplace(process, error);
    for (const auto& [id, record] : owned_) ids.push_back(id);
    // The Accept may never come: a lost receiver may not have sent the Fork for which the owner
    // sends the Accept, and a lost owner sends nothing.
    std::erase_if(pending_children_, [&](auto& entry) {
      auto& [handle, receiver] = entry.second;
      if (receiver != rank && handle->owner() != rank) return false;
      held.push_back(std::move(handle));
      return true;
    });
  }
  for (const uint64_t id : ids) {
    drop_forks(id, [rank](uint64_t, int holder) { return holder == rank; });
  }
  fail_unset(error, [process](uint64_t id) { return maker_of(id) == process; });
}

void RRefContext::fail_unset(const base::Error& error,
                             const std::function<bool(uint64_t id)>& which) {
  std::vector<std::shared_ptr<OwnedValue>> values;
  {
    std::lock_guard lock(mutex_);
    for (const auto& [id, record] : owned_) {
      std::shared_ptr<OwnedValue> value = which(id) ? record.value.lock() : nullptr;
      if (value) values.push_back(std::move(value));
    }
  }
  for (const auto& value : values) {
    if (!value->value.future().done()) value->value.fail(error);
  }
  // Destroys the values on a worker, because destructors of user objects must not run on the loop.
  if (!values.empty()) executor_.post([values = std::move(values)]() mutable { values.clear(); });
}

}  // namespace distrain::rpc
