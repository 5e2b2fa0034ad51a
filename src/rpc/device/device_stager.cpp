#include "device/device_stager.h"

#include <algorithm>

#include <c10/util/Exception.h>

#include "distrain/base/thread_state.h"

namespace distrain::rpc {

constexpr size_t kMaxIdleBlocks = 256;  // kept for reuse
constexpr size_t kMaxRestocked = 64;    // for received chunks
constexpr size_t kMaxReleased = 16;     // before release_at() looks for completed copies

/// The idle host blocks, kept because pinned memory is expensive to allocate and to free.
struct DeviceStager::Shelf {
  std::mutex mutex;
  std::vector<at::Tensor> idle;  // uint8 [kChunkBytes] each
  size_t missed = 0;             // frames that found no idle block
  size_t restocked = 0;          // blocks allocated by restock()

  static base::BufferPtr lend(const std::shared_ptr<Shelf>& shelf, at::Tensor block, size_t size) {
    auto* buffer = new base::Buffer{block.mutable_data_ptr<uint8_t>(), size};
    return base::BufferPtr(buffer, [shelf, block = std::move(block)](base::Buffer* b) {
      delete b;
      std::lock_guard lock(shelf->mutex);
      if (shelf->idle.size() < kMaxIdleBlocks) shelf->idle.push_back(block);
    });
  }
};

DeviceStager::DeviceStager() : shelf_(std::make_shared<Shelf>()) {}

DeviceStager::~DeviceStager() {
  for (const auto& [point, memory] : released_) point.wait_in_destructor();
}

DeviceStager::Streams DeviceStager::streams_of(c10::Device device) {
  std::lock_guard lock(mutex_);
  auto it = streams_.find(device);
  if (it == streams_.end()) {
    it = streams_.emplace(device, Streams{side_stream(device), side_stream(device)}).first;
  }
  return it->second;
}

base::BufferPtr DeviceStager::take_idle_block(size_t size) {
  std::unique_lock lock(shelf_->mutex);
  if (shelf_->idle.empty()) return nullptr;
  at::Tensor block = std::move(shelf_->idle.back());
  shelf_->idle.pop_back();
  lock.unlock();
  return Shelf::lend(shelf_, std::move(block), size);
}

base::BufferPtr DeviceStager::idle_host_block(size_t size) {
  if (size > kChunkBytes) return nullptr;
  base::BufferPtr block = take_idle_block(size);
  if (!block) {
    std::lock_guard lock(shelf_->mutex);
    ++shelf_->missed;
  }
  return block;
}

base::BufferPtr DeviceStager::host_block(c10::Device device, size_t size) {
  sweep();
  if (auto block = take_idle_block(size)) return block;
  try {
    return Shelf::lend(shelf_, pinned_bytes(device, static_cast<int64_t>(kChunkBytes)), size);
  } catch (const c10::Error& e) {
    throw base::Exception(base::ErrorKind::kResources, e.what_without_backtrace());
  }
}

void DeviceStager::restock(c10::Device device, size_t frames) {
  size_t number = 0;
  {
    std::lock_guard lock(shelf_->mutex);
    number = std::min({frames, shelf_->missed, kMaxRestocked - shelf_->restocked});
    shelf_->missed = shelf_->restocked + number == kMaxRestocked ? 0 : shelf_->missed - number;
    shelf_->restocked += number;
  }
  try {
    for (; number > 0; --number) {
      static_cast<void>(
          Shelf::lend(shelf_, pinned_bytes(device, static_cast<int64_t>(kChunkBytes)), 0));
    }
  } catch (const c10::Error&) {  // pageable memory serves as well
  }
}

void DeviceStager::stop_waiting() {
  std::lock_guard lock(sending_->mutex);
  sending_->open = true;
  sending_->returned.notify_all();
}

std::shared_ptr<const void> BlocksSent::count(base::BufferPtr block) {
  {
    std::lock_guard lock(gate_->mutex);
    ++number_;
  }
  const void* const data = block->data;
  return {data, [self = shared_from_this(), block = std::move(block)](const void*) mutable {
            block = nullptr;
            std::lock_guard lock(self->gate_->mutex);
            --self->number_;
            self->gate_->returned.notify_all();
          }};
}

void BlocksSent::await_fewer_than(size_t number) {
  const auto may_go_on = [&] { return number_ < number || gate_->open; };
  {
    std::lock_guard lock(gate_->mutex);
    if (may_go_on()) return;
  }
  const base::BlockingScope blocking;
  std::unique_lock lock(gate_->mutex);
  gate_->returned.wait(lock, may_go_on);
}

void DeviceStager::release_at(StreamPoint point, base::BufferPtr memory) {
  bool many = false;
  {
    std::lock_guard lock(mutex_);
    released_.emplace_back(std::move(point), std::move(memory));
    many = released_.size() > kMaxReleased;
  }
  if (many) sweep();
}

void DeviceStager::sweep() {
  std::vector<base::BufferPtr> done;  // released without the lock
  std::lock_guard lock(mutex_);
  const auto end = std::remove_if(released_.begin(), released_.end(), [&](auto& entry) {
    if (!entry.first.reached()) return false;
    done.push_back(std::move(entry.second));
    return true;
  });
  released_.erase(end, released_.end());
}

std::vector<DeviceGroup> group_by_device(const std::vector<wire::TensorDesc>& tensors) {
  std::vector<DeviceGroup> groups;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const wire::DeviceRef device = tensors[i].device;
    if (device.is_cpu()) continue;
    auto it = std::find_if(groups.begin(), groups.end(),
                           [&](const DeviceGroup& group) { return group.device == device; });
    if (it == groups.end()) it = groups.insert(groups.end(), DeviceGroup{device, {}, {}});
    it->tensors.push_back(i);
    it->layout.append(tensors[i].bytes());
  }
  return groups;
}

}  // namespace distrain::rpc
