#include "control/hub.h"

namespace distrain::rpc::control {

using base::Error;
using base::ErrorKind;
using wire::FrameKind;

Hub::Hub(Settings settings, World& world, base::TimePoint now)
    : Party(std::move(settings), world, now) {}

void Hub::begin() { meet_if_all_joined(); }

// ---- meeting ----

std::optional<Error> Hub::join(Link link, int rank, wire::Join join, base::TimePoint now) {
  if (auto refusal = check_join(rank, join)) return refusal;
  add_control(rank, link, now);
  joined_[rank] = {link, std::move(join.endpoint)};
  world_.send(link, {FrameKind::kJoined});
  meet_if_all_joined();
  return std::nullopt;
}

std::optional<Error> Hub::check_join(int rank, const wire::Join& join) const {
  const auto refuse = [](std::string message) { return rendezvous_error(std::move(message), 0); };
  const auto size = static_cast<int>(settings_.names.size());
  if (join.job != settings_.job) {
    return refuse("job: rank " + std::to_string(rank) + " belongs to '" + join.job +
                  "', rank 0 to '" + settings_.job + "'");
  }
  if (join.world_size != 0 && join.world_size != size) {
    return refuse("world size: " + std::to_string(join.world_size) + " on rank " +
                  std::to_string(rank) + ", " + std::to_string(size) + " on rank 0");
  }
  if (rank < 1 || rank >= size) {
    return refuse("rank: " + std::to_string(rank) + " is outside this job's 0 to " +
                  std::to_string(size - 1));
  }
  if (state_ == State::kOver) return refuse("the job has ended before this rank came");
  if (joined_.contains(rank) || state_ != State::kMeeting) {
    return refuse("rank: " + std::to_string(rank) + " has been taken already");
  }
  for (const auto& [name, value] : join.options) {
    const auto it = settings_.options.find(name);
    if (it != settings_.options.end() && it->second != value) {
      const std::string own = it->second.empty() ? "none" : it->second;
      return refuse("--" + name + ": " + value + " on rank " + std::to_string(rank) + ", " + own +
                    " on rank 0");
    }
  }
  return std::nullopt;
}

void Hub::meet_if_all_joined() {
  if (state_ != State::kMeeting || joined_.size() + 1 != settings_.names.size()) return;
  wire::Directory directory;
  for (const std::string& name : settings_.names) directory.ranks.push_back({name, {}});
  directory.ranks[0].endpoint = settings_.endpoint;
  for (const auto& [rank, joined] : joined_) {
    directory.ranks[static_cast<size_t>(rank)].endpoint = joined.endpoint;
  }
  directory.options = settings_.options;
  directory.secret = settings_.secret;
  tell_members({FrameKind::kDirectory, 0, 0, wire::encode(directory)});
  know(std::move(directory));
}

void Hub::prepared(wire::RankDevices devices) { take_prepared(0, std::move(devices)); }

// Rank 0 may be prepared before the others are there.
void Hub::take_prepared(int rank, wire::RankDevices devices) {
  if (!prepared_.emplace(rank, std::move(devices)).second) {
    wire::Reader::fail("a rank that is prepared twice");
  }
  if (state_ != State::kPreparing || prepared_.size() != settings_.names.size()) return;
  std::vector<wire::RankDevices> all;
  for (auto& [each, its] : prepared_) all.push_back(std::move(its));
  const Message go{FrameKind::kGo, 0, 0, wire::encode(all)};
  if (begin_running(std::move(all))) tell_members(go);
}

std::vector<int> Hub::missing() const {
  std::vector<int> ranks;
  for (int rank = 0; rank < static_cast<int>(settings_.names.size()); ++rank) {
    const bool is_missing = state_ == State::kMeeting ? rank != 0 && !joined_.contains(rank)
                            : state_ == State::kPreparing
                                ? !prepared_.contains(rank)
                                : is_here(rank) && !in_round_.contains(rank);
    if (is_missing) ranks.push_back(rank);
  }
  return ranks;
}

// ---- what members say ----

void Hub::tell_members(const Message& message, int except) {
  for (const auto& [rank, joined] : joined_) {
    if (rank != except && connections_.contains(joined.link)) world_.send(joined.link, message);
  }
}

void Hub::on_control(int rank, const Message& message) {
  switch (message.kind) {
    case FrameKind::kPrepared: {
      if (state_ != State::kPreparing) break;
      wire::Reader in(message.body);
      wire::RankDevices devices = wire::decode_rank_devices(in);
      in.expect_end();
      return take_prepared(rank, std::move(devices));
    }
    case FrameKind::kAbort: {
      // Nothing has begun: its place is free again when it closes, as if it had died.
      if (state_ == State::kMeeting) return;
      if (state_ == State::kRunning) return lose(rank, reason_of(rank, message));
      return abort(reason_of(rank, message));
    }
    case FrameKind::kLost: {
      if (state_ != State::kRunning || message.a >= presence_.size()) break;
      // Of the two ends of a connection to rank 0 that has broken, the other one leaves.
      if (message.a == 0) return lose(rank, reason_of(rank, message));
      return lose(static_cast<int>(message.a), wire::decode_error(message.body));
    }
    case FrameKind::kFlush:
      if (state_ != State::kRunning) break;
      return come_to_round(rank, message.a, message.b);
    default:
      break;
  }
  wire::Reader::fail("a frame out of place");
}

void Hub::on_control_lost(int rank, const Error& error) {
  if (state_ == State::kMeeting) {
    joined_.erase(rank);  // its place is free again
  } else {
    abort(error);
  }
}

void Hub::spread(int rank, const Error& error) {
  tell_members({FrameKind::kLost, static_cast<uint64_t>(rank), 0, wire::encode(error)}, rank);
}

// ---- the end ----

void Hub::enter_round(uint64_t round, uint64_t number) {
  if (state_ == State::kRunning) come_to_round(0, round, number);
}

void Hub::come_to_round(int rank, uint64_t round, uint64_t number) {
  if (round != round_ || !in_round_.insert(rank).second) {
    wire::Reader::fail("a round of the end that is not under way");
  }
  round_sum_ += number;
  if (in_round_.size() != presence_.size()) return;
  const uint64_t sum = std::exchange(round_sum_, 0);
  ++round_;
  in_round_.clear();
  tell_members({FrameKind::kFlush, round, sum});
  world_.on_round(round, sum);
}

}  // namespace distrain::rpc::control
