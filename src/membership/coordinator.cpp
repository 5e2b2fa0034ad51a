#include "control_protocol.h"

namespace distrain::membership {

// A reserved rank is free again after this time. A process that can run joins much sooner.
constexpr auto kReservationTimeout = std::chrono::minutes(1);

// ---- meeting ----

std::optional<Error> Coordinator::join(Link link, int rank, wire::Join join, base::TimePoint now) {
  if (auto refusal = check_join(rank, join)) return refusal;
  add_control(rank, link, now);
  joined_[rank] = {link, std::move(join.endpoint)};
  reservations_.erase(rank);
  transport_.send(link, {FrameKind::kJoined, static_cast<uint64_t>(rank)});
  if (state_ == State::kRunning) {
    send_directory(rank);
  } else {
    begin_if_all_joined();
  }
  return std::nullopt;
}

std::optional<Error> Coordinator::reserve_rank(Link link, const wire::Join& join,
                                               base::TimePoint now) {
  if (auto refusal = check_join(wire::kUnassignedRank, join)) return refusal;
  const auto size = static_cast<int>(settings_.names.size());
  for (int looked = 1; looked < size; ++looked) {
    const int rank = next_to_reserve_;
    next_to_reserve_ = rank % (size - 1) + 1;
    ++looks_;
    const auto kept = reservations_.find(rank);
    if (kept != reservations_.end()) {
      if (now - kept->second.since <= kReservationTimeout) continue;
      transport_.close(kept->second.link, false);
      reservations_.erase(kept);
    }
    if (!is_free(rank)) continue;
    reservations_[rank] = {link, now};
    transport_.send(link, {FrameKind::kJoined, static_cast<uint64_t>(rank)});
    return std::nullopt;
  }
  return Error{ErrorKind::kOverloaded, "each rank of the job has been taken", 0, "join"};
}

// Returns an error to refuse the join. If `rank` is kUnassignedRank, does not check is_free().
std::optional<Error> Coordinator::check_join(int rank, const wire::Join& join) const {
  const auto refuse = [](std::string message) { return rendezvous_error(std::move(message), 0); };
  const auto size = static_cast<int>(settings_.names.size());
  const bool is_unassigned = rank == wire::kUnassignedRank;
  const std::string who = rank_text(rank);
  if (join.job != settings_.job) {
    return refuse(who + " belongs to '" + join.job + "', rank 0 to '" + settings_.job + "'");
  }
  if (join.world_size != 0 && join.world_size != size) {
    return refuse(who + " expects a world size of " + std::to_string(join.world_size) +
                  " (--world-size), rank 0 has " + std::to_string(size) + " ranks");
  }
  if (!is_unassigned && (rank < 1 || rank >= size)) {
    return refuse("there is no " + who + ": this job has ranks 0 to " + std::to_string(size - 1));
  }
  // After shutdown round 0, no rank waits for a new process, so none is admitted.
  if (state_ == State::kOver || round_ > 0) {
    return refuse("the job has ended before this rank came");
  }
  if (!is_unassigned && !is_free(rank)) {
    return refuse(who +
                  " has been taken already by another process: each needs a --rank of its own, and "
                  "each job that meets at this address a --job-id or --master-port of its own");
  }
  for (const auto& [name, value] : join.options) {
    const auto it = settings_.job_options.find(name);
    if (it != settings_.job_options.end() && it->second != value) {
      const std::string own = it->second.empty() ? "none" : it->second;
      return refuse("--" + name + " is " + value + " on " + who + ", " + own +
                    " on rank 0: give all ranks the same value, or only rank 0");
    }
  }
  return std::nullopt;
}

void Coordinator::begin_if_all_joined() {
  if (state_ != State::kMeeting || joined_.size() + 1 != settings_.names.size()) return;
  wire::Directory directory;
  for (const std::string& name : settings_.names) directory.ranks.push_back({name, {}});
  directory.ranks[0].endpoint = settings_.endpoint;
  for (const auto& [rank, joined] : joined_) {
    directory.ranks[static_cast<size_t>(rank)].endpoint = joined.endpoint;
  }
  directory.options = settings_.job_options;
  directory.secret = settings_.secret;
  broadcast({FrameKind::kDirectory, 0, 0, wire::encode(directory)});
  set_directory(std::move(directory));
}

// Records that `rank` is prepared. If all ranks are prepared and the job has not ended, sends kGo.
void Coordinator::note_prepared(int rank, wire::RankDevices devices) {
  if (!devices_.emplace(rank, std::move(devices)).second) {
    wire::Reader::fail("a rank that is prepared twice");
  }
  if (state_ != State::kPreparing || devices_.size() != settings_.names.size()) return;
  std::vector<wire::RankDevices> all = all_devices();
  const Message go{FrameKind::kGo, 0, 0, wire::encode(all)};
  if (begin_running(std::move(all))) broadcast(go);
}

// ---- a rank that joins later ----

// Sends a new process a directory that already contains it. The coordinator's own directory changes
// later, when that process reports that it is prepared.
void Coordinator::send_directory(int rank) {
  wire::Directory directory = directory_;
  for (size_t each = 0; each < directory.ranks.size(); ++each) {
    directory.ranks[each].is_here = presence_[each] != Presence::kLost;
  }
  wire::Directory::Entry& own = directory.ranks[static_cast<size_t>(rank)];
  own.endpoint = joined_.at(rank).endpoint;
  own.is_here = true;
  ++own.incarnation;
  newcomers_[rank] = {};
  transport_.send(joined_.at(rank).link, {FrameKind::kDirectory, 0, 0, wire::encode(directory)});
}

void Coordinator::announce(int rank, wire::RankDevices devices) {
  Newcomer& newcomer = newcomers_.at(rank);
  if (std::exchange(newcomer.is_prepared, true)) {
    wire::Reader::fail("a rank that is prepared twice");
  }
  for (const auto& [other, joined] : joined_) {
    const bool hears = is_here(other) || newcomers_.contains(other);
    if (other != rank && hears) newcomer.unconfirmed.insert(other);
  }
  on_trial_.insert(rank);
  devices_[rank] = devices;
  const wire::Returned returned{joined_.at(rank).endpoint, std::move(devices)};
  const uint32_t incarnation = entry(rank).incarnation + 1;
  const Message word{FrameKind::kReturned, static_cast<uint64_t>(rank), incarnation,
                     wire::encode(returned)};
  replace_lost(rank, incarnation, returned);
  broadcast(word, rank);
  if (newcomer.unconfirmed.empty()) start_newcomer(rank);
}

// ---- messages of members ----

void Coordinator::on_control(int rank, const Message& message) {
  switch (message.kind) {
    case FrameKind::kPrepared: {
      const bool is_awaited =
          state_ == State::kPreparing || (state_ == State::kRunning && newcomers_.contains(rank));
      if (!is_awaited) break;
      wire::RankDevices devices = wire::decode_rank_devices(message.body);
      if (state_ == State::kRunning) return announce(rank, std::move(devices));
      return note_prepared(rank, std::move(devices));
    }
    case FrameKind::kAbort:
      // Before the directory is sent, does nothing: `rank` is free when its connection closes.
      if (state_ == State::kMeeting) return;
      if (state_ == State::kRunning) return declare_lost(rank, reason_of(rank, message));
      return abort(reason_of(rank, message));
    case FrameKind::kLost: {
      if (state_ != State::kRunning || message.a >= presence_.size()) break;
      // A member that reports the loss of rank 0 cannot reach rank 0, so the member itself is lost.
      if (message.a == 0) return declare_lost(rank, reason_of(rank, message));
      // Ignores the report if it concerns a process that is already lost or replaced.
      const auto lost = static_cast<int>(message.a);
      if (!is_here(lost) || message.b != directory_.ranks[message.a].incarnation) return;
      return declare_lost(lost, wire::decode_error(message.body));
    }
    case FrameKind::kKnown:
      if (state_ != State::kRunning || message.a >= presence_.size()) break;
      if (message.b != directory_.ranks[message.a].incarnation) return;
      return note_confirmed(static_cast<int>(message.a), rank);
    case FrameKind::kFlush:
      if (state_ != State::kRunning) break;
      return note_entered(rank, message.a, message.b);
    default:
      break;
  }
  wire::Reader::fail("a frame out of place");
}

// Declares `rank` lost. Reports the loss, unless the others do not know the rank's new process yet.
void Coordinator::declare_lost(int rank, const Error& error) {
  const auto newcomer = newcomers_.find(rank);
  if (newcomer != newcomers_.end() && !newcomer->second.is_prepared) {
    ++directory_.ranks[static_cast<size_t>(rank)].incarnation;
    forget(rank);
    disconnect(rank, error);
    stop_waiting_for(rank);
    return end_round_if_complete();
  }
  if (!is_here(rank)) return;
  Error why = error;
  const bool goes_on = job_goes_on_ && tolerates(rank, why);
  job_goes_on_ = goes_on;
  const Message lost{FrameKind::kLost, static_cast<uint64_t>(rank), goes_on ? uint64_t{1} : 0,
                     wire::encode(why)};
  forget(rank);
  mark_lost(rank, why, goes_on);
  broadcast(lost, rank);
  stop_waiting_for(rank);
  if (goes_on) end_round_if_complete();
}

// Returns true if the job continues without `rank`: enough ranks remain, and the error is a loss, a
// lack of resources of `rank` or, before note_of_use(), any failure of its new process.
bool Coordinator::tolerates(int rank, Error& error) const {
  const bool is_its_own = error.kind == ErrorKind::kPeerLost ||
                          (error.kind == ErrorKind::kResources && error.rank == rank) ||
                          on_trial_.contains(rank);
  if (!tolerance_.ranks.contains(rank) || !is_its_own) return false;
  size_t left = 0;
  for (const int each : tolerance_.ranks) left += each != rank && is_here(each) ? 1 : 0;
  if (left >= tolerance_.least) return true;
  if (!tolerance_.if_too_few.empty()) error.message += "; " + tolerance_.if_too_few;
  return false;
}

// ---- the end ----

// Ends the shutdown round if all ranks have entered it, except lost ranks without a new process.
// The check stops at the first missing rank and resumes there, so each rank is checked at most
// twice in a round.
void Coordinator::end_round_if_complete() {
  if (state_ != State::kRunning || in_round_.empty()) return;
  const auto size = static_cast<int>(settings_.names.size());
  for (int looked = 0; looked < size; ++looked, awaited_ = (awaited_ + 1) % size) {
    if (is_missing(awaited_)) return;
  }
  uint64_t sum = 0;
  for (const auto& [rank, number] : in_round_) sum += number;
  const uint64_t round = round_++;
  in_round_.clear();
  broadcast({FrameKind::kFlush, round, sum});
  transport_.on_round(round, sum);
}

}  // namespace distrain::membership
