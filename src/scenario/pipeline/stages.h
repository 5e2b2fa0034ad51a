#pragma once

#include <cstddef>
#include <type_traits>
#include <utility>
#include <vector>

#include "distrain/rpc/agent.h"
#include "stage.h"

namespace distrain::scenario {

/// The stages of a model, as the master calls them: stage 0 is on rank 1.
class Stages {
 public:
  explicit Stages(rpc::Agent& agent) : agent_(agent) {}

  static int rank_of(size_t stage) { return static_cast<int>(stage) + 1; }
  static rpc::To to(size_t stage) { return rpc::To(rank_of(stage)).timeout(kAsLongAsItTakes); }

  void clear() { stages_.clear(); }
  template <class... Args>
  void add(const Args&... args) {
    stages_.push_back(agent_.remote_new<PipelineStage>(to(size()), args...));
  }
  size_t size() const { return stages_.size(); }

  /// F of one of them.
  template <auto F, class... Args>
  auto call(size_t stage, const Args&... args) const {
    return agent_.rpc_async<F>(to(stage), stages_[stage], args...);
  }
  /// F of all at once; gives back their results, in order.
  template <auto F, class... Args>
  auto call_all(const Args&... args) const {
    std::vector<decltype(call<F>(0, args...))> calls;
    for (size_t i = 0; i < size(); ++i) calls.push_back(call<F>(i, args...));
    base::wait_all(calls);
    using Value = decltype(calls[0].wait());
    if constexpr (!std::is_void_v<Value>) {
      std::vector<Value> results;
      for (const auto& one : calls) results.push_back(one.wait());
      return results;
    }
  }
  /// What F gives of each stage, in one row.
  template <auto F>
  auto row_of_all() const {
    auto parts = call_all<F>();
    for (size_t i = 1; i < parts.size(); ++i) {
      parts[0].insert(parts[0].end(), parts[i].begin(), parts[i].end());
    }
    return std::move(parts[0]);
  }
  /// F of one after the other, each of what the one before gave; to fetch from the last.
  template <auto F, class... Args>
  base::Future<at::Tensor> chain(const at::Tensor& input, const Args&... args) const {
    rpc::RRef<at::Tensor> value = agent_.make_rref(input);
    for (size_t i = 0; i < size(); ++i) value = agent_.remote<F>(to(i), stages_[i], value, args...);
    return value.to_here_async(kAsLongAsItTakes);
  }

 private:
  rpc::Agent& agent_;
  std::vector<rpc::RRef<PipelineStage>> stages_;
};

}  // namespace distrain::scenario
