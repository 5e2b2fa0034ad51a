// ctest: timeout=180
// Tests how the ranks of a job find each other.
#include <cstdlib>
#include <filesystem>
#include <thread>

#include "join_support.h"

using namespace distrain;
using namespace distrain::testing;
using base::ErrorKind;
using rpc::Agent;
using rpc::AgentOptions;

TEST_CASE("a rank that does not fit is refused, and rank 0 continues") {
  AgentOptions options = options_for(0, 2);
  options.job_options = {{"epochs", "10"}, {"lr", "0.05"}};
  Joining zero(options);
  const uint16_t port = zero.agent().port();
  const auto refused = [&](const std::function<void(AgentOptions&)>& change) {
    AgentOptions mine = options_for(1, 2, port);
    change(mine);
    return Joining(mine).result();
  };

  base::Error e = refused([](AgentOptions& o) { o.world_size = 3; });
  CHECK(e.kind == ErrorKind::kRendezvous);
  CHECK(contains(e.message, "world size"));
  CHECK(contains(e.message, "3"));
  CHECK(contains(e.message, "2"));

  e = refused([](AgentOptions& o) { o.rank = 2, o.world_size = 0; });
  CHECK(e.kind == ErrorKind::kRendezvous);
  CHECK(contains(e.message, "there is no rank 2: this job has ranks 0 to 1"));

  e = refused([](AgentOptions& o) { o.rank = 1000000, o.world_size = 0; });
  CHECK(e.kind == ErrorKind::kRendezvous);

  e = refused([](AgentOptions& o) { o.job_options = {{"epochs", "11"}}; });
  CHECK(e.kind == ErrorKind::kRendezvous);
  CHECK(contains(e.message, "epochs"));
  CHECK(contains(e.message, "11"));
  CHECK(contains(e.message, "10"));

  e = refused([](AgentOptions& o) { o.job = "another"; });
  CHECK(e.kind == ErrorKind::kRendezvous);
  CHECK(contains(e.message, "'another'"));
  CHECK(contains(e.message, "'distrain'"));

  check_comes_up(zero);
}

TEST_CASE("the names of the ranks are checked when an agent is created") {
  const auto refusal = [](int rank, std::vector<std::string> names, int world_size) {
    AgentOptions options;
    options.rank = rank;
    options.names = std::move(names);
    options.world_size = world_size;
    const base::Error error = error_of([&] { Agent agent(options); });
    CHECK(error.kind == ErrorKind::kInvalid);
    return error.message;
  };
  CHECK(refusal(0, {}, 2) == "rank 0 has no names of the ranks");
  CHECK(refusal(0, {"a", "b"}, 3) == "there are names of 2 ranks, and the world size is 3");
  const std::string rule =
      " needs a name of its own, of at most 127 letters, digits and '_-:.', not '";
  CHECK(refusal(0, {"a", ""}, 0) == "rank 1" + rule + "'");
  CHECK(refusal(1, {"a", "b", "a"}, 3) == "rank 2" + rule + "a'");
  CHECK(refusal(0, {"abc*"}, 0) == "rank 0" + rule + "abc*'");
  CHECK(refusal(0, {"a", " "}, 0) == "rank 1" + rule + " '");
  CHECK(refusal(0, {"a\nb"}, 0) == "rank 0" + rule + "a\nb'");
  CHECK(refusal(0, {std::string(500, 'a')}, 0) == "rank 0" + rule + std::string(128, 'a') + "'");
  AgentOptions longest;
  longest.names = {std::string(123, 'a') + "_-:."};
  CHECK(Agent(longest).name() == longest.names[0]);
}

TEST_CASE("a second join is refused and has no effect") {
  Cluster cluster(2, setup);
  cluster.on_all([](Agent& agent) {
    expect(error_of([&] { agent.join(); }).kind == ErrorKind::kInvalid, "a second join");
  });
  CHECK(cluster[0].rpc_sync<&add>(1, 1, 2) == 3);
  CHECK(cluster[1].rpc_sync<&add>(0, 1, 2) == 3);
  cluster.shutdown();
}

TEST_CASE("a rank can be taken only once") {
  Joining zero(options_for(0, 3));
  const uint16_t port = zero.agent().port();
  Joining first(options_for(1, 3, port));
  // Both processes ask to be rank 1. Rank 0 admits one of them and refuses the other.
  Joining second(options_for(1, 3, port));
  // Waits until rank 0 has refused one of the two. Only then rank 2 starts and completes the job.
  const auto limit = base::deadline_after(45s);
  while (!first.ended() && !second.ended() && base::Clock::now() < limit) {
    std::this_thread::sleep_for(1ms);
  }
  REQUIRE(first.ended() != second.ended());
  Joining two(options_for(2, 3, port));
  CHECK(two.joined());
  CHECK(zero.joined());
  REQUIRE(first.joined() != second.joined());
  Joining* refused = first.joined() ? &second : &first;
  Joining* taken = first.joined() ? &first : &second;
  CHECK(refused->result().kind == ErrorKind::kRendezvous);
  CHECK(contains(refused->result().message, "taken already"));
  CHECK(taken->agent().rpc_sync<&add>(2, 1, 2) == 3);
}

TEST_CASE("ranks of one host meet by the job's ID and port, whatever rank 0's address is") {
  AgentOptions options = options_for(0, 2);
  options.job_id = "met";
  Joining zero(options);
  const uint16_t port = zero.agent().port();
  AgentOptions mine = options_for(1, 2, port);
  mine.job_id = "met";
  mine.master_addr = "192.0.2.1";  // nobody listens on this address
  std::atomic<int> sharing{0};
  mine.on_cpus_shared = [&](int ranks) { sharing = ranks; };
  CHECK(Joining(mine).joined());
  CHECK(sharing == 2);

  // Rank 0 of another job with the same ID and port fails at once.
  AgentOptions twin = options_for(0, 2);
  twin.job_id = "met";
  twin.listen_addr = "127.0.0.2";
  twin.master_port = port;
  CHECK(contains(error_of([&] { Agent agent(twin); }).message, "--job-id"));
}

TEST_CASE("jobs of 1, 8 and 16 ranks start over each transport") {
  const int size = GENERATE(1, 8, 16);
  const std::string transport = GENERATE("unix", "tcp", "auto");
  AgentOptions options;
  options.transport = transport;
  options.worker_threads = 1;
  options.job_options = {{"epochs", "3"}};
  Cluster cluster(size, setup, options);
  CAPTURE(size, transport);
  if (size > 1) {
    CHECK(cluster[size - 1].transport() == (transport == "tcp" ? "tcp" : "unix"));
  }
  cluster.on_all([&](Agent& agent) {
    for (int to = 0; to < size; ++to) {
      if (agent.rpc_sync<&add>(to, agent.rank(), to) != agent.rank() + to) {
        throw std::runtime_error("a wrong sum");
      }
    }
  });
  CHECK(cluster[size - 1].job_options().at("epochs") == "3");
  CHECK(cluster[size - 1].name() == "w" + std::to_string(size - 1));
  cluster.shutdown();
}

TEST_CASE("ranks join in any order, also before rank 0") {
  const ReservedPort reserved;
  const uint16_t port = reserved.port();
  std::vector<std::unique_ptr<Joining>> ranks;
  for (int rank : {3, 1, 2}) ranks.push_back(std::make_unique<Joining>(options_for(rank, 4, port)));
  std::this_thread::sleep_for(100ms);
  ranks.push_back(std::make_unique<Joining>(options_for(0, 4, port)));
  for (const auto& rank : ranks) CHECK(rank->joined());
  std::vector<std::thread> threads;
  for (const auto& rank : ranks) threads.emplace_back([&] { rank->agent().shutdown(); });
  for (std::thread& thread : threads) thread.join();
}

TEST_CASE("prepare runs when the options are known and before any call; it may throw") {
  AgentOptions options = options_for(0, 2);
  options.job_options = {{"dim", "16"}};
  Joining zero(options);
  AgentOptions mine = options_for(1, 2, zero.agent().port());
  Agent one(mine);
  std::string dim;
  const base::Error e = error_of([&] {
    one.join([&] {
      dim = one.job_options().at("dim");
      throw base::Exception(ErrorKind::kBadData, "no such data");
    });
  });
  CHECK(dim == "16");
  CHECK(e.kind == ErrorKind::kBadData);
  one.abort(e);
  CHECK_FALSE(zero.joined());
  CHECK(zero.result().rank == 1);
}

TEST_CASE("no files are left on the disk") {
  std::string folder = (std::filesystem::temp_directory_path() / "join-test-XXXXXX").string();
  REQUIRE(mkdtemp(folder.data()) != nullptr);
  const char* before = std::getenv("TMPDIR");
  const std::string saved = before ? before : "";
  setenv("TMPDIR", folder.c_str(), 1);
  {
    Cluster cluster(3, setup);
    CHECK(std::filesystem::is_empty(folder));  // while all ranks are connected
    AgentOptions alone = options_for(0, 2);
    alone.join_timeout = 50ms;
    CHECK(Joining(alone).result().kind == ErrorKind::kRendezvous);
  }
  CHECK(std::filesystem::is_empty(folder));
  before ? setenv("TMPDIR", saved.c_str(), 1) : unsetenv("TMPDIR");
  std::filesystem::remove_all(folder);
}
