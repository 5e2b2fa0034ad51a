#include "message.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>

#include <fmt/format.h>

namespace distrain::collective {

static_assert(std::endian::native == std::endian::little, "the header is written as it lies");

namespace {

constexpr uint32_t kMagic = 0x6c6f6364;  // "dcol"
constexpr size_t kLongestRefusal = 16384;

/// The header on the wire: little-endian members at offsets 0, 4, 5, 6, 7, 8, 12, 16, 24 and 56.
struct Header {
  uint32_t magic = kMagic;
  OpKind kind{};
  ReduceOp reduce_op{};     // c10d's number
  c10::ScalarType dtype{};  // torch's number
  uint8_t step = 0;         // 0 to 3
  uint32_t root = 0;        // in a relayed refusal: the rank that is the cause, plus 1
  uint32_t zero = 0;
  uint64_t bytes = 0;
  PassNumber pass;  // u64 step of the job, forward, again and context; 0 if unknown
  uint64_t place = 0;
};
static_assert(sizeof(Header) == kHeaderBytes);

std::string reduce_op_name(ReduceOp op) {
  constexpr std::array kNames = {"sum", "avg", "product", "min", "max"};
  return op < kNames.size() ? kNames[op] : "reduce operation " + std::to_string(op);
}

std::string dtype_name(c10::ScalarType dtype) {
  return dtype < c10::ScalarType::NumOptions ? c10::toString(dtype)
                                             : "dtype " + std::to_string(int(dtype));
}

/// A kind's name, and the format of its description.
struct KindText {
  OpKind kind;
  const char* name;
  const char* description;
};
const KindText* find_text(OpKind kind) {
  using enum OpKind;
  static constexpr KindText kKinds[] = {
      {kBarrier, "barrier", "barrier"},
      {kBarrierShared, "barrier", "barrier"},
      {kBroadcast, "broadcast", "broadcast(root {root}, {tensor})"},
      {kAllgather, "allgather", "allgather({tensor})"},
      {kReduceScatter, "reduce_scatter", "reduce_scatter({op}, {tensor})"},
      {kAllToAll, "all_to_all", "all_to_all({dtype})"},
      {kGather, "gather", "gather(root {root}, {tensor})"},
      {kScatter, "scatter", "scatter(root {root}, {tensor})"},
      {kReduce, "reduce", "reduce({op}, root {root}, {tensor})"},
      {kTransfer, "send/recv", "send/recv(tag {tag}, {tensor})"},
      {kAllreduceDirect, "allreduce", "allreduce({op}, {tensor})"},
      {kAllreduceShared, "allreduce", "allreduce({op}, {tensor})"},
      {kAllreduceInPlace, "allreduce", "allreduce in place({op}, {tensor})"},
      {kAllreduceChunked, "allreduce", "allreduce in chunks({op}, {tensor})"},
      {kAllreduceOverHosts, "allreduce", "allreduce over {root} hosts({op}, {tensor})"},
      {kRefusal, "collective", "refusal"}};
  const auto* const found = std::ranges::find(kKinds, kind, &KindText::kind);
  return found == std::end(kKinds) ? nullptr : found;
}

}  // namespace

const char* kind_name(OpKind kind) {
  const KindText* const found = find_text(kind);
  return found ? found->name : "collective";
}

std::string describe(const OpSpec& spec) {
  const KindText* const found = find_text(spec.kind);
  if (!found) return "unknown operation " + std::to_string(int(spec.kind));
  const std::string dtype = dtype_name(spec.dtype);
  return fmt::format(fmt::runtime(found->description),
                     fmt::arg("op", reduce_op_name(spec.reduce_op)), fmt::arg("root", spec.root),
                     fmt::arg("tag", static_cast<int>(spec.root)), fmt::arg("dtype", dtype),
                     fmt::arg("tensor", fmt::format("{}, {} bytes", dtype, spec.bytes)));
}

void encode_header(const OpSpec& spec, int step, uint8_t* out) {
  const Header header{.kind = spec.kind,
                      .reduce_op = spec.reduce_op,
                      .dtype = spec.dtype,
                      .step = static_cast<uint8_t>(step),
                      .root = spec.root,
                      .bytes = spec.bytes,
                      .pass = spec.pass,
                      .place = spec.place};
  std::memcpy(out, &header, sizeof header);
}

std::optional<OpSpec> decode_header(std::span<const uint8_t> payload) {
  Header header;
  if (payload.size() < sizeof header) return std::nullopt;
  std::memcpy(&header, payload.data(), sizeof header);
  if (header.magic != kMagic) return std::nullopt;
  return OpSpec{header.kind,  header.reduce_op, header.dtype, header.root,
                header.bytes, header.pass,      header.place};
}

std::string encode_refusal(const base::Error& error, bool is_relayed) {
  std::string payload(kHeaderBytes + sizeof(uint16_t), '\0');
  const OpSpec spec{.kind = OpKind::kRefusal,
                    .root = is_relayed ? static_cast<uint32_t>(error.rank + 1) : 0};
  encode_header(spec, 0, reinterpret_cast<uint8_t*>(payload.data()));
  const auto kind = static_cast<uint16_t>(error.kind);
  std::memcpy(payload.data() + kHeaderBytes, &kind, sizeof kind);
  payload.append(error.message, 0, kLongestRefusal);
  return payload;
}

base::Error decode_refusal(std::span<const uint8_t> payload) {
  base::Error error;
  uint16_t kind = 0;
  if (const auto spec = decode_header(payload)) {
    error.rank = static_cast<int>(std::min(spec->root, uint32_t{INT32_MAX})) - 1;
  }
  payload = payload.subspan(std::min(payload.size(), kHeaderBytes));
  if (payload.size() >= sizeof kind) {
    std::memcpy(&kind, payload.data(), sizeof kind);
    payload = payload.subspan(sizeof kind);
  }
  if (base::is_known_kind(kind)) error.kind = static_cast<base::ErrorKind>(kind);
  payload = payload.first(std::min(payload.size(), kLongestRefusal));
  error.message.assign(reinterpret_cast<const char*>(payload.data()), payload.size());
  return error;
}

}  // namespace distrain::collective
