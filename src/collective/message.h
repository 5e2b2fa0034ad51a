#pragma once

#include <cstddef>
#include <span>

#include <c10/core/ScalarType.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include "distrain/collective/pass_number.h"

namespace distrain::collective {

using ReduceOp = c10d::ReduceOp::RedOpType;

/// The kind of an operation, including the algorithm. The numbers are part of the wire format.
enum class OpKind : uint8_t {
  kBarrier = 1,
  kBroadcast = 2,
  kAllgather = 3,
  kAllreduceDirect = 4,
  kAllreduceChunked = 5,
  kRefusal = 6,  ///< an error, from a rank that does not take part in the operation
  kReduceScatter = 7,
  kAllToAll = 8,  ///< `bytes` may differ between the ranks
  kGather = 9,
  kScatter = 10,
  kReduce = 11,
  kBarrierShared = 12,       ///< this and the next two by marks in a SharedSpace
  kAllreduceShared = 13,     ///< of tensors that are copied to slots, as a whole or in chunks
  kAllreduceInPlace = 14,    ///< of tensors from SharedSpace::allocate()
  kTransfer = 15,            ///< a send and its recv; `root` is their tag
  kAllreduceOverHosts = 16,  ///< in each host, then over the `root` hosts
};

/// The parameters of an operation, on which all ranks must agree.
struct OpSpec {
  OpKind kind = OpKind::kBarrier;
  ReduceOp reduce_op = ReduceOp::UNUSED;
  c10::ScalarType dtype = c10::ScalarType::Undefined;
  uint32_t root = 0;   ///< rank within the group; 0 if the operation has no root
  uint64_t bytes = 0;  ///< size of the whole tensor on one rank
  PassNumber pass;     ///< need not be equal: see PassNumber::agrees_with
  uint64_t place = 0;  ///< of this rank's tensor in a SharedSpace; need not be equal
  friend bool operator==(const OpSpec&, const OpSpec&) = default;
};

/// Returns text such as "allreduce(sum, Float, 544 bytes)".
std::string describe(const OpSpec& spec);
/// Returns the operation's name without the algorithm, such as "allreduce".
const char* kind_name(OpKind kind);

/// Each message starts with a header (struct Header in message.cpp), whose size keeps the data
/// aligned. The data is a tensor or chunk, or the error kind (2 bytes) and text of a refusal.
inline constexpr size_t kHeaderBytes = 64;

void encode_header(const OpSpec& spec, int step, uint8_t* out);

/// Returns the OpSpec of a received message, or nullopt if the message has no valid header.
std::optional<OpSpec> decode_header(std::span<const uint8_t> payload);

/// If `is_relayed`, the refusal says that `error.rank` is the cause, else its sender is.
std::string encode_refusal(const base::Error& error, bool is_relayed = false);

base::Error decode_refusal(std::span<const uint8_t> payload);

}  // namespace distrain::collective
