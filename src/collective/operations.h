#pragma once

#include "core.h"
#include "shared_space.h"

namespace distrain::collective {

// Note [Algorithms]
//
// n ranks have B bytes each. Most groups are small (2 to 8), and their ranks send to each other
// directly.
//
// Exchanges (exchange.cpp): each rank sends a message to each other rank, n(n-1) messages in one
// hop: barrier (a header), allgather (B), direct allreduce (B; each rank reduces all n inputs
// itself), reduce-scatter and all-to-all (B/n to each rank). A rank sends (n-1)B or B(n-1)/n, which
// is minimal except for the allreduce. Log-step barriers need fewer messages (n log n), but log n
// hops, and a hop costs more: about 20 µs to wake a thread, against 5 µs of work for a message. In
// broadcast, reduce, gather and scatter only the root and each other rank exchange messages, 2(n-1)
// in all. The direction without data has headers, which show a mismatch to both sides, and bound
// the root's lead.
//
// Rooted allreduce, for barriers and small tensors of more than kMostDirectRanks: each rank sends B
// to rank 0, which reduces all n inputs and sends the result to all. 2(n-1) messages, two hops. A
// tree would spread the work of rank 0 over log n hops, but could not reduce in rank order. Only
// rank 0 hears of all ranks, so if the operation fails there, rank 0 tells the others why.
//
// Chunked allreduce: in step 1, chunk j of n goes to rank j, which reduces its n inputs; in step 2,
// rank j sends the result to all. 2n(n-1) messages, two hops; a rank sends 2B(n-1)/n, the minimum.
// A ring sends as little, but takes 2(n-1) hops and cannot reduce in rank order. (chunked.cpp)
//
// Allreduce over hosts, of large tensors, if each of several hosts has the same number of ranks,
// more than one: in step 1, the ranks of each host reduce a chunk each, as in the chunked
// allreduce; in steps 2 and 3, the ranks with the same chunk do the same over the hosts; in step 4,
// each rank sends its chunk to the ranks of its host. With h hosts, a host sends 2B(h-1)/h to
// others, where the chunked allreduce sends n/h times as much. (chunked.cpp)
//
// If all ranks are on one host, allreduces of up to SharedSpace::kSlotBytes and barriers use
// shared memory instead: Note [Collectives in shared memory] in shared_space.h.
//
// All reductions reduce each element in rank order, over hosts in the order of the hosts' first
// ranks, so the result does not depend on timing.
//
// Direct is better while the (n-1)(n-2)/n * B that it sends more and its n-fold reduction cost less
// than the n(n-1) messages and the hop that it saves. With n = 8 on two cores, 56 messages of 5 µs
// equal 8 * 5.25 * B at about 4 GB/s near 16 KiB. With n = 2 the bytes are the same; only B/2 more
// is reduced and copied, at 10 GB/s: 20 µs pay for 64 KiB.
inline constexpr size_t kDirectBytes = size_t{16} << 10;
inline constexpr size_t kDirectBytesOfTwo = size_t{64} << 10;
inline constexpr int kMostDirectRanks = 8;

using Tensors = std::vector<at::Tensor>;

/// The group ranks on each host. Empty if the hosts have different numbers of ranks, or if there is
/// only one host or one rank on each.
using Hosts = std::vector<std::vector<int>>;
Hosts find_hosts(const rpc::Channel& channel, const Core& core);

/// Creates the allreduce or barrier of `spec.kind` for rank `rank` of a group of `size` ranks,
/// unless it is in shared memory. A barrier has no tensor.
std::shared_ptr<Operation> make_operation(const OpSpec& spec, base::TimePoint deadline, int rank,
                                          int size, const Hosts& hosts, const at::Tensor& tensor);
/// Creates an allreduce of kind kAllreduceChunked, or kAllreduceOverHosts if there are `hosts`.
std::shared_ptr<Operation> make_chunked_allreduce(const OpSpec& spec, base::TimePoint deadline,
                                                  int rank, int size, const Hosts& hosts,
                                                  const at::Tensor& tensor);

/// The tensors of an exchange, each list by group rank. An undefined tensor stands for no data. All
/// ranks exchange messages, or only the root and each other rank if the operation has a root.
struct ExchangePlan {
  bool rooted = false;
  Tensors sends;
  Tensors outputs;    ///< hold the data of the ranks afterwards
  at::Tensor result;  ///< if defined, holds the reduction of the ranks' data instead
};
/// Creates an operation in which each rank sends and receives at most one message to and from each
/// other rank; see Note [Algorithms].
std::shared_ptr<Operation> make_exchange(const OpSpec& spec, base::TimePoint deadline, int rank,
                                         ExchangePlan plan);

/// Creates the operation of one of the three kinds in shared memory. `is_direct`: each rank reduces
/// the whole tensor itself.
std::shared_ptr<Operation> make_shared_operation(const OpSpec& spec, base::TimePoint deadline,
                                                 std::shared_ptr<SharedSpace> space, bool is_direct,
                                                 const at::Tensor& tensor);

inline uint8_t* bytes_of(const at::Tensor& tensor) {
  return static_cast<uint8_t*>(tensor.data_ptr());
}

/// A part of a tensor, in bytes.
struct ByteRange {
  size_t begin = 0;
  size_t size = 0;
};
/// Returns part `index` of `count` equal parts, begun at multiples of 64 bytes. The last ones may
/// be short or empty.
ByteRange chunk_of(const OpSpec& spec, int index, int count);

/// Computes out[i] = inputs[0][i] op inputs[1][i] op …, in this order for each element, so that
/// equal inputs give equal bits on each rank. Integers wrap around. Half and BFloat16 accumulate in
/// float32 and are rounded once, after the division of avg. min and max propagate NaN. `out` may be
/// one of the inputs. All hold `count` aligned elements.
void reduce(ReduceOp op, c10::ScalarType dtype, std::span<const uint8_t* const> inputs,
            size_t count, uint8_t* out);

/// Returns the header and, if it is defined, the tensor behind the header in one buffer.
base::BufferPtr pack(Core& core, const OpSpec& spec, const at::Tensor& tensor);

/// Copies `data`, the elements in row-major order, into a tensor of any strides.
void write_tensor(const at::Tensor& tensor, std::span<const uint8_t> data);

/// Returns true if reduce() supports the pair: all five operations for real floating dtypes; sum
/// and avg for complex; sum, product, min and max for integers and bool (as or, and, and, or).
bool can_reduce(ReduceOp op, c10::ScalarType dtype);

}  // namespace distrain::collective
