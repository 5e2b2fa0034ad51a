// Tests allreduces of ranks on several hosts.
#include <ATen/ATen.h>

#include "unit/collective/test_group.h"

using namespace distrain;
using namespace distrain::testing;
using base::ErrorKind;
using collective::Pending;

namespace {

constexpr Backend::Settings kInChunks{.timeout = kGroupTimeout, .direct_bytes = 0};

at::Tensor combined(const std::vector<at::Tensor>& tensors, ReduceOp op) {
  at::Tensor result = tensors[0].clone();
  for (size_t i = 1; i < tensors.size(); ++i) {
    const at::Tensor& next = tensors[i];
    result = op == ReduceOp::PRODUCT ? result * next
             : op == ReduceOp::MIN   ? at::minimum(result, next)
             : op == ReduceOp::MAX   ? at::maximum(result, next)
                                     : result + next;
  }
  return op == ReduceOp::AVG ? result / static_cast<double>(tensors.size()) : result;
}

// Reduces on each host in rank order, then over the hosts in the order of their first ranks.
at::Tensor reference(const std::vector<at::Tensor>& inputs, const std::vector<int>& hosts,
                     ReduceOp op) {
  std::vector<int> order;
  std::vector<at::Tensor> of_hosts;
  for (const int host : hosts) {
    if (std::ranges::find(order, host) == order.end()) order.push_back(host);
  }
  for (const int host : order) {
    std::vector<at::Tensor> of_host;
    for (size_t rank = 0; rank < hosts.size(); ++rank) {
      if (hosts[rank] == host) of_host.push_back(inputs[rank]);
    }
    of_hosts.push_back(combined(of_host, op));
  }
  return combined(of_hosts, op);
}

// Returns the error of each rank in an allreduce of `count` floats in which rank 1 calls `other`.
std::vector<base::Error> errors_with(TestGroup& group, const std::function<void(Backend&)>& other,
                                     int64_t count = 1000) {
  std::vector<base::Error> errors(group.backends.size());
  run_ranks(static_cast<int>(errors.size()), [&](int rank) {
    errors[static_cast<size_t>(rank)] = thrown_by([&] {
      if (rank == 1) other(group[rank]);
      group[rank].allreduce(at::ones({count})).wait();
    });
  });
  return errors;
}

}  // namespace

TEST_CASE("an allreduce over hosts reduces on each host, then over the hosts") {
  const std::vector<int> hosts = GENERATE(std::vector{0, 0, 1, 1}, std::vector{1, 0, 1, 0, 2, 2},
                                          std::vector{0, 0, 0, 1, 1, 1});
  const int size = static_cast<int>(hosts.size());
  TestGroup group(size, kInChunks, 5, hosts);
  uint64_t seed = 1;
  for (const at::ScalarType dtype : {at::kFloat, at::kDouble, at::kInt, at::kBFloat16}) {
    for (const ReduceOp op :
         {ReduceOp::SUM, ReduceOp::AVG, ReduceOp::PRODUCT, ReduceOp::MIN, ReduceOp::MAX}) {
      if (op == ReduceOp::AVG && dtype == at::kInt) continue;
      for (const int64_t count : {1, 37, 100, 5003}) {
        at::manual_seed(++seed);
        std::vector<at::Tensor> inputs, results;
        for (int rank = 0; rank < size; ++rank) {
          // Multiples of 1/8 below 8: no sum of the ranks is rounded in float32.
          at::Tensor input = at::randint(1, 64, {count, 2}).to(dtype);
          if (dtype != at::kInt) input = input / 8;
          inputs.push_back(input);
          // Not contiguous on some ranks.
          results.push_back(rank % 2 ? input.clone() : input.t().clone().t());
        }
        run_ranks(size, [&](int rank) {
          group[rank].allreduce(results[static_cast<size_t>(rank)], op).wait();
        });
        for (const at::Tensor& result : results) CHECK(same_bits(result, results[0]));
        const at::Tensor expected = reference(inputs, hosts, op);
        CAPTURE(size, toString(dtype), int(op), count);
        if (dtype == at::kBFloat16) {  // rounded once for the hosts, and once for all
          CHECK(at::allclose(results[0].to(at::kFloat), expected.to(at::kFloat), 0.02, 0.02));
        } else {
          CHECK(at::allclose(results[0], expected, 1e-6, 0));
        }
      }
    }
  }
}

TEST_CASE("an allreduce over hosts sends as few messages as its ranks have partners") {
  // Two hosts of three ranks: in two steps two partners on the host, in two steps one elsewhere.
  const std::vector<int> hosts =
      GENERATE(std::vector{0, 0, 0, 1, 1, 1}, std::vector{0, 0, 0, 0, 1, 1});
  const bool are_equal = hosts[3] == 1;
  TestGroup group(6, kInChunks, 1, hosts);
  run_ranks(6, [&](int rank) { group[rank].enter_barrier().wait(); });
  const size_t before = group.network.messages();
  run_ranks(6, [&](int rank) { group[rank].allreduce(at::ones({1000})).wait(); });
  CHECK(group.network.messages() - before == (are_equal ? 6 * (2 * 2 + 2 * 1) : 6 * 2 * 5));
}

TEST_CASE(
    "all ranks of all hosts get the error of a rank that refuses or calls another operation") {
  const bool refuses = GENERATE(true, false);
  // A part is larger than the window, so an operation that some rank never answers blocks the next.
  const int64_t count = refuses ? 12 << 20 : 1000;
  TestGroup group(4, kInChunks, 3, {0, 0, 1, 1});
  group.network.hold(3, 2);  // so that rank 2 fails before it can send something to rank 0
  const auto errors = errors_with(
      group,
      [&](Backend& backend) {
        if (refuses) {
          backend.refuse(1, {ErrorKind::kNotFinite, "not this time", 1});
          throw base::Exception(
              base::Error{ErrorKind::kNotFinite, "this rank: not this time", 1, {}});
        }
        backend.allreduce(at::ones({1001})).wait();
      },
      count);
  group.network.release();
  for (size_t rank = 0; rank < errors.size(); ++rank) {
    CAPTURE(rank, errors[rank].message);
    CHECK(errors[rank].kind == (refuses ? ErrorKind::kNotFinite : ErrorKind::kInvalid));
    CHECK(contains(errors[rank].message, refuses ? "not this time" : "rank 1"));
    if (refuses) {
      CHECK(errors[rank].rank == 1);
      continue;
    }
    CHECK(contains(errors[rank].message, "allreduce over 2 hosts(sum, Float, 4004 bytes)"));
  }
  // The ranks are still synchronized.
  run_ranks(4, [&](int rank) {
    const at::Tensor x = at::ones({count});
    group[rank].allreduce(x).wait();
    RANK_CHECK(x.eq(4).all().item<bool>());
  });
}

TEST_CASE("a rank that is lost during an allreduce over hosts is named on all hosts") {
  TestGroup group(4, kInChunks, 3, {0, 0, 1, 1});
  group.network.hold(1, 3);  // in the second step
  const auto errors = errors_with(group, [&](Backend& backend) {
    const collective::Pending last = backend.allreduce(at::ones({1000}));
    group.network.kill(1);
    throw base::Exception(ErrorKind::kPeerLost, "rank 1 is lost");
  });
  for (const base::Error& error : errors) {
    CHECK(error.kind == ErrorKind::kPeerLost);
    CHECK(contains(error.message, "rank 1"));
  }
}

TEST_CASE("a rank that is missing at the deadline of an allreduce over hosts is named") {
  const int first = GENERATE(0, 2, 3);  // the rank whose deadline passes first; it tells the others
  TestGroup group(4, kInChunks, 1, {0, 0, 1, 1});
  std::map<int, Pending> pending;
  for (const int rank : {0, 2, 3}) pending[rank] = group[rank].allreduce(at::ones({1000}));
  group.network.await_deliveries();
  expire(pending[first]);
  for (const auto& [rank, each] : pending) {
    const base::Error error = thrown_by([&, &waiting = each] { waiting.wait(); });
    INFO("rank " << rank << ": " << error.message);
    CHECK(error.kind == ErrorKind::kDeadline);
    CHECK(error.rank != rank);
    if (rank == 0) CHECK(contains(error.message, "from rank 1"));
  }
}
