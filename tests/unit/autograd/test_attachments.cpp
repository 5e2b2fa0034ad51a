// Tests objects that are attached to a context.
#include <memory>

#include "distrain/autograd/context.h"
#include "support/catch.h"
#include "support/cluster.h"

using namespace distrain;
using autograd::Context;
using testing::Cluster;

TEST_CASE("a context keeps attachments until it ends, and move_gradients() moves them") {
  Cluster cluster(2, [](rpc::Agent& agent) { autograd::install(agent); });
  rpc::Agent& agent = cluster[0];
  const int owner = 0, other = 0;
  const auto object = std::make_shared<int>(5);
  auto from = std::make_unique<Context>(agent, Context::Scope::kExplicit);
  auto to = std::make_unique<Context>(agent, Context::Scope::kExplicit);
  autograd::attach(agent, from->id(), &owner, std::make_shared<int>(1));
  autograd::attach(agent, from->id(), &owner, object);
  CHECK(autograd::attachments(agent, from->id(), &owner).size() == 2);
  CHECK(autograd::attachments(agent, from->id(), &owner)[1] == object);
  CHECK(autograd::attachments(agent, from->id(), &other).empty());
  CHECK(autograd::attachments(cluster[1], from->id(), &owner).empty());
  autograd::move_gradients(agent, from->id(), to->id());
  CHECK(autograd::attachments(agent, from->id(), &owner).empty());
  CHECK(autograd::attachments(agent, to->id(), &owner).size() == 2);
  from.reset();
  CHECK(object.use_count() == 2);
  const uint64_t ended = to->id();
  to.reset();
  CHECK(object.use_count() == 1);
  CHECK(testing::error_of([&] { autograd::attach(agent, ended, &owner, object); }).kind ==
        base::ErrorKind::kInvalid);
}

TEST_CASE("the attachments of a lost creator's context are freed") {
  Cluster cluster(2, [](rpc::Agent& agent) { autograd::install(agent); });
  const int owner = 0;
  auto object = std::make_shared<int>(5);
  const std::weak_ptr<int> weak = object;
  const auto context = std::make_unique<Context>(cluster[0], Context::Scope::kExplicit);
  autograd::attach(cluster[1], context->id(), &owner, std::move(object));
  cluster.kill(0);
  while (!weak.expired()) std::this_thread::yield();
}
