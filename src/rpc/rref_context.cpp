#include "rref_context.h"

#include "distrain/rpc/agent.h"

namespace distrain::rpc {

namespace {
constexpr size_t kRemembered = 8192;
}

// ---- RRefHandle ----

RRefHandle::RRefHandle(std::shared_ptr<RRefContext> context, uint64_t id, uint64_t fork, int owner,
                       std::shared_ptr<OwnedValue> owned)
    : context_(std::move(context)), id_(id), fork_(fork), owner_(owner), owned_(std::move(owned)) {}

RRefHandle::~RRefHandle() { context_->on_handle_gone(id_, fork_, owner_, std::move(owned_)); }

Agent& RRefHandle::agent() const { return context_->agent(); }

std::shared_ptr<void> RRefHandle::local(std::type_index type) const {
  if (!owned_) {
    throw base::Exception(base::ErrorKind::kInvalid, "the value of this RRef lives on rank " +
                                                         std::to_string(owner_) +
                                                         ": use to_here() or call it there");
  }
  const std::shared_ptr<void> value = owned_->value.future().wait();
  if (owned_->type != type) {
    throw base::Exception(base::ErrorKind::kInvalid,
                          std::string("this RRef refers to a ") + owned_->type.name() +
                              ", not to a " + type.name());
  }
  return value;
}

void RRefHandle::set_creation_error(base::Error error) {
  std::lock_guard lock(mutex_);
  creation_status_ = std::move(error);
}

base::Status RRefHandle::creation_status() const {
  std::lock_guard lock(mutex_);
  return creation_status_;
}

void encode_rref(Encoder& encoder, const std::shared_ptr<RRefHandle>& handle) {
  encoder.rrefs->encode(encoder, handle);
}

std::shared_ptr<RRefHandle> decode_rref(Decoder& decoder) {
  return decoder.rrefs->decode(decoder);
}

// ---- RRefContext ----

RRefContext::RRefContext(Agent& agent, int rank, Send send, base::Executor& executor)
    : agent_(&agent), rank_(rank), send_(std::move(send)), executor_(executor) {}

Agent& RRefContext::agent() const {
  if (closed_) {
    throw base::Exception(base::ErrorKind::kCancelled, "the agent of this RRef has shut down");
  }
  return *agent_;
}

void RRefContext::send(int to, wire::FrameKind kind, uint64_t id, uint64_t fork, uint64_t parent) {
  if (closed_) return;
  if (to == rank_) {
    on_control(kind, id, fork, rank_, static_cast<int>(parent));
  } else {
    send_(to, kind, id, fork, parent);
  }
}

std::shared_ptr<RRefHandle> RRefContext::user_handle(uint64_t id, uint64_t fork, int owner) {
  ++user_handles_;
  return std::make_shared<RRefHandle>(shared_from_this(), id, fork, owner, nullptr);
}

std::shared_ptr<OwnedValue> RRefContext::value_locked(uint64_t id) {
  Record& record = owned_[id];
  std::shared_ptr<OwnedValue> value = record.value.lock();
  if (!value) {
    value = std::make_shared<OwnedValue>();
    record.value = value;
  }
  return value;
}

std::shared_ptr<RRefHandle> RRefContext::owner_handle(uint64_t id) {
  std::shared_ptr<OwnedValue> value;
  {
    std::lock_guard lock(mutex_);
    value = value_locked(id);
  }
  return std::make_shared<RRefHandle>(shared_from_this(), id, 0, rank_, std::move(value));
}

std::shared_ptr<RRefHandle> RRefContext::new_local() { return owner_handle(next_id()); }

std::shared_ptr<RRefHandle> RRefContext::new_remote(int owner) {
  if (owner == rank_) return new_local();
  const uint64_t id = next_id();
  return user_handle(id, next_id(), owner);
}

std::shared_ptr<OwnedValue> RRefContext::target(uint64_t id, uint64_t fork, int caller) {
  // A call to oneself has a local hold already, and no fork.
  if (caller != rank_) add_fork(id, fork, caller);
  std::lock_guard lock(mutex_);
  return value_locked(id);
}

void RRefContext::add_fork(uint64_t id, uint64_t fork, int holder) {
  std::lock_guard lock(mutex_);
  if (deleted_.contains(fork)) return;
  std::shared_ptr<OwnedValue> value = value_locked(id);
  Record& record = owned_[id];
  record.forks[fork] = holder;
  record.kept = std::move(value);
}

void RRefContext::remember_deleted_locked(uint64_t fork) {
  if (deleted_ring_.size() < kRemembered) {
    deleted_ring_.push_back(fork);
  } else {
    deleted_.erase(deleted_ring_[deleted_next_]);
    deleted_ring_[deleted_next_] = fork;
    deleted_next_ = (deleted_next_ + 1) % kRemembered;
  }
  deleted_.insert(fork);
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
  // The value is the user's: its end is not for the loop thread, which may be the one that is here.
  if (!released) return sweep(id);
  executor_.post([self = shared_from_this(), id, released = std::move(released)]() mutable {
    released.reset();
    self->sweep(id);
  });
}

// Forgets the entry of a value that is gone.
void RRefContext::sweep(uint64_t id) {
  std::lock_guard lock(mutex_);
  const auto it = owned_.find(id);
  if (it != owned_.end() && it->second.forks.empty() && it->second.value.expired()) owned_.erase(it);
}

void RRefContext::on_handle_gone(uint64_t id, uint64_t fork, int owner,
                                 std::shared_ptr<OwnedValue> owned) {
  if (owned) {
    owned.reset();
    sweep(id);
  } else {
    send(owner, wire::FrameKind::kRRefDelete, id, fork, 0);
    --user_handles_;
  }
}

// u64 id · i32 owner · u8 mode · u64 fork · i32 parent
void RRefContext::encode(Encoder& encoder, const std::shared_ptr<RRefHandle>& handle) {
  if (!handle) {
    throw base::Exception(base::ErrorKind::kInvalid, "an empty RRef cannot be sent");
  }
  const int owner = handle->owner();
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
      pending_children_.emplace(fork, std::pair(handle, encoder.to));
    }
  }
  encoder.out.put(handle->id());
  encoder.out.put(owner);
  encoder.out.put(mode);
  encoder.out.put(fork);
  encoder.out.put(rank_);
}

std::shared_ptr<RRefHandle> RRefContext::decode(Decoder& decoder) {
  const auto id = decoder.in.get<uint64_t>();
  const auto owner = decoder.in.get<int32_t>();
  const auto mode = decoder.in.get<Mode>();
  const auto fork = decoder.in.get<uint64_t>();
  const auto parent = decoder.in.get<int32_t>();
  const int world = agent().world_size();
  if (owner < 0 || owner >= world || parent < 0 || parent >= world) {
    wire::Reader::fail("an RRef of a rank that does not exist");
  }
  const bool is_owner = owner == rank_;
  switch (mode) {
    case Mode::kLocalHold:
    case Mode::kLocalHoldAccept: {
      if (!is_owner) wire::Reader::fail("an RRef sent to the wrong owner");
      auto handle = owner_handle(id);
      if (mode == Mode::kLocalHoldAccept) send(parent, wire::FrameKind::kRRefAccept, id, fork, 0);
      return handle;
    }
    case Mode::kConfirmed:
    case Mode::kUnconfirmed: {
      if (is_owner) wire::Reader::fail("an RRef's fork for its owner");
      auto handle = user_handle(id, fork, owner);
      if (mode == Mode::kUnconfirmed) {
        send(owner, wire::FrameKind::kRRefFork, id, fork, static_cast<uint64_t>(parent));
      }
      return handle;
    }
  }
  wire::Reader::fail("an unknown kind of RRef");
}

void RRefContext::on_control(wire::FrameKind kind, uint64_t id, uint64_t fork, int from,
                             int parent) {
  if (kind == wire::FrameKind::kRRefFork) {
    add_fork(id, fork, from);
    send(parent, wire::FrameKind::kRRefAccept, id, fork, 0);
  } else if (kind == wire::FrameKind::kRRefAccept) {
    std::shared_ptr<RRefHandle> held;  // dies outside the lock: its end may send a Delete
    std::lock_guard lock(mutex_);
    const auto it = pending_children_.find(fork);
    if (it == pending_children_.end()) return;
    held = std::move(it->second.first);
    pending_children_.erase(it);
  } else if (kind == wire::FrameKind::kRRefDelete) {
    {
      std::lock_guard lock(mutex_);
      if (deleted_.contains(fork)) return;
      remember_deleted_locked(fork);
    }
    drop_forks(id, [fork](uint64_t candidate, int) { return candidate == fork; });
  }
}

void RRefContext::on_peer_lost(int rank) {
  std::vector<uint64_t> ids;
  std::vector<std::shared_ptr<RRefHandle>> held;
  {
    std::lock_guard lock(mutex_);
    for (const auto& [id, record] : owned_) ids.push_back(id);
    for (auto it = pending_children_.begin(); it != pending_children_.end();) {
      // An Accept comes from the owner, on behalf of the rank that was to get the fork.
      const bool hopeless = it->second.second == rank || it->second.first->owner() == rank;
      if (hopeless) held.push_back(std::move(it->second.first));
      it = hopeless ? pending_children_.erase(it) : std::next(it);
    }
  }
  for (const uint64_t id : ids) {
    drop_forks(id, [rank](uint64_t, int holder) { return holder == rank; });
  }
}

void RRefContext::close() {
  closed_ = true;
  decltype(owned_) owned;
  decltype(pending_children_) children;
  std::lock_guard lock(mutex_);
  owned.swap(owned_);
  children.swap(pending_children_);
}

size_t RRefContext::live() const {
  std::lock_guard lock(mutex_);
  return owned_.size() + pending_children_.size() + user_handles_;
}

}  // namespace distrain::rpc
