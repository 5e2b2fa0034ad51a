// Tests the operations that give each rank a part of other ranks' data.
#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "unit/collective/test_group.h"

using namespace distrain;
using namespace distrain::testing;
using base::ErrorKind;
using collective::Pending;
using std::chrono::milliseconds;

namespace {

using Tensors = std::vector<at::Tensor>;

// The values that group rank `from` has for group rank `to`, the same on all ranks.
at::Tensor values(int from, int to, at::IntArrayRef shape, at::ScalarType dtype) {
  auto generator = at::detail::createCPUGenerator(uint64_t(100 * from + to));
  const at::Tensor x = at::randn(shape, generator, at::kFloat) * 3;
  return dtype == at::kBool ? x.gt(0) : x.to(dtype);
}

Tensors values_for_all(int from, int size, at::IntArrayRef shape, at::ScalarType dtype) {
  Tensors all;
  for (int to = 0; to < size; ++to) all.push_back(values(from, to, shape, dtype));
  return all;
}

// Reduces in rank order; halves in float32, rounded once.
at::Tensor reduced(const Tensors& inputs, ReduceOp op) {
  const auto dtype = inputs[0].scalar_type();
  const bool is_half = dtype == at::kHalf || dtype == at::kBFloat16;
  at::Tensor sum = is_half ? inputs[0].to(at::kFloat) : inputs[0].clone();
  for (size_t i = 1; i < inputs.size(); ++i) {
    const at::Tensor next = inputs[i].to(sum.scalar_type());
    if (op == ReduceOp::MAX)
      sum = at::maximum(sum, next);
    else if (dtype == at::kBool)
      sum = sum.logical_or(next);
    else
      sum = sum + next;
  }
  if (op == ReduceOp::AVG) sum = sum / int64_t(inputs.size());
  return sum.to(dtype);
}

Tensors empty_like_all(const Tensors& tensors) {
  Tensors all;
  for (const at::Tensor& tensor : tensors) all.push_back(at::zeros_like(tensor));
  return all;
}

bool all_same_bits(const Tensors& a, const Tensors& b) {
  return std::ranges::equal(a, b, same_bits);
}

// An operation on rank `rank` of a group that takes part correctly, of several elements a rank.
struct Kind {
  const char* name;
  bool is_rooted;
  std::function<Pending(Backend& backend, int64_t count, milliseconds timeout)> begin;
};

const std::vector<Kind> kKinds = {
    {"reduce_scatter", false,
     [](Backend& backend, int64_t count, milliseconds timeout) {
       return backend.reduce_scatter(at::zeros({count}),
                                     Tensors(size_t(backend.getSize()), at::ones({count})),
                                     ReduceOp::SUM, timeout);
     }},
    {"all_to_all", false,
     [](Backend& backend, int64_t count, milliseconds timeout) {
       Tensors outputs;
       for (int i = 0; i < backend.getSize(); ++i) outputs.push_back(at::zeros({count}));
       return backend.all_to_all(outputs, Tensors(outputs.size(), at::ones({count})), timeout);
     }},
    {"gather", true,
     [](Backend& backend, int64_t count, milliseconds timeout) {
       Tensors outputs;
       for (int i = 0; backend.getRank() == 0 && i < backend.getSize(); ++i) {
         outputs.push_back(at::zeros({count}));
       }
       return backend.gather(at::ones({count}), outputs, 0, timeout);
     }},
    {"scatter", true,
     [](Backend& backend, int64_t count, milliseconds timeout) {
       const int inputs = backend.getRank() == 0 ? backend.getSize() : 0;
       return backend.scatter(at::zeros({count}), Tensors(size_t(inputs), at::ones({count})), 0,
                              timeout);
     }},
    {"reduce", true,
     [](Backend& backend, int64_t count, milliseconds timeout) {
       return backend.reduce(at::ones({count}), 0, ReduceOp::SUM, timeout);
     }},
};

void check_in_step(TestGroup& group) {
  run_ranks(int(group.backends.size()), [&](int rank) {
    const at::Tensor x = at::ones({3});
    group[rank].allreduce(x).wait();
    RANK_CHECK(x.eq(group[rank].getSize()).all().item<bool>());
  });
}

}  // namespace

TEST_CASE("reduce_scatter and reduce give the sums of plain code, bit by bit") {
  const int size = GENERATE(1, 2, 3, 4, 5);
  const int64_t count = GENERATE(0, 7, 1030);
  TestGroup group(size, {}, uint32_t(size));
  run_ranks(size, [&](int rank) {
    for (auto dtype : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kLong, at::kInt,
                       at::kChar, at::kByte, at::kBool, at::kComplexFloat}) {
      for (auto op : {ReduceOp::SUM, ReduceOp::AVG, ReduceOp::MAX}) {
        const bool is_real = dtype != at::kComplexFloat && at::isFloatingType(dtype);
        if (op != ReduceOp::SUM && !is_real) continue;
        const auto for_rank = [&](int to) {
          Tensors inputs;
          for (int from = 0; from < size; ++from) {
            inputs.push_back(values(from, to, {count, 3}, dtype));
          }
          return reduced(inputs, op);
        };
        const Tensors inputs = values_for_all(rank, size, {count, 3}, dtype);
        const at::Tensor output = at::zeros({count, 3}, dtype);
        group[rank].reduce_scatter(output, inputs, op).wait();
        RANK_CHECK(same_bits(output, for_rank(rank)));

        const int root = size - 1;
        // One rank's tensor is not contiguous.
        at::Tensor whole = values(rank, 0, {count, 3}, dtype);
        if (rank == root) whole = whole.t().contiguous().t();
        const at::Tensor before = whole.clone();
        group[rank].reduce(whole, root, op).wait();
        RANK_CHECK(same_bits(whole, rank == root ? for_rank(0) : before));
      }
    }
  });
}

TEST_CASE("all_to_all, gather and scatter move each part to its rank") {
  const int size = GENERATE(1, 2, 3, 4, 5);
  TestGroup group(size, {}, uint32_t(size));
  run_ranks(size, [&](int rank) {
    for (auto dtype : {at::kFloat, at::kHalf, at::kBool, at::kLong, at::kComplexDouble}) {
      Tensors inputs, wanted;
      for (int other = 0; other < size; ++other) {  // each pair has its own size, some of them 0
        inputs.push_back(values(rank, other, {rank * (other + 1), 2}, dtype));
        wanted.push_back(values(other, rank, {other * (rank + 1), 2}, dtype));
      }
      Tensors outputs = empty_like_all(wanted);
      group[rank].all_to_all(outputs, inputs).wait();
      RANK_CHECK(all_same_bits(outputs, wanted));

      for (int root = 0; root < size; ++root) {
        const Tensors parts = values_for_all(root, size, {5, 4}, dtype);
        const at::Tensor part = at::zeros({4, 5}, dtype).t();
        group[rank].scatter(part, rank == root ? parts : Tensors(), root).wait();
        RANK_CHECK(same_bits(part, parts[size_t(rank)]));
        Tensors gathered = rank == root ? empty_like_all(parts) : Tensors();
        group[rank].gather(part, gathered, root).wait();
        if (rank == root) RANK_CHECK(all_same_bits(gathered, parts));
      }
    }
  });
}

TEST_CASE("inputs and outputs of an exchange may share memory") {
  TestGroup group(3);
  run_ranks(3, [&](int rank) {
    const at::Tensor x = at::arange(3) + 10 * rank;
    group[rank].all_to_all(x.split(1), x.split(1)).wait();
    RANK_CHECK(x.equal(10 * at::arange(3) + rank));
    const at::Tensor y = at::full({6}, int64_t(rank));
    group[rank].reduce_scatter(y.narrow(0, 1, 2), y.split(2)).wait();
    RANK_CHECK(y.narrow(0, 1, 2).eq(3).all().item<bool>());
  });
}

TEST_CASE("c10d's functions of the exchanges work") {
  const int size = GENERATE(1, 3);
  TestGroup group(size);
  run_ranks(size, [&](int rank) {
    c10d::Backend& backend = group[rank];
    const auto wait = [](const auto& work) { RANK_CHECK(work->wait() && work->isSuccess()); };
    at::Tensor all = (at::arange(2 * size) + rank).to(at::kFloat), part = at::zeros({2});
    const at::Tensor sum = size * (at::arange(2) + 2 * rank) + size * (size - 1) / 2;
    wait(backend._reduce_scatter_base(part, all));
    RANK_CHECK(part.equal(sum.to(at::kFloat)));
    Tensors outputs = {at::zeros({2})};
    std::vector<Tensors> inputs = {all.split(2)};
    auto work = backend.reduce_scatter(outputs, inputs);
    wait(work);
    RANK_CHECK(work->result().at(0).equal(part));

    // Rank i sends i + 1 rows to each rank.
    at::Tensor sent = at::full({size * (rank + 1), 2}, int64_t(rank));
    at::Tensor received = at::zeros({size * (size + 1) / 2, 2}, at::kLong);
    std::vector<int64_t> sent_sizes(size_t(size), rank + 1), sizes(static_cast<size_t>(size));
    std::iota(sizes.begin(), sizes.end(), 1);
    wait(backend.alltoall_base(received, sent, sizes, sent_sizes));
    RANK_CHECK(
        received.select(1, 0).equal(at::arange(size).repeat_interleave(at::arange(size) + 1)));
    at::Tensor equal_sent = at::arange(size) + 10 * rank, equal = at::zeros({size}, at::kLong);
    std::vector<int64_t> none;
    wait(backend.alltoall_base(equal, equal_sent, none, none));
    RANK_CHECK(equal.equal(10 * at::arange(size) + rank));
    Tensors from = equal_sent.split(1), to = at::zeros({size}, at::kLong).split(1);
    wait(backend.alltoall(to, from));
    RANK_CHECK(at::cat(to).equal(equal));

    const int root = size - 1;
    Tensors one = {at::full({2}, double(rank))};
    std::vector<Tensors> gathered;
    if (rank == root) gathered.push_back(at::zeros({size, 2}).unbind(0));
    wait(backend.gather(gathered, one, {.rootRank = root}));
    std::vector<Tensors> scattered = gathered;
    Tensors back = {at::zeros({2})};
    wait(backend.scatter(back, scattered, {.rootRank = root}));
    RANK_CHECK(back[0].equal(one[0]));
    wait(backend.reduce(one, {.rootRank = root}));
    RANK_CHECK(one[0].eq(rank == root ? size * (size - 1) / 2 : rank).all().item<bool>());
  });
}

TEST_CASE("wrong arguments of an exchange throw one line and do not count as an operation") {
  TestGroup group(2);
  Backend& backend = group[0];
  const at::Tensor x = at::ones({3}), y = at::ones({2}), expanded = at::ones({1}).expand({3});
  at::Tensor odd = at::ones({3}), even = at::ones({4});
  std::vector<int64_t> none, negative = {-1, 5}, three = {1, 1, 2}, small = {1, 2};
  const auto base = [&](std::vector<int64_t>& sizes, at::Tensor& input) {
    return [&] { backend.alltoall_base(even, input, sizes, none, {}); };
  };
  at::Tensor scalar = at::ones({});
  const std::vector<std::function<void()>> calls = {
      [&] { backend.reduce_scatter(x, {x}); },
      [&] {
        backend.reduce_scatter(x, {x, y});
      },
      [&] {
        backend.reduce_scatter(x, {x, x.to(at::kHalf)});
      },
      [&] {
        backend.reduce_scatter(expanded, {x, x});
      },
      [&] {
        backend.reduce_scatter(x, {x, at::Tensor()});
      },
      [&] {
        backend.reduce_scatter(x, {x, x}, ReduceOp::BXOR);
      },
      [&] {
        backend.all_to_all({x, x}, {x});
      },
      [&] {
        backend.all_to_all({x, x}, {x, x.to(at::kLong)});
      },
      [&] {
        backend.all_to_all({x, x}, {y, x});
      },  // its own part
      [&] {
        backend.all_to_all({x, expanded}, {x, x});
      },
      base(none, odd),
      base(negative, even),
      base(three, even),
      base(small, even),
      base(none, scalar),
      [&] {
        backend.gather(x, {x, x}, 2);
      },
      [&] {
        backend.gather(x, {x, x}, -1);
      },
      [&] { backend.gather(x, {x}); },
      [&] {
        backend.gather(x, {x, x}, 1);
      },
      [&] { backend.scatter(x, {x}); },
      [&] {
        backend.scatter(x, {x, y});
      },
      [&] {
        backend.scatter(x, {x, x}, 1);
      },
      [&] {
        backend.scatter(expanded, {x, x});
      },
      [&] { backend.reduce(x, 2); },
      [&] { backend.reduce(x.to(at::kLong), 0, ReduceOp::AVG); },
      [&] { backend.reduce(x.to_sparse()); },
      [&] { backend._reduce_scatter_base(odd, even, {}); },
  };
  for (size_t i = 0; i < calls.size(); ++i) {
    INFO("call " << i);
    const base::Error error = thrown_by(calls[i]);
    CHECK(error.kind == ErrorKind::kInvalid);
    CHECK(error.message.find('\n') == std::string::npos);
  }
  CHECK(backend.getSequenceNumberForGroup() == 0);
}

TEST_CASE("ranks that call different exchanges learn both calls") {
  TestGroup group(2);
  const auto errors_of = [&](const std::function<Pending()>& first,
                             const std::function<Pending()>& second, const std::string& text) {
    run_ranks(2, [&](int rank) {
      const Pending pending = rank == 0 ? first() : second();
      const base::Error error = thrown_by([&] { pending.wait(); });
      RANK_CHECK(error.kind == ErrorKind::kInvalid && error.rank == 1 - rank);
      if (rank == 0 && error.message.find(text) == std::string::npos) {
        throw std::runtime_error(error.message);
      }
    });
    check_in_step(group);
  };
  const at::Tensor x = at::ones({3}), y = at::ones({2});
  errors_of(
      [&] { return group[0].reduce(x); }, [&] { return group[1].reduce(x, 1); },
      "rank 1 called reduce(sum, root 1, Float, 12 bytes) where rank 0 called reduce(sum, root "
      "0, Float, 12 bytes)");
  errors_of(
      [&] {
        return group[0].gather(x, {x.clone(), x.clone()});
      },
      [&] { return group[1].gather(y, {}); }, "rank 1 called gather(root 0, Float, 8 bytes)");
  errors_of(
      [&] {
        return group[0].scatter(x, {x, x});
      },
      [&] { return group[1].scatter(y, {}); }, "rank 1 called scatter(root 0, Float, 8 bytes)");
  errors_of(
      [&] {
        return group[0].reduce_scatter(x, {x, x});
      },
      [&] {
        return group[1].reduce_scatter(x, {x, x}, ReduceOp::MAX);
      },
      "rank 1 called reduce_scatter(max, Float, 12 bytes)");
  errors_of(
      [&] {
        return group[0].all_to_all({x, x}, {x, x});
      },
      [&] {
        return group[1].all_to_all({y, y}, {y, y});
      },
      "rank 1 sent 8 bytes where rank 0 expected 12 in all_to_all(Float) (collective number");
  errors_of(
      [&] {
        return group[0].all_to_all({x, x}, {x, x});
      },
      [&] { return group[1].allreduce(x); }, "rank 1 called allreduce");
}

TEST_CASE("a lost rank fails an exchange and is named") {
  const Kind kind = GENERATE(from_range(kKinds));
  INFO(kind.name);
  TestGroup group(3);
  const Pending pending = kind.begin(group[0], 1000, Backend::kDefault);
  group.network.kill(1);
  const base::Error error = thrown_by([&] { pending.wait(); });
  CHECK(error.kind == ErrorKind::kPeerLost);
  CHECK(error.rank == 1);
  CHECK(thrown_by([&] { kind.begin(group[2], 1000, Backend::kDefault).wait(); }).rank == 1);
}

TEST_CASE("a rank that refuses an exchange or closes the group is named") {
  const Kind kind = GENERATE(from_range(kKinds));
  INFO(kind.name);
  TestGroup group(3);
  run_ranks(3, [&](int rank) {
    if (rank == 1) return group[1].refuse(1, {ErrorKind::kBadData, "the file ends here", 1, {}});
    // Ranks that wait for the root only may have its message before the refusal.
    if (rank != 0 && kind.is_rooted) {
      try {
        kind.begin(group[rank], 5, Backend::kDefault).wait();
      } catch (const base::Exception&) {
      }
      return;
    }
    const Pending pending = kind.begin(group[rank], 5, Backend::kDefault);
    const base::Error error = thrown_by([&] { pending.wait(); });
    RANK_CHECK(error.kind == ErrorKind::kBadData && error.rank == 1);
  });
  check_in_step(group);
  const Pending pending = kind.begin(group[0], 5, Backend::kDefault);
  group.backends[1].reset();
  const base::Error error = thrown_by([&] { pending.wait(); });
  CHECK(error.kind == ErrorKind::kPeerLost);
  CHECK(error.rank == 1);
}

TEST_CASE("the deadline of an exchange names the late ranks, and the group stays synchronized") {
  const Kind kind = GENERATE(from_range(kKinds));
  INFO(kind.name);
  TestGroup group(3);
  const base::Error error = thrown_by([&] { kind.begin(group[0], 1000, milliseconds(20)).wait(); });
  CHECK(error.kind == ErrorKind::kDeadline);
  CHECK(error.rank == 1);
  CHECK(error.message.find("nothing came from rank 1, 2") != std::string::npos);
  CHECK(error.message.find(kind.name) == 0);
  run_ranks(3, [&](int rank) {  // the late ranks have what rank 0 sent
    if (rank != 0) kind.begin(group[rank], 1000, Backend::kDefault).wait();
  });
  check_in_step(group);
}

TEST_CASE("many exchanges in flight are matched by their order") {
  TestGroup group(4, {}, 3);
  run_ranks(4, [&](int rank) {
    std::vector<Pending> pending;
    for (int i = 0; i < 100; ++i) {
      pending.push_back(kKinds[size_t(i) % kKinds.size()].begin(group[rank], i, Backend::kDefault));
    }
    for (const Pending& each : pending) each.wait();
  });
}

TEST_CASE("a root that is far ahead waits until the others have begun") {
  TestGroup group(2);
  const at::Tensor x = at::zeros({40 << 20}, at::kByte), y = at::empty_like(x);
  const Tensors inputs = {x, x};
  const Pending first = group[0].scatter(y, inputs);
  const Pending late = group[0].scatter(y, inputs, 0, milliseconds(20));
  CHECK(thrown_by([&] { late.wait(); }).kind == ErrorKind::kDeadline);
  // Rank 1 gets an error instead of the second part, for which its window had no room.
  const at::Tensor z = at::empty_like(x);
  group[1].scatter(z, {}).wait();
  const base::Error refusal = thrown_by([&] { group[1].scatter(z, {}).wait(); });
  CHECK(refusal.kind == ErrorKind::kDeadline);
  CHECK(refusal.rank == 0);
  first.wait();
}
