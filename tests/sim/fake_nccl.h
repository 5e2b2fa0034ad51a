// NCCL within one process, for the simulated accelerator.
#pragma once

#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <c10/core/StreamGuard.h>

#include "distrain/base/error.h"
#include "distrain/cuda/nccl_reduce_group.h"

namespace distrain::testing {

/// Calls wait for all ranks, as NCCL's do while it connects them; results are written in the stream
/// that was given.
class FakeNccl {
 public:
  cuda::NcclReduceGroup::Nccl functions() {
    return {[this] { return new_id(); },
            [this](const cuda::NcclId& id, int size, int rank, int) -> CommunicatorPtr {
              return join(id, size, rank);
            }};
  }

  /// The next communicator that this rank makes fails; the others are told.
  void fail_making(int rank) {
    with_lock([&] { fails_.insert(rank); });
  }
  /// The next id that is asked for is not made.
  void fail_id() {
    with_lock([&] { fails_.insert(-1); });
  }
  /// This rank takes no part in what it is given, and does not say so.
  void stall(int rank, bool stalls) {
    with_lock([&] { stalls ? void(stalled_.insert(rank)) : void(stalled_.erase(rank)); });
  }
  int made() const {
    std::lock_guard lock(mutex_);
    return made_;
  }
  int aborted() const {
    std::lock_guard lock(mutex_);
    return aborted_;
  }

 private:
  using CommunicatorPtr = std::unique_ptr<cuda::NcclCommunicator>;

  struct Room {
    int size = 0;
    int joined = 0;
    bool broken = false;
    std::map<uint64_t, std::map<int, at::Tensor>> given;  // by operation, then rank
  };

  class Communicator final : public cuda::NcclCommunicator {
   public:
    Communicator(FakeNccl& nccl, std::shared_ptr<Room> room, int rank)
        : nccl_(nccl), room_(std::move(room)), rank_(rank) {}
    void allreduce_mean(const at::Tensor& tensor, const c10::Stream& stream) override {
      const c10::StreamGuard guard(stream);
      const auto given = exchange(tensor);
      if (given.empty()) return;
      at::Tensor sum = given.at(0).clone();
      for (int rank = 1; rank < room_->size; ++rank) sum.add_(given.at(rank));
      write(tensor, sum.div_(room_->size));
    }
    void broadcast(const at::Tensor& tensor, int root, const c10::Stream& stream) override {
      const c10::StreamGuard guard(stream);
      const auto given = exchange(tensor);
      if (!given.empty()) write(tensor, given.at(root));
    }
    std::optional<std::string> failure() override { return std::nullopt; }
    void abort() noexcept override {
      {
        std::lock_guard lock(nccl_.mutex_);
        if (!std::exchange(ended_, true)) ++nccl_.aborted_;
      }
      nccl_.changed_.notify_all();
    }

   private:
    std::map<int, at::Tensor> exchange(const at::Tensor& tensor) {
      const at::Tensor mine = tensor.cpu();
      std::unique_lock lock(nccl_.mutex_);
      const uint64_t number = next_++;
      if (nccl_.stalled_.count(rank_)) return {};
      room_->given[number][rank_] = mine;
      nccl_.changed_.notify_all();
      nccl_.changed_.wait(
          lock, [&] { return ended_ || int(room_->given[number].size()) == room_->size; });
      if (!ended_) return room_->given[number];
      throw base::Exception(base::ErrorKind::kResources, "the fake communicator was aborted");
    }
    static void write(const at::Tensor& tensor, const at::Tensor& value) {
      tensor.copy_(value.to(tensor.device()));
    }

    FakeNccl& nccl_;
    const std::shared_ptr<Room> room_;
    const int rank_;
    uint64_t next_ = 0;
    bool ended_ = false;
  };

  template <class F>
  void with_lock(F f) {
    std::lock_guard lock(mutex_);
    f();
  }

  cuda::NcclId new_id() {
    std::lock_guard lock(mutex_);
    if (fails_.erase(-1)) throw base::Exception(base::ErrorKind::kResources, "no id today");
    cuda::NcclId id{};
    id[100] = char(++last_id_);
    return id;
  }

  CommunicatorPtr join(const cuda::NcclId& id, int size, int rank) {
    std::unique_lock lock(mutex_);
    auto& room = rooms_[id];
    if (!room) room = std::make_shared<Room>();
    const std::shared_ptr<Room> mine = room;
    mine->size = size;
    ++mine->joined;
    const bool fails = fails_.erase(rank) > 0;
    if (fails) mine->broken = true;
    changed_.notify_all();
    changed_.wait(lock, [&] { return mine->broken || mine->joined == size; });
    if (fails) throw base::Exception(base::ErrorKind::kResources, "no device for this rank");
    if (mine->broken) throw base::Exception(base::ErrorKind::kResources, "another rank failed");
    ++made_;
    return std::make_unique<Communicator>(*this, mine, rank);
  }

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::map<cuda::NcclId, std::shared_ptr<Room>> rooms_;
  std::set<int> fails_;
  std::set<int> stalled_;
  int last_id_ = 0;
  int made_ = 0;
  int aborted_ = 0;
};

}  // namespace distrain::testing
