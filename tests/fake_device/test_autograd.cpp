// Tests the streams of a backward pass on one rank. Work that one stream produces and another uses
// needs a wait; on the fake device a missing wait gives wrong values every time.
#include <ATen/ATen.h>
#include <c10/core/StreamGuard.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include "distrain/autograd/context.h"
#include "distrain/autograd/parameter_versions.h"
#include "distrain/rpc/device.h"
#include "support/catch.h"
#include "support/cluster.h"
#include "support/test_device.h"

namespace distrain::testing {
namespace {

using autograd::Context;
using c10::StreamGuard;
using rpc::AgentOptions;
using rpc::StreamPoint;

at::Tensor twice(at::Tensor x) { return x * 2; }

std::tuple<at::Tensor, at::Tensor> across(at::Tensor x, at::Tensor y) {
  return {x * y.to(x.device()), y * 3};
}

// Multiplies both gradients by 2, and the second one also by its own sum. Uses the second gradient
// on the current stream of its device, then on a side stream. The node's own stream must wait for
// both, because torch requires a node's outputs to be ready on it.
struct OnTwoDevices : torch::autograd::Function<OnTwoDevices> {
  using Tensors = torch::autograd::variable_list;
  static Tensors forward(torch::autograd::AutogradContext*, const at::Tensor& x,
                         const at::Tensor& y) {
    return {x * 1, y * 1};
  }
  static Tensors backward(torch::autograd::AutogradContext*, const Tensors& gradients) {
    const double sum = gradients[1].sum().item<double>();
    const at::Tensor first = gradients[1] * sum;
    const c10::Stream aside = rpc::side_stream(test_device(1));
    StreamPoint::mark(test_device(1)).make_wait(aside);
    rpc::use_on_stream(first, aside);
    at::Tensor second;
    {
      const StreamGuard guard(aside);
      second = first * 2;
    }
    StreamPoint::mark(aside).make_wait(rpc::current_stream(test_device(0)));
    return {gradients[0] * 2, second};
  }
};

void expose_passes(rpc::Agent& agent) {
  autograd::install(agent);
  agent.expose<&across>("across");
  agent.expose<&twice>("twice");
}

/// Returns a leaf on a device that is ready for use on any stream.
at::Tensor leaf(const at::Tensor& values, c10::Device device = test_device()) {
  const at::Tensor there = values.to(device).requires_grad_();
  StreamPoint::mark(device).wait_on_host();
  return there;
}

/// Returns a stream without dependencies on other streams.
c10::Stream new_stream(int device = 0) { return rpc::side_stream(test_device(device)); }

/// Returns the value of `tensor` as work enqueued on `stream` now would read it.
at::Tensor seen_from(const c10::Stream& stream, const at::Tensor& tensor) {
  const StreamGuard guard(stream);
  return tensor.cpu();
}

at::Tensor one_to_four() { return at::arange(1, 5, at::kFloat); }

/// Runs a forward pass of w * w on the stream `computing`, and its backward pass on `calling`.
struct Square {
  explicit Square(Cluster& cluster) : context(cluster[0], Context::Scope::kExplicit) {
    const StreamGuard guard(computing);
    loss = (w * w).sum();
  }
  void backward() {
    const StreamGuard guard(calling);
    autograd::backward(context, {loss}, {.retain_graph = true});
  }

  const c10::Stream computing = new_stream();
  const c10::Stream calling = new_stream();
  const at::Tensor w = leaf(one_to_four());
  const at::Tensor expected = one_to_four() * 2;
  Context context;
  at::Tensor loss;
};

}  // namespace

TEST_CASE("a graph may use several streams of a device") {
  Cluster cluster(1, expose_passes);
  for (int repeat = 0; repeat < 10; ++repeat) {
    const at::Tensor w = leaf(one_to_four()), v = leaf(one_to_four() + 1);
    const c10::Stream first = new_stream(), second = new_stream(), third = new_stream();
    at::Tensor a, b, loss;
    {
      const StreamGuard guard(first);
      a = w.sin();
    }
    StreamPoint::mark(first).make_wait(second);
    {
      const StreamGuard guard(second);
      b = a * v;
    }
    StreamPoint::mark(first).make_wait(third);
    StreamPoint::mark(second).make_wait(third);
    {
      const StreamGuard guard(third);
      loss = (a.exp() + b * v + w).sum();
    }
    Context context(cluster[0]);
    autograd::backward(context, {loss});

    const at::Tensor cpu_w = one_to_four().requires_grad_(),
                     cpu_v = (one_to_four() + 1).requires_grad_();
    const at::Tensor cpu_a = cpu_w.sin();
    const auto expected = torch::autograd::grad(
        {(cpu_a.exp() + cpu_a * cpu_v * cpu_v + cpu_w).sum()}, {cpu_w, cpu_v});
    CHECK(at::allclose(context.gradient(w).cpu(), expected[0]));
    CHECK(at::allclose(context.gradient(v).cpu(), expected[1]));
  }
}

TEST_CASE("a graph may use several devices and the CPU, each with its own stream") {
  Cluster cluster(1, expose_passes);
  for (int repeat = 0; repeat < 10; ++repeat) {
    const at::Tensor on_cpu = one_to_four().requires_grad_();
    const at::Tensor w0 = leaf(one_to_four(), test_device(0)),
                     w1 = leaf(one_to_four() + 1, test_device(1));
    const c10::Stream zero = new_stream(0), one = new_stream(1);
    Context context(cluster[0]);
    at::Tensor loss;
    {
      const StreamGuard guard_zero(zero);
      const StreamGuard guard_one(one);
      const at::Tensor a = (w0 * on_cpu.to(test_device(0))).sin();
      const at::Tensor b = a.to(test_device(1)) * w1;
      loss = (b.cpu() * on_cpu).sum();
    }
    autograd::backward(context, {loss});

    const at::Tensor c = one_to_four().requires_grad_(), c0 = one_to_four().requires_grad_(),
                     c1 = (one_to_four() + 1).requires_grad_();
    const auto expected = torch::autograd::grad({((c0 * c).sin() * c1 * c).sum()}, {c, c0, c1});
    CHECK(at::allclose(context.gradient(on_cpu), expected[0]));
    CHECK(at::allclose(context.gradient(w0).cpu(), expected[1]));
    CHECK(at::allclose(context.gradient(w1).cpu(), expected[2]));
  }
}

TEST_CASE("reading a gradient waits for it, on any stream") {
  Cluster cluster(1, expose_passes);
  Square square(cluster);
  square.backward();
  const c10::Stream reading = new_stream();
  const StreamGuard guard(reading);
  SECTION("one gradient") {
    CHECK(at::equal(square.context.gradient(square.w).cpu(), square.expected));
  }
  SECTION("one gradient of a context by its ID") {
    const at::Tensor gradient = autograd::gradient(cluster[0], square.context.id(), square.w);
    CHECK(at::equal(gradient.cpu(), square.expected));
  }
  SECTION("all gradients") {
    const auto all = square.context.gradients();
    REQUIRE(all.size() == 1);
    CHECK(at::equal(all[0].second.cpu(), square.expected));
  }
  SECTION("gradients moved to another context") {
    Context other(cluster[0], Context::Scope::kExplicit);
    autograd::move_gradients(cluster[0], square.context.id(), other.id());
    CHECK(at::equal(other.gradient(square.w).cpu(), square.expected));
  }
}

TEST_CASE("the caller's stream waits for the whole pass") {
  Cluster cluster(1, expose_passes);
  Square square(cluster);
  at::Tensor kept, total = at::zeros({4}, at::TensorOptions().device(test_device()));
  StreamPoint::mark(test_device()).wait_on_host();
  square.context.on_gradient_ready(square.w, [&](const at::Tensor& gradient) { kept = gradient; });
  square.context.on_pass_end([&] { total.add_(kept); });
  square.backward();
  CHECK(at::equal(seen_from(square.calling, kept), square.expected));
  CHECK(at::equal(seen_from(square.calling, total), square.expected));
}

TEST_CASE("the stream that began a pass waits for it when its future is complete") {
  AgentOptions options;
  options.device = test_device();
  Cluster cluster(1, expose_passes, options);
  Square square(cluster);
  at::Tensor kept;
  square.context.on_gradient_ready(square.w, [&](const at::Tensor& gradient) { kept = gradient; });
  const StreamGuard guard(square.calling);
  autograd::backward_async(square.context, {square.loss}).wait();
  CHECK(at::equal(kept.cpu(), square.expected));
}

TEST_CASE("a parameter that is sent includes earlier updates") {
  Cluster cluster(2, expose_passes, {},
                  [](AgentOptions& each) { each.device = test_device(each.rank); });
  const at::NoGradGuard no_grad;
  const at::Tensor w = leaf(one_to_four());
  {
    const StreamGuard guard(new_stream());
    const autograd::ParameterUpdate updating(cluster[0]);
    w.add_(10);
  }
  const StreamGuard guard(new_stream());
  CHECK(at::equal(cluster[0].rpc_sync<&twice>(1, w).cpu(), (one_to_four() + 10) * 2));
}

TEST_CASE("a call may have tensors on several devices", "[two]") {
  Cluster cluster(2, expose_passes, {}, [](AgentOptions& each) {
    each.device = test_device(2 * each.rank);
    each.device_maps.clear();
    if (each.rank == 0)
      each.device_maps = {
          {"w1", {{test_device(0), test_device(2)}, {test_device(1), test_device(3)}}}};
  });
  for (int repeat = 0; repeat < 10; ++repeat) {
    const at::Tensor w0 = leaf(one_to_four(), test_device(0)),
                     w1 = leaf(one_to_four() + 1, test_device(1));
    const c10::Stream zero = new_stream(0), one = new_stream(1);
    Context context(cluster[0]);
    at::Tensor loss;
    {
      const StreamGuard guard_zero(zero);
      const StreamGuard guard_one(one);
      const auto [product, triple] = cluster[0].rpc_sync<&across>(1, w0.sin(), w1.sin());
      loss = (product + (triple * triple).to(test_device(0))).sum();
    }
    autograd::backward(context, {loss});
    const StreamGuard guard_zero(new_stream(0));
    const StreamGuard guard_one(new_stream(1));

    const at::Tensor c0 = one_to_four().requires_grad_(), c1 = (one_to_four() + 1).requires_grad_();
    const at::Tensor triple = c1.sin() * 3;
    const auto expected =
        torch::autograd::grad({(c0.sin() * c1.sin() + triple * triple).sum()}, {c0, c1});
    CHECK(at::allclose(context.gradient(w0).cpu(), expected[0]));
    CHECK(at::allclose(context.gradient(w1).cpu(), expected[1]));
  }
}

TEST_CASE("a node with gradients on several devices gets both when they are ready") {
  Cluster cluster(1, expose_passes);
  for (int repeat = 0; repeat < 10; ++repeat) {
    const at::Tensor w0 = leaf(one_to_four(), test_device(0)),
                     w1 = leaf(one_to_four() + 1, test_device(1));
    const c10::Stream zero = new_stream(0), one = new_stream(1);
    Context context(cluster[0]);
    at::Tensor loss;
    {
      const StreamGuard guard_zero(zero);
      const StreamGuard guard_one(one);
      const auto both = OnTwoDevices::apply(w0, w1);
      loss = (both[0] * both[0]).sum() + (both[1] * both[1]).sum().to(test_device(0));
    }
    autograd::backward(context, {loss});
    CHECK(at::equal(context.gradient(w1).cpu(), (one_to_four() + 1) * 4 * 28));
    CHECK(at::equal(context.gradient(w0).cpu(), one_to_four() * 4));
  }
}

TEST_CASE("the caller's stream waits for a pass that includes other ranks") {
  Cluster cluster(2, expose_passes);
  for (int repeat = 0; repeat < 10; ++repeat) {
    const at::Tensor w = leaf(one_to_four()), total = leaf(at::zeros({4})).detach();
    const c10::Stream computing = new_stream(), calling = new_stream();
    Context context(cluster[0]);
    at::Tensor kept, loss;
    {
      const StreamGuard guard(computing);
      loss = cluster[0].rpc_sync<&twice>(1, (w * w).cpu()).sum();
    }
    context.on_gradient_ready(w, [&](const at::Tensor& gradient) { kept = gradient; });
    context.on_pass_end([&] { total.add_(kept); });  // runs on a worker thread
    {
      const StreamGuard guard(calling);
      autograd::backward(context, {loss});
    }
    CHECK(at::equal(seen_from(calling, kept), one_to_four() * 4));
    CHECK(at::equal(seen_from(calling, total), one_to_four() * 4));
  }
}

TEST_CASE("gradients of several streams are summed") {
  Cluster cluster(1, expose_passes);
  const at::Tensor w = leaf(one_to_four());
  Context context(cluster[0]);
  for (int pass = 0; pass < 4; ++pass) {
    at::Tensor loss;
    {
      const StreamGuard guard(new_stream());
      loss = (w * w).sum();
    }
    const StreamGuard guard(new_stream());
    autograd::backward(context, {loss});
  }
  CHECK(at::equal(context.gradient(w).cpu(), one_to_four() * 8));
}

TEST_CASE("a gradient that another stream still reads is not added to in place") {
  Cluster cluster(1, expose_passes);
  Square square(cluster);
  square.backward();
  const c10::Stream reading = new_stream();
  at::Tensor read;
  {
    const StreamGuard guard(reading);
    read = square.context.gradient(square.w) * 1;
  }
  square.backward();
  CHECK(
      at::equal(seen_from(square.calling, square.context.gradient(square.w)), square.expected * 2));
  StreamPoint::mark(square.computing).wait_on_host();
  CHECK(at::equal(seen_from(reading, read), square.expected));
}

TEST_CASE("the memory of a gradient is kept for the stream that reads it") {
  Cluster cluster(1, expose_passes);
  const c10::Stream reading = new_stream();
  std::optional<Square> square(std::in_place, cluster);
  square->backward();
  const c10::Stream computing = square->computing;
  const at::Tensor w = square->w, expected = square->expected;
  at::Tensor read;
  {
    const StreamGuard guard(reading);
    read = square->context.gradient(square->w) * 1;
  }
  square.reset();
  StreamPoint::mark(computing).wait_on_host();
  CHECK(at::equal(seen_from(reading, read), expected));
}

TEST_CASE("reading a gradient that was set waits for it") {
  Cluster cluster(1, expose_passes);
  const at::Tensor w = leaf(one_to_four());
  Context context(cluster[0]);
  {
    const StreamGuard guard(new_stream());
    context.set_gradient(w, w.detach() * 3);
  }
  const StreamGuard guard(new_stream());
  CHECK(at::equal(context.gradient(w).cpu(), one_to_four() * 3));
}

TEST_CASE("reads and updates of parameters wait for each other's streams") {
  const bool at_home = GENERATE(true, false);
  AgentOptions options;
  if (at_home) options.device = test_device();
  Cluster cluster(1, expose_passes, options);
  const at::NoGradGuard no_grad;
  const at::Tensor w = leaf(one_to_four());
  const auto read = [&] {
    const autograd::ParameterRead reading(cluster[0]);
    // A rank whose device is that of the parameter may read the parameter directly.
    return (at_home ? w : reading.version(w)) * 1;
  };
  const auto update = [&](auto change) {
    const autograd::ParameterUpdate updating(cluster[0]);
    if (!at_home) updating.unshare(w);
    change();
  };
  const c10::Stream first = new_stream(), second = new_stream(), third = new_stream(),
                    fourth = new_stream();
  at::Tensor before, after;
  {
    const StreamGuard guard(first);
    before = read();
  }
  {
    const StreamGuard guard(second);
    update([&] { w.add_(10); });
  }
  {
    const StreamGuard guard(third);
    update([&] { w.mul_(2); });
  }
  {
    const StreamGuard guard(fourth);
    after = read();
  }
  CHECK(at::equal(seen_from(third, w), (one_to_four() + 10) * 2));
  CHECK(at::equal(seen_from(fourth, after), (one_to_four() + 10) * 2));
  CHECK(at::equal(seen_from(first, before), one_to_four()));
}

TEST_CASE("the old memory of a parameter that is moved is kept for the streams that read it") {
  Cluster cluster(1, expose_passes);
  const at::NoGradGuard no_grad;
  const at::Tensor w = leaf(one_to_four());
  const c10::Stream reading = new_stream(), updating = new_stream();
  at::Tensor read;
  {
    const StreamGuard reading_guard(reading);
    const at::Tensor version = autograd::current_versions(cluster[0], {w})[0];
    {
      const StreamGuard updating_guard(updating);
      const autograd::ParameterUpdate update(cluster[0]);
      REQUIRE(update.unshare(w));
      w.add_(10);
    }
    read = version * 1;
  }
  // Runs all work of the reading stream (`reader_first`) or of the updating stream first.
  const bool reader_first = GENERATE(true, false);
  StreamPoint::mark(reader_first ? reading : updating).wait_on_host();
  const at::Tensor other = at::zeros({4}, w.options());
  StreamPoint::mark(test_device()).wait_on_host();
  CHECK(at::equal(seen_from(updating, w), one_to_four() + 10));
  CHECK(at::equal(seen_from(reading, read), one_to_four()));
}

TEST_CASE("sparse gradients are summed on several streams") {
  Cluster cluster(1, expose_passes);
  const at::Tensor table = leaf(at::arange(30, at::kFloat).view({10, 3}));
  const at::Tensor cpu_table = table.detach().cpu().requires_grad_();
  const at::Tensor cpu_indices = at::tensor({1, 3, 3, 0, 9, 2}, at::kLong);
  const at::Tensor cpu_offsets = at::tensor({0, 4}, at::kLong);
  const at::Tensor indices = cpu_indices.to(test_device()), offsets = cpu_offsets.to(test_device());
  StreamPoint::mark(test_device()).wait_on_host();
  const auto bags = [](const at::Tensor& weight, const at::Tensor& i, const at::Tensor& o,
                       bool sparse) {
    const auto sums = std::get<0>(at::embedding_bag(weight, i, o, false, 0, sparse));
    return (sums * sums).sum();
  };
  // `kinds` has an element for each pass in a context: true if the pass gives a sparse gradient.
  for (const auto& kinds : {std::vector{true, true}, {true, false}, {false, true}, {true}}) {
    Context context(cluster[0]);
    for (const bool sparse : kinds) {
      at::Tensor loss;
      {
        const StreamGuard guard(new_stream());
        loss = bags(table, indices, offsets, sparse);
      }
      const StreamGuard guard(new_stream());
      autograd::backward(context, {loss});
    }
    const StreamGuard guard(new_stream());
    const at::Tensor once =
        torch::autograd::grad({bags(cpu_table, cpu_indices, cpu_offsets, false)}, {cpu_table})[0];
    const at::Tensor all = context.gradient(table);
    const at::Tensor there =
        all.is_sparse()
            ? at::sparse_coo_tensor(all._indices().cpu(), all._values().cpu(), {10, 3}).to_dense()
            : all.cpu();
    CHECK(at::allclose(there, once * static_cast<double>(kinds.size())));
  }
}

}  // namespace distrain::testing
