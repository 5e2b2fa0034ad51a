// ctest: timeout=120
// Tests the steps of a TableServer by messages of participants in this process, in a fixed order.
#include <functional>
#include <limits>

#include "tables.h"

using namespace distrain;
using namespace distrain::testing;
using base::ErrorKind;
using base::Future;
using table::LookupReply;
using Phase = table::PushRequest::Phase;

namespace {

// A server with the table "t". Process p has the session of participant p.
struct Server {
  explicit Server(Mode its_mode, int count = 2) : mode(its_mode), participants(count) {
    for (int p = 0; p < count; ++p) open(p);
  }

  void open(int p, const std::string& name = "t") {
    sessions[p] = server.open({{table_of(name)}, mode, participants, p}, process(p)).wait();
  }
  void close(int p) { server.close(sessions[p], process(p)).wait(); }
  Future<LookupReply> look_up(int p, uint64_t lookup, uint64_t after = 0,
                              const at::Tensor& ids = in_order(kIds),
                              const at::Tensor& offsets = {}) {
    const int64_t bags = offsets.defined() ? offsets.numel() - 1 : -1;
    return server.look_up({.session = sessions[p],
                           .lookup = lookup,
                           .after = after,
                           .ids = {{{0, ids.numel(), bags}}, ids, offsets, {}}},
                          process(p));
  }
  // Returns the ids in the order of their hashes, as lookups without bags need them.
  static at::Tensor in_order(const at::Tensor& ids) {
    const rows::IdGroups groups({reinterpret_cast<const uint64_t*>(ids.const_data_ptr<int64_t>()),
                                 static_cast<size_t>(ids.numel())});
    at::Tensor ordered = at::empty_like(ids);
    std::ranges::copy(groups.ids(), ordered.mutable_data_ptr<int64_t>());
    return ordered;
  }
  // Pushes and awaits the step. Every second time, the calls arrive in the other order.
  Future<optim::Norms> push(int p, table::PushRequest request) {
    request.session = sessions[p];
    const table::PushRequest bare{request.session, request.number, request.phase};
    const auto await = [&] {
      return result_of([&] { return server.await_step(bare, process(p)); });
    };
    Future<optim::Norms> result;
    const bool awaits_first = ++pushes % 2 == 0;
    if (awaits_first) result = await();
    const auto stored = result_of([&] { return server.push(std::move(request), process(p)); });
    REQUIRE(stored.done());
    if (!awaits_first) result = await();
    if (stored.wait_result().ok()) return result;
    if (awaits_first) CHECK(result.done());
    return Future<optim::Norms>::failed(stored.wait_result().error());
  }
  Future<optim::Norms> push(int p, uint64_t number, Phase phase = Phase::kApply) {
    return push(p, {.number = number, .phase = phase});
  }
  // Pushes ones as the gradients of a lookup.
  Future<optim::Norms> train(int p, uint64_t number, uint64_t lookup) {
    return push(p, {.number = number, .gradients = {{lookup, {{0}, at::ones({16})}}}});
  }
  uint64_t updates() const { return *server.updates(); }
  void lose(int p) {
    server.on_rank_lost({p, {ErrorKind::kPeerLost, "it is lost", p, {}}, /*job_goes_on=*/false, 0});
  }
  static rpc::ProcessNumber process(int p) { return rpc::process_number(p, 0); }
  // Returns the result of a call, which may throw.
  template <class F>
  static auto result_of(F call) -> decltype(call()) {
    try {
      return call();
    } catch (const base::Exception& error) {
      return decltype(call())::failed(error.error());
    }
  }

  const Mode mode;
  const int participants;
  table::TableServer server;
  std::map<int, uint64_t> sessions;
  int pushes = 0;
};

// Returns the error of a future that must be done, or "(no error)".
template <class T>
base::Error error_in(const Future<T>& future) {
  REQUIRE(future.done());
  return error_of([&] { static_cast<void>(future.wait_result().value()); });
}
template <class T>
bool is_good(const Future<T>& future) {
  return error_in(future).message == "(no error)";
}

}  // namespace

TEST_CASE("a participant that pushes another step than the current one fails all steps") {
  Server server(Mode::kSync);
  const auto next = GENERATE(Phase::kStage, Phase::kApply);
  const auto staged = server.push(0, 1, Phase::kStage);
  CHECK(!staged.done());
  CHECK(is_good(server.push(1, 1, Phase::kStage)));
  CHECK(is_good(staged));
  const auto committed = server.push(1, 1, Phase::kCommit);
  const auto lookup = server.look_up(1, 1, /*after=*/1);
  CHECK(!committed.done());
  CHECK(!lookup.done());
  const std::string why = "participant 0 pushes step 2 instead of step 1";
  CHECK(error_in(server.push(0, 2, next)).message == why);
  CHECK(error_in(committed).message == why);
  CHECK(error_in(lookup).message == why);
  CHECK(error_in(server.push(1, 2)).message == why);
  CHECK(error_of([&] { static_cast<void>(server.look_up(1, 2, /*after=*/2)); }).message == why);
  CHECK(is_good(server.look_up(1, 3)));
  CHECK(server.updates() == 0);
}

TEST_CASE("a participant that closes its tables ends the step that it has staged") {
  Server server(Mode::kSync);
  const bool closes_first = GENERATE(false, true);
  const auto staged = server.push(0, 1, Phase::kStage);
  CHECK(is_good(server.push(1, 1, Phase::kStage)));
  CHECK(is_good(staged));
  if (closes_first) server.close(1);
  const auto committed = server.push(0, 1, Phase::kCommit);
  if (!closes_first) server.close(1);
  CHECK(error_in(committed).kind == ErrorKind::kPeerLost);
  CHECK(error_in(server.push(0, 2)).kind == ErrorKind::kPeerLost);
  CHECK(error_of([&] { static_cast<void>(server.look_up(0, 1, /*after=*/1)); }).kind ==
        ErrorKind::kPeerLost);
}

TEST_CASE("in sync mode all steps fail after a close until all participants have closed") {
  Server server(Mode::kSync);
  const auto first = server.push(0, 1);
  CHECK(is_good(server.push(1, 1)));
  CHECK(is_good(first));
  server.close(1);
  server.open(1);
  for (const int p : {0, 1}) {
    const base::Error error = error_in(server.push(p, 2));
    CHECK(error.kind == ErrorKind::kPeerLost);
    CHECK(error.message == "participant 1 has closed its tables");
  }
  const auto onlooker = server.server.open(
      {{table_of("t")}, Mode::kSync, 2, optim::Sharing::kOnlooker}, Server::process(5));
  for (const int p : {0, 1}) server.close(p);
  for (const int p : {0, 1}) server.open(p);
  const auto again = server.push(0, 1);
  CHECK(!again.done());
  CHECK(is_good(server.push(1, 1)));
  CHECK(is_good(again));
}

TEST_CASE("closing a session fails its lookups that wait") {
  Server server(Mode::kAsync);
  const auto own = server.look_up(0, 1, /*after=*/1), other = server.look_up(1, 1, /*after=*/1);
  server.close(0);
  CHECK(error_in(own).kind == ErrorKind::kPeerLost);
  CHECK(!other.done());
  CHECK(is_good(server.push(1, 1)));
  CHECK(is_good(other));
}

TEST_CASE("destroying a server fails the lookups that wait") {
  auto server = std::make_unique<Server>(GENERATE(Mode::kAsync, Mode::kSync));
  const auto lookup = server->look_up(0, 1, /*after=*/1);
  CHECK(!lookup.done());
  server.reset();
  CHECK(error_in(lookup).kind == ErrorKind::kCancelled);
}

TEST_CASE("in sync mode a push is answered before the other participants have pushed") {
  Server server(Mode::kSync);
  const bool awaits_first = GENERATE(false, true);
  const table::PushRequest push{server.sessions[0], 1};
  Future<optim::Norms> result;
  if (awaits_first) result = server.server.await_step(push, Server::process(0));
  CHECK(is_good(server.server.push(push, Server::process(0))));
  if (!awaits_first) result = server.server.await_step(push, Server::process(0));
  CHECK(!result.done());
  CHECK(is_good(server.push(1, 1)));
  CHECK(is_good(result));
  // A participant may ask for the result after other steps have failed.
  CHECK(!is_good(server.push(1, 5)));
  CHECK(is_good(server.server.await_step(push, Server::process(0))));
}

TEST_CASE("the wait for a step whose push was refused ends") {
  Server server(Mode::kSync);
  const table::PushRequest push{server.sessions[0], 1};
  const auto result = server.server.await_step(push, Server::process(0));
  CHECK(!is_good(Server::result_of([&] {
    return server.server.push({server.sessions[0], 1, Phase::kCommit}, Server::process(0));
  })));
  CHECK(!is_good(result));
  CHECK(!is_good(Server::result_of([&] {
    return server.server.await_step({server.sessions[0], 0}, Server::process(0));
  })));
}

TEST_CASE("in sync mode a participant has one session") {
  Server server(Mode::kSync);
  CHECK(error_of([&] { server.open(1); }).kind == ErrorKind::kInvalid);
  server.close(1);
  server.open(1);
  CHECK(error_of([&] {
          static_cast<void>(server.server.open({{}, Mode::kAsync, 1, 0}, Server::process(0)));
        }).kind == ErrorKind::kInvalid);
}

TEST_CASE("tables that are opened after the loss of a rank do not wait for it") {
  Server server(Mode::kSync);
  server.lose(1);
  server.open(0, "later");
  CHECK(error_in(server.push(0, 1)).kind == ErrorKind::kPeerLost);
  CHECK(is_good(server.look_up(0, 1)));
}

TEST_CASE("a lost process opens no tables") {
  Server server(GENERATE(Mode::kAsync, Mode::kSync));
  server.lose(1);
  CHECK(error_of([&] { server.open(1); }).kind == ErrorKind::kPeerLost);
  CHECK(error_of([&] { server.open(1, "later"); }).kind == ErrorKind::kPeerLost);
}

TEST_CASE("messages with unknown values are refused") {
  Server server(Mode::kAsync);
  const auto refuse = [&](const table::OpenRequest& request) {
    CHECK(error_of([&] {
            static_cast<void>(server.server.open(request, Server::process(0)));
          }).kind == ErrorKind::kProtocol);
  };
  for (const int participants : {0, -1}) {
    refuse({{table_of("u")}, Mode::kSync, participants, optim::Sharing::kOnlooker});
  }
  refuse({{table_of("u")}, static_cast<Mode>(9), 1, 0});
  refuse({{table_of("u")}, Mode::kAsync, 1, 0, at::kDouble});
  refuse({{table_of("u")}, Mode::kAsync, 1, 0, static_cast<at::ScalarType>(99)});
  CHECK(error_in(server.push(0, 1, static_cast<Phase>(3))).kind == ErrorKind::kProtocol);
  CHECK(is_good(server.push(0, 1)));
  CHECK(error_in(server.push(0, 0)).kind == ErrorKind::kInvalid);
}

TEST_CASE("a lost trainer's step is refused, and others go on") {
  Server server(Mode::kAsync);
  CHECK(is_good(server.look_up(0, 1)));
  CHECK(is_good(server.look_up(1, 1)));
  const auto waits = server.look_up(1, 2, /*after=*/1);
  server.lose(1);
  CHECK(server.server.kept_lookups() == 1);
  CHECK(error_in(waits).kind == ErrorKind::kPeerLost);
  CHECK(error_in(server.train(1, 1, 1)).kind == ErrorKind::kPeerLost);
  CHECK(is_good(server.train(0, 1, 1)));
  CHECK(server.updates() == 1);
}

TEST_CASE("a refused push fails its step and all later ones, and changes nothing") {
  const Mode mode = GENERATE(Mode::kAsync, Mode::kSync);
  constexpr double kInf = std::numeric_limits<double>::infinity();
  const std::vector<table::PushRequest> refused{
      {.gradients = {{7, {{0}, at::ones({16})}}}},  // of an unknown lookup
      {.gradients = {{1, {{0}, at::ones({12})}}}},
      {.gradients = {{1, {{1}, at::ones({16})}}}},
      {.gradients = {{1, {{0, 0}, at::ones({16})}}}},
      {.scale = -1},
      {.scale = std::numeric_limits<double>::quiet_NaN()},
      {.lr_factor = -1},
      {.lr_factor = kInf},
      {.phase = Phase::kCommit}};
  for (table::PushRequest request : refused) {
    CAPTURE(static_cast<int>(mode), request.scale, request.lr_factor);
    Server server(mode);
    CHECK(is_good(server.look_up(0, 1)));
    CHECK(is_good(server.look_up(1, 1)));
    const auto next = server.look_up(0, 2, /*after=*/1);
    const auto other = server.train(1, 1, 1);
    request.number = 1;
    CHECK(!is_good(server.push(0, request)));
    CHECK(!is_good(next));
    const bool others_go_on = mode == Mode::kAsync;
    CHECK(is_good(other) == others_go_on);
    CHECK(!is_good(server.push(0, 2)));
    CHECK(is_good(server.push(1, 2)) == others_go_on);
    CHECK(server.updates() == (others_go_on ? 2 : 0));
  }
}

TEST_CASE("malformed lookups are refused") {
  Server server(Mode::kAsync);
  const at::Tensor ids = Server::in_order(kIds), ends = at::tensor({int64_t{0}, int64_t{4}});
  const auto request = [&](auto change) {
    table::LookupRequest it{
        .session = server.sessions[0], .lookup = 1, .ids = {{{0, 4, 1}}, ids, ends, {}}};
    change(it.ids);
    return server.server.look_up(it, Server::process(0));
  };
  CHECK(is_good(request([](auto&) {})));
  const std::vector<std::function<void(table::ServerIds&)>> changes{
      [](auto& it) { it.parts[0].table = 1; },
      [](auto& it) { it.parts[0].table = -1; },
      [](auto& it) { it.parts[0].ids = 3; },
      [](auto& it) { it.parts[0].ids = 5; },
      [](auto& it) { it.parts[0].ids = -1; },
      [](auto& it) { it.parts[0].bags = 2; },
      [](auto& it) { it.parts[0].bags = -2; },
      [](auto& it) { it.ids = at::Tensor(); },
      [](auto& it) { it.ids = it.ids.to(at::kInt); },
      [](auto& it) { it.offsets = at::Tensor(); },
      [](auto& it) {
        it.offsets = at::tensor({int64_t{1}, int64_t{4}});
      },
      [](auto& it) {
        it.offsets = at::tensor({int64_t{0}, int64_t{3}});
      },
      [](auto& it) { it.weights = at::ones({3}); },
      [](auto& it) { it.parts[0].bags = -1; },  // an offset is left
      [](auto& it) {                            // ids out of order
        it.parts[0].bags = -1;
        it.offsets = at::Tensor();
        it.ids = it.ids.flip(0).contiguous();
      }};
  for (size_t i = 0; i < changes.size(); ++i) {
    CAPTURE(i);
    CHECK(error_of([&] { static_cast<void>(request(changes[i])); }).kind == ErrorKind::kProtocol);
  }
}

TEST_CASE("the lookups that a session keeps on a server are bounded") {
  Server server(Mode::kAsync);
  for (uint64_t i = 1; i <= table::TableServer::kMaxLookups; ++i) {
    static_cast<void>(server.look_up(0, i));
  }
  const base::Error error = error_of([&] { static_cast<void>(server.look_up(0, 5000)); });
  CHECK(error.kind == ErrorKind::kResources);
  CHECK(error.message.find("rank 0 has 4096 lookups of 16384 ids") != std::string::npos);
}

TEST_CASE("a refused lookup makes no rows and is not counted") {
  auto options = table_of("small");
  options.num_rows = 0;
  options.max_rows = 10;
  table::TableServer server;
  const uint64_t session = server.open({{options}}, 0).wait();
  uint64_t lookup = 0;
  const auto refusal = [&](const at::Tensor& ids, int of_table = 0, bool evaluates = false) {
    const table::LookupRequest request{.session = session,
                                       .lookup = ++lookup,
                                       .evaluates = evaluates,
                                       .ids = {{{of_table, ids.numel()}}, ids, {}, {}}};
    return error_of([&] { static_cast<void>(server.look_up(request, 0)); }).kind;
  };
  const at::Tensor many = at::zeros({table::TableServer::kMaxLookupIds + 1}, at::kLong);
  for (const bool evaluates : {false, true}) {
    CHECK(refusal(many, 0, evaluates) == ErrorKind::kResources);
    CHECK(server.store("small").rows() == 0);
  }
  CHECK(refusal(Server::in_order(at::arange(11))) == ErrorKind::kResources);
  CHECK(refusal(Server::in_order(kIds), 7) == ErrorKind::kProtocol);
  CHECK(server.kept_lookups() == 0);
}

TEST_CASE("the ids that a session keeps on a server are bounded") {
  Server server(Mode::kAsync);
  const auto look_up = [&](uint64_t lookup, int64_t numbers) {  // one bag, which has two offsets
    const int64_t ids = numbers - 2;
    return server.look_up(0, lookup, 0, at::ones({ids}, at::kLong), at::tensor({int64_t{0}, ids}));
  };
  constexpr auto kMost = static_cast<int64_t>(table::TableServer::kMaxLookupIds);
  const auto refusal = [&](uint64_t lookup, int64_t ids) {
    const base::Error error = error_of([&] { static_cast<void>(look_up(lookup, ids)); });
    CHECK(error.kind == ErrorKind::kResources);
    return error.message;
  };
  CHECK(refusal(1, kMost + 1).find("one of 4194305 is too much") != std::string::npos);
  CHECK(is_good(look_up(2, kMost - 2)));
  CHECK(is_good(look_up(3, 2)));
  CHECK(refusal(4, 2).find("rank 0 has 2 lookups of 4194304 ids and offsets without a step") == 0);
}
