#include <iterator>
#include <string>
#include <thread>
#include <vector>

#include <nlohmann/json.hpp>

#include "../src/job/run/run_trace.h"
#include "support/catch.h"
#include "support/cluster.h"
#include "support/fake_trace.h"
#include "support/trace_path.h"

using namespace distrain;
using namespace distrain::job;
using Json = nlohmann::ordered_json;
using testing::TracePath;

namespace {

/// Collects the messages of warnings.
struct Warnings final : EventSink {
  void emit(std::string_view event, const job::Json& fields) override {
    CHECK(event == "warn");
    messages.push_back(fields["message"]);
  }
  void joined(std::string_view, const OptionMap&) override {}

  std::vector<std::string> messages;
};

void record(base::Tracer& tracer, int events) {
  base::TraceEvent event;
  event.name = "slice";
  for (int i = 0; i < events; ++i) tracer.record(event);
}

}  // namespace

TEST_CASE("A run without a trace file records nothing", "[trace]") {
  Warnings warnings;
  RunTrace trace(warnings);
  trace.start({{"trace", ""}}, 2);
  CHECK_FALSE(trace.tracer()->on());
  trace.collect();
  trace.write();
  trace.write_own(0, "role");
  CHECK(warnings.messages.empty());
}

TEST_CASE("Dropped events are reported once", "[trace]") {
  const TracePath path;
  Warnings warnings;
  RunTrace trace(warnings);
  trace.start({{"trace", path.text()}}, 2000);  // so many ranks that each may record 2000 events
  record(*trace.tracer(), 10'000);
  trace.write_own(1, "another rank's");
  CHECK_FALSE(path.exists());
  trace.write_own(0, "role");
  const size_t written = path.read()["traceEvents"].size() - 4;
  CHECK(written <= 2000);
  REQUIRE(warnings.messages.size() == 1);
  CHECK(warnings.messages[0] == "--trace " + path.text() + ": the last " +
                                    std::to_string(10'000 - written) +
                                    " events were too many and are missing");
  trace.write();
  CHECK(warnings.messages.size() == 1);
}

TEST_CASE("If the trace of a rank is unavailable, rank 0's part is written, and an error",
          "[trace]") {
  const TracePath path;
  Warnings warnings;
  RunTrace trace(warnings);
  testing::Cluster cluster(
      2,
      [](rpc::Agent& agent) {
        if (agent.rank() == 0) return;
        testing::expose_fake_trace(agent, [] {
          rpc::ExportedTrace trace = testing::exported_trace(1);
          trace.texts.clear();
          return trace;
        });
      },
      {},
      [&](rpc::AgentOptions& options) {
        options.tracer = options.rank == 0 ? trace.tracer() : nullptr;
      });
  trace.start({{"trace", path.text()}}, 2);
  trace.begin(cluster[0]);
  record(*trace.tracer(), 3);
  cluster.on_all([&](rpc::Agent& agent) {
    if (agent.rank() != 0) return agent.shutdown();
    agent.shutdown({}, [&] { trace.collect(); });
  });
  CHECK_FALSE(path.exists());
  const auto error = trace.write();
  REQUIRE(error);
  CHECK(error->kind == base::ErrorKind::kProtocol);
  CHECK(error->rank == 1);
  CHECK(error->message ==
        "the trace of rank 1: malformed message: a trace with a text that is not there");
  int slices = 0;
  const Json written = path.read();
  for (const Json& event : written["traceEvents"]) {
    CHECK(event["pid"] == 0);
    slices += event["name"] == "slice";
  }
  CHECK(slices == 3);
  CHECK(warnings.messages.empty());
}
