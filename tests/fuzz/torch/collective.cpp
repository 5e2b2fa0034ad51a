#include <algorithm>
#include <array>
#include <string>

#include "../src/collective/message.h"
#include "targets.h"

namespace distrain::fuzz {

namespace {

using collective::OpKind;

void run_collective(Input input) {
  const MemoryLimit limit(kSmall + 4 * input.size(), "a multiple of the message");
  if (const auto spec = collective::decode_header(input)) {
    check(!collective::describe(*spec).empty(), "any operation has a name");
    std::array<uint8_t, collective::kHeaderBytes> again;
    collective::encode_header(*spec, input[7], again.data());
    check(collective::decode_header(again) == spec, "an encoded operation decodes to itself");
    // Bytes 12 to 15 are not compared, because they are reserved for later versions.
    check(std::equal(again.begin(), again.begin() + 12, input.begin()),
          "the header is what was read");
    check(std::equal(again.begin() + 16, again.begin() + 24, input.begin() + 16),
          "the header is what was read");
  }
  const base::Error error = collective::decode_refusal(input);
  check(error.message.size() <= input.size(), "a refusal has no more text than came");
  const std::string again = collective::encode_refusal(error);
  const base::Error same =
      collective::decode_refusal({reinterpret_cast<const uint8_t*>(again.data()), again.size()});
  check(same.kind == error.kind && same.message == error.message,
        "an encoded refusal decodes to itself");
}

std::vector<Bytes> collective_seeds() {
  std::vector<Bytes> seeds;
  for (const OpKind kind :
       {OpKind::kBarrier, OpKind::kBroadcast, OpKind::kAllgather, OpKind::kAllreduceDirect,
        OpKind::kAllreduceChunked, OpKind::kReduceScatter, OpKind::kAllToAll, OpKind::kGather,
        OpKind::kScatter, OpKind::kReduce, OpKind::kBarrierShared, OpKind::kAllreduceShared,
        OpKind::kAllreduceInPlace, OpKind::kTransfer, OpKind::kAllreduceOverHosts}) {
    Bytes bytes(collective::kHeaderBytes + 8);
    collective::encode_header({kind, collective::ReduceOp::MAX, c10::ScalarType::Float, 1, 8}, 1,
                              bytes.data());
    seeds.push_back(std::move(bytes));
  }
  const std::string refusal = collective::encode_refusal(
      {base::ErrorKind::kInvalid, "allreduce(sum) beside broadcast", 2, {}});
  seeds.emplace_back(refusal.begin(), refusal.end());
  return seeds;
}

}  // namespace

const Target kCollective{"collective", run_collective, collective_seeds};

}  // namespace distrain::fuzz
