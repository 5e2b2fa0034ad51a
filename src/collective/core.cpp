#include "core.h"

#include <fmt/format.h>

#include "distrain/base/thread_state.h"
#include "distrain/rpc/error.h"
#include "distrain/wire/frame.h"

namespace distrain::collective {

using base::Error;
using base::ErrorKind;

Core::Core(rpc::Channel& channel, base::Executor& executor, uint32_t group_id,
           std::vector<int> ranks, bool shares_memory)
    : channel_(channel),
      executor_(executor),
      tracer_(channel.tracer()),
      group_id_(group_id),
      ranks_(std::move(ranks)),
      peers_(ranks_.size()),
      has_met_(ranks_.size()),
      sharing_(shares_memory && ranks_.size() > 1 ? Sharing::kUndecided : Sharing::kNo) {
  std::vector<uint8_t> is_listed(static_cast<size_t>(channel_.world_size()));
  for (const int each : ranks_) {
    if (each < 0 || each >= channel_.world_size() ||
        std::exchange(is_listed[static_cast<size_t>(each)], 1) != 0) {
      base::invalid(
          fmt::format("rank {} in a group: not a rank of this job, or listed twice", each));
    }
  }
  rank_ = group_rank(channel_.rank());
  if (rank_ < 0) {
    base::invalid(fmt::format("rank {} is not in the group that it joins", channel_.rank()));
  }
}

void Core::open() {
  const std::weak_ptr<Core> weak = weak_from_this();
  const auto on_message = [weak](rpc::ChannelMessage message) {
    if (auto core = weak.lock()) core->on_message(std::move(message));
  };
  const auto on_peer_lost = [weak](int rank, const Error& error) {
    if (auto core = weak.lock()) core->on_peer_lost(rank, error);
  };
  const auto waits = [weak] {
    const auto core = weak.lock();
    return core ? core->waits() : std::vector<rpc::Wait>();
  };
  channel_.set_handler({.on_message = on_message, .on_peer_lost = on_peer_lost, .waits = waits});
  if (rank_ == 0) offer_sharing();
}

void Core::close() {
  const Error closed{ErrorKind::kCancelled, "the collective group is closed"};
  {
    std::lock_guard lock(mutex_);
    if (std::exchange(closed_, true)) return;
    failure_ = closed;
  }
  abort(closed);
  {
    std::unique_lock lock(mutex_);
    idle_.wait(lock, [this] { return active_ == 0; });
  }
  // See Note [Closing a group]. Answers each rank once, so that a flood has few answers.
  channel_.set_handler({.on_message = [&channel = channel_, id = group_id_,
                                       answered = std::vector<uint8_t>(channel_.world_size())](
                                          const rpc::ChannelMessage& message) mutable {
    auto& is_answered = answered[static_cast<size_t>(message.from)];
    if (message.tag.b == kClosed || std::exchange(is_answered, 1) != 0) return;
    try {
      channel.send(message.from, {id, kClosed, 0}, {}, nullptr);
    } catch (...) {  // the rank is lost
    }
  }});
  {
    std::scoped_lock lock(mutex_, looks_mutex_);
    early_.clear();
    are_looks_over_ = true;
  }
  for (const int to : others()) {
    if (rank_ == 0 || to == 0 || has_met_[static_cast<size_t>(to)]) send_control(to, kClosed, 0);
  }
}

void Core::abort(const Error& error) {
  std::lock_guard lock(mutex_);
  const auto pending = pending_;  // a copy, because fail_locked() changes `pending_`
  for (const auto& [number, operation] : pending) operation->fail_locked(error);
  aborted_ = error;
  ++aborts_;
  room_.notify_all();
  sharing_decided_.notify_all();
}

std::vector<rpc::ChannelMessage> Core::take_early_locked(uint64_t number) {
  auto taken = early_.extract(number);
  if (!taken) return {};
  for (const auto& message : taken.mapped()) {
    peers_[static_cast<size_t>(group_rank(message.from))].early_bytes[is_transfer(number)] -=
        wire::kHeaderBytes + message.payload.size();
  }
  return std::move(taken.mapped());
}

void Core::issue(const std::shared_ptr<Operation>& operation, uint32_t sequence,
                 std::optional<Error> cannot_begin) {
  std::unique_lock lock(mutex_);
  const uint64_t number = next_locked(sequence)++;
  operation->open_locked(shared_from_this(), number);
  std::vector<rpc::ChannelMessage> early = take_early_locked(number);
  std::optional<Error> error = failure_;
  if (!error && cannot_begin) {
    error = std::move(cannot_begin);
    lock.unlock();
    send_refusals(number, 1, *error);
    lock.lock();
  } else if (!error) {
    pending_.emplace(number, operation);
    for (auto& message : early) {
      operation->deliver_locked(group_rank(message.from), std::move(message));
    }
    for (int from = 0; from < size(); ++from) {
      if (peers_[static_cast<size_t>(from)].closed && operation->waits_for_locked(from)) {
        operation->fail_locked(closed_error(from, *operation));
      }
    }
    lock.unlock();
    // Start even an operation that an early message has failed, so that it fails on all ranks.
    try {
      if (await_room(*operation)) {
        operation->start();
      } else {
        send_refusals(number, 1, *operation->failure_);
      }
    } catch (...) {
      error = rpc::error_in_flight(ErrorKind::kInternal);
      operation->has_started_ = false;  // so that the other ranks are told
    }
    lock.lock();
  }
  if (error) operation->fail_locked(std::move(*error));
  operation->settle_locked();
  if (operation->is_shared()) {
    operation->run_first_steps(lock);
    if (operation->spec().bytes <= SharedSpace::kSlotBytes) return;  // the caller waits soon
  }
  const bool post = operation->wants_executor_locked();
  lock.unlock();
  if (size() == 1) return operation->run_ready();
  if (post) this->post(operation);
}

void Core::refuse(int count, const Error& error, uint32_t sequence) {
  uint64_t first = 0;
  {
    std::lock_guard lock(mutex_);
    uint64_t& next = next_locked(sequence);
    first = next;
    next += static_cast<uint64_t>(count);
    for (uint64_t i = first; i < next; ++i) take_early_locked(i);
    if (failure_) return;
    ++active_;
  }
  send_refusals(first, count, error);
  end_active();
}

void Core::post_sends(std::function<void(Core&)> sends) {
  executor_.post([self = shared_from_this(), sends = std::move(sends)] {
    {
      std::lock_guard lock(self->mutex_);
      if (self->failure_) return;
      ++self->active_;
    }
    sends(*self);
    self->end_active();
  });
}

void Core::answer_locked(uint64_t number, const OpSpec& spec, int from, const Error& error) {
  if (failure_) return;
  post_sends([number, spec, from, error](Core& self) {
    try {
      const base::BufferPtr header = self.allocate(kHeaderBytes);
      encode_header(spec, 0, header->data);
      self.send(from, number, 0, header);
    } catch (...) {
      // Ignore errors, as send_refusals() does.
    }
    self.send_refusals(number, 1, error, true, from);
  });
}

void Core::send_refusals(uint64_t first, int count, const Error& error, bool is_relayed,
                         int except) {
  try {
    const std::string text = encode_refusal(error, is_relayed);
    base::BufferPtr buffer = allocate(text.size());
    std::copy(text.begin(), text.end(), buffer->data);
    for (int i = 0; i < count; ++i) {
      send_to_all(first + static_cast<uint64_t>(i), 0, buffer, except);
    }
  } catch (...) {
    // Ignore errors: a rank that gets no refusal is lost, or its operation fails at its deadline.
  }
}

void Core::send_each(const std::function<void(int to)>& send_to) {
  std::exception_ptr failure;
  for (int i = 1; i < size(); ++i) {
    try {
      send_to((rank_ + i) % size());
    } catch (...) {
      if (!failure) failure = std::current_exception();
    }
  }
  if (failure) std::rethrow_exception(failure);
}

void Core::on_message(rpc::ChannelMessage message) {
  const int from = group_rank(message.from);
  if (from < 0 || from == rank_) return;  // outside the group, or this rank itself
  meet(from);
  std::shared_ptr<Operation> operation;
  std::optional<Error> failure;
  bool post = false;
  bool looks = false;
  {
    std::lock_guard lock(mutex_);
    Peer& peer = peers_[static_cast<size_t>(from)];
    const uint64_t bytes = wire::kHeaderBytes + message.payload.size();
    uint64_t& early_bytes = peer.early_bytes[is_transfer(message.tag.b)];
    const auto refuse = [&](ErrorKind kind, std::string why) {
      failure = Error{kind, std::move(why), message.from};
      if (!failure_) failure_ = failure;
    };
    if (message.tag.a != group_id_) {
      refuse(ErrorKind::kInvalid,
             fmt::format("rank {} has group {} on the channel where rank {} has group {}",
                         message.from, message.tag.a, world_rank(rank_), group_id_));
    } else if (message.tag.b == kClosed) {
      return on_closed_locked(from);
    } else if (message.tag.b == kSharing) {
      failure = on_sharing_locked(from, message);
      if (failure && !failure_) failure_ = failure;
      if (!failure) return;
    } else if (message.tag.b == kLook) {
      looks = true;
    } else if (is_transfer(message.tag.b) && !to_own_number_locked(from, message.tag)) {
      refuse(ErrorKind::kOverloaded,
             fmt::format("rank {} sends and receives with too many tags", message.from));
    } else if (is_early_locked(message.tag.b) && early_bytes > 0 &&
               early_bytes + bytes > 2 * (is_transfer(message.tag.b) ? kWindow : window())) {
      refuse(ErrorKind::kOverloaded,
             fmt::format("rank {} has sent too much for operations that rank {} has not begun",
                         message.from, world_rank(rank_)));
    } else {
      on_answer_locked(peer, message.tag.b);
      if (is_early_locked(message.tag.b)) {
        early_bytes += bytes;
        early_[message.tag.b].push_back(std::move(message));
        return;
      }
      const auto it = pending_.find(message.tag.b);
      if (it == pending_.end()) return;  // the operation has failed or was refused here
      operation = it->second;
      operation->deliver_locked(from, std::move(message));
      post = operation->wants_executor_locked();
    }
  }
  if (failure) return abort(*failure);
  if (looks) return on_look();
  if (post) this->post(std::move(operation));
}

void Core::on_answer_locked(Peer& peer, uint64_t number) {
  auto it = peer.unanswered.lower_bound(first_number(sequence_of(number)));
  while (it != peer.unanswered.end() && it->first <= number) {
    peer.unanswered_bytes -= it->second;
    it = peer.unanswered.erase(it);
  }
  room_.notify_all();
}

void Core::on_closed_locked(int from) {
  Peer& peer = peers_[static_cast<size_t>(from)];
  peer = {.early_bytes = peer.early_bytes, .closed = true};
  if (rank_ == 0 && sharing_ == Sharing::kUndecided) decide_sharing_locked(false);
  sharing_decided_.notify_all();
  const auto pending = pending_;  // a copy, because fail_locked() changes `pending_`
  for (const auto& [number, operation] : pending) {
    if (operation->waits_for_locked(from)) operation->fail_locked(closed_error(from, *operation));
  }
  room_.notify_all();
}

Error Core::closed_error(int from, const Operation& operation) const {
  const int rank = world_rank(from);
  const std::string what = describe(operation.spec());
  return {ErrorKind::kPeerLost,
          fmt::format("rank {} has closed the group, and takes no part in {}", rank, what), rank,
          what};
}

// Waits for room in all peers' windows. Returns false if the operation fails or expires first.
bool Core::await_room(Operation& operation) {
  if (operation.is_shared() || is_transfer(operation.number_)) return true;
  const auto bytes_to = [&](int to) {
    return wire::kHeaderBytes + kHeaderBytes + operation.sent_bytes(to);
  };
  const auto has_room = [&] {
    for (int to = 0; to < size(); ++to) {
      const Peer& peer = peers_[static_cast<size_t>(to)];
      if (peer.unanswered.empty()) continue;
      if (peer.unanswered_bytes + bytes_to(to) > window()) return false;
    }
    return true;
  };
  std::unique_lock lock(mutex_);
  if (!has_room()) {
    lock.unlock();
    const base::BlockingScope blocking;
    lock.lock();
    const auto is_over = [&] { return failure_ || operation.failure_ || has_room(); };
    base::wait_until(room_, lock, operation.deadline_, is_over);
    if (!has_room()) {
      operation.fail_locked(failure_ ? *failure_ : operation.deadline_error_locked());
      return false;
    }
  }
  for (int to = 0; to < size(); ++to) {
    if (!operation.waits_for_locked(to)) continue;  // neither sends it a message
    if (operation.has_heard_locked(to)) continue;   // a refusal may be all that it sends
    Peer& peer = peers_[static_cast<size_t>(to)];
    if (peer.closed) continue;
    peer.unanswered.emplace(operation.number_, bytes_to(to));
    peer.unanswered_bytes += bytes_to(to);
  }
  return true;
}

void Core::on_peer_lost(int world_rank, const Error& error) {
  if (group_rank(world_rank) < 0) return;
  const Error lost = base::with_origin(error, world_rank);  // its rank may have caused the loss
  {
    std::lock_guard lock(mutex_);
    if (!failure_) failure_ = lost;
  }
  abort(lost);
}

}  // namespace distrain::collective
