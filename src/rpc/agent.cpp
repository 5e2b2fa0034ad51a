#include "distrain/rpc/agent.h"

#include <algorithm>
#include <cctype>
#include <system_error>

#include <fmt/format.h>

#include "agent_core.h"
#include "channel_impl.h"
#include "distrain/membership/loss.h"
#include "trace/trace_export.h"

namespace distrain::rpc {

namespace {

AgentOptions checked(AgentOptions options) {
  if (options.rank < 0) {
    base::invalid("an agent has a rank from 0 on, not " + std::to_string(options.rank) +
                  ": membership::Slot says which one is free");
  }
  if (options.rank == 0 && options.names.empty()) base::invalid("rank 0 has no names of the ranks");
  const auto named = static_cast<int>(options.names.size());
  if (named > 0 && options.world_size != 0 && options.world_size != named) {
    base::invalid(fmt::format("there are names of {} ranks, and the world size is {}", named,
                              options.world_size));
  }
  std::set<std::string_view> names;
  for (const std::string& name : options.names) {
    const bool is_text =
        name.size() < 128 && std::ranges::all_of(name, [](unsigned char c) {
          return c >= 128 || std::isalnum(c) || std::string_view("_-:.").find(c) < 4;
        });
    if (is_text && !name.empty() && names.insert(name).second) continue;
    base::invalid(fmt::format(
        "rank {} needs a name of its own, of at most 127 letters, digits and '_-:.', not '{}'",
        names.size(), name.substr(0, 128)));
  }
  return options;
}

}  // namespace

Agent::Agent(AgentOptions options)
    : core_(std::make_shared<AgentCore>(checked(std::move(options)))) {
  if (tracer()) expose_trace(lasting());
}

Agent::Agent(AgentCore& core) : core_(std::shared_ptr<AgentCore>(), &core) {}

// Ends the core. If called on a thread of the agent, which cannot wait for its own end, starts a
// new thread that ends the core. If no thread can be started, the core leaks.
Agent::~Agent() {
  if (core_.use_count() == 0) return;  // this is the core's own handle
  if (!core_->runs_here()) {
    core_->close();
    return;
  }
  const auto* const core = new std::shared_ptr<AgentCore>(std::move(core_));
  try {
    std::thread([core] {
      (*core)->close();  // join() may hold the core, too
      delete core;
    }).detach();
  } catch (const std::system_error&) {
  }
}

Agent& Agent::lasting() { return core_->agent; }
void Agent::join(const std::function<void()>& prepare) {
  const std::shared_ptr<AgentCore> core = core_;  // outlives an agent that is destroyed meanwhile
  core->join(prepare);
}
void Agent::set_device(c10::Device device) { core_->set_device(device); }
c10::Device Agent::device() const { return core_->devices.home(); }
std::string Agent::device_of(int rank) const { return device_text(core_->devices.home_of(rank)); }
void Agent::set_rpc_timeout(std::chrono::nanoseconds timeout) { core_->rpc_timeout = timeout; }
std::chrono::nanoseconds Agent::rpc_timeout() const { return core_->rpc_timeout; }
int Agent::rank() const { return core_->options.rank; }
bool Agent::is_admitted() const { return core_->control->is_admitted(); }
int Agent::world_size() const { return core_->world_size(); }
const std::string& Agent::name() const { return core_->name; }

WorkerInfo Agent::worker(const std::string& name) const {
  const int size = core_->world_size();  // 0 until the names are known
  const int found = size == 0 ? -1 : core_->peers.find_rank(name);
  if (found >= 0) return worker(found);
  constexpr int kMostNamed = 32;
  std::string known;
  for (int rank = 0; rank < std::min(size, kMostNamed); ++rank) {
    known += (rank == 0 ? "" : ", ") + core_->peers.name(rank);
  }
  if (size > kMostNamed) known += " and " + std::to_string(size - kMostNamed) + " more";
  throw Exception(ErrorKind::kNotFound, "no rank is named '" + name + "'; there are: " + known);
}

WorkerInfo Agent::worker(int rank) const {
  if (rank < 0 || rank >= core_->world_size()) {
    throw Exception(ErrorKind::kNotFound,
                    fmt::format("there is no rank {} among {}", rank, core_->world_size()));
  }
  return {rank, core_->peers.name(rank), core_->peers.incarnation(rank)};
}

uint32_t Agent::incarnation() const { return core_->incarnation(); }
bool Agent::is_here(int rank) const {
  const ProcessNumber process = process_number(rank, worker(rank).incarnation);
  return core_->is_here(process) && core_->has_window(rank);
}
bool Agent::is_done_without(int rank) const {
  return core_->peers.is_done_without(worker(rank).rank);
}

void Agent::go_on_without(const std::vector<int>& ranks, int least, const std::string& if_too_few,
                          bool may_return) {
  core_->control
      ->tolerate({{ranks.begin(), ranks.end()}, static_cast<size_t>(least), if_too_few, may_return})
      .wait();
}

const std::map<std::string, std::string>& Agent::job_options() const { return core_->job_options; }
uint16_t Agent::port() const { return core_->control->port(); }
std::string Agent::transport() const { return core_->peers.transport(); }
void Agent::note_of_use(int rank) { core_->control->note_of_use(rank); }

// Enters shutdown rounds, which are barriers of all ranks. The first round ends when all ranks have
// called shutdown(). Each later round sums up the live RRefs and autograd contexts of all ranks,
// and the calls that functions have made since the round before. The last round has a sum of 0, or
// is the kLastRound-th without new calls. The sender or receiver of a message in transit counts its
// RRefs and contexts. A rank enters a round when the calls that it has counted are answered, so a
// call that begins after the last count would have an unanswered cause, which was counted.
void Agent::shutdown(std::function<void(const std::vector<int>& missing)> on_waiting,
                     const std::function<void()>& at_rest, std::chrono::nanoseconds timeout) {
  constexpr int kLastRound = 24;
  using namespace std::chrono_literals;
  core_->pending.wait_until_drained();
  const base::TimePoint deadline = base::deadline_after(timeout);
  core_->layers.on_shutdown();
  std::chrono::milliseconds pause{0};
  uint64_t counted = 0;
  int quiet_rounds = 0;
  for (uint64_t round = 0; quiet_rounds <= kLastRound; ++round) {
    const uint64_t calls = traffic().calls;
    core_->pending.wait_until_drained();
    const uint64_t made = calls - std::exchange(counted, calls);
    const uint64_t live = live_rrefs() + live_contexts() + (made << 32);
    const base::Future<uint64_t> over = core_->control->enter_round(round, round == 0 ? 1 : live);
    while (!over.wait_until(std::min(deadline, base::deadline_after(5s)))) {
      const std::vector<int> missing = core_->control->missing();
      if (base::Clock::now() < deadline) {
        if (on_waiting) on_waiting(missing);
        continue;
      }
      const Error late{ErrorKind::kDeadline,
                       "rank " + membership::list_ranks(missing) + " did not end in time",
                       missing.empty() ? -1 : missing[0], "shutdown"};
      abort(late);
      throw Exception(late);
    }
    const uint64_t sum = over.wait();
    if (sum == 0) break;
    quiet_rounds = sum >> 32 > 0 ? 0 : quiet_rounds + 1;
    if (round == 0) {
      if (at_rest) at_rest();  // the other ranks wait in round 1 for this rank
      continue;
    }
    std::this_thread::sleep_for(pause);
    pause = std::min(pause * 2 + 1ms, 200ms);
  }
  core_->control->leave();
  core_->close();
}

void Agent::abort(const Error& error) { core_->abort(error); }
size_t Agent::live_rrefs() const { return core_->live_rrefs(); }
size_t Agent::live_contexts() const { return core_->live_contexts(); }
std::map<std::string, uint64_t> Agent::info() const {
  const Traffic sent = traffic();
  std::map<std::string, uint64_t> info = core_->rrefs->info();
  info.insert({{"calls.made", sent.calls},
               {"calls.waiting", core_->pending.waits().size()},
               {"bytes.in", sent.bytes_in},
               {"bytes.out", sent.bytes_out},
               {"threads", static_cast<uint64_t>(core_->options.worker_threads)},
               {"contexts", live_contexts()},
               {"passes", core_->hook ? core_->hook->live_passes() : 0}});
  return info;
}
std::vector<Wait> Agent::waits() const { return core_->waits(); }
Traffic Agent::traffic() const { return core_->traffic(); }
const std::shared_ptr<base::Tracer>& Agent::tracer() const { return core_->options.tracer; }
base::Executor& Agent::executor() { return core_->executor; }
base::Executor& Agent::inline_executor() { return *core_->inline_executor; }
base::EventLoopPtr Agent::event_loop() const { return core_->loop.event_loop(); }
void Agent::run_calls_until(const base::Future<void>& done, std::string_view function,
                            uint64_t key) {
  core_->run_calls_until(done, function, key);
}
Channel& Agent::open_channel(uint16_t number) { return core_->open_channel(number); }
void Agent::add_layer(const std::weak_ptr<Layer>& layer) { core_->layers.add(layer); }
void Agent::set_autograd_hook(std::shared_ptr<AutogradHook> hook) { core_->hook = std::move(hook); }
const std::shared_ptr<AutogradHook>& Agent::autograd_hook() const { return core_->hook; }

void Agent::expose_raw(const std::string& name, Handler handler) {
  std::unique_lock lock(core_->registry_mutex);
  if (!core_->handlers.emplace(name, std::move(handler)).second) {
    base::invalid("a function '" + name + "' is exposed already");
  }
}

void Agent::expose_tag(const void* tag, const std::string& name, Handler handler) {
  expose_raw(name, std::move(handler));
  std::unique_lock lock(core_->registry_mutex);
  core_->names[tag] = name;
}

const std::string& Agent::name_of(const void* tag, const char* what) const {
  std::shared_lock lock(core_->registry_mutex);
  const auto it = core_->names.find(tag);
  if (it == core_->names.end()) {
    throw Exception(ErrorKind::kNotFound,
                    std::string(what) + " has no name: expose it on the calling agent too");
  }
  return it->second;
}

void Agent::provide_erased(std::type_index type, std::shared_ptr<void> object) {
  std::unique_lock lock(core_->registry_mutex);
  core_->provided[type] = std::move(object);
}

void* Agent::local_erased(std::type_index type) const {
  std::shared_lock lock(core_->registry_mutex);
  const auto it = core_->provided.find(type);
  if (it == core_->provided.end()) {
    throw Exception(
        ErrorKind::kNotFound,
        fmt::format("rank {} was not provided with an object of type {}", rank(), type.name()));
  }
  return it->second.get();
}

std::shared_ptr<void> Agent::shared_erased(std::type_index type,
                                           const std::function<std::shared_ptr<void>()>& make) {
  std::lock_guard one_at_a_time(core_->making_mutex);
  {
    std::shared_lock lock(core_->registry_mutex);
    const auto it = core_->provided.find(type);
    if (it != core_->provided.end()) return it->second;
  }
  std::shared_ptr<void> object = make();
  provide_erased(type, object);
  return object;
}

int Agent::rank_of(const To& to) const {
  return to.rank_ >= 0 || to.name_.empty() ? worker(to.rank_).rank : worker(to.name_).rank;
}

base::Future<RawReply> Agent::call_raw(const To& to, const std::string& function,
                                       const std::function<void(Encoder&)>& fill,
                                       const std::shared_ptr<RRefHandle>& target, CallForm form) {
  const auto timeout = to.timeout_ == kAgentsTimeout ? rpc_timeout() : to.timeout_;
  return core_->call(rank_of(to), std::chrono::duration_cast<base::Duration>(timeout), function,
                     fill, target, form);
}

std::shared_ptr<InMessage> Agent::open(const RawReply& reply) { return core_->open(reply); }

std::shared_ptr<RRefHandle> Agent::new_handle(int owner) { return core_->rrefs->new_remote(owner); }

}  // namespace distrain::rpc
