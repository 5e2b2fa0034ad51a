#include <atomic>
#include <chrono>
#include <mutex>
#include <set>
#include <thread>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>
#include <ATen/core/Generator.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <pthread.h>

#include "support/fake_device_internal.h"

namespace distrain::testing::fake_device {
namespace {

std::recursive_mutex& mutex() {
  static auto& made = *new std::recursive_mutex;
  return made;
}

thread_local int depth = 0;  // nested Locks of this thread
thread_local bool met_closed_gate = false;
thread_local std::vector<std::function<void()>> finished;

struct Streams {
  std::array<std::array<Queue, kStreams>, kFakeDevices> queues;
  FakeDeviceCounters counters;
  std::array<std::set<std::string>, kFakeDevices> contexts;  // threads with a context, by device
};

Streams& streams() {
  static auto& made = *new Streams;
  return made;
}

thread_local int device_now = 0;
thread_local std::array<int64_t, kFakeDevices> stream_now{};
std::array<std::atomic<uint64_t>, kFakeDevices> handed_out{};
std::atomic<bool> has_failed{false};

c10::Stream stream_of(int device, int64_t id) {
  return c10::Stream(c10::Stream::UNSAFE, fake(device), static_cast<c10::StreamId>(id));
}

int checked(c10::DeviceIndex device) {
  TORCH_CHECK(device >= 0 && device < kFakeDevices, "there is no device fake:", int{device});
  return device;
}

struct Event {
  Queue* queue;
  uint64_t point;
};

uint64_t end_of(const Queue& queue) {
  const Lock lock;
  return queue.end();
}

void wait_for(Queue& queue, uint64_t point) {
  {
    const Lock lock;
    ++counters().host_waits;
  }
  run_on_host(queue, point);
}

class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return kFake; }

  c10::Device getDevice() const override { return fake(device_now); }
  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device before = getDevice();
    setDevice(device);
    return before;
  }
  void setDevice(c10::Device device) const override {
    if (!device.has_index()) return;
    device_now = checked(device.index());
    touch(device_now);
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.has_index() && device.index() < kFakeDevices) device_now = device.index();
  }
  c10::DeviceIndex deviceCount() const noexcept override { return kFakeDevices; }

  c10::Stream getStream(c10::Device device) const override {
    return current_stream(index_of(device));
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return stream_of(index_of(device), 0);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return getNewStream(device, 0);
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    const int at = index_of(device);
    const uint64_t turn = handed_out[static_cast<size_t>(at)]++;
    return stream_of(at, 1 + static_cast<int64_t>(turn % (kStreams - 1)));
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const int device = checked(stream.device_index());
    const c10::Stream before = current_stream(device);
    stream_now[static_cast<size_t>(device)] = stream.id();
    return before;
  }
  bool queryStream(const c10::Stream& stream) const override {
    const Lock lock;
    Queue& queue = queue_of(stream);
    return step(queue, queue.end());
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    Queue& queue = queue_of(stream);
    wait_for(queue, end_of(queue));
  }
  void synchronizeDevice(c10::DeviceIndex device) const override {
    for (int64_t id = 0; id < kStreams; ++id) synchronizeStream(stream_of(checked(device), id));
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex,
              const c10::EventFlag) const override {
    if (wait_is_dropped()) return;
    const Lock lock;
    const Visit visit(*this, stream.device());
    if (!*event) *event = new Event;
    Queue& queue = queue_of(stream);
    *static_cast<Event*>(*event) = {&queue, queue.end()};
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (!event || wait_is_dropped()) return;
    const Lock lock;
    const Visit visit(*this, stream.device());
    ++counters().waits;
    const Event& point = *static_cast<Event*>(event);
    queue_of(stream).add_wait(*point.queue, point.point);
  }
  bool queryEvent(void* event) const override {
    if (!event || wait_is_dropped()) return true;
    check_health();
    touch(device_now);
    const Lock lock;
    const Event& point = *static_cast<Event*>(event);
    return step(*point.queue, point.point);
  }
  void synchronizeEvent(void* event) const override {
    if (!event || wait_is_dropped()) return;
    check_health();
    touch(device_now);
    const Event point = [event] {
      const Lock lock;
      return *static_cast<Event*>(event);
    }();
    wait_for(*point.queue, point.point);
  }
  void destroyEvent(void* event, const c10::DeviceIndex device) const noexcept override {
    const Visit visit(*this, fake(device));
    delete static_cast<Event*>(event);
  }

  void recordDataPtrOnStream(const c10::DataPtr& pointer,
                             const c10::Stream& stream) const override {
    if (pointer && !wait_is_dropped()) record_use(pointer.get(), stream);
  }

 private:
  /// Switches to a device and back with setDevice(), as CUDA's event functions do.
  class Visit {
   public:
    Visit(const Guard& guard, c10::Device device) : guard_(guard), before_(guard.getDevice()) {
      guard_.setDevice(device);
    }
    ~Visit() { guard_.setDevice(before_); }

   private:
    const Guard& guard_;
    const c10::Device before_;
  };

  static int index_of(c10::Device device) {
    return device.has_index() ? checked(device.index()) : device_now;
  }

  // Returns true if `point` is reached. If not, runs one piece of work, so that repeated calls end.
  static bool step(Queue& queue, uint64_t point) {
    if (queue.reached(point)) return true;
    queue.run_one();
    return false;
  }
};

class FakeGenerator final : public c10::GeneratorImpl {
 public:
  explicit FakeGenerator(int device, at::Generator cpu = at::make_generator<at::CPUGeneratorImpl>())
      : GeneratorImpl(fake(device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        cpu_(std::move(cpu)) {}
  const at::Generator& cpu() const { return cpu_; }
  void set_current_seed(uint64_t seed) override { cpu_.set_current_seed(seed); }
  void set_offset(uint64_t offset) override { cpu_.set_offset(offset); }
  uint64_t get_offset() const override { return cpu_.get_offset(); }
  uint64_t current_seed() const override { return cpu_.current_seed(); }
  uint64_t seed() override { return cpu_.seed(); }
  void set_state(const c10::TensorImpl& state) override {
    cpu_.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return cpu_.unsafeGetGeneratorImpl()->get_state();
  }

 private:
  FakeGenerator* clone_impl() const override {
    return new FakeGenerator(device_.index(), cpu_.clone());
  }

  at::Generator cpu_;
};

class Hooks final : public at::PrivateUse1HooksInterface {
 public:
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  void init() const override {}
  c10::DeviceIndex deviceCount() const override { return kFakeDevices; }
  void setCurrentDevice(c10::DeviceIndex device) const override { device_now = checked(device); }
  c10::DeviceIndex getCurrentDevice() const override {
    return static_cast<c10::DeviceIndex>(device_now);
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    const c10::DeviceIndex before = getCurrentDevice();
    setCurrentDevice(device);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return device < 0 ? getCurrentDevice() : exchangeDevice(device);
  }
  at::Device getDeviceFromPtr(void* pointer) const override {
    const Block* const block = block_of(pointer);
    TORCH_CHECK(block, "this is no memory of the fake device");
    return fake(block->device);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return default_generator(device < 0 ? device_now : checked(device));
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return make_generator(device < 0 ? device_now : checked(device));
  }
  bool isPinnedPtr(const void* pointer) const override { return is_pinned(pointer); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    c10::DataPtr larger = device_allocator().allocate(bytes);
    if (storage.data() && larger) {
      device_allocator().copy_data(larger.get(), storage.data(), std::min(bytes, storage.nbytes()));
    }
    storage.set_data_ptr_noswap(std::move(larger));
    storage.set_nbytes(bytes);
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

[[maybe_unused]] const bool registered = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  c10::register_privateuse1_backend("fake");
  c10::SetAllocator(kFake, &device_allocator());
  // Each kernel uses one thread: the work is small and the ranks are threads of this process, so
  // more threads would compete for the CPU.
  at::set_num_threads(1);
  return true;
}();

}  // namespace

void check_health() { TORCH_CHECK(!has_failed, "the device has failed"); }

Lock::Lock() {
  mutex().lock();
  ++depth;
}

Lock::~Lock() {
  std::vector<std::function<void()>> let_go;
  if (--depth == 0) let_go.swap(finished);
  mutex().unlock();
}

void Queue::add(std::vector<Block*> touched, std::function<void()> work) {
  items_.push_back({std::move(work), std::move(touched), nullptr, 0, nullptr});
  ++added_;
}

void Queue::add_wait(Queue& other, uint64_t point) {
  if (&other == this || other.reached(point)) return;
  items_.push_back({nullptr, {}, &other, point, nullptr});
  ++added_;
}

void Queue::add_gate(std::function<bool()> open) {
  items_.push_back({nullptr, {}, nullptr, 0, std::move(open)});
  ++added_;
}

void run_on_host(Queue& queue, uint64_t point) {
  for (;; std::this_thread::sleep_for(std::chrono::milliseconds(1))) {
    const Lock lock;
    met_closed_gate = false;
    if (queue.run_to(point)) return;
    TORCH_CHECK(met_closed_gate && depth == 1, "a stream waits for itself");
  }
}

bool Queue::run_to(uint64_t point) {
  while (!reached(point)) {
    if (!run_one()) return false;
  }
  return true;
}

bool Queue::run_one() {
  if (at_work_) return false;
  struct AtWork {
    explicit AtWork(bool& flag) : flag(flag) { flag = true; }
    ~AtWork() { flag = false; }
    bool& flag;
  } at_work(at_work_);
  const Item& next = items_.front();
  if (next.awaited && !next.awaited->run_to(next.awaited_point)) return false;
  if (next.open && !next.open()) {
    met_closed_gate = true;
    return false;
  }
  Item item = std::move(items_.front());
  items_.pop_front();
  struct Done {
    explicit Done(uint64_t& count) : count(count) {}
    ~Done() { ++count; }
    uint64_t& count;
  } done(done_);
  if (!item.work) return true;
  // Simulates the worst case: a freed block is overwritten before this work, unless the stream that
  // allocated the block must wait for this work.
  for (const Block* const block : item.touched) {
    if (block->owner != this) block->owner->run_to(block->poisoned_at);
  }
  const c10::AutoGradMode no_gradients(false);
  const at::AutoDispatchBelowADInplaceOrView kernels_only;
  item.work();
  finished.push_back(std::move(item.work));
  return true;
}

Queue& queue_of(int device, int64_t stream) {
  return streams().queues.at(static_cast<size_t>(device)).at(static_cast<size_t>(stream));
}

Queue& queue_of(const c10::Stream& stream) {
  return queue_of(checked(stream.device_index()), stream.id());
}

int current_device() { return device_now; }

void touch(int device) {
  char name[16] = {};
  pthread_getname_np(pthread_self(), name, sizeof name);
  const Lock lock;
  streams().contexts.at(static_cast<size_t>(device)).insert(name);
}

at::Generator make_generator(int device) { return at::make_generator<FakeGenerator>(device); }

const at::Generator& default_generator(int device) {
  static const auto& made = *new auto([] {
    std::array<at::Generator, kFakeDevices> generators;
    for (int i = 0; i < kFakeDevices; ++i) generators[size_t(i)] = make_generator(i);
    return generators;
  }());
  return made.at(static_cast<size_t>(device));
}

at::Generator cpu_generator(const at::Generator& generator, int device) {
  TORCH_CHECK(generator.device() == fake(device), "Expected a '", fake(device),
              "' device for generator but found '", generator.device(), "'");
  return static_cast<FakeGenerator*>(generator.unsafeGetGeneratorImpl())->cpu();
}

c10::Stream current_stream(int device) {
  return stream_of(device, stream_now.at(static_cast<size_t>(device)));
}

Queue& current_queue(c10::Device device) {
  return queue_of(current_stream(checked(device.index())));
}

FakeDeviceCounters& counters() { return streams().counters; }

}  // namespace distrain::testing::fake_device

namespace distrain::testing {

FakeDeviceCounters fake_device_counters() {
  const fake_device::Lock lock;
  return fake_device::counters();
}

void reset_fake_device_counters() {
  const fake_device::Lock lock;
  fake_device::counters() = {};
}

std::string fake_contexts(int device) {
  const fake_device::Lock lock;
  std::string names;
  for (const std::string& name : fake_device::streams().contexts.at(static_cast<size_t>(device))) {
    names += (names.empty() ? "" : ",") + name;
  }
  return names;
}
void reset_fake_contexts() {
  const fake_device::Lock lock;
  for (auto& names : fake_device::streams().contexts) names.clear();
}

FakeDeviceFailure::FakeDeviceFailure() { fake_device::has_failed = true; }
FakeDeviceFailure::~FakeDeviceFailure() { fake_device::has_failed = false; }

void run_all_fake_streams() {
  const fake_device::Lock lock;
  for (int device = 0; device < kFakeDevices; ++device) {
    for (int64_t id = 0; id < fake_device::kStreams; ++id) {
      fake_device::Queue& queue = fake_device::queue_of(device, id);
      queue.run_to(queue.end());
    }
  }
}

}  // namespace distrain::testing
