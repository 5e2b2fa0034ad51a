// Fuzz target for traces: rank 0 receives another rank's trace, aligns its clock and writes it.
#include "distrain/rpc/trace.h"

#include <filesystem>
#include <fstream>
#include <string>

#include <ATen/Functions.h>
#include <nlohmann/json.hpp>
#include <unistd.h>

#include "../src/job/run/run_trace.h"
#include "../src/rpc/trace/trace_export.h"
#include "distrain/rpc/serialize.h"
#include "frame.h"
#include "targets.h"

namespace distrain::fuzz {

namespace {

using Kind = base::TraceEvent::Kind;

void write_and_read(const std::vector<base::RankTrace>& ranks) {
  const std::string path = "/dev/shm/distrain-fuzz-" + std::to_string(getpid());
  job::write_trace(path, ranks);
  std::ifstream file(path);
  check(nlohmann::json::accept(file), "a trace that is written is JSON");
  std::filesystem::remove(path);
}

void check_events(const base::TraceTrack& track) {
  for (const base::TraceEvent& event : track.events) {
    check(event.kind <= Kind::kAsync && event.name && event.category, "an event is whole");
    check(event.end >= event.start, "an event ends after it begins");
  }
}

// Imports the frame as the traces of ranks 1 and 2. The frame's context ID selects the offset of
// rank 1's clock. Rank 2 has the same clock as rank 0.
void run_trace(Input input) {
  auto message = read_frame(input);
  if (!message) return;
  const MemoryLimit limit(3 * sizeof(base::TraceEvent) * base::Tracer::kLimit + (size_t{16} << 20),
                          "the limit of a rank's events");
  base::Tracer tracer;
  std::vector<base::RankTrace> ranks = {{0, "master", {}, 0}};
  try {
    rpc::Decoder decoder(*message);
    const auto trace = rpc::decode<rpc::ExportedTrace>(decoder);
    ranks.push_back({1, "trainer", rpc::import_trace(tracer, trace), trace.dropped});
  } catch (const base::Exception& e) {
    check(e.kind() == base::ErrorKind::kProtocol, "what does not fit is refused as 'protocol'");
    return;
  }
  size_t events = 0;
  for (const base::TraceTrack& track : ranks[1].tracks) {
    check_events(track);
    events += track.events.size();
  }
  if (events > 1000) return;
  ranks.push_back(ranks[1]);
  ranks[2].rank = 2;
  // Valid times are up to ±kMostTime, so two valid clocks may differ by this offset.
  const auto offset = static_cast<int64_t>(message->header.context_id) % (2 * rpc::kMostTime);
  rpc::align_traces(ranks,
                    {{"a", {}}, {"b", {{0, offset, 1000}, {1'000'000, offset, 10}}}, {"a", {}}});
  for (const base::RankTrace& rank : ranks) {
    for (const base::TraceTrack& track : rank.tracks) check_events(track);
  }
  if (message->header.call_id % 4 == 1) write_and_read(ranks);
}

std::vector<Bytes> trace_seeds() {
  rpc::ExportedTrace trace;
  trace.texts = {"forward", "rpc", "micro_batch"};
  trace.tracks = {{"main", 2}, {"worker", 2}};
  trace.events = at::tensor({0, 0, 1, 2,  3,    1000, 3000, 0,  //
                             1, 0, 1, -1, 1500, 1200, 2000, 9,  //
                             2, 0, 1, -1, 0,    2500, 2600, 9,  //
                             3, 1, 1, 2,  4,    2500, 2500, 8},
                            at::kLong)
                     .view({4, rpc::kTraceColumns});
  std::vector<Bytes> seeds;
  for (const uint64_t call : {1, 2}) {
    rpc::OutMessage out;
    rpc::Encoder encoder(out);
    rpc::encode(encoder, trace);
    seeds.push_back(
        frame_bytes(std::move(out),
                    {.kind = wire::FrameKind::kReply, .call_id = call, .context_id = 500 * call}));
  }
  return seeds;
}

}  // namespace

const Target kTrace{"trace", run_trace, trace_seeds};

}  // namespace distrain::fuzz
