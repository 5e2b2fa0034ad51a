#include <ATen/ATen.h>

#include "distrain/collective/staged_reduce_group.h"
#include "distrain/ddp/distributed_data_parallel.h"
#include "support/catch.h"
#include "unit/collective/test_group.h"

using namespace distrain;
using namespace distrain::testing;
using base::ErrorKind;

namespace {

/// Returns the error of rank 0 when rank 1 claims a model description of `bytes` and sends `text`.
base::Error check_against(int64_t bytes, const std::string& text) {
  TestGroup group(2);
  base::Error error;
  run_ranks(2, [&](int rank) {
    collective::StagedReduceGroup reduce(group.backends[size_t(rank)]);
    if (rank == 0) {
      error = thrown_by([&] { ddp::check_same_everywhere({{"a", at::zeros({2})}}, reduce); });
      group[0].shutdown();
      group.network.kill(0);
      return;
    }
    try {
      const at::Tensor theirs = at::zeros({2}, at::kLong);
      reduce.broadcast(theirs, 0)->wait();
      reduce.average_async(at::tensor({0.0, 1.0}, at::kDouble))->wait();  // rank 1 differs
      reduce.broadcast(theirs[1], 0)->wait();
      reduce.broadcast(at::empty({theirs[1].item<int64_t>()}, at::kByte), 0)->wait();
      reduce.broadcast(at::scalar_tensor(bytes, at::kLong), 1)->wait();
      const at::Tensor mine = at::empty({std::ssize(text)}, at::kByte);
      std::copy(text.begin(), text.end(), mine.data_ptr<uint8_t>());
      reduce.broadcast(mine, 1)->wait();
    } catch (const std::exception&) {  // rank 0 has failed
    }
  });
  return error;
}

const std::string kText = "a: Float [2], without gradient\n";  // rank 0's model

}  // namespace

TEST_CASE("a false description of a peer's model is refused") {
  const auto size = static_cast<int64_t>(kText.size());
  for (const int64_t bytes : {int64_t{-1}, int64_t{1} << 40}) {
    const base::Error error = check_against(bytes, "");
    CHECK(error.kind == ErrorKind::kProtocol);
    CHECK(error.rank == 1);
  }
  CHECK(check_against(size, kText).kind == ErrorKind::kProtocol);  // the checksum is wrong
  CHECK(check_against(size - 1, kText.substr(0, kText.size() - 1)).kind == ErrorKind::kProtocol);
  const base::Error other = check_against(13, "a: Float [3]\n");
  CHECK(other.kind == ErrorKind::kInvalid);
  CHECK(contains(other.message, "'a: Float [3]' where rank 0 has 'a: Float [2]"));
}
