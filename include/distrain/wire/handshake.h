#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "distrain/base/error.h"
#include "distrain/wire/codec.h"
#include "distrain/wire/tensor_desc.h"

namespace distrain::wire {

// The life of a job's connections; `r` is any rank but 0.
//
//   r → 0  kHello (join)  who I am, what I was told, where I can be reached
//   0 → r  kReject        a mismatch: names the field and both values; r ends, 0 goes on waiting
//   0 → r  kDirectory     once all are there: everybody's address, and rank 0's options
//   r → s  kHello (peer)  for every s < r, on a connection of its own: the one used from now on
//   s → r  kReject        only if s refuses it
//   r → 0  kMeshReady     on the joining connection: r has said hello to all below it, and all
//                         above it have said hello to r; with it the devices of r
//   0 → r  kGo            all ranks are ready, and these are everybody's devices; the joining
//                         connection is closed by r
//
// The bodies of hello and directory begin with the protocol version, so that a later version can
// still be named.

enum class HelloPurpose : uint8_t { kJoin = 1, kPeer = 2 };

struct Endpoint {
  std::string host;       ///< as others reach it; empty: where rank 0 is reached
  uint16_t port = 0;      ///< TCP
  std::string unix_path;  ///< may be empty
  std::string host_key;   ///< equal for ranks that share a kernel and a network namespace
};

/// u32 version · u8 purpose · string job_id · i32 rank · i32 world_size (0: follow rank 0) ·
/// Endpoint · options (u32 count, then name, value) · string proof (of the job token; empty yet)
struct Hello {
  uint32_t version = 0;
  HelloPurpose purpose = HelloPurpose::kJoin;
  std::string job_id;
  int32_t rank = -1;
  int32_t world_size = 0;
  Endpoint endpoint;
  std::map<std::string, std::string> options;  ///< job options that this rank was given
  std::string proof;
};

/// u32 version · u32 count · count × (string name · Endpoint) · options of rank 0
struct Directory {
  struct Entry {
    std::string name;
    Endpoint endpoint;
  };
  std::vector<Entry> ranks;
  std::map<std::string, std::string> options;
};

/// What a rank says of its devices: where the tensors of others arrive, and where its own go.
///
///   device home · device type of `count` (as u8) · u8 count · u32 maps, each: string peer · device
///   from · device to
struct RankDevices {
  struct Map {
    std::string peer;  ///< a rank's name
    DeviceRef from;    ///< of this rank
    DeviceRef to;      ///< of the peer
  };

  DeviceRef home;                      ///< the CPU: it has none of its own
  DeviceType type = DeviceType::kCpu;  ///< of which it has `count`
  uint8_t count = 0;
  std::vector<Map> maps;
};

/// The body of kMeshReady.
void encode(const RankDevices& devices, Writer& out);
RankDevices decode_rank_devices(Reader& in);

/// The body of kGo: u32 count · count × RankDevices, by rank.
Bytes encode(const std::vector<RankDevices>& devices);

Bytes encode(const Hello& hello);
Bytes encode(const Directory& directory);

/// u16 kind · i32 rank · string message · string op. The body of kReject, kError and kAbort.
Bytes encode(const base::Error& error);

// Each throws `protocol` if the bytes are malformed, and for another protocol version names both.
Hello decode_hello(std::span<const uint8_t> in);
Directory decode_directory(std::span<const uint8_t> in);
std::vector<RankDevices> decode_all_devices(std::span<const uint8_t> in);
base::Error decode_error(std::span<const uint8_t> in);

}  // namespace distrain::wire
