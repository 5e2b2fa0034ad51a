#include "agent_core.h"

#include <algorithm>
#include <iterator>

#include <ATen/Parallel.h>
#include <ATen/ThreadLocalState.h>

#include "channel_impl.h"
#include "stream_state.h"

namespace distrain::rpc {

using base::Error;
using base::ErrorKind;

base::Task WorkerExecutor::bind(base::Task task) {
  return [task = under_this_thread(std::move(task)), context = current_context(),
          autograd = current_autograd(), state = at::ThreadLocalState()]() mutable {
    const at::ThreadLocalStateGuard guard(state);
    const ContextScope scope(autograd, context);
    task();
    task = base::Task();
  };
}

base::Error WorkerExecutor::error_in_flight(base::ErrorKind otherwise) const {
  return rpc::error_in_flight(otherwise);
}

AgentCore::AgentCore(Agent& owner, AgentOptions given)
    : agent(owner),
      options(std::move(given)),
      devices(options.rank, options.device, options.device_maps),
      // The number of threads of an operation is OpenMP's, which has one for each thread: without
      // at::init_num_threads(), oneDNN would take all cores in a worker, whatever was set.
      shared_executor(std::make_shared<WorkerExecutor>(
          base::ThreadPool::Options{.name = "dt-work",
                                    .size = options.worker_threads,
                                    .on_thread_start =
                                        [tracer = options.tracer] {
                                          at::init_num_threads();
                                          base::Tracer::bind_thread(tracer, "worker");
                                        }})),
      pending(loop, options.rank, options.tracer,
              [this](uint64_t id, const PendingCalls::Call& call, bool expired) {
                if (!hook || call.context == 0) return;
                hook->on_failed(call.context, call.autograd_id);
                if (expired) hook->on_given_up(call.context, call.to, id);
              }),
      rrefs(std::make_shared<RRefContext>(
          owner, options.rank,
          [this](int to, wire::FrameKind kind, uint64_t id, uint64_t fork, uint64_t parent) {
            net::OutFrame frame;
            frame.header.kind = kind;
            frame.header.call_id = id;
            frame.header.context_id = fork;
            frame.header.autograd_id = parent;
            static_cast<void>(send(to, std::move(frame)));  // a lost owner needs no message
          },
          executor)),
      rendezvous(std::make_shared<Rendezvous>(
          loop, options,
          [this](const wire::Directory& directory) { on_directory_on_loop(directory); },
          [this](int rank, const net::StreamPtr& stream) {
            return install_peer_on_loop(rank, stream);
          },
          devices)) {
  if (options.tracer) {
    loop.post([tracer = options.tracer] { base::Tracer::bind_thread(tracer, "loop"); });
  }
  handlers.emplace(kFailFunction, [](CallContext&, Decoder& in, const ReplyPtr& reply) {
    const std::string_view text = in.in.get_string();
    reply->fail(wire::decode_error({reinterpret_cast<const uint8_t*>(text.data()), text.size()}));
  });
  handlers.emplace(kFetchFunction, [this](CallContext&, Decoder& in, const ReplyPtr& reply) {
    const std::shared_ptr<RRefHandle> handle = decode_rref(in);
    in.in.expect_end();
    if (!handle->is_owner()) throw base::Exception(ErrorKind::kProtocol, "not the owner");
    const std::shared_ptr<OwnedValue> owned = handle->owned();
    owned->value.future().on_complete(
        executor, [reply, owned](base::Result<std::shared_ptr<void>>& value) {
          if (!value.ok()) return reply->fail(value.error());
          if (!owned->encode) {
            return reply->fail(Error{ErrorKind::kInvalid,
                                     "an object of this type does not travel: call its functions "
                                     "where it is instead of to_here()",
                                     -1,
                                     {}});
          }
          reply->send([&](Encoder& encoder) { owned->encode(encoder, value.unchecked().get()); });
        });
  });
}

AgentCore::~AgentCore() { close(); }

void AgentCore::close() {
  if (closed_.exchange(true)) return;
  last_live_rrefs_ = rrefs->live();
  last_live_contexts_ = hook ? hook->live_contexts() : 0;
  const Error error{ErrorKind::kCancelled, "this rank is shutting down", options.rank, {}};
  rendezvous->fail(error);
  rendezvous->close();
  await_loop();
  pending.fail_all(error);
  flush_.fail(error);
  devices.fail(error);
  rrefs->fail_unset(error);
  for (int rank = 0; rank < world_size(); ++rank) {
    if (rank != options.rank) tell_channels(rank, error);
    if (peer(rank).state != PeerState::kConnecting) peer(rank).stream->close();
  }
  for (int rank = 0; rank < world_size(); ++rank) {  // nothing that they do reaches others now
    if (rank != options.rank) layers.on_rank_lost(rank, error);
  }
  stager.stop_waiting();
  pool.stop();  // handlers that wait for others have been failed above
  wait_until_flushed();
  rrefs->close();
  replies->close();
  const std::shared_ptr<AutogradHook> last = std::move(hook);
  decltype(provided) objects;  // die outside the lock, while the channels they use are there
  std::unique_lock lock(registry_mutex);
  objects.swap(provided);
  handlers.clear();
}

void AgentCore::set_device(c10::Device device) {
  devices.set_home(device);
  options.device = device;
}

// ---- joining ----

void AgentCore::join(const std::function<void()>& prepare) {
  if (options.rank == 0) job_options = options.job_options;
  rendezvous->run([&] {
    if (prepare) prepare();
    devices.settle();
  });
  loop.post([this] {
    last_beat_ = base::Clock::now();
    for (const auto& peer : peers_) peer->last_heard = last_beat_;
    beat_on_loop();
  });
}

void AgentCore::on_directory_on_loop(const wire::Directory& directory) {
  for (const wire::Directory::Entry& entry : directory.ranks) {
    peers_.push_back(std::make_unique<Peer>());
    peers_.back()->name = entry.name;
  }
  if (options.rank != 0) job_options = directory.options;
  name = directory.ranks[static_cast<size_t>(options.rank)].name;
}

net::Stream::Handler AgentCore::install_peer_on_loop(int rank, const net::StreamPtr& stream) {
  peer(rank).stream = stream;
  peer(rank).state = PeerState::kConnected;
  {
    std::lock_guard lock(peers_mutex_);
    ++open_streams_;
  }
  return {[this, rank](net::InFrame frame) { on_frame_on_loop(rank, std::move(frame)); },
          [this, rank](const Error& error) {
            on_stream_closed_on_loop(rank, error);
            std::lock_guard lock(peers_mutex_);
            --open_streams_;
            stream_closed_.notify_all();
          },
          [this](const wire::FrameHeader& header) {
            return header.kind == wire::FrameKind::kChunk
                       ? stager.idle_host_block(header.body_bytes())
                       : nullptr;
          }};
}

// What was said last, such as why this rank leaves, may still be queued for a slow peer. The loop
// would drop it.
void AgentCore::wait_until_flushed() {
  std::unique_lock lock(peers_mutex_);
  stream_closed_.wait_for(lock, std::chrono::seconds(1), [this] { return open_streams_ == 0; });
}

// ---- frames, on the loop ----

void AgentCore::on_frame_on_loop(int rank, net::InFrame frame) {
  const uint64_t bytes = wire::kHeaderBytes + frame.header.body_bytes();
  bytes_in_.fetch_add(bytes, std::memory_order_relaxed);
  try {
    dispatch_on_loop(rank, std::move(frame));
  } catch (...) {
    // What it sent cannot be read: its fault. All else went wrong here, with what it had sent.
    Error error = error_in_flight(ErrorKind::kInternal);
    if (error.rank < 0) error.rank = error.kind == ErrorKind::kProtocol ? rank : options.rank;
    lose_peer_on_loop(rank, std::move(error));
  }
}

void AgentCore::dispatch_on_loop(int rank, net::InFrame frame) {
  const wire::FrameHeader header = frame.header;
  std::shared_ptr<Arrivals>& arrivals = peer(rank).arrivals;
  switch (header.kind) {
    case wire::FrameKind::kCall:
      pool.post(
          [this, rank, arrived = base::Clock::now(), arrivals, frame = std::move(frame)]() mutable {
            execute(rank, arrived, nullptr, std::move(frame), arrivals.get());
          });
      return;
    case wire::FrameKind::kReply:
      if (auto call = pending.take(header.call_id, rank)) {
        call->promise.set(RawReply{nullptr, std::move(frame), arrivals, rank, call->context,
                                   std::move(call->function)});
      } else {
        // Its caller has given up on it: the RRefs in it are let go.
        pool.post([this, rank, arrivals, frame = std::move(frame)]() mutable {
          try {
            InMessage late = from_frame(std::move(frame), rank, stager, arrivals.get());
            rrefs->receive(late);
          } catch (...) {  // nobody is there to be told
          }
        });
      }
      return;
    case wire::FrameKind::kError:
      return pending.fail(header.call_id, rank, wire::decode_error(frame.meta));
    case wire::FrameKind::kOneway: {
      ChannelMessage message{rank,
                             {header.call_id, header.context_id, header.autograd_id},
                             frame.payload,
                             std::move(frame.body)};
      static_cast<ChannelImpl&>(open_channel(header.channel)).deliver(std::move(message));
      return;
    }
    case wire::FrameKind::kChunk:
      if (peer(rank).state == PeerState::kLost) return;
      if (!arrivals) arrivals = std::make_shared<Arrivals>(stager, rank);
      if (base::Task task = arrivals->add_chunk_on_loop(std::move(frame))) {
        pool.post(std::move(task));
      }
      return;
    case wire::FrameKind::kHeartbeat:
      return;
    case wire::FrameKind::kFlush:
      return flush_.on_flush(header.call_id, rank, header.context_id);
    case wire::FrameKind::kAbort: {
      Error error = wire::decode_error(frame.meta);
      if (error.rank < 0) error.rank = rank;
      return lose_peer_on_loop(rank, std::move(error));
    }
    case wire::FrameKind::kReject:
      return rendezvous->fail(wire::decode_error(frame.meta));
    case wire::FrameKind::kRRefFork:
    case wire::FrameKind::kRRefAccept:
    case wire::FrameKind::kRRefDelete: {
      const uint64_t parent = header.kind == wire::FrameKind::kRRefFork ? header.autograd_id : 0;
      if (parent >= peers_.size()) wire::Reader::fail("an RRef of a rank that does not exist");
      return rrefs->on_control(header.kind, header.call_id, header.context_id, rank,
                               static_cast<int>(parent));
    }
    default:
      wire::Reader::fail("a frame out of place");
  }
}

void AgentCore::on_stream_closed_on_loop(int rank, const Error& error) {
  // A rank that has seen the end of the last round goes without a word.
  if (error.kind == ErrorKind::kPeerLost && flush_.on_left(rank)) {
    peer(rank).state = PeerState::kLeft;
    return;
  }
  Error loss = error;
  if (loss.kind == ErrorKind::kPeerLost) {
    loss.message =
        "rank " + std::to_string(rank) + " (" + peer(rank).name + ") is lost: " + error.message;
  }
  loss.rank = loss.kind == ErrorKind::kResources ? options.rank : rank;
  lose_peer_on_loop(rank, std::move(loss));
}

void AgentCore::lose_peer_on_loop(int rank, Error error) {
  Peer& lost = peer(rank);
  if (lost.state == PeerState::kLost || lost.state == PeerState::kLeft || closed_) return;
  {
    std::lock_guard lock(peers_mutex_);
    lost.loss = error;
  }
  lost.state = PeerState::kLost;
  if (lost.stream) lost.stream->close(false);
  rendezvous->fail(error);
  pending.fail_all_to(rank, error);
  tell_channels(rank, error);
  layers.on_rank_lost(rank, error);
  rrefs->on_peer_lost(rank, error);
  if (lost.arrivals) {  // the loop is not the one to free a device's memory
    pool.post([arrivals = std::move(lost.arrivals)] { arrivals->drop_parts(); });
  }
  flush_.fail(error);
}

std::vector<std::shared_ptr<ChannelImpl>> AgentCore::channels() {
  std::lock_guard lock(channels_mutex_);
  std::vector<std::shared_ptr<ChannelImpl>> all;
  for (const auto& [number, channel] : channels_) all.push_back(channel);
  return all;
}

void AgentCore::tell_channels(int rank, const Error& error) {
  for (const auto& channel : channels()) channel->on_peer_lost(rank, error);
}

std::vector<Wait> AgentCore::waits() {
  std::vector<Wait> all = pending.waits();
  for (Wait& wait : layers.waits()) all.push_back(std::move(wait));
  for (const auto& channel : channels()) {
    std::vector<Wait> more = channel->waits();
    std::move(more.begin(), more.end(), std::back_inserter(all));
  }
  if (auto join = rendezvous->wait()) all.push_back(std::move(*join));
  if (auto end = flush_.wait(options.rank)) all.push_back(std::move(*end));
  std::stable_sort(all.begin(), all.end(),
                   [](const Wait& a, const Wait& b) { return a.since < b.since; });
  return all;
}

Error AgentCore::loss_of(int rank) const {
  std::lock_guard lock(peers_mutex_);
  const Peer& lost = *peers_[static_cast<size_t>(rank)];
  if (lost.state == PeerState::kLost) return lost.loss;
  return Error{ErrorKind::kPeerLost,
               "rank " + std::to_string(rank) + " (" + lost.name + ") has left",
               rank,
               {}};
}

// Says that this rank is alive, and looks who has been silent. Progress of a large frame counts.
void AgentCore::beat_on_loop() {
  if (closed_) return;
  const base::TimePoint now = base::Clock::now();
  // Others may be less patient than this rank: it is heard every second, whatever its own timeout.
  auto interval = std::chrono::duration_cast<base::Duration>(std::chrono::seconds(1));
  const bool judges = options.peer_timeout > std::chrono::nanoseconds::zero();
  if (judges) interval = std::min<base::Duration>(interval, options.peer_timeout / 4);
  // This process itself was stopped, or starved: it cannot tell who was silent meanwhile.
  const bool overslept = now - last_beat_ > interval * 2;
  last_beat_ = now;
  for (int rank = 0; rank < world_size(); ++rank) {
    Peer& other = peer(rank);
    if (other.state != PeerState::kConnected) continue;
    const uint64_t bytes = other.stream->bytes_received();
    if (bytes != other.bytes_seen || overslept) {
      other.bytes_seen = bytes;
      other.last_heard = now;
    } else if (judges && now - other.last_heard > options.peer_timeout) {
      lose_peer_on_loop(
          rank,
          Error{ErrorKind::kPeerLost,
                "rank " + std::to_string(rank) + " (" + other.name + ") is lost: silent for " +
                    std::to_string(
                        std::chrono::duration_cast<std::chrono::seconds>(now - other.last_heard)
                            .count()) +
                    " s",
                rank,
                {}});
      continue;
    }
    net::OutFrame frame;
    frame.header.kind = wire::FrameKind::kHeartbeat;
    static_cast<void>(other.stream->send(std::move(frame)));
  }
  loop.call_at(now + interval, [this] { beat_on_loop(); });
}

// ---- sending ----

base::Status AgentCore::send(int to, net::OutFrame frame) {
  Peer& other = peer(to);
  if (other.state.load(std::memory_order_acquire) != PeerState::kConnected) return loss_of(to);
  uint64_t bytes = wire::kHeaderBytes + frame.meta.size();
  for (const auto& piece : frame.payload) bytes += piece.size();
  bytes_out_.fetch_add(bytes, std::memory_order_relaxed);
  base::Status sent = other.stream->send(std::move(frame));
  if (!sent.ok() && sent.error().kind == ErrorKind::kPeerLost) return loss_of(to);
  return sent;
}

void AgentCore::tell_all(wire::FrameKind kind, uint64_t call_id, uint64_t context_id,
                         wire::Bytes meta) {
  for (int rank = 0; rank < world_size(); ++rank) {
    if (rank == options.rank || peer(rank).state != PeerState::kConnected) continue;
    net::OutFrame frame;
    frame.header.kind = kind;
    frame.header.call_id = call_id;
    frame.header.context_id = context_id;
    frame.meta = meta;
    static_cast<void>(peer(rank).stream->send(std::move(frame)));
  }
}

Channel& AgentCore::open_channel(uint16_t number) {
  std::lock_guard lock(channels_mutex_);
  std::shared_ptr<ChannelImpl>& channel = channels_[number];
  if (!channel) channel = std::make_shared<ChannelImpl>(*this, number);
  return *channel;
}

// ---- the end ----

// Round 0: everybody is done. Then rounds until nobody counts a reference or a context any more:
// what one rank lets go of may be forwarded twice (Accept, then Delete), each hop within a round.
void AgentCore::shutdown(const std::function<void(const std::vector<int>& missing)>& on_waiting,
                         const std::function<void()>& at_rest) {
  constexpr uint64_t kLastRound = 24;
  constexpr auto kLongestPause = std::chrono::milliseconds(200);
  pending.drained().wait();
  for (uint64_t round = 0, pause_ms = 0; round <= kLastRound; ++round) {
    const uint64_t live = round == 0 ? 1 : rrefs->live() + live_contexts();
    const base::Future<uint64_t> over = flush_.enter(round, live, world_size());
    // If it has failed already, the others must not take this rank's word for its end.
    if (over.done()) static_cast<void>(over.wait());
    tell_all(wire::FrameKind::kFlush, round, live);
    while (!over.wait_until(base::deadline_after(std::chrono::seconds(5)))) {
      if (on_waiting) on_waiting(flush_.missing(round, options.rank, world_size()));
    }
    if (over.wait() == 0) break;
    if (round == 0) {
      if (at_rest) at_rest();  // the others are in round 1 until this rank comes
      continue;
    }
    std::this_thread::sleep_for(
        std::min<std::chrono::milliseconds>(std::chrono::milliseconds(pause_ms), kLongestPause));
    pause_ms = pause_ms * 2 + 1;
  }
  close();
}

// A join() under way on another thread has its peers made on the loop: none comes any more once the
// rendezvous has failed and the loop has done what it was doing.
void AgentCore::await_loop() {
  base::Promise<void> reached;
  const base::Future<void> future = reached.future();
  loop.post([reached = std::move(reached)]() mutable { reached.set(); });
  future.wait();
}

void AgentCore::abort(const Error& error) {
  if (closed_) return;
  Error reason = error;
  if (reason.rank < 0) reason.rank = options.rank;
  rendezvous->fail(reason);
  await_loop();
  tell_all(wire::FrameKind::kAbort, 0, 0, wire::encode(reason));
  close();
}

std::string AgentCore::transport() const {
  bool tcp = false;
  bool local = false;
  for (const auto& peer : peers_) {
    if (peer->stream) (peer->stream->peer_name() == "unix" ? local : tcp) = true;
  }
  return tcp && local ? "mixed" : tcp ? "tcp" : local ? "unix" : "none";
}

Traffic AgentCore::traffic() const { return {calls_.load(), bytes_out_.load(), bytes_in_.load()}; }

}  // namespace distrain::rpc
