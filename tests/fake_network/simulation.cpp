#include "simulation.h"

#include <algorithm>
#include <cstdio>
#include <sstream>

namespace distrain::fake_network {

using base::ErrorKind;
using wire::FrameKind;

namespace {

// The limit of a run in virtual time. Events that are pending then violate an invariant.
constexpr auto kLongestRun = std::chrono::seconds(300);

const char* name_of(FrameKind kind) {
  switch (kind) {
    case FrameKind::kJoin:
      return "join";
    case FrameKind::kJoined:
      return "joined";
    case FrameKind::kReject:
      return "reject";
    case FrameKind::kDirectory:
      return "directory";
    case FrameKind::kPrepared:
      return "prepared";
    case FrameKind::kGo:
      return "go";
    case FrameKind::kCall:
      return "call";
    case FrameKind::kHeartbeat:
      return "heartbeat";
    case FrameKind::kFlush:
      return "flush";
    case FrameKind::kAbort:
      return "abort";
    case FrameKind::kLost:
      return "lost";
    case FrameKind::kLeave:
      return "leave";
    case FrameKind::kReturned:
      return "returned";
    case FrameKind::kKnown:
      return "known";
    default:
      return "garbage";
  }
}

// A process that connects and does not belong to the job.
class Stranger final : public Host {
 public:
  int place() const override { return -1; }
  bool is_reading() const override { return true; }
  bool is_listening() const override { return false; }
  bool is_stopped() const override { return false; }
  void on_connection(End) override {}
  void on_message(End, const Message&) override {}
  void on_end(End, const Error&) override {}
};

}  // namespace

Error error_of_program(int rank) {
  const std::string file = "a file of rank " + std::to_string(rank);
  return {ErrorKind::kBadData, file + " cannot be read", rank, {}};
}

Error out_of_memory(int rank) {
  return {ErrorKind::kResources, "rank " + std::to_string(rank) + " is out of memory", rank, {}};
}

uint64_t Result::frames_in_all() const {
  uint64_t sum = 0;
  for (const auto& [kind, count] : frames) sum += count;
  return sum;
}

std::string Result::text() const {
  std::ostringstream text;
  for (const std::string& violation : violations) text << violation << '\n';
  text << ended_well << " ranks ended well, " << failed << " failed, in " << seconds << " s";
  if (lost > 0) text << "; " << lost << " were lost, " << returned << " came back";
  return text.str();
}

Simulation::Simulation(Scenario scenario, Bug bug, Trace trace)
    : scenario_(std::move(scenario)),
      bug_(bug),
      trace_(std::move(trace)),
      network_(time_, scenario_.seed, scenario_.job.longest_delay),
      random_({scenario_.seed, 0x73696d}) {}

// ---- a run ----

Result Simulation::run() {
  start_all();
  const TimePoint end = time_.now() + kLongestRun;
  while (time_.run_next(end)) {
  }
  check();
  return std::move(result_);
}

void Simulation::start_all() {
  for (int rank = 0; rank < scenario_.job.size; ++rank) {
    Rank& added = add(rank, rank);
    Duration delay = scenario_.longest_start * random_.below(1 << 20) / (1 << 20);
    bool comes = true;
    for (const Fault& fault : scenario_.faults) {
      if (fault.kind != FaultKind::kComesLate || fault.a != rank) continue;
      events_.push_back({fault, time_.now(), fault.lasts.has_value()});
      comes = comes && fault.lasts;
      delay += fault.lasts.value_or(Duration::zero());
    }
    if (comes) time_.after(delay, [&added] { added.start(); });
  }
}

Rank& Simulation::add(int rank, int place) {
  Observer& observer = *this;
  ranks_.push_back(std::make_unique<Rank>(time_, network_, observer, scenario_.job, rank, place,
                                          scenario_.seed, bug_));
  return *ranks_.back();
}

Rank* Simulation::at(int place) {
  for (const auto& each : ranks_) {
    if (each->place() == place) return each.get();
  }
  return nullptr;
}

Rank* Simulation::current(int rank) {
  Rank* found = nullptr;
  for (const auto& each : ranks_) {
    if (each->rank() == rank && each->has_joined()) found = each.get();
  }
  return found;
}

// ---- faults ----

void Simulation::on_phase(Phase phase) {
  for (const Fault& fault : scenario_.faults) {
    if (fault.kind == FaultKind::kComesLate || fault.phase != phase) continue;
    time_.after(fault.offset, [this, &fault] { begin(fault); });
  }
}

// Applies and records the fault. Before all ranks have joined, ranks may not notice it.
void Simulation::begin(const Fault& fault) {
  Event event{fault, time_.now()};
  const bool is_silence = fault.kind == FaultKind::kStop || fault.kind == FaultKind::kCut ||
                          fault.kind == FaultKind::kIsolate || fault.kind == FaultKind::kPartition;
  event.is_harmless = is_silence && fault.lasts && *fault.lasts <= scenario_.harmless();
  event.is_certain = ranks_[0]->has_joined() && !event.is_harmless;
  event.is_seen_at_once = !is_silence;
  if (!apply(event)) return;
  if (trace_) trace_("fault " + event.fault.text());
  events_.push_back(event);
  if (is_tolerant() && fault.a != 0 && fault.replacement) {
    time_.after(*fault.replacement, [this, &fault] { replace_lost(fault.a, fault.more_deaths); });
  }
}

// Applies the fault. Returns false if it has no effect.
bool Simulation::apply(Event& event) {
  const Fault& fault = event.fault;
  Rank* const joined = current(fault.a);
  Rank& rank = joined != nullptr ? *joined : *ranks_[static_cast<size_t>(fault.a)];
  if (is_tolerant() && !rank.is_alive()) return false;
  if (is_tolerant()) note_hit(event, rank);
  switch (fault.kind) {
    case FaultKind::kDie:
    case FaultKind::kAbort:
    case FaultKind::kRunsOut:
      if (!rank.is_alive()) return false;
      if (fault.kind == FaultKind::kDie) {
        rank.die();
      } else {
        rank.abort(fault.kind == FaultKind::kAbort ? error_of_program(fault.a)
                                                   : out_of_memory(fault.a));
      }
      if (!ranks_[0]->has_joined()) replace(fault);
      return true;
    case FaultKind::kStop:
      return stop(rank, event);
    case FaultKind::kFailAtGo:
      if (!rank.is_alive() || rank.has_met()) return false;
      rank.fail_at_go(error_of_program(fault.a));
      event.is_certain = false;
      return true;
    case FaultKind::kGarbage:
      if (!rank.is_alive() || rank.is_stopped()) return false;
      rank.send_garbage();
      event.is_certain = false;
      return true;
    case FaultKind::kResetControl: {
      const auto connection = rank.connection_to(0, true);
      if (connection) network_.reset(*connection);
      return connection.has_value();
    }
    case FaultKind::kResetCalls:
      return reset_calls(rank, event);
    case FaultKind::kCut:
      if (is_tolerant()) {  // a replacement process has a place of its own
        const Rank* const other = current(fault.b);
        if (other == nullptr) return false;
        separate({rank.place()}, {other->place()}, fault);
        return true;
      }
      separate({fault.a}, {fault.b}, fault);
      event.is_certain = event.is_certain && (fault.a == 0 || fault.b == 0);
      return true;
    case FaultKind::kIsolate:
    case FaultKind::kPartition: {
      std::set<int> others;
      for (int each = 0; each < scenario_.job.size; ++each) {
        if (!fault.group.contains(each)) others.insert(each);
      }
      separate(fault.group, others, fault);
      return true;
    }
    case FaultKind::kJoinTwice:
      add(fault.a, scenario_.job.size + static_cast<int>(ranks_.size())).start();
      break;
    case FaultKind::kStranger:
      send_stranger(fault.a);
      break;
    case FaultKind::kComesLate:
      return false;
  }
  event.is_harmless = true;
  event.is_certain = false;
  return true;
}

bool Simulation::stop(Rank& rank, Event& event) {
  if (!rank.is_alive() || rank.is_stopped()) return false;
  rank.stop();
  if (event.fault.lasts) time_.after(*event.fault.lasts, [&rank] { rank.resume(); });
  return true;
}

bool Simulation::reset_calls(const Rank& rank, Event& event) {
  for (int other = 0; other < scenario_.job.size; ++other) {
    if (is_tolerant() && !scenario_.job.tolerated.contains(other)) continue;
    const auto connection = rank.connection_to(other, false);
    if (!connection) continue;
    event.fault.b = other;
    if (is_tolerant()) note_hit(event, *current(other));
    network_.reset(*connection);
    return true;
  }
  return false;
}

void Simulation::separate(const std::set<int>& some, const std::set<int>& others,
                          const Fault& fault) {
  for (const int a : some) {
    for (const int b : others) {
      if (fault.way != Way::kTo) network_.cut(a, b);
      if (fault.way != Way::kFrom) network_.cut(b, a);
    }
  }
  if (!fault.lasts) return;
  time_.after(*fault.lasts, [this, some, others, fault] {
    if (trace_) trace_("healed: " + fault.text());
    for (const int a : some) {
      for (const int b : others) {
        if (fault.way != Way::kTo) network_.heal(a, b);
        if (fault.way != Way::kFrom) network_.heal(b, a);
      }
    }
  });
}

void Simulation::replace(const Fault& fault) {
  if (!fault.replacement || fault.a == 0) return;
  Rank& next = add(fault.a, scenario_.job.size + static_cast<int>(ranks_.size()));
  time_.after(*fault.replacement, [&next] { next.start(); });
}

// Starts a replacement. Unless `more_deaths` is 0, it dies before or soon after on_go().
void Simulation::replace_lost(int rank, int more_deaths) {
  Rank& next = add(rank, scenario_.job.size + static_cast<int>(ranks_.size()));
  next.start();
  if (more_deaths == 0) return;
  const auto die = [this, &next, rank, more_deaths] {
    if (!next.is_alive()) return;
    hit_.insert(&next);
    next.die();
    const Duration pause = seconds(random_.unit() * random_.unit());
    time_.after(pause, [this, rank, more_deaths] { replace_lost(rank, more_deaths - 1); });
  };
  const Job& job = scenario_.job;
  const double part = random_.unit();
  const auto share = [part](Duration whole) {
    return std::chrono::duration_cast<Duration>(whole * part);
  };
  if (random_.below(2) == 0) {
    time_.after(share(job.longest_prepare + 10 * job.longest_delay), die);
  } else {
    next.after_go(share(2 * job.longest_delay), die);
  }
}

void Simulation::send_stranger(int to) {
  strangers_.push_back(std::make_unique<Stranger>());
  Host& stranger = *strangers_.back();
  wire::Hello hello;
  hello.purpose = random_.below(2) == 0 ? wire::HelloPurpose::kJoin : wire::HelloPurpose::kPeer;
  hello.rank = static_cast<int>(random_.between(-2, scenario_.job.size + 2));
  const Message said[] = {{FrameKind::kHello, 0, 0, wire::encode(hello)},
                          {FrameKind::kHello, 0, 0, wire::Bytes{1, 2, 3}},
                          {FrameKind::kProof, 0, 0, wire::Bytes(32)},
                          {FrameKind::kJoin, 0, 0, wire::encode(wire::Join{kSimulatedJob})},
                          {FrameKind::kGo},
                          {FrameKind::kLost, 1}};
  const Message chosen = said[random_.below(std::size(said))];
  const bool is_silent = random_.below(4) == 0;
  network_.connect(stranger, *ranks_[static_cast<size_t>(to)], base::kNever,
                   [this, chosen, is_silent](std::optional<End> end) {
                     if (end && !is_silent) network_.send(*end, chosen);
                   });
}

// ---- events of the ranks ----

void Simulation::on_sent(const Rank& from, int to, const Message& message) {
  ++result_.frames[message.kind];
  const auto mix = [this](uint64_t value) {
    result_.digest = (result_.digest ^ value) * 0x100000001b3ULL;
  };
  mix(static_cast<uint64_t>(time_.now().time_since_epoch().count()));
  mix(static_cast<uint64_t>(from.place()));
  mix(static_cast<uint64_t>(to));
  mix(static_cast<uint64_t>(message.kind));
  mix(message.a);
  mix(message.b);
  const bool is_welcome = message.kind == FrameKind::kDirectory && from.has_met();
  if (is_tolerant() && is_welcome && from.rank() == 0)
    note_welcome(to, wire::decode_directory(message.body));
  if (!trace_ || message.kind == FrameKind::kHeartbeat) return;
  trace(from, std::string("-> ") + std::to_string(to) + " " + name_of(message.kind) + " " +
                  std::to_string(message.a) + " " + std::to_string(message.b));
}

void Simulation::trace(const Rank& rank, const std::string& what) {
  char time[32];
  std::snprintf(time, sizeof time, "%11.6f  ", time_.seconds_since_start());
  trace_(time + std::to_string(rank.rank()) + (rank.place() == rank.rank() ? "" : "'") + "  " +
         what);
}

void Simulation::on_round_entered(const Rank& rank, uint64_t round, uint64_t number) {
  Round& entered = rounds_[round];
  if (!entered.entered.insert(&rank).second) on_violation(rank, "enters a round twice");
  entered.numbers[rank.rank()] = number;
}

void Simulation::on_round_over(const Rank& rank, uint64_t round, uint64_t sum) {
  if (is_tolerant()) return check_tolerant_round(rank, round, sum);
  Round& over = rounds_[round];
  over.sum = 0;
  for (const auto& [each, number] : over.numbers) over.sum += number;
  if (static_cast<int>(over.numbers.size()) != scenario_.job.size) {
    on_violation(rank, "is told that a round is over which not all have come to");
  } else if (sum != over.sum) {
    on_violation(rank, "is told that the sum of a round is " + std::to_string(sum) + ": it is " +
                           std::to_string(over.sum));
  }
}

}  // namespace distrain::fake_network
