// The part of ControlPlane that joins the job, until all ranks accept calls.
#include <algorithm>
#include <utility>

#include <unistd.h>

#include "control_plane.h"
#include "control_protocol.h"
#include "distrain/base/process.h"

namespace distrain::membership {
namespace {

constexpr base::Duration kWaitingInterval = std::chrono::seconds(5);
constexpr base::Duration kFirstWait = std::chrono::seconds(1);  // before rank 0's first report
constexpr auto kFirstRetry = std::chrono::milliseconds(20);
constexpr auto kLongestRetry = std::chrono::milliseconds(500);
constexpr auto kShortestTry = std::chrono::seconds(1);  // a shorter try does not change the reason
constexpr auto kRank0Grace = std::chrono::seconds(1);   // extra wait for rank 0's error
constexpr base::Duration kAnswers = std::chrono::seconds(5);  // timeout for a peer's hello
constexpr char kThisHost[] = "127.0.0.1";
constexpr char kWhereToLook[] =
    "; rank 0 is not there yet, or has failed: see its output, and whether --master-addr and "
    "--master-port (MASTER_ADDR and MASTER_PORT) are the same on all ranks";
// Practically infinite, but small enough that adding it to a time point does not overflow.
constexpr base::Duration kForEver = std::chrono::hours(24 * 365);

// Errors after which this rank retries: rank 0 does not answer, or has no free rank.
constexpr ErrorKind kTryAgain = ErrorKind::kPeerLost;
constexpr ErrorKind kNoPlace = ErrorKind::kOverloaded;

// Returns true if `host` means all interfaces, so other ranks cannot connect to it.
bool is_wildcard(const std::string& host) {
  return host.empty() || host == "0.0.0.0" || host == "::" || host == "*";
}

// Throws `invalid` if the encoded options exceed the size of a join message.
void check_options(const std::map<std::string, std::string>& options) {
  size_t bytes = 0;
  for (const auto& [name, value] : options) bytes += name.size() + value.size() + 8;
  constexpr size_t kMost = wire::kJoinLimits.max_meta_bytes / 2;  // the other fields are short
  if (bytes <= kMost) return;
  base::invalid("the options that ranks have to agree on take " + std::to_string(bytes) +
                " bytes, not at most " + std::to_string(kMost));
}

}  // namespace

void ControlPlane::run(const std::function<wire::RankDevices()>& prepare) {
  begin_once();
  const base::TimePoint deadline = base::deadline_after(options_.join_timeout);
  if (options_.rank == 0) {
    begin_as_coordinator();
    own_devices_ = prepare();
    began_ = base::Clock::now();
  } else {
    began_ = base::Clock::now();
    begin_as_member(deadline);
  }
  // Other ranks wait longer than rank 0, because only rank 0's error names the missing ranks.
  const bool may_wait = options_.rank != 0 && deadline < base::kNever - kRank0Grace;
  wait_until_ready(may_wait ? deadline + kRank0Grace : deadline, prepare);
}

void ControlPlane::begin_as_coordinator() {
  if (options_.rank_0_unix_name.empty()) listen_by_unix_socket();
  const std::string host = net::local_name(rank_0_socket_.get()).host;
  if (!is_wildcard(options_.listen_addr)) listen_host_ = host;
  if (!host.empty() && net::is_loopback(host)) {
    hint_ = "; rank 0 listens on " + host +
            ", which only this host reaches: if ranks run on other hosts, give all ranks an "
            "address of this host that those reach (--master-addr)";
  }
  if (options_.rank_0_unix_name.empty()) rank_0_host_ = is_wildcard(host) ? kThisHost : host;
  loop_.post([self = shared_from_this()] {
    if (self->is_closed_) return;
    ControlTransport& transport = *self;
    auto coordinator =
        std::make_unique<Coordinator>(self->settings(), transport, base::Clock::now());
    self->coordinator_ = coordinator.get();
    self->begin_on_loop(std::move(coordinator));
    self->coordinator_->begin();
  });
  // Listens only now, because waiting ranks connect at once and need the coordinator.
  if (meeting_socket_.valid()) acceptor_->listen(std::move(meeting_socket_));
  acceptor_->listen(std::move(rank_0_socket_));
}

void ControlPlane::begin_as_member(base::TimePoint deadline) {
  check_options(options_.job_options);
  base::TimePoint next_report = base::Clock::now() + kWaitingInterval;
  auto pause = std::chrono::duration_cast<base::Duration>(kFirstRetry);
  const base::Future<void> ready = ready_.future();
  std::optional<Error> why;
  for (;;) {
    const base::TimePoint soonest = base::Clock::now() + kShortestTry;
    const bool has_time = soonest < deadline;
    const base::TimePoint connected_by = std::min(deadline, std::max(next_report, soonest));
    const base::Status joined = try_to_join(connected_by, deadline);
    if (joined.ok()) return;
    if (ready.done()) ready.wait();  // throws, because the join was aborted
    const ErrorKind kind = joined.error().kind;
    if (kind != kTryAgain && kind != kNoPlace) throw Exception(joined.error());
    const base::TimePoint now = base::Clock::now();
    const bool is_first = !why;
    if (is_first || has_time) why = joined.error();
    const bool is_unknown = why->op == net::kResolve;
    std::string reason = why->message;
    if (why->kind == kTryAgain) {
      reason += is_unknown ? "; check --master-addr (MASTER_ADDR)" : kWhereToLook;
    }
    if (now >= deadline) {
      const std::string what = why->kind == kTryAgain ? "was not found" : "had no free place";
      throw Exception(rendezvous_error(
          "rank 0 " + what + " within the join timeout (--join-timeout): " + reason, 0));
    }
    // Reports an unknown host name at once, because it may be misspelled, but still retries.
    if (now >= next_report || (is_unknown && is_first)) {
      if (options_.on_waiting) options_.on_waiting({0}, rank_0_text(), reason);
      next_report = now + kWaitingInterval;
    }
    if (ready.wait_until(now + std::min(pause, deadline - now))) ready.wait();
    pause = std::min(pause * 2, std::chrono::duration_cast<base::Duration>(kLongestRetry));
  }
}

base::Result<net::Fd> ControlPlane::connect_to_rank_0(base::TimePoint connected_by) const {
  if (!options_.rank_0_unix_name.empty()) return net::connect_unix(options_.rank_0_unix_name);
  if (const std::string name = meeting_name(); !name.empty()) {
    // If another user's process listens at this name, tries TCP instead.
    auto socket = net::connect_unix(name);
    if (socket.ok() && net::peer_user(socket.unchecked().get()) == geteuid()) return socket;
  }
  return net::connect_tcp(options_.master_addr, options_.master_port, connected_by);
}

base::Status ControlPlane::try_to_join(base::TimePoint connected_by, base::TimePoint deadline) {
  base::Result<net::Fd> socket = connect_to_rank_0(connected_by);
  if (!socket.ok()) {
    Error error = socket.error();
    if (error.kind == ErrorKind::kRendezvous) error.kind = kTryAgain;
    return error;
  }
  if (options_.rank != wire::kUnassignedRank) listen_as_member(socket.unchecked());
  base::Promise<void> met;
  const base::Future<void> told = met.future();
  const net::StreamPtr stream = net::adopt_socket(loop_, socket.unchecked().release());
  loop_.post([self = shared_from_this(), stream, met = std::move(met)]() mutable {
    self->meet_rank_0_on_loop(stream, std::move(met));
  });
  if (told.wait_until(deadline)) return told.wait_result();
  return Error{kTryAgain, rank_0_text() + ": it does not answer", 0};
}

// Listens for other ranks. A retry does nothing, because the first attempt already listens.
void ControlPlane::listen_as_member(const net::Fd& to_rank_0) {
  if (std::exchange(listens_, true)) return;
  listen_by_unix_socket();
  if (!options_.rank_0_unix_name.empty()) return;
  rank_0_host_ = net::remote_name(to_rank_0.get()).host;
  const bool is_same_host = rank_0_host_.empty();  // empty for a unix socket
  const std::string& given = options_.listen_addr;
  std::string host = given.empty() ? net::local_name(to_rank_0.get()).host : given;
  if (host.empty()) {
    const auto as_rank_0 = net::host_to_bind(options_.master_addr);
    if (as_rank_0.ok()) host = as_rank_0.unchecked();
  }
  net::Fd own = std::move(net::listen_tcp(host, options_.ports).value());
  const net::SocketName name = net::local_name(own.get());
  port_ = name.port;
  const bool is_for_all = is_wildcard(name.host);
  if (is_same_host) rank_0_host_ = is_for_all ? kThisHost : name.host;
  if (is_same_host ? !is_for_all : !is_wildcard(given)) listen_host_ = name.host;
  acceptor_->listen(std::move(own));
}

void ControlPlane::meet_rank_0_on_loop(const net::StreamPtr& stream, base::Promise<void> met) {
  if (is_closed_) {
    stream->close(false);
    met.fail(left_already());
    return;
  }
  joining_stream_ = stream;
  joining_ = std::move(met);
  identity_ = initial_identity_;
  shake_hands_on_loop(loop_, stream, {identity_, options_.token}, wire::HelloPurpose::kJoin,
                      handshake_timeouts(),
                      [self = shared_from_this(), stream](const base::Result<wire::Hello>& rank_0) {
                        self->joining_stream_ = nullptr;
                        base::Status joins = base::Unit{};
                        if (rank_0.ok()) {
                          joins = self->join_on_loop(stream, rank_0.unchecked());
                        } else {
                          Error error = rank_0.error();
                          const bool is_strange = error.kind == ErrorKind::kProtocol;
                          error.message = self->rank_0_text() + ": " + error.message +
                                          (is_strange ? ": another program may listen there" : "");
                          joins = Error{error.kind, error.message, 0, "join"};
                        }
                        if (joins.ok()) return;  // rank 0 will answer
                        stream->close();
                        self->finish_joining_on_loop(joins);
                      });
}

// Returns true if this rank retries to join after `error`, because rank 0 may admit it later. Only
// processes without a rank and those with Options::rejoins retry.
bool ControlPlane::is_put_off_on_loop(const Error& error) const {
  const bool is_gone = error.kind == kTryAgain;
  const bool may_pass = options_.rank == wire::kUnassignedRank
                            ? is_gone || error.kind == kNoPlace
                            : options_.rejoins && (is_gone || error.kind == ErrorKind::kRendezvous);
  return may_pass && joining_ && !is_leaving_;
}

// Sends the join on a connection whose other end has proved its identity.
base::Status ControlPlane::join_on_loop(const net::StreamPtr& stream, const wire::Hello& rank_0) {
  if (is_closed_) return left_already();
  if (rank_0.rank != 0) {
    return rendezvous_error(rank_0_text() + " is rank " + std::to_string(rank_0.rank) +
                                ": --master-addr and --master-port have to be rank 0's",
                            0);
  }
  if (identity_.generation != wire::kAnyGeneration && rank_0.generation < identity_.generation) {
    return Error{kNoPlace,
                 "rank 0 there is still of generation " + std::to_string(rank_0.generation), 0};
  }
  if (auto why = mismatch(identity_, rank_0)) return *why;
  identity_.job_id = rank_0.job_id;
  identity_.generation = rank_0.generation;
  const Link link = add_on_loop(stream);
  stream->set_limits_on_loop(wire::kControlLimits);
  stream->set_handler_on_loop(control_handler(link));
  ControlTransport& transport = *this;
  begin_on_loop(std::make_unique<Member>(settings(), transport, link, base::Clock::now()));
  return base::Unit{};
}

void ControlPlane::wait_until_ready(base::TimePoint deadline,
                                    const std::function<wire::RankDevices()>& prepare) {
  const base::Future<void> met = directory_known_.future();
  const base::Future<void> ready = ready_.future();
  bool is_prepared = false;
  // A launcher, which sets `listen_fd`, reports ranks that fail. Without a launcher, only rank 0
  // can report missing ranks, so its first report comes early, after kFirstWait.
  auto pause = options_.rank == 0 && options_.listen_fd < 0 ? kFirstWait : kWaitingInterval;
  for (;; pause = kWaitingInterval) {
    const base::Future<void>& next = is_prepared ? ready : met;
    if (next.wait_until(std::min(deadline, base::Clock::now() + pause))) {
      next.wait();  // throws if joining has failed
      if (is_prepared) return;
      if (ready.done()) ready.wait();  // throws after close()
      if (options_.on_cpus_shared) options_.on_cpus_shared(cpu_sharers_);
      if (options_.rank != 0) own_devices_ = prepare();
      loop_.post([self = shared_from_this(), devices = own_devices_]() mutable {
        if (self->protocol_) self->protocol_->prepared(std::move(devices));
      });
      is_prepared = true;
      continue;
    }
    const std::vector<int> ranks = missing();
    std::string why = options_.rank == 0 ? "" : "rank 0 waits for others: its output names them";
    if (options_.rank == 0 && !is_prepared) why = why_missing(ranks);
    if (base::Clock::now() >= deadline) {
      Error error =
          rendezvous_error("not all ranks were there within the join timeout (--join-timeout)" +
                               (ranks.empty() ? "" : "; missing: " + list_ranks(ranks)) +
                               (why.empty() ? "" : "; " + why),
                           ranks.empty() ? -1 : ranks.front());
      abort(error);
      throw Exception(std::move(error));
    }
    // Only rank 0 knows which ranks are missing, so other ranks report that they wait for rank 0.
    const auto& waited_for = options_.rank == 0 ? ranks : std::vector<int>{0};
    if (options_.on_waiting && !waited_for.empty()) {
      options_.on_waiting(waited_for, rank_0_text(), why);
    }
  }
}

// Returns why `ranks` are missing: rank 0 refused some, the others have not connected.
std::string ControlPlane::why_missing(std::vector<int> ranks) {
  std::lock_guard lock(mutex_);
  const std::string why = refusals_.text();
  std::erase_if(ranks, [this](int rank) { return refusals_.has(rank); });
  if (ranks.empty()) return why;
  const bool is_one = ranks.size() == 1;
  return why + (why.empty() ? "" : "; ") + (is_one ? "rank " : "ranks ") + list_ranks(ranks) +
         (is_one ? " has not connected: see its" : " have not connected: see their") + " output" +
         hint_;
}

ControlSettings ControlPlane::settings() const {
  ControlSettings settings{
      options_, {listen_host_, port_, unix_name_, host_key_, base::available_cpus().key}, {}};
  if (options_.rank == 0) settings.secret = random_bytes(32);
  // Rank 0 sends no heartbeats on a connection that only reserves a rank, so there is no timeout.
  const bool judges = options_.rank != wire::kUnassignedRank;
  settings.peer_timeout = judges ? std::min<base::Duration>(options_.peer_timeout, kForEver)
                                 : std::chrono::nanoseconds(0);
  return settings;
}

// Returns timeouts. The proof's timeout is at least `peer_timeout`: see HandshakeTimeouts.
HandshakeTimeouts ControlPlane::handshake_timeouts() const {
  const bool judges = options_.peer_timeout > std::chrono::nanoseconds::zero();
  const auto silence = std::min<base::Duration>(options_.peer_timeout, kForEver);
  return {kAnswers, judges ? std::max(kAnswers, silence) : kForEver};
}

}  // namespace distrain::membership
