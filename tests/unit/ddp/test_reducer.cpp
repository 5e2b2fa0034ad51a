#include <algorithm>
#include <chrono>
#include <optional>

#include <ATen/ATen.h>

#include "distrain/ddp/reducer.h"
#include "support/catch.h"
#include "unit/collective/test_group.h"
#include "unit/ddp/manual_pass.h"

using namespace distrain;
using namespace distrain::testing;
using base::ErrorKind;
using ddp::NamedParameter;
using ddp::Reducer;

namespace {

// y = w3 tanh(w2 tanh(w1 x + b1) + b2), with parameters of mixed sizes and dtypes.
struct PlainModel {
  PlainModel() {
    auto generator = at::detail::createCPUGenerator(5);
    const auto add = [&](const char* name, at::IntArrayRef sizes, at::ScalarType dtype) {
      const at::Tensor value = at::randn(sizes, generator, at::kDouble).to(dtype);
      parameters.push_back({name, value.set_requires_grad(true)});
    };
    add("w1", {20, 5}, at::kFloat);
    add("b1", {20}, at::kFloat);
    add("w2", {30, 20}, at::kDouble);
    add("b2", {30}, at::kDouble);
    add("w3", {1, 30}, at::kFloat);
    add("scale", {}, at::kFloat);
  }
  const at::Tensor& operator[](size_t i) const { return parameters[i].tensor; }
  at::Tensor loss(const at::Tensor& x, bool with_b1 = true) const {
    at::Tensor h = at::matmul((*this)[0], x);
    if (with_b1) h = h + (*this)[1].unsqueeze(1);
    h = at::matmul((*this)[2], at::tanh(h).to(at::kDouble)) + (*this)[3].unsqueeze(1);
    return (at::matmul((*this)[4], at::tanh(h).to(at::kFloat)) * (*this)[5]).pow(2).mean();
  }
  std::vector<at::Tensor> tensors() const {
    std::vector<at::Tensor> all;
    for (const auto& p : parameters) all.push_back(p.tensor);
    return all;
  }
  void zero_grad() const {
    for (const auto& p : parameters) p.tensor.mutable_grad() = at::Tensor();
  }
  std::vector<NamedParameter> parameters;
};

at::Tensor input_of(int rank, int step) {
  auto generator = at::detail::createCPUGenerator(uint64_t(100 * step + rank));
  return at::randn({5, 4}, generator, at::kFloat);
}

// Returns the gradients of the mean of all ranks' losses, computed in one process.
std::vector<at::Tensor> reference(int size, int step) {
  const PlainModel model;
  at::Tensor total;
  for (int rank = 0; rank < size; ++rank) {
    const at::Tensor loss = model.loss(input_of(rank, step)) / size;
    total = total.defined() ? total + loss : loss;
  }
  total.backward();
  std::vector<at::Tensor> gradients;
  for (const auto& p : model.parameters) gradients.push_back(p.tensor.grad());
  return gradients;
}

// Compares relative to the largest element, because small elements result from cancellation.
bool close(const at::Tensor& a, const at::Tensor& b) {
  return a.defined() && a.scalar_type() == b.scalar_type() && a.sizes() == b.sizes() &&
         (a - b).abs().max().item<double>() <= 1e-6 * std::max(1.0, b.abs().max().item<double>());
}

void plain_steps(int size, Reducer::Options options, int steps) {
  TestGroup group(size, {.timeout = std::chrono::seconds(20)});
  run_ranks(size, [&](int rank) {
    const PlainModel model;
    Reducer reducer(model.parameters, group.backends[size_t(rank)], options);
    for (int step = 0; step < steps; ++step) {
      model.zero_grad();
      model.loss(input_of(rank, step)).backward();
      const auto wanted = reference(size, step);
      for (size_t i = 0; i < wanted.size(); ++i) RANK_CHECK(close(model[i].grad(), wanted[i]));
    }
  });
}

}  // namespace

TEST_CASE("a plain backward leaves the mean over the ranks in .grad") {
  const int size = GENERATE(1, 2, 3, 4);
  plain_steps(size, {}, 3);
}

TEST_CASE("buckets of every size give the mean") {
  for (size_t cap : {size_t{1}, size_t{100}, size_t{500}, size_t{3000}}) {
    plain_steps(3, {.bucket_cap_bytes = cap, .first_bucket_bytes = cap / 2}, 4);
  }
}

TEST_CASE("buckets are in reverse order first, then in the order of arrival on rank 0") {
  TestGroup group(2);
  run_ranks(2, [&](int rank) {
    const PlainModel model;
    Reducer reducer(model.parameters, group.backends[size_t(rank)],
                    {.bucket_cap_bytes = 1, .first_bucket_bytes = 1});
    const std::vector<std::vector<std::string>> before = {{"scale"}, {"w3"}, {"b2"},
                                                          {"w2"},    {"b1"}, {"w1"}};
    RANK_CHECK(reducer.buckets() == before);
    for (int step = 0; step < 3; ++step) {
      ManualPass pass(reducer);
      // The gradients arrive in a different order on each rank.
      const std::vector<size_t> order =
          rank == 0 ? std::vector<size_t>{2, 0, 5, 1, 4, 3} : std::vector<size_t>{5, 4, 3, 2, 1, 0};
      std::vector<at::Tensor> variables;
      for (const size_t i : order) variables.push_back(model[i]);
      pass.backward(model.loss(input_of(rank, step)), variables);
      const auto wanted = reference(2, step);
      for (size_t i = 0; i < wanted.size(); ++i) {
        RANK_CHECK(close(pass.gradient(model[i]), wanted[i]));
      }
    }
    const std::vector<std::vector<std::string>> after = {{"w2"}, {"w1"}, {"scale"},
                                                         {"b1"}, {"w3"}, {"b2"}};
    RANK_CHECK(reducer.buckets() == after);
  });
}

TEST_CASE("a distributed pass gets the mean and does not touch .grad") {
  const int size = GENERATE(2, 4);
  TestGroup group(size);
  run_ranks(size, [&](int rank) {
    const PlainModel model;
    Reducer reducer(model.parameters, group.backends[size_t(rank)]);
    std::vector<std::unique_ptr<ManualPass>> passes;  // kept until later passes have run
    for (int step = 0; step < 4; ++step) {
      passes.push_back(std::make_unique<ManualPass>(reducer));
      passes.back()->backward(model.loss(input_of(rank, step)), model.tensors());
    }
    for (int step = 0; step < 4; ++step) {
      const auto wanted = reference(size, step);
      for (size_t i = 0; i < wanted.size(); ++i) {
        RANK_CHECK(close(passes[size_t(step)]->gradient(model[i]), wanted[i]));
        RANK_CHECK(!model[i].grad().defined());
      }
    }
  });
}

TEST_CASE("plain and distributed passes may alternate") {
  TestGroup group(2);
  run_ranks(2, [&](int rank) {
    const PlainModel model;
    Reducer reducer(model.parameters, group.backends[size_t(rank)], {.first_bucket_bytes = 100});
    for (int step = 0; step < 6; ++step) {
      const auto wanted = reference(2, step);
      std::optional<ManualPass> pass;
      model.zero_grad();
      if (step % 2) {
        pass.emplace(reducer).backward(model.loss(input_of(rank, step)), model.tensors());
      } else {
        model.loss(input_of(rank, step)).backward();
      }
      for (size_t i = 0; i < wanted.size(); ++i) {
        RANK_CHECK(close(pass ? pass->gradient(model[i]) : model[i].grad(), wanted[i]));
      }
    }
  });
}

TEST_CASE("a parameter without gradient is named on every rank, and the group stays usable") {
  const size_t cap = GENERATE(size_t{1}, size_t{1} << 20);
  const bool distributed = GENERATE(false, true);
  TestGroup group(3, {.timeout = std::chrono::seconds(20)});
  run_ranks(3, [&](int rank) {
    PlainModel model;
    model.parameters.push_back({"unused", at::ones({3}).set_requires_grad(true)});
    Reducer reducer(model.parameters, group.backends[size_t(rank)],
                    {.bucket_cap_bytes = cap, .first_bucket_bytes = cap});
    const auto backward = [&](const at::Tensor& loss) {
      if (distributed) {
        ManualPass(reducer).backward(loss, model.tensors());
      } else {
        loss.backward();
      }
    };
    const at::Tensor& extra = model.parameters.back().tensor;
    for (int step = 0; step < 4; ++step) {
      // In the second step rank 1 omits two parameters.
      const bool lacks = step == 1 && rank == 1;
      at::Tensor loss = model.loss(input_of(rank, step), !lacks);
      if (!lacks) loss = loss + extra.sum();
      if (step != 1) {
        backward(loss);
        continue;
      }
      const base::Error error = thrown_by([&] { backward(loss); });
      RANK_CHECK(error.kind == ErrorKind::kInvalid);
      RANK_CHECK(error.rank == 1);
      RANK_CHECK(contains(error.message, "rank 1"));
      RANK_CHECK(contains(error.message, "'b1', 'unused'"));
      RANK_CHECK(!contains(error.message, "w1"));
    }
  });
}

TEST_CASE("a sparse gradient is refused by name") {
  TestGroup group(2, {.timeout = std::chrono::seconds(20)});
  run_ranks(2, [&](int rank) {
    const at::Tensor table = at::ones({10, 4}).set_requires_grad(true);
    const at::Tensor weight = at::ones({4}).set_requires_grad(true);
    Reducer reducer({{"table", table}, {"weight", weight}}, group.backends[size_t(rank)]);
    const base::Error error = thrown_by([&] {
      const at::Tensor rows = at::embedding(table, at::arange(3), -1, false, /*sparse=*/true);
      (rows * weight).sum().backward();
    });
    RANK_CHECK(error.kind == ErrorKind::kInvalid);
    RANK_CHECK(contains(error.message, "'table' got a sparse gradient that was not announced"));
  });
}

TEST_CASE("a pass that dies notifies the other ranks at once") {
  const int kind = GENERATE(0, 1, 2);
  TestGroup group(3, {.timeout = std::chrono::seconds(60)});
  const base::TimePoint start = base::Clock::now();
  run_ranks(3, [&](int rank) {
    const PlainModel model;
    Reducer reducer(model.parameters, group.backends[size_t(rank)],
                    {.bucket_cap_bytes = 1, .first_bucket_bytes = 1});
    const auto fails = [&](const at::Tensor& loss) {
      const base::Error error = thrown_by([&] { loss.backward(); });
      RANK_CHECK(error.kind == ErrorKind::kRemoteFailed);
      RANK_CHECK(error.rank == 1);
      RANK_CHECK(contains(error.message, "backward pass of rank 1"));
    };
    if (rank != 1) {
      fails(model.loss(input_of(rank, 0)));
    } else if (kind == 0) {
      // The hook throws when some of the parameters already have their gradients.
      const unsigned hook = model[0].register_hook(
          [](const at::Tensor&) -> void { throw std::runtime_error("user's"); });
      bool thrown = false;
      try {
        model.loss(input_of(rank, 0)).backward();
      } catch (const std::exception& e) {
        thrown = contains(e.what(), "user's");
      }
      RANK_CHECK(thrown);
      model[0].remove_hook(hook);
    } else {
      ManualPass pass(reducer);
      if (kind == 2) pass.give(model[5], at::zeros_like(model[5]));
      pass.fail();
    }
    // The next pass works normally.
    model.zero_grad();
    model.loss(input_of(rank, 1)).backward();
    const auto wanted = reference(3, 1);
    for (size_t i = 0; i < wanted.size(); ++i) RANK_CHECK(close(model[i].grad(), wanted[i]));
  });
  CHECK(base::seconds_since(start) < 30);
}

TEST_CASE("a lost rank ends backward with peer_lost") {
  TestGroup group(2);
  std::thread killer([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    group.network.kill(1);
  });
  const PlainModel model;
  Reducer reducer(model.parameters, group.backends[0]);
  CHECK(thrown_by([&] { model.loss(input_of(0, 0)).backward(); }).kind == ErrorKind::kPeerLost);
  CHECK(thrown_by([&] { model.loss(input_of(0, 0)).backward(); }).kind == ErrorKind::kPeerLost);
  killer.join();
}

TEST_CASE("a second concurrent pass is refused") {
  TestGroup group(1);
  const PlainModel model;
  Reducer reducer(model.parameters, group.backends[0]);
  ManualPass first(reducer);
  ManualPass second(reducer);
  const auto give = [&](ManualPass& pass, size_t i) {
    pass.give(model[i], at::zeros_like(model[i]));
  };
  give(first, 0);
  CHECK(thrown_by([&] { give(second, 0); }).kind == ErrorKind::kInvalid);
  CHECK(thrown_by([&] { model.loss(input_of(0, 0)).backward(); }).kind == ErrorKind::kInvalid);
  for (size_t i = 1; i < model.parameters.size(); ++i) give(first, i);
  first.end();
  second.backward(model.loss(input_of(0, 0)), model.tensors());
  CHECK(thrown_by([&] { Reducer again(model.parameters, group.backends[0]); }).kind ==
        ErrorKind::kInvalid);
}

TEST_CASE("gradients accumulate over backward passes as without a Reducer") {
  TestGroup group(2);
  run_ranks(2, [&](int rank) {
    const PlainModel model;
    Reducer reducer(model.parameters, group.backends[size_t(rank)]);
    model.loss(input_of(rank, 0)).backward();
    model.loss(input_of(rank, 1)).backward();
    const auto first = reference(2, 0);
    const auto second = reference(2, 1);
    for (size_t i = 0; i < first.size(); ++i) {
      RANK_CHECK(close(model[i].grad(), first[i] + second[i]));
    }
  });
}

TEST_CASE("parameters may be used twice, shared, strided or frozen") {
  TestGroup group(2);
  run_ranks(2, [&](int rank) {
    const at::Tensor w = at::ones({4, 3}).t().set_requires_grad(true);  // not contiguous
    const at::Tensor frozen = at::ones({3});
    Reducer reducer({{"w", w}, {"same", w}, {"frozen", frozen}}, group.backends[size_t(rank)]);
    RANK_CHECK(reducer.buckets() == std::vector<std::vector<std::string>>{{"w"}});
    const at::Tensor x = at::arange(12).to(at::kFloat).view({3, 4}) * double(rank + 1);
    ((w * x).sum() + (w * x).sum()).backward();
    const at::Tensor wanted = at::arange(12).to(at::kFloat).view({3, 4}) * 3;
    RANK_CHECK(at::equal(w.grad(), wanted));
  });
}

TEST_CASE("the hooks of a Reducer are removed with it") {
  TestGroup group(2);
  const PlainModel model;
  { Reducer reducer(model.parameters, group.backends[0]); }
  model.loss(input_of(0, 0)).backward();  // would wait for rank 1 if a hook remained
  CHECK(model[0].grad().defined());
  Reducer again(model.parameters, group.backends[0]);
}
