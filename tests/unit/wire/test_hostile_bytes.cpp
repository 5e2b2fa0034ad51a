// ctest: timeout=120
// Tests bytes from a broken or hostile peer. A decoder must accept them or throw `protocol`, and
// must allocate at most a fixed multiple of its input.
#include <algorithm>
#include <memory>

#include "counting_new.h"
#include "decoders.h"
#include "random_messages.h"
#include "support/catch.h"

using namespace distrain;
using namespace distrain::wire;

namespace {

constexpr int kInputs = kUnderSanitizer ? 10'000 : 60'000;  // inputs of each kind for each decoder

using Try = bool (*)(std::span<const uint8_t>);

struct Decoder {
  const char* name;
  Try decode;
  Bytes (*valid)(RandomMessages&);
};

const Decoder kDecoders[] = {
    {"header", try_header,
     [](RandomMessages& random) {
       Bytes bytes(kHeaderBytes);
       encode_header(random.header(), std::span<uint8_t, kHeaderBytes>(bytes));
       return bytes;
     }},
    {"tensor descriptors", try_tensor_descs,
     [](RandomMessages& random) {
       Bytes bytes;
       Writer out(bytes);
       for (size_t i = random.below(4); i > 0; --i) encode(random.tensor_desc(), out);
       return bytes;
     }},
    {"hello", try_hello, [](RandomMessages& random) { return encode(random.hello()); }},
    {"proof", try_proof,
     [](RandomMessages& random) {
       const Proof proof = random.proof();
       return Bytes(proof.begin(), proof.end());
     }},
    {"join", try_join, [](RandomMessages& random) { return encode(random.join()); }},
    {"directory", try_directory, [](RandomMessages& random) { return encode(random.directory()); }},
    {"devices", try_all_devices,
     [](RandomMessages& random) {
       std::vector<RankDevices> all;
       for (size_t i = random.below(4); i > 0; --i) all.push_back(random.rank_devices());
       return encode(all);
     }},
    {"error", try_error, [](RandomMessages& random) { return encode(random.error()); }},
};

// Returns true if the decoder accepts the bytes. Any exception but `protocol` fails the test.
bool feed(const Decoder& decoder, const Bytes& bytes) {
  // Copies the bytes to an exact-size heap block so that address sanitizer detects an overrun.
  const std::unique_ptr<uint8_t[]> copy(new uint8_t[bytes.size()]);
  std::copy(bytes.begin(), bytes.end(), copy.get());
  AllocationCount& count = allocation_count();
  count = {.counting = true};
  bool taken = false;
  bool other = false;
  try {
    taken = decoder.decode({copy.get(), bytes.size()});
  } catch (const base::Exception& e) {
    other = e.kind() != base::ErrorKind::kProtocol;
  } catch (...) {
    other = true;
  }
  count.counting = false;
  // Allows for containers of short strings that grow by doubling, and for an error message.
  const bool too_much = count.bytes > 4096 + 64 * bytes.size();
  if (other || too_much) {
    CAPTURE(decoder.name, bytes.size(), count.bytes, bytes);
    REQUIRE_FALSE(other);
    REQUIRE_FALSE(too_much);
  }
  return taken;
}

}  // namespace

TEST_CASE("valid messages are accepted") {
  for (const Decoder& decoder : kDecoders) {
    RandomMessages random(11);
    for (int i = 0; i < 500; ++i) {
      const Bytes bytes = decoder.valid(random);
      if (std::string_view(decoder.name) == "tensor descriptors") {
        static_cast<void>(feed(decoder, bytes));  // refused if the sizes add up to an overflow
      } else {
        INFO(decoder.name);
        REQUIRE(feed(decoder, bytes));
      }
    }
  }
}

TEST_CASE("a message truncated at any byte is refused") {
  for (const Decoder& decoder : kDecoders) {
    if (std::string_view(decoder.name) == "tensor descriptors") continue;  // any length is valid
    RandomMessages random(12);
    for (int i = 0; i < 20; ++i) {
      const Bytes bytes = decoder.valid(random);
      for (size_t size = 0; size < bytes.size(); ++size) {
        INFO(decoder.name << " cut to " << size << " of " << bytes.size());
        REQUIRE_FALSE(feed(decoder, Bytes(bytes.begin(), bytes.begin() + static_cast<long>(size))));
      }
    }
  }
  RandomMessages random(13);
  for (int i = 0; i < 300; ++i) {
    Bytes bytes;
    Writer out(bytes);
    encode(random.tensor_desc(), out);
    for (size_t size = 1; size < bytes.size(); ++size) {
      REQUIRE_FALSE(
          feed(kDecoders[1], Bytes(bytes.begin(), bytes.begin() + static_cast<long>(size))));
    }
  }
}

TEST_CASE("random bytes are accepted or refused without harm") {
  for (const Decoder& decoder : kDecoders) {
    RandomMessages random(14);
    for (int i = 0; i < kInputs; ++i) {
      Bytes bytes = random.noise(i % 100 == 0 ? 2000 : 120);
      if (i % 2 == 0 && bytes.size() >= 4) {  // passes the decoder's first check
        const uint32_t start = decoder.decode == try_header ? kMagic : kProtocolVersion;
        std::memcpy(bytes.data(), &start, 4);
        if (decoder.decode == try_header && i % 4 == 0) add_hash(bytes);
      }
      static_cast<void>(feed(decoder, bytes));
    }
  }
}

TEST_CASE("damaged messages are accepted or refused without harm") {
  for (const Decoder& decoder : kDecoders) {
    RandomMessages random(15);
    int taken = 0;
    for (int i = 0; i < kInputs / 10; ++i) {
      const Bytes valid = decoder.valid(random);
      for (int variant = 0; variant < 10; ++variant) {
        Bytes bytes = valid;
        random.mutate(bytes);
        if (decoder.decode == try_header && variant % 2 == 0 && bytes.size() >= sizeof kMagic) {
          std::memcpy(bytes.data(), &kMagic, sizeof kMagic);
          add_hash(bytes);  // otherwise hardly any input would pass the check of the hash
        }
        taken += feed(decoder, bytes);
      }
    }
    CHECK(taken < kInputs);
  }
}
