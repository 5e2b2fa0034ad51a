// Tests the oracle itself: on every graph, torch's distributed gradients equal those of plain
// autograd. The tests of our engine use the same graphs.
#include "oracle/compare.h"
#include "oracle/graphs.h"
#include "oracle/official_runtime.h"
#include "support/catch.h"

namespace distrain::oracle {

TEST_CASE("Torch's distributed gradients equal the local ones") {
  OfficialRuntime runtime;
  for (const Graph& graph : graphs()) {
    DYNAMIC_SECTION(graph.name) {
      const std::vector<at::Tensor> expected = local_gradients(graph);
      check_same_gradients(runtime.gradients(graph), expected);
      // The next pass has a new context, so it does not add to the gradients of this pass.
      check_same_gradients(runtime.gradients(graph), expected);
      for (const at::Tensor& leaf : graph.leaves) CHECK_FALSE(leaf.grad().defined());
    }
  }
}

TEST_CASE("One runtime may follow another") {
  const Graph graph = graphs().front();
  for (int run = 0; run < 2; ++run) {
    OfficialRuntime runtime;
    check_same_gradients(runtime.gradients(graph), local_gradients(graph));
  }
}

}  // namespace distrain::oracle
