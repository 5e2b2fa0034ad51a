#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include <c10/core/ScalarType.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include "distrain/base/error.h"
#include "distrain/collective/pass_number.h"

namespace distrain::collective {

using ReduceOp = c10d::ReduceOp::RedOpType;

/// What an operation is, the algorithm included. The numbers are part of the wire format.
enum class OpKind : uint8_t {
  kBarrier = 1,
  kBroadcast = 2,
  kAllgather = 3,
  kAllreduceDirect = 4,
  kAllreduceChunked = 5,
  kRefusal = 6,  ///< in place of an operation: its sender takes no part, for the error that follows
};

/// What all ranks must agree on for one operation.
struct OpSpec {
  OpKind kind = OpKind::kBarrier;
  ReduceOp reduce_op = ReduceOp::UNUSED;
  c10::ScalarType dtype = c10::ScalarType::Undefined;
  uint32_t root = 0;   ///< rank within the group; 0 where there is none
  uint64_t bytes = 0;  ///< of the whole tensor on one rank
  PassNumber pass;     ///< only has to agree
  friend bool operator==(const OpSpec&, const OpSpec&) = default;
};

/// "allreduce(sum, Float, 544 bytes)"
std::string describe(const OpSpec& spec);
/// The operation alone: "allreduce", however it is done.
const char* kind_name(OpKind kind);

/// Each message starts with these 64 bytes, so that the data behind stays aligned (little-endian):
///
///   offset  bytes  field
///        0      4  magic "dcol"
///        4      1  OpKind
///        5      1  reduce operation, c10d's number
///        6      1  dtype, c10::ScalarType's number
///        7      1  step: 0 or 1
///        8      4  root
///       12      4  zero
///       16      8  bytes
///       24      8  pass: step of the job; 0 where it is not known, as each of these
///       32      8  pass: forward
///       40      8  pass: passes since that forward
///       48      8  pass: autograd context
///       56      8  zero
///
/// A tensor or a chunk of it follows; behind a refusal the error kind (2 bytes) and the text.
inline constexpr size_t kHeaderBytes = 64;

void encode_header(const OpSpec& spec, int step, uint8_t* out);

/// The specification of a received message, or nothing when its first 64 bytes are not a header.
std::optional<OpSpec> decode_header(std::span<const uint8_t> payload);

/// The whole payload of a refusal.
std::string encode_refusal(const base::Error& error);

/// The error in a refusal's payload.
base::Error decode_refusal(std::span<const uint8_t> payload);

}  // namespace distrain::collective
