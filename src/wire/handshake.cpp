#include "distrain/wire/handshake.h"

#include "distrain/wire/frame.h"
#include "distrain/wire/limits.h"

namespace distrain::wire {

namespace {

using Options = std::map<std::string, std::string>;

// A value on its way out and in, for each type that a message is made of.
template <class T>
void put(Writer& out, const T& value) {
  out.put(value);
}
template <size_t N>
void put(Writer& out, const std::array<uint8_t, N>& bytes) {
  for (const uint8_t byte : bytes) out.put(byte);
}
template <Scalar T>
void get(Reader& in, T& value) {
  value = in.get<T>();
}
template <size_t N>
void get(Reader& in, std::array<uint8_t, N>& bytes) {
  in.copy_to(bytes);
}
void get(Reader& in, std::string& text) { text = in.get_string(); }

void put(Writer& out, const Endpoint& endpoint) {
  out.put(endpoint.host);
  out.put(endpoint.port);
  out.put(endpoint.unix_name);
  out.put(endpoint.host_key);
  out.put(endpoint.cpus);
}
void get(Reader& in, Endpoint& endpoint) {
  get(in, endpoint.host);
  get(in, endpoint.port);
  get(in, endpoint.unix_name);
  get(in, endpoint.host_key);
  get(in, endpoint.cpus);
}

void put(Writer& out, const Options& options) {
  out.put(static_cast<uint32_t>(options.size()));
  for (const auto& [name, value] : options) {
    out.put(name);
    out.put(value);
  }
}
void get(Reader& in, Options& options) {
  const uint32_t count = in.get_count(2 * sizeof(uint32_t));
  for (uint32_t i = 0; i < count; ++i) {
    std::string name(in.get_string());
    if (!options.emplace(std::move(name), in.get_string()).second) Reader::fail("an option twice");
  }
}

void put(Writer& out, const RankDevices& devices) { encode(devices, out); }
void get(Reader& in, RankDevices& devices) { devices = decode_rank_devices(in); }

template <class... T>
Bytes encode_all(const T&... values) {
  Bytes bytes;
  Writer out(bytes);
  (put(out, values), ...);
  return bytes;
}

// Of a whole message: nothing may follow the last value.
template <class... T>
void decode_all(Reader& in, T&... values) {
  (get(in, values), ...);
  in.expect_end();
}

void check_version(uint32_t version) {
  if (version == kProtocolVersion) return;
  throw base::Exception(base::ErrorKind::kProtocol, "protocol version: this side speaks " +
                                                        std::to_string(kProtocolVersion) +
                                                        ", the peer " + std::to_string(version) +
                                                        "; run the same distrain on every machine");
}

}  // namespace

Bytes encode(const Hello& hello) {
  return encode_all(kProtocolVersion, hello.purpose, hello.trust, hello.rank, hello.generation,
                    hello.incarnation, hello.job_id, hello.nonce);
}

Hello decode_hello(std::span<const uint8_t> bytes) {
  Reader in(bytes);
  check_version(in.get<uint32_t>());
  Hello hello;
  hello.purpose = in.get<HelloPurpose>();
  if (hello.purpose != HelloPurpose::kJoin && hello.purpose != HelloPurpose::kPeer) {
    Reader::fail("an unknown purpose of a connection");
  }
  hello.trust = in.get<Trust>();
  if (hello.trust < Trust::kToken || hello.trust > Trust::kAnybody) {
    Reader::fail("an unknown kind of trust");
  }
  decode_all(in, hello.rank, hello.generation, hello.incarnation, hello.job_id, hello.nonce);
  return hello;
}

Proof decode_proof(std::span<const uint8_t> bytes) {
  Reader in(bytes);
  Proof proof;
  decode_all(in, proof);
  return proof;
}

Bytes encode(const Join& join) {
  return encode_all(join.job, join.world_size, join.endpoint, join.options);
}

Join decode_join(std::span<const uint8_t> bytes) {
  Reader in(bytes);
  Join join;
  decode_all(in, join.job, join.world_size, join.endpoint, join.options);
  return join;
}

Bytes encode(const Directory& directory) {
  Bytes bytes;
  Writer out(bytes);
  out.put(kProtocolVersion);
  out.put(static_cast<uint32_t>(directory.ranks.size()));
  for (const Directory::Entry& entry : directory.ranks) {
    out.put(entry.name);
    put(out, entry.endpoint);
    out.put(entry.incarnation);
    out.put(static_cast<uint8_t>(entry.is_here));
  }
  put(out, directory.options);
  out.put(directory.secret);
  return bytes;
}

Directory decode_directory(std::span<const uint8_t> bytes) {
  Reader in(bytes);
  check_version(in.get<uint32_t>());
  Directory directory;
  const uint32_t count = in.get_count(4 * sizeof(uint32_t) + sizeof(uint16_t) + sizeof(uint64_t));
  directory.ranks.reserve(count);
  for (uint32_t i = 0; i < count; ++i) {
    Directory::Entry entry;
    entry.name = in.get_string();
    get(in, entry.endpoint);
    entry.incarnation = in.get<uint32_t>();
    entry.is_here = in.get<bool>();
    directory.ranks.push_back(std::move(entry));
  }
  decode_all(in, directory.options, directory.secret);
  return directory;
}

Bytes encode(const Returned& returned) { return encode_all(returned.endpoint, returned.devices); }

Returned decode_returned(std::span<const uint8_t> bytes) {
  Reader in(bytes);
  Returned returned;
  decode_all(in, returned.endpoint, returned.devices);
  return returned;
}

void encode(const RankDevices& devices, Writer& out) {
  encode(devices.home, out);
  out.put(devices.type);
  out.put(devices.count);
  out.put(static_cast<uint32_t>(devices.maps.size()));
  for (const RankDevices::Map& map : devices.maps) {
    out.put(map.peer);
    encode(map.from, out);
    encode(map.to, out);
  }
}

RankDevices decode_rank_devices(Reader& in) {
  RankDevices devices;
  devices.home = decode_device(in);
  devices.type = in.get<DeviceType>();
  if (devices.type > DeviceType::kPrivate) Reader::fail("an unknown type of device");
  devices.count = in.get<uint8_t>();
  const uint32_t count = in.get_count(2 * sizeof(uint32_t));
  for (uint32_t i = 0; i < count; ++i) {
    RankDevices::Map map;
    map.peer = in.get_string();
    map.from = decode_device(in);
    map.to = decode_device(in);
    devices.maps.push_back(std::move(map));
  }
  return devices;
}

Bytes encode(const std::vector<RankDevices>& devices) {
  Bytes bytes;
  Writer out(bytes);
  out.put(static_cast<uint32_t>(devices.size()));
  for (const RankDevices& of_rank : devices) encode(of_rank, out);
  return bytes;
}

std::vector<RankDevices> decode_all_devices(std::span<const uint8_t> bytes) {
  Reader in(bytes);
  std::vector<RankDevices> devices;
  const uint32_t count = in.get_count(4 * sizeof(uint16_t));
  devices.reserve(count);
  for (uint32_t i = 0; i < count; ++i) devices.push_back(decode_rank_devices(in));
  in.expect_end();
  return devices;
}

Bytes encode(const base::Error& error) {
  const auto start = [](const std::string& text) {  // of a text that nobody reads to its end
    if (text.size() <= kMostErrorText) return text;
    size_t end = kMostErrorText;
    while (end > 0 && (static_cast<unsigned char>(text[end]) & 0xc0) == 0x80) --end;  // UTF-8
    return text.substr(0, end) + " …";
  };
  return encode_all(error.kind, error.rank, start(error.message), start(error.op));
}

base::Error decode_error(std::span<const uint8_t> bytes) {
  Reader in(bytes);
  base::Error error;
  const uint16_t kind = in.get<uint16_t>();
  if (!base::is_known_kind(kind)) Reader::fail("an unknown error kind");
  error.kind = static_cast<base::ErrorKind>(kind);
  decode_all(in, error.rank, error.message, error.op);
  return error;
}

}  // namespace distrain::wire
