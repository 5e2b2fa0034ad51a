#include "control_plane.h"

#include <algorithm>

namespace distrain::membership {
namespace {

constexpr auto kProofTimeout = std::chrono::seconds(2);  // for a connection's proof of identity
constexpr auto kLoopTimeout = std::chrono::seconds(1);   // for an answer of the loop thread

// Listens at the unix socket at which ranks of this host try to join.
net::Fd listen_at_meeting(const std::string& name) {
  auto socket = net::listen_unix(name);
  if (socket.ok()) return std::move(socket.unchecked());
  throw Exception(rendezvous_error(
      "a job of this user with the same id and port meets on this host: each needs a --job-id or a "
      "--master-port of its own (" +
          socket.error().message + ")",
      0));
}

// Returns the hash of Options::job_id. If it is empty, rank 0 uses a random id, other ranks zero.
wire::JobId own_job_id(const Options& options) {
  wire::JobId id{};
  if (!options.job_id.empty()) return job_id_of(options.job_id);
  if (options.rank == 0) fill_random(id);
  return id;
}

}  // namespace

ControlPlane::ControlPlane(net::Loop& loop, const Options& options, Callbacks callbacks)
    : loop_(loop),
      options_(options),
      callbacks_(std::move(callbacks)),
      host_key_(options.transport == "tcp" ? std::string() : net::host_key()),
      unix_name_(!options.rank_0_unix_name.empty() && options.rank == 0 ? options.rank_0_unix_name
                 : host_key_.empty()                                    ? std::string()
                                                                        : new_unix_name()),
      acceptor_(std::make_shared<Acceptor>(
          loop, kProofTimeout,
          Acceptor::Callbacks{std::bind_front(&ControlPlane::credentials_on_loop, this),
                              std::bind_front(&ControlPlane::admit_on_loop, this),
                              std::bind_front(&ControlPlane::note_refused_on_loop, this)})),
      port_(options.master_port),
      initial_identity_{options.rank,
                        !options.token.empty() ? wire::Trust::kToken
                        : options.insecure     ? wire::Trust::kAnybody
                                               : wire::Trust::kSameUser,
                        options.generation.value_or(options.rank == 0 ? 0 : wire::kAnyGeneration),
                        own_job_id(options)},
      identity_(initial_identity_),
      refusals_(options.names.size()) {
  set_up_openssl();
  if (options.rank != 0) return;
  const std::string& only = options.rank_0_unix_name;
  rank_0_socket_ = options.listen_fd >= 0 ? net::Fd(options.listen_fd)
                   : !only.empty()        ? listen_at_meeting(only)
                                   : listen_as_rank_0(options.listen_addr, options.master_addr,
                                                      options.master_port, options.ports);
  port_ = net::local_name(rank_0_socket_.get()).port;
  if (!meeting_name().empty()) meeting_socket_ = listen_at_meeting(meeting_name());
}

// ---- for other threads ----

base::Future<uint64_t> ControlPlane::enter_round(uint64_t round, uint64_t number) {
  base::Promise<uint64_t> entered;
  base::Future<uint64_t> sum = entered.future();
  // Sets round_began_ before the post, so that wait() shows the round as soon as this call returns.
  round_began_ = base::Clock::now();
  loop_.post([self = shared_from_this(), round, number, entered = std::move(entered)]() mutable {
    self->round_ = std::move(entered);
    if (self->rounds_failed_) return self->fail_rounds_on_loop(*self->rounds_failed_);
    if (self->protocol_ && self->protocol_->is_running()) {
      return self->protocol_->enter_round(round, number);
    }
    self->take_round_on_loop()->fail(
        {ErrorKind::kInvalid, "this rank has not joined", self->options_.rank});
  });
  return sum;
}

std::vector<int> ControlPlane::missing() {
  base::Promise<std::vector<int>> asked;
  const base::Future<std::vector<int>> answer = asked.future();
  loop_.post([self = shared_from_this(), asked = std::move(asked)]() mutable {
    asked.set(self->protocol_ ? self->protocol_->missing() : std::vector<int>{0});
  });
  const bool is_answered = answer.wait_until(base::deadline_after(kLoopTimeout));
  return is_answered && answer.wait_result().ok() ? answer.wait() : std::vector<int>{};
}

std::optional<Wait> ControlPlane::wait() {
  const base::TimePoint round_began = round_began_;
  const bool is_ending = round_began != base::TimePoint{};
  const base::TimePoint since = is_ending ? round_began : began_.load();
  if (since == base::TimePoint{}) return std::nullopt;
  const std::vector<int> ranks = missing();
  const std::string who = ranks.empty() ? "the others" : "rank " + list_ranks(ranks);
  return Wait{
      is_ending ? "the end of " + who : who + (ranks.empty() ? ", to be ready" : " to join"),
      since};
}

void ControlPlane::abort(const Error& error) {
  loop_.post([self = shared_from_this(), error] {
    self->is_leaving_ = true;
    // True between two attempts to join: the last attempt has failed, so `protocol_` cannot abort.
    const bool is_put_off =
        self->protocol_ && self->protocol_->is_over() && !self->directory_known_.future().done();
    if (self->protocol_ && !is_put_off) {
      self->protocol_->abort(error);
    } else {
      self->on_failed(error);
      if (self->joining_stream_) self->joining_stream_->close(false);
    }
    self->fail_rounds_on_loop(self->left_already());
  });
}

void ControlPlane::close() {
  acceptor_->close();
  loop_.post([self = shared_from_this()] {
    self->is_leaving_ = true;
    if (!self->ready_.future().done()) {  // ends run() or reserve_rank()
      self->on_failed(
          Error{ErrorKind::kCancelled, "this rank is shutting down", self->options_.rank, "join"});
    }
    self->is_closed_ = true;
    self->coordinator_ = nullptr;
    self->protocol_ = nullptr;
    if (self->joining_stream_) self->joining_stream_->close(false);
    for (const auto& [link, stream] : std::exchange(self->streams_, {})) stream->close();
    self->fail_rounds_on_loop(self->left_already());
  });
}

base::Future<void> ControlPlane::tolerate(Tolerance tolerance) {
  base::Promise<void> promise;
  base::Future<void> done = promise.future();
  loop_.post([self = shared_from_this(), tolerance = std::move(tolerance),
              promise = std::move(promise)]() mutable {
    if (self->coordinator_) self->coordinator_->tolerate(std::move(tolerance));
    promise.set();
  });
  return done;
}

// ---- connections, on the loop ----

void ControlPlane::send(Link link, Message message) {
  const auto stream = streams_.find(link);
  if (stream == streams_.end()) return;
  net::OutFrame frame;
  frame.header.kind = message.kind;
  frame.header.call_id = message.a;
  frame.header.context_id = message.b;
  frame.shared_meta = message.body.shared();
  static_cast<void>(stream->second->send(std::move(frame)));  // on_close reports errors
}

net::Stream::Handler ControlPlane::watch_peer_on_loop(int rank, const net::StreamPtr& stream,
                                                      net::Stream::Handler handler) {
  const Link link = add_on_loop(stream);
  if (protocol_) {
    protocol_->open(rank, link, base::Clock::now(), stream->peer_name() == "unix");
  } else {
    close(link, false);
  }
  handler.on_frame = [self = shared_from_this(), link,
                      of_calls = std::move(handler.on_frame)](net::InFrame frame) {
    switch (frame.header.kind) {
      case FrameKind::kHeartbeat:
        return;
      case FrameKind::kAbort:
      case FrameKind::kLeave:
      case FrameKind::kReject:
        return self->receive_on_loop(link, frame);
      default:
        of_calls(std::move(frame));
    }
  };
  return watched(link, std::move(handler));
}

std::optional<Error> ControlPlane::admit_on_loop(const net::StreamPtr& stream,
                                                 Acceptor::AuthenticatedPeer peer) {
  if (!protocol_) return rendezvous_error("this rank is leaving");
  if (peer.purpose == wire::HelloPurpose::kJoin) {
    const int rank = peer.rank;
    auto refusal = admit_member_on_loop(stream, peer);
    const bool is_final = refusal && refusal->kind != ErrorKind::kOverloaded;
    if (is_final && !directory_known_.future().done()) note_refused_on_loop(rank, stream, *refusal);
    return refusal;
  }
  if (auto refusal = protocol_->check_peer(peer.rank, peer.incarnation)) return refusal;
  return callbacks_.on_peer(peer.rank, peer.purpose, stream);
}

std::optional<Error> ControlPlane::admit_member_on_loop(const net::StreamPtr& stream,
                                                        Acceptor::AuthenticatedPeer& peer) {
  if (!coordinator_) return rendezvous_error("only rank 0 can be joined");
  if (peer.rank == wire::kUnassignedRank) return reserve_rank_on_loop(stream, peer.join);
  const int rank = peer.rank;
  // If this member has not sent its address, other ranks use the address that rank 0 sees. If that
  // is loopback or a unix socket, the member is on rank 0's host, so they use rank 0's address.
  const std::string& seen = stream->peer_name();
  const size_t colon = seen.rfind(':');
  const std::string host = colon == std::string::npos ? "" : seen.substr(0, colon);
  std::string& said = peer.join.endpoint.host;
  if (said.empty() && !host.empty() && !net::is_loopback(host)) said = host;
  const Link link = add_on_loop(stream);
  const std::string before = std::exchange(seen_hosts_[rank], host);
  if (auto refusal = coordinator_->join(link, rank, std::move(peer.join), base::Clock::now())) {
    seen_hosts_[rank] = before;
    if (before.empty()) seen_hosts_.erase(rank);  // limits the map: a peer may claim any rank
    streams_.erase(link);
    note_closed_on_loop();
    return refusal;
  }
  stream->set_limits_on_loop(wire::kControlLimits);
  stream->set_handler_on_loop(control_handler(link));
  std::lock_guard lock(mutex_);
  refusals_.forget(rank);
  return std::nullopt;
}

std::optional<Error> ControlPlane::reserve_rank_on_loop(const net::StreamPtr& stream,
                                                        const wire::Join& join) {
  const Link link = add_on_loop(stream);
  if (auto refusal = coordinator_->reserve_rank(link, join, base::Clock::now())) {
    streams_.erase(link);
    note_closed_on_loop();
    return refusal;
  }
  // The process with the reservation sends nothing. If it closes the stream, the reservation ends.
  stream->set_handler_on_loop(watched(link, {[](const net::InFrame&) {},
                                             [self = shared_from_this(), link](const Error&) {
                                               if (self->coordinator_)
                                                 self->coordinator_->release_reservation(link);
                                             }}));
  return std::nullopt;
}

void ControlPlane::note_refused_on_loop(int rank, const net::StreamPtr& stream, Error why) {
  const std::string& where = stream->peer_name();
  const std::string reason = why.message;
  why.rank = rank;
  why.message = "refused " + rank_text(rank) + " from " + (where == "unix" ? "this host" : where) +
                ": " + reason;
  std::unique_lock lock(mutex_);
  const bool is_new = refusals_.add(rank, reason, why.message);
  lock.unlock();
  if (is_new && options_.on_refused) options_.on_refused(why);
}

// Returns `entry` with its endpoint changed to one that this rank can connect to.
wire::Directory::Entry ControlPlane::reachable(int rank, wire::Directory::Entry entry) const {
  wire::Endpoint& address = entry.endpoint;
  if (host_key_.empty() || address.host_key != host_key_) address.unix_name.clear();
  if (options_.transport == "unix") {
    address.host.clear();
    return entry;
  }
  if (rank == 0) address.port = options_.master_port;
  const auto seen = seen_hosts_.find(rank);
  const bool is_seen = seen != seen_hosts_.end() && !seen->second.empty();
  const std::string& known = is_seen ? seen->second : rank_0_host_;
  if (address.host.empty()) address.host = known;
  // A link-local address ends with a zone, an interface of the peer's host. Uses this host's zone.
  const size_t theirs = address.host.find('%'), own = known.find('%');
  if (theirs != std::string::npos && own != std::string::npos) {
    address.host.replace(theirs, std::string::npos, known, own);
  }
  return entry;
}

void ControlPlane::authenticate_on_loop(int rank, wire::HelloPurpose purpose,
                                        const net::StreamPtr& stream,
                                        std::function<void(base::Status believed)> done) {
  const auto credentials = credentials_on_loop(purpose);
  if (!credentials) {
    stream->close(false);
    return done(left_already());
  }
  shake_hands_on_loop(loop_, stream, *credentials, purpose, handshake_timeouts(),
                      [self = shared_from_this(), rank, stream,
                       done = std::move(done)](const base::Result<wire::Hello>& other) {
                        if (!other.ok()) return done(other.error());
                        const wire::Hello& hello = other.unchecked();
                        const bool is_it = hello.rank == rank;
                        if (is_it && self->protocol_ &&
                            hello.incarnation == self->protocol_->entry(rank).incarnation) {
                          return done(base::Unit{});
                        }
                        stream->close(false);
                        // If another process of `rank` answers, rank 0 will report the lost one.
                        done(Error{is_it ? ErrorKind::kPeerLost : ErrorKind::kAuth,
                                   "rank " + std::to_string(hello.rank) + " is there" +
                                       (is_it ? ", but another process of it" : ""),
                                   rank});
                      });
}

void ControlPlane::tick_on_loop(uint64_t attempt) {
  if (!protocol_ || attempt != attempt_) return;
  for (const auto& [link, stream] : streams_) protocol_->heard(link, stream->last_heard_on_loop());
  const base::TimePoint next = protocol_->tick(base::Clock::now());
  if (next == base::kNever) return;
  loop_.call_at(next, [weak = weak_from_this(), attempt] {
    if (const auto self = weak.lock()) self->tick_on_loop(attempt);
  });
}

// ---- ControlTransport ----

void ControlPlane::on_directory(const wire::Directory& directory) {
  const auto& ranks = directory.ranks;
  const wire::Directory::Entry& own = ranks[static_cast<size_t>(options_.rank)];
  identity_.incarnation = own.incarnation;
  cpu_sharers_ = static_cast<int>(std::ranges::count_if(ranks, [&](const auto& entry) {
    return entry.is_here && entry.endpoint.cpus == own.endpoint.cpus;
  }));
  wire::Directory known = directory;
  for (int rank = 0; rank < static_cast<int>(ranks.size()); ++rank) {
    if (rank == options_.rank) continue;
    wire::Directory::Entry& entry = known.ranks[static_cast<size_t>(rank)];
    entry = reachable(rank, std::move(entry));
    if (!entry.endpoint.unix_name.empty() || !entry.endpoint.host.empty()) continue;
    loop_.post([self = shared_from_this(), rank] {
      if (!self->protocol_) return;
      self->protocol_->abort(rendezvous_error(
          "--transport unix: rank " + std::to_string(rank) + " is not on this host", rank));
    });
  }
  callbacks_.on_directory(known);
  directory_known_.set();
}

void ControlPlane::on_go(std::vector<wire::RankDevices> devices) {
  std::vector<std::string> names;
  for (const auto& entry : protocol_->directory().ranks) names.push_back(entry.name);
  callbacks_.on_go(std::move(names), std::move(devices));
  began_ = base::TimePoint{};
  ready_.set();
}

void ControlPlane::on_failed(const Error& error) {
  Error reported = error;
  if (reported.op.empty()) reported.op = "join";
  if (joining_ && reported.kind == ErrorKind::kRendezvous) {
    reported.message = "rank 0 at " + rank_0_text() + " refuses this rank: " + reported.message;
  }
  if (is_put_off_on_loop(error)) {
    loop_.post([self = shared_from_this()] { self->protocol_ = nullptr; });  // protocol_ runs now
    if (reported.kind == ErrorKind::kRendezvous) reported.kind = ErrorKind::kOverloaded;
    return finish_joining_on_loop(reported);
  }
  is_closed_ = true;
  began_ = base::TimePoint{};
  directory_known_.fail(reported);
  if (callbacks_.on_failed) callbacks_.on_failed(reported);
  ready_.fail(reported);
  finish_joining_on_loop(reported);
}

void ControlPlane::on_returned(int rank, const wire::RankDevices& devices) {
  const wire::Directory::Entry& entry = protocol_->entry(rank);
  try {
    callbacks_.on_new_devices(rank, devices);
  } catch (const Exception& e) {
    // Rank 0 declares the new process lost, because its devices do not fit the other ranks'.
    if (coordinator_)
      loop_.post([self = shared_from_this(), rank, error = e.error()] {
        self->report_on_loop(rank, error);
      });
  }
  callbacks_.on_returned(rank, reachable(rank, entry));
}

}  // namespace distrain::membership
