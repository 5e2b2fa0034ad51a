#include "rendezvous.h"

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <thread>

#include <unistd.h>

namespace distrain::rpc {

namespace {

using base::Error;
using base::ErrorKind;

constexpr auto kHelloTimeout = std::chrono::seconds(5);
constexpr auto kWaitingInterval = std::chrono::seconds(5);
constexpr auto kFirstRetry = std::chrono::milliseconds(20);
constexpr auto kLongestRetry = std::chrono::milliseconds(500);

Error rendezvous_error(std::string message, int rank = -1) {
  return Error{ErrorKind::kRendezvous, std::move(message), rank, "join"};
}

void send_frame(const net::StreamPtr& stream, wire::FrameKind kind, wire::Bytes meta = {}) {
  net::OutFrame frame;
  frame.header.kind = kind;
  frame.meta = std::move(meta);
  static_cast<void>(stream->send(std::move(frame)));  // a broken stream is told by on_close
}

std::string list_ranks(const std::vector<int>& ranks) {
  std::string text;
  for (const int rank : ranks) text += (text.empty() ? "" : ", ") + std::to_string(rank);
  return text;
}

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
                       InstallPeer install_peer)
    : loop_(loop),
      options_(options),
      on_directory_(std::move(on_directory)),
      install_peer_(std::move(install_peer)),
      host_key_(options.transport == "tcp" ? std::string() : net::host_key()),
      port_(options.master_port) {
  if (options.rank != 0) return;
  master_socket_ =
      options.listen_fd >= 0
          ? net::Fd(options.listen_fd)
          : std::move(net::listen_tcp(master_bind_host(options), options.master_port).value());
  port_ = net::local_name(master_socket_.get()).port;
}

Rendezvous::~Rendezvous() {
  if (!unix_dir_.empty()) {
    std::error_code ignored;
    std::filesystem::remove_all(unix_dir_, ignored);
  }
}

void Rendezvous::run(const std::function<void()>& prepare) {
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
  if (!unix_dir_.empty()) {
    std::error_code ignored;
    std::filesystem::remove_all(unix_dir_, ignored);
    unix_dir_.clear();
  }
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
  std::error_code no_directory;
  const std::filesystem::path temporary = std::filesystem::temp_directory_path(no_directory);
  if (no_directory) return;
  std::string pattern = (temporary / "distrain-XXXXXX").string();
  if (!mkdtemp(pattern.data())) return;  // 0700; without it, TCP does
  unix_dir_ = pattern;
  base::Result<net::Fd> socket = net::listen_unix(unix_dir_ + "/rank");
  if (!socket.ok()) return;
  unix_path_ = unix_dir_ + "/rank";
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
      if (options_.on_waiting) options_.on_waiting({0}, master_text());
      next_report = now + kWaitingInterval;
    }
    std::this_thread::sleep_for(std::min(pause, deadline - now));
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
    if (options_.on_waiting) options_.on_waiting(ranks, master_text());
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
    const wire::Endpoint& peer = directory.ranks[static_cast<size_t>(rank)].endpoint;
    const bool same_host = !host_key_.empty() && peer.host_key == host_key_;
    net::Fd socket;
    if (same_host && !peer.unix_path.empty() && options_.transport != "tcp") {
      base::Result<net::Fd> local = net::connect_unix(peer.unix_path);
      if (local.ok()) socket = std::move(local.unchecked());
    }
    if (!socket.valid()) {
      if (options_.transport == "unix") {
        throw base::Exception(rendezvous_error(
            "--transport unix: rank " + std::to_string(rank) + " is not on this host", rank));
      }
      base::Result<net::Fd> remote =
          net::connect_tcp(peer.host.empty() ? options_.master_addr : peer.host,
                           rank == 0 ? options_.master_port : peer.port, deadline);
      if (!remote.ok()) {
        Error error = remote.error();
        error.message = "rank " + std::to_string(rank) + ": " + error.message;
        error.rank = rank;
        throw base::Exception(std::move(error));
      }
      socket = std::move(remote.unchecked());
    }
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

std::vector<int> Rendezvous::missing() const {
  std::lock_guard lock(mutex_);
  std::vector<int> ranks;
  if (!directory_) return {0};
  for (int rank = 0; rank < static_cast<int>(directory_->ranks.size()); ++rank) {
    if (rank == options_.rank) continue;
    const bool here = options_.rank == 0 && state_ == State::kMeeting ? joined_.contains(rank)
                                                                      : peers_.contains(rank);
    if (!here) ranks.push_back(rank);
  }
  return ranks;
}

// ---- strangers, on the loop ----

void Rendezvous::on_stranger_on_loop(net::Fd socket) {
  const net::StreamPtr stream = net::adopt_socket(loop_, socket.release());
  const std::weak_ptr<net::Stream> weak_stream = stream;
  // Whoever says nothing is shown the door; one that has said hello has another handler by then.
  const uint64_t timer = loop_.call_at(base::deadline_after(kHelloTimeout), [weak_stream] {
    if (const auto silent = weak_stream.lock()) silent->close(false);
  });
  const auto weak = weak_from_this();
  stream->start({[weak, weak_stream, timer](net::InFrame frame) {
                   const auto self = weak.lock();
                   const auto from = weak_stream.lock();
                   if (!self || !from) return;
                   self->loop_.cancel(timer);
                   self->on_hello_on_loop(from, frame);
                 },
                 [weak, timer](const Error&) {
                   if (const auto self = weak.lock()) self->loop_.cancel(timer);
                 }},
                wire::kHandshakeLimits);
}

void Rendezvous::on_hello_on_loop(const net::StreamPtr& stream, const net::InFrame& frame) {
  std::optional<Error> refusal;
  wire::Hello hello;
  try {
    if (frame.header.kind != wire::FrameKind::kHello) {
      wire::Reader::fail("a connection must begin with hello");
    }
    hello = wire::decode_hello(frame.meta);
    std::lock_guard lock(mutex_);
    refusal = check_hello_locked(hello);
  } catch (const base::Exception& e) {
    refusal = e.error();
  }
  if (refusal) {
    refusal->op = "join";
    send_frame(stream, wire::FrameKind::kReject, wire::encode(*refusal));
    stream->close();
  } else if (hello.purpose == wire::HelloPurpose::kJoin) {
    on_join_on_loop(stream, std::move(hello));
  } else {
    accept_peer_on_loop(stream, hello.rank);
  }
}

// The first field that does not agree, with both values.
std::optional<Error> Rendezvous::check_hello_locked(const wire::Hello& hello) const {
  const auto refuse = [](std::string message) { return rendezvous_error(std::move(message), 0); };
  if (hello.job_id != options_.job_id) {
    return refuse("job: this rank belongs to '" + hello.job_id + "', rank 0 to '" +
                  options_.job_id + "'");
  }
  if (hello.purpose == wire::HelloPurpose::kPeer) {
    if (hello.rank <= options_.rank) {
      return refuse("rank " + std::to_string(hello.rank) + " does not connect to rank " +
                    std::to_string(options_.rank));
    }
    return std::nullopt;
  }
  if (options_.rank != 0) return refuse("only rank 0 can be joined");
  const auto size = static_cast<int>(options_.names.size());
  if (hello.world_size != 0 && hello.world_size != size) {
    return refuse("world size: " + std::to_string(hello.world_size) + " on rank " +
                  std::to_string(hello.rank) + ", " + std::to_string(size) + " on rank 0");
  }
  if (hello.rank < 1 || hello.rank >= size) {
    return refuse("rank: " + std::to_string(hello.rank) + " is outside this job's 0 to " +
                  std::to_string(size - 1));
  }
  if (joined_.contains(hello.rank) || state_ != State::kMeeting) {
    return refuse("rank: " + std::to_string(hello.rank) + " has been taken already");
  }
  for (const auto& [name, value] : hello.options) {
    const auto it = options_.job_options.find(name);
    if (it != options_.job_options.end() && it->second != value) {
      return refuse("--" + name + ": " + value + " on rank " + std::to_string(hello.rank) + ", " +
                    it->second + " on rank 0");
    }
  }
  return std::nullopt;
}

// ---- rank 0, on the loop ----

void Rendezvous::on_join_on_loop(const net::StreamPtr& stream, wire::Hello hello) {
  const int rank = hello.rank;
  // How others reach it: as rank 0 sees it, unless it says otherwise. A rank seen on loopback is on
  // rank 0's machine, so it is reached where rank 0 is.
  if (hello.endpoint.host.empty()) {
    const std::string& seen = stream->peer_name();
    const std::string host = seen.substr(0, seen.rfind(':'));
    if (!net::is_loopback(host)) hello.endpoint.host = host;
  }
  bool complete = false;
  {
    std::lock_guard lock(mutex_);
    joined_[rank] = Joined{stream, std::move(hello), false};
    complete = joined_.size() + 1 == options_.names.size();
  }
  const auto weak = weak_from_this();
  stream->set_handler_on_loop({[weak, rank](net::InFrame frame) {
                                 if (const auto self = weak.lock())
                                   self->on_joiner_frame_on_loop(rank, frame);
                               },
                               [weak, rank](const Error& error) {
                                 if (const auto self = weak.lock())
                                   self->on_joiner_gone_on_loop(rank, error);
                               }});
  if (complete) send_directory_on_loop();
}

void Rendezvous::send_directory_on_loop() {
  std::vector<net::StreamPtr> streams;
  wire::Bytes bytes;
  {
    std::lock_guard lock(mutex_);
    state_ = State::kMeshing;
    directory_->ranks[0].endpoint = own_endpoint();
    for (const auto& [rank, joined] : joined_) {
      directory_->ranks[static_cast<size_t>(rank)].endpoint = joined.hello.endpoint;
      streams.push_back(joined.stream);
    }
    bytes = encode(*directory_);
  }
  for (const net::StreamPtr& stream : streams) {
    send_frame(stream, wire::FrameKind::kDirectory, bytes);
  }
  check_mesh_on_loop();
}

void Rendezvous::on_joiner_frame_on_loop(int rank, const net::InFrame& frame) {
  if (frame.header.kind == wire::FrameKind::kMeshReady) {
    {
      std::lock_guard lock(mutex_);
      joined_[rank].mesh_ready = true;
    }
    check_mesh_on_loop();
  } else if (frame.header.kind == wire::FrameKind::kAbort) {
    {
      std::lock_guard lock(mutex_);
      // Nothing has begun: its place is free again when it closes, as if it had died.
      if (state_ == State::kMeeting) return;
    }
    try {
      Error error = wire::decode_error(frame.meta);
      if (error.rank < 0) error.rank = rank;
      fail(std::move(error));
    } catch (const base::Exception& e) {
      fail(e.error());
    }
  }
}

void Rendezvous::on_joiner_gone_on_loop(int rank, const Error&) {
  {
    std::lock_guard lock(mutex_);
    if (state_ == State::kReady || state_ == State::kFailed) return;
    if (state_ == State::kMeeting) {
      joined_.erase(rank);  // its place is free again
      return;
    }
  }
  fail(rendezvous_error("rank " + std::to_string(rank) + " left while the ranks were connecting",
                        rank));
}

// ---- rank r, on the loop ----

void Rendezvous::on_master_frame_on_loop(const net::InFrame& frame) {
  try {
    switch (frame.header.kind) {
      case wire::FrameKind::kReject:
      case wire::FrameKind::kAbort:
        return fail(wire::decode_error(frame.meta));
      case wire::FrameKind::kDirectory:
        return on_directory_on_loop(wire::decode_directory(frame.meta));
      case wire::FrameKind::kGo:
        return set_ready();
      default:
        wire::Reader::fail("an unexpected answer to hello");
    }
  } catch (const base::Exception& e) {
    fail(e.error());
  }
}

// Rank 0 comes here too, with a directory that has names only.
void Rendezvous::on_directory_on_loop(wire::Directory directory) {
  const auto size = static_cast<int>(directory.ranks.size());
  if (options_.rank >= size) wire::Reader::fail("a directory without this rank");
  std::vector<std::pair<net::StreamPtr, int>> early;
  bool alone = false;
  {
    std::lock_guard lock(mutex_);
    if (directory_ || state_ == State::kFailed) return;
    directory_ = directory;
    if (options_.rank != 0) state_ = State::kMeshing;
    early.swap(early_peers_);
    alone = options_.rank == 0 && size == 1;
  }
  on_directory_(directory);
  for (const auto& [stream, rank] : early) accept_peer_on_loop(stream, rank);
  if (alone) send_directory_on_loop();
  if (options_.rank != 0) met_.set();
}

// ---- all ranks, on the loop ----

void Rendezvous::accept_peer_on_loop(const net::StreamPtr& stream, int rank) {
  {
    std::lock_guard lock(mutex_);
    const bool failed = state_ == State::kFailed;
    if (!directory_ && !failed) {
      early_peers_.emplace_back(stream, rank);
      return;
    }
    if (failed || rank >= static_cast<int>(directory_->ranks.size()) ||
        !peers_.insert(rank).second) {
      stream->close(false);
      return;
    }
  }
  stream->set_limits_on_loop(wire::Limits{});
  stream->set_handler_on_loop(install_peer_(rank, stream));
  check_mesh_on_loop();
}

void Rendezvous::check_mesh_on_loop() {
  std::vector<net::StreamPtr> go;
  net::StreamPtr report_to;
  {
    std::lock_guard lock(mutex_);
    if (state_ != State::kMeshing || peers_.size() + 1 != directory_->ranks.size()) return;
    if (options_.rank != 0) {
      if (mesh_reported_) return;
      mesh_reported_ = true;
      report_to = master_;
    } else {
      for (const auto& [rank, joined] : joined_) {
        if (!joined.mesh_ready) return;
        go.push_back(joined.stream);
      }
      state_ = State::kReady;
    }
  }
  if (report_to) return send_frame(report_to, wire::FrameKind::kMeshReady);
  for (const net::StreamPtr& stream : go) send_frame(stream, wire::FrameKind::kGo);
  ready_.set();
}

void Rendezvous::set_ready() {
  net::StreamPtr master;
  {
    std::lock_guard lock(mutex_);
    if (state_ != State::kMeshing) return;
    state_ = State::kReady;
    master = std::move(master_);
  }
  master->close();
  ready_.set();
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
