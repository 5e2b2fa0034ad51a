#include <map>
#include <set>
#include <string>

#include <limits.h>
#include <nlohmann/json.hpp>
#include <unistd.h>

#include "../src/job/run/run_trace.h"
#include "distrain/rpc/trace.h"
#include "support/catch.h"
#include "support/cluster.h"
#include "support/files.h"

using namespace distrain;
using namespace distrain::job;
using namespace distrain::testing;
using base::TraceEvent;
using Kind = TraceEvent::Kind;

namespace {

TraceEvent made(Kind kind, const char* name, int64_t start, int64_t end, uint64_t id = 0) {
  TraceEvent event;
  event.kind = kind;
  event.name = name;
  event.category = "test";
  event.start = event.value = start;
  event.end = end;
  event.id = id;
  return event;
}

std::vector<base::RankTrace> sample() {
  std::vector<base::RankTrace> ranks(2);
  ranks[0] = {0, "trainer0", {{"main", {}}, {"loop", {}}}, 0};
  ranks[1] = {1, "a \"role\"\n", {{"worker", {}}}, 0};
  auto& main = ranks[0].tracks[0].events;
  main.push_back(made(Kind::kSlice, "inner", 5'000'001'500, 5'000'002'000));
  main.push_back(made(Kind::kFlowOut, "call f", 5'000'001'200, 5'000'001'400, 7));
  main.back().value = 5'000'001'300;
  main.push_back(made(Kind::kFlowOut, "call lost", 5'000'001'410, 5'000'001'420, 8));
  main.push_back(made(Kind::kSlice, "outer", 5'000'001'000, 5'000'003'000));
  main.back().key = "step";
  main.back().value = 12;
  ranks[0].tracks[1].events.push_back(made(Kind::kAsync, "f", 5'000'001'300, 5'000'002'345, 7));
  auto& worker = ranks[1].tracks[0].events;
  worker.push_back(made(Kind::kFlowIn, "f", 5'000'001'300, 5'000'001'900, 7));
  worker.push_back(made(Kind::kFlowIn, "from nowhere", 5'000'001'950, 5'000'001'960, 9));
  return ranks;
}

nlohmann::json parse_trace(const std::string& path) {
  return nlohmann::json::parse(read_text(path));
}

std::set<std::string> names_in(const Folder& folder) {
  std::set<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(folder.path())) {
    names.insert(entry.path().filename());
  }
  return names;
}

void run_operators() {
  const at::Tensor t = at::ones({1}) + at::ones({1});
  (t * t).relu().sigmoid();
}

}  // namespace

TEST_CASE("A trace file names the calls of a rank, and the operators that they run", "[trace]") {
  Cluster cluster(
      2, [](rpc::Agent& agent) { agent.expose<&run_operators>("run_operators"); }, {},
      [](rpc::AgentOptions& options) {
        options.tracer = std::make_shared<base::Tracer>();
        options.tracer->start();
      });
  rpc::TraceCollector collector(cluster[0]);
  {
    const auto operators = rpc::trace_operators();
    cluster[1].rpc_async<&run_operators>(0).wait();
  }
  const Folder folder;
  const std::string path = folder.path("t.json");
  cluster.on_all([&](rpc::Agent& agent) {
    if (agent.rank() != 0) return agent.shutdown();
    agent.shutdown({}, [&] { write_trace(path, collector.collect()); });
  });
  std::set<std::string> names;
  const nlohmann::json trace = parse_trace(path);
  for (const auto& event : trace["traceEvents"]) names.insert(event["name"]);
  for (const char* name : {"aten::ones", "aten::add", "aten::mul", "aten::relu", "aten::sigmoid",
                           "rpc_async#run_operators(w1 -> w0)", "run_operators"}) {
    CAPTURE(name);
    CHECK(names.contains(name));
  }
}

TEST_CASE("A trace file follows the format's rules", "[trace]") {
  const Folder folder;
  const std::string path = folder.write("t.json", "what was there before");
  write_trace(path, sample());
  const nlohmann::json trace = parse_trace(path);
  CHECK(trace["displayTimeUnit"] == "ms");
  std::map<std::string, nlohmann::json> slices;
  std::map<std::string, int> phases;
  std::map<int, std::string> roles;
  std::set<int> threads;
  for (const auto& event : trace["traceEvents"]) {
    const std::string phase = event["ph"];
    ++phases[phase];
    if (phase == "X") slices[event["name"]] = event;
    if (phase == "M" && event["name"] == "process_name") {
      roles[event["pid"].get<int>()] = event["args"]["name"];
    }
    if (phase == "M" && event["name"] == "thread_name") {
      CHECK(threads.insert(event["tid"].get<int>()).second);
    }
  }
  CHECK(roles == std::map<int, std::string>{{0, "trainer0"}, {1, "a \"role\"\n"}});
  CHECK(threads == std::set<int>{3, 4, 5});
  CHECK(phases ==
        std::map<std::string, int>{{"M", 10}, {"X", 6}, {"s", 1}, {"f", 1}, {"b", 1}, {"e", 1}});
  CHECK(slices["outer"]["ts"] == 0.0);
  CHECK(slices["outer"]["dur"] == 2.0);
  CHECK(slices["outer"]["args"]["step"] == 12);
  CHECK(slices["inner"]["ts"] == 0.5);
  CHECK(slices["inner"]["tid"] == slices["outer"]["tid"]);

  // Each event has a line; events of the same time keep the order of the file.
  const std::string text = read_text(path);
  const auto place = [&](const std::string& part) {
    INFO(part);
    REQUIRE(text.find(part) != std::string::npos);
    return text.find(part);
  };
  CHECK(place("\"outer\"") < place("\"call f\""));
  CHECK(place("\"call f\"") < place("\"ph\":\"s\""));
  CHECK(place("\"ph\":\"s\"") < place("\"inner\""));
  place(R"({"ph":"s","pid":0,"tid":3,"ts":0.300,"name":"call","cat":"rpc","id":7})");
  place(R"({"ph":"f","bp":"e","pid":1,"tid":5,"ts":0.300,"name":"call","cat":"rpc","id":7})");
  place(R"({"ph":"b","pid":0,"tid":4,"ts":0.300,"name":"f","cat":"test","id":"7"})");
  place(R"({"ph":"e","pid":0,"tid":4,"ts":1.345,"name":"f","cat":"test","id":"7"})");
  CHECK(std::count(text.begin(), text.end(), '\n') == 1 + 20 + 1);
}

TEST_CASE("An empty trace, and one larger than a buffer, are written", "[trace]") {
  const Folder folder;
  const std::string path = folder.path("t.json");
  write_trace(path, {{0, "local", {}, 0}});
  CHECK(parse_trace(path)["traceEvents"].size() == 2);
  std::vector<base::RankTrace> ranks = {{0, "local", {{"main", {}}}, 0}};
  for (int64_t i = 0; i < 30'000; ++i) {
    ranks[0].tracks[0].events.push_back(made(Kind::kSlice, "slice", 10 * i, 10 * i + 5));
  }
  write_trace(path, ranks);
  const nlohmann::json trace = parse_trace(path);
  CHECK(trace["traceEvents"].size() == 4 + 30'000);
  CHECK(trace["traceEvents"].back()["ts"] == 299.99);
}

TEST_CASE("A name that is not valid text does not break the file", "[trace]") {
  const Folder folder;
  std::vector<base::RankTrace> ranks = {{0, "\xff\xfe", {{"main", {}}}, 0}};
  ranks[0].tracks[0].events.push_back(made(Kind::kSlice, "bad \xc3( \x01 name", 1, 2));
  write_trace(folder.path("t.json"), ranks);
  CHECK(parse_trace(folder.path("t.json"))["traceEvents"].size() == 5);
}

TEST_CASE("Paths that cannot be written are refused before the run", "[trace]") {
  const Folder folder;
  using base::ErrorKind;
  check_trace_path(folder.path("new.json"));
  check_trace_path(folder.write("old.json", "x"));
  CHECK_FALSE(std::filesystem::exists(folder.path("new.json")));
  const std::string missing = folder.path("none/t.json");
  CHECK(error_of(ErrorKind::kResources, [&] { check_trace_path(missing); }) ==
        "cannot write " + missing + ": No such file or directory");
  const std::string below = folder.path("old.json/t.json");
  CHECK(error_of(ErrorKind::kResources, [&] { check_trace_path(below); }) ==
        "cannot write " + below + ": Not a directory");
  for (const std::string& path : {folder.path(), std::string("/dev/null")}) {
    CHECK(error_of(ErrorKind::kInvalid, [&] { check_trace_path(path); }) ==
          path + ": is not a plain file");
  }
  error_of(ErrorKind::kResources, [&] { write_trace(missing, sample()); });
  const std::string too_long = folder.path(std::string(NAME_MAX + 1, 't'));
  CHECK(error_of(ErrorKind::kResources, [&] { check_trace_path(too_long); }) ==
        "cannot write " + too_long + ": File name too long");
  CHECK(names_in(folder) == std::set<std::string>{"old.json"});
  if (geteuid() == 0) return;  // root may write everywhere
  std::filesystem::create_directory(folder.path("locked"));
  std::filesystem::permissions(folder.path("locked"), std::filesystem::perms(0555));
  error_of(ErrorKind::kResources, [&] { check_trace_path(folder.path("locked/t.json")); });
}

TEST_CASE("The longest file name is accepted", "[trace]") {
  const Folder folder;
  const std::string name(NAME_MAX, 't');
  check_trace_path(folder.path(name));
  write_trace(folder.path(name), sample());
  CHECK(names_in(folder) == std::set<std::string>{name});
}

TEST_CASE("Links are followed", "[trace]") {
  namespace fs = std::filesystem;
  const Folder folder;
  fs::create_directory(folder.path("far"));
  folder.write("far/there.json", "x");
  fs::create_symlink("far/second", folder.path("first"));
  fs::create_symlink("there.json", folder.path("far/second"));
  fs::create_symlink(folder.path("far/new.json"), folder.path("to a new one"));
  for (const auto& [link, target] :
       {std::pair("first", "far/there.json"), std::pair("to a new one", "far/new.json")}) {
    INFO(link);
    check_trace_path(folder.path(link));
    write_trace(folder.path(link), sample());
    CHECK(fs::is_symlink(folder.path(link)));
    REQUIRE(fs::exists(folder.path(target)));
    CHECK(parse_trace(folder.path(target))["traceEvents"].size() == 20);
  }
  CHECK(fs::is_symlink(folder.path("far/second")));

  using base::ErrorKind;
  fs::create_symlink("none/t.json", folder.path("dangling"));
  CHECK(error_of(ErrorKind::kResources, [&] { check_trace_path(folder.path("dangling")); }) ==
        "cannot write " + folder.path("none/t.json") + ": No such file or directory");
  fs::create_symlink("circle", folder.path("circle"));
  CHECK(error_of(ErrorKind::kResources, [&] { check_trace_path(folder.path("circle")); }) ==
        "cannot write " + folder.path("circle") + ": Too many levels of symbolic links");
  fs::create_symlink("far", folder.path("to a folder"));
  CHECK(error_of(ErrorKind::kInvalid, [&] { check_trace_path(folder.path("to a folder")); }) ==
        folder.path("far") + ": is not a plain file");
}

TEST_CASE("A file that is removed before it is renamed is reported", "[trace]") {
  const Folder folder;
  const std::string path = folder.path("t.json");
  const auto lose_it = [&](const std::string& call) {
    if (call != "rename") return;
    for (const std::string& name : names_in(folder)) std::filesystem::remove(folder.path(name));
  };
  CHECK(error_of(base::ErrorKind::kResources, [&] { write_trace(path, sample(), lose_it); }) ==
        "cannot rename to " + path + ": No such file or directory");
}
