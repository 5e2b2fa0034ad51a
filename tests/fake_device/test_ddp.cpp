// Tests DistributedDataParallel on devices: its results equal those on the CPU.
#include <optional>

#include <ATen/ATen.h>
#include <c10/core/StreamGuard.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include "distrain/collective/staged_reduce_group.h"
#include "distrain/ddp/distributed_data_parallel.h"
#include "distrain/rpc/device.h"
#include "support/catch.h"
#include "support/fake_device.h"
#include "unit/collective/test_group.h"
#include "unit/ddp/manual_pass.h"

using namespace distrain;
using namespace distrain::testing;
using base::ErrorKind;
using ddp::DistributedDataParallel;
using ddp::NamedParameter;
using ddp::Reducer;

namespace {

constexpr auto kLimit = std::chrono::seconds(30);
const Reducer::Options kSmall{.bucket_cap_bytes = 300, .first_bucket_bytes = 100};

// Two layers, on one device or on two.
//
// Two ranks must not use the same device: the ranks of a test share torch's engine, which has one
// thread per device, and a pass may block that thread while it waits for other ranks.
struct NetImpl : torch::nn::Module {
  NetImpl(uint64_t seed, c10::Device a, c10::Device b) {
    auto generator = at::detail::createCPUGenerator(seed);
    const auto random = [&](at::IntArrayRef sizes, c10::Device device) {
      return at::randn(sizes, generator).to(device);
    };
    first = register_parameter("first", random({20, 6}, a));
    scale = register_parameter("scale", random({20}, a));
    shift = register_parameter("shift", random({20}, a));
    mean = register_buffer("mean", random({20}, a));
    variance = register_buffer("variance", at::ones({20}).to(a));
    second = register_parameter("second", random({3, 20}, b));
    bias = register_parameter("bias", random({3}, b));
  }
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor h = at::batch_norm(at::linear(x.to(first.device()), first), scale, shift, mean,
                                        variance, is_training(), 0.1, 1e-5, false);
    return at::linear(at::tanh(h).to(second.device()), second, bias);
  }
  at::Tensor first, scale, shift, mean, variance, second, bias;
};
TORCH_MODULE(Net);

at::Tensor batch(int rank, int step) {
  auto generator = at::detail::createCPUGenerator(uint64_t(100 * step + rank));
  return at::randn({8, 6}, generator);
}

enum class Kind { kPlain, kDistributed };

// Trains on `size` ranks and returns the parameters of rank 0. Rank r has its layers on devices[r].
std::vector<at::Tensor> trained(int size, std::vector<std::pair<c10::Device, c10::Device>> devices,
                                Kind kind, const ddp::CommHook& hook = {}, int steps = 5) {
  Reducer::Options options = kSmall;
  options.hook = hook;
  TestGroup group(size, {.timeout = kLimit});
  std::vector<at::Tensor> result;
  run_ranks(size, [&](int rank) {
    const auto [a, b] = devices[size_t(rank)];
    Net net(uint64_t(rank + 1), a, b);
    DistributedDataParallel model(net, group.backends[size_t(rank)], options);
    for (int step = 0; step < steps; ++step) {
      const at::Tensor loss = model.forward(batch(rank, step)).pow(2).mean();
      std::optional<ManualPass> pass;
      if (kind == Kind::kPlain) {
        loss.backward();
      } else {
        pass.emplace(model.reducer()).backward(loss, model.parameters());
      }
      const at::NoGradGuard no_grad;
      for (at::Tensor& p : model.parameters()) {
        p.sub_(pass ? pass->gradient(p) : p.grad(), 0.1);
        p.mutable_grad() = at::Tensor();
      }
    }
    RANK_CHECK(model.reducer().buckets().size() > 2);
    std::vector<at::Tensor> values;
    for (const at::Tensor& p : net->parameters()) values.push_back(p.detach().cpu());
    for (const at::Tensor& p : net->buffers()) values.push_back(p.detach().cpu());
    if (rank == 0) result = values;
  });
  return result;
}

std::vector<NamedParameter> some_parameters(c10::Device device) {
  std::vector<NamedParameter> result;
  for (int i = 0; i < 4; ++i) {
    const at::Tensor value = at::ones({64}, at::TensorOptions(device));
    result.push_back({std::to_string(i), value.set_requires_grad(true)});
  }
  return result;
}

bool all_close(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  bool close = a.size() == b.size();
  for (size_t i = 0; close && i < a.size(); ++i) close = at::allclose(a[i], b[i], 1e-6, 1e-6);
  return close;
}

}  // namespace

TEST_CASE("training on devices equals training on the CPU") {
  const int size = GENERATE(1, 2, 3);
  const Kind kind = GENERATE(Kind::kPlain, Kind::kDistributed);
  using Places = std::vector<std::pair<c10::Device, c10::Device>>;
  const auto on_cpu = trained(size, Places(size_t(size), {at::kCPU, at::kCPU}), kind);
  Places one;
  Places two;
  for (int rank = 0; rank < size; ++rank) {
    one.emplace_back(fake(rank), fake(rank));
    if (size < 3) two.emplace_back(fake(rank), fake(rank + 2));
  }
  CHECK(all_close(trained(size, one, kind), on_cpu));
  // A hook whose values are on the device, and arrive after the gradients.
  const ddp::CommHook hook{"copies", [](const std::shared_ptr<ddp::GradientBucket>& bucket) {
                             return bucket->average(bucket->tensor.clone());
                           }};
  CHECK(all_close(trained(size, one, kind, hook), on_cpu));
  if (size < 3) CHECK(all_close(trained(size, two, kind), on_cpu));
  // The devices may differ between the ranks.
  if (size > 1) {
    Places mixed = one;
    mixed[1] = {at::kCPU, at::kCPU};
    CHECK(all_close(trained(size, mixed, kind), on_cpu));
  }
}

TEST_CASE("replicas whose parameters are placed differently are refused") {
  TestGroup group(2, {.timeout = kLimit});
  run_ranks(2, [&](int rank) {
    Net net(1, fake(rank), fake(2 * rank));
    const base::Error error =
        thrown_by([&] { DistributedDataParallel model(net, group.backends[size_t(rank)]); });
    RANK_CHECK(error.kind == ErrorKind::kInvalid);
    RANK_CHECK(contains(error.message, "second"));
    RANK_CHECK(contains(error.message, "device number 2"));
  });
}

TEST_CASE("a pass copies each bucket once to the host and back, and nothing else") {
  TestGroup group(2, {.timeout = kLimit});
  std::vector<std::unique_ptr<Reducer>> reducers(2);
  std::vector<std::vector<NamedParameter>> parameters(2);
  run_ranks(2, [&](int rank) {
    auto& mine = parameters[size_t(rank)];
    for (int i = 0; i < 6; ++i) {
      const at::Tensor value = at::ones({50}, at::TensorOptions(fake(2 * rank + i % 2)));
      mine.push_back({std::to_string(i), value.set_requires_grad(true)});
    }
    reducers[size_t(rank)] = std::make_unique<Reducer>(
        mine, group.backends[size_t(rank)],
        Reducer::Options{.bucket_cap_bytes = 400, .first_bucket_bytes = 200});
  });
  for (int step = 0; step < 4; ++step) {
    const auto buckets = int64_t(reducers[0]->buckets().size());
    CHECK(buckets == 4);
    run_all_fake_streams();
    reset_fake_device_counters();
    run_ranks(2, [&](int rank) {
      std::vector<at::Tensor> losses(2);
      for (size_t i = 0; i < 6; ++i) {
        const at::Tensor part = parameters[size_t(rank)][i].tensor.sum();
        at::Tensor& loss = losses[i % 2];
        loss = loss.defined() ? loss + part : part;
      }
      torch::autograd::backward(losses, {});
    });
    const FakeDeviceCounters counters = fake_device_counters();
    CHECK(counters.host_to_device.number == 2 * buckets);
    CHECK(counters.device_to_host.number == 2 * buckets);
    CHECK(counters.device_to_device.number == 0);
    CHECK(counters.scalars == 0);
  }
}

TEST_CASE("gradients on several streams are in order") {
  const bool again = GENERATE(false, true);  // whether passes reuse the memory of buckets
  TestGroup group(2, {.timeout = kLimit});
  run_ranks(2, [&](int rank) {
    const c10::Device device = fake(rank);
    const auto parameters = some_parameters(device);
    Reducer reducer(parameters, group.backends[size_t(rank)]);
    const c10::Stream begun_in = rpc::side_stream(device);
    std::vector<c10::Stream> used_in;
    for (int i = 0; i < 5; ++i) used_in.push_back(rpc::side_stream(device));
    at::Tensor kept;
    for (int step = 0; step < 20; ++step) {
      ManualPass pass(reducer);
      for (int i = 0; i < 4; ++i) {
        const c10::StreamGuard guard(i == 0 ? begun_in : used_in[size_t(i)]);
        pass.give(parameters[size_t(i)].tensor,
                  at::full({64}, double(step), at::TensorOptions(device)) * double(rank + i));
      }
      const c10::StreamGuard guard(used_in[4]);
      pass.end();
      at::Tensor last;
      for (int i = 0; i < 4; ++i) {
        last = pass.gradient(parameters[size_t(i)].tensor);
        RANK_CHECK((last * 2).eq(double(step) * (2 * i + 1)).all().item<bool>());
      }
      // After this wait, all earlier work of the stream that allocated the buckets has run.
      rpc::StreamPoint::mark(begun_in).wait_on_host();
      RANK_CHECK((last * 2).eq(double(step) * 7).all().item<bool>());
      if (again) continue;
      kept = last;  // frees the previous pass's gradients, whose memory `begun_in` may reuse
      for (const c10::Stream& stream : used_in) rpc::StreamPoint::mark(stream).wait_on_host();
    }
  });
}

TEST_CASE("means are copied out of a bucket before the next pass fills it") {
  TestGroup group(2, {.timeout = kLimit});
  run_ranks(2, [&](int rank) {
    const c10::Device device = fake(rank);
    const auto parameters = some_parameters(device);
    Reducer reducer(parameters, group.backends[size_t(rank)]);
    struct Step {
      c10::Stream stream;
      std::vector<at::Tensor> means;
    };
    std::vector<Step> steps;
    std::vector<c10::Stream> streams;
    for (size_t i = 0; i < parameters.size(); ++i) streams.push_back(rpc::side_stream(device));
    for (int step = 0; step < 8; ++step) {
      const c10::StreamGuard guard(rpc::side_stream(device));
      at::Tensor loss;
      for (size_t i = 0; i < parameters.size(); ++i) {
        at::Tensor part;
        {
          // The backward pass computes the gradient on the stream of the forward pass.
          const c10::StreamGuard own(streams[i]);
          part = (parameters[i].tensor * double(step + rank)).sum();
        }
        rpc::StreamPoint::mark(streams[i]).make_current_wait(device);
        rpc::use_on_stream(part, rpc::current_stream(device));
        loss = loss.defined() ? loss + part : part;
      }
      loss.backward();
      steps.push_back({guard.current_stream(), {}});
      for (const auto& p : parameters) {
        steps.back().means.push_back(std::exchange(p.tensor.mutable_grad(), at::Tensor()));
      }
    }
    // Reads the results only after all steps, because reading a result runs its stream.
    for (size_t step = 0; step < steps.size(); ++step) {
      const c10::StreamGuard guard(steps[step].stream);
      for (const at::Tensor& mean : steps[step].means) {
        RANK_CHECK((mean * 2).eq(2 * double(step) + 1).all().item<bool>());
      }
    }
  });
}

TEST_CASE("a bucket's memory is reused only after the copies into it and out of it") {
  TestGroup group(2, {.timeout = kLimit});
  run_ranks(2, [&](int rank) {
    const c10::Device device = fake(rank);
    const c10::Stream begun_in = rpc::side_stream(device);
    const c10::Stream other = rpc::side_stream(device);
    // Checks that a new tensor, which may get the memory of a bucket, keeps its values.
    const auto check_next = [&] {
      const c10::StreamGuard guard(begun_in);
      const at::Tensor next = at::full({4 * 64}, 7.0, at::TensorOptions(device));
      rpc::StreamPoint::mark(begun_in).wait_on_host();
      rpc::StreamPoint::mark(other).wait_on_host();
      RANK_CHECK(next.eq(7).all().item<bool>());
    };
    for (int round = 0; round < 5; ++round) {
      const auto parameters = some_parameters(device);
      auto reducer = std::make_unique<Reducer>(parameters, group.backends[size_t(rank)]);
      {
        ManualPass pass(*reducer);
        const auto give = [&](size_t i) {
          pass.give(parameters[i].tensor, at::full({64}, 3.0, at::TensorOptions(device)));
        };
        {
          const c10::StreamGuard guard(begun_in);
          give(0);
        }
        const c10::StreamGuard guard(other);
        for (size_t i = 1; i < 3; ++i) give(i);
        RANK_CHECK(thrown_by([&] { pass.end(); }).kind == ErrorKind::kInvalid);
      }
      check_next();
      at::Tensor loss;
      {
        const c10::StreamGuard guard(begun_in);
        for (const auto& p : parameters) {
          const at::Tensor part = (p.tensor * double(rank)).sum();
          loss = loss.defined() ? loss + part : part;
        }
      }
      const c10::StreamGuard guard(other);
      loss.backward();
      reducer.reset();
      check_next();
      for (const auto& p : parameters) RANK_CHECK(p.tensor.grad().eq(0.5).all().item<bool>());
    }
  });
}

TEST_CASE("buffers and parameters of rank 0 arrive in order with the streams of both ranks") {
  TestGroup group(2, {.timeout = kLimit});
  run_ranks(2, [&](int rank) {
    const c10::Device device = fake(rank);
    collective::StagedReduceGroup reduce(group.backends[size_t(rank)]);
    for (int step = 0; step < 10; ++step) {
      const c10::StreamGuard guard(rpc::side_stream(device));
      const at::Tensor a = at::ones({10}, at::TensorOptions(device)) * double(rank + step);
      const at::Tensor b = (at::ones({4, 3}, at::TensorOptions(device)) * double(rank)).t();
      const at::Tensor c = at::ones({7}, at::TensorOptions(at::kLong)) * int64_t(rank + step);
      const auto version = a._version();
      ddp::broadcast_values({a, b, c}, reduce);
      RANK_CHECK(a.eq(step).all().item<bool>());
      RANK_CHECK(b.eq(0).all().item<bool>());
      RANK_CHECK(c.eq(step).all().item<bool>());
      RANK_CHECK(a._version() == version);
    }
  });
}

TEST_CASE("a pass on devices that fails does not affect the next pass") {
  TestGroup group(2, {.timeout = kLimit});
  run_ranks(2, [&](int rank) {
    const auto parameters = some_parameters(fake(rank));
    Reducer reducer(parameters, group.backends[size_t(rank)],
                    {.bucket_cap_bytes = 1, .first_bucket_bytes = 1});
    const auto give = [&](ManualPass& pass, size_t i, c10::Device device) {
      pass.give(parameters[i].tensor, at::full({64}, double(rank), at::TensorOptions(device)));
    };
    for (int round = 0; round < 3; ++round) {
      const std::vector<std::string> texts = {"another shape, dtype or device",
                                              "no gradient came for '1'"};
      for (size_t kind = 0; kind < texts.size(); ++kind) {
        ManualPass pass(reducer);
        for (size_t i : {3, 2, 0}) give(pass, i, fake(rank));
        if (rank == 1 && kind == 0) give(pass, 1, fake(3));
        if (rank == 0) give(pass, 1, fake(rank));
        const base::Error error = thrown_by([&] { pass.end(); });
        RANK_CHECK(error.kind == ErrorKind::kInvalid);
        RANK_CHECK(error.rank == 1);
        RANK_CHECK(contains(error.message, texts[kind]));
      }
      ManualPass pass(reducer);
      for (size_t i : {3, 2, 1, 0}) give(pass, i, fake(rank));
      pass.end();
      for (const auto& p : parameters) {
        RANK_CHECK(pass.gradient(p.tensor).eq(0.5).all().item<bool>());
      }
    }
  });
}
