// The half of Rendezvous that runs on the loop thread: what comes in from other ranks.

#include <algorithm>
#include <utility>

#include "device_table.h"
#include "rendezvous.h"
#include "rendezvous_frames.h"

namespace distrain::rpc {

namespace {

using base::Error;
using base::ErrorKind;

constexpr auto kHelloTimeout = std::chrono::seconds(5);

}  // namespace

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
    // Once the mesh is being made, all ranks have joined.
    if (options_.rank == 0 && state_ == State::kMeeting) {
      return refuse("rank " + std::to_string(hello.rank) +
                    " connects as a peer before all ranks have joined");
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
  if (state_ == State::kFailed) return refuse("the job has failed before this rank came");
  if (joined_.contains(hello.rank) || state_ != State::kMeeting) {
    return refuse("rank: " + std::to_string(hello.rank) + " has been taken already");
  }
  for (const auto& [name, value] : hello.options) {
    const auto it = options_.job_options.find(name);
    if (it != options_.job_options.end() && it->second != value) {
      const std::string own = it->second.empty() ? "none" : it->second;
      return refuse("--" + name + ": " + value + " on rank " + std::to_string(hello.rank) + ", " +
                    own + " on rank 0");
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
    if (state_ == State::kFailed) return stream->close(false);  // since the look at its hello
    joined_[rank] = Joined{stream, std::move(hello), std::nullopt};
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
    try {
      wire::Reader in(frame.meta);
      wire::RankDevices devices = wire::decode_rank_devices(in);
      in.expect_end();
      std::lock_guard lock(mutex_);
      joined_[rank].mesh_ready = std::move(devices);
    } catch (base::Exception& e) {
      Error error = e.error();
      error.rank = rank;
      return fail(std::move(error));
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
        return on_go_on_loop(frame.meta);
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
  std::vector<wire::RankDevices> devices;
  {
    std::lock_guard lock(mutex_);
    if (state_ != State::kMeshing || peers_.size() + 1 != directory_->ranks.size()) return;
    if (options_.rank != 0) {
      if (std::exchange(mesh_reported_, true)) return;
      go.push_back(master_);
    } else {
      devices.push_back(devices_.tell());
      for (const auto& [rank, joined] : joined_) {
        if (!joined.mesh_ready) return;
        devices.push_back(*joined.mesh_ready);
        go.push_back(joined.stream);
      }
    }
  }
  if (options_.rank != 0) {
    wire::Bytes body;
    wire::Writer out(body);
    encode(devices_.tell(), out);
    return send_frame(go[0], wire::FrameKind::kMeshReady, std::move(body));
  }
  const wire::Bytes body = encode(devices);
  try {
    learn_devices_on_loop(std::move(devices));
  } catch (const base::Exception& e) {
    return fail(e.error());
  }
  {
    std::lock_guard lock(mutex_);
    if (state_ != State::kMeshing) return;
    state_ = State::kReady;
  }
  for (const net::StreamPtr& stream : go) send_frame(stream, wire::FrameKind::kGo, body);
  ready_.set();
}

void Rendezvous::on_go_on_loop(std::span<const uint8_t> body) {
  {
    std::lock_guard lock(mutex_);
    if (state_ != State::kMeshing) return;  // what was said first holds: others read it by now
  }
  learn_devices_on_loop(wire::decode_all_devices(body));
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

void Rendezvous::learn_devices_on_loop(std::vector<wire::RankDevices> devices) {
  std::vector<std::string> names;
  {
    std::lock_guard lock(mutex_);
    if (!directory_) wire::Reader::fail("everybody's devices before the directory");
    for (const wire::Directory::Entry& entry : directory_->ranks) names.push_back(entry.name);
  }
  devices_.learn(std::move(names), std::move(devices));
}

}  // namespace distrain::rpc
