#include "unit/ddp/manual_pass.h"
#include "unit/ddp/trainer.h"

using namespace distrain;
using namespace distrain::testing;
using ddp::CommHook;
using ddp::GradientBucket;
using ddp::Reducer;

namespace {

using BucketPtr = std::shared_ptr<GradientBucket>;
using Net = ddp::DistributedDataParallel<torch::nn::Sequential>;

// Records the dtype and size of each tensor that is averaged.
class RecordingGroup final : public ReduceGroup {
 public:
  using Averages = std::vector<std::pair<at::ScalarType, size_t>>;
  explicit RecordingGroup(BackendPtr backend)
      : RecordingGroup(std::make_shared<collective::StagedReduceGroup>(std::move(backend)),
                       std::make_shared<Averages>()) {}
  RecordingGroup(std::shared_ptr<ReduceGroup> group, std::shared_ptr<Averages> made)
      : averages(std::move(made)), group_(std::move(group)) {}

  std::shared_ptr<ReduceGroup> duplicate() override {
    return std::make_shared<RecordingGroup>(group_->duplicate(), averages);
  }
  int rank() const override { return group_->rank(); }
  int size() const override { return group_->size(); }
  int world_rank(int rank) const override { return group_->world_rank(rank); }
  std::optional<base::Error> failure() const override { return group_->failure(); }
  WorkPtr average_async(const at::Tensor& bucket, const collective::PassNumber& pass) override {
    averages->emplace_back(bucket.scalar_type(), bucket.nbytes());
    return group_->average_async(bucket, pass);
  }
  WorkPtr broadcast(const at::Tensor& tensor, int root) override {
    return group_->broadcast(tensor, root);
  }
  void refuse(int count, const base::Error& error) override { group_->refuse(count, error); }

  size_t bytes_of(at::ScalarType dtype) const {
    size_t bytes = 0;
    for (const auto& [type, size] : *averages) bytes += type == dtype ? size : 0;
    return bytes;
  }

  const std::shared_ptr<Averages> averages;

 private:
  const std::shared_ptr<ReduceGroup> group_;
};

Reducer::Options with_hook(CommHook hook) {
  Reducer::Options options = kSmallBuckets;
  options.hook = std::move(hook);
  return options;
}

std::vector<at::Tensor> copies_of_grads(Net& net) {
  std::vector<at::Tensor> all;
  for (const at::Tensor& p : net.parameters()) all.push_back(p.grad().clone());
  return all;
}

void hooked_pass(Net& net, int step) {
  net.module()->zero_grad();
  net.forward(batch(net.reducer().group().rank(), step)).pow(2).mean().backward();
}

// Checks, with two ranks, that nets with and without the hook have equal gradients in three steps.
void check_equal(const std::function<CommHook(int rank)>& hook_of,
                 const std::function<bool(const at::Tensor&, const at::Tensor&)>& equal) {
  TestGroup group(2, {.timeout = std::chrono::seconds(60)});
  run_ranks(2, [&](int rank) {
    Net plain(make_net(), group.backends[size_t(rank)], kSmallBuckets);
    Net hooked(make_net(), group.backends[size_t(rank)], with_hook(hook_of(rank)));
    for (int step = 0; step < 3; ++step) {
      hooked_pass(plain, step);
      hooked_pass(hooked, step);
      const auto wanted = copies_of_grads(plain), got = copies_of_grads(hooked);
      for (size_t i = 0; i < wanted.size(); ++i) RANK_CHECK(equal(got[i], wanted[i]));
    }
  });
}

// Checks that a pass with the hook of rank 1 fails on both ranks with this kind and text, and that
// the group stays usable.
void check_fails(const CommHook& of_0, const CommHook& of_1, base::ErrorKind kind,
                 const std::string& text) {
  TestGroup group(2, {.timeout = std::chrono::seconds(60)});
  run_ranks(2, [&](int rank) {
    Net net(make_net(), group.backends[size_t(rank)], with_hook(rank == 0 ? of_0 : of_1));
    Net other(make_net(), group.backends[size_t(rank)], kSmallBuckets);
    for (int step = 0; step < 2; ++step) {
      const base::Error error = thrown_by([&] { hooked_pass(net, step); });
      RANK_CHECK(error.kind == kind);
      RANK_CHECK(error.rank == 1);
      RANK_CHECK(contains(error.message, text));
      hooked_pass(other, step);
    }
  });
}

CommHook averaging() {
  return {"averaging", [](const BucketPtr& bucket) { return bucket->average(bucket->tensor); }};
}

}  // namespace

TEST_CASE("a hook that averages, in one step or in two, gives the bits of no hook") {
  check_equal([](int) { return averaging(); }, same_bits);
  // Averages the halves one after the other, as PowerSGD averages its two factors.
  check_equal(
      [](int) {
        CommHook hook{"halves", {}, 2};
        hook.run = [](const BucketPtr& bucket) {
          const int64_t half = bucket->tensor.numel() / 2, rest = bucket->tensor.numel() - half;
          auto first = std::make_shared<std::future<at::Tensor>>(
              bucket->average(bucket->tensor.narrow(0, 0, half)));
          return std::async(std::launch::deferred, [bucket, first, half, rest] {
            first->get();
            bucket->average(bucket->tensor.narrow(0, half, rest)).get();
            return bucket->tensor;
          });
        };
        return hook;
      },
      same_bits);
}

TEST_CASE("a hook may use a group of its own, and may replace the gradients") {
  TestGroup group(2, {.timeout = std::chrono::seconds(60)}), own(2);
  run_ranks(2, [&](int rank) {
    CommHook hook{"own group", {}, 0};
    hook.run = [&](const BucketPtr& bucket) {
      const at::Tensor sum = bucket->tensor.clone();
      const auto pending = own[rank].allreduce(sum);
      return std::async(std::launch::deferred, [pending, sum] {
        pending.wait();
        return sum;
      });
    };
    Net plain(make_net(), group.backends[size_t(rank)], kSmallBuckets);
    Net hooked(make_net(), group.backends[size_t(rank)], with_hook(hook));
    hooked_pass(plain, 1);
    hooked_pass(hooked, 1);
    const auto means = copies_of_grads(plain), sums = copies_of_grads(hooked);
    for (size_t i = 0; i < means.size(); ++i) RANK_CHECK(at::allclose(sums[i], means[i] * 2));
  });
}

TEST_CASE("a hook sees each bucket once, in order, with its parameters and their gradients") {
  TestGroup group(2, {.timeout = std::chrono::seconds(60)});
  run_ranks(2, [&](int rank) {
    std::vector<GradientBucket> seen;
    CommHook hook = averaging();
    hook.run = [&, average = hook.run](const BucketPtr& bucket) {
      seen.push_back(*bucket);
      seen.back().gradients[0] = bucket->gradients[0].clone();
      return average(bucket);
    };
    Net net(make_net(), group.backends[size_t(rank)], with_hook(hook));
    auto alone = make_net();
    alone->forward(batch(rank, 0)).pow(2).mean().backward();
    hooked_pass(net, 0);
    const auto names = net.reducer().buckets();
    RANK_CHECK(seen.size() == names.size() && seen.size() > 1);
    size_t parameters = 0;
    for (size_t i = 0; i < seen.size(); ++i) {
      RANK_CHECK(seen[i].index == i && seen[i].is_last == (i + 1 == seen.size()));
      parameters += seen[i].parameters.size();
      int64_t numel = 0;
      for (size_t k = 0; k < seen[i].parameters.size(); ++k) {
        RANK_CHECK(seen[i].gradients[k].sizes() == seen[i].parameters[k].sizes());
        numel += seen[i].parameters[k].numel();
      }
      RANK_CHECK(seen[i].tensor.dim() == 1 && seen[i].tensor.numel() == numel);
    }
    RANK_CHECK(parameters == net.parameters().size());
    // Before the averaging, the gradients are those of this rank.
    const at::Tensor last = alone->parameters().back();
    RANK_CHECK(seen[0].parameters[0].is_same(net.parameters().back()));
    RANK_CHECK(at::allclose(seen[0].gradients[0], last.grad()));
  });
}

TEST_CASE("the compress hooks send half of the bytes, and round to their dtype") {
  const auto dtype = GENERATE(at::kHalf, at::kBFloat16);
  // The hook rounds twice, before the mean (computed in float32) and after it, each time by at most
  // half a unit in the last place of 11 or 8 bits.
  const double unit = dtype == at::kHalf ? std::pow(2, -11) : std::pow(2, -8);
  check_equal([&](int) { return ddp::compress_hook(dtype); },
              [&](const at::Tensor& got, const at::Tensor& wanted) {
                const double scale = wanted.abs().max().item<double>();
                // Rounding of the ranks' values is relative to these, which may cancel in the mean.
                return !at::equal(got, wanted) && got.scalar_type() == at::kFloat &&
                       (got - wanted).abs().max().item<double>() <= 8 * unit * scale;
              });
  TestGroup group(2, {.timeout = std::chrono::seconds(60)});
  run_ranks(2, [&](int rank) {
    const auto plain = std::make_shared<RecordingGroup>(group.backends[size_t(rank)]);
    const auto halved = std::make_shared<RecordingGroup>(group.backends[size_t(rank)]);
    Net net(make_net(), plain, kSmallBuckets);
    Net hooked(make_net(), halved, with_hook(ddp::compress_hook(dtype)));
    hooked_pass(net, 0);
    hooked_pass(hooked, 0);
    RANK_CHECK(plain->bytes_of(at::kFloat) > 0 && halved->bytes_of(at::kFloat) == 0);
    RANK_CHECK(2 * halved->bytes_of(dtype) == plain->bytes_of(at::kFloat));
    RANK_CHECK(halved->averages->size() == plain->averages->size());  // no further collective
    // Integers, and values that are small already, are sent as they are.
    const at::Tensor w = at::ones({3}, dtype).set_requires_grad(true);
    Reducer small({{"w", w}}, halved, with_hook(ddp::compress_hook(at::kHalf)));
    (w * 3).sum().backward();
    RANK_CHECK(halved->averages->back() == std::pair(dtype, size_t(6)));
  });
}

TEST_CASE("a hook works in a context's pass, with no_sync() and with unused parameters") {
  TestGroup group(2, {.timeout = std::chrono::seconds(60)});
  run_ranks(2, [&](int rank) {
    Reducer::Options options = with_hook(averaging());
    options.find_unused_parameters = true;
    Net net(make_net(), group.backends[size_t(rank)], options);
    const auto loss = [&] { return net.forward(batch(rank, 1)).pow(2).mean(); };
    {
      const auto guard = net.no_sync();
      loss().backward();
    }
    loss().backward();
    const auto twice = copies_of_grads(net);
    const at::Tensor own = net.module()->forward(batch(rank, 1)).pow(2).mean();
    ManualPass manual(net.reducer());
    manual.backward(own, net.parameters());
    for (size_t i = 0; i < twice.size(); ++i) {
      RANK_CHECK(at::allclose(manual.gradient(net.parameters()[i]) * 2, twice[i], 1e-5, 1e-7));
    }
  });
}

TEST_CASE("a hook that fails ends the pass on all ranks, with its name") {
  const CommHook good = averaging();
  CommHook bad = good;
  SECTION("in run()") {
    bad.run = [](const BucketPtr&) -> std::future<at::Tensor> { throw std::runtime_error("mine"); };
    check_fails(good, bad, ErrorKind::kRemoteFailed,
                "the communication hook 'averaging' of rank 1 failed for bucket 0: mine");
  }
  SECTION("in a later bucket, after its average()") {
    bad.run = [good](const BucketPtr& bucket) {
      auto mean = good.run(bucket);
      if (bucket->index == 1) throw std::runtime_error("mine");
      return mean;
    };
    check_fails(good, bad, ErrorKind::kRemoteFailed, "bucket 1: mine");
  }
  SECTION("in its future") {
    bad.run = [](const BucketPtr& bucket) {
      auto mean = std::make_shared<std::future<at::Tensor>>(bucket->average(bucket->tensor));
      return std::async(std::launch::deferred, [mean]() -> at::Tensor {
        mean->get();
        throw std::runtime_error("late");
      });
    };
    check_fails(good, bad, ErrorKind::kRemoteFailed, "bucket 0: late");
  }
  SECTION("with no future") {
    bad.run = [good](const BucketPtr& bucket) {
      good.run(bucket).get();
      return std::future<at::Tensor>();
    };
    check_fails(good, bad, ErrorKind::kRemoteFailed, "bucket 0");
  }
  SECTION("with a tensor of another size or dtype") {
    const bool is_dtype = GENERATE(false, true);
    bad.run = [good, is_dtype](const BucketPtr& bucket) {
      auto mean = std::make_shared<std::future<at::Tensor>>(good.run(bucket));
      return std::async(std::launch::deferred, [mean, is_dtype] {
        const at::Tensor tensor = mean->get();
        return is_dtype ? tensor.to(at::kDouble) : tensor.narrow(0, 0, 1);
      });
    };
    check_fails(good, bad, ErrorKind::kInvalid, "bucket 0: returned");
  }
  SECTION("with too many calls of average()") {
    bad.run = [good](const BucketPtr& bucket) {
      auto mean = good.run(bucket);
      bucket->average(bucket->tensor);
      return mean;
    };
    check_fails(good, bad, ErrorKind::kInvalid, "more often than CommHook::averages says");
  }
  SECTION("with too few of them") {
    bad.run = [](const BucketPtr& bucket) {
      return std::async(std::launch::deferred, [bucket] { return bucket->tensor; });
    };
    check_fails(good, bad, ErrorKind::kInvalid, "called average() less often than it should");
  }
}

TEST_CASE("ranks with different options are refused on all ranks") {
  const auto [of_1, text] = GENERATE(
      std::pair(Reducer::Options{.static_graph = true}, "static_graph true"),
      std::pair(Reducer::Options{.find_unused_parameters = true}, "find_unused_parameters true"),
      std::pair(Reducer::Options{.bucket_cap_bytes = 7}, "and 7 bytes"),
      std::pair(Reducer::Options{.broadcast_buffers = false}, "broadcast_buffers false"),
      std::pair(Reducer::Options{.hook = ddp::compress_hook(at::kHalf)}, "'compress to Half'"));
  TestGroup group(2, {.timeout = std::chrono::seconds(60)});
  run_ranks(2, [&, of_1 = of_1, text = text](int rank) {
    const base::Error error = thrown_by([&] {
      Net net(make_net(), group.backends[size_t(rank)], rank == 0 ? Reducer::Options{} : of_1);
    });
    RANK_CHECK(error.kind == ErrorKind::kInvalid && error.rank == 1);
    RANK_CHECK(contains(error.message, text));
  });
}

namespace {

// y = x a + x b, or without b.
struct Branches {
  at::Tensor loss(double x, bool uses_b) const {
    return uses_b ? (a.sum() + b.sum()) * x : a.sum() * x;
  }
  const at::Tensor a = at::zeros({3}).set_requires_grad(true);
  const at::Tensor b = at::zeros({2}).set_requires_grad(true);
};

}  // namespace

TEST_CASE("unused parameters are known from the graph, so their buckets do not wait for its end") {
  const bool is_static = GENERATE(false, true);
  TestGroup group(2, {.timeout = std::chrono::seconds(60)});
  run_ranks(2, [&](int rank) {
    const auto recording = std::make_shared<RecordingGroup>(group.backends[size_t(rank)]);
    const at::Tensor first = at::ones({2}).set_requires_grad(true);
    const at::Tensor unused = at::ones({2}).set_requires_grad(true);
    const at::Tensor last = at::ones({2}).set_requires_grad(true);
    Reducer reducer({{"first", first}, {"last", last}, {"unused", unused}}, recording,
                    {.bucket_cap_bytes = 1,
                     .first_bucket_bytes = 1,
                     .find_unused_parameters = true,
                     .static_graph = is_static});
    for (int step = 0; step < 3; ++step) {
      recording->averages->clear();
      size_t before_first = 0;
      // A tensor hook of the parameter whose gradient comes last.
      const auto hook = first.register_hook(
          [&](const at::Tensor&) { before_first = recording->averages->size(); });
      at::tanh(at::tanh(first) * last).sum().backward();
      first.remove_hook(hook);
      RANK_CHECK(before_first == 2);  // `unused` and `last`
      RANK_CHECK(!unused.grad().defined() && first.grad().defined());
    }
  });
}

TEST_CASE("a static graph learns the unused parameters of each rank from its first pass") {
  const bool distributed = GENERATE(false, true);
  TestGroup group(2, {.timeout = std::chrono::seconds(60)});
  run_ranks(2, [&](int rank) {
    const auto recording = std::make_shared<RecordingGroup>(group.backends[size_t(rank)]);
    const Branches net;
    Reducer reducer({{"a", net.a}, {"b", net.b}}, recording, {.static_graph = true});
    std::vector<size_t> collectives;
    const auto backward = [&](bool uses_b) {
      const size_t before = recording->averages->size();
      if (distributed) {
        ManualPass manual(reducer);
        manual.backward(net.loss(rank + 1, uses_b), {net.a, net.b});
        RANK_CHECK(at::allclose(manual.gradient(net.b), at::full({2}, 0.5)));
      } else {
        net.a.mutable_grad() = net.b.mutable_grad() = at::Tensor();
        net.loss(rank + 1, uses_b).backward();
        RANK_CHECK(at::equal(net.a.grad(), at::full({3}, 1.5)));
        RANK_CHECK(at::equal(net.b.grad(), at::full({2}, 0.5)));
      }
      collectives.push_back(recording->averages->size() - before);
    };
    // Only rank 0 uses `b`.
    for (int step = 0; step < 3; ++step) backward(rank == 0);
    RANK_CHECK(collectives == std::vector<size_t>{2, 1, 1});
    RANK_CHECK(at::equal(reducer.used(), at::tensor({2, 1}, at::kInt)));
    const base::Error more = thrown_by([&] { backward(true); });
    RANK_CHECK(more.kind == ErrorKind::kInvalid && more.rank == 1);
    RANK_CHECK(
        contains(more.message, "'b' got a gradient, but none in its static graph's first pass"));
    const base::Error less = thrown_by([&] { backward(false); });
    RANK_CHECK(less.kind == ErrorKind::kInvalid && less.rank == 0);
    RANK_CHECK(contains(less.message, "no gradient came for 'b'"));
    backward(rank == 0);
  });
}
