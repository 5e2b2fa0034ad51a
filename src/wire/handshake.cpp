#include "distrain/wire/handshake.h"

#include "distrain/wire/frame.h"

namespace distrain::wire {
namespace {

template <class T>
concept IsMap = requires {
  typename T::mapped_type;
};
template <class T>
concept IsVector = requires(T value) {
  value.emplace_back();
};

template <class T>
void put(Writer& out, const T& value) {
  if constexpr (requires { T::kFields; }) {
    std::apply([&](const auto... field) { (put(out, value.*field), ...); }, T::kFields);
  } else if constexpr (std::is_same_v<T, DeviceRef>) {
    encode(value, out);
  } else if constexpr (IsMap<T>) {
    put(out, static_cast<uint32_t>(value.size()));
    for (const auto& [name, item] : value) {
      put(out, name);
      put(out, item);
    }
  } else if constexpr (requires { out.put(value); }) {
    out.put(value);
  } else {
    if constexpr (IsVector<T>) put(out, static_cast<uint32_t>(value.size()));
    for (const auto& item : value) put(out, item);
  }
}

void check(bool is_known, const char* what) {
  if (!is_known) Reader::fail(std::string("an unknown ") + what);
}

// Reads `value`. Throws `protocol` for unknown enumerators.
template <class T>
void get(Reader& in, T& value) {
  if constexpr (requires { T::kFields; }) {
    std::apply([&](const auto... field) { (get(in, value.*field), ...); }, T::kFields);
  } else if constexpr (std::is_same_v<T, DeviceRef>) {
    value = decode_device(in);
  } else if constexpr (IsMap<T>) {
    for (uint32_t count = in.get_count(1); count > 0; --count) {
      std::string name(in.get_string());
      if (!value.emplace(std::move(name), in.get_string()).second) Reader::fail("an option twice");
    }
  } else if constexpr (Scalar<T>) {
    value = in.get<T>();
    if constexpr (std::is_same_v<T, HelloPurpose>) {
      check(value >= HelloPurpose::kJoin && value <= HelloPurpose::kBulk,
            "purpose of a connection");
    } else if constexpr (std::is_same_v<T, Trust>) {
      check(value >= Trust::kToken && value <= Trust::kAnybody, "kind of trust");
    } else if constexpr (std::is_same_v<T, DeviceType>) {
      check(value <= DeviceType::kPrivate, "type of device");
    } else if constexpr (std::is_same_v<T, base::ErrorKind>) {
      check(base::is_known_kind(static_cast<uint16_t>(value)), "error kind");
    }
  } else if constexpr (std::is_same_v<T, std::string>) {
    value = in.get_string();
  } else if constexpr (IsVector<T>) {
    // Each item takes at least one byte, so the received bytes bound the count.
    for (uint32_t count = in.get_count(1); count > 0; --count) get(in, value.emplace_back());
  } else {
    in.copy_to(value);
  }
}

// True for messages that begin with the protocol version.
template <class T>
constexpr bool kHasVersion = std::is_same_v<T, Hello> || std::is_same_v<T, Directory>;

template <class... T>
Bytes encode_all(const T&... values) {
  Bytes bytes;
  Writer out(bytes);
  if constexpr ((kHasVersion<T> || ...)) out.put(kProtocolVersion);
  (put(out, values), ...);
  return bytes;
}

// Reads a whole message. Throws `protocol` for another version, malformed bytes or surplus bytes.
template <class... T>
void decode_all(std::span<const uint8_t> bytes, T&... values) {
  Reader in(bytes);
  const auto version = (kHasVersion<T> || ...) ? in.get<uint32_t>() : kProtocolVersion;
  if (version != kProtocolVersion) {
    throw base::Exception(base::ErrorKind::kProtocol,
                          "protocol version: this side speaks " + std::to_string(kProtocolVersion) +
                              ", the peer " + std::to_string(version) +
                              "; run the same distrain on every machine");
  }
  (get(in, values), ...);
  in.expect_end();
}

template <class T>
T decode(std::span<const uint8_t> bytes) {
  T value{};
  decode_all(bytes, value);
  return value;
}

}  // namespace

Bytes encode(const Hello& hello) { return encode_all(hello); }
Bytes encode(const Join& join) { return encode_all(join); }
Bytes encode(const Directory& directory) { return encode_all(directory); }
Bytes encode(const Returned& returned) { return encode_all(returned); }
Bytes encode(const std::vector<RankDevices>& devices) { return encode_all(devices); }
Bytes encode(const RankDevices& devices) { return encode_all(devices); }
Hello decode_hello(std::span<const uint8_t> bytes) { return decode<Hello>(bytes); }
Proof decode_proof(std::span<const uint8_t> bytes) { return decode<Proof>(bytes); }
Join decode_join(std::span<const uint8_t> bytes) { return decode<Join>(bytes); }
Directory decode_directory(std::span<const uint8_t> bytes) { return decode<Directory>(bytes); }
Returned decode_returned(std::span<const uint8_t> bytes) { return decode<Returned>(bytes); }
std::vector<RankDevices> decode_all_devices(std::span<const uint8_t> bytes) {
  return decode<std::vector<RankDevices>>(bytes);
}
RankDevices decode_rank_devices(std::span<const uint8_t> bytes) {
  return decode<RankDevices>(bytes);
}

Bytes encode(const base::Error& error) {
  const auto start = [](const std::string& text) {  // truncates a long text
    if (text.size() <= kMostErrorText) return text;
    size_t end = kMostErrorText;
    while (end > 0 && (static_cast<unsigned char>(text[end]) & 0xc0) == 0x80) --end;  // UTF-8
    return text.substr(0, end) + " …";
  };
  return encode_all(error.kind, error.rank, start(error.message), start(error.op));
}

base::Error decode_error(std::span<const uint8_t> bytes) {
  base::Error error;
  decode_all(bytes, error.kind, error.rank, error.message, error.op);
  return error;
}

}  // namespace distrain::wire
