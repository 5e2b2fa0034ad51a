#include "rank.h"

#include <algorithm>
#include <utility>

namespace distrain::fake_network {

using base::ErrorKind;
using membership::rendezvous_error;
using wire::FrameKind;

namespace {

constexpr auto kLongestTry = std::chrono::seconds(5);
constexpr auto kRank0SaysWho = std::chrono::seconds(1);  // equals kRank0Grace of ControlPlane
constexpr auto kDoorTimeout = std::chrono::seconds(2);
constexpr auto kAnswers = std::chrono::seconds(5);
constexpr auto kLastLook = std::chrono::milliseconds(50);

}  // namespace

Rank::Rank(VirtualTime& time, Network& network, Observer& observer, const Job& job, int rank,
           int place, uint64_t seed, Bug bug)
    : time_(time),
      network_(network),
      observer_(observer),
      job_(job),
      rank_(rank),
      place_(place),
      bug_(bug),
      random_({seed, static_cast<uint64_t>(rank), static_cast<uint64_t>(place), 0x72616e6b}) {}

// ---- process ----

void Rank::after(Duration delay, std::function<void()> what) {
  time_.after(delay, [this, what = std::move(what)] {
    if (is_gone_) return;
    if (is_stopped_) return held_.push_back(what);
    what();
  });
}

Duration Rank::up_to(Duration longest) {
  return std::chrono::duration_cast<Duration>(longest * random_.unit());
}

void Rank::die() {
  if (!is_alive()) return;
  trace("dies");
  outcome_ = Outcome::kDied;
  ended_ = time_.now();
  is_over_ = is_gone_ = true;
  is_stopped_ = is_listening_ = false;
  network_.close_all_of(*this);
}

void Rank::stop() {
  if (is_stopped_ || !is_alive()) return;
  trace("is stopped");
  is_stopped_ = true;
}

// Continues the process, which then handles pending messages and timers in a random order.
void Rank::resume() {
  if (!is_stopped_) return;
  is_stopped_ = false;
  resumed_ = time_.now();
  trace("goes on");
  for (auto& what : std::exchange(held_, {})) {
    after(up_to(std::chrono::microseconds(200)), std::move(what));
  }
  network_.resume(*this);
}

void Rank::abort(const Error& error) {
  if (!is_alive()) return;
  if (is_stopped_) return held_.push_back([this, error] { abort(error); });
  if (is_over_) return;
  trace("aborts: " + error.message);
  if (protocol_) protocol_->abort(error);
  end(Outcome::kFailed, error);
}

void Rank::end(Outcome outcome, std::optional<Error> error) {
  is_over_ = true;
  if (outcome_ != Outcome::kNone) return;
  outcome_ = outcome;
  error_ = std::move(error);
  ended_ = time_.now();
  trace(outcome == Outcome::kEndedWell ? "ends well" : "ends: " + error_->message);
  after(up_to(std::chrono::milliseconds(2)), [this] { close_door(); });
}

void Rank::close_door() {
  is_gone_ = true;
  is_listening_ = false;
  protocol_ = nullptr;
  coordinator_ = nullptr;
  if (!streams_.empty()) {
    violation("has " + std::to_string(streams_.size()) + " connections when it is over");
  }
  streams_.clear();
  links_.clear();
  strangers_.clear();
  introductions_.clear();
  network_.close_all_of(*this);
}

// ---- joining ----

void Rank::start() {
  trace("starts");
  is_started_ = true;
  started_ = time_.now();
  after(job_.join_timeout, [this] { give_up_joining(); });
  if (rank_ == 0) {
    begin_as_coordinator();
  } else {
    try_to_join();
  }
}

void Rank::begin_as_coordinator() {
  membership::ControlSettings settings = common_settings();
  for (int rank = 0; rank < job_.size; ++rank) {
    settings.names.push_back("w" + std::to_string(rank));
  }
  settings.secret = "0123456789abcdef";
  ControlTransport& transport = *this;
  auto coordinator = std::make_unique<Coordinator>(std::move(settings), transport, time_.now());
  coordinator_ = coordinator.get();
  protocol_ = std::move(coordinator);
  is_listening_ = true;
  tolerate(true);
  observer_.on_phase(Phase::kMeeting);
  coordinator_->begin();
  tick();
  prepare();
}

// Simulates a preparation of random length, which rank 0 begins before other ranks have joined.
void Rank::prepare() {
  after(up_to(job_.longest_prepare), [this] {
    if (!is_over_) protocol_->prepared({});
  });
}

void Rank::try_to_join() {
  if (is_over_) return;
  connect(observer_.rank_to_join(), kLongestTry, [this](std::optional<End> end) {
    if (is_over_) return;
    const auto again = [this] {
      after(std::chrono::milliseconds(20) + up_to(seconds(0.5)), [this] { try_to_join(); });
    };
    if (!end) return again();
    introduce(*end, wire::HelloPurpose::kJoin, [this, again](std::optional<End> believed) {
      if (is_over_) return;
      believed ? begin_as_member(*believed) : again();
    });
  });
}

void Rank::begin_as_member(End end) {
  membership::ControlSettings settings = common_settings();
  settings.rank = rank_;
  settings.endpoint.host = "10.0.0." + std::to_string(rank_);
  settings.endpoint.port = static_cast<uint16_t>(place_);
  is_listening_ = true;
  const Link link = hold(end, 0, true);
  ControlTransport& transport = *this;
  protocol_ = std::make_unique<Member>(std::move(settings), transport, link, time_.now());
  tick();
}

membership::ControlSettings Rank::common_settings() const {
  membership::ControlSettings settings;
  settings.job = kSimulatedJob;
  settings.job_options = {{"batch", "16"}};
  settings.peer_timeout = job_.peer_timeout;
  return settings;
}

// Aborts at the join timeout. Members wait a second more, so that rank 0 can name missing ranks.
void Rank::give_up_joining() {
  if (has_gone_ || is_over_) return;
  if (rank_ != 0 && protocol_ && !std::exchange(waits_for_rank_0_, true)) {
    return after(kRank0SaysWho, [this] { give_up_joining(); });
  }
  const std::vector<int> ranks = protocol_ ? protocol_->missing() : std::vector<int>{0};
  abort(rendezvous_error(kNotAllThere, ranks.empty() ? -1 : ranks.front()));
}

void Rank::tick() {
  if (!protocol_) return;
  for (const auto& [link, stream] : streams_) {
    const bool is_deaf = bug_ == Bug::kSilenceIsNotJudged;
    protocol_->heard(link, is_deaf ? time_.now() : network_.last_heard(stream.end));
  }
  const TimePoint next = protocol_->tick(time_.now());
  if (is_over_ && next != base::kNever) violation("has a timer when it is over");
  if (next == base::kNever) return;
  after(next - time_.now() + up_to(std::chrono::milliseconds(1)), [this] { tick(); });
}

// ---- connections ----

Link Rank::hold(End end, int rank, bool is_control) {
  const Link link = next_link_++;
  streams_[link] = {end, rank, is_control};
  links_[end] = link;
  return link;
}

std::set<int> Rank::members() const {
  std::set<int> ranks;
  for (const auto& [link, stream] : streams_) {
    if (stream.is_control) ranks.insert(stream.rank);
  }
  return ranks;
}

std::optional<size_t> Rank::connection_to(int rank, bool is_control) const {
  for (const auto& [link, stream] : streams_) {
    if (stream.rank == rank && stream.is_control == is_control) return stream.end.connection;
  }
  return std::nullopt;
}

// Connects to `to`, but closes the new connection if this process has ended in the meantime.
void Rank::connect(Host& to, Duration limit, Network::OnConnected then) {
  network_.connect(*this, to, time_.now() + limit,
                   [this, then = std::move(then)](std::optional<End> end) {
                     if (is_gone_ && end) return network_.close(*end, false);
                     after(Duration::zero(), [then, end] { then(end); });
                   });
}

membership::Credentials Rank::credentials(wire::HelloPurpose purpose) const {
  const bool joins = purpose == wire::HelloPurpose::kJoin;
  return {{rank_, wire::Trust::kSameUser, 0, {}, joins ? 0 : incarnation_},
          joins ? std::string() : protocol_->secret()};
}

// Authenticates on a new connection, as membership::shake_hands_on_loop() does. Then calls `then`
// with `end`, or with nullopt if the handshake has failed.
void Rank::introduce(End end, wire::HelloPurpose purpose, Network::OnConnected then) {
  membership::Initiator initiator(credentials(purpose), purpose);
  network_.send(end, {FrameKind::kHello, 0, 0, initiator.hello()});
  introductions_.emplace(end, OutgoingHandshake{std::move(initiator), std::move(then)});
  after(kAnswers + kLastLook, [this, end] {
    const auto found = introductions_.find(end);
    if (found != introductions_.end() && !found->second.has_answered) end_introduction(end, false);
  });
}

void Rank::go_on_introducing(End end, const Message& message) {
  OutgoingHandshake& introduction = introductions_.at(end);
  try {
    if (message.kind == FrameKind::kHello) {
      const wire::Proof proof = introduction.initiator.answer(message.body);
      introduction.has_answered = true;
      after(std::max<Duration>(kAnswers, job_.peer_timeout) + kLastLook,
            [this, end] { end_introduction(end, false); });
      return network_.send(end, {FrameKind::kProof, 0, 0, wire::Bytes(proof.begin(), proof.end())});
    }
    if (message.kind != FrameKind::kProof) wire::Reader::fail("a frame out of place");
    introduction.initiator.check(message.body);
    end_introduction(end, true);
  } catch (const base::Exception&) {
    end_introduction(end, false);
  }
}

void Rank::end_introduction(End end, bool is_believed) {
  const auto found = introductions_.find(end);
  if (found == introductions_.end()) return;
  const Network::OnConnected then = std::move(found->second.then);
  introductions_.erase(found);
  if (!is_believed) network_.close(end, false);
  then(is_believed ? std::optional(end) : std::nullopt);
}

// Handles a connection of a process that has not proved its identity. This function and those
// below, up to refuse(), simulate membership::Acceptor.
void Rank::on_connection(End end) {
  strangers_.emplace(end, Stranger{});
  const auto show_the_door = [this, end] {
    const auto stranger = strangers_.find(end);
    if (stranger == strangers_.end() || stranger->second.is_believed) return;
    strangers_.erase(stranger);
    network_.close(end, false);
  };
  after(kDoorTimeout, [this, show_the_door] { after(kLastLook, show_the_door); });
}

void Rank::on_message(End end, const Message& message) {
  if (introductions_.contains(end)) return go_on_introducing(end, message);
  if (!strangers_.contains(end)) {
    const auto link = links_.find(end);
    if (link != links_.end()) receive(link->second, message);
    return;
  }
  try {
    hear_stranger(end, message);
  } catch (const base::Exception& e) {
    refuse(end, e.error());
  }
}

void Rank::hear_stranger(End end, const Message& message) {
  Stranger& stranger = strangers_.at(end);
  if (stranger.is_believed) {
    if (message.kind != FrameKind::kJoin) wire::Reader::fail("a frame out of place");
    const int rank = stranger.responder->other().rank;
    strangers_.erase(end);
    if (auto refusal = admit_member(end, rank, message)) refuse(end, *refusal);
    return;
  }
  if (!stranger.responder) {
    if (message.kind != FrameKind::kHello) wire::Reader::fail("a frame out of place");
    const wire::Hello hello = wire::decode_hello(message.body);
    const bool joins = hello.purpose == wire::HelloPurpose::kJoin;
    if (!protocol_ || (joins ? coordinator_ == nullptr : protocol_->secret().empty())) {
      wire::Reader::fail("a connection that nobody expects");
    }
    stranger.responder.emplace(credentials(hello.purpose), hello);
    return network_.send(end, {FrameKind::kHello, 0, 0, stranger.responder->hello()});
  }
  if (message.kind != FrameKind::kProof) wire::Reader::fail("a frame out of place");
  const wire::Proof proof = stranger.responder->check(message.body);
  network_.send(end, {FrameKind::kProof, 0, 0, wire::Bytes(proof.begin(), proof.end())});
  stranger.is_believed = true;
  if (stranger.responder->other().purpose == wire::HelloPurpose::kJoin) return;
  const wire::Hello hello = stranger.responder->other();
  strangers_.erase(end);
  const auto refusal = admit_peer(end, hello.rank, hello.incarnation);
  if (!refusal) return;
  observer_.on_refused(*this, hello.rank, hello.incarnation, *refusal);
  refuse(end, *refusal);
}

std::optional<Error> Rank::admit_peer(End end, int rank, uint32_t incarnation) {
  if (!protocol_) return rendezvous_error("this rank is leaving");
  if (auto refusal = protocol_->check_peer(rank, incarnation)) return refusal;
  return accept(rank, end);
}

std::optional<Error> Rank::admit_member(End end, int rank, const Message& join) {
  if (!protocol_) return rendezvous_error("this rank is leaving");
  if (coordinator_ == nullptr) return rendezvous_error("only rank 0 can be joined");
  const Link link = hold(end, rank, true);
  if (auto refusal = coordinator_->join(link, rank, wire::decode_join(join.body), time_.now())) {
    streams_.erase(link);
    links_.erase(end);
    return refusal;
  }
  return std::nullopt;
}

void Rank::refuse(End end, const Error& why) {
  trace("refuses: " + why.message);
  strangers_.erase(end);
  network_.send(end, {FrameKind::kReject, 0, 0, wire::encode(why)});
  network_.close(end, true);
}

void Rank::receive(Link link, const Message& message) {
  const Stream from = streams_.at(link);
  if (from.is_control) {
    if (!protocol_) return;
    Message heard = message;
    if (bug_ == Bug::kAccuserIsBlamed && heard.kind == FrameKind::kLost &&
        coordinator_ != nullptr) {
      heard.a = static_cast<uint64_t>(from.rank);
      heard.body = wire::encode(Error{ErrorKind::kPeerLost, "it is lost", from.rank, {}});
    }
    protocol_->receive(link, heard);
    const bool is_twice = bug_ == Bug::kRoundIsCountedTwice && coordinator_ != nullptr;
    if (is_twice && heard.kind == FrameKind::kFlush) protocol_->receive(link, heard);
    return;
  }
  switch (message.kind) {
    case FrameKind::kHeartbeat:
      return;
    case FrameKind::kAbort:
    case FrameKind::kLeave:
    case FrameKind::kReject:
      if (protocol_) protocol_->receive(link, message);
      return;
    case FrameKind::kCall:
      return static_cast<Rank&>(network_.host_of(from.end.other())).call_has_come(from.end.other());
    default:
      if (protocol_) {
        protocol_->report(from.rank,
                          {ErrorKind::kProtocol, "malformed: a frame out of place", from.rank, {}});
      }
  }
}

void Rank::on_end(End end, const Error& error) {
  if (strangers_.erase(end) > 0) return;
  if (introductions_.contains(end)) return end_introduction(end, false);
  const auto found = links_.find(end);
  if (found == links_.end()) return;
  const Link link = found->second;
  const Stream stream = streams_.at(link);
  links_.erase(found);
  streams_.erase(link);
  if (protocol_) protocol_->closed(link, error);
  if (!stream.is_control) peers_[static_cast<size_t>(stream.rank)].state = PeerState::kGone;
}

}  // namespace distrain::fake_network
