// Fuzz targets for messages without tensors, one for each kind of message.
#include "targets.h"

#include <algorithm>
#include <cstring>

#include "../../unit/wire/decoders.h"

namespace distrain::fuzz {

namespace {

// A decoder may use this multiple of its input, because decoded strings and options are larger.
constexpr size_t kFactor = 64;

// Decodes the input by `try_decode`, which checks accepted messages and may throw only `protocol`.
template <class Try>
void decode(Input input, Try try_decode) {
  const MemoryLimit limit(kSmall + kFactor * input.size(), "a multiple of the message");
  try {
    static_cast<void>(try_decode(input));
  } catch (const base::Exception& e) {
    check(e.kind() == base::ErrorKind::kProtocol, "what does not fit is refused as 'protocol'");
  }
}

void run_header(Input input) {
  decode(input, wire::try_header);
  Bytes hashed(input.begin(), input.end());
  if (hashed.size() < sizeof wire::kMagic) return;
  std::memcpy(hashed.data(), &wire::kMagic, sizeof wire::kMagic);
  wire::add_hash(hashed);
  decode(hashed, wire::try_header);
}
void run_tensor_desc(Input input) { decode(input, wire::try_tensor_descs); }
void run_hello(Input input) { decode(input, wire::try_hello); }
void run_error(Input input) { decode(input, wire::try_error); }
void run_all_devices(Input input) { decode(input, wire::try_all_devices); }

// The first round trip may sort the options of a message; the second must change nothing.
void run_join(Input input) {
  decode(input, [](Input in) {
    const Bytes again = encode(wire::decode_join(in));
    check(again.size() == in.size(), "a join is as long as what it encodes to");
    check(encode(wire::decode_join(again)) == again, "an encoded join decodes to itself");
    return true;
  });
}

void run_directory(Input input) {
  decode(input, [](Input in) {
    const Bytes again = encode(wire::decode_directory(in));
    check(again.size() == in.size(), "a directory is as long as what it encodes to");
    check(encode(wire::decode_directory(again)) == again, "an encoded directory decodes to itself");
    return true;
  });
}

// Decodes the body of a kPrepared frame.
void run_rank_devices(Input input) {
  decode(input, [](Input in) {
    const Bytes again = wire::encode(wire::decode_rank_devices(in));
    check(std::equal(again.begin(), again.end(), in.begin(), in.end()),
          "devices encode to what they were decoded from");
    return true;
  });
}

std::vector<Bytes> header_seeds() {
  std::vector<Bytes> seeds;
  for (const auto kind :
       {wire::FrameKind::kHello, wire::FrameKind::kCall, wire::FrameKind::kChunk,
        wire::FrameKind::kCredit, wire::FrameKind::kLost, wire::FrameKind::kRRefDelete}) {
    const wire::FrameHeader header{.kind = kind,
                                   .channel = 3,
                                   .meta_bytes = 70,
                                   .tensor_count = 2,
                                   .payload_bytes = 192,
                                   .call_id = 7};
    std::array<uint8_t, wire::kHeaderBytes> bytes;
    encode_header(header, bytes);
    seeds.emplace_back(bytes.begin(), bytes.end());
  }
  return seeds;
}

std::vector<Bytes> tensor_desc_seeds() {
  Bytes bytes;
  wire::Writer out(bytes);
  encode(wire::TensorDesc{.dtype = wire::DType::kFloat32, .sizes = {3, 4}}, out);
  encode(wire::TensorDesc{.dtype = wire::DType::kInt64, .sizes = {}}, out);
  encode(wire::TensorDesc{.dtype = wire::DType::kFloat16,
                          .sizes = {2, 3, 4, 5},
                          .layout = wire::Layout::kChannelsLast,
                          .device = {wire::DeviceType::kCuda, 1}},
         out);
  return {bytes, {}};
}

const wire::Endpoint kEndpoint{"10.0.0.2", 29500, "/tmp/distrain-1/rank", "a host"};

std::vector<Bytes> hello_seeds() {
  wire::Hello hello;
  hello.rank = 3;
  wire::Hello peer;
  peer.purpose = wire::HelloPurpose::kPeer;
  peer.trust = wire::Trust::kSameUser;
  peer.rank = 0;
  peer.generation = 2;
  peer.incarnation = 1;
  peer.job_id.fill(0x4A);
  peer.nonce.fill(0x4E);
  return {encode(hello), encode(peer)};
}

std::vector<Bytes> join_seeds() {
  wire::Join join;
  join.job = "job";
  join.world_size = 4;
  join.endpoint = kEndpoint;
  join.options = {{"epochs", "3"}, {"lr", "0.1"}, {"optimizer", ""}};
  return {encode(join), encode(wire::Join{})};
}

std::vector<Bytes> directory_seeds() {
  wire::Directory directory;
  directory.ranks = {{"trainer0", kEndpoint}, {"ps", {}, 3, false}};
  directory.options = {{"batch-size", "32"}, {"seed", "1"}};
  directory.secret = "0123456789abcdef0123456789abcdef";
  return {encode(directory), encode(wire::Directory{})};
}

const wire::RankDevices kDevices{.home = {wire::DeviceType::kCuda, 1},
                                 .type = wire::DeviceType::kCuda,
                                 .count = 2,
                                 .maps = {{"ps", {wire::DeviceType::kCuda, 0}, {}},
                                          {"trainer1", {}, {wire::DeviceType::kPrivate, 3}}}};

std::vector<Bytes> rank_devices_seeds() { return {encode(kDevices)}; }

std::vector<Bytes> all_devices_seeds() {
  return {encode(std::vector<wire::RankDevices>{kDevices, {}, kDevices})};
}

// Returns bodies of kReject frames, kAbort frames and error replies.
std::vector<Bytes> error_seeds() {
  return {wire::encode(base::Error{base::ErrorKind::kPeerLost, "rank 3 is gone", 3, "allreduce"}),
          wire::encode(base::Error{base::ErrorKind::kInternal, "", -1, ""})};
}

}  // namespace

std::span<const Target> targets() {
  static const std::vector<Target> all = {
      {"header", run_header, header_seeds},
      {"tensor_desc", run_tensor_desc, tensor_desc_seeds},
      {"hello", run_hello, hello_seeds},
      {"join", run_join, join_seeds},
      {"directory", run_directory, directory_seeds},
      {"rank_devices", run_rank_devices, rank_devices_seeds},
      {"all_devices", run_all_devices, all_devices_seeds},
      {"error", run_error, error_seeds},
      kStream,
  };
  return all;
}

}  // namespace distrain::fuzz
