#include "rendezvous.h"

#include <algorithm>
#include <cstdlib>
#include <thread>

#include <unistd.h>

#include "device_table.h"
#include "list_ranks.h"
#include "rendezvous_frames.h"

namespace distrain::rpc {

namespace {

using base::Error;
using base::ErrorKind;

constexpr auto kWaitingInterval = std::chrono::seconds(5);
constexpr auto kFirstRetry = std::chrono::milliseconds(20);
constexpr auto kLongestRetry = std::chrono::milliseconds(500);
constexpr auto kLastWords = std::chrono::seconds(5);  // of a rank that cannot be reached
// All listen when they are told of each other, and a kernel answers for a process that is busy: who
// has not been reached by then is behind something that drops what is sent to it.
constexpr auto kLongestReach = std::chrono::seconds(20);

// The interface that rank 0 listens on: the one that --master-addr names. A name that means this
// machine's loopback only here (Debian's /etc/hosts has 127.0.1.1) must be reachable from outside.
std::string master_bind_host(const AgentOptions& options) {
  if (!options.listen_addr.empty()) return options.listen_addr;
  const std::string& host = options.master_addr;
  if (host == "localhost" || host.starts_with("127.") || host == "::1") return host;
  if (net::is_loopback(host) || !net::is_local_address(host)) return {};
  return host;
}

}  // namespace

Rendezvous::Rendezvous(net::Loop& loop, const AgentOptions& options, OnDirectory on_directory,
                       InstallPeer install_peer, DeviceTable& devices)
    : loop_(loop),
      options_(options),
      on_directory_(std::move(on_directory)),
      install_peer_(std::move(install_peer)),
      devices_(devices),
      host_key_(options.transport == "tcp" ? std::string() : net::host_key()),
      port_(options.master_port) {
  if (options.rank != 0) return;
  master_socket_ =
      options.listen_fd >= 0
          ? net::Fd(options.listen_fd)
          : std::move(net::listen_tcp(master_bind_host(options), options.master_port).value());
  port_ = net::local_name(master_socket_.get()).port;
}

Rendezvous::~Rendezvous() = default;

void Rendezvous::run(const std::function<void()>& prepare) {
  began_ = base::Clock::now();
  const base::TimePoint deadline = base::deadline_after(options_.join_timeout);
  if (options_.transport != "tcp") listen_unix();
  if (options_.rank == 0) {
    prepare();
    wire::Directory directory;
    for (const std::string& name : options_.names) directory.ranks.push_back({name, {}});
    directory.options = options_.job_options;
    loop_.post([self = shared_from_this(), directory = std::move(directory)]() mutable {
      self->on_directory_on_loop(std::move(directory));
    });
    add_listener(std::move(master_socket_));
  } else {
    join_master(deadline);
  }
  wait_until_ready(deadline, prepare);
  // Nobody connects any more: what others could find of us on the disk goes.
  std::lock_guard lock(mutex_);
  listeners_.clear();
  unix_dir_.remove();
}

// ---- the joining thread ----

net::Listener* Rendezvous::add_listener(net::Fd socket) {
  auto listener = std::make_unique<net::Listener>(loop_, std::move(socket),
                                                  [weak = weak_from_this()](net::Fd fd) {
                                                    if (const auto self = weak.lock())
                                                      self->on_stranger_on_loop(std::move(fd));
                                                  });
  std::lock_guard lock(mutex_);
  listeners_.push_back(std::move(listener));
  return listeners_.back().get();
}

void Rendezvous::listen_unix() {
  unix_dir_ = base::TemporaryPath::folder();
  if (unix_dir_.path().empty()) return;  // TCP does
  const std::string path = unix_dir_.path() + "/rank";
  base::Result<net::Fd> socket = net::listen_unix(path);
  if (!socket.ok()) return;
  unix_path_ = path;
  add_listener(std::move(socket.unchecked()));
}

void Rendezvous::listen_for_peers(const std::string& host) {
  net::Fd socket = std::move(net::listen_tcp(host, 0).value());
  port_ = net::local_name(socket.get()).port;
  add_listener(std::move(socket));
}

std::string Rendezvous::master_text() const {
  return options_.master_addr + ":" +
         std::to_string(options_.rank == 0 ? port_ : options_.master_port);
}

wire::Endpoint Rendezvous::own_endpoint() const {
  const std::string& host = options_.listen_addr;
  // Nobody can connect to "all interfaces": others then use the address that they see.
  const bool is_wildcard = host == "0.0.0.0" || host == "::" || host == "*";
  return {is_wildcard ? std::string() : host, port_, unix_path_, host_key_};
}

void Rendezvous::join_master(base::TimePoint deadline) {
  base::TimePoint next_report = base::Clock::now() + kWaitingInterval;
  auto pause = std::chrono::duration_cast<base::Duration>(kFirstRetry);
  const base::Future<void> ready = ready_.future();
  net::Fd socket;
  while (!socket.valid()) {
    base::Result<net::Fd> attempt = net::connect_tcp(options_.master_addr, options_.master_port,
                                                     std::min(deadline, next_report));
    if (attempt.ok()) {
      socket = std::move(attempt.unchecked());
      break;
    }
    const base::TimePoint now = base::Clock::now();
    if (attempt.error().kind == ErrorKind::kResources) throw base::Exception(attempt.error());
    if (now >= deadline) {
      throw base::Exception(rendezvous_error(
          "rank 0 was not found within the join timeout: " + attempt.error().message, 0));
    }
    if (now >= next_report) {
      if (options_.on_waiting) {
        options_.on_waiting({0}, master_text(), attempt.error().message);
      }
      next_report = now + kWaitingInterval;
    }
    if (ready.wait_until(now + std::min(pause, deadline - now))) ready.wait();  // it was aborted
    pause = std::min(pause * 2, std::chrono::duration_cast<base::Duration>(kLongestRetry));
  }
  listen_for_peers(options_.listen_addr.empty() ? net::local_name(socket.get()).host
                                                : options_.listen_addr);
  wire::Hello hello;
  hello.purpose = wire::HelloPurpose::kJoin;
  hello.job_id = options_.job_id;
  hello.rank = options_.rank;
  hello.world_size = options_.world_size;
  hello.endpoint = own_endpoint();
  hello.options = options_.job_options;
  const net::StreamPtr stream = net::adopt_socket(loop_, socket.release());
  {
    std::lock_guard lock(mutex_);
    master_ = stream;
  }
  send_frame(stream, wire::FrameKind::kHello, encode(hello));
  const auto weak = weak_from_this();
  stream->start({[weak](net::InFrame frame) {
                   if (const auto self = weak.lock()) self->on_master_frame_on_loop(frame);
                 },
                 [weak](const Error& error) {
                   const auto self = weak.lock();
                   if (!self) return;
                   if (error.kind == ErrorKind::kProtocol) return self->fail(error);
                   self->fail(rendezvous_error("rank 0 left before all ranks were there", 0));
                 }},
                // The directory of a large job is large.
                wire::Limits{uint32_t{16} << 20, 0, 0});
}

void Rendezvous::wait_until_ready(base::TimePoint deadline, const std::function<void()>& prepare) {
  const base::Future<void> met = met_.future();
  const base::Future<void> ready = ready_.future();
  bool connected = options_.rank == 0;
  for (;;) {
    const base::Future<void>& next = connected ? ready : met;
    if (next.wait_until(std::min(deadline, base::Clock::now() + kWaitingInterval))) {
      next.wait();  // throws when it failed
      if (connected) return;
      prepare();
      connect_to_lower_ranks(deadline);
      connected = true;
      continue;
    }
    const std::vector<int> ranks = missing();
    if (base::Clock::now() >= deadline) {
      Error error = rendezvous_error("not all ranks were there within the join timeout; missing: " +
                                         (ranks.empty() ? "none of ours" : list_ranks(ranks)),
                                     ranks.empty() ? -1 : ranks.front());
      fail(error);
      throw base::Exception(std::move(error));
    }
    if (options_.on_waiting) options_.on_waiting(ranks, master_text(), {});
  }
}

// Blocks for as long as connecting takes, so not on the loop.
void Rendezvous::connect_to_lower_ranks(base::TimePoint deadline) {
  wire::Directory directory;
  {
    std::lock_guard lock(mutex_);
    directory = *directory_;
  }
  for (int rank = 0; rank < options_.rank; ++rank) {
    net::Fd socket =
        connect_to_rank(rank, directory.ranks[static_cast<size_t>(rank)].endpoint, deadline);
    wire::Hello hello;
    hello.purpose = wire::HelloPurpose::kPeer;
    hello.job_id = options_.job_id;
    hello.rank = options_.rank;
    const net::StreamPtr stream = net::adopt_socket(loop_, socket.release());
    send_frame(stream, wire::FrameKind::kHello, encode(hello));
    loop_.post([self = shared_from_this(), stream, rank] {
      {
        std::lock_guard lock(self->mutex_);
        if (self->state_ == State::kFailed) return;
        self->peers_.insert(rank);
      }
      stream->start(self->install_peer_(rank, stream), wire::Limits{});
      self->check_mesh_on_loop();
    });
  }
}

net::Fd Rendezvous::connect_to_rank(int rank, const wire::Endpoint& peer,
                                    base::TimePoint deadline) {
  const bool same_host = !host_key_.empty() && peer.host_key == host_key_;
  const bool by_unix = options_.transport != "tcp" && same_host && !peer.unix_path.empty();
  const bool by_tcp = options_.transport != "unix";
  const std::string name = "rank " + std::to_string(rank);
  if (!by_unix && !by_tcp) {
    throw base::Exception(rendezvous_error(
        "--transport unix: " + name + " is not on this host, or has no folder for its socket",
        rank));
  }
  const auto connect_by_tcp = [&] {
    return net::connect_tcp(peer.host.empty() ? options_.master_addr : peer.host,
                            rank == 0 ? options_.master_port : peer.port,
                            std::min(deadline, base::deadline_after(kLongestReach)));
  };
  base::Result<net::Fd> socket = by_unix ? net::connect_unix(peer.unix_path) : connect_by_tcp();
  if (!socket.ok() && by_unix && by_tcp) socket = connect_by_tcp();
  if (socket.ok()) return std::move(socket.unchecked());
  // It may have failed itself: then what it said of that is under way here, over rank 0.
  const base::TimePoint until = std::min(deadline, base::deadline_after(kLastWords));
  const base::Future<void> ready = ready_.future();
  if (socket.error().kind != ErrorKind::kResources && base::Clock::now() < until &&
      ready.wait_until(until)) {
    ready.wait();  // throws what it said
  }
  Error error = socket.error();
  error.message =
      "rank " + std::to_string(options_.rank) + " cannot reach " + name + ": " + error.message;
  error.rank = rank;
  throw base::Exception(std::move(error));
}

std::vector<int> Rendezvous::missing() const {
  std::lock_guard lock(mutex_);
  std::vector<int> ranks;
  if (!directory_) return {0};
  for (int rank = 0; rank < static_cast<int>(directory_->ranks.size()); ++rank) {
    if (rank == options_.rank) continue;
    const auto joined = joined_.find(rank);
    const bool is_meeting = options_.rank == 0 && state_ == State::kMeeting;
    const bool here = is_meeting ? joined != joined_.end() : peers_.contains(rank);
    // It has reached rank 0, but not yet all others.
    const bool is_meshing =
        here && !is_meeting && joined != joined_.end() && !joined->second.mesh_ready;
    if (!here || is_meshing) ranks.push_back(rank);
  }
  return ranks;
}

std::optional<Wait> Rendezvous::wait() const {
  const base::TimePoint began = began_;
  {
    std::lock_guard lock(mutex_);
    const bool meets = state_ == State::kMeeting || state_ == State::kMeshing;
    const bool prepares = options_.rank == 0 && !directory_;  // as its program does, by itself
    if (!meets || prepares || began == base::TimePoint{}) return std::nullopt;
  }
  const std::vector<int> ranks = missing();
  return Wait{ranks.empty() ? "the others, which are yet to find each other"
                            : "rank " + list_ranks(ranks) + " to join",
              began};
}

void Rendezvous::fail(Error error) {
  std::vector<net::StreamPtr> tell;
  {
    std::lock_guard lock(mutex_);
    if (state_ == State::kReady || state_ == State::kFailed) return;
    state_ = State::kFailed;
    for (auto& [rank, joined] : joined_) tell.push_back(std::move(joined.stream));
    joined_.clear();
    if (master_) tell.push_back(std::move(master_));
    master_ = nullptr;
  }
  if (error.op.empty()) error.op = "join";
  for (const net::StreamPtr& stream : tell) {
    send_frame(stream, wire::FrameKind::kAbort, wire::encode(error));
    stream->close();
  }
  met_.fail(error);
  devices_.fail(error);
  ready_.fail(std::move(error));
}

void Rendezvous::close() {
  std::lock_guard lock(mutex_);
  listeners_.clear();
  joined_.clear();
  early_peers_.clear();
  master_ = nullptr;
}

}  // namespace distrain::rpc
