// The program of a simulated rank: calls, work, and the callbacks of its ControlProtocol.
#include <algorithm>
#include <utility>

#include "rank.h"

namespace distrain::fake_network {

using base::ErrorKind;
using wire::FrameKind;

namespace {

constexpr auto kLongestReach = std::chrono::seconds(20);  // this and the next two are as in Peers
constexpr auto kRank0Tells = std::chrono::seconds(1);
constexpr auto kRetry = std::chrono::milliseconds(20);
constexpr uint64_t kLastRound = 24;  // as in AgentCore::shutdown()

}  // namespace

// ---- calls ----

void Rank::call_somebody() {
  if (is_over_ || loss_ || job_.size < 2) return;
  auto to = static_cast<int>(random_.below(static_cast<uint64_t>(job_.size) - 1));
  if (to >= rank_) ++to;
  call(to);
}

void Rank::call(int to) {
  Peer& peer = peers_[static_cast<size_t>(to)];
  if (peer.state == PeerState::kGone) return;
  ++calls_under_way_;
  ++peer.under_way;
  if (peer.state == PeerState::kConnected) return send(*peer.own, {FrameKind::kCall});
  ++peer.waiting;
  if (peer.state == PeerState::kConnecting) return;
  peer.state = PeerState::kConnecting;
  if (peer.accepted) return begin_to_send(to, *peer.accepted);
  reach(to, peer.incarnation, time_.now() + kLongestReach);
}

// Connects to `to`, as Peers does. If the handshake fails, retries, because `to` may accept later.
void Rank::reach(int to, uint32_t incarnation, TimePoint deadline) {
  const Peer& peer = peers_[static_cast<size_t>(to)];
  Rank* callee = nullptr;
  if (protocol_ && peer.incarnation == incarnation) {
    callee = observer_.at(protocol_->directory().ranks[static_cast<size_t>(to)].endpoint.port);
  }
  if (callee == nullptr) return connected(to, incarnation, std::nullopt);
  connect(*callee, deadline - time_.now(), [=, this](std::optional<End> end) {
    if (!end || !protocol_) return connected(to, incarnation, end);
    introduce(*end, wire::HelloPurpose::kPeer, [=, this](std::optional<End> believed) {
      if (believed || !protocol_) return connected(to, incarnation, believed);
      if (time_.now() + kRetry >= deadline) return connected(to, incarnation, std::nullopt);
      after(kRetry, [=, this] { reach(to, incarnation, deadline); });
    });
  });
}

// Uses the new connection `end`, or closes it if the process of `to` has been replaced meanwhile.
// If `end` is nullopt, reports after a second that `to` cannot be reached.
void Rank::connected(int to, uint32_t incarnation, std::optional<End> end) {
  Peer& peer = peers_[static_cast<size_t>(to)];
  if (peer.state != PeerState::kConnecting || peer.incarnation != incarnation || !protocol_) {
    if (end) network_.close(*end, false);
    return;
  }
  if (end) {
    const Link link = hold(*end, to, false);
    protocol_->open(to, link, time_.now());
    if (!streams_.contains(link)) return;  // open() has closed it because this rank is leaving
    return begin_to_send(to, link);
  }
  after(kRank0Tells, [this, to, incarnation] {
    Peer& unreached = peers_[static_cast<size_t>(to)];
    if (unreached.state != PeerState::kConnecting || !protocol_) return;
    if (unreached.incarnation != incarnation) return;
    if (unreached.accepted) return begin_to_send(to, *unreached.accepted);
    protocol_->report(to,
                      {ErrorKind::kPeerLost,
                       "rank " + std::to_string(rank_) + " cannot reach rank " + std::to_string(to),
                       to,
                       {}});
  });
}

void Rank::begin_to_send(int to, Link link) {
  Peer& peer = peers_[static_cast<size_t>(to)];
  peer.own = link;
  peer.state = PeerState::kConnected;
  for (; peer.waiting > 0; --peer.waiting) send(link, {FrameKind::kCall});
}

std::optional<Error> Rank::accept(int rank, End end) {
  Peer& peer = peers_[static_cast<size_t>(rank)];
  if (peer.accepted) return Error{ErrorKind::kProtocol, "has connected already", -1, {}};
  const Link link = hold(end, rank, false);
  peer.accepted = link;
  protocol_->open(rank, link, time_.now());
  if (peer.state == PeerState::kUnconnected) begin_to_send(rank, link);
  return std::nullopt;
}

// Counts a call on `end` as complete, unless the call has failed because `end` was closed.
void Rank::call_has_come(End end) {
  const auto link = links_.find(end);
  if (link == links_.end()) return;
  --peers_[static_cast<size_t>(streams_.at(link->second).rank)].under_way;
  --calls_under_way_;
  end_if_done();
}

// ---- program ----

// Makes the job tolerate losses, as Training does. If `may_return`, rank 0 admits replacements.
void Rank::tolerate(bool may_return) {
  if (!job_.tolerated.empty()) {
    coordinator_->tolerate({job_.tolerated, job_.least, kTooFewLeft, may_return});
  }
}

void Rank::finish_work() {
  is_working_ = false;
  end_if_done();
}

void Rank::end_if_done() {
  if (has_gone_ && calls_under_way_ == 0 && !is_working_ && !is_ending_) enter_round(0);
}

void Rank::enter_round(uint64_t round) {
  if (is_over_ || loss_) return;
  if (round == 0 && coordinator_ != nullptr && job_.door == Door::kClosesAtEnd) tolerate(false);
  is_ending_ = true;
  is_in_round_ = true;
  round_ = round;
  live_ = round == 0 ? 1 : held_values_ + static_cast<uint64_t>(calls_under_way_);
  observer_.on_round_entered(*this, round, live_);
  protocol_->enter_round(round, live_);
}

void Rank::send_garbage() {
  if (!is_alive() || is_over_ || is_stopped_) return;
  std::vector<Link> links;
  for (const auto& [link, stream] : streams_) {
    if (stream.is_control) links.push_back(link);
  }
  if (links.empty()) return;
  const Link link = links[random_.below(links.size())];
  const Message garbage[] = {
      {coordinator_ != nullptr ? FrameKind::kPrepared : FrameKind::kGo, 0, 0, wire::Bytes{1, 2, 3}},
      {FrameKind::kDirectory, 0, 0, wire::Bytes{9}},
      {FrameKind::kLost, uint64_t{1} << 40},
      {FrameKind::kLost, static_cast<uint64_t>(job_.size - 1), 0, wire::Bytes{1}},
      {FrameKind::kHello, 7},
      {FrameKind::kJoin, 0, 0, wire::Bytes{1}},
      {FrameKind::kReply, 7},
      {FrameKind::kAbort, 0, 0, wire::Bytes{1, 2}},
  };
  const Message& chosen = garbage[random_.below(std::size(garbage))];
  trace("sends garbage: " + std::to_string(static_cast<int>(chosen.kind)));
  send(link, chosen);
}

// ---- ControlTransport ----

std::string Change::text() const {
  return (is_return     ? "is told of the return of "
          : job_goes_on ? "goes on without "
                        : "loses ") +
         std::to_string(rank) + " (process " + std::to_string(incarnation) + ")";
}

void Rank::send(Link link, Message message) {
  const FrameKind kind = message.kind;
  if (is_over_ && kind != FrameKind::kAbort && kind != FrameKind::kLeave) {
    violation("goes on to speak when it is over");
  }
  const auto found = streams_.find(link);
  if (found == streams_.end()) return;
  if (bug_ == Bug::kLossIsNotSpread && coordinator_ != nullptr &&
      (kind == FrameKind::kLost || kind == FrameKind::kAbort)) {
    return;
  }
  if (bug_ == Bug::kLastWordIsKept && kind == FrameKind::kAbort) return;
  observer_.on_sent(*this, found->second.rank, message);
  if (bug_ == Bug::kNewcomerGoesEarly && kind == FrameKind::kReturned) {
    const Message known{FrameKind::kKnown, message.a, message.b};
    after(Duration::zero(), [this, link, known] {
      if (protocol_) protocol_->receive(link, known);
    });
  }
  network_.send(found->second.end, std::move(message));
}

void Rank::close(Link link, bool flush) {
  if (bug_ == Bug::kNothingIsClosed) return;
  const auto found = streams_.find(link);
  if (found == streams_.end()) return;
  const Stream stream = found->second;
  links_.erase(stream.end);
  streams_.erase(found);
  network_.close(stream.end, flush);
  if (!stream.is_control) peers_[static_cast<size_t>(stream.rank)].state = PeerState::kGone;
}

void Rank::on_directory(const wire::Directory& directory) {
  if (std::exchange(has_directory_, true)) violation("has a second directory");
  if (static_cast<int>(directory.ranks.size()) != job_.size) violation("has another directory");
  for (const auto& entry : directory.ranks) {
    Peer& peer = peers_.emplace_back();
    peer.incarnation = entry.incarnation;
    if (!entry.is_here) peer.state = PeerState::kGone;
  }
  incarnation_ = peers_[static_cast<size_t>(rank_)].incarnation;
  observer_.on_directory(*this, directory);
  if (coordinator_ != nullptr) {
    observer_.on_phase(Phase::kPreparing);
    return;
  }
  prepare();
}

void Rank::on_go(std::vector<wire::RankDevices>) {
  if (!has_directory_ || std::exchange(has_gone_, true)) violation("goes twice");
  if (fails_at_go_) throw base::Exception(*fails_at_go_);
  trace("goes");
  if (coordinator_ != nullptr) observer_.on_phase(Phase::kRunning);
  is_working_ = true;
  Duration work = up_to(job_.longest_work);
  if (coordinator_ != nullptr && !job_.tolerated.empty()) {
    work = job_.longest_work / 2 + work / 2;  // gives replacements time to join
    if (job_.door == Door::kClosesInTheMidst) after(up_to(work), [this] { tolerate(false); });
  }
  for (double calls = job_.calls_per_rank; calls > random_.unit(); calls -= 1) {
    after(up_to(work), [this] { call_somebody(); });
  }
  if (incarnation_ > 0 && job_.calls_per_rank > 0) {  // a replacement calls other ranks at once
    for (int i = 0; i < 3; ++i) after(up_to(seconds(0.01)), [this] { call_somebody(); });
  }
  after(work, [this] { finish_work(); });
  if (after_go_.second) after(after_go_.first, after_go_.second);
}

void Rank::on_failed(const Error& error) {
  if (has_gone_ && !fails_at_go_) violation("fails to join after go");
  end(Outcome::kFailed, error);
}

// Records the replacement. Sometimes calls it at once, like a program that has waited for it.
void Rank::on_returned(int rank, const wire::RankDevices&) {
  const uint32_t incarnation = protocol_->directory().ranks[static_cast<size_t>(rank)].incarnation;
  const Change change{rank, incarnation, true};
  trace(change.text());
  if (!has_gone_ && incarnation_ == 0) violation("hears of a new process before go");
  observer_.on_change(*this, change, {});
  if (coordinator_ != nullptr) {  // ends the new process's trial: see Coordinator
    after(Duration::zero(), [this, rank] { coordinator_->note_of_use(rank); });
  }
  Peer& peer = peers_[static_cast<size_t>(rank)];
  if (peer.state != PeerState::kGone) violation("hears of a new process of a rank that is there");
  peer = {};
  peer.incarnation = incarnation;
  if (job_.calls_per_rank > 0 && random_.below(4) == 0) {
    after(up_to(seconds(0.02)), [this, rank] {
      if (has_gone_ && !is_over_ && !loss_) call(rank);
    });
  }
}

void Rank::on_joined(int rank) {
  trace("has joined");
  if (rank != rank_) violation("has another one's place");
  is_admitted_ = true;
}

void Rank::on_lost(const membership::Loss& loss) {
  const int rank = loss.rank;
  const Error& error = loss.error;
  const Change change{rank, loss.incarnation, false, loss.job_goes_on};
  trace(change.text() + ": " + error.message + " [" + std::to_string(error.rank) + "]");
  if (!has_gone_ && incarnation_ == 0) violation("loses a rank before go");
  if (rank == rank_) violation("loses itself");
  if (is_over_) violation("loses a rank when it is over");
  if (!lost_.insert(loss.process()).second) violation("loses a rank twice");
  is_cut_off_ = is_cut_off_ || rank == 0;
  if (!is_cut_off_) observer_.on_change(*this, change, error);
  Peer& peer = peers_[static_cast<size_t>(rank)];
  if (loss.job_goes_on) calls_under_way_ -= std::exchange(peer.under_way, 0);
  peer.state = PeerState::kGone;
  if (loss.job_goes_on) after(Duration::zero(), [this] { end_if_done(); });
  if (loss_ || loss.job_goes_on) return;
  loss_ = error;
  after(up_to(job_.longest_reaction), [this] { abort(*loss_); });
}

void Rank::on_round(uint64_t round, uint64_t sum) {
  trace("round " + std::to_string(round) + " is over: " + std::to_string(sum));
  if (loss_) return;
  if (!std::exchange(is_in_round_, false) || round != round_) violation("hears of another round");
  observer_.on_round_over(*this, round, sum);
  if (round == 0) {
    if (coordinator_ != nullptr) observer_.on_phase(Phase::kEnding);
    held_values_ = random_.below(3);
    for (uint64_t i = 0; i < held_values_; ++i) {
      const Duration release = up_to(seconds(1.5));
      if (job_.calls_per_rank > 0 && random_.below(4) == 0) {
        after(up_to(release), [this] { call_somebody(); });
      }
      after(release, [this] { --held_values_; });
    }
    return after(Duration::zero(), [this] { enter_round(1); });
  }
  if (sum == 0 || round == kLastRound) {
    after(Duration::zero(), [this] {
      if (is_over_ || loss_) return;
      protocol_->leave();
      end(Outcome::kEndedWell, std::nullopt);
    });
    return;
  }
  const auto pause = std::chrono::milliseconds(std::min<uint64_t>(uint64_t{1} << round, 200));
  after(pause, [this, round] { enter_round(round + 1); });
}

}  // namespace distrain::fake_network
