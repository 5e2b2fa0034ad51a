#include "core.h"

#include <algorithm>
#include <utility>

#include "distrain/rpc/error.h"

namespace distrain::collective {

using base::Error;
using base::ErrorKind;

Core::Core(rpc::Channel& channel, base::Executor& executor, uint32_t group_id,
           std::vector<int> ranks)
    : channel_(channel),
      executor_(executor),
      tracer_(channel.tracer()),
      group_id_(group_id),
      ranks_(std::move(ranks)) {
  for (size_t i = 0; i < ranks_.size(); ++i) {
    if (ranks_[i] < 0 || ranks_[i] >= channel_.world_size() ||
        std::count(ranks_.begin(), ranks_.end(), ranks_[i]) != 1) {
      throw base::Exception(ErrorKind::kInvalid,
                            "rank " + std::to_string(ranks_[i]) +
                                " in a group: not a rank of this job, or listed twice");
    }
  }
  rank_ = group_rank(channel_.rank());
  if (rank_ < 0) {
    throw base::Exception(ErrorKind::kInvalid, "rank " + std::to_string(channel_.rank()) +
                                                   " is not in the group that it joins");
  }
}

int Core::group_rank(int world_rank) const {
  const auto it = std::find(ranks_.begin(), ranks_.end(), world_rank);
  return it == ranks_.end() ? -1 : static_cast<int>(it - ranks_.begin());
}

void Core::open() {
  const std::weak_ptr<Core> weak = weak_from_this();
  channel_.set_handler({
      .on_message =
          [weak](rpc::ChannelMessage message) {
            if (auto core = weak.lock()) core->on_message(std::move(message));
          },
      .on_peer_lost =
          [weak](int rank, const Error& error) {
            if (auto core = weak.lock()) core->on_peer_lost(rank, error);
          },
      .waits =
          [weak] {
            const auto core = weak.lock();
            return core ? core->waits() : std::vector<rpc::Wait>();
          },
  });
}

void Core::close() {
  const Error closed{ErrorKind::kCancelled, "the collective group is closed", -1, {}};
  {
    std::lock_guard lock(mutex_);
    if (std::exchange(closed_, true)) return;
    failure_ = closed;
  }
  channel_.set_handler({});
  abort(closed);
  std::unique_lock lock(mutex_);
  idle_.wait(lock, [this] { return active_ == 0; });
  early_.clear();
}

void Core::abort(const Error& error) {
  std::lock_guard lock(mutex_);
  std::vector<std::shared_ptr<Operation>> pending;  // failing one takes it out of the map
  for (auto& [number, operation] : pending_) pending.push_back(operation);
  for (auto& operation : pending) operation->fail_locked(error);
}

uint32_t Core::new_sequence() {
  std::lock_guard lock(mutex_);
  return ++last_sequence_;
}

uint64_t Core::next_number() const {
  std::lock_guard lock(mutex_);
  const auto it = next_.find(0);
  return it == next_.end() ? 0 : it->second;
}

uint64_t& Core::next_locked(uint32_t sequence) {
  return next_.try_emplace(sequence, first_number(sequence)).first->second;
}

std::optional<Error> Core::failure() const {
  std::lock_guard lock(mutex_);
  return failure_;
}

base::BufferPtr Core::allocate(size_t size) {
  base::BufferPtr buffer = pool_.allocate(size);
  if (!buffer) {
    throw base::Exception(ErrorKind::kResources,
                          "no memory for a collective of " + std::to_string(size) + " bytes");
  }
  return buffer;
}

bool Core::is_early_locked(uint64_t number) const {
  const auto it = next_.find(sequence_of(number));
  return it == next_.end() || number >= it->second;
}

std::vector<rpc::ChannelMessage> Core::take_early_locked(uint64_t number) {
  const auto it = early_.find(number);
  if (it == early_.end()) return {};
  std::vector<rpc::ChannelMessage> messages = std::move(it->second);
  early_.erase(it);
  return messages;
}

void Core::issue(const std::shared_ptr<Operation>& operation, uint32_t sequence) {
  bool start = false;
  {
    std::lock_guard lock(mutex_);
    const uint64_t number = next_locked(sequence)++;
    operation->open_locked(shared_from_this(), number);
    std::vector<rpc::ChannelMessage> early = take_early_locked(number);
    if (failure_) {
      operation->fail_locked(*failure_);
    } else {
      pending_.emplace(number, operation);
      for (auto& message : early) {
        operation->deliver_locked(group_rank(message.from), std::move(message));
      }
      start = true;
    }
  }
  // Sent even when an early message has failed it already: the others need ours to fail, too.
  std::optional<Error> error;
  if (start) {
    try {
      operation->start();
    } catch (...) {
      error = rpc::error_in_flight(ErrorKind::kInternal);
    }
  }
  bool post = false;
  {
    std::lock_guard lock(mutex_);
    if (error) operation->fail_locked(std::move(*error));
    operation->settle_locked();
    post = operation->wants_executor_locked();
  }
  if (size() == 1) return operation->run_ready();
  if (post) this->post(operation);
}

void Core::refuse(int count, const Error& error, uint32_t sequence) {
  const std::string text = encode_refusal(error);
  uint64_t first = 0;
  {
    std::lock_guard lock(mutex_);
    uint64_t& next = next_locked(sequence);
    first = next;
    next += static_cast<uint64_t>(count);
    for (uint64_t i = first; i < next; ++i) early_.erase(i);
    if (failure_) return;
    ++active_;
  }
  try {
    base::BufferPtr buffer = allocate(text.size());
    std::copy(text.begin(), text.end(), buffer->data);
    for (int i = 0; i < count; ++i) send_to_all(first + static_cast<uint64_t>(i), 0, buffer);
  } catch (...) {
    // A rank that cannot be told is lost, or learns of it by its deadline.
  }
  std::lock_guard lock(mutex_);
  if (--active_ == 0) idle_.notify_all();
}

void Core::send(int to, uint64_t number, int step, std::span<const std::span<const uint8_t>> pieces,
                std::shared_ptr<const void> keep_alive) {
  const rpc::ChannelTag tag{group_id_, number, static_cast<uint64_t>(step)};
  channel_.send(world_rank(to), tag, pieces, std::move(keep_alive));
}

void Core::send_to_all(uint64_t number, int step, const base::BufferPtr& buffer) {
  const std::span<const uint8_t> piece(buffer->data, buffer->size);
  // Starting behind oneself spreads the load; a rank that is lost must not keep the others waiting.
  std::exception_ptr failure;
  for (int i = 1; i < size(); ++i) {
    try {
      send((rank_ + i) % size(), number, step, std::span(&piece, 1), buffer);
    } catch (...) {
      if (!failure) failure = std::current_exception();
    }
  }
  if (failure) std::rethrow_exception(failure);
}

void Core::post(std::shared_ptr<Operation> operation) {
  executor_.post([operation = std::move(operation)] { operation->run_ready(); });
}

void Core::on_message(rpc::ChannelMessage message) {
  const int from = group_rank(message.from);
  if (from < 0 || from == rank_) return;  // not of this group
  std::shared_ptr<Operation> operation;
  std::optional<Error> failure;
  bool post = false;
  {
    std::lock_guard lock(mutex_);
    if (message.tag.a != group_id_) {
      failure =
          Error{ErrorKind::kInvalid,
                "rank " + std::to_string(message.from) + " has group " +
                    std::to_string(message.tag.a) + " on the channel where rank " +
                    std::to_string(world_rank(rank_)) + " has group " + std::to_string(group_id_),
                message.from,
                {}};
      if (!failure_) failure_ = failure;
    } else if (is_early_locked(message.tag.b)) {
      early_[message.tag.b].push_back(std::move(message));
      return;
    } else {
      const auto it = pending_.find(message.tag.b);
      if (it == pending_.end()) return;  // it has failed here, or was refused
      operation = it->second;
      operation->deliver_locked(from, std::move(message));
      post = operation->wants_executor_locked();
    }
  }
  if (failure) return abort(*failure);
  if (post) this->post(std::move(operation));
}

std::vector<rpc::Wait> Core::waits() {
  std::lock_guard lock(mutex_);
  std::vector<rpc::Wait> all;
  for (const auto& [number, operation] : pending_) all.push_back(operation->wait_locked());
  return all;
}

void Core::on_peer_lost(int world_rank, const Error& error) {
  if (group_rank(world_rank) < 0) return;
  Error lost = error;
  if (lost.rank < 0) lost.rank = world_rank;  // else it left because of that one
  {
    std::lock_guard lock(mutex_);
    if (!failure_) failure_ = lost;
  }
  abort(lost);
}

}  // namespace distrain::collective
