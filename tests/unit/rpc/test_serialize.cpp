// Tests that malformed tensors in messages are refused.
#include <cstring>
#include <limits>

#include <ATen/ATen.h>

#include "device/device_transfer.h"
#include "distrain/rpc/serialize.h"
#include "support/catch.h"
#include "support/cluster.h"
#include "support/payload.h"

using namespace distrain;
using namespace distrain::testing;
using base::ErrorKind;

namespace {

// The parts of a sparse tensor in a message; they may be invalid.
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

// Returns a message of the tensors `descs` with `payload_bytes` of payload. If `bits` is not empty,
// the message has an autograd context, and `bits` says which tensors require a gradient. The header
// claims `more_tensors` more tensors than there are.
rpc::InMessage message_of(const std::vector<wire::TensorDesc>& descs, uint64_t payload_bytes,
                          const wire::Bytes& bits = {}, uint32_t more_tensors = 0) {
  wire::Bytes meta;
  wire::Writer out(meta);
  for (const wire::TensorDesc& desc : descs) encode(desc, out);
  meta.insert(meta.end(), bits.begin(), bits.end());
  out.put(uint32_t{0});  // number of RRefs
  base::BufferPool pool(0);
  net::InFrame frame;
  frame.header.meta_bytes = static_cast<uint32_t>(meta.size());
  frame.header.tensor_count = static_cast<uint32_t>(descs.size()) + more_tensors;
  frame.header.payload_bytes = payload_bytes;
  frame.header.autograd_id = bits.empty() ? 0 : 1;
  frame.body = pool.allocate(frame.header.body_bytes());
  std::memset(frame.body->data, 0, frame.body->size);
  std::copy(meta.begin(), meta.end(), frame.body->data);
  frame.meta = {frame.body->data, meta.size()};
  frame.payload = {frame.body->data + frame.header.payload_offset(), payload_bytes};
  rpc::DeviceStager stager;
  return rpc::from_frame(std::move(frame), 1, stager, nullptr);
}

// Returns true if `read` throws a protocol error; false if it returns or throws anything else.
template <class F>
bool is_protocol_error(F read) {
  try {
    read();
    return false;
  } catch (const base::Exception& e) {
    return e.kind() == ErrorKind::kProtocol;
  } catch (const std::exception& e) {
    UNSCOPED_INFO(e.what());
    return false;
  }
}

at::Tensor row(std::vector<int64_t> indices) { return at::tensor(indices, at::kLong).unsqueeze(0); }

}  // namespace

TEST_CASE("an index of a sparse tensor must be one of its rows") {
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
    // The bad index is in the second of two sparse dimensions.
    CHECK(refused(at::cat({row({4, 0}), row({0, bad})}), {5, 3, 4}));
    // The tensor of indices is not contiguous.
    CHECK(refused(at::cat({row({4, 0}), row({0, bad})}).t().contiguous().t(), {5, 3, 4}));
  }
  CHECK(refused(row({0, 0}), {0, 4}));  // the tensor has no rows
  CHECK_FALSE(refused(at::cat({row({4, 0}), row({0, 2})}), {5, 3, 4}));
}

TEST_CASE("the coalesced flag of a sparse tensor is checked, not trusted") {
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
  // Values with the same index are summed, although the message claims to be coalesced.
  const SparseParts twice{row({1, 1, 0}), values, {2, 2}, true};
  CHECK(at::equal(at::zeros({2, 2}).add(twice.decode()),
                  at::tensor({1.F, 1.F, 2.F, 2.F}).view({2, 2})));
}

TEST_CASE("the parts of a sparse tensor must be on one device") {
  const SparseParts apart{row({0, 1}), at::ones({2, 4}, at::kMeta), {3, 4}, false};
  CHECK(error_of([&] { apart.decode(); }).kind == ErrorKind::kProtocol);
}

TEST_CASE("dense tensors of a message match their descriptors or are refused") {
  using wire::DType;
  using wire::Layout;
  const auto refused = [](const std::vector<wire::TensorDesc>& descs, uint64_t payload_bytes = 64) {
    return is_protocol_error([&] { message_of(descs, payload_bytes); });
  };
  const auto one = [](DType dtype, std::vector<int64_t> sizes, Layout layout = Layout::kRowMajor,
                      wire::DeviceRef device = {}) {
    return std::vector{wire::TensorDesc{dtype, std::move(sizes), layout, device}};
  };
  const at::Tensor good = message_of(one(DType::kFloat32, {4, 4}), 64).tensors.at(0);
  CHECK(good.sizes() == at::IntArrayRef({4, 4}));
  CHECK(good.is_contiguous());
  // Negative sizes, sizes that overflow and too many dimensions are refused.
  CHECK(refused(one(DType::kFloat32, {-4, -4})));
  CHECK(refused(one(DType::kFloat32, {std::numeric_limits<int64_t>::min()})));
  CHECK(refused(one(DType::kUInt8, {int64_t{1} << 32, int64_t{1} << 32})));
  CHECK(refused(one(DType::kUInt8, {0, int64_t{1} << 32, int64_t{1} << 32}), 0));
  CHECK(refused(one(DType::kInt16, {std::numeric_limits<int64_t>::max()})));
  CHECK(refused(one(DType::kUInt8, std::vector<int64_t>(wire::kMaxDimensions + 1, 1)), 1));
  // Unknown element types are refused.
  for (const int dtype : {0, 22, 255}) {
    CHECK(refused(one(static_cast<DType>(dtype), {4})));
  }
  // Layouts for another number of dimensions, unknown layouts and overflowing strides are refused.
  CHECK(message_of(one(DType::kInt8, {2, 2, 4, 4}, Layout::kChannelsLast), 64)
            .tensors.at(0)
            .is_contiguous(at::MemoryFormat::ChannelsLast));
  CHECK(refused(one(DType::kInt8, {4, 4, 4}, Layout::kChannelsLast)));
  CHECK(refused(one(DType::kInt8, {2, 2, 4, 4}, Layout::kChannelsLast3d)));
  CHECK(refused(one(DType::kInt8, {2, 2, 4, 4}, static_cast<Layout>(3))));
  CHECK(refused(
      one(DType::kInt8, {int64_t{1} << 40, 0, int64_t{1} << 40, 4}, Layout::kChannelsLast), 0));
  // Unknown device types and device indices are refused.
  CHECK(refused(one(DType::kInt8, {64}, {}, {static_cast<wire::DeviceType>(3), 0})));
  CHECK(refused(one(DType::kInt8, {64}, {}, {wire::DeviceType::kCpu, 1})));
  // The second tensor begins at the next multiple of 64, and no byte may be missing or left over.
  const std::vector two{wire::TensorDesc{DType::kInt8, {1}, {}, {}},
                        wire::TensorDesc{DType::kInt8, {2}, {}, {}}};
  CHECK(message_of(two, 66).tensors.size() == 2);
  for (const uint64_t bytes : {0, 3, 65, 67, 128}) CHECK(refused(two, bytes));
  // The header must have the right number of tensors, and `bits` must have a bit for each tensor.
  CHECK(is_protocol_error([&] { message_of(two, 66, {}, 1); }));
  CHECK(is_protocol_error([&] { message_of(two, 66, {}, 60'000); }));
  const std::vector<wire::TensorDesc> nine(9, wire::TensorDesc{DType::kFloat32, {0}, {}, {}});
  CHECK(message_of(nine, 0, {1, 1}).requires_grad.size() == 9);
  CHECK(is_protocol_error([&] { message_of(nine, 0, {1}); }));
}

TEST_CASE("every element type may be in a sparse tensor, or is refused") {
  for (int dtype = 1; dtype <= 21; ++dtype) {
    CAPTURE(dtype);
    const auto descs = std::vector{wire::TensorDesc{static_cast<wire::DType>(dtype), {2}, {}, {}}};
    const uint64_t bytes = 2 * wire::element_bytes(static_cast<wire::DType>(dtype));
    const at::Tensor values = message_of(descs, bytes).tensors.at(0);
    CHECK((SparseParts{row({0, 2}), values, {3}}).decode()._nnz() == 2);
    // As indices, only int64 values are valid.
    const bool is_index = values.scalar_type() == at::kLong;
    const SparseParts parts{values.unsqueeze(0), at::ones({2}), {3}};
    CHECK(is_protocol_error([&] { parts.decode(); }) == !is_index);
  }
}

TEST_CASE("the parts of a sparse tensor match each other and its sizes, or are refused") {
  const bool coalesced = GENERATE(false, true);
  const auto refused = [&](const at::Tensor& indices, const at::Tensor& values,
                           std::vector<int64_t> sizes) {
    return is_protocol_error([&] {
      SparseParts{indices, values, std::move(sizes), coalesced}.decode();
    });
  };
  const at::Tensor values = at::ones({2, 4});
  CHECK_FALSE(refused(row({0, 2}), values, {3, 4}));
  // Negative sizes and sizes whose product overflows are refused.
  CHECK(refused(row({0, 2}), values, {-3, 4}));
  CHECK(refused(row({0, 2}), values, {std::numeric_limits<int64_t>::min(), 4}));
  CHECK(refused(row({0, 2}), values, {3, -4}));
  CHECK(refused(row({0, 2}), values, {std::numeric_limits<int64_t>::max(), 4}));
  CHECK(refused(row({0, 2}), values, {int64_t{1} << 61, 4}));
  CHECK_FALSE(refused(row({0, 2}), values, {int64_t{1} << 60, 4}));
  const at::Tensor two_rows = at::cat({row({0, 2}), row({0, 2})});
  CHECK(refused(two_rows, values, {int64_t{1} << 32, int64_t{1} << 32, 4}));
  CHECK(refused(two_rows, at::ones({2}), {int64_t{1} << 32, int64_t{1} << 31}));
  CHECK_FALSE(refused(two_rows, at::ones({2}), {int64_t{1} << 31, int64_t{1} << 31}));
  // Sizes of empty tensors are checked, too, because torch multiplies them unchecked.
  const at::Tensor none = at::empty({3, 0}, at::kLong);
  for (const std::vector<int64_t>& sizes :
       {std::vector<int64_t>{0, int64_t{1} << 40, int64_t{1} << 40},
        std::vector<int64_t>{int64_t{1} << 40, int64_t{1} << 40, 0}}) {
    CHECK(refused(none, at::empty({0}), sizes));
  }
  CHECK_FALSE(refused(none, at::empty({0}), {int64_t{1} << 40, 1 << 20, 0}));
  CHECK(refused(at::zeros({65, 1}, at::kLong), at::ones({1}), std::vector<int64_t>(65, 1)));
  CHECK_FALSE(refused(at::zeros({64, 1}, at::kLong), at::ones({1}), std::vector<int64_t>(64, 1)));
  // Indices, values and sizes must agree in their numbers of dimensions and of elements.
  CHECK(refused(at::tensor({0, 2}, at::kLong), values, {3, 4}));
  CHECK(refused(row({0, 2}).unsqueeze(0), values, {3, 4}));
  CHECK(refused(at::scalar_tensor(0, at::kLong), values, {3, 4}));
  CHECK(refused(row({0, 2}), at::scalar_tensor(1.0), {3}));
  CHECK(refused(row({0, 2}), values, {3}));
  CHECK(refused(row({0, 2}), values, {3, 4, 1}));
  CHECK(refused(row({0, 2}), values, {}));
  CHECK(refused(row({0, 2}), values, {3, 5}));
  CHECK(refused(row({0, 1, 2}), values, {3, 4}));
  CHECK(refused(row({0}), values, {3, 4}));
  // Indices must be int64.
  CHECK(refused(row({0, 2}).to(at::kInt), values, {3, 4}));
  CHECK(refused(row({0, 2}).to(at::kDouble), values, {3, 4}));
}

TEST_CASE("values that cannot be sent are refused in one line") {
  at::Tensor freed = at::ones({4});
  freed.storage().unsafeGetStorageImpl()->set_data_ptr_noswap(at::DataPtr());
  for (const auto& [tensor, kind] : {
           std::pair{at::_nested_tensor_from_tensor_list({at::ones({1}), at::ones({2})}), "nested"},
           std::pair{at::quantize_per_tensor(at::ones({2}), 0.5, 0, at::kQInt8), "quantized"},
           std::pair{at::empty({2}, at::kMeta), "meta"},
           std::pair{at::eye(2).to_sparse_csr(), "SparseCsr"},
           std::pair{at::empty({2}, at::kBits8), "Bits8"},
           std::pair{at::_efficientzerotensor({2}), "without memory"},
           std::pair{freed, "without memory"},
       }) {
    CAPTURE(kind);
    rpc::OutMessage message;
    rpc::Encoder encoder(message);
    const base::Error error = error_of([&, &sent = tensor] { encoder.put_tensor(sent); });
    CHECK(error.kind == ErrorKind::kInvalid);
    CHECK(error.message.find(kind) != std::string::npos);
    CHECK(error.message.find('\n') == std::string::npos);
    CHECK(message.tensors.empty());
  }
}

TEST_CASE("a tensor keeps its message alive only if it is a large part of it") {
  using wire::DType;
  // Receives a message with a tensor of 2 * size bytes for each of `sizes`. Returns true if the
  // last tensor keeps the message alive.
  const auto keeps = [](const std::vector<int64_t>& sizes) {
    std::vector<wire::TensorDesc> descs;
    for (const int64_t size : sizes) {
      descs.push_back({DType::kUInt8, {1, 2, size, 1}, wire::Layout::kChannelsLast, {}});
    }
    rpc::InMessage message = message_of(descs, layout_payload(descs).bytes);
    const std::weak_ptr<const void> body = message.storage;
    const at::Tensor last = message.tensors.back();
    message = {};
    CHECK(last.is_contiguous(at::MemoryFormat::ChannelsLast));
    CHECK_FALSE(last.any().item<bool>());
    return !body.expired();
  };
  CHECK_FALSE(keeps({1 << 20, 4}));
  CHECK_FALSE(keeps({1 << 20, 30'000}));
  CHECK(keeps({1 << 20, 40'000}));
  CHECK(keeps({1000, 4}));
  // The total size of the copies from one message is limited, but tiny tensors are always copied.
  CHECK(keeps({1 << 18, 30'000, 30'000, 30'000}));
  CHECK_FALSE(keeps({1 << 18, 30'000, 30'000, 30'000, 2000}));
}

TEST_CASE("a missing tensor, or one of an unknown kind, is refused") {
  const auto refused = [](const wire::Bytes& body, std::vector<at::Tensor> tensors) {
    return is_protocol_error([&] {
      rpc::InMessage message;
      message.body = body;
      message.tensors = std::move(tensors);
      rpc::Decoder(message).get_tensor();
    });
  };
  const at::Tensor tensor = at::ones({1});
  CHECK_FALSE(refused({0}, {}));  // an undefined tensor
  CHECK_FALSE(refused({1}, {tensor}));
  CHECK(refused({}, {tensor}));
  CHECK(refused({1}, {}));
  CHECK(refused({3}, {tensor}));
  CHECK(refused({255}, {tensor}));
  const wire::Bytes sparse{2, 0, 1, 3, 0, 0, 0, 0, 0, 0, 0};
  CHECK_FALSE(refused(sparse, {row({0}), tensor}));
  CHECK(refused(sparse, {row({0})}));
  CHECK(refused(sparse, {}));
  CHECK(refused({2, 2, 1, 3, 0, 0, 0, 0, 0, 0, 0}, {row({0}), tensor}));  // an invalid flag
  for (size_t size = 1; size < sparse.size(); ++size) {
    CHECK(refused(wire::Bytes(sparse.begin(), sparse.begin() + static_cast<long>(size)),
                  {row({0}), tensor}));
  }
}
