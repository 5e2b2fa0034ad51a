#pragma once

#include <memory>
#include <numeric>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include <ATen/ATen.h>

#include "distrain/base/thread_pool.h"
#include "distrain/collective/backend.h"
#include "support/catch.h"
#include "unit/collective/fake_channel.h"

namespace distrain::testing {

using collective::Backend;
using BackendPtr = c10::intrusive_ptr<Backend>;
using ReduceOp = Backend::ReduceOp;

/// The default timeout of a TestGroup: longer than a busy machine delays any rank, but a test in
/// which one rank fails while others wait for it ends by itself.
inline constexpr std::chrono::seconds kGroupTimeout{120};

/// A group of all ranks of a job, connected by a FakeNetwork in this process.
struct TestGroup {
  explicit TestGroup(int size, Backend::Settings settings = {}, uint32_t seed = 1,
                     std::vector<int> hosts = {})
      : network(size, seed) {
    if (settings.timeout == kBackendDefaultTimeout) settings.timeout = kGroupTimeout;
    if (!hosts.empty()) network.put_on_hosts(std::move(hosts));
    std::vector<int> ranks(static_cast<size_t>(size));
    std::iota(ranks.begin(), ranks.end(), 0);
    for (int rank = 0; rank < size; ++rank) {
      backends.push_back(c10::make_intrusive<Backend>(network.channel(rank), pool,
                                                      collective::Group{7, ranks}, settings));
    }
  }

  Backend& operator[](int rank) { return *backends[static_cast<size_t>(rank)]; }

  FakeNetwork network;
  base::ThreadPool pool{{.name = "test", .size = 2, .cap = 64}};
  std::vector<BackendPtr> backends;
};

/// Ends `pending` as if its deadline had passed. Runs its ready steps first, so that it waits.
inline void expire(const collective::Pending& pending) {
  while (!pending.done()) pending.expire();
}

/// Returns the error that `f` throws; fails the test if `f` throws nothing or another type.
template <class F>
base::Error thrown_by(F f) {
  try {
    f();
  } catch (const base::Exception& exception) {
    return exception.error();
  }
  throw std::runtime_error("no error was thrown");
}

/// Returns true if `a` and `b` are equal bit by bit: NaN equals itself, 0 differs from -0.
inline bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  const at::Tensor x = a.contiguous();
  const at::Tensor y = b.contiguous();
  return x.scalar_type() == y.scalar_type() && x.sizes() == y.sizes() &&
         (x.nbytes() == 0 || std::memcmp(x.data_ptr(), y.data_ptr(), x.nbytes()) == 0);
}

}  // namespace distrain::testing
