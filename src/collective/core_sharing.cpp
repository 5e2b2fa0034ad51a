// The part of Core for Note [Collectives in shared memory]: the ranks' agreement on the memory, and
// the messages that wake ranks.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "core.h"
#include "distrain/base/thread_state.h"

namespace distrain::collective {

using base::Error;
using base::ErrorKind;

void Core::send_control(int to, uint64_t number, int step,
                        std::shared_ptr<const net::Fd> descriptor) {
  try {
    send(to, number, step, {}, nullptr, std::move(descriptor));
  } catch (...) {
    // The rank is lost, which on_peer_lost() handles.
  }
}

void Core::on_look() {
  std::vector<std::shared_ptr<Operation>> ready;
  {
    std::lock_guard lock(mutex_);
    const auto pending = pending_;  // a copy, because look_locked() changes `pending_`
    for (const auto& [number, operation] : pending) {
      operation->look_locked();
      if (operation->is_shared() && operation->wants_executor_locked()) ready.push_back(operation);
    }
  }
  for (auto& operation : ready) post(std::move(operation));
}

void Core::offer_sharing() {
  auto descriptor = std::make_shared<net::Fd>();
  int step = 0;
  {
    std::lock_guard lock(mutex_);
    if (failure_) return;
    if (sharing_ == Sharing::kUndecided && channel_.shares_memory()) {
      set_space_locked(net::SharedMemory::create(SharedSpace::bytes_for(size()), *descriptor));
    }
    if (!space_) sharing_ = Sharing::kNo;
    step = static_cast<int>(space_ ? SharingStep::kOffer : SharingStep::kUseNone);
    if (!space_) descriptor = nullptr;
    ++active_;
  }
  for (const int to : others()) send_control(to, kSharing, step, descriptor);
  end_active();
}

void Core::decide_sharing_locked(bool shares) {
  sharing_ = shares ? Sharing::kYes : Sharing::kNo;
  sharing_decided_.notify_all();
  if (!shares) space_ = nullptr;
  if (shares) space_->agree_on_reducers();
  const SharingStep step = shares ? SharingStep::kUse : SharingStep::kUseNone;
  if (rank_ == 0) post_control(others(), kSharing, static_cast<int>(step));
}

std::optional<Error> Core::on_sharing_locked(int from, const rpc::ChannelMessage& message) {
  const auto step = static_cast<SharingStep>(std::min<uint64_t>(message.tag.c, UINT8_MAX));
  if (sharing_ != Sharing::kUndecided) {  // because of the settings, or of a rank that has closed
    if (from == 0 && step == SharingStep::kOffer) {
      post_control({0}, kSharing, static_cast<int>(SharingStep::kDecline));
    }
    return std::nullopt;
  }
  Peer& peer = peers_[static_cast<size_t>(from)];
  const bool is_answer = step == SharingStep::kAccept || step == SharingStep::kDecline;
  if (rank_ == 0 && is_answer && !peer.has_answered) {
    peer.has_answered = true;
    is_sharing_declined_ = is_sharing_declined_ || step == SharingStep::kDecline;
    if (awaited_for_sharing_locked().empty()) decide_sharing_locked(!is_sharing_declined_);
    return std::nullopt;
  }
  if (from == 0 && step == SharingStep::kOffer && !space_) {
    if (message.descriptor && channel_.shares_memory()) {
      set_space_locked(
          net::SharedMemory::open(*message.descriptor, SharedSpace::bytes_for(size())));
    }
    const SharingStep answer = space_ ? SharingStep::kAccept : SharingStep::kDecline;
    post_control({0}, kSharing, static_cast<int>(answer));
    return std::nullopt;
  }
  const bool is_decision = step == SharingStep::kUseNone || (step == SharingStep::kUse && space_);
  if (from == 0 && is_decision) {
    decide_sharing_locked(step == SharingStep::kUse);
    return std::nullopt;
  }
  return Error{ErrorKind::kProtocol,
               fmt::format("a malformed message about shared memory from rank {}", message.from),
               message.from};
}

std::vector<int> Core::awaited_for_sharing_locked() const {
  if (rank_ != 0) return {world_rank(0)};
  std::vector<int> ranks;
  for (const int other : others()) {
    if (!peers_[static_cast<size_t>(other)].has_answered) ranks.push_back(world_rank(other));
  }
  return ranks;
}

base::Result<std::shared_ptr<SharedSpace>> Core::shared_space(base::TimePoint deadline) {
  std::unique_lock lock(mutex_);
  const uint64_t aborts = aborts_;
  const auto closed = [this] { return std::ranges::find(peers_, true, &Peer::closed); };
  const auto is_over = [&] {
    return failure_ || sharing_ != Sharing::kUndecided || aborts_ != aborts ||
           closed() != peers_.end();
  };
  if (!is_over()) {
    lock.unlock();
    base::check_may_wait("the first collective of a group");
    const base::BlockingScope blocking;
    lock.lock();
    sharing_waits_.push_back(base::Clock::now());
    base::wait_until(sharing_decided_, lock, deadline, is_over);
    sharing_waits_.pop_back();
    lock.unlock();  // before `blocking` ends
  }
  if (!lock.owns_lock()) lock.lock();
  if (sharing_ != Sharing::kUndecided) return sharing_ == Sharing::kYes ? space_ : nullptr;
  if (failure_) return *failure_;
  if (aborts_ != aborts) return *aborted_;
  if (const auto it = closed(); it != peers_.end()) {
    const int rank = world_rank(static_cast<int>(it - peers_.begin()));
    return Error{ErrorKind::kPeerLost, fmt::format("rank {} has closed the group", rank), rank};
  }
  const std::vector<int> missing = awaited_for_sharing_locked();
  return Error{ErrorKind::kDeadline,
               fmt::format("the first collective of the group: the deadline passed, nothing came "
                           "from rank {}",
                           fmt::join(missing, ", ")),
               missing.front()};
}

}  // namespace distrain::collective
