#include "distrain/wire/handshake.h"

#include "distrain/wire/frame.h"
#include "distrain/wire/limits.h"

namespace distrain::wire {

namespace {

using Options = std::map<std::string, std::string>;

void put(Writer& out, const Endpoint& endpoint) {
  out.put(endpoint.host);
  out.put(endpoint.port);
  out.put(endpoint.unix_name);
  out.put(endpoint.host_key);
  out.put(endpoint.cpus);
}

Endpoint get_endpoint(Reader& in) {
  Endpoint endpoint;
  endpoint.host = in.get_string();
  endpoint.port = in.get<uint16_t>();
  endpoint.unix_name = in.get_string();
  endpoint.host_key = in.get_string();
  endpoint.cpus = in.get<uint64_t>();
  return endpoint;
}

void put(Writer& out, const Options& options) {
  out.put(static_cast<uint32_t>(options.size()));
  for (const auto& [name, value] : options) {
    out.put(name);
    out.put(value);
  }
}

Options get_options(Reader& in) {
  Options options;
  const uint32_t count = in.get_count(2 * sizeof(uint32_t));
  for (uint32_t i = 0; i < count; ++i) {
    std::string name(in.get_string());
    if (!options.emplace(std::move(name), in.get_string()).second) {
      Reader::fail("an option twice");
    }
  }
  return options;
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
  Bytes bytes;
  Writer out(bytes);
  out.put(kProtocolVersion);
  out.put(hello.purpose);
  out.put(hello.trust);
  out.put(hello.rank);
  out.put(hello.generation);
  out.put(hello.incarnation);
  bytes.insert(bytes.end(), hello.job_id.begin(), hello.job_id.end());
  bytes.insert(bytes.end(), hello.nonce.begin(), hello.nonce.end());
  return bytes;
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
  hello.rank = in.get<int32_t>();
  hello.generation = in.get<uint32_t>();
  hello.incarnation = in.get<uint32_t>();
  in.copy_to(hello.job_id);
  in.copy_to(hello.nonce);
  in.expect_end();
  return hello;
}

Proof decode_proof(std::span<const uint8_t> bytes) {
  Reader in(bytes);
  Proof proof;
  in.copy_to(proof);
  in.expect_end();
  return proof;
}

Bytes encode(const Join& join) {
  Bytes bytes;
  Writer out(bytes);
  out.put(join.job);
  out.put(join.world_size);
  put(out, join.endpoint);
  put(out, join.options);
  return bytes;
}

Join decode_join(std::span<const uint8_t> bytes) {
  Reader in(bytes);
  Join join;
  join.job = in.get_string();
  join.world_size = in.get<int32_t>();
  join.endpoint = get_endpoint(in);
  join.options = get_options(in);
  in.expect_end();
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
    entry.endpoint = get_endpoint(in);
    entry.incarnation = in.get<uint32_t>();
    entry.is_here = in.get<bool>();
    directory.ranks.push_back(std::move(entry));
  }
  directory.options = get_options(in);
  directory.secret = in.get_string();
  in.expect_end();
  return directory;
}

Bytes encode(const Returned& returned) {
  Bytes bytes;
  Writer out(bytes);
  put(out, returned.endpoint);
  encode(returned.devices, out);
  return bytes;
}

Returned decode_returned(std::span<const uint8_t> bytes) {
  Reader in(bytes);
  Returned returned;
  returned.endpoint = get_endpoint(in);
  returned.devices = decode_rank_devices(in);
  in.expect_end();
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
  Bytes bytes;
  Writer out(bytes);
  out.put(static_cast<uint16_t>(error.kind));
  out.put(error.rank);
  out.put(std::string_view(start(error.message)));
  out.put(std::string_view(start(error.op)));
  return bytes;
}

base::Error decode_error(std::span<const uint8_t> bytes) {
  Reader in(bytes);
  base::Error error;
  const uint16_t kind = in.get<uint16_t>();
  if (!base::is_known_kind(kind)) Reader::fail("an unknown error kind");
  error.kind = static_cast<base::ErrorKind>(kind);
  error.rank = in.get<int32_t>();
  error.message = in.get_string();
  error.op = in.get_string();
  in.expect_end();
  return error;
}

}  // namespace distrain::wire
