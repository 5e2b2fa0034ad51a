#pragma once

#include <array>
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
// Each begins with the proof of Note [Identity] in rpc/identity/handshake.h; `i` connects:
//
//   i → s  kHello   who I am, with a nonce
//   s → i  kHello   the same of s
//   i → s  kProof   that I know the key of this connection
//   s → i  kProof   that I do, too
//   s → i  kReject  instead of its hello or its proof, and says nothing but the protocol version
//
// Control, between rank 0 and each other rank all the time: never behind the bytes of calls.
//
//   r → 0  kJoin          what I was told, where I can be reached
//   0 → r  kJoined        r has its place, and waits for the others. A rank that says kAnyRank does
//                         not join: rank `call_id` is kept for it while this connection is open
//   0 → r  kReject        or a mismatch: names the field and both values; r ends, 0 goes on waiting
//   0 → r  kDirectory     once all are there: everybody's address, rank 0's options, and the secret
//                         that connections between ranks prove from here on
//   r → 0  kPrepared      r can be called; with it the devices of r
//   0 → r  kGo            all ranks can be called, and these are everybody's devices
//   r → 0  kLost          r sees that rank `call_id` is lost, its `context_id`th process; the body
//                         is the error
//   0 → r  kLost          so it is, for all; `context_id` 1: and the job goes on without it
//   0 → r  kReturned      a new process has the place of rank `call_id`, which was lost: its
//                         `context_id`th; the body is a Returned. It is let go on when all know
//   r → 0  kKnown         r knows of that one, by the same numbers
//   r → 0  kFlush         r has come to round `call_id` of the end, with the number `context_id`
//   0 → r  kFlush         all have come to it, and this is the sum of their numbers
//
// Calls, between any two ranks, made by the one that first has something to send: calls, replies,
// chunks, one-way messages; s may say kReject first, with its reason.
//
// On each of them, either way:
//
//   kHeartbeat            I am alive
//   kAbort                I leave, because of the error in the body
//   kLeave                I leave, as all is done
//
// The bodies of hello and directory begin with the protocol version, so that it can be named.

enum class HelloPurpose : uint8_t { kJoin = 1, kPeer = 2 };

/// What makes a rank believe others, besides the proof.
enum class Trust : uint8_t {
  kToken = 1,     ///< they know the job's token
  kSameUser = 2,  ///< their process is this user's, on this host
  kAnybody = 3,   ///< nothing
};

using JobId = std::array<uint8_t, 16>;
using Nonce = std::array<uint8_t, 32>;
using Proof = std::array<uint8_t, 32>;

/// Of a process that is to be whichever rank nobody else is.
inline constexpr int32_t kAnyRank = -1;

/// Of a rank that has not been told, and takes rank 0's.
inline constexpr uint32_t kAnyGeneration = 0xFFFF'FFFF;

/// u32 version · u8 purpose · u8 trust · i32 rank · u32 generation · u32 incarnation · job_id ·
/// nonce: 66 bytes. Who connects says the purpose, and the other end says the same.
struct Hello {
  HelloPurpose purpose = HelloPurpose::kJoin;
  Trust trust = Trust::kToken;
  int32_t rank = -1;
  uint32_t generation = 0;   ///< how often the job was started again; or kAnyGeneration
  uint32_t incarnation = 0;  ///< processes that have had the rank before; who joins knows none
  JobId job_id{};            ///< zero: the rank knows none, and takes rank 0's
  Nonce nonce{};
};

struct Endpoint {
  std::string host;       ///< numeric, as others reach it; empty: where rank 0 is reached
  uint16_t port = 0;      ///< TCP; 0: not by TCP
  std::string unix_name;  ///< of its unix socket; may be empty
  std::string host_key;   ///< equal for ranks that share a kernel and a network namespace
  uint64_t cpus = 0;      ///< equal for ranks that share their CPUs
};

/// string job · i32 world_size (0: rank 0's) · Endpoint · options (u32 count, then name, value)
struct Join {
  std::string job;  ///< what job this is: the name of its command
  int32_t world_size = 0;
  Endpoint endpoint;
  std::map<std::string, std::string> options;  ///< job options that this rank was given
};

/// u32 version · u32 n · n × (string name · Endpoint · u32 incarnation · u8 here) · options ·
/// secret
struct Directory {
  struct Entry {
    std::string name;
    Endpoint endpoint;
    uint32_t incarnation = 0;  ///< as in its hello
    bool is_here = true;       ///< false: it is lost, and the job goes on without it
  };
  std::vector<Entry> ranks;
  std::map<std::string, std::string> options;
  std::string secret;  ///< of this job's ranks, made by rank 0; 32 random bytes
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

/// The body of kReturned: Endpoint · RankDevices.
struct Returned {
  Endpoint endpoint;
  RankDevices devices;
};

/// The body of kPrepared.
void encode(const RankDevices& devices, Writer& out);
RankDevices decode_rank_devices(Reader& in);

/// The body of kGo: u32 count · count × RankDevices, by rank.
Bytes encode(const std::vector<RankDevices>& devices);

Bytes encode(const Hello& hello);
Bytes encode(const Join& join);
Bytes encode(const Directory& directory);
Bytes encode(const Returned& returned);

/// The body of kReject, kError, kAbort and kLost: u16 kind · i32 rank · string message · string op.
Bytes encode(const base::Error& error);

// Each throws `protocol` if the bytes are malformed, and for another protocol version names both.
Hello decode_hello(std::span<const uint8_t> in);
Proof decode_proof(std::span<const uint8_t> in);
Join decode_join(std::span<const uint8_t> in);
Directory decode_directory(std::span<const uint8_t> in);
Returned decode_returned(std::span<const uint8_t> in);
std::vector<RankDevices> decode_all_devices(std::span<const uint8_t> in);
base::Error decode_error(std::span<const uint8_t> in);

}  // namespace distrain::wire
