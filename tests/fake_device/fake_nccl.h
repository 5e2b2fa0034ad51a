// A fake NCCL within one process, for the fake device.
#pragma once

#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <c10/core/StreamGuard.h>

#include "distrain/base/error.h"
#include "distrain/cuda/plugin.h"
#include "support/fake_device_internal.h"

namespace distrain::testing {

/// An NCCL whose ranks are threads. Its functions never wait for other ranks. A collective is work
/// on the given stream that blocks the stream until all ranks have arrived or the communicator is
/// aborted. An abort leaves the tensor unchanged. A rank does not learn of failures of other ranks.
class FakeNccl final : public cuda::Plugin {
 public:
  int device_count() const override { return 0; }
  std::string device_name(int) const override { return {}; }
  std::string device_id(int) const override { return {}; }
  std::string versions() const override { return {}; }

  cuda::NcclId new_nccl_id() const override {
    std::lock_guard lock(world_->mutex);
    if (std::exchange(world_->fails_id, false)) {
      throw base::Exception(base::ErrorKind::kResources, "no id today");
    }
    cuda::NcclId id{};
    id[100] = char(++world_->last_id);
    return id;
  }
  std::unique_ptr<cuda::NcclCommunicator> make_communicator(const cuda::NcclId& id, int size,
                                                            int rank, int) const override {
    std::lock_guard lock(world_->mutex);
    if (world_->fails_making.erase(rank)) {
      throw base::Exception(base::ErrorKind::kResources, "no device for this rank");
    }
    auto& room = world_->rooms[id[100]];
    if (!room) room = std::make_shared<Room>();
    room->id = id[100];
    room->size = size;
    return std::make_unique<Communicator>(world_, room, rank);
  }

  /// Makes the next creation of a communicator on `rank` fail. fail_joining() makes joining it
  /// fail.
  void fail_making(int rank) {
    with_lock([&] { world_->fails_making.insert(rank); });
  }
  void fail_joining(int rank) {
    with_lock([&] { world_->fails_joining.insert(rank); });
  }
  /// If `never`, joined() is false for every communicator, as if other ranks did not join.
  void never_join(bool never) {
    with_lock([&] { world_->never_join = never; });
  }
  /// Makes the next new_nccl_id() fail.
  void fail_id() {
    with_lock([&] { world_->fails_id = true; });
  }
  /// Sets whether `rank` silently ignores its collectives.
  void stall(int rank, bool stalls) {
    with_lock(
        [&] { stalls ? void(world_->stalled.insert(rank)) : void(world_->stalled.erase(rank)); });
  }
  /// Makes the existing communicators of `rank` report a failure from now on.
  void set_failure(int rank, const std::string& text) {
    with_lock([&] { world_->failures[rank] = {text, world_->last_id}; });
  }
  /// Makes the next collective of `rank` fail to start.
  void fail_call(int rank) {
    with_lock([&] { world_->fails_call.insert(rank); });
  }
  /// Makes the device of `rank` report an error when it is queried about its NCCL work.
  void break_device(int rank) {
    with_lock([&] { world_->broken.insert(rank); });
  }
  /// If `hold`, each abort blocks, without effect, until hold_aborts(false) is called.
  void hold_aborts(bool hold) {
    with_lock([&] { world_->holds_aborts = hold; });
    world_->changed.notify_all();
  }

  int made() const {
    return with_lock([&] { return world_->made; });
  }
  int aborted() const {
    return with_lock([&] { return world_->aborted; });
  }
  /// Returns the number of collectives that `rank` was given.
  int given(int rank) const {
    return with_lock([&] { return world_->given[rank]; });
  }
  /// Returns the number of ranks that have begun to join the newest communicator.
  int joining() const {
    return with_lock([&] {
      const auto it = world_->rooms.find(world_->last_id);
      return it == world_->rooms.end() ? 0 : int(it->second->joined.size());
    });
  }
  /// Returns how often failure() has reported a failure to `rank`.
  int told(int rank) const {
    return with_lock([&] { return world_->told[rank]; });
  }

 private:
  /// One collective: the inputs of the ranks whose streams have reached it, and for each rank that
  /// has enqueued it, the point of its stream after the copy of its input.
  struct Meeting {
    std::map<int, at::Tensor> values;
    std::vector<std::pair<fake_device::Queue*, uint64_t>> points;
  };

  struct Room {
    int id = 0;
    int size = 0;
    std::set<int> joined;
    std::map<uint64_t, std::shared_ptr<Meeting>> meetings;
  };

  struct World {
    std::mutex mutex;
    std::condition_variable changed;
    std::map<int, std::shared_ptr<Room>> rooms;  // by ID
    std::set<int> fails_making, fails_joining, fails_call, stalled, broken;
    std::map<int, std::pair<std::string, int>> failures;  // with the last ID that they affect
    std::map<int, int> given, told;
    bool fails_id = false;
    bool never_join = false;
    bool holds_aborts = false;
    int last_id = 0;
    int made = 0;
    int aborted = 0;
  };

  class Communicator final : public cuda::NcclCommunicator {
   public:
    Communicator(std::shared_ptr<World> world, std::shared_ptr<Room> room, int rank)
        : world_(std::move(world)), room_(std::move(room)), rank_(rank) {}
    ~Communicator() override {
      fake_device::touch(fake_device::current_device());
      std::lock_guard lock(world_->mutex);
      *ended_ = true;
    }

    bool joined() override {
      std::lock_guard lock(world_->mutex);
      if (world_->fails_joining.erase(rank_)) fail("no way to the others");
      if (room_->joined.insert(rank_).second) ++world_->made;
      return !world_->never_join && int(room_->joined.size()) == room_->size;
    }
    void allreduce_mean(const at::Tensor& tensor, const c10::Stream& stream) override {
      give(tensor, stream, [](const std::map<int, at::Tensor>& values) {
        at::Tensor sum = values.at(0).clone();
        for (int rank = 1; rank < int(values.size()); ++rank) sum.add_(values.at(rank));
        return sum.div_(double(values.size()));
      });
    }
    void broadcast(const at::Tensor& tensor, int root, const c10::Stream& stream) override {
      give(tensor, stream,
           [root](const std::map<int, at::Tensor>& values) { return values.at(root); });
    }
    std::optional<std::string> failure() override {
      fake_device::touch(fake_device::current_device());
      std::lock_guard lock(world_->mutex);
      if (*ended_) return "the fake communicator was aborted";
      const auto it = world_->failures.find(rank_);
      if (it == world_->failures.end() || it->second.second < room_->id) return std::nullopt;
      ++world_->told[rank_];
      return it->second.first;
    }
    void abort() noexcept override {
      fake_device::touch(fake_device::current_device());
      std::unique_lock lock(world_->mutex);
      world_->changed.wait(lock, [&] { return !world_->holds_aborts; });
      if (!std::exchange(*ended_, true)) ++world_->aborted;
    }

   private:
    [[noreturn]] static void fail(const std::string& text) {
      throw base::Exception(base::ErrorKind::kResources, text);
    }

    template <class Combine>
    void give(const at::Tensor& tensor, const c10::Stream& stream, Combine combine) {
      std::shared_ptr<Meeting> meeting;
      {
        std::lock_guard lock(world_->mutex);
        if (*ended_) fail("the fake communicator was aborted");
        if (world_->fails_call.erase(rank_)) fail("the fake call failed");
        ++world_->given[rank_];
        auto& place = room_->meetings[next_++];
        if (!place) place = std::make_shared<Meeting>();
        if (world_->stalled.count(rank_)) return;
        meeting = place;
      }
      const fake_device::Lock one_after_the_other;
      const c10::StreamGuard guard(stream);
      fake_device::Launch out;
      const at::Tensor mine = out.operand(tensor);
      out.submit([world = world_, rank = rank_, meeting, mine] {
        std::lock_guard lock(world->mutex);
        meeting->values[rank] = mine.clone();
      });
      fake_device::Queue& queue = fake_device::queue_of(stream);
      {
        std::lock_guard lock(world_->mutex);
        meeting->points.emplace_back(&queue, queue.end());
      }
      queue.add_gate([world = world_, rank = rank_, size = room_->size, ended = ended_, meeting] {
        std::unique_lock lock(world->mutex);
        if (!*ended && world->broken.count(rank)) throw std::runtime_error("the device is broken");
        const auto points = meeting->points;
        lock.unlock();
        // Runs the streams of the other ranks, because there may be no thread that waits for them.
        for (const auto& [other, point] : points) other->run_to(point);
        lock.lock();
        return *ended || int(meeting->values.size()) == size;
      });
      fake_device::Launch in;
      at::Tensor result = in.operand(tensor);
      in.submit([world = world_, size = room_->size, meeting, result, combine]() mutable {
        std::lock_guard lock(world->mutex);
        if (int(meeting->values.size()) == size) result.copy_(combine(meeting->values));
      });
    }

    const std::shared_ptr<World> world_;
    const std::shared_ptr<Room> room_;
    const int rank_;
    const std::shared_ptr<bool> ended_ = std::make_shared<bool>(false);  // guarded by world's mutex
    uint64_t next_ = 0;
  };

  template <class F>
  std::invoke_result_t<F> with_lock(F f) const {
    std::lock_guard lock(world_->mutex);
    return f();
  }

  const std::shared_ptr<World> world_ = std::make_shared<World>();
};

}  // namespace distrain::testing
