#include "control_protocol.h"

namespace distrain::membership {

// Returns the interval between heartbeats: a quarter of `peer_timeout`, but at most a second,
// because a peer may have a shorter timeout than this rank.
static base::Duration beat_interval(base::Duration peer_timeout) {
  const auto second = std::chrono::duration_cast<base::Duration>(std::chrono::seconds(1));
  return peer_timeout > base::Duration::zero() ? std::min(second, peer_timeout / 4) : second;
}

ControlProtocol::ControlProtocol(ControlSettings settings, ControlTransport& transport,
                                 base::TimePoint now)
    : settings_(std::move(settings)),
      transport_(transport),
      interval_(beat_interval(settings_.peer_timeout)),
      next_beat_(now),
      wake_at_(now) {}

// ---- actions of this rank ----

void ControlProtocol::abort(const Error& error) {
  if (state_ == State::kOver) return;
  const bool has_met = state_ == State::kRunning;
  state_ = State::kOver;
  send_to_all({FrameKind::kAbort, 0, 0, wire::encode(error)});
  if (!has_met) transport_.on_failed(error);
}

void ControlProtocol::send_to_all(Message message) {
  last_message_ = std::move(message);
  const auto all = std::move(connections_);
  connections_.clear();
  for (const auto& [link, connection] : all) {
    transport_.send(link, last_message_);
    transport_.close(link, true);
  }
}

void ControlProtocol::set_directory(wire::Directory directory) {
  directory_ = std::move(directory);
  presence_.clear();
  for (int rank = 0; rank < static_cast<int>(directory_.ranks.size()); ++rank) {
    presence_.push_back(entry(rank).is_here ? Presence::kHere : Presence::kLost);
    if (entry(rank).is_here) continue;
    losses_[rank] = {ErrorKind::kPeerLost, text_of(rank) + " was lost before this rank came", rank};
  }
  state_ = State::kPreparing;
  transport_.on_directory(directory_);
  for (const auto& [rank, error] : losses_) {
    transport_.on_lost({rank, error, true, entry(rank).incarnation});
  }
}

bool ControlProtocol::begin_running(std::vector<wire::RankDevices> devices) {
  state_ = State::kRunning;
  try {
    transport_.on_go(std::move(devices));
    return true;
  } catch (const Exception& e) {
    state_ = State::kPreparing;
    abort(e.error());
    return false;
  }
}

// ---- connections for calls ----

// Accepts connections even before kGo, because the coordinator sends kGo to one rank after the
// other, so the connecting rank may have received kGo earlier.
std::optional<Error> ControlProtocol::check_peer(int rank, uint32_t incarnation) const {
  const std::string who = "rank " + std::to_string(rank);
  const auto size = static_cast<int>(presence_.size());
  if (rank < 0 || rank >= size || rank == settings_.rank) {
    return rendezvous_error("there is no " + who + " that could connect here", 0);
  }
  if (state_ == State::kOver) return why_over();
  const auto loss = losses_.find(rank);
  if (loss != losses_.end()) return loss->second;
  const uint32_t known = entry(rank).incarnation;
  if (incarnation != known) {
    return Error{ErrorKind::kPeerLost,
                 who + " has lost its place to a new process: this is its number " +
                     std::to_string(incarnation) + ", that is number " + std::to_string(known),
                 rank};
  }
  if (presence(rank) == Presence::kHere) return std::nullopt;
  return Error{ErrorKind::kPeerLost, who + " has left this job", rank};
}

// ---- events ----

void ControlProtocol::receive(Link link, const Message& message) {
  const auto found = connections_.find(link);
  if (found == connections_.end() || state_ == State::kOver) return;
  Connection& from = found->second;
  const int rank = from.rank;
  try {
    if (message.kind == FrameKind::kHeartbeat) return;
    if (message.kind == FrameKind::kLeave) {
      from.is_leaving = true;
      if (from.is_control && state_ == State::kRunning) {
        presence_[static_cast<size_t>(rank)] = Presence::kLeft;
      }
      return;
    }
    if (from.is_control) return on_control(rank, message);
    if (message.kind == FrameKind::kAbort || message.kind == FrameKind::kReject) {
      return declare_lost(rank, reason_of(rank, message));
    }
    wire::Reader::fail("a frame out of place");
  } catch (const Exception& e) {
    closed(link, base::with_origin(e.error(), rank));
  }
}

void ControlProtocol::closed(Link link, const Error& error) {
  const auto found = connections_.find(link);
  if (found == connections_.end()) return;
  const Connection from = found->second;
  if (error.kind == ErrorKind::kPeerLost) connections_.erase(found);
  if (state_ == State::kRunning) {
    const Error why = loss(from.rank, error);
    const bool is_proof = from.is_control || error.kind != ErrorKind::kPeerLost;
    if (!from.is_leaving) is_proof ? declare_lost(from.rank, why) : suspect(from.rank, why);
  } else if (from.is_control) {
    Error why = loss(from.rank, error);
    if (error.kind == ErrorKind::kPeerLost) {
      why.message = text_of(from.rank) + " left before all ranks were ready: " + error.message;
      why.op = "join";
    }
    on_control_lost(from.rank, why);
  }
  // If the stream is still open, sends the reason to the other end and closes the stream.
  if (connections_.contains(link)) close_with_reason(link, loss(from.rank, error), true);
}

void ControlProtocol::replace_lost(int rank, uint32_t incarnation, const wire::Returned& returned) {
  const auto at = static_cast<size_t>(rank);
  directory_.ranks[at].incarnation = incarnation;
  directory_.ranks[at].endpoint = returned.endpoint;
  presence_[at] = Presence::kHere;
  losses_.erase(rank);
  transport_.on_returned(rank, returned.devices);
}

void ControlProtocol::disconnect(int rank, const Error& error) {
  std::vector<Link> links;
  for (const auto& [link, connection] : connections_) {
    if (connection.rank == rank) links.push_back(link);
  }
  for (const Link link : links) close_with_reason(link, error, false);
}

base::TimePoint ControlProtocol::tick(base::TimePoint now) {
  if (state_ == State::kOver) return base::kNever;
  const base::Duration limit = settings_.peer_timeout;
  const bool judges = limit > base::Duration::zero();
  // If this process was stopped or starved, it could not read, so no peer counts as silent.
  const bool overslept = now - wake_at_ > interval_;
  std::vector<Link> silent;
  for (auto& [link, connection] : connections_) {
    if (overslept) connection.heard = now;
    if (judges && !connection.is_local && now - connection.heard >= limit) silent.push_back(link);
  }
  for (const Link link : silent) {
    const auto found = connections_.find(link);
    if (found == connections_.end()) continue;  // closed when its rank was declared lost
    const auto seconds =
        std::chrono::duration_cast<std::chrono::seconds>(now - found->second.heard).count();
    const Error error{ErrorKind::kPeerLost, "silent for " + std::to_string(seconds) +
                                                " s, longer than --peer-timeout allows"};
    const int rank = found->second.rank;
    if (state_ == State::kRunning) {
      declare_lost(rank, loss(rank, error));
    } else {
      const bool is_control = found->second.is_control;
      close_with_reason(link, loss(rank, error), true);
      if (is_control) on_control_lost(rank, loss(rank, error));
    }
    if (state_ == State::kOver) return base::kNever;
  }
  beat(now);
  wake_at_ = next_beat_;
  for (const auto& [link, connection] : connections_) {
    if (judges && !connection.is_local) wake_at_ = std::min(wake_at_, connection.heard + limit);
  }
  return wake_at_;
}

// ---- a member ----

Member::Member(ControlSettings settings, ControlTransport& transport, Link coordinator,
               base::TimePoint now)
    : ControlProtocol(std::move(settings), transport, now), coordinator_(coordinator) {
  add_control(0, coordinator, now);
  const wire::Join join{settings_.job, settings_.world_size, settings_.endpoint,
                        settings_.job_options};
  transport_.send(coordinator_, {FrameKind::kJoin, 0, 0, wire::encode(join)});
}

void Member::on_control(int, const Message& message) {
  switch (message.kind) {
    case FrameKind::kReject:
    case FrameKind::kAbort:
      if (state_ == State::kRunning) return declare_lost(0, reason_of(0, message));
      return abort(reason_of(0, message));
    case FrameKind::kJoined:
      if (state_ != State::kMeeting || std::exchange(has_joined_, true)) break;
      if (message.a == 0 || message.a > kMaxRanks) break;
      if (settings_.rank != wire::kUnassignedRank &&
          message.a != static_cast<uint64_t>(settings_.rank)) {
        break;
      }
      return transport_.on_joined(static_cast<int>(message.a));
    case FrameKind::kDirectory: {
      if (state_ != State::kMeeting || !has_joined_) break;
      wire::Directory directory = wire::decode_directory(message.body);
      if (static_cast<size_t>(settings_.rank) >= directory.ranks.size()) {
        wire::Reader::fail("a directory without this rank");
      }
      return set_directory(std::move(directory));
    }
    case FrameKind::kGo:
      // Ignores a repeated kGo, because the devices of the first kGo are already in use.
      if (state_ == State::kRunning) return;
      if (state_ != State::kPreparing) break;
      begin_running(wire::decode_all_devices(message.body));
      return;
    case FrameKind::kLost:
      if (message.a >= presence_.size()) break;
      if (state_ == State::kPreparing && message.b != 1) return abort(reason_of(0, message));
      reported_lost_.insert(static_cast<int>(message.a));
      mark_lost(static_cast<int>(message.a), reason_of(0, message), message.b == 1);
      return;
    case FrameKind::kReturned: {
      if (message.a >= presence_.size() || message.a == 0) break;
      const auto rank = static_cast<int>(message.a);
      if (rank == settings_.rank || presence_[message.a] == Presence::kHere) break;
      if (message.b >= kMaxIncarnations) break;
      reported_lost_.erase(rank);
      replace_lost(rank, static_cast<uint32_t>(message.b), wire::decode_returned(message.body));
      transport_.send(coordinator_, {FrameKind::kKnown, message.a, message.b});
      return;
    }
    case FrameKind::kFlush:
      if (state_ != State::kRunning) break;
      return transport_.on_round(message.a, message.b);
    default:
      break;
  }
  wire::Reader::fail("an unexpected word of rank 0");
}

// If the coordinator is lost, declares all other ranks lost too, because this rank would not learn
// of later losses.
void Member::declare_lost(int rank, const Error& error) {
  if (rank != 0) {
    disconnect(rank, error);
    return suspect(rank, error);
  }
  mark_lost(0, error, false);
  for (int other = 1; other < static_cast<int>(presence_.size()); ++other) {
    if (other != settings_.rank) mark_lost(other, error, false);
  }
}

}  // namespace distrain::membership
