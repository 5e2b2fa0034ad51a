// Tests round trips, the exact bytes of the documented format, and limits.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "counting_new.h"
#include "random_messages.h"
#include "support/catch.h"
#include "support/payload.h"

using namespace distrain;
using namespace distrain::wire;

namespace {

using Header = std::array<uint8_t, kHeaderBytes>;

Header encoded(const FrameHeader& header) {
  Header bytes;
  encode_header(header, bytes);
  return bytes;
}

void flip(Header& bytes, size_t bit) { bytes[bit / 8] ^= static_cast<uint8_t>(1u << (bit % 8)); }

bool operator_equal(const Endpoint& a, const Endpoint& b) {
  return a.host == b.host && a.port == b.port && a.unix_name == b.unix_name &&
         a.host_key == b.host_key && a.cpus == b.cpus;
}

template <class F>
base::Error protocol_error_of(F f) {
  try {
    f();
  } catch (const base::Exception& e) {
    CHECK(e.kind() == base::ErrorKind::kProtocol);
    return e.error();
  }
  FAIL("no exception");
  return {};
}

Bytes bytes_of(const TensorDesc& desc) {
  Bytes bytes;
  Writer out(bytes);
  encode(desc, out);
  return bytes;
}

template <class T>
void scalar_round_trip(T value) {
  Bytes bytes;
  Writer(bytes).put(value);
  CHECK(bytes.size() == sizeof(T));
  Reader in(bytes);
  const T back = in.get<T>();
  CHECK(std::memcmp(&back, &value, sizeof(T)) == 0);
  in.expect_end();
}

}  // namespace

TEST_CASE("scalars of every width are encoded and decoded") {
  RandomMessages random(1);
  for (int i = 0; i < 200; ++i) {
    const uint64_t bits = random.bits();
    scalar_round_trip(static_cast<uint8_t>(bits));
    scalar_round_trip(static_cast<int16_t>(bits));
    scalar_round_trip(static_cast<uint32_t>(bits));
    scalar_round_trip(static_cast<int64_t>(bits));
    scalar_round_trip(std::bit_cast<double>(bits));
    scalar_round_trip(std::bit_cast<float>(static_cast<uint32_t>(bits)));
  }
  scalar_round_trip(true);
  scalar_round_trip(false);
  scalar_round_trip(std::numeric_limits<double>::infinity());
  scalar_round_trip(-0.0);
  scalar_round_trip(DType::kBFloat16);
}

TEST_CASE("a Writer writes little-endian without padding") {
  Bytes bytes;
  Writer out(bytes);
  out.put(uint8_t{1});
  out.put(uint32_t{0x0A0B0C0D});
  out.put(true);
  out.put("hé");
  out.put(int16_t{-2});
  CHECK(bytes == Bytes{1, 0x0D, 0x0C, 0x0B, 0x0A, 1, 3, 0, 0, 0, 'h', 0xC3, 0xA9, 0xFE, 0xFF});
}

TEST_CASE("a Reader refuses values that do not fit") {
  const Bytes two{2, 0};
  protocol_error_of([&] { Reader(two).get<uint32_t>(); });
  protocol_error_of([&] { Reader(two).get<bool>(); });
  protocol_error_of([&] { Reader(two).expect_end(); });
  protocol_error_of([&] { Reader(std::span<const uint8_t>{}).get<uint8_t>(); });
  const Bytes long_text{0xFF, 0xFF, 0xFF, 0xFF, 'a'};
  protocol_error_of([&] { Reader(long_text).get_string(); });
  protocol_error_of([&] { Reader(long_text).get_count(1); });
  const Bytes items{2, 0, 0, 0, 9, 9, 9};
  CHECK(Reader(items).get_count(1) == 2);
  protocol_error_of([&] { Reader(items).get_count(2); });
  const Bytes nothing{0, 0, 0, 0};
  CHECK(Reader(nothing).get_string().empty());
  CHECK(Reader(nothing).get_count(8) == 0);
}

TEST_CASE("the bytes of a frame header are as documented") {
  FrameHeader header;
  header.kind = FrameKind::kOneway;
  header.channel = 0x0102;
  header.meta_bytes = 0x03040506;
  header.tensor_count = 0x0708;
  header.payload_bytes = 0x0900000001;
  header.call_id = 0x1112131415161718;
  header.context_id = 0x2122232425262728;
  header.autograd_id = 0x3132333435363738;
  const Header expected{
      0x17, 0x5A, 0xCF, 0x4A,                          // magic and hash
      19,   0,                                         // kind
      0x02, 0x01,                                      // channel
      0x06, 0x05, 0x04, 0x03,                          // meta_bytes
      0x08, 0x07, 0,    0,                             // tensor_count
      0x01, 0,    0,    0,    0x09, 0,    0,    0,     // payload_bytes
      0x18, 0x17, 0x16, 0x15, 0x14, 0x13, 0x12, 0x11,  // call_id
      0x28, 0x27, 0x26, 0x25, 0x24, 0x23, 0x22, 0x21,  // context_id
      0x38, 0x37, 0x36, 0x35, 0x34, 0x33, 0x32, 0x31,  // autograd_id
  };
  CHECK(encoded(header) == expected);
  CHECK(kHeaderBytes == 48);
  CHECK(kProtocolVersion == 11);
}

TEST_CASE("the numbers of the frame kinds do not change") {
  CHECK(static_cast<int>(FrameKind::kHello) == 1);
  CHECK(static_cast<int>(FrameKind::kReject) == 2);
  CHECK(static_cast<int>(FrameKind::kDirectory) == 3);
  CHECK(static_cast<int>(FrameKind::kPrepared) == 4);
  CHECK(static_cast<int>(FrameKind::kGo) == 5);
  CHECK(static_cast<int>(FrameKind::kProof) == 6);
  CHECK(static_cast<int>(FrameKind::kJoin) == 7);
  CHECK(static_cast<int>(FrameKind::kJoined) == 8);
  CHECK(static_cast<int>(FrameKind::kArena) == 9);
  CHECK(static_cast<int>(FrameKind::kAttached) == 10);
  CHECK(static_cast<int>(FrameKind::kCall) == 16);
  CHECK(static_cast<int>(FrameKind::kReply) == 17);
  CHECK(static_cast<int>(FrameKind::kError) == 18);
  CHECK(static_cast<int>(FrameKind::kOneway) == 19);
  CHECK(static_cast<int>(FrameKind::kChunk) == 20);
  CHECK(static_cast<int>(FrameKind::kCancel) == 21);
  CHECK(static_cast<int>(FrameKind::kCredit) == 22);
  CHECK(static_cast<int>(FrameKind::kCreditRequest) == 23);
  CHECK(static_cast<int>(FrameKind::kHeartbeat) == 32);
  CHECK(static_cast<int>(FrameKind::kFlush) == 33);
  CHECK(static_cast<int>(FrameKind::kAbort) == 34);
  CHECK(static_cast<int>(FrameKind::kLost) == 35);
  CHECK(static_cast<int>(FrameKind::kLeave) == 36);
  CHECK(static_cast<int>(FrameKind::kReturned) == 37);
  CHECK(static_cast<int>(FrameKind::kKnown) == 38);
  CHECK(static_cast<int>(FrameKind::kRRefFork) == 48);
  CHECK(static_cast<int>(FrameKind::kRRefAccept) == 49);
  CHECK(static_cast<int>(FrameKind::kRRefDelete) == 50);
}

TEST_CASE("frame headers are encoded and decoded") {
  RandomMessages random(2);
  for (int i = 0; i < 2000; ++i) {
    const FrameHeader header = random.header();
    const auto back = decode_header(encoded(header), Limits{});
    REQUIRE(back.ok());
    REQUIRE(back.unchecked() == header);
  }
}

TEST_CASE("the limits of a frame header are exact") {
  const Limits limits{1000, 10, 1 << 20};
  FrameHeader header;
  header.meta_bytes = 1000;
  header.tensor_count = 10;
  header.payload_bytes = 1 << 20;
  const auto kind_of = [&](const FrameHeader& h) {
    const auto result = decode_header(encoded(h), limits);
    return result.ok() ? base::ErrorKind{} : result.error().kind;
  };
  CHECK(kind_of(header) == base::ErrorKind{});
  FrameHeader more = header;
  more.meta_bytes += 1;
  CHECK(kind_of(more) == base::ErrorKind::kProtocol);
  more = header;
  more.tensor_count += 1;
  CHECK(kind_of(more) == base::ErrorKind::kProtocol);
  more = header;
  more.payload_bytes += 1;
  CHECK(kind_of(more) == base::ErrorKind::kProtocol);
  more.payload_bytes = UINT64_MAX;
  CHECK(kind_of(more) == base::ErrorKind::kProtocol);

  FrameHeader bulk{.meta_bytes = 7, .payload_bytes = kLeastInBulk - 1, .in_bulk = true};
  CHECK_FALSE(decode_header(encoded(bulk), Limits{}).ok());
  bulk.payload_bytes += 1;
  CHECK(decode_header(encoded(bulk), Limits{}).ok());
  CHECK(bulk.bytes_behind() == 7);
  CHECK(encoded(bulk)[5] == 0x80);

  FrameHeader anything;
  anything.payload_bytes = 1;
  CHECK_FALSE(decode_header(encoded(anything), kJoinLimits).ok());
}

TEST_CASE("any changed bit of a header is detected") {
  RandomMessages random(16);
  for (int i = 0; i < 200; ++i) {
    const Header bytes = encoded(random.header());
    for (size_t bit = 0; bit < 8 * kHeaderBytes; ++bit) {
      Header damaged = bytes;
      flip(damaged, bit);
      const auto result = decode_header(damaged, Limits{});
      REQUIRE_FALSE(result.ok());
      REQUIRE(result.error().kind == base::ErrorKind::kProtocol);
      REQUIRE(result.error().message == "not a distrain frame, or one that was damaged on the way");
    }
  }
}

TEST_CASE("any two changed bits of a header are detected") {
  RandomMessages random(17);
  for (int i = 0; i < (kUnderSanitizer ? 1 : 10); ++i) {
    Header bytes = encoded(random.header());
    int missed = 0;
    for (size_t a = 0; a < 8 * kHeaderBytes; ++a) {
      flip(bytes, a);
      for (size_t b = 0; b < a; ++b) {
        flip(bytes, b);
        missed += decode_header(bytes, Limits{}).ok();
        flip(bytes, b);
      }
      flip(bytes, a);
    }
    REQUIRE(missed == 0);
  }
}

TEST_CASE("only a hello and a reject may have no hash") {
  RandomMessages random(18);
  int taken = 0;
  for (int i = 0; i < 2000; ++i) {
    const FrameHeader header = random.header();
    Header bytes = encoded(header);
    std::memcpy(bytes.data(), &kMagic, sizeof kMagic);
    const auto back = decode_header(bytes, Limits{});
    const bool may = header.kind == FrameKind::kHello || header.kind == FrameKind::kReject;
    REQUIRE(back.ok() == may);
    if (may) REQUIRE(back.unchecked() == header);
    taken += may;
  }
  CHECK(taken > 0);
}

TEST_CASE("unknown kinds are named") {
  Header bytes = encoded(FrameHeader{.payload_bytes = kLeastInBulk});
  int known = 0;
  for (int kind = 0; kind < 65536; ++kind) {
    bytes[4] = static_cast<uint8_t>(kind);
    bytes[5] = static_cast<uint8_t>(kind >> 8);
    const uint32_t magic = magic_of(bytes);
    std::memcpy(bytes.data(), &magic, sizeof magic);
    const auto result = decode_header(bytes, Limits{});
    known += result.ok();
    if (!result.ok()) {
      REQUIRE(result.error().message == "unknown frame kind " + std::to_string(kind));
    }
  }
  CHECK(known == 2 * 30);  // with and without kInBulk
}

TEST_CASE("the payload begins at the documented offset") {
  FrameHeader header;
  header.meta_bytes = 65;
  CHECK(header.payload_offset() == 65);
  CHECK(header.body_bytes() == 65);
  header.payload_bytes = 3;
  CHECK(header.payload_offset() == 128);
  CHECK(header.body_bytes() == 131);
  header.meta_bytes = 64;
  CHECK(header.payload_offset() == 64);
  header.meta_bytes = UINT32_MAX;  // no wrap-around at 32 bits
  CHECK(header.payload_offset() == uint64_t{1} << 32);
  for (uint64_t n = 0; n < 300; ++n) {
    CHECK(align_payload(n) % kPayloadAlignment == 0);
    CHECK(align_payload(n) - n < kPayloadAlignment);
  }
}

TEST_CASE("the bytes of a tensor descriptor are as documented") {
  CHECK(bytes_of({DType::kFloat32, {2, 0x0102030405060708}}) ==
        Bytes{8, 2, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 8, 7, 6, 5, 4, 3, 2, 1});
  CHECK(bytes_of({DType::kInt64, {}}) == Bytes{5, 0, 0, 0, 0});
}

TEST_CASE("the numbers and sizes of the element types do not change") {
  const size_t sizes[] = {0, 1, 1, 2, 4, 8, 2, 2, 4, 8, 1, 8, 16, 2, 4, 8, 1, 1, 1, 1, 1, 4};
  for (int dtype = 0; dtype < 256; ++dtype) {
    CHECK(element_bytes(static_cast<DType>(dtype)) ==
          (static_cast<size_t>(dtype) < std::size(sizes) ? sizes[dtype] : 0));
  }
  CHECK(static_cast<int>(DType::kUInt8) == 1);
  CHECK(static_cast<int>(DType::kFloat16) == 6);
  CHECK(static_cast<int>(DType::kBFloat16) == 7);
  CHECK(static_cast<int>(DType::kFloat32) == 8);
  CHECK(static_cast<int>(DType::kFloat64) == 9);
  CHECK(static_cast<int>(DType::kBool) == 10);
  CHECK(static_cast<int>(DType::kUInt64) == 15);
  CHECK(static_cast<int>(DType::kComplex32) == 21);
}

TEST_CASE("tensor descriptors are encoded and decoded") {
  RandomMessages random(3);
  for (int i = 0; i < 2000; ++i) {
    const TensorDesc desc = random.tensor_desc();
    const Bytes bytes = bytes_of(desc);
    REQUIRE(bytes.size() == kMinTensorDescBytes + 8 * desc.sizes.size());
    Reader in(bytes);
    const TensorDesc back = decode_tensor_desc(in);
    in.expect_end();
    REQUIRE(back.dtype == desc.dtype);
    REQUIRE(back.sizes == desc.sizes);
    REQUIRE(back.layout == desc.layout);
    REQUIRE(back.device == desc.device);
  }
}

TEST_CASE("the bytes of a tensor descriptor and of a rank's devices are as documented") {
  CHECK(bytes_of({DType::kFloat32, {2}, Layout::kRowMajor, {DeviceType::kCuda, 3}}) ==
        Bytes{8, 1, 0, 1, 3, 2, 0, 0, 0, 0, 0, 0, 0});
  CHECK(encode(std::vector<RankDevices>{
            {{DeviceType::kCuda, 1}, DeviceType::kCuda, 2, {{"p", {DeviceType::kCuda, 0}, {}}}}}) ==
        Bytes{1, 0, 0, 0, 1, 1, 1, 2, 1, 0, 0, 0, 1, 0, 0, 0, 'p', 1, 0, 0, 0});
}

TEST_CASE("device descriptions of ranks are encoded and decoded") {
  RandomMessages random(8);
  for (int i = 0; i < 500; ++i) {
    std::vector<RankDevices> all;
    for (size_t n = random.below(4); n > 0; --n) all.push_back(random.rank_devices());
    const Bytes bytes = encode(all);
    REQUIRE(encode(decode_all_devices(bytes)) == bytes);
  }
}

TEST_CASE("malformed tensor descriptors are refused") {
  const auto refused = [](const TensorDesc& desc) {
    const Bytes bytes = bytes_of(desc);
    Reader in(bytes);
    return protocol_error_of([&in] { decode_tensor_desc(in); }).message;
  };
  refused({static_cast<DType>(0), {1}});
  refused({static_cast<DType>(22), {1}});
  refused({static_cast<DType>(255), {}});
  refused({DType::kUInt8, {-1}});
  refused({DType::kUInt8, {INT64_MIN}});
  refused({DType::kInt16, {INT64_MAX}});
  refused({DType::kUInt8, {int64_t{1} << 32, int64_t{1} << 32}});
  refused({DType::kUInt8, {0, int64_t{1} << 32, int64_t{1} << 32}});  // the strides overflow
  refused({DType::kUInt8, std::vector<int64_t>(kMaxDimensions + 1, 1)});
  refused({DType::kUInt8, {1, 1, 1}, Layout::kChannelsLast});
  refused({DType::kUInt8, {1, 1, 1, 1}, Layout::kChannelsLast3d});
  refused({DType::kUInt8, {1, 1, 1, 1}, static_cast<Layout>(3)});
  refused({DType::kUInt8, {1}, Layout::kRowMajor, {static_cast<DeviceType>(3), 0}});
  refused({DType::kUInt8, {1}, Layout::kRowMajor, {DeviceType::kCpu, 1}});

  const Bytes most = bytes_of({DType::kUInt8, std::vector<int64_t>(kMaxDimensions, 1)});
  Reader in(most);
  CHECK(decode_tensor_desc(in).sizes.size() == kMaxDimensions);
  const Bytes largest = bytes_of({DType::kUInt8, {INT64_MAX}});
  Reader in_largest(largest);
  CHECK(decode_tensor_desc(in_largest).bytes() == static_cast<uint64_t>(INT64_MAX));
}

TEST_CASE("tensors in a payload begin at multiples of 64") {
  CHECK(testing::layout_payload({}).bytes == 0);
  const PayloadLayout layout = testing::layout_payload({{DType::kFloat32, {3}},
                                                        {DType::kUInt8, {0}},
                                                        {DType::kUInt8, {64}},
                                                        {DType::kUInt8, {65}},
                                                        {DType::kFloat64, {}}});
  CHECK(layout.offsets == std::vector<uint64_t>{0, 64, 64, 128, 256});
  CHECK(layout.bytes == 264);

  const std::vector<TensorDesc> three(3, TensorDesc{DType::kUInt8, {INT64_MAX}});
  protocol_error_of([&] { testing::layout_payload(three); });
}

TEST_CASE("hellos are encoded and decoded") {
  RandomMessages random(4);
  for (int i = 0; i < 1000; ++i) {
    const Hello hello = random.hello();
    const Hello back = decode_hello(encode(hello));
    REQUIRE(back.purpose == hello.purpose);
    REQUIRE(back.trust == hello.trust);
    REQUIRE(back.rank == hello.rank);
    REQUIRE(back.generation == hello.generation);
    REQUIRE(back.incarnation == hello.incarnation);
    REQUIRE(back.job_id == hello.job_id);
    REQUIRE(back.nonce == hello.nonce);
  }
}

TEST_CASE("joins are encoded and decoded") {
  RandomMessages random(6);
  for (int i = 0; i < 1000; ++i) {
    const Join join = random.join();
    const Join back = decode_join(encode(join));
    REQUIRE(back.job == join.job);
    REQUIRE(back.world_size == join.world_size);
    REQUIRE(operator_equal(back.endpoint, join.endpoint));
    REQUIRE(back.options == join.options);
  }
}

TEST_CASE("directories and errors are encoded and decoded") {
  RandomMessages random(5);
  for (int i = 0; i < 1000; ++i) {
    const Directory directory = random.directory();
    const Directory back = decode_directory(encode(directory));
    REQUIRE(back.options == directory.options);
    REQUIRE(back.ranks.size() == directory.ranks.size());
    for (size_t r = 0; r < back.ranks.size(); ++r) {
      REQUIRE(back.ranks[r].name == directory.ranks[r].name);
      REQUIRE(operator_equal(back.ranks[r].endpoint, directory.ranks[r].endpoint));
      REQUIRE(back.ranks[r].incarnation == directory.ranks[r].incarnation);
      REQUIRE(back.ranks[r].is_here == directory.ranks[r].is_here);
    }
    const Returned returned{random.endpoint(), random.rank_devices()};
    const Returned same = decode_returned(encode(returned));
    REQUIRE(operator_equal(same.endpoint, returned.endpoint));
    REQUIRE(same.devices.home == returned.devices.home);
    REQUIRE(same.devices.maps.size() == returned.devices.maps.size());
    const base::Error error = random.error();
    const base::Error same_error = decode_error(encode(error));
    REQUIRE(same_error.kind == error.kind);
    REQUIRE(same_error.rank == error.rank);
    REQUIRE(same_error.message == error.message);
    REQUIRE(same_error.op == error.op);
  }
}

TEST_CASE("the bytes of a hello, of a join and of an error are as documented") {
  Hello hello;
  hello.purpose = HelloPurpose::kPeer;
  hello.trust = Trust::kAnybody;
  hello.rank = -2;
  hello.generation = 0x0A0B0C0D;
  hello.incarnation = 0x0E0F;
  std::iota(hello.job_id.begin(), hello.job_id.end(), uint8_t{0x10});
  std::iota(hello.nonce.begin(), hello.nonce.end(), uint8_t{0x20});
  const Bytes expected{
      11,   0,    0,    0,                             // version
      2,                                               // purpose
      3,                                               // trust
      0xFE, 0xFF, 0xFF, 0xFF,                          // rank
      0x0D, 0x0C, 0x0B, 0x0A,                          // generation
      0x0F, 0x0E, 0x00, 0x00,                          // incarnation
      0x10, 0x11, 0x12, 0x13, 0x14, 0x15, 0x16, 0x17,  // job_id
      0x18, 0x19, 0x1A, 0x1B, 0x1C, 0x1D, 0x1E, 0x1F,  //
      0x20, 0x21, 0x22, 0x23, 0x24, 0x25, 0x26, 0x27,  // nonce
      0x28, 0x29, 0x2A, 0x2B, 0x2C, 0x2D, 0x2E, 0x2F,  //
      0x30, 0x31, 0x32, 0x33, 0x34, 0x35, 0x36, 0x37,  //
      0x38, 0x39, 0x3A, 0x3B, 0x3C, 0x3D, 0x3E, 0x3F,  //
  };
  CHECK(encode(hello) == expected);
  Join join;
  join.job = "j";
  join.world_size = 4;
  join.endpoint = {"h", 29500, "", "k", 9};
  join.options = {{"a", "b"}};
  CHECK(encode(join) == Bytes{1,    0,    0, 0, 'j',           // job
                              4,    0,    0, 0,                // world_size
                              1,    0,    0, 0, 'h',           // host
                              0x3C, 0x73,                      // port
                              0,    0,    0, 0,                // unix_name
                              1,    0,    0, 0, 'k',           // host_key
                              9,    0,    0, 0, 0,   0, 0, 0,  // cpus
                              1,    0,    0, 0,                // options
                              1,    0,    0, 0, 'a', 1, 0, 0, 0, 'b'});
  CHECK(encode(base::Error{base::ErrorKind::kDeadline, "m", -1, "o"}) ==
        Bytes{12, 0, 0xFF, 0xFF, 0xFF, 0xFF, 1, 0, 0, 0, 'm', 1, 0, 0, 0, 'o'});
}

TEST_CASE("the numbers of purposes and kinds of trust do not change") {
  CHECK(static_cast<int>(HelloPurpose::kJoin) == 1);
  CHECK(static_cast<int>(HelloPurpose::kPeer) == 2);
  CHECK(static_cast<int>(HelloPurpose::kBulk) == 3);
  CHECK(static_cast<int>(Trust::kToken) == 1);
  CHECK(static_cast<int>(Trust::kSameUser) == 2);
  CHECK(static_cast<int>(Trust::kAnybody) == 3);
}

TEST_CASE("at most 256 bytes are read before a proof is checked") {
  CHECK(encode(Hello{}).size() <= kHelloLimits.max_meta_bytes);
  CHECK(sizeof(Proof) == kProofLimits.max_meta_bytes);
  CHECK(2 * kHeaderBytes + kHelloLimits.max_meta_bytes + kProofLimits.max_meta_bytes == 256);
  for (const Limits& limits : {kHelloLimits, kProofLimits}) {
    CHECK(limits.max_tensors == 0);
    CHECK(limits.max_payload_bytes == 0);
  }
}

TEST_CASE("another protocol version is reported together with ours") {
  for (Bytes bytes : {encode(Hello{}), encode(Directory{})}) {
    bytes[0] = 77;
    const bool is_hello = bytes.size() > 20;
    // After the version, a message of another version may have any number of bytes.
    for (const size_t size : {bytes.size(), sizeof kProtocolVersion, size_t{1000}}) {
      bytes.resize(size);
      const base::Error error = protocol_error_of([&] {
        if (is_hello) {
          decode_hello(bytes);
        } else {
          decode_directory(bytes);
        }
      });
      CHECK(error.message.find("77") != std::string::npos);
      CHECK(error.message.find("speaks " + std::to_string(kProtocolVersion)) != std::string::npos);
    }
  }
}

TEST_CASE("malformed hellos, proofs, joins, directories and errors are refused") {
  // Checks that `decode` refuses `bytes` for the reason `why`.
  const auto refused = [](auto decode, const Bytes& bytes, const char* why) {
    const std::string message = protocol_error_of([&] { decode(bytes); }).message;
    CHECK(message == std::string("malformed message: ") + why);
  };
  const Bytes hello = encode(Hello{});
  for (const uint8_t unknown : {uint8_t{0}, uint8_t{4}, uint8_t{255}}) {
    Bytes bytes = hello;
    bytes[4] = unknown;
    refused(decode_hello, bytes, "an unknown purpose of a connection");
  }
  for (const uint8_t unknown : {uint8_t{0}, uint8_t{4}, uint8_t{255}}) {
    Bytes bytes = hello;
    bytes[5] = unknown;
    refused(decode_hello, bytes, "an unknown kind of trust");
  }
  const auto longer = [](Bytes bytes) {
    bytes.push_back(0);
    return bytes;
  };
  const auto shorter = [](Bytes bytes) {
    bytes.pop_back();
    return bytes;
  };
  refused(decode_hello, longer(hello), "1 bytes too many");
  refused(decode_hello, shorter(hello), "32 bytes wanted, 31 left");
  const Bytes proof(sizeof(Proof), 7);
  refused(decode_proof, longer(proof), "1 bytes too many");
  refused(decode_proof, shorter(proof), "32 bytes wanted, 31 left");
  const Bytes join = encode(Join{});
  refused(decode_join, longer(join), "1 bytes too many");
  refused(decode_join, shorter(join), "4 bytes wanted, 3 left");
  const Bytes directory = encode(Directory{});
  refused(decode_directory, longer(directory), "1 bytes too many");
  refused(decode_directory, shorter(directory), "4 bytes wanted, 3 left");

  Join twice;
  twice.options = {{"a", ""}, {"b", ""}};
  Bytes bytes = encode(twice);
  *std::find(bytes.begin(), bytes.end(), 'b') = 'a';
  refused(decode_join, bytes, "an option twice");

  for (const uint16_t kind : {uint16_t{0}, uint16_t{15}, uint16_t{65535}}) {
    Bytes error = encode(base::Error{});
    std::memcpy(error.data(), &kind, 2);
    protocol_error_of([&] { decode_error(error); });
  }
}
