// Fuzz target for calls and replies: decodes frames to values and encodes the values again.
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <variant>
#include <vector>

#include <ATen/Functions.h>

#include "distrain/rpc/serialize.h"
#include "frame.h"
#include "targets.h"

namespace distrain::fuzz {

namespace {

using Tensors = std::vector<at::Tensor>;
struct Point {
  double x = 0;
  bool on = false;
  std::optional<int64_t> number;
  static constexpr auto kFields = std::tuple(&Point::x, &Point::on, &Point::number);
};
// Messages are decoded to these types, which contain each kind of value, some of them nested.
using Values = std::tuple<std::string, at::Tensor, Tensors>;
using Nested = std::tuple<std::map<std::string, std::optional<at::Tensor>>, std::vector<Point>,
                          std::variant<int64_t, std::string, at::Tensor>>;
using Maps = std::vector<std::map<int32_t, std::pair<std::array<float, 2>, std::string>>>;

constexpr int64_t kMostElements = 1 << 14;  // larger tensors are not copied

// Checks the indices of a sparse tensor, because torch's kernels do not check them.
void check_sparse(const at::Tensor& tensor) {
  const at::Tensor indices = tensor._indices().contiguous();
  const int64_t count = indices.size(1);
  const auto* at = indices.const_data_ptr<int64_t>();
  for (int64_t dim = 0; dim < indices.size(0); ++dim) {
    for (int64_t i = 0; i < count; ++i) {
      const int64_t index = at[dim * count + i];
      check(index >= 0 && index < tensor.size(dim), "an index lies in its dimension");
    }
  }
  for (int64_t i = 1; tensor.is_coalesced() && i < count; ++i) {
    int64_t dim = 0;
    while (dim < indices.size(0) && at[dim * count + i - 1] == at[dim * count + i]) ++dim;
    check(dim < indices.size(0) && at[dim * count + i - 1] < at[dim * count + i],
          "'coalesced' means that places come once and in order");
  }
  if (tensor.numel() > kMostElements) return;
  try {
    check(tensor.coalesce().to_dense().sizes() == tensor.sizes(), "a dense one has its sizes");
  } catch (const c10::Error&) {  // not supported for every element type
  }
}

void look_at(const at::Tensor& tensor) {
  if (!tensor.defined()) return;
  if (tensor.is_sparse()) return check_sparse(tensor);
  if (tensor.numel() <= kMostElements) {
    check(tensor.clone().sizes() == tensor.sizes(), "a tensor can be copied");
  }
}

template <class T>
Bytes encode_again(const T& value, const rpc::InMessage& message) {
  rpc::OutMessage out;
  rpc::Encoder encoder(out);
  rpc::encode<T>(encoder, value);
  out.rrefs = message.tickets;
  return frame_bytes(std::move(out), message.header);
}

template <class T>
void decode_values(rpc::InMessage message) {
  rpc::Decoder decoder(message);
  const T value = rpc::decode<T>(decoder);
  for (size_t i = 0; i < decoder.next_tensor; ++i) look_at(message.tensors[i]);
  const Bytes again = encode_again(value, message);
  auto same = read_frame(again);
  check(same.has_value(), "what was decoded can be sent on");
  rpc::Decoder second(*same);
  check(encode_again(rpc::decode<T>(second), *same) == again, "what was encoded decodes to itself");
  check(second.in.left() == 0 && second.next_tensor == same->tensors.size(),
        "nothing is left over");
}

// Only decodes and inspects a single tensor; does not encode it again.
template <>
void decode_values<at::Tensor>(rpc::InMessage message) {
  rpc::Decoder decoder(message);
  look_at(rpc::decode<at::Tensor>(decoder));
}

// Decodes a message to one of four types. The context ID in the header selects the type.
void run_message(Input input) {
  const MemoryLimit limit((size_t{8} << 20) + 256 * input.size(), "a multiple of the message");
  auto message = read_frame(input);
  if (!message) return;
  try {
    switch (message->header.context_id % 4) {
      case 0:
        return decode_values<Values>(*std::move(message));
      case 1:
        return decode_values<Nested>(*std::move(message));
      case 2:
        return decode_values<Maps>(*std::move(message));
      default:
        return decode_values<at::Tensor>(*std::move(message));
    }
  } catch (const base::Exception& e) {
    check(e.kind() == base::ErrorKind::kProtocol, "what does not fit is refused as 'protocol'");
  } catch (const c10::Error&) {
    check(false, "torch refuses nothing that was taken");
  }
}

template <class T>
Bytes seed_of(const T& value, wire::FrameHeader header) {
  rpc::InMessage like;
  like.header = header;
  if (header.kind == wire::FrameKind::kReply) like.tickets = {{77, 0, 3, 78, 2}};
  return encode_again(value, like);
}

std::vector<Bytes> message_seeds() {
  using wire::FrameKind;
  const at::Tensor dense = at::arange(12, at::kFloat).view({3, 4});
  const at::Tensor images =
      at::zeros({2, 3, 2, 2}, at::kHalf).contiguous(at::MemoryFormat::ChannelsLast);
  const at::Tensor indices = at::tensor({0, 2, 2, 1, 0, 3}, at::kLong).view({2, 3});
  const at::Tensor sparse = at::sparse_coo_tensor(indices, at::ones({3, 2}), {3, 4, 2});
  return {
      seed_of(Values{"EmbeddingTable.forward", dense, {images, sparse, at::Tensor()}},
              {.kind = FrameKind::kCall, .call_id = 1, .context_id = 4}),
      seed_of(Values{"f", dense, {dense, at::empty({0}), at::scalar_tensor(1.5)}},
              {.kind = FrameKind::kCall, .call_id = 3, .context_id = 8, .autograd_id = 5}),
      seed_of(Nested{{{"a", dense}, {"b", std::nullopt}}, {{1.5, true, 3}, {}}, sparse.coalesce()},
              {.kind = FrameKind::kReply, .call_id = 1, .context_id = 1}),
      seed_of(Maps{{{1, {{1, 2}, "x"}}, {-5, {{3, 4}, ""}}}, {}},
              {.kind = FrameKind::kReply, .call_id = 2, .context_id = 2}),
      seed_of(sparse, {.kind = FrameKind::kReply, .call_id = 9, .context_id = 3}),
      seed_of(sparse.coalesce(), {.kind = FrameKind::kReply, .call_id = 9, .context_id = 3}),
  };
}

}  // namespace

const Target kMessage{"message", run_message, message_seeds};

}  // namespace distrain::fuzz
