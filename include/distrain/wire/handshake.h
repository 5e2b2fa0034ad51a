#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "distrain/base/error.h"
#include "distrain/wire/codec.h"
#include "distrain/wire/tensor_desc.h"

namespace distrain::wire {

// The life of a job's connections; `r` and `s` are any ranks but 0.
//
// Control, between rank 0 and each other rank, from the first moment to the last: it is never
// behind the bytes of calls.
//
//   r → 0  kHello (join)  who I am, what I was told, where I can be reached
//   0 → r  kReject        a mismatch: names the field and both values; r ends, 0 goes on waiting
//   0 → r  kDirectory     once all are there: everybody's address, rank 0's options, the secret
//   that
//                         all connections between ranks show from here on
//   r → 0  kPrepared      r can be called; with it the devices of r
//   0 → r  kGo            all ranks can be called, and these are everybody's devices
//   r → 0  kLost          r sees that rank `call_id` is lost; the body is the error
//   0 → r  kLost          so it is, for all
//   r → 0  kFlush         r has come to round `call_id` of the end, with the number `context_id`
//   0 → r  kFlush         all have come to it, and this is the sum of their numbers
//
// Calls, between any two ranks, made by the one that first has something to send:
//
//   r → s  kHello (peer)  on a connection of its own; then calls, replies, chunks, one-way messages
//   s → r  kReject        only if s refuses it
//
// On each of them, either way:
//
//   kHeartbeat            I am alive
//   kAbort                I leave, because of the error in the body
//   kLeave                I leave, as all is done
//
// The bodies of hello and directory begin with the protocol version, so that a later version can
// still be named.

enum class HelloPurpose : uint8_t { kJoin = 1, kPeer = 2 };

struct Endpoint {
  std::string host;       ///< numeric, as others reach it; empty: where rank 0 is reached
  uint16_t port = 0;      ///< TCP
  std::string unix_name;  ///< of its unix socket; may be empty
  std::string host_key;   ///< equal for ranks that share a kernel and a network namespace
};

/// u32 version · u8 purpose · string job_id · i32 rank · i32 world_size (0: follow rank 0) ·
/// Endpoint · options (u32 count, then name, value) · string proof (peer: the directory's secret)
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

/// u32 version · u32 count · count × (string name · Endpoint) · options of rank 0 · string secret
struct Directory {
  struct Entry {
    std::string name;
    Endpoint endpoint;
  };
  std::vector<Entry> ranks;
  std::map<std::string, std::string> options;
  std::string secret;  ///< of this job's ranks, made by rank 0; 16 random bytes
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

/// The body of kPrepared.
void encode(const RankDevices& devices, Writer& out);
RankDevices decode_rank_devices(Reader& in);

/// The body of kGo: u32 count · count × RankDevices, by rank.
Bytes encode(const std::vector<RankDevices>& devices);

Bytes encode(const Hello& hello);
Bytes encode(const Directory& directory);

/// u16 kind · i32 rank · string message · string op, which are cut at kMostErrorText. The body of
/// kReject, kError, kAbort and kLost.
Bytes encode(const base::Error& error);

// Each throws `protocol` if the bytes are malformed, and for another protocol version names both.
Hello decode_hello(std::span<const uint8_t> in);
Directory decode_directory(std::span<const uint8_t> in);
std::vector<RankDevices> decode_all_devices(std::span<const uint8_t> in);
base::Error decode_error(std::span<const uint8_t> in);

}  // namespace distrain::wire
