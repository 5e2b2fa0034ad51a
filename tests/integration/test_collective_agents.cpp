// Tests collectives over real agents, with unix sockets and TCP.
#include <numeric>

#include <ATen/ATen.h>

#include "distrain/collective/backend.h"
#include "support/catch.h"
#include "support/cluster.h"

using namespace distrain;
using collective::Backend;
using testing::Cluster;
using testing::expect;

namespace {

using BackendPtr = c10::intrusive_ptr<Backend>;

BackendPtr join_group(rpc::Agent& agent, int size) {
  std::vector<int> ranks(static_cast<size_t>(size));
  std::iota(ranks.begin(), ranks.end(), 0);
  return c10::make_intrusive<Backend>(agent.open_channel(2), agent.executor(),
                                      collective::Group{1, ranks});
}

}  // namespace

TEST_CASE("collectives of all sizes work over agents") {
  const std::string transport = GENERATE("unix", "tcp");
  const int size = GENERATE(2, 3, 4);
  rpc::AgentOptions options;
  options.transport = transport;
  Cluster cluster(size, {}, options);
  cluster.on_all([&](rpc::Agent& agent) {
    const BackendPtr backend = join_group(agent, size);
    for (int round = 0; round < 20; ++round) {
      for (int64_t count : {0, 1, 136, 5000, 20000, 300000}) {
        const at::Tensor x = at::full({count}, double(agent.rank() + round));
        const auto sum = backend->allreduce(x);
        const at::Tensor y = at::full({count}, double(agent.rank()));
        const auto copy = backend->broadcast(y, round % size);
        copy.wait();
        sum.wait();
        expect(x.eq(size * round + size * (size - 1) / 2).all().item<bool>(), "allreduce");
        expect(y.eq(round % size).all().item<bool>(), "broadcast");
      }
    }
    const at::Tensor large = at::ones({4 << 20});
    backend->allreduce(large, Backend::ReduceOp::AVG).wait();
    expect(large.eq(1).all().item<bool>(), "16 MiB");
    std::vector<at::Tensor> outputs;
    for (int i = 0; i < size; ++i) outputs.push_back(at::empty({7}));
    backend->allgather(at::full({7}, double(agent.rank())), outputs).wait();
    for (int i = 0; i < size; ++i) expect(outputs[size_t(i)].eq(i).all().item<bool>(), "gather");
    for (int64_t count : {5, 300000}) {
      const at::Tensor sum = at::zeros({count}), received = at::zeros({count});
      const std::vector<at::Tensor> inputs(size_t(size), at::full({count}, double(agent.rank())));
      backend->reduce_scatter(sum, inputs).wait();
      expect(sum.eq(size * (size - 1) / 2).all().item<bool>(), "reduce_scatter");
      const int next = (agent.rank() + 1) % size, previous = (agent.rank() + size - 1) % size;
      const auto got = backend->recv(received, previous, -3);
      backend->send(inputs[0], next, -3).wait();
      got.wait();
      expect(received.eq(previous).all().item<bool>(), "send and recv");
    }
    backend->enter_barrier().wait();
  });
  cluster.shutdown();
}

TEST_CASE("a rank that dies ends the collectives of the others") {
  Cluster cluster(3);
  std::vector<BackendPtr> backends;
  for (int rank : {0, 1, 2}) backends.push_back(join_group(cluster[rank], 3));
  const int64_t count = GENERATE(5, 100000);
  const auto first = backends[0]->allreduce(at::ones({count}));
  const auto second = backends[1]->allreduce(at::ones({count}));
  backends[2].reset();
  cluster.kill(2);
  const auto lost = [](const collective::Pending& pending) {
    return testing::error_of([&] { pending.wait(); });
  };
  for (const auto& pending : {first, second}) {
    CHECK(lost(pending).kind == base::ErrorKind::kPeerLost);
    CHECK(lost(pending).rank == 2);
  }
  for (int rank : {0, 1}) {
    const auto later = backends[size_t(rank)]->enter_barrier();
    CHECK(lost(later).kind == base::ErrorKind::kPeerLost);
    CHECK(lost(later).rank == 2);
  }
  backends.clear();
}
