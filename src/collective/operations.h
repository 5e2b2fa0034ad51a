#pragma once

#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "core.h"
#include "operation.h"

namespace distrain::collective {

// Note [Algorithms]
//
// n ranks have B bytes each and send to each other directly. Groups are small (2 to 8).
//
// Barrier: a header from each rank to each other rank. n(n-1) messages, one hop. Log-step barriers
// need fewer messages (n log n), but log n hops, and a hop costs more: about 20 µs to wake a
// thread, against 5 µs of work for a message.
//
// Broadcast: the root sends B to each rank, and each rank sends its header to the root. 2(n-1)
// messages. Headers show a mismatch to both sides, and bound the root's lead.
//
// Allgather: B from each rank to each other rank. n(n-1) messages; a rank sends (n-1)B: minimal.
//
// Direct allreduce: each rank sends its B to each other rank and reduces all n inputs itself.
// n(n-1) messages, one hop; a rank sends (n-1)B.
//
// Chunked allreduce: in step 1, chunk j of n goes to rank j, which reduces its n inputs; in step 2,
// rank j sends the result to all. 2n(n-1) messages, two hops; a rank sends 2B(n-1)/n, the minimum.
// A ring sends as little, but takes 2(n-1) hops and cannot reduce in rank order.
//
// Both allreduces reduce each element in rank order, so the result does not depend on timing.
//
// Direct is better while the (n-1)(n-2)/n * B that it sends more and its n-fold reduction cost less
// than the n(n-1) messages and the hop that it saves. With n = 8 on two cores, 56 messages of 5 µs
// equal 8 * 5.25 * B at about 4 GB/s near 16 KiB. With n = 2 the bytes are the same; only B/2 more
// is reduced and copied, at 10 GB/s: 20 µs pay for 64 KiB.
inline constexpr size_t kDirectBytes = size_t{16} << 10;
inline constexpr size_t kDirectBytesOfTwo = size_t{64} << 10;

// Memory that is being sent never changes. Small data is copied behind its header into one buffer
// for all ranks. Step 1 of the chunked allreduce sends chunk j from the caller's tensor without a
// copy, because only the result of rank j, which must have received it before, overwrites chunk j.

class BarrierOperation final : public Operation {
 public:
  using Operation::Operation;

 private:
  void start() override;
  void run_step(int) override {}
};

class BroadcastOperation final : public Operation {
 public:
  BroadcastOperation(const OpSpec& spec, base::TimePoint deadline, at::Tensor tensor)
      : Operation(spec, deadline), tensor_(std::move(tensor)) {}

 private:
  bool is_root() const;
  bool expects(int step, int from) const override;
  size_t expected_bytes(int step, int from) const override;
  void start() override;
  void run_step(int step) override;

  const at::Tensor tensor_;
};

class AllgatherOperation final : public Operation {
 public:
  /// One output a rank, each of the input's size.
  AllgatherOperation(const OpSpec& spec, base::TimePoint deadline, at::Tensor input,
                     std::vector<at::Tensor> outputs)
      : Operation(spec, deadline), input_(std::move(input)), outputs_(std::move(outputs)) {}

 private:
  void start() override;
  void run_step(int step) override;

  const at::Tensor input_;
  const std::vector<at::Tensor> outputs_;
  base::BufferPtr sent_;
};

class DirectAllreduce final : public Operation {
 public:
  DirectAllreduce(const OpSpec& spec, base::TimePoint deadline, at::Tensor tensor)
      : Operation(spec, deadline), tensor_(std::move(tensor)) {}

 private:
  void start() override;
  void run_step(int step) override;

  const at::Tensor tensor_;
  base::BufferPtr sent_;
};

class ChunkedAllreduce final : public Operation {
 public:
  ChunkedAllreduce(const OpSpec& spec, base::TimePoint deadline, at::Tensor tensor)
      : Operation(spec, deadline, 2), tensor_(std::move(tensor)) {}

 private:
  struct Range {
    size_t begin = 0;  // in elements
    size_t count = 0;
  };
  Range chunk(int rank) const;
  size_t expected_bytes(int step, int from) const override;
  void start() override;
  void run_step(int step) override;

  const at::Tensor tensor_;  // the caller's
  at::Tensor work_;          // the same if that is contiguous
  base::BufferPtr sent_;
};

}  // namespace distrain::collective
