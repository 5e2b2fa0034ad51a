// Tensors in messages that no peer of ours would make.
#include <limits>

#include <ATen/ATen.h>

#include "distrain/rpc/serialize.h"
#include "support/catch.h"
#include "support/cluster.h"

using namespace distrain;
using namespace distrain::testing;
using base::ErrorKind;

namespace {

// A sparse tensor as it stands in a message, whatever its parts are.
struct SparseParts {
  at::Tensor indices;
  at::Tensor values;
  std::vector<int64_t> sizes;
  bool coalesced = false;

  at::Tensor decode() const {
    wire::Bytes body;
    wire::Writer out(body);
    out.put(uint8_t{2});  // sparse
    out.put(coalesced);
    out.put(static_cast<uint8_t>(sizes.size()));
    for (const int64_t size : sizes) out.put(size);
    rpc::InMessage message;
    message.body = body;
    message.tensors = {indices, values};
    return rpc::Decoder(message).get_tensor();
  }
};

at::Tensor row(std::vector<int64_t> indices) { return at::tensor(indices, at::kLong).unsqueeze(0); }

}  // namespace

TEST_CASE("an index of a sparse tensor is one of its rows") {
  const bool coalesced = GENERATE(false, true);
  const at::Tensor values = at::ones({2, 4});
  CHECK(at::equal((SparseParts{row({0, 2}), values, {3, 4}, coalesced}).decode().to_dense(),
                  at::tensor({1.F, 0.F, 1.F}).unsqueeze(1).expand({3, 4})));
  const auto refused = [&](const at::Tensor& indices, std::vector<int64_t> sizes) {
    const base::Error error = error_of([&] {
      (SparseParts{indices, values, std::move(sizes), coalesced}).decode();
    });
    return error.kind == ErrorKind::kProtocol;
  };
  for (const int64_t bad :
       {int64_t{3}, int64_t{-1}, int64_t{1} << 40, std::numeric_limits<int64_t>::min(),
        std::numeric_limits<int64_t>::max()}) {
    CAPTURE(bad);
    CHECK(refused(row({0, bad}), {3, 4}));
    CHECK(refused(row({bad, 0}), {3, 4}));
    // In the second of two sparse dimensions.
    CHECK(refused(at::cat({row({4, 0}), row({0, bad})}), {5, 3, 4}));
    // With strides of its own.
    CHECK(refused(at::cat({row({4, 0}), row({0, bad})}).t().contiguous().t(), {5, 3, 4}));
  }
  CHECK(refused(row({0, 0}), {0, 4}));  // no row at all
  CHECK_FALSE(refused(at::cat({row({4, 0}), row({0, 2})}), {5, 3, 4}));
}

TEST_CASE("that a sparse tensor is coalesced is seen, not believed") {
  const at::Tensor values = at::ones({3, 2});
  const auto is_coalesced = [&](const at::Tensor& indices, std::vector<int64_t> sizes, bool said) {
    return SparseParts{indices, values, std::move(sizes), said}.decode().is_coalesced();
  };
  CHECK(is_coalesced(row({0, 2, 4}), {5, 2}, true));
  CHECK_FALSE(is_coalesced(row({0, 2, 4}), {5, 2}, false));
  CHECK_FALSE(is_coalesced(row({0, 2, 2}), {5, 2}, true));
  CHECK_FALSE(is_coalesced(row({2, 0, 4}), {5, 2}, true));
  CHECK(is_coalesced(at::cat({row({0, 1, 1}), row({3, 0, 2})}), {2, 4, 2}, true));
  CHECK_FALSE(is_coalesced(at::cat({row({0, 1, 1}), row({3, 2, 2})}), {2, 4, 2}, true));
  CHECK_FALSE(is_coalesced(at::cat({row({0, 1, 0}), row({3, 2, 2})}), {2, 4, 2}, true));
  // What comes twice counts twice.
  const SparseParts twice{row({1, 1, 0}), values, {2, 2}, true};
  CHECK(at::equal(at::zeros({2, 2}).add(twice.decode()),
                  at::tensor({1.F, 1.F, 2.F, 2.F}).view({2, 2})));
}

TEST_CASE("the parts of a sparse tensor are on one device") {
  const SparseParts apart{row({0, 1}), at::ones({2, 4}, at::kMeta), {3, 4}, false};
  CHECK(error_of([&] { apart.decode(); }).kind == ErrorKind::kProtocol);
}
