#include "control_protocol.h"

namespace distrain::membership {

Member::Member(ControlSettings settings, ControlTransport& transport, Link coordinator,
               base::TimePoint now)
    : ControlProtocol(std::move(settings), transport, now), coordinator_(coordinator) {
  add_control(0, coordinator, now);
  const wire::Join join{settings_.job, settings_.world_size, settings_.endpoint,
                        settings_.job_options};
  transport_.send(coordinator_, {FrameKind::kJoin, 0, 0, wire::encode(join)});
}

void Member::prepared(wire::RankDevices devices) {
  if (state_ != State::kPreparing) return;
  transport_.send(coordinator_, {FrameKind::kPrepared, 0, 0, wire::encode(devices)});
}

void Member::enter_round(uint64_t round, uint64_t number) {
  if (is_here(0)) transport_.send(coordinator_, {FrameKind::kFlush, round, number});
}

void Member::on_control(int, const Message& message) {
  switch (message.kind) {
    case FrameKind::kReject:
    case FrameKind::kAbort: {
      if (state_ == State::kRunning) return declare_lost(0, reason_of(0, message));
      return abort(reason_of(0, message));
    }
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
      // The first go counts, because other ranks rely on it.
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

void Member::on_control_lost(int, const Error& error) { abort(error); }

// Counts all other ranks as lost if the coordinator is, because then no rank learns who leaves and
// why.
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

// Reports a loss to the coordinator, which answers by reporting it to all ranks.
void Member::suspect(int rank, const Error& error) {
  if (!is_here(rank) || !is_here(0) || !reported_lost_.insert(rank).second) return;
  const uint32_t incarnation = entry(rank).incarnation;
  transport_.send(coordinator_, {FrameKind::kLost, static_cast<uint64_t>(rank), incarnation,
                                 wire::encode(error)});
}

}  // namespace distrain::membership
