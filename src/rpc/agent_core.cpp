#include "agent_core.h"

#include <ATen/Parallel.h>
#include <ATen/ThreadLocalState.h>
#include <fmt/format.h>

#include "channel_impl.h"
#include "distrain/rpc/torch_state.h"

namespace distrain::rpc {

namespace {

using enum wire::FrameKind;

// The most credit that a peer may grant or request: twice the cost of the largest call.
constexpr uint64_t kMostCredit =
    2 * (wire::Limits{}.max_payload_bytes + wire::Limits{}.max_meta_bytes + kCallCost);
// Maximum metadata of a call that needs no credit (kFailFunction): an error's texts and 4 KiB more.
constexpr uint64_t kMostWithoutCredit = wire::kMostErrorText + 4096;

bool has_small_credit(const wire::FrameHeader& header) {
  return header.kind == kCall && header.channel == wire::kWithSmallCredit;
}

uint64_t credit_of_call(const wire::FrameHeader& header) {
  if (header.channel == wire::kWithoutCredit) return 0;
  return kCallCost + header.meta_bytes + header.payload_bytes;
}

// Returns the LibTorch state that this worker thread started with, restored after each task.
const TorchState& worker_state() {
  thread_local const TorchState state;
  return state;
}

// Binds this thread to `tracer` until the thread exits.
void bind_to_trace(const std::shared_ptr<base::Tracer>& tracer, const char* name) {
  thread_local const base::TraceBinding binding(tracer, name);
}

}  // namespace

base::Task WorkerExecutor::bind(base::Task task) {
  // A callback of the loop does not pass on the state of the thread that happens to run the loop.
  if (base::thread_state().must_not_wait) return task;
  return [task = under_this_thread(std::move(task)), context = current_context(),
          autograd = current_autograd(), state = at::ThreadLocalState()]() mutable {
    const at::ThreadLocalStateGuard guard(state);
    const ContextScope scope(autograd, context);
    task();
    task = base::Task();
  };
}

AgentCore::AgentCore(AgentOptions given)
    : options(std::move(given)),
      devices(options.rank, options.device, options.device_maps),
      // at::init_num_threads() applies the set number of intra-op threads to a new worker. Without
      // it, oneDNN would use all cores there, because OpenMP keeps this number for each thread.
      shared_executor(std::make_shared<WorkerExecutor>(
          base::ThreadPool::Options{.name = "dt-work",
                                    .size = options.worker_threads,
                                    .on_thread_start =
                                        [tracer = options.tracer] {
                                          at::init_num_threads();
                                          worker_state();
                                          bind_to_trace(tracer, "worker");
                                        },
                                    .after_task = [] { worker_state().restore(); }})),
      pending(loop, executor, options.rank, options.tracer,
              [this](uint64_t id, const PendingCalls::Call& call, bool given_up) {
                if (given_up) send_cancel(id, call.to);
                if (!hook || call.context == 0) return;
                hook->on_failed(call.context, call.autograd_id);
                if (given_up) hook->on_given_up(call.context, call.to, id);
              }),
      rrefs(std::make_shared<RRefContext>(
          agent, options.rank,
          [this](int to, wire::FrameKind kind, uint64_t id, uint64_t fork, uint64_t parent) {
            static_cast<void>(send_control(to, kind, id, fork, parent));  // the owner may be lost
          },
          executor)),
      control(std::make_shared<membership::ControlPlane>(
          loop, options,
          membership::ControlPlane::Callbacks{
              .on_directory = std::bind_front(&AgentCore::on_directory_on_loop, this),
              .on_go = std::bind_front(&DeviceTable::learn, &devices),
              .on_failed = std::bind_front(&DeviceTable::fail, &devices),
              .on_lost = std::bind_front(&AgentCore::on_lost_on_loop, this),
              .on_new_devices = std::bind_front(&DeviceTable::learn_again, &devices),
              .on_returned = std::bind_front(&AgentCore::on_returned_on_loop, this),
              .on_peer = std::bind_front(&Peers::accept_on_loop, &peers)})),
      peers(loop, options.rank, *control,
            {.on_frame = std::bind_front(&AgentCore::on_frame_on_loop, this),
             .allocate = std::bind_front(&AgentCore::admit_on_loop, this),
             .on_open = [this](int rank) { open_flows(rank); },
             .shared_memory =
                 [this] { return options.shared_memory ? flows[0].budget->window() : 0; }}) {
  pool.set_event_loop(loop.event_loop());
  if (options.rank == 0) {
    name = options.names[0];
    job_options = options.job_options;
  }
  if (options.tracer) {
    loop.post([tracer = options.tracer] { bind_to_trace(tracer, "loop"); });
  }
  handlers.emplace(kFailFunction, [](CallContext&, Decoder& in, const ReplyPtr& reply) {
    const std::string_view text = in.in.get_string();
    reply->fail(wire::decode_error({reinterpret_cast<const uint8_t*>(text.data()), text.size()}));
  });
  handlers.emplace(kFetchFunction, [this](CallContext&, Decoder& in, const ReplyPtr& reply) {
    const std::shared_ptr<RRefHandle> handle = decode_rref(in);
    const bool wants_value = in.in.get<bool>();
    in.in.expect_end();
    if (!handle->is_owner()) throw Exception(ErrorKind::kProtocol, "not the owner");
    const std::shared_ptr<OwnedValue> owned = handle->owned();
    owned->value.future().on_complete(
        executor, [reply, owned, wants_value](base::Result<std::shared_ptr<void>>& value) {
          if (!value.ok()) return reply->fail(value.error());
          if (!wants_value) return reply->send([](Encoder&) {});
          if (!owned->encode) {
            return reply->fail(Error{ErrorKind::kInvalid,
                                     "an object of this type does not travel: call its functions "
                                     "where it is instead of to_here()"});
          }
          reply->send([&](Encoder& encoder) { owned->encode(encoder, value.unchecked().get()); });
        });
  });
}

void AgentCore::close() {
  if (loop.in_loop()) {  // disconnect() would wait for this thread
    if (!closed_) given_up_.post([this] { close(); });
    return;
  }
  if (!closed_.exchange(true)) {
    disconnecting_ = std::this_thread::get_id();
    disconnect();
    disconnecting_ = std::thread::id();
    disconnected_.set();
  }
  // This thread may be running a function or a continuation of the agent. stop() would wait for
  // this thread to end, so a later close(), at the latest the destructor's, calls stop().
  if (runs_here()) return;
  if (disconnecting_ == std::this_thread::get_id()) return;
  std::lock_guard lock(stopping_);
  if (stopped_) return;
  disconnected_.future().wait();
  stopped_ = true;
  stop();
}

// Closes the connections and fails all waits for other ranks.
void AgentCore::disconnect() {
  last_live_rrefs_ = rrefs->live();
  last_live_contexts_ = hook ? hook->live_contexts() : 0;
  const Error error{ErrorKind::kCancelled, "this rank is shutting down", options.rank};
  control->close();
  wait_for_posted(loop);
  for (int rank = 0; rank < known_windows(); ++rank) fail_windows(rank, error);
  pending.fail_all(error);
  devices.fail(error);
  rrefs->fail_unset(error);
  for (int rank = 0; rank < world_size(); ++rank) {
    if (rank == options.rank) continue;
    for (const auto& channel : channels()) channel->on_peer_lost(rank, error);
  }
  for (int rank = 0; rank < world_size(); ++rank) {  // calls of the layers now fail at once
    if (rank != options.rank) layers.on_rank_lost({rank, error, false, peers.incarnation(rank)});
  }
  stager.stop_waiting();
}

// Waits until only the loop still runs tasks. Releases RRef values, provided objects and handlers.
void AgentCore::stop() {
  layers.wait_until_notified();
  pool.stop();  // ends soon, because disconnect() has failed the waits of handlers
  wait_for_posted(given_up_);
  control->wait_until_flushed();
  rrefs->close();
  replies->close();
  decltype(provided) objects;  // destroyed without the lock, while the channels that they use exist
  std::unique_lock lock(registry_mutex);
  objects.swap(provided);
  handlers.clear();
}

// ---- joining ----

void AgentCore::join(const std::function<void()>& prepare) {
  enter_device();
  control->run([&] {
    if (prepare) prepare();
    return devices.freeze();
  });
  if (options.on_long_wait) loop.post([this] { watch_waits_on_loop({}); });
}

void AgentCore::on_directory_on_loop(const wire::Directory& directory) {
  peers.learn_on_loop(directory);
  incarnation_ = peers.incarnation(options.rank);
  flows[0].budget =
      std::make_unique<Budget>(world_size(), options.total_budget, options.peer_budget);
  flows[1].budget = std::make_unique<Budget>(world_size(), options.total_budget / kSmallCallsShare,
                                             kSmallCallsWindow, options.total_budget);
  unwritten_ = std::make_shared<UnwrittenReplies>(
      world_size(), flows[0].budget->window(), [this, executor = shared_executor](int rank) {
        executor->post([this, rank] { run_parked_call(rank); });
      });
  for (int rank = 0; rank < world_size(); ++rank) {
    for (const bool is_small : {false, true}) {
      if (peers.incarnation(rank) > 0) flows[is_small].budget->renew(peers.process(rank));
      flows[is_small].windows.add(make_window(rank, is_small));
    }
    if (rank != options.rank) rrefs->know_process(peers.process(rank));
  }
  windows_are_known_ = true;
  open_flows(options.rank);
  next_call_ = make_id(process_number(0, incarnation_), 1);
  rrefs->set_incarnation(incarnation_);
  if (options.rank == 0) return;  // the constructor has set both; other threads may read them
  job_options = directory.options;
  name = directory.ranks[static_cast<size_t>(options.rank)].name;
}

// Creates a window that requests credit from the newest process of `rank`, not from its successors.
std::unique_ptr<Window> AgentCore::make_window(int rank, bool is_small) {
  const auto ask = [this, rank, is_small,
                    incarnation = peers.incarnation(rank)](const Window::Request& request) {
    Flow& flow = flows[is_small];
    if (rank == options.rank) return send_grants(is_small, flow.budget->ask(rank, request));
    const base::Status sent =
        send_control(rank, is_small ? kSmallCreditRequest : kCreditRequest, request.spent,
                     request.target, request.returned, incarnation);
    if (!sent.ok() && peers.incarnation(rank) == incarnation) {
      flow.windows.at(rank).fail(sent.error());
    }
  };
  return std::make_unique<Window>(ask);
}

// ---- sending ----

void AgentCore::send_grants(bool is_small, const Budget::Grants& grants) {
  const Flow& flow = flows[is_small];
  for (const Budget::Grant& grant : grants) {
    const int rank = rank_of(grant.to);
    if (rank == options.rank) {
      flow.windows.at(rank).grant(grant.bytes, flow.budget->window());
    } else {
      // An error means that the rank is lost, so it needs no grant.
      static_cast<void>(send_control(rank, is_small ? kSmallCredit : kCredit, grant.bytes,
                                     flow.budget->window(), 0, incarnation_of(grant.to)));
    }
  }
}

void AgentCore::send_error(int to, uint64_t call_id, Error error) {
  if (error.rank < 0) error.rank = options.rank;
  if (to == options.rank) return pending.fail(call_id, to, std::move(error));
  net::OutFrame frame;
  frame.header = {.kind = wire::FrameKind::kError, .call_id = call_id};
  frame.meta = wire::encode(error);
  static_cast<void>(send_answer(to, std::move(frame)));
}

ChannelImpl& AgentCore::open_channel(uint16_t number) {
  std::lock_guard lock(channels_mutex_);
  std::shared_ptr<ChannelImpl>& channel = channels_[number];
  if (!channel) channel = std::make_shared<ChannelImpl>(*this, number);
  return *channel;
}

// ---- frames, on the loop ----

void AgentCore::on_frame_on_loop(int rank, net::InFrame frame) {
  bytes_in_.fetch_add(wire::kHeaderBytes + frame.header.body_bytes(), std::memory_order_relaxed);
  try {
    dispatch_on_loop(rank, std::move(frame));
  } catch (...) {
    // The sender is at fault for an unreadable frame, this rank for any other error.
    Error error = error_in_flight(ErrorKind::kInternal);
    if (error.rank < 0) error.rank = error.kind == ErrorKind::kProtocol ? rank : options.rank;
    control->report_on_loop(rank, std::move(error));
  }
}

// Checks a frame's header before memory is allocated for its body.
base::BufferPtr AgentCore::admit_on_loop(int rank, const wire::FrameHeader& header) {
  const bool is_call = header.kind == wire::FrameKind::kCall;
  const uint64_t credit = is_call ? credit_of_call(header) : credit_of_transfer(header);
  const bool uses_small_credit = has_small_credit(header);
  if (credit > 0 && !flows[uses_small_credit].budget->arrive(rank, credit)) {
    wire::Reader::fail("more calls than it has credit for");
  }
  if (uses_small_credit && credit > kLargestSmallCall) {
    wire::Reader::fail("a large call with credit for small ones");
  }
  const bool is_small = header.payload_bytes == 0 && header.meta_bytes <= kMostWithoutCredit;
  if (is_call && credit == 0 && !is_small) wire::Reader::fail("a large call without credit");
  if (header.kind != wire::FrameKind::kChunk) return nullptr;
  return stager.idle_host_block(header.body_bytes());
}

void AgentCore::dispatch_on_loop(int rank, net::InFrame frame) {
  const wire::FrameHeader header = frame.header;
  std::shared_ptr<DeviceReceive>& device_receive = peers.device_receive_on_loop(rank);
  switch (header.kind) {
    case wire::FrameKind::kCall:
      if (peers.is_lost(rank)) return;
      return queue_call({.from = rank,
                         .incarnation = peers.incarnation(rank),
                         .id = header.call_id,
                         .frame = std::move(frame),
                         .device_receive = has_small_credit(header) ? nullptr : device_receive,
                         .credit = credit_of_call(header),
                         .has_small_credit = has_small_credit(header)});
    case wire::FrameKind::kCancel:
      return cancel_call(rank, header.call_id);
    case kCredit:
    case kSmallCredit:
      if (header.channel != incarnation_) return;  // sent to this rank's previous process
      return flows[header.kind == kSmallCredit].windows.at(rank).grant(
          std::min(header.call_id, kMostCredit), std::min(header.context_id, kMostCredit));
    case kCreditRequest:
    case kSmallCreditRequest: {
      if (header.channel != incarnation_) return;
      const bool is_small = header.kind == kSmallCreditRequest;
      return send_grants(
          is_small,
          flows[is_small].budget->ask(
              rank, {header.call_id, std::min(header.context_id, header.call_id + kMostCredit),
                     header.autograd_id}));
    }
    case wire::FrameKind::kReply:
      if (auto call = pending.take(header.call_id, rank)) {
        answer(*call, {nullptr, std::move(frame), device_receive, rank});
      } else {  // the caller has given up this call
        release({nullptr, std::move(frame), device_receive, rank});
      }
      return;
    case wire::FrameKind::kError:
      return pending.fail(header.call_id, rank, wire::decode_error(frame.meta));
    case wire::FrameKind::kOneway:
      return open_channel(header.channel)
          .deliver({rank,
                    {header.call_id, header.context_id, header.autograd_id},
                    frame.payload,
                    std::move(frame.body),
                    std::move(frame.descriptor)});
    case wire::FrameKind::kChunk:
      if (peers.is_lost(rank)) return;
      if (!device_receive) {
        const auto give_back = [gate = replies, from = peers.process(rank)](uint64_t bytes) {
          gate->enter([&](AgentCore& core) {
            core.send_grants(false, core.flows[0].budget->drop(from, bytes));
          });
        };
        device_receive = std::make_shared<DeviceReceive>(stager, rank, give_back);
      }
      if (base::Task task = device_receive->add_chunk_on_loop(std::move(frame))) {
        pool.post(std::move(task));
      }
      return;
    case wire::FrameKind::kRRefFork:
    case wire::FrameKind::kRRefAccept:
    case wire::FrameKind::kRRefDelete: {
      const uint64_t parent = header.kind == wire::FrameKind::kRRefFork ? header.autograd_id : 0;
      if (parent >= static_cast<uint64_t>(world_size()))
        wire::Reader::fail("an RRef of a rank that does not exist");
      return rrefs->on_control(header.kind, header.call_id, header.context_id, rank,
                               static_cast<int>(parent));
    }
    default:
      wire::Reader::fail("a frame out of place");
  }
}

void AgentCore::on_lost_on_loop(const Loss& loss) {
  if (closed_) return;
  const int rank = loss.rank;
  const Error& error = loss.error;
  peers.lose_on_loop(loss);
  fail_windows(rank, error);
  for (const bool is_small : {false, true}) {
    send_grants(is_small, flows[is_small].budget->lose(rank));
  }
  // The caller is lost, so nobody waits for the results of its calls.
  queued_calls_.drop_all_of(rank);
  pending.fail_all_to(rank, error);
  for (const auto& channel : channels()) channel->on_peer_lost(rank, error);
  layers.on_rank_lost(loss);
  rrefs->on_peer_lost(loss.process(), error);
  // Drops the transfers on a worker, because the loop must not free device memory.
  if (auto& transfers = peers.device_receive_on_loop(rank)) {
    pool.post([transfers = std::move(transfers)] { transfers->drop_incomplete(); });
  }
}

// Replaces a lost process. Calls, credit and RRefs carry the incarnation of their process, so
// threads that still handle them after the loss notice that the process was replaced.
void AgentCore::on_returned_on_loop(int rank, const wire::Directory::Entry& entry) {
  if (closed_) return;
  layers.on_rank_returned(rank);
  rrefs->know_process(process_number(rank, entry.incarnation));
  peers.renew_on_loop(rank, entry);
  for (const auto& channel : channels()) channel->on_peer_returned(rank);
  for (const bool is_small : {true, false}) {  // has_window() looks at the last one
    flows[is_small].budget->renew(peers.process(rank));
    flows[is_small].windows.replace(rank, make_window(rank, is_small));
  }
}

std::vector<Wait> AgentCore::waits_of_layers() {
  std::vector<Wait> all = layers.waits();
  for (const auto& channel : channels()) {
    std::ranges::move(channel->waits(), std::back_inserter(all));
  }
  return all;
}

// Reports long waits. `reported` has the start times of the waits that were already reported.
void AgentCore::watch_waits_on_loop(std::set<base::TimePoint> reported) {
  if (closed_) return;
  const base::TimePoint now = base::Clock::now();
  std::set<base::TimePoint> all;
  for (const Wait& wait : waits_of_layers()) {
    if (now - wait.since < options.long_wait) continue;
    all.insert(wait.since);
    if (!reported.contains(wait.since)) options.on_long_wait(wait);
  }
  loop.call_at(now + options.long_wait / 6, [this, all] { watch_waits_on_loop(all); });
}

std::vector<Wait> AgentCore::waits() {
  std::vector<Wait> all = pending.waits();
  std::ranges::move(waits_of_layers(), std::back_inserter(all));
  for (int rank = 0; rank < known_windows(); ++rank) {
    for (const Flow& flow : flows) {
      if (const auto since = flow.windows.at(rank).waiting_since()) {
        all.push_back({fmt::format("room on rank {} for one more call", rank), *since});
      }
    }
  }
  if (auto others = control->wait()) all.push_back(std::move(*others));
  std::ranges::stable_sort(all, {}, &Wait::since);
  return all;
}

}  // namespace distrain::rpc
