#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "distrain/wire/tensor_desc.h"

namespace distrain::wire {

// The messages on a job's connections.
//
// Each connection begins with proofs: Note [Identity] in src/membership/proof.h. Rank `i` opens the
// connection, rank `s` accepts it.
//
//   i → s  kHello   the identity of i, with a nonce
//   s → i  kHello   the identity of s, with a nonce
//   i → s  kProof   proves that i knows the key of this connection
//   s → i  kProof   proves that s knows the key
//   s → i  kReject  instead of a kHello or kProof; tells only the protocol version
//
// Control connection between rank 0 and each other rank `r`. Calls never delay its messages:
//
//   r → 0  kJoin          the options of r and its endpoint
//   0 → r  kJoined        r is admitted and waits for the others. A process that sent
//                         kUnassignedRank does not join: rank `call_id` is reserved for it while
//                         this connection is open
//   0 → r  kReject        r is refused; for a mismatch, names the field and both values
//   0 → r  kDirectory     all ranks have joined: their endpoints, rank 0's options, and the secret
//                         for proofs on connections between ranks
//   r → 0  kPrepared      r can be called; the body has the devices of r
//   0 → r  kGo            all ranks can be called; the body has the devices of all ranks
//   r → 0  kLost          r has lost incarnation `context_id` of rank `call_id`; body: the error
//   0 → r  kLost          rank `call_id` is lost; if `context_id` is 1, the job continues
//   0 → r  kReturned      a new process replaces the lost rank `call_id`, with incarnation
//                         `context_id`, and gets kGo when all ranks know it; body: a Returned
//   r → 0  kKnown         r knows the new process of rank `call_id`, incarnation `context_id`
//   r → 0  kFlush         r enters round `call_id` of the shutdown with the number `context_id`
//   0 → r  kFlush         all ranks have entered that round; `context_id` is their numbers' sum
//
// Connection for calls between two ranks, opened by the first rank that has something to send. The
// accepting rank s may refuse it with a kReject that has a reason. A bulk connection has the
// proofs, and then the payloads of frames with kInBulk, from i to s.
//
// On the first two kinds of connection, in both directions:
//
//   kHeartbeat            the sender is alive
//   kAbort                the sender exits because of the error in the body
//   kLeave                the sender exits because its work is done
//
// The bodies of hello and directory begin with the protocol version, so that errors can name it.

enum class HelloPurpose : uint8_t { kJoin = 1, kPeer = 2, kBulk = 3 };

/// The condition on which a rank trusts a peer, in addition to the peer's proof of identity.
enum class Trust : uint8_t {
  kToken = 1,     ///< the peer knows the job's token
  kSameUser = 2,  ///< the peer's process is on this host and belongs to this user
  kAnybody = 3,   ///< no condition
};

using JobId = std::array<uint8_t, 16>;
using Nonce = std::array<uint8_t, 32>;
using Proof = std::array<uint8_t, 32>;

/// Stands for the rank of a process to which rank 0 has not assigned a rank yet.
inline constexpr int32_t kUnassignedRank = -1;

/// The generation that a rank sends if it accepts any generation of rank 0.
inline constexpr uint32_t kAnyGeneration = 0xFFFF'FFFF;

// Each struct lists its fields in wire order. A vector or map is a u32 count and its items; a u32
// protocol version precedes Hello and Directory.

/// The first message from each end. The connecting end sets `purpose`. 66 bytes with the version.
struct Hello {
  HelloPurpose purpose = HelloPurpose::kJoin;
  Trust trust = Trust::kToken;
  int32_t rank = -1;
  uint32_t generation = 0;   ///< number of restarts of the job; or kAnyGeneration
  uint32_t incarnation = 0;  ///< number of earlier processes of the rank; 0 when it joins
  JobId job_id{};            ///< zero if unknown; the rank then adopts rank 0's id
  Nonce nonce{};
  static constexpr auto kFields =
      std::tuple(&Hello::purpose, &Hello::trust, &Hello::rank, &Hello::generation,
                 &Hello::incarnation, &Hello::job_id, &Hello::nonce);
};

struct Endpoint {
  std::string host;       ///< numeric address for connections; if empty, rank 0's address
  uint16_t port = 0;      ///< TCP port; 0: no TCP
  std::string unix_name;  ///< name of its unix socket; may be empty
  std::string host_key;   ///< equal for ranks that share a kernel and a network namespace
  uint64_t cpus = 0;      ///< equal for ranks that share their CPUs
  static constexpr auto kFields = std::tuple(&Endpoint::host, &Endpoint::port, &Endpoint::unix_name,
                                             &Endpoint::host_key, &Endpoint::cpus);
};

struct Join {
  std::string job;         ///< the name of the job's command
  int32_t world_size = 0;  ///< 0: the rank adopts rank 0's world size
  Endpoint endpoint;
  std::map<std::string, std::string> options;  ///< the job options that this rank was given
  static constexpr auto kFields =
      std::tuple(&Join::job, &Join::world_size, &Join::endpoint, &Join::options);
};

struct Directory {
  struct Entry {
    std::string name;
    Endpoint endpoint;
    uint32_t incarnation = 0;  ///< number of earlier processes of the rank
    bool is_here = true;       ///< false: the rank is lost, and the job continues without it
    static constexpr auto kFields =
        std::tuple(&Entry::name, &Entry::endpoint, &Entry::incarnation, &Entry::is_here);
  };
  std::vector<Entry> ranks;
  std::map<std::string, std::string> options;
  std::string secret;  ///< 32 random bytes, made by rank 0 for the proofs between ranks
  static constexpr auto kFields =
      std::tuple(&Directory::ranks, &Directory::options, &Directory::secret);
};

/// A rank's devices, and the peers' devices to which the rank maps its own devices.
struct RankDevices {
  struct Map {
    std::string peer;  ///< name of the peer's rank
    DeviceRef from;    ///< device of this rank
    DeviceRef to;      ///< device of the peer
    static constexpr auto kFields = std::tuple(&Map::peer, &Map::from, &Map::to);
  };

  DeviceRef home;                      ///< receives tensors unless a map names another device
  DeviceType type = DeviceType::kCpu;  ///< the rank has `count` devices of this type
  uint8_t count = 0;
  std::vector<Map> maps;
  static constexpr auto kFields =
      std::tuple(&RankDevices::home, &RankDevices::type, &RankDevices::count, &RankDevices::maps);
};

/// The body of kReturned: the endpoint and the devices of a process that replaces a lost rank.
struct Returned {
  Endpoint endpoint;
  RankDevices devices;
  static constexpr auto kFields = std::tuple(&Returned::endpoint, &Returned::devices);
};

/// Encodes the body of kPrepared.
Bytes encode(const RankDevices& devices);
/// Encodes the body of kGo: u32 count · count × RankDevices, by rank.
Bytes encode(const std::vector<RankDevices>& devices);
Bytes encode(const Hello& hello);
Bytes encode(const Join& join);
Bytes encode(const Directory& directory);
Bytes encode(const Returned& returned);
/// Encodes a kReject, kError, kAbort or kLost: u16 kind · i32 rank · string message · string op.
Bytes encode(const base::Error& error);

// The decode functions throw `protocol` for malformed bytes or another protocol version.
Hello decode_hello(std::span<const uint8_t> in);
Proof decode_proof(std::span<const uint8_t> in);
Join decode_join(std::span<const uint8_t> in);
Directory decode_directory(std::span<const uint8_t> in);
Returned decode_returned(std::span<const uint8_t> in);
RankDevices decode_rank_devices(std::span<const uint8_t> in);
std::vector<RankDevices> decode_all_devices(std::span<const uint8_t> in);
base::Error decode_error(std::span<const uint8_t> in);

}  // namespace distrain::wire
