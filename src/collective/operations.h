#pragma once

#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "core.h"
#include "operation.h"

namespace distrain::collective {

// Note [Algorithms]
//
// n ranks, B bytes a rank. Every rank talks to every other one directly; groups are small (2 to 8).
//
// Barrier: a header from each rank to each other one. n(n-1) messages, one hop. Log-step barriers
// need fewer messages (n log n), but log n hops, and a hop is what costs: about 20 µs to wake a
// thread, against 5 µs of work a message.
//
// Broadcast: the root sends B to each; each sends its header to the root. 2(n-1) messages. The
// headers let both sides see a mismatch, and keep a root from running ahead without bound.
//
// Allgather: B from each rank to each other one. n(n-1) messages, (n-1)B sent a rank: the minimum.
//
// Allreduce, direct: every rank sends all of its B to each other one and reduces all n inputs
// itself. n(n-1) messages, one hop, (n-1)B sent a rank.
//
// Allreduce, chunked: cut into n chunks. Step 1: chunk j goes to rank j, which reduces its n
// inputs. Step 2: rank j sends its result to all. 2n(n-1) messages, two hops, 2B(n-1)/n sent a
// rank: the minimum, as a ring's, which takes 2(n-1) hops and cannot reduce in rank order.
//
// Both allreduces take the inputs in rank order for every element, whatever the order of arrival,
// so the result does not depend on timing; in the direct one all ranks compute the same from the
// same, in the chunked one they copy it from the one that computed it.
//
// Direct is better while what it sends beyond chunked, (n-1)(n-2)/n * B a rank, and its n-fold
// reduction cost less than the n(n-1) messages and the hop that it saves. With n = 8 ranks on two
// cores: 56 messages of 5 µs against 8 * 5.25 * B at about 4 GB/s: equal near 16 KiB. With n = 2
// the bytes are the same; only B/2 more is reduced and copied, at 10 GB/s: 20 µs pay for 64 KiB.
inline constexpr size_t kDirectBytes = size_t{16} << 10;
inline constexpr size_t kDirectBytesOfTwo = size_t{64} << 10;

// What is sent is never memory that may change before the kernel has it. Small data is copied
// behind its header into one buffer for all ranks. In step 1 of the chunked allreduce chunk j goes
// out of the caller's tensor, without a copy: chunk j is overwritten only by what rank j sends in
// step 2, and rank j had to receive all of it before.

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
