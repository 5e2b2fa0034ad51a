#include <algorithm>
#include <atomic>
#include <cmath>
#include <future>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include <ATen/Functions.h>

#include "distrain/base/trace.h"
#include "distrain/rpc/trace.h"
#include "support/catch.h"
#include "support/cluster.h"
#include "support/fake_trace.h"
#include "trace/trace_export.h"

using namespace distrain;
using namespace std::chrono_literals;
using base::RankTrace;
using base::TraceEvent;
using base::Tracer;
using rpc::Agent;
using testing::Cluster;
using Kind = TraceEvent::Kind;

namespace {

int64_t traced_add(int64_t a, int64_t b) {
  const base::TraceScope scope("adding");
  return a + b;
}
base::Future<int64_t> traced_later(rpc::CallContext& call, int64_t value) {
  return call.agent.rpc_async<&traced_add>(call.caller, value, 1);
}
int64_t traced_boom() { throw std::runtime_error("user code broke"); }

void expose_traced(Agent& agent) {
  agent.expose<&traced_add>("add");
  agent.expose<&traced_later>("later");
  agent.expose<&traced_boom>("boom");
}

using Clocks = std::vector<Tracer::FalseClock>;

/// Returns agents that each have a tracer, which records from the beginning.
Cluster traced_cluster(const Clocks& clocks) {
  return Cluster(
      static_cast<int>(clocks.size()), expose_traced, {}, [&](rpc::AgentOptions& options) {
        options.tracer = std::make_shared<Tracer>(clocks[static_cast<size_t>(options.rank)]);
        options.tracer->start();
      });
}

/// Returns two agents; rank 1 answers requests for its trace with `answer`.
Cluster cluster_with_fake(const testing::TraceAnswer& answer, const rpc::ClockAnswer& clock = {}) {
  return Cluster(
      2,
      [&](Agent& agent) {
        if (agent.rank() == 1) testing::expose_fake_trace(agent, answer, clock);
      },
      {},
      [](rpc::AgentOptions& options) {
        options.tracer = options.rank == 0 ? std::make_shared<Tracer>() : nullptr;
      });
}

/// Shuts all ranks down and returns the traces, which rank 0 collects during its shutdown.
std::vector<RankTrace> collect(Cluster& cluster, rpc::TraceCollector& collector) {
  std::vector<RankTrace> ranks;
  cluster.on_all([&](Agent& agent) {
    if (agent.rank() != 0) return agent.shutdown();
    agent.shutdown({}, [&] { ranks = collector.collect(); });
  });
  return ranks;
}

template <class F>
void for_events(const std::vector<RankTrace>& ranks, F fn) {
  for (const RankTrace& rank : ranks) {
    for (const base::TraceTrack& track : rank.tracks) {
      for (const TraceEvent& event : track.events) fn(rank.rank, event);
    }
  }
}

int count(const std::vector<RankTrace>& ranks, int rank, Kind kind, const std::string& name) {
  int found = 0;
  for_events(ranks, [&](int where, const TraceEvent& event) {
    found += where == rank && event.kind == kind && event.name == name;
  });
  return found;
}

/// Checks that no call's flow ends before it begins. Returns the number of flows with both ends.
int check_flows(const std::vector<RankTrace>& ranks) {
  std::map<uint64_t, int64_t> left;
  int flows = 0;
  int backwards = 0;
  for_events(ranks, [&](int, const TraceEvent& event) {
    if (event.kind == Kind::kFlowOut) left[event.id] = event.value;
  });
  for_events(ranks, [&](int, const TraceEvent& event) {
    if (event.kind != Kind::kFlowIn || !left.contains(event.id)) return;
    ++flows;
    backwards += event.start < left[event.id];
  });
  CHECK(backwards == 0);
  return flows;
}

/// Artificial traces with one track per rank. A test adds calls with any times.
struct MadeUp {
  std::vector<RankTrace> ranks;
  std::vector<rpc::RankClock> clocks;
  uint64_t calls = 0;

  explicit MadeUp(const std::vector<std::string>& domains) {
    for (size_t r = 0; r < domains.size(); ++r) {
      ranks.push_back({static_cast<int>(r), "w" + std::to_string(r), {{"main", {}}}, 0});
      clocks.push_back({domains[r], {}});
    }
  }
  void slice(size_t rank, int64_t start, int64_t end, Kind kind = Kind::kSlice, uint64_t id = 0) {
    TraceEvent event;
    event.kind = kind;
    event.name = "slice";
    event.start = event.value = start;
    event.end = end;
    event.id = id;
    ranks[rank].tracks[0].events.push_back(event);
  }
  /// Adds a call with the times that the clocks of the two ranks show.
  void call(size_t from, int64_t left, size_t to, int64_t arrived) {
    ++calls;
    slice(from, left, left + 10, Kind::kFlowOut, calls);
    slice(to, arrived, arrived + 10, Kind::kFlowIn, calls);
  }
  int64_t start(size_t rank, size_t i) const { return ranks[rank].tracks[0].events[i].start; }
};

}  // namespace

TEST_CASE("Both sides of a call are in the trace, with a flow between them", "[trace]") {
  Cluster cluster = traced_cluster({{}, {}});
  rpc::TraceCollector collector(cluster[0]);
  CHECK(cluster[0].rpc_sync<&traced_add>(1, 1, 2) == 3);
  CHECK(cluster[1].rpc_sync<&traced_add>(0, 1, 2) == 3);
  CHECK(cluster[0].rpc_sync<&traced_add>(0, 1, 2) == 3);  // to itself
  CHECK(cluster[0].rpc_sync<&traced_later>(1, 5) == 6);   // from rank 1 to rank 0
  CHECK(cluster[0].remote<&traced_add>(1, 2, 2).to_here() == 4);
  CHECK_THROWS(cluster[0].rpc_sync<&traced_boom>(1));
  const std::vector<RankTrace> ranks = collect(cluster, collector);
  REQUIRE(ranks.size() == 2);
  CHECK(ranks[1].role == "w1");
  CHECK(count(ranks, 0, Kind::kFlowOut, "call add") == 3);
  CHECK(count(ranks, 1, Kind::kFlowOut, "call add") == 2);
  CHECK(count(ranks, 0, Kind::kFlowIn, "add") == 3);
  CHECK(count(ranks, 1, Kind::kFlowIn, "add") == 2);
  CHECK(count(ranks, 0, Kind::kAsync, "rpc_sync#add(w0 -> w1)") == 1);
  CHECK(count(ranks, 0, Kind::kAsync, "rpc_sync#add(w0 -> w0)") == 1);
  CHECK(count(ranks, 0, Kind::kAsync, "rpc_remote#add(w0 -> w1)") == 1);
  CHECK(count(ranks, 1, Kind::kFlowIn, "later") == 1);
  CHECK(count(ranks, 1, Kind::kAsync, "rpc_async#add(w1 -> w0)") == 1);
  CHECK(count(ranks, 0, Kind::kAsync, "rpc_sync#boom(w0 -> w1)") == 1);
  CHECK(count(ranks, 0, Kind::kFlowOut, "call distrain.rref.fetch") == 1);
  CHECK(count(ranks, 0, Kind::kSlice, "adding") == 3);
  CHECK(count(ranks, 1, Kind::kSlice, "adding") == 2);
  CHECK(check_flows(ranks) == 8);
  for_events(ranks, [&](int rank, const TraceEvent& event) {
    CHECK(event.start <= event.end);
    CHECK(std::string(event.name).find("distrain.trace.") == std::string::npos);
    if (event.kind == Kind::kFlowOut) {
      CHECK(event.start <= event.value);
      CHECK(event.value <= event.end);
    }
    if (event.kind != Kind::kSlice) CHECK(event.id != 0);
    if (event.kind == Kind::kAsync) CHECK(static_cast<int>(event.id >> 40) == rank);
  });
}

TEST_CASE("Nothing is recorded before start() and without a tracer", "[trace]") {
  Cluster cluster(2, expose_traced, {},
                  [](rpc::AgentOptions& options) { options.tracer = std::make_shared<Tracer>(); });
  cluster[0].rpc_sync<&traced_add>(1, 1, 2);
  CHECK(cluster[0].tracer()->tracks().empty());
  CHECK(cluster[1].tracer()->tracks().empty());
  cluster.shutdown();
  Cluster without(2, expose_traced);
  without[0].rpc_sync<&traced_add>(1, 1, 2);
  CHECK(without[0].tracer() == nullptr);
  without.shutdown();
}

TEST_CASE("A trace of many events is sent in parts", "[trace]") {
  Cluster cluster = traced_cluster({{}, {}});
  rpc::TraceCollector collector(cluster[0]);
  constexpr int kEvents = 150'000;  // makes more than two parts
  TraceEvent event;
  event.name = cluster[1].tracer()->intern("a name of ", "rank 1");
  event.key = "i";
  for (event.value = 0; event.value < kEvents; ++event.value) cluster[1].tracer()->record(event);
  const std::vector<RankTrace> ranks = collect(cluster, collector);
  CHECK(count(ranks, 1, Kind::kSlice, "a name of rank 1") == kEvents);
  int64_t next = 0;
  for_events(ranks, [&](int, const TraceEvent& got) {
    if (got.key && std::string(got.key) == "i") next = got.value == next ? next + 1 : -1;
  });
  CHECK(next == kEvents);
}

TEST_CASE("A slice that is open when the trace is requested is included", "[trace]") {
  Cluster cluster = traced_cluster({{}, {}});
  rpc::TraceCollector collector(cluster[0]);
  for (const int slow : {0, 1}) {
    std::promise<void> begun;
    std::promise<void> end;
    std::thread thread([&] {
      const base::TraceBinding binding(cluster[slow].tracer(), "slow");
      const base::TraceScope scope("late");
      begun.set_value();
      end.get_future().wait();
    });
    begun.get_future().wait();
    std::thread ends([&] {
      std::this_thread::sleep_for(100ms);
      end.set_value();
    });
    int late = 0;
    for_events(collector.collect(), [&](int rank, const TraceEvent& event) {
      late += rank == slow && std::string(event.name) == "late";
    });
    CHECK(late == 1);
    thread.join();
    ends.join();
    for (int rank : {0, 1}) cluster[rank].tracer()->start();
  }
  cluster.shutdown();
}

TEST_CASE("Times of ranks with wrong clocks are converted to rank 0's clock", "[trace]") {
  // The clocks are days apart, and drift much faster than real ones.
  Cluster cluster = traced_cluster({{},
                                    {"elsewhere", 200'000'000'000'000, 0.001},
                                    {"in the past", -3'000'000'000, -0.002},
                                    {"ahead", 40'000, 0}});
  rpc::TraceCollector collector(cluster[0]);
  const int64_t begin = Tracer::now();
  std::atomic<int> wrong{0};  // Catch2's assertions may be used by one thread only
  cluster.on_all([&wrong](Agent& agent) {
    for (int i = 0; i < 300; ++i) {
      const int to = (agent.rank() + 1 + i % 3) % 4;
      if (agent.rpc_sync<&traced_later>(to, i) != i + 1) ++wrong;
    }
  });
  CHECK(wrong == 0);
  const std::vector<RankTrace> ranks = collect(cluster, collector);
  const int64_t end = Tracer::now();  // read late, because a handler may end after its reply
  CHECK(check_flows(ranks) == 2 * 4 * 300);
  // All events happened between `begin` and `end`. kOff allows for errors of the clock readings.
  constexpr int64_t kOff = 50'000'000;
  int outside = 0;
  for_events(ranks, [&](int, const TraceEvent& event) {
    outside += event.start < begin - kOff || event.end > end + kOff || event.end < event.start;
  });
  CHECK(outside == 0);
}

TEST_CASE("A clock that several ranks share is read once for all", "[trace]") {
  Cluster cluster = traced_cluster({{},
                                    {"far", 700'000'000'000},
                                    {"far", 700'000'000'000},
                                    {},
                                    {"farther", -500'000'000'000},
                                    {"far", 700'000'000'000}});
  const auto calls = [&] { return cluster[0].traffic().calls; };
  constexpr uint64_t kDomains = 5;        // each rank is asked which clock it has
  constexpr uint64_t kReadings = 2 * 16;  // 16 readings of each of two foreign clocks
  const uint64_t before = calls();
  rpc::TraceCollector collector(cluster[0]);
  CHECK(calls() - before == kDomains + kReadings);
  std::atomic<int> wrong{0};
  cluster.on_all([&wrong](Agent& agent) {
    for (int i = 0; i < 100; ++i) {
      const int to = (agent.rank() + 1 + i % 5) % 6;
      if (agent.rpc_sync<&traced_add>(to, i, 1) != i + 1) ++wrong;
    }
  });
  CHECK(wrong == 0);
  const uint64_t between = calls();
  const std::vector<RankTrace> ranks = collect(cluster, collector);
  CHECK(calls() - between == 5 + kReadings);  // one call to each rank, and the readings
  CHECK(check_flows(ranks) == 6 * 100);
  // The whole trace is shorter than a minute, although two clocks are wrong by several minutes.
  int64_t first = std::numeric_limits<int64_t>::max();
  int64_t last = std::numeric_limits<int64_t>::min();
  for_events(ranks, [&](int, const TraceEvent& event) {
    first = std::min(first, event.start);
    last = std::max(last, event.end);
  });
  CHECK(last - first < 60'000'000'000);
}

TEST_CASE("A rank that dies during the collection of its trace is named", "[trace]") {
  std::promise<void> asked;
  std::promise<void> noticed;
  const std::future<void> until_asked = asked.get_future();
  const std::future<void> until_noticed = noticed.get_future();
  Cluster cluster = cluster_with_fake([&] {
    asked.set_value();
    until_noticed.wait();
    return testing::exported_trace(1);
  });
  rpc::TraceCollector collector(cluster[0]);
  std::thread killer([&] {
    until_asked.wait();
    cluster.kill(1);  // returns once the handler of rank 1 has returned
  });
  const base::Error error = testing::error_of([&] { collector.collect(); });
  noticed.set_value();
  killer.join();
  CHECK(error.kind == base::ErrorKind::kPeerLost);
  CHECK(error.rank == 1);
  CHECK(error.message.find("the trace of rank 1: ") == 0);
}

TEST_CASE("A rank with an invalid trace is named, and the shutdown continues", "[trace]") {
  const auto collecting_fails = [](const testing::TraceAnswer& answer) {
    Cluster cluster = cluster_with_fake(answer);
    rpc::TraceCollector collector(cluster[0]);
    base::Error error;
    cluster.on_all([&](Agent& agent) {
      if (agent.rank() != 0) return agent.shutdown();
      agent.shutdown({}, [&] { error = testing::error_of([&] { collector.collect(); }); });
    });
    CHECK(error.rank == 1);
    CHECK(error.message.find("the trace of rank 1: ") == 0);
    return error.kind;
  };
  using base::ErrorKind;
  // Rank 1 sends an event whose name is missing.
  CHECK(collecting_fails([] {
          rpc::ExportedTrace trace = testing::exported_trace(1);
          trace.texts.clear();
          return trace;
        }) == ErrorKind::kProtocol);
  // Rank 1 sends no events, or fewer or more events than it announces.
  CHECK(collecting_fails([] {
          rpc::ExportedTrace trace = testing::exported_trace(1);
          trace.events = at::Tensor();
          return trace;
        }) == ErrorKind::kProtocol);
  for (const uint64_t announced : {uint64_t{0}, uint64_t{2}, uint64_t{1} << 60}) {
    CHECK(collecting_fails([announced] { return testing::exported_trace(announced); }) ==
          ErrorKind::kProtocol);
  }
  // Rank 1 sends more events than a tracer can record.
  CHECK(collecting_fails([] {
          rpc::ExportedTrace trace = testing::exported_trace(base::Tracer::kLimit + 1);
          trace.events = trace.events.repeat({base::Tracer::kLimit + 1, 1});
          return trace;
        }) == ErrorKind::kProtocol);
  CHECK(collecting_fails([]() -> rpc::ExportedTrace {
          throw std::runtime_error("no trace here");
        }) == ErrorKind::kRemoteFailed);
}

TEST_CASE("A rank whose clock shows an impossible time is named", "[trace]") {
  for (const int64_t now :
       {rpc::kMostTime + 1, -rpc::kMostTime - 1, std::numeric_limits<int64_t>::min(),
        std::numeric_limits<int64_t>::max()}) {
    Cluster cluster =
        cluster_with_fake([] { return testing::exported_trace(1); }, {"elsewhere", now});
    const base::Error error = testing::error_of([&] { rpc::TraceCollector{cluster[0]}; });
    CHECK(error.kind == base::ErrorKind::kProtocol);
    CHECK(error.rank == 1);
    CHECK(error.message ==
          "the trace of rank 1: malformed message: a clock beyond what clocks show");
    cluster.shutdown();
  }
  // The latest possible time is accepted.
  Cluster cluster =
      cluster_with_fake([] { return testing::exported_trace(1); }, {"elsewhere", rpc::kMostTime});
  rpc::TraceCollector collector(cluster[0]);
  CHECK(collect(cluster, collector).size() == 2);
}

TEST_CASE("A rank that dies before the collection is named", "[trace]") {
  Cluster cluster = traced_cluster({{}, {}});
  rpc::TraceCollector collector(cluster[0]);
  cluster.kill(1);
  const base::Error error = testing::error_of([&] { collector.collect(); });
  CHECK(error.kind == base::ErrorKind::kPeerLost);
  CHECK(error.rank == 1);
  CHECK(rpc::own_trace(cluster[0]).role == "w0");
}

TEST_CASE("A malformed trace is refused", "[trace]") {
  Tracer tracer;
  rpc::ExportedTrace trace;
  trace.texts = {"name", "category"};
  trace.tracks = {{"main", 1}, {"loop", 1}};
  // The columns are kind, name, category, key, value, start, end and id.
  const at::Tensor good = at::tensor({0, 0, 1, -1, 0, 10, 20, 0}, at::kLong).repeat({2, 1});
  const auto refuses = [&](const at::Tensor& events) {
    trace.events = events;
    return testing::error_of([&] { rpc::import_trace(tracer, trace); }).kind ==
           base::ErrorKind::kProtocol;
  };
  const auto with = [&](int64_t column, int64_t value) {
    at::Tensor events = good.clone();
    events[1][column] = value;
    return events;
  };
  CHECK(refuses(good[0].view({1, 8})));
  CHECK(refuses(good.repeat({2, 1})));
  trace.events = good;
  const auto tracks = rpc::import_trace(tracer, trace);
  REQUIRE(tracks.size() == 2);
  CHECK(tracks[1].name == "loop");
  CHECK(std::string(tracks[1].events.at(0).name) == "name");
  CHECK(refuses(with(0, 4)));
  CHECK(refuses(with(0, -1)));
  CHECK(refuses(with(1, 2)));
  CHECK(refuses(with(2, -1)));
  CHECK(refuses(with(3, 2)));
  CHECK(refuses(with(6, 9)));
  // Returns true if an event with these times is refused. At `left`, a call left its rank.
  const auto at_times = [&](Kind kind, int64_t left, int64_t start, int64_t end) {
    at::Tensor events = good.clone();
    const int64_t columns[] = {static_cast<int64_t>(kind), left, start, end};
    const int64_t places[] = {0, 4, 5, 6};
    for (size_t i = 0; i < std::size(places); ++i) events[1][places[i]] = columns[i];
    return refuses(events);
  };
  constexpr int64_t kLeast = std::numeric_limits<int64_t>::min();
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  for (const Kind kind : {Kind::kSlice, Kind::kFlowIn, Kind::kAsync, Kind::kFlowOut}) {
    CAPTURE(static_cast<int>(kind));
    CHECK_FALSE(at_times(kind, 5, -rpc::kMostTime, rpc::kMostTime));
    CHECK(at_times(kind, 5, -rpc::kMostTime - 1, 20));
    CHECK(at_times(kind, 5, -7'378'697'629'483'820'647, 20));
    CHECK(at_times(kind, 5, kLeast, kLeast));
    CHECK(at_times(kind, 15, 10, rpc::kMostTime + 1));
    CHECK(at_times(kind, 15, 10, kMost));
    for (const int64_t outside : {int64_t{9}, int64_t{21}, kLeast, kMost}) {
      CHECK(at_times(kind, outside, 10, 20) == (kind == Kind::kFlowOut));
    }
  }
  CHECK_FALSE(at_times(Kind::kFlowOut, 10, 10, 20));
  CHECK_FALSE(at_times(Kind::kFlowOut, 20, 10, 20));
  CHECK(refuses(at::Tensor()));
  CHECK(refuses(good.view({16})));
  CHECK(refuses(good.to(at::kInt)));
  CHECK(refuses(at::empty({0, 8}, at::kLong)));
}

TEST_CASE("Clock readings are interpolated, and held constant outside their range",
          "[trace][align]") {
  MadeUp made({"a", "b"});
  made.clocks[1].readings = {{1000, 500, 10}, {2000, 600, 10}};
  for (const int64_t t : {900, 1000, 1500, 2000, 2100}) made.slice(1, t, t + 1);
  rpc::align_traces(made.ranks, made.clocks);
  CHECK(made.start(1, 0) == 1400);
  CHECK(made.start(1, 1) == 1500);
  CHECK(made.start(1, 2) == 2050);
  CHECK(made.start(1, 3) == 2600);
  CHECK(made.start(1, 4) == 2700);

  // If two readings are too close to estimate a drift, only the more accurate one is used.
  MadeUp brief({"a", "b"});
  brief.clocks[1].readings = {{1000, 500, 90}, {1050, 460, 30}};
  brief.slice(1, 1000, 1001);
  rpc::align_traces(brief.ranks, brief.clocks);
  CHECK(brief.start(1, 0) == 1460);
}

TEST_CASE("Wrong estimates are corrected by the flows", "[trace][align]") {
  // Rank 1's clock is 100 behind rank 0's, rank 2's is 100 ahead, and there are no clock readings.
  MadeUp made({"a", "b", "c"});
  made.call(0, 1000, 1, 920);
  made.call(1, 930, 0, 1060);
  made.call(0, 1100, 2, 1220);
  made.call(2, 1230, 0, 1140);
  made.call(1, 1100, 2, 1310);
  made.call(2, 1400, 1, 1210);
  rpc::align_traces(made.ranks, made.clocks);
  CHECK(check_flows(made.ranks) == 6);
  // Each clock gets one correction, so the distance between two events of a rank is unchanged.
  CHECK(made.start(1, 1) - made.start(1, 0) == 10);
  CHECK(made.start(2, 1) - made.start(2, 0) == 10);
}

TEST_CASE("Ranks of one machine have the same correction", "[trace][align]") {
  MadeUp made({"a", "b", "b"});
  made.clocks[1].readings = {{0, 100, 10}};
  made.clocks[2].readings = {{0, 130, 12}};
  made.call(1, 1000, 2, 1001);
  made.call(0, 1300, 1, 1150);
  rpc::align_traces(made.ranks, made.clocks);
  CHECK(check_flows(made.ranks) == 2);
  CHECK(made.start(2, 0) - made.start(1, 0) == 1);
}

TEST_CASE("Clocks that no constant corrects still give flows that point forwards",
          "[trace][align]") {
  // At time 5000, rank 1's clock jumps from 300 behind to 700 ahead, so no constant corrects it.
  MadeUp made({"a", "b", "c"});
  int64_t true_time = 100;
  const auto shown = [](size_t rank, int64_t time) {
    if (rank == 1) return time < 5000 ? time - 300 : time + 700;
    return rank == 2 && time > 7000 ? time - 2000 + (time - 7000) / 3 : time;
  };
  for (int i = 0; i < 300; ++i) {
    const size_t from = static_cast<size_t>(i) % 3;
    const size_t to = static_cast<size_t>(i + 1 + i % 2) % 3;
    made.call(from, shown(from, true_time), to, shown(to, true_time + 20));
    true_time += 37;
  }
  // Rank 2's clock went back once. Real clocks are monotonic, so the events get ascending times.
  for (RankTrace& rank : made.ranks) {
    int64_t last = 0;
    for (TraceEvent& event : rank.tracks[0].events) {
      event.start = event.value = last = std::max(last + 1, event.start);
      event.end = event.start + 1;
    }
  }
  std::vector<RankTrace> before = made.ranks;
  rpc::align_traces(made.ranks, made.clocks);
  CHECK(check_flows(made.ranks) == 300);
  for (size_t r = 0; r < 3; ++r) {
    const auto& old = before[r].tracks[0].events;
    const auto& now = made.ranks[r].tracks[0].events;
    for (size_t i = 1; i < now.size(); ++i) {
      // Aligning keeps the events in order and moves no two of them closer together.
      CHECK(now[i].start - now[i - 1].start >= old[i].start - old[i - 1].start);
    }
  }
}

TEST_CASE("Times with the largest possible distance are aligned without overflow",
          "[trace][align]") {
  // Each call seems to arrive ages before it leaves, which no clock correction can explain.
  const bool in_a_ring = GENERATE(false, true);
  constexpr size_t kRanks = 8;
  MadeUp made({"a", "b", "c", "d", "e", "f", "g", "h"});
  for (size_t r = 1; r < kRanks; ++r) {
    const int64_t shown = r % 2 == 0 ? rpc::kMostTime : -rpc::kMostTime;
    made.clocks[r].readings = {{shown, -shown, 10}};
  }
  for (size_t r = 0; r < kRanks; ++r) {
    if (r + 1 < kRanks || in_a_ring) {
      made.call(r, rpc::kMostTime - 10, (r + 1) % kRanks, -rpc::kMostTime);
    }
  }
  for (RankTrace& rank : made.ranks) {
    auto& events = rank.tracks[0].events;
    std::sort(events.begin(), events.end(),
              [](const TraceEvent& a, const TraceEvent& b) { return a.start < b.start; });
  }
  rpc::align_traces(made.ranks, made.clocks);
  for (const RankTrace& rank : made.ranks) {
    int64_t last = std::numeric_limits<int64_t>::min();
    for (const TraceEvent& event : rank.tracks[0].events) {
      CHECK(event.start >= last);
      CHECK(event.end >= event.start);
      CHECK(event.end <= 2 * rpc::kMostTime);
      CHECK(event.start >= -2 * rpc::kMostTime);
      last = event.start;
    }
  }
}
